"""Does vLLM draft with our exports what we draft? Every kind of head on the bundled target, counts and texts compared.

    make check-vllm
    python tests/interop/check_vllm.py path/to/vllm/bin/python [NAME ...]

Decodes the same prompts greedily with a chain of drafts, here and in vLLM, and compares texts, the number of steps and
how many drafts were accepted at each depth. Prints the table of docs/interop.md. Exit code 1 if anything differs. The
EAGLE-1 and Medusa heads of runs/interop are trained first, briefly, where they are missing.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from heads.build import load_head, save_head
from heads.eagle3 import Eagle3Head
from heads.export import export
from heads.frozen import FrozenTarget
from heads.vocab import DraftVocab
from inference.decode import Request, stream
from inference.drafters.growth import Dynamic
from inference.drafters.head import HeadDrafter
from inference.target import TargetModel
from recipes import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[2]
WORK = Path("runs/interop")
TARGET, DEMO_HEAD = Path("assets/demo_target"), Path("assets/demo_head")
DRAFT_TOKENS, NEW_TOKENS, NUM_PROMPTS = 3, 64, 6
TRAIN_BRIEFLY = (
    "data.num_prompts=96",
    "data.response_tokens=64",
    "data.heldout_samples=8",
    "train.steps=100",
    "train.eval_prompts=2",
    "log.wandb=disabled",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A head, how it is exported and how vLLM is told to serve it."""

    make: Callable[[FrozenTarget], Path]
    format: str = "vllm"
    method: str | None = "eagle3"


def demo(frozen: FrozenTarget) -> Path:
    """EAGLE-3.1, the whole vocabulary, the taps where every engine looks."""
    return DEMO_HEAD


def reduced(frozen: FrozenTarget) -> Path:
    """The same with every third token out of its vocabulary."""
    ids = torch.tensor([token for token in range(frozen.config.vocab_size) if token % 3])
    return changed(frozen, "reduced", frozen.config.default_taps(), DraftVocab(ids, frozen.config.vocab_size))


def moved(frozen: FrozenTarget) -> Path:
    """The same reading the hidden states next to those that it was trained on."""
    taps = tuple(tap + 1 for tap in frozen.config.default_taps())
    return changed(frozen, "moved", taps, DraftVocab.full(frozen.config.vocab_size))


def changed(frozen: FrozenTarget, name: str, taps: tuple[int, ...], vocab: DraftVocab) -> Path:
    old = load_head(DEMO_HEAD, frozen)
    assert isinstance(old, Eagle3Head)
    head = Eagle3Head(dataclasses.replace(old.shape, taps=taps), frozen.config, vocab, frozen.embedding)
    weights = old.state_dict()
    head.load_state_dict({**weights, "lm_head.weight": weights["lm_head.weight"][vocab.ids]})
    return saved(head, name)


def four_taps(frozen: FrozenTarget) -> Path:
    """The same with a fourth hidden state, which counts for little."""
    old = load_head(DEMO_HEAD, frozen)
    assert isinstance(old, Eagle3Head)
    hidden = frozen.config.hidden_size
    shape = dataclasses.replace(old.shape, taps=(*old.taps, frozen.config.num_layers - 1))
    head = Eagle3Head(shape, frozen.config, old.vocab, frozen.embedding)
    weights = old.state_dict()
    fourth = 0.1 * weights["fc.weight"][:, -hidden:]
    weights |= {"fc.weight": torch.cat([weights["fc.weight"], fourth], dim=1), "fc_norm.3.weight": torch.ones(hidden)}
    head.load_state_dict(weights)
    return saved(head, "four_taps")


def saved(head: Eagle3Head, name: str) -> Path:
    folder = WORK / "heads" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_head(head, folder)
    return folder


def eagle1(frozen: FrozenTarget) -> Path:
    run_dir = WORK / "eagle1"
    if not (run_dir / "head/config.json").is_file():
        command = [sys.executable, "trainers/eagle.py", "recipes/tiny_eagle1.yaml", f"run_dir={run_dir}"]
        subprocess.run([*command, *TRAIN_BRIEFLY], check=True)
    return run_dir / "head"


def medusa(frozen: FrozenTarget) -> Path:
    """Four heads, of which vLLM uses as many as it drafts tokens, each with its likeliest."""
    run_dir = WORK / "medusa"
    if not (run_dir / "head/config.json").is_file():
        command = [sys.executable, "trainers/medusa.py", "recipes/tiny_medusa.yaml", f"run_dir={run_dir}"]
        subprocess.run([*command, f"data.folder={run_dir}", *TRAIN_BRIEFLY], check=True)
    return run_dir / "head"


CASES = {
    "EAGLE-3.1, whole vocabulary": Case(demo),
    "reduced vocabulary": Case(reduced),
    "other taps": Case(moved),
    "four taps": Case(four_taps),
    "speculators' layout": Case(reduced, "speculators", None),
    "EAGLE-1": Case(eagle1, method="eagle"),
    "Medusa": Case(medusa, method="medusa"),
    "Medusa, reference layout": Case(medusa, "medusa", "medusa"),
}


