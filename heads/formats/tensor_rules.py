"""Rules for the tensors of EAGLE heads: names, shapes, finite numbers, the draft vocabulary's map, the embedding."""

import re
from collections.abc import Iterator

import torch

from headstart.heads.files import has_weight_dtype
from headstart.heads.formats.config_rules import num_captured_taps
from headstart.heads.formats.subject import MISSING, Subject, Violation, midlayer_name, tensor_error
from headstart.heads.vocab import DraftVocab

MAPS = ("d2t", "t2d", "token_map")  # tensors of ids, not of weights
READ_BY_ALL = re.compile(r"fc\.weight|lm_head\.weight|lm_heads\.\d+\.weight")  # every guess depends on these
OPTIONAL = {
    "eagle3": {"d2t", "t2d", "embed_tokens.weight"},
    "speculators": {"d2t", "t2d", "embed_tokens.weight"},
    "eagle1": {"fc.bias", "embed_tokens.weight"},
}


def names_and_shapes(subject: Subject, engine: str) -> Iterator[Violation]:
    """Every missing, misshapen or unknown tensor; engines silently ignore most of them."""
    if subject.missing_sizes:
        return
    num_taps = num_captured_taps(subject, engine) if subject.layout != "eagle1" else 1
    expected, optional = subject.expected_shapes(num_taps), OPTIONAL[subject.layout]
    yield from wrong_shapes(subject, engine, expected)
    for name in sorted(subject.tensors.keys() - expected.keys() - optional):
        meant = midlayer_name(name.removeprefix("model."))
        allowed = f"{meant} is allowed" if meant in expected | dict.fromkeys(optional) else "no such tensor is allowed"
        yield tensor_error(engine, name, list(subject.tensors[name].shape), allowed)


def wrong_shapes(subject: Subject, engine: str, expected: dict[str, tuple[int, ...]]) -> Iterator[Violation]:
    """The expected tensors that are missing, then those of another shape."""
    found = subject.tensors
    for name in sorted(expected.keys() - found.keys()):
        yield tensor_error(engine, name, MISSING, f"shape {list(expected[name])} is required")
    for name in sorted(expected.keys() & found.keys()):
        if tuple(found[name].shape) != expected[name]:
            yield tensor_error(engine, name, list(found[name].shape), f"shape {list(expected[name])} is required")


def spelling(subject: Subject, engine: str) -> Iterator[Violation]:
    """The EAGLE authors' code says midlayer, speculators layers.0; the serving engines read both."""
    wrong = {"eagle": "layers.0.", "speculators": "midlayer."}.get(engine)
    for name in sorted(subject.files.tensors) if subject.layout != "eagle1" and wrong else []:
        if name.startswith(str(wrong)):
            other = "midlayer." if wrong == "layers.0." else "layers.0."
            yield tensor_error(engine, name, name, f"{other}{name.removeprefix(str(wrong))} is allowed")


def number_formats(subject: Subject, engine: str) -> Iterator[Violation]:
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


def vocabulary_map(subject: Subject, engine: str) -> Iterator[Violation]:
    """`d2t` holds offsets, target id minus draft id. With ids instead, no draft is ever accepted and nothing fails."""
    d2t, t2d, vocab_size = subject.tensors.get("d2t"), subject.tensors.get("t2d"), subject.frozen.config.vocab_size
    if engine in ("eagle", "speculators") and t2d is None and subject.draft_vocab_size != vocab_size:
        yield tensor_error(engine, "t2d", MISSING, f"shape [{vocab_size}], of bool, is required")
    if d2t is None or d2t.ndim != 1:
        return
    if engine == "vllm" and subject.draft_vocab_size == vocab_size:
        allowed = "remove it: vLLM refuses it when the head drafts the whole vocabulary"
        yield tensor_error(engine, "d2t", d2t[:4].tolist(), allowed)
    if d2t.is_floating_point():
        yield tensor_error(engine, "d2t", str(d2t.dtype), "int64 is allowed")
        return
    try:
        vocab = DraftVocab.from_offsets(d2t.long(), vocab_size)
    except ValueError as failed:
        yield tensor_error(engine, "d2t", d2t[:4].tolist(), str(failed))
        return
    if t2d is not None and not torch.equal(t2d.bool(), vocab.members()):
        allowed = "offsets (target id minus draft id) that lead to the tokens of t2d are required"
        yield tensor_error(engine, "d2t", d2t[:4].tolist(), allowed)
    if t2d is None and len(d2t) > 1 and bool((d2t.diff() > 0).all()):
        allowed = "offsets (target id minus draft id) are required; these rise at every step, as ids would"
        yield tensor_error(engine, "d2t", d2t[:4].tolist(), allowed)


def embedding(subject: Subject, engine: str) -> Iterator[Violation]:
    """SGLang and TensorRT-LLM replace a head's own embedding by the target's if both have the same shape."""
    own, target = subject.tensors.get("embed_tokens.weight"), subject.frozen.embedding
    if own is None and engine == "speculators":
        allowed = f"a copy of the target's embedding, {list(target.shape)}, is required"
        yield tensor_error(engine, "embed_tokens.weight", MISSING, allowed)
    if own is None or own.shape != target.shape or torch.equal(own, target.to(own.dtype)):
        return
    if engine in ("sglang", "tensorrt_llm") or subject.layout == "eagle1":
        allowed = f"only the target's own is allowed: {engine} uses that one anyway"
        yield tensor_error(engine, "embed_tokens.weight", "an embedding other than the target's", allowed)


def eagle1_bias(subject: Subject, engine: str) -> Iterator[Violation]:
    """vLLM silently drops the bias of `fc`; SGLang always has one and leaves it uninitialised if the file has none."""
    bias, named = subject.tensors.get("fc.bias"), bool(subject.config.get("bias", True))
    if engine == "vllm" and bias is not None and bool(bias.any()):
        yield tensor_error(engine, "fc.bias", "a nonzero bias", "zeros are allowed: vLLM silently drops this tensor")
    if engine == "sglang" and bias is None:
        yield tensor_error(engine, "fc.bias", MISSING, "add zeros: SGLang leaves an absent one uninitialised")
    if engine == "eagle" and named != (bias is not None):
        allowed = "the tensor must exist exactly if the key `bias` of config.json is true (or absent)"
        yield tensor_error(engine, "fc.bias", MISSING if bias is None else "a bias", allowed)
