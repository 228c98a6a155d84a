"""Adapt a served head to its traffic: acceptance length there and on the old prompts, before and after.

    mkdir -p runs && tar -xJf assets/smollm2_texts.tar.xz -C runs
    python benchmarks/adapt.py recipes/smollm2_135m.yaml --head assets/smollm2_head --old runs/smollm2_texts \\
        run_dir=runs/adapt

A server with --adapt-memory answers --requests questions about Python's standard library, which a chat head has hardly
seen. `headstart adapt --once` trains a candidate on them, with states of --old, the run that the head was trained in,
as the features that are replayed. Then the head as it was and the one that is served at the end decode --questions
further questions, and held-out prompts of the old run. The table shows the acceptance length with the recipe's tree,
and how it changed with a 95 % interval over prompts.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

import torch
from block_quality import target_for
from own_domain import before_and_after, python_questions
from rich.console import Console

from headstart.common.files import read_json, read_jsonl
from headstart.common.progress import Progress
from headstart.data_pipelines.features.batches import Sample
from headstart.data_pipelines.features.features import tap
from headstart.data_pipelines.features.shards import stored_taps
from headstart.data_pipelines.prompts.responses import read_texts
from headstart.inference.report.command import machine
from headstart.inference.report.questions import Prompt
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.tokenizer import load_tokenizer
from headstart.recipes import Recipe, run_command
from headstart.recipes.command_line import named_recipe, recipe_parser
from headstart.trainers.refresh.candidate import Snapshot

COMMAND = [sys.executable, "-m", "headstart.cli"]


def write_old_features(recipe: Recipe, head: Path, old: Path, count: int) -> Path:
    """The states of the first `count` texts of an earlier run, as a store."""
    folder = recipe.run_dir / "old_features"
    if folder.exists():
        return folder
    target = target_for([head], recipe)
    taps = stored_taps(target.taps, target.config.num_layers)
    samples = []
    with Progress("states of the old texts", count, "texts") as progress:
        for text in read_texts(old / "responses" / "train-00000.jsonl")[:count]:
            states = tap(target, [text.tokens])
            tokens, mask = torch.tensor(text.tokens), torch.tensor(text.loss_mask)
            samples.append(Sample(tokens, mask, states.taps.clone(), states.last_hidden.clone()))
            progress.advance(1)
    folder.parent.mkdir(parents=True, exist_ok=True)
    Snapshot("old", samples, []).save(folder, taps)
    return folder


@contextmanager
def serving(arguments: list[str], log: Path) -> Iterator[str]:
    """A server of its own, on a free port; yields its address."""
    with log.open("w") as out:
        server = subprocess.Popen(
            [*COMMAND, "serve", *arguments, "--port", "0", "--adapt-memory", "2", "--max-queue", "4096"],
            stdout=out,
            stderr=out,
        )
    try:
        while "chat page" not in log.read_text():
            if server.poll() is not None:
                raise SystemExit(f"error: the server has ended: {log.read_text()}")
            time.sleep(0.2)
        yield log.read_text().partition("http://")[2].partition("/")[0]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def ask(address: str, most: int, question: str) -> str:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": most, "temperature": 0}
    request = Request(
        f"http://{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def adapt(recipe: Recipe, given: argparse.Namespace, console: Console) -> Path:
    """Serve, ask, train, judge; returns the head that is served at the end."""
    old = write_old_features(recipe, given.head, given.old, given.replay)
    arguments = [given.recipe, *given.overrides, f"decode.head={given.head}", f"data.store={old}"]
    questions = python_questions(recipe.seed)[given.questions :][: given.requests]
    shutil.rmtree(recipe.run_dir / "versions", ignore_errors=True)
    with serving(arguments, recipe.run_dir / "server.log") as address:
        started = time.perf_counter()
        with ThreadPoolExecutor(16) as clients, Progress("questions", len(questions), "answers") as progress:
            for _ in clients.map(partial(ask, address, recipe.decode.max_new_tokens), questions):
                progress.advance(1)
        console.print(f"traffic: {time.perf_counter() - started:.0f} s")
        before = os.times()
        started = time.perf_counter()
        own = ["--server", f"http://{address}", "--once", "--steps", str(given.steps)]
        subprocess.run([*COMMAND, "adapt", *arguments, *own], check=True)
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        console.print(
            f"one candidate: {cpu / 60:.1f} CPU minutes, {(time.perf_counter() - started) / 60:.1f} by the clock"
        )
    versions = recipe.run_dir / "versions"
    return versions / read_json(versions / "served.json")["served"]


def run(recipe: Recipe, given: argparse.Namespace) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    recipe.run_dir.mkdir(parents=True, exist_ok=True)
    heads = {"before": given.head, "after": adapt(recipe, given, console)}
    console.print((recipe.run_dir / "versions" / "verdicts.jsonl").read_text())
    target = target_for(heads.values(), recipe)
    python = [chat_tokens(recipe, question) for question in python_questions(recipe.seed)[: given.questions]]
    old = [row["tokens"] for row in read_jsonl(given.old / "prompts" / "heldout.jsonl")][: given.questions]
    sets = {
        "Python questions": [Prompt(each, "Python questions") for each in python],
        "old prompts": [Prompt(each, "old prompts") for each in old],
    }
    console.print(before_and_after(heads, sets, target, recipe))


def chat_tokens(recipe: Recipe, question: str) -> list[int]:
    """The prompt that a server makes of a question."""
    template = ChatTemplate(load_tokenizer(Path(recipe.target.path)))
    return template.tokens([{"role": "user", "content": question}])


def options(doc: str | None) -> tuple[Recipe, argparse.Namespace]:
    parser = recipe_parser(doc)
    parser.add_argument("--head", required=True, type=Path, help="folder of the head that is served at first")
    parser.add_argument("--old", required=True, type=Path, help="run folder with the texts that the head has learned")
    parser.add_argument("--replay", type=int, default=128, help="old texts that may be replayed (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=320, help="questions of the traffic (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=32, help="prompts to measure on (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="of the candidate (default: %(default)s)")
    given = parser.parse_intermixed_args()
    return named_recipe(given), given


if __name__ == "__main__":
    run_command(__doc__, run, read=options)
