"""Rules for tensors: names, shapes, finite numbers, the draft vocabulary's map, the embedding."""

import re
from collections.abc import Iterator
from dataclasses import replace

import torch

from headstart.heads.base import DraftHead
from headstart.heads.files import has_weight_dtype
from headstart.heads.formats.config_rules import num_captured_taps
from headstart.heads.formats.subject import BLOCK, LAYER_SIZES, MISSING, Subject, Violation, midlayer_name, tensor_error
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block import CONFIDENCE, BlockHead
from headstart.heads.kinds.block_attention import Reach
from headstart.heads.kinds.block_config import BlockShape, block_key
from headstart.heads.kinds.eagle1 import Eagle1Head, Eagle1Shape
from headstart.heads.kinds.eagle3 import Eagle3Head, Eagle3Shape
from headstart.heads.kinds.medusa import MedusaHead, MedusaShape
from headstart.heads.vocab import DraftVocab

MAPS = ("d2t", "t2d", "token_map")  # tensors of ids, not of weights
READ_BY_ALL = re.compile(r"fc\.weight|lm_head\.weight|lm_heads\.\d+\.weight")  # every guess depends on these
OPTIONAL = {
    "eagle3": {"d2t", "t2d", "embed_tokens.weight"},
    "speculators": {"d2t", "t2d", "embed_tokens.weight"},
    "eagle1": {"fc.bias", "embed_tokens.weight"},
    "medusa": {"token_map"},
    **{layout: {"d2t", "t2d", "lm_head.weight", "embed_tokens.weight"} for layout in BLOCK},
}


def names_and_shapes(subject: Subject, engine: str) -> Iterator[Violation]:
    """Every missing, misshapen or unknown tensor; engines silently ignore most of them."""
    if subject.missing_sizes:
        return
    expected, optional = expected_shapes(subject, engine), OPTIONAL[subject.layout]
    yield from wrong_shapes(subject, engine, expected)
    for name in sorted(subject.tensors.keys() - expected.keys() - optional):
        meant = midlayer_name(name.removeprefix("model."))
        allowed = f"{meant} is allowed" if meant in expected | dict.fromkeys(optional) else "no such tensor is allowed"
        if name in ("mask_hidden", "mask_embedding"):
            allowed = "no such tensor is allowed: the slots are filled with the embedding of mask_token_id"
        yield tensor_error(engine, name, list(subject.tensors[name].shape), allowed)


