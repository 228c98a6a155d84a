"""llama.cpp and headstart on the same questions in turn: the speed of decoding, plain and with drafts.

    make bench-llamacpp QUESTIONS=question.jsonl    # SIZE=1.2B: the pair in a larger model's shape (widen.py)
    python benchmarks/llamacpp.py --llamacpp .venv-llamacpp recipes/smollm2_135m.yaml decode.head=assets/smollm2_head \\
        report.prompts=question.jsonl report.num_prompts=10 decode.max_new_tokens=96 report.threads=2

Every method continues the first turn of each question greedily, in the target's chat template and with the same token
ids, until the answer ends or decode.max_new_tokens are written. Methods take turns, prompt by prompt, after each has
decoded the longest prompt once. The time until the first token, which reads the prompt, is left out on both sides.

Ours are float32 and, where the processor computes in it, bfloat16, each plain and with the head and repeats, and so is
the q8_0 file, kept in 8 bits. Those of llama.cpp decode GGUF files that its own converter writes from the same
safetensors: bf16, plain, with ngram-simple, and with the head if llama.cpp can draft with it (EAGLE-3.0); and q8_0,
with weights rounded to 8 bits. *x best* is the rate over that of llama.cpp's fastest mode in bf16, *x own plain* over
plain decoding from the same weights in the same engine; *same text* counts the texts that equal those of that plain
decoding.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch
from rich.console import Console
from rich.table import Table

from headstart.common.progress import Progress
from headstart.heads.formats.commands import GGUF
from headstart.heads.formats.export import CONVERTER, export
from headstart.heads.target_config import TargetConfig, folder_of
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.build import load_drafting_head
from headstart.inference.engine.loop import loop_of
from headstart.inference.generate.loading import OWN_HEAD, taps_to_read
from headstart.inference.report.command import machine, report_prompts
from headstart.inference.report.methods import Method, build_methods
from headstart.inference.report.questions import QuestionTemplate
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.loading import has_bfloat16
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.recipes.command_line import recipe_from_command_line

Result = TypeVar("Result")
PATIENCE = 120  # seconds until a server must have loaded its model
NGRAM = ("--spec-type", "ngram-simple")
WITHOUT_AMX = "--no-repack"
BEST_OF = "llama.cpp bf16"  # rows of the lossless engine to beat


class ForbiddenInstructionError(ValueError):
    """llama.cpp ended with an illegal instruction, as with int8 weights laid out for AMX on a virtual machine."""


@dataclass(frozen=True)
class Decoded:
    """One text, and the time and passes of the target that its tokens after the first took."""

    tokens: list[int]
    seconds: float
    passes: int


@dataclass
class Row:
    """One method, with the texts that it wrote."""

    name: str
    plain: str  # the row of plain decoding from the same weights
    decode: Callable[[list[int]], Decoded]
    texts: list[Decoded] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Those after the first, which the passes over the prompts chose."""
        return sum(len(text.tokens) - 1 for text in self.texts)

    @property
    def rate(self) -> float:
        return self.tokens / sum(text.seconds for text in self.texts)


def our_rows(recipe: Recipe, path: str | Path, dtype: str, name: str) -> Iterator[Row]:
    """Plain decoding, and the head with repeats, of a model in one number format."""
    changed = recipe.target.model_copy(update={"path": str(path), "dtype": dtype})
    baselines = recipe.report.model_copy(update={"baselines": ("plain", "repeats")})
    recipe = recipe.model_copy(update={"target": changed, "report": baselines})
    target = TargetModel.load_to_answer(recipe.target, taps_to_read(recipe))
    heads = {OWN_HEAD: load_drafting_head(recipe.head_in_use, target)}

    def decoding(method: Method) -> Callable[[list[int]], Decoded]:
        def decode(prompt: list[int]) -> Decoded:
            loop = loop_of(target, [Request(prompt, recipe.decode.max_new_tokens, Sampling())], method.drafter, 1)
            steps = loop.run()
            next(steps)  # the prefill and the first token
            started = time.perf_counter()
            for _ in steps:
                pass
            seconds, [generation] = time.perf_counter() - started, loop.generations.values()
            target.fast_form.finish()
            return Decoded(generation.tokens, seconds, generation.stats.steps)

        return decode

    for method in build_methods(recipe, target, heads):
        drafts = "plain" if method.drafter is None else "head and repeats"
        yield Row(f"headstart {name}, {drafts}", f"headstart {name}, plain", decoding(method))


