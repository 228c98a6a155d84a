"""What the engines need of the tensors: names, shapes, the draft vocabulary's map, the embedding."""

from collections.abc import Iterator

import torch

from heads.formats.subject import Finding, Subject, reference_name
from heads.formats.tap_rules import num_captured
from heads.vocab import DraftVocab

OPTIONAL = {
    "eagle3": {"d2t", "t2d", "embed_tokens.weight"},
    "speculators": {"d2t", "t2d", "embed_tokens.weight"},
    "eagle1": {"fc.bias", "embed_tokens.weight"},
}


def error(engine: str, where: str, value: object, allowed: str) -> Finding:
    return Finding(engine, "error", f"tensor {where}", value, allowed)


def names_and_shapes(subject: Subject, engine: str) -> Iterator[Finding]:
    """Every missing, misshapen and unknown tensor; engines pass over most of them in silence."""
    if subject.missing_sizes:
        return
    num_taps = num_captured(subject, engine) if subject.layout != "eagle1" else 1
    expected, found = subject.expected_shapes(num_taps), subject.tensors
    for name in sorted(expected.keys() - found.keys()):
        yield error(engine, name, "nothing", f"{list(expected[name])} is allowed")
    for name in sorted(expected.keys() & found.keys()):
        if tuple(found[name].shape) != expected[name]:
            yield error(engine, name, list(found[name].shape), f"{list(expected[name])} is allowed")
    for name in sorted(found.keys() - expected.keys() - OPTIONAL[subject.layout]):
        meant = reference_name(name.removeprefix("model."))
        allowed = f"{meant} is allowed" if meant in expected | dict.fromkeys(OPTIONAL[subject.layout]) else "none such"
        yield error(engine, name, list(found[name].shape), f"{allowed}")


def spelling(subject: Subject, engine: str) -> Iterator[Finding]:
    """The reference says midlayer, speculators layers.0; the serving engines read both."""
    wrong = {"eagle": "layers.0.", "speculators": "midlayer."}.get(engine)
    for name in sorted(subject.files.tensors) if subject.layout != "eagle1" and wrong else []:
        if name.startswith(str(wrong)):
            other = "midlayer." if wrong == "layers.0." else "layers.0."
            yield error(engine, name, name, f"{other}{name.removeprefix(str(wrong))} is allowed")


def finite(subject: Subject, engine: str) -> Iterator[Finding]:
    for name, tensor in sorted(subject.files.tensors.items()):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            yield error(engine, name, "infinite or no numbers", "finite numbers are allowed")


def vocabulary_map(subject: Subject, engine: str) -> Iterator[Finding]:
    """`d2t` holds offsets, target id minus draft id; ids in their place cost every draft and raise nothing."""
    d2t, t2d, vocab_size = subject.tensors.get("d2t"), subject.tensors.get("t2d"), subject.frozen.config.vocab_size
    if engine in ("eagle", "speculators") and t2d is None and subject.draft_vocab_size != vocab_size:
        yield error(engine, "t2d", "nothing", f"[{vocab_size}] of bool is allowed")
    if d2t is None or d2t.ndim != 1:
        return
    if engine == "vllm" and subject.draft_vocab_size == vocab_size:
        yield error(engine, "d2t", d2t[:4].tolist(), "leave it out: vLLM stops at it where the vocabulary is whole")
    if d2t.is_floating_point():
        yield error(engine, "d2t", str(d2t.dtype), "int64 is allowed")
        return
    try:
        vocab = DraftVocab.from_offsets(d2t.long(), vocab_size)
    except ValueError as failed:
        yield error(engine, "d2t", d2t[:4].tolist(), str(failed))
        return
    if t2d is not None and not torch.equal(t2d.bool(), vocab.members()):
        yield error(engine, "d2t", d2t[:4].tolist(), "offsets that give the tokens of t2d: target id minus draft id")
    if t2d is None and len(d2t) > 1 and bool((d2t.diff() > 0).all()):
        allowed = "offsets (target id minus draft id) are allowed; these rise at every step, as ids would"
        yield error(engine, "d2t", d2t[:4].tolist(), allowed)


def embedding(subject: Subject, engine: str) -> Iterator[Finding]:
    """SGLang and TensorRT-LLM put the target's embedding in the place of one of the same width."""
    own, target = subject.tensors.get("embed_tokens.weight"), subject.frozen.embedding
    if own is None and engine == "speculators":
        yield error(engine, "embed_tokens.weight", "nothing", f"a copy of the target's, {list(target.shape)}")
    if own is None or own.shape != target.shape or torch.equal(own, target.to(own.dtype)):
        return
    if engine in ("sglang", "tensorrt_llm") or subject.layout == "eagle1":
        allowed = f"the target's own is allowed: {engine} uses it in any case"
        yield error(engine, "embed_tokens.weight", "another embedding than the target's", allowed)


def eagle1_bias(subject: Subject, engine: str) -> Iterator[Finding]:
    """vLLM has none and says nothing; SGLang has one and leaves it uninitialised where the file has none."""
    bias, named = subject.tensors.get("fc.bias"), bool(subject.config.get("bias", True))
    if engine == "vllm" and bias is not None and bool(bias.any()):
        yield error(engine, "fc.bias", "numbers", "zeros are allowed: vLLM leaves it out in silence")
    if engine == "sglang" and bias is None:
        yield error(engine, "fc.bias", "nothing", "zeros are allowed: SGLang leaves an absent one uninitialised")
    if engine == "eagle" and named != (bias is not None):
        allowed = "it and the key `bias` of config.json go together (which is true where it is absent)"
        yield error(engine, "fc.bias", "nothing" if bias is None else "one", allowed)