def expected_shapes(subject: Subject, engine: str) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that config.json asks for, from an empty head of these sizes."""
    config, size, kind, target = subject.config, subject.draft_vocab_size, subject.kind, subject.frozen.config
    if kind == "medusa":
        size, hidden = target.vocab_size, target.hidden_size
    else:
        hidden = subject.target_hidden_size if kind == "eagle3" else config["hidden_size"]
        target = replace(target, hidden_size=hidden, vocab_size=config["vocab_size"])
    vocab = DraftVocab(torch.arange(size), max(size, target.vocab_size))
    with torch.device("meta"):
        lm_head = torch.empty(vocab.target_size, hidden)
        head = empty_head(subject, FrozenTarget(target, lm_head, lm_head[0], None, lm_head), vocab, engine)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    if kind == "eagle3" and size != target.vocab_size:
        shapes["d2t"] = (size,)
    if kind == "block" and block_key(config, "enable_confidence_head"):
        rank = block_key(config, "markov_rank", 0) if block_key(config, "confidence_head_with_markov", True) else 0
        shapes |= dict(zip(CONFIDENCE, ((1, hidden + rank), (1,)), strict=True))
    return shapes


def empty_head(subject: Subject, frozen: FrozenTarget, vocab: DraftVocab, engine: str) -> DraftHead:
    """A head of the sizes in config.json, with the default rotary embedding, which has no weights."""
    config, target = subject.config, frozen.config
    if subject.kind == "medusa":
        medusa = MedusaShape.of_tensors(subject.tensors, target.hidden_size)
        has_bias = medusa.bias or bool(config.get("medusa_fc_bias"))
        return MedusaHead(replace(medusa, bias=has_bias, lm_head_rank=None), frozen, vocab)
    sizes = {key: config.get(key) for key in (*LAYER_SIZES, "num_key_value_heads", "head_dim")}
    if subject.kind == "eagle1":
        return Eagle1Head(Eagle1Shape.from_config(sizes, target), frozen)
    if subject.kind == "block":
        rank = block_key(config, "markov_rank", 0)
        block = BlockShape.from_config(
            sizes,
            target,
            taps=subject.taps,
            reaches=(Reach(),) * config["num_hidden_layers"],
            block_size=2,
            mask_token_id=0,
            markov_rank=rank,
            markov_gate=rank > 0 and block_key(config, "markov_head_type") == "gated",
        )
        return BlockHead(block, frozen, vocab)
    eagle3 = Eagle3Shape.from_config(
        sizes,
        target,
        taps=tuple(range(num_captured_taps(subject, engine))),
        fc_norm=bool(config.get("fc_norm")),
        norm_before_fc=bool(config.get("norm_before_fc") or subject.eagle_config.get("norm_before_fc")),
        own_embedding=config["hidden_size"] != target.hidden_size,
    )
    return Eagle3Head(eagle3, target, vocab, frozen.embedding)


def wrong_shapes(subject: Subject, engine: str, expected: dict[str, tuple[int, ...]]) -> Iterator[Violation]:
    """The expected tensors that are missing, then the misshapen ones."""
    tensors = subject.tensors
    for name in sorted(expected.keys() - tensors.keys()):
        yield tensor_error(engine, name, MISSING, f"shape {list(expected[name])} is required")
    for name in sorted(expected.keys() & tensors.keys()):
        if tuple(tensors[name].shape) != expected[name]:
            yield tensor_error(engine, name, list(tensors[name].shape), f"shape {list(expected[name])} is required")


def spelling(subject: Subject, engine: str) -> Iterator[Violation]:
    """speculators names the layer layers.0 and never midlayer; the other engines read both."""
    for name in sorted(subject.files.tensors) if engine == "speculators" else []:
        if name.startswith("midlayer."):
            yield tensor_error(engine, name, name, f"layers.0.{name.removeprefix('midlayer.')} is allowed")


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


WEIGHTS = (number_formats, finite, not_empty)  # rules for the weights of every layout


def vocabulary_map(subject: Subject, engine: str) -> Iterator[Violation]:
    """`d2t` holds offsets, target id minus draft id. With ids instead, no draft is ever accepted and nothing fails."""
    d2t, t2d, vocab_size = subject.tensors.get("d2t"), subject.tensors.get("t2d"), subject.frozen.config.vocab_size
    if engine == "speculators" and t2d is None and subject.draft_vocab_size != vocab_size:
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
    stored, target = subject.tensors.get("embed_tokens.weight"), subject.frozen.embedding
    if stored is None and engine == "speculators":
        allowed = f"a copy of the target's embedding, {list(target.shape)}, is required"
        yield tensor_error(engine, "embed_tokens.weight", MISSING, allowed)
    if stored is None or stored.shape != target.shape or torch.equal(stored, target.to(stored.dtype)):
        return
    if engine in ("sglang", "tensorrt_llm") or subject.layout == "eagle1":
        allowed = f"only the target's own is allowed: {engine} uses that one anyway"
        yield tensor_error(engine, "embed_tokens.weight", "an embedding other than the target's", allowed)


def eagle1_bias(subject: Subject, engine: str) -> Iterator[Violation]:
    """vLLM silently drops the bias of `fc`; SGLang always has one and leaves it uninitialised if the file has none."""
    bias = subject.tensors.get("fc.bias")
    if engine == "vllm" and bias is not None and bool(bias.any()):
        yield tensor_error(engine, "fc.bias", "a nonzero bias", "zeros are allowed: vLLM silently drops this tensor")
    if engine == "sglang" and bias is None:
        yield tensor_error(engine, "fc.bias", MISSING, "add zeros: SGLang leaves an absent one uninitialised")