class LlamaCpp:
    """The llama.cpp in an environment's folder: its sources with the converter, and its server."""

    def __init__(self, environment: Path) -> None:
        folders = (environment.absolute() / name for name in ("bin", "llama.cpp"))
        os.environ["PATH"] = os.pathsep.join([*map(str, folders), os.environ["PATH"]])  # where an export looks for it
        self.server = environment / "build/bin/llama-server"
        package = environment / "PKG-INFO"
        if not package.is_file() or not self.server.is_file():
            raise ValueError(f"--llamacpp: {environment} holds no llama.cpp; make bench-llamacpp compiles one")
        self.version = re.findall(r"^Version: (.*)$", package.read_text(), re.MULTILINE)[0]

    def converted(self, model: Path, outtype: str, folder: Path) -> Path:
        """The model as a GGUF file in `folder`, written unless it is there."""
        file = folder / f"{model.resolve().name}-{outtype}.gguf"
        if not file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            command = [CONVERTER, str(model), "--outtype", outtype, "--outfile", str(partial)]
            with file.with_suffix(".log").open("w") as log:
                subprocess.run(command, stdout=log, stderr=log, check=True)
            partial.replace(file)
        return file

    @contextmanager
    def serving(self, file: Path, threads: int, *options: str) -> Iterator[Callable[[list[int], int], dict[str, Any]]]:
        """A function that continues a prompt greedily in a server of its own, and returns the server's answer."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [self.server, "-m", file, "--port", port, "--threads", threads, "--parallel", 1, "--no-ui", *options]
        log = file.with_name(f"{file.stem}{'-'.join(['', *options]).replace('/', '_')[:80]}.log")
        with log.open("w") as lines:
            server = subprocess.Popen([*map(str, command)], stdout=lines, stderr=lines)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as http:
                wait_for(http, server, log)
                yield lambda prompt, most: completion(http, prompt, most)
        finally:
            server.terminate()
            server.wait()


def wait_for(http: httpx.Client, server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while server.poll() is None and time.monotonic() < deadline:
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    if server.poll() == -signal.SIGILL:
        raise ForbiddenInstructionError(f"it ended with an instruction that this machine does not allow; {log}")
    raise ValueError(f"llama.cpp's server did not start; {log} says why")


def completion(http: httpx.Client, prompt: list[int], most: int) -> dict[str, Any]:
    greedy = {"samplers": ["top_k"], "top_k": 1, "temperature": 0}  # no other sampler reads the logits
    body = {"prompt": prompt, "n_predict": most, "cache_prompt": False, "return_tokens": True, **greedy}
    answer = http.post("/completion", json=body).raise_for_status()
    content: dict[str, Any] = answer.json()
    return content


def decoded(answer: dict[str, Any]) -> Decoded:
    """The server counts the time after the first token, and the accepted draft tokens, which took no pass."""
    times = answer["timings"]
    passes = times["predicted_n"] - 1 - times.get("draft_n_accepted", 0)
    return Decoded(answer["tokens"], times["predicted_ms"] / 1000, passes)


def head_as_gguf(recipe: Recipe, folder: Path) -> Path | None:
    """The recipe's head for llama.cpp; a line says why if llama.cpp cannot draft with it."""
    changes = {"run_dir": folder / "head", "export": recipe.export.model_copy(update={"format": "gguf"})}
    changed = recipe.model_copy(
        update={**changes, "decode": recipe.decode.model_copy(update={"head": recipe.head_in_use})}
    )
    shutil.rmtree(folder / "head", ignore_errors=True)
    try:
        return export(changed) / GGUF
    except ValueError as error:
        print(f"without llama.cpp's draft-eagle3: {error}")
        return None


