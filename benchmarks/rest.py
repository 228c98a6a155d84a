"""Do drafts that are never accepted cost more than a twentieth? In `generate`, chat, the report and the server.

    OMP_NUM_THREADS=1 python benchmarks/rest.py assets/demo_target

The target has the sizes and the tokenizer of the given one, and random weights: it accepts next to nothing from a head
of random weights or from prompt lookup. Seeded texts of 200 tokens are decoded with drafts and without, in turn, and
their CPU seconds compared; both write the same tokens. Exit code 1 if a ratio is below 0.95.
"""

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import torch
from rich.console import Console
from soak import start
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headstart.chat import Chat
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import draft_vocab, new_head, save_head
from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.speculation import SpeculationByLoad
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.report.methods import Method
from headstart.inference.report.rounds import run_batch
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.tokenizer import load_tokenizer
from headstart.recipes.schema_heads import Eagle3Section

TOKENS, LEAST_SHARE = 200, 0.95
PROMPT = "a b a b a b"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
Write = Callable[[bool, int], object]  # a text with drafts or without, of this seed


def make_target(base: Path, folder: Path) -> None:
    config = AutoConfig.from_pretrained(base)
    config.eos_token_id, config.initializer_range = None, 0.1
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(base, eos_token=None)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def make_head(target: Path, folder: Path) -> None:
    frozen, section = FrozenTarget.from_folder(target, torch.float32), Eagle3Section(kind="eagle3")
    counts = torch.ones(frozen.config.vocab_size, dtype=torch.long)
    save_head(new_head(section, frozen, draft_vocab(section, counts), 0), folder)


def fronts(target: Path, head: Path | None) -> dict[str, Write]:
    """Each way to write a text in this process."""

    loaded = SpeculativeModel.from_folders(target, head, dtype="float32")
    loaded.target.fast_form.finish()

    def fresh() -> SpeculativeModel:
        """A model that has not learnt yet that drafts should rest."""
        assert loaded.speculation is not None
        speculation = SpeculationByLoad(loaded.speculation.costs)
        return SpeculativeModel(loaded.target, loaded.drafter, speculation=speculation)

    model_of = {name: fresh() for name in ("generate", "chat", "report")}
    template = ChatTemplate(load_tokenizer(target))
    prompt, sampling = template.encode_text(PROMPT), Sampling(1.0)

    def by_generate(drafts: bool, seed: int) -> None:
        found = model_of["generate"]
        chosen = found if drafts else SpeculativeModel(found.target)
        chosen.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=True, top_k=0, seed=seed)

    chat = Chat(model_of["chat"], template, sampling, TOKENS, Console(file=io.StringIO()))

    def by_chat(drafts: bool, seed: int) -> None:
        chat.has_drafts, chat.sampling, chat.turns = drafts, replace(sampling, seed=seed), []
        chat.answer(PROMPT)

    def by_report(drafts: bool, seed: int) -> None:
        found = model_of["report"]
        method = Method("drafts", found.drafter, found.speculation) if drafts else Method("plain")
        run_batch(method, found.target, [prompt], TOKENS, replace(sampling, seed=seed))

    return {"generate": by_generate, "chat": by_chat, "report": by_report}


def compare(name: str, write: Write, clock: Callable[[], float], rounds: int) -> bool:
    """Print the speed with drafts relative to plain decoding's; returns whether it is high enough."""
    seconds = {True: 0.0, False: 0.0}
    for number in range(-1, rounds):  # the first round is not counted: it compiles and allocates
        for drafts in (number % 2 == 0, number % 2 == 1):
            before = clock()
            write(drafts, number + 1)
            seconds[drafts] += clock() - before if number >= 0 else 0.0
    share = seconds[False] / seconds[True]
    print(f"{name}: {share:.3f} of plain decoding's speed ({seconds[False] / rounds:.2f} s of CPU a text)", flush=True)
    return share >= LEAST_SHARE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="folder of the model whose sizes and tokenizer the target has")
    parser.add_argument("--rounds", type=int, default=8, help="texts of each kind (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        target, head = Path(made) / "target", Path(made) / "head"
        make_target(arguments.base, target)
        make_head(target, head)
        held = list[bool]()
        for drafter, folder in (("random head", head), ("prompt lookup", None)):
            for front, write in fronts(target, folder).items():
                held.append(compare(f"{front}, {drafter}", write, time.process_time, arguments.rounds))
            options = [
                "--target",
                str(target),
                "--dtype",
                "float32",
                *([] if folder is None else ["--head", str(folder)]),
            ]
            server = start(options)
            process, fields = (
                psutil.Process(server.process.pid),
                {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1},
            )

            def ask(drafts: bool, seed: int, url: str = server.url, fields: dict[str, object] = fields) -> None:
                body = {**fields, "seed": seed, "speculative": drafts}
                httpx.post(f"{url}/v1/completions", json=body, timeout=900).raise_for_status()

            def cpu(process: psutil.Process = process) -> float:
                return float(sum(process.cpu_times()[:2]))

            held.append(compare(f"server, {drafter}", ask, cpu, arguments.rounds))
            server.process.terminate()
            server.process.communicate()
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