def main() -> None:
    python, names = sys.argv[1], sys.argv[2:] or list(CASES)
    torch.set_num_threads(1)
    frozen = FrozenTarget.from_folder(TARGET, torch.float32)
    prompts = [json.loads(row)["tokens"] for row in heldout_prompts().read_text().splitlines()[:NUM_PROMPTS]]
    rows, versions = [], {}
    for name in names:
        case = CASES[name]
        source = case.make(frozen)
        recipe = export_recipe(source, case)
        folder = export(recipe)
        texts, counts = decode(recipe, source, prompts)
        theirs = in_vllm(python, folder, case, prompts)
        versions = theirs["versions"]
        same = sum(ours == its for ours, its in zip(texts, theirs["texts"], strict=True))
        mine = (counts.steps, counts.accepted_at_depth)
        rows.append((name, *mine, theirs["drafts"], theirs["accepted_at_depth"], same))
        print(*rows[-1], flush=True)  # each takes a minute or more
    print(table(rows, len(prompts), versions))
    sys.exit(0 if all(row[1:3] == row[3:5] and row[5] == len(prompts) for row in rows) else 1)


def heldout_prompts() -> Path:
    path = WORK / "eagle1/prompts/heldout.jsonl"
    if not path.is_file():
        command = [sys.executable, "-m", "data_pipelines.prompts", "recipes/tiny_eagle1.yaml"]
        subprocess.run([*command, f"run_dir={WORK / 'eagle1'}", *TRAIN_BRIEFLY], check=True)
    return path


def export_recipe(source: Path, case: Case) -> Recipe:
    folder = WORK / "exports" / f"{source.parent.name}_{source.name}_{case.format}"
    overrides = {"format": case.format, "head": source, "folder": folder, "overwrite": "true"}
    given = [f"export.{key}={value}" for key, value in overrides.items()]
    return load_recipe(ROOT / "recipes/tiny_full.yaml", [*given, f"decode.depth={DRAFT_TOKENS}"])


@dataclasses.dataclass
class Counts:
    """Steps that drafted, and at how many of them at least 1, 2, ... drafts were accepted."""

    steps: int = 0
    accepted_at_depth: list[int] = dataclasses.field(default_factory=lambda: [0] * DRAFT_TOKENS)

    @property
    def tau(self) -> float:
        return 1 + sum(self.accepted_at_depth) / self.steps


def decode(recipe: Recipe, source: Path, prompts: list[list[int]]) -> tuple[list[list[int]], Counts]:
    """Our own chain of drafts, counted as vLLM does: its last step drafts beyond the last token asked for."""
    frozen = FrozenTarget.from_folder(TARGET, torch.float32)
    target = TargetModel.load(recipe.target, load_head(source, frozen).taps)
    drafter = HeadDrafter(load_head(source, target.frozen), Dynamic.chain(DRAFT_TOKENS))
    texts, counts = [], Counts()
    for prompt in prompts:
        text: list[int] = []
        for block in stream(target, Request(prompt, NEW_TOKENS + DRAFT_TOKENS + 1), drafter):
            counts.steps += bool(text)  # the first token comes from the prompt's own pass
            for depth in range(len(block) - 1):
                counts.accepted_at_depth[depth] += 1
            text += block
            if len(text) >= NEW_TOKENS:
                break
        texts.append(text[:NEW_TOKENS])
    return texts, counts


def in_vllm(python: str, folder: Path, case: Case, prompts: list[list[int]]) -> dict[str, Any]:
    job, result = WORK / "job.json", WORK / "result.json"
    content = {
        "target": str(TARGET),
        "head": str(folder),
        "method": case.method,
        "draft_tokens": DRAFT_TOKENS,
        "prompts": prompts,
        "max_new_tokens": NEW_TOKENS,
        "result": str(result),
    }
    job.write_text(json.dumps(content))
    result.unlink(missing_ok=True)
    with (WORK / "vllm.log").open("a") as log:
        subprocess.run([python, "tests/interop/serve_in_vllm.py", str(job)], check=True, stdout=log, stderr=log)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def table(rows: list[tuple[Any, ...]], num_prompts: int, versions: dict[str, str]) -> str:
    lines = [
        ", ".join(f"{name} {found}" for name, found in versions.items()) + f"; {num_prompts} prompts x {NEW_TOKENS} "
        f"tokens, greedy, {DRAFT_TOKENS} drafts a step, float32",
        "",
        "| head | steps here | accepted at depth 1, 2, ... here | steps in vLLM | accepted there | same text |",
        "| --- | ---: | --- | ---: | --- | ---: |",
    ]
    for name, steps, accepted, drafts, theirs, same in rows:
        here, there = " ".join(map(str, accepted)), " ".join(map(str, theirs))
        lines.append(f"| {name} | {steps} | {here} | {drafts} | {there} | {same}/{num_prompts} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