def measure(rows: list[Row], prompts: list[list[int]]) -> None:
    """Run every row on every prompt in alternation, the longest prompt first and uncounted."""
    for row in rows:
        row.decode(max(prompts, key=len))
    with Progress("llama.cpp and headstart", len(prompts) * len(rows), "texts") as progress:
        for number, prompt in enumerate(prompts):
            for turn in range(len(rows)):
                row = rows[(number + turn) % len(rows)]
                row.texts.append(row.decode(prompt))
                progress.advance(1, row.name)


def table(rows: list[Row]) -> Table:
    by_name = {row.name: row for row in rows}
    best = max((row for row in rows if row.name.startswith(BEST_OF)), key=lambda row: row.rate)
    count = len(best.texts)
    found = Table(title=f"{count} prompts, greedy, without the time until the first token; x best: over {best.name}")
    for column in ("method", "tokens/s", "ms a token", "x best", "x own plain", "tokens a pass", "same text"):
        found.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in rows:
        plain = by_name[row.plain]
        same = sum(text.tokens == other.tokens for text, other in zip(row.texts, plain.texts, strict=True))
        found.add_row(
            row.name,
            f"{row.rate:.1f}",
            f"{1000 / row.rate:.1f}",
            f"{row.rate / best.rate:.2f}",
            f"{row.rate / plain.rate:.2f}",
            f"{row.tokens / sum(text.passes for text in row.texts):.2f}",
            f"{same}/{len(row.texts)}",
        )
    return found


def run(recipe: Recipe, llama: LlamaCpp) -> None:
    most, threads = recipe.decode.max_new_tokens, recipe.report.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    folder, target = recipe.run_dir / "llamacpp", folder_of(recipe.target)
    dtypes = ("bfloat16", "float32") if has_bfloat16(torch.device("cpu")) else ("float32",)
    files = {outtype: llama.converted(target, outtype, folder) for outtype in ("bf16", "q8_0")}
    ours = [*((target, dtype, dtype) for dtype in dtypes), (files["q8_0"], "float32", "q8_0")]
    rows = [row for each in ours for row in our_rows(recipe, *each)]
    with ExitStack() as servers:

        def add(outtype: str, name: str, *options: str) -> None:
            try:
                ask = servers.enter_context(llama.serving(files[outtype], threads, *options))
            except ForbiddenInstructionError as error:
                print(f"llama.cpp {outtype}, {name}, with {WITHOUT_AMX}: {error}")
                ask = servers.enter_context(llama.serving(files[outtype], threads, *options, WITHOUT_AMX))
            plain = f"llama.cpp {outtype}, plain"
            rows.append(Row(f"llama.cpp {outtype}, {name}", plain, lambda prompt: decoded(ask(prompt, most))))

        add("bf16", "plain")
        add("bf16", "ngram-simple", *NGRAM)
        if head := head_as_gguf(recipe, folder):
            add("bf16", "our head", "-md", str(head), "--spec-type", "draft-eagle3")
        add("q8_0", "plain")
        template = ChatTemplate.of(recipe.target)
        chat = QuestionTemplate(template, TargetConfig.from_folder(target).max_positions - most)
        prompts = [chat.shortened(each).tokens for each in report_prompts(recipe, template)]
        measure(rows, prompts)
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    console = Console(width=120)
    console.print(f"{about}; llama.cpp {llama.version}, compiled for this processor", highlight=False)
    console.print(table(rows))
    written = {row.name: [[text.tokens, text.seconds, text.passes] for text in row.texts] for row in rows}
    (folder / "texts.json").write_text(json.dumps(written))


def from_command_line(doc: str | None, work: Callable[[Recipe, LlamaCpp], Result]) -> Result:
    """Do the work with the recipe and the llama.cpp of the command line; an error ends the process with one line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--llamacpp", type=Path, default=Path(".venv-llamacpp"))
    given, arguments = parser.parse_known_args()
    recipe = recipe_from_command_line(doc, arguments)
    try:
        return work(recipe, LlamaCpp(given.llamacpp))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    from_command_line(__doc__, run)
