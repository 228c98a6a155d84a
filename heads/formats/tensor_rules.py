"""Rules for tensors: names, shapes, finite numbers, the draft vocabulary's map, the embedding."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from headstart.heads.files import has_weight_dtype
from headstart.heads.formats.subject import Subject, Violation, tensor_error
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import misfits
from headstart.heads.target_config import TargetConfig
from headstart.heads.vocab import DraftVocab

MAPS = ("d2t", "t2d", "token_map")  # tensors of ids, not of weights
READ_BY_ALL = re.compile(r"fc\.weight|lm_head\.weight|lm_heads\.\d+\.weight")  # every guess depends on these


def names_and_shapes(subject: Subject, engine: str) -> Iterator[Violation]:
    """Every missing, misshapen or unknown tensor; engines silently ignore most of them."""
    if subject.missing_sizes:
        return
    with torch.device("meta"):  # the tensors of an empty head with the sizes in config.json
        expected = subject.layout.needed(subject, engine)
    optional = subject.layout.optional - expected.keys()
    for name, found, allowed in misfits(expected, subject.tensors):
        if name in optional:
            continue
        meant = subject.layout.rename(name.removeprefix("model."))
        if name not in expected and meant in expected.keys() | optional:
            allowed = f"{meant} is allowed"
        if name in ("mask_hidden", "mask_embedding") and name not in expected:
            allowed = "no such tensor is allowed: the slots are filled with the embedding of mask_token_id"
        yield tensor_error(engine, name, found, allowed)


def layer_sizes(subject: Subject) -> dict[str, Any]:
    """A head's config.json without its rotary embedding, which has no weights, and without our own section."""
    return {key: value for key, value in subject.config.items() if "rope" not in key and key != "headstart"}


def sized_target(subject: Subject) -> tuple[FrozenTarget, DraftVocab]:
    """A target without weights of the sizes in a head's config.json, and a draft vocabulary."""
    config = subject.config
    hidden_size = config.get("target_hidden_size") or config["hidden_size"]
    target = replace(subject.frozen.config, hidden_size=hidden_size, vocab_size=config["vocab_size"])
    return target_of_sizes(target, subject.draft_vocab_size)


def target_of_sizes(target: TargetConfig, drafted: int) -> tuple[FrozenTarget, DraftVocab]:
    vocab = DraftVocab(torch.arange(drafted, device="cpu"), max(drafted, target.vocab_size))
    lm_head = torch.empty(vocab.target_size, target.hidden_size)
    return FrozenTarget(target, lm_head, lm_head[0], None, lm_head), vocab


def number_formats(subject: Subject, engine: str) -> Iterator[Violation]:
    if subject.files.config.get("quantization_config") and engine not in subject.layout.float8:
        allowed = "weights of 16 bits or more are required: export.dtype=bfloat16, or export an EAGLE head for vllm"
        yield Violation(engine, "error", "quantization_config", "float8", allowed)
    for name, tensor in sorted(subject.files.tensors.items()):
        if name.removeprefix("model.") not in MAPS and not has_weight_dtype(tensor):
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield tensor_error(engine, name, dtype, "a floating-point format of 16 bits or more is required")


def finite(subject: Subject, engine: str) -> Iterator[Violation]:
    for name, tensor in sorted(subject.files.tensors.items()):
        if has_weight_dtype(tensor) and not bool(torch.isfinite(tensor).all()):
            yield tensor_error(engine, name, "infinity or NaN", "only finite numbers are allowed")


def not_empty(subject: Subject, engine: str) -> Iterator[Violation]:
    """A projection or lm_head of zeros only: the head's guesses do not depend on the text."""
    for name, tensor in sorted(subject.tensors.items()):
        if READ_BY_ALL.fullmatch(name) and tensor.numel() and not bool(tensor.any()):
            yield tensor_error(engine, name, "zeros only", "trained weights are required; train or copy it again")


WEIGHTS = (number_formats, finite, not_empty)  # rules for the weights of every layout


def vocabulary_map(subject: Subject, engine: str) -> Iterator[Violation]:
    """`d2t` holds offsets, target id minus draft id. With ids instead, no draft is ever accepted and nothing fails."""
    d2t, t2d, vocab_size = subject.tensors.get("d2t"), subject.tensors.get("t2d"), subject.frozen.config.vocab_size
    if engine == "speculators" and t2d is None and subject.draft_vocab_size != vocab_size:
        yield tensor_error(engine, "t2d", None, f"shape [{vocab_size}], of bool, is required")
    if d2t is None or d2t.ndim != 1:
        return
    if engine == "vllm" and subject.draft_vocab_size == vocab_size:
        allowed = "remove it: vLLM refuses it when the head drafts the whole vocabulary"
        yield tensor_error(engine, "d2t", d2t[:4].tolist(), allowed)
    try:
        DraftVocab.from_tensors({**subject.tensors}, vocab_size)
    except ValueError as failed:
        yield tensor_error(engine, "d2t", d2t[:4].tolist(), str(failed))
        return
    if t2d is None and len(d2t) > 1 and bool((d2t.diff() > 0).all()):
        allowed = "offsets (target id minus draft id) are required; these rise at every step, as ids would"
        yield tensor_error(engine, "d2t", d2t[:4].tolist(), allowed)
