"""The heads that the checks in other engines serve: one of every kind for the bundled target, with its export format.

Most are the bundled head with one part changed. The EAGLE-1, P-EAGLE, Medusa and block heads, in runs/interop, are
briefly trained first if they are missing.
"""

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headstart.heads.base import DraftHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.checkpoint import load_head_for, save_head
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.heads.vocab import DraftVocab
from headstart.recipes import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[2]
WORK = Path("runs/interop")
TARGET, DEMO_HEAD = Path("assets/demo_target"), Path("assets/demo_head")
DRAFT_TOKENS = 3
TRAIN_BRIEFLY = (
    *("data.num_prompts=96", "data.response_tokens=64", "data.heldout_samples=8"),
    *("train.steps=100", "train.eval_prompts=2"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A head, its export format, the speculative method that vLLM serves it with, and whether in one pass."""

    make: Callable[[FrozenTarget], Path]
    format: str = "vllm"
    method: str | None = "eagle3"
    parallel: bool = False


def demo(frozen: FrozenTarget) -> Path:
    """The bundled EAGLE-3.1 head: the whole vocabulary, the engines' default taps."""
    return DEMO_HEAD


def plain(frozen: FrozenTarget) -> Path:
    """The bundled head without the norms of EAGLE-3.1, with `fc` scaled down to make up for them."""
    fc = demo_head(frozen).fc.weight / 16  # the target's hidden states have RMS 11 to 27
    return changed(frozen, "plain", {"fc.weight": fc}, fc_norm=False, norm_output=False)


def reduced(frozen: FrozenTarget) -> Path:
    """The bundled head without every third token of its vocabulary."""
    ids = torch.tensor([token for token in range(frozen.config.vocab_size) if token % 3])
    return changed(frozen, "reduced", {}, DraftVocab(ids, frozen.config.vocab_size))


def moved(frozen: FrozenTarget) -> Path:
    """The bundled head, reading the hidden states one layer after those that it was trained on."""
    return changed(frozen, "moved", {}, taps=tuple(tap + 1 for tap in frozen.config.default_taps()))


def four_taps(frozen: FrozenTarget) -> Path:
    """The bundled head with a fourth hidden state of little weight."""
    old, hidden = demo_head(frozen), frozen.config.hidden_size
    fc = torch.cat([old.fc.weight, 0.1 * old.fc.weight[:, -hidden:]], dim=1)
    more = {"fc.weight": fc, "fc_norm.3.weight": torch.ones(hidden)}
    return changed(frozen, "four_taps", more, taps=(*old.taps, frozen.config.num_layers - 1))


def other_norms(frozen: FrozenTarget) -> Path:
    """The bundled head with the norms that only published heads have: one over all taps, one before the residual."""
    more = {"input_norm.weight": torch.ones(len(demo_head(frozen).taps) * frozen.config.hidden_size)}
    return changed(frozen, "other_norms", more, fc_norm=False, norm_before_fc=True, norm_before_residual=True)


def changed(frozen: FrozenTarget, name: str, weights: Any, vocab: DraftVocab | None = None, **shape: Any) -> Path:
    """The bundled head with these weights, this draft vocabulary and these fields of its shape replaced."""
    old = demo_head(frozen)
    vocab = vocab or old.vocab
    head = Eagle3Head(dataclasses.replace(old.shape, **shape), frozen, vocab)
    state = {**old.state_dict(), "lm_head.weight": old.lm_head.weight[vocab.ids], **weights}
    head.load_state_dict({parameter: state[parameter] for parameter in head.state_dict()})
    return saved(head, name)


def demo_head(frozen: FrozenTarget) -> Eagle3Head:
    head = load_head_for(DEMO_HEAD, frozen)
    assert isinstance(head, Eagle3Head)
    return head


def saved(head: DraftHead, name: str) -> Path:
    folder = WORK / "heads" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_head(head, folder)
    return folder


def eagle1(frozen: FrozenTarget) -> Path:
    return trained("eagle1", "trainers/eagle.py", "recipes/tiny_eagle1.yaml")


def peagle(frozen: FrozenTarget) -> Path:
    """Two layers that draft four levels in one pass, one more than vLLM is asked for."""
    head = "head={kind: peagle, num_layers: 2, depths: 4, norms: true}"
    fields = ("train.unroll=4", f"decode.depth={DRAFT_TOKENS}", f"data.folder={WORK / 'peagle'}")
    return trained("peagle", "trainers/eagle.py", "recipes/tiny.yaml", head, *fields)


def medusa(frozen: FrozenTarget) -> Path:
    """Four Medusa heads; vLLM uses one per draft token and takes the likeliest token of each."""
    return trained("medusa", "trainers/medusa.py", "recipes/tiny_medusa.yaml", f"data.folder={WORK / 'medusa'}")


def dflash(frozen: FrozenTarget) -> Path:
    return block(frozen, "dflash")


def dflash_reduced(frozen: FrozenTarget) -> Path:
    """The 700 most frequent tokens, in one layer."""
    return block(frozen, "dflash_reduced", "head.draft_vocab_size=700", "head.num_layers=1")


def jetspec(frozen: FrozenTarget) -> Path:
    """The DFlash head, made causal within the block."""
    old = load_head_for(dflash(frozen), frozen)
    assert isinstance(old, BlockHead)
    reaches = tuple(dataclasses.replace(reach, causal=True) for reach in old.shape.reaches)
    head = BlockHead(dataclasses.replace(old.shape, reaches=reaches), frozen, old.vocab)
    head.load_state_dict(old.state_dict())
    return saved(head, "jetspec")


def block(frozen: FrozenTarget, name: str, *fields: str) -> Path:
    """A DFlash head that drafts DRAFT_TOKENS tokens; its slots see each other, so vLLM must fill as many of them.

    All layers get the norm of keys of the first: on a CPU vLLM applies that one in every layer.
    """
    sizes = f"head.block_size={DRAFT_TOKENS + 1}", f"train.unroll={DRAFT_TOKENS}", f"decode.depth={DRAFT_TOKENS}"
    fields = (*sizes, "head.markov_rank=0", f"data.folder={WORK / 'dflash'}", *fields)
    head = load_head_for(trained(name, "trainers/block.py", "recipes/tiny_block.yaml", *fields), frozen)
    state = head.state_dict()
    for key in state:
        if key.endswith("self_attn.k_norm.weight"):
            state[key] = state["layers.0.self_attn.k_norm.weight"]
    head.load_state_dict(state)
    return saved(head, name)


def trained(name: str, script: str, recipe: str, *fields: str) -> Path:
    run_dir = WORK / name
    if not (run_dir / "head/config.json").is_file():
        command = [sys.executable, script, recipe, f"run_dir={run_dir}"]
        subprocess.run([*command, *fields, *TRAIN_BRIEFLY], check=True)
    return run_dir / "head"


CASES = {
    "EAGLE-3.1, whole vocabulary": Case(demo),
    "EAGLE-3, without norms of taps": Case(plain),
    "reduced vocabulary": Case(reduced),
    "other taps": Case(moved),
    "four taps": Case(four_taps),
    "other norms": Case(other_norms),
    "speculators' layout, reduced": Case(reduced, "speculators", None),
    "speculators' layout, four taps": Case(four_taps, "speculators", None),
    "EAGLE-1": Case(eagle1, method="eagle"),
    "P-EAGLE": Case(peagle, parallel=True),
    "Medusa, vLLM's layout": Case(medusa, method="medusa"),
    "DFlash": Case(dflash, method="dflash"),
    "DFlash, one layer, reduced": Case(dflash_reduced, method="dflash"),
    "DFlash, speculators' layout": Case(dflash, "speculators", None),
    "JetSpec": Case(jetspec, method="dflash"),
}


def heldout_prompts() -> Path:
    path = WORK / "eagle1/prompts/heldout.jsonl"
    if not path.is_file():
        command = [sys.executable, "-m", "headstart.cli", "prompts", "recipes/tiny_eagle1.yaml"]
        subprocess.run([*command, f"run_dir={WORK / 'eagle1'}", *TRAIN_BRIEFLY], check=True)
    return path


def export_recipe(source: Path, case: Case) -> Recipe:
    run_dir = WORK / "exports" / f"{source.parent.name}_{source.name}_{case.format}"
    shutil.rmtree(run_dir, ignore_errors=True)
    given = [f"run_dir={run_dir}", f"export.format={case.format}", f"decode.head={source}"]
    return load_recipe(ROOT / "recipes/tiny_full.yaml", [*given, f"decode.depth={DRAFT_TOKENS}"])
