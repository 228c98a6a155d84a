"""What vLLM and the Medusa authors' code need of Medusa heads; both pass over most mistakes in silence."""

from collections.abc import Iterator

import torch

from heads.formats.medusa_layout import PREFIX
from heads.formats.subject import Finding, Subject

ARCHITECTURE = "MedusaModel"


def config_error(engine: str, where: str, value: object, allowed: str) -> Finding:
    return Finding(engine, "error", f"config.json {where}", value, allowed)


def tensor_error(engine: str, where: str, value: object, allowed: str) -> Finding:
    return Finding(engine, "error", f"tensor {where}", value, allowed)


def architecture(subject: Subject, engine: str) -> Iterator[Finding]:
    """vLLM takes MedusaModel where none is named; HydraHeads is our own name for what no engine drafts with."""
    named = subject.config.get("architectures") or [ARCHITECTURE]
    if engine == "vllm" and ARCHITECTURE not in named:
        allowed = f"{ARCHITECTURE} is allowed; heads that also read drafted tokens, Hydra's, are drafted here alone"
        yield config_error(engine, "architectures", named, allowed)


def counts(subject: Subject, engine: str) -> Iterator[Finding]:
    """vLLM takes any key that says num and heads, or num and layers; the reference its own, 4 and 1 if absent."""
    for what, own, absent, found in (
        ("heads", "medusa_num_heads", 4, num_heads(subject)),
        ("layers", "medusa_num_layers", 1, num_layers(subject)),
    ):
        if engine == "vllm":
            named = {key: value for key, value in subject.config.items() if "num" in key and what in key}
        else:
            named = {own: subject.config.get(own, absent)}
        for key, value in (named or {own: None}).items():
            if value != found:
                yield config_error(engine, key, value, f"{found}, as many as there are tensors for, is allowed")


def num_heads(subject: Subject) -> int:
    return len({name.split(".")[1] for name in subject.tensors if name.startswith(("blocks.", "lm_heads."))})


def num_layers(subject: Subject) -> int:
    return len({name.split(".")[3] for name in subject.tensors if name.startswith("blocks.")})


def sizes(subject: Subject, engine: str) -> Iterator[Finding]:
    """vLLM takes hidden_size for 4096 where nothing is said, and asks the target for the rest."""
    target = subject.frozen.config
    if engine != "vllm":
        return
    facts = (("hidden_size", target.hidden_size, 4096), ("vocab_size", target.vocab_size, target.vocab_size))
    for key, allowed, absent in facts:
        if subject.config.get(key, absent) != allowed:
            yield config_error(engine, key, subject.config.get(key), f"the target's {allowed} is allowed")


def whole_vocabulary(subject: Subject, engine: str) -> Iterator[Finding]:
    """vLLM makes every lm_head as tall as the vocabulary, so it stops at truncated ones, and has no other reader."""
    config, vocab_size = subject.config, subject.frozen.config.vocab_size
    size = config.get("truncated_vocab_size")
    if engine == "vllm" and size not in (None, vocab_size):
        allowed = f"{vocab_size} is allowed: vLLM stops at heads that score a part of the vocabulary"
        yield config_error(engine, "truncated_vocab_size", size, allowed)
    if engine == "vllm" and config.get("original_lm_head"):
        allowed = "false is allowed: with true vLLM takes one lm_head for all heads and leaves the others out"
        yield config_error(engine, "original_lm_head", config["original_lm_head"], allowed)
    if "token_map" in subject.tensors:
        allowed = "leave it out, and let each lm_head score the whole vocabulary"
        yield tensor_error(engine, "token_map", list(subject.tensors["token_map"].shape), allowed)


def names_and_shapes(subject: Subject, engine: str) -> Iterator[Finding]:
    """Every tensor that is missing, misshapen or unknown, by vLLM's names."""
    expected, found = expected_shapes(subject, engine), subject.tensors
    for name in sorted(expected.keys() - found.keys()):
        yield tensor_error(engine, name, "nothing", f"{list(expected[name])} is allowed")
    for name in sorted(expected.keys() & found.keys()):
        if tuple(found[name].shape) != expected[name]:
            yield tensor_error(engine, name, list(found[name].shape), f"{list(expected[name])} is allowed")
    for name in sorted(found.keys() - expected.keys() - {"token_map"} - set(biases(subject))):
        yield tensor_error(engine, name, list(found[name].shape), "none such is known")


def expected_shapes(subject: Subject, engine: str) -> dict[str, tuple[int, ...]]:
    hidden, vocab_size = subject.frozen.config.hidden_size, subject.frozen.config.vocab_size
    has_bias = engine == "medusa" or bool(subject.config.get("medusa_fc_bias"))
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads(subject)):
        shapes[f"lm_heads.{head}.weight"] = (vocab_size, hidden)
        for layer in range(num_layers(subject)):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (hidden, hidden)
            if has_bias:
                shapes[f"blocks.{head}.layers.{layer}.bias"] = (hidden,)
    return shapes


def biases(subject: Subject) -> list[str]:
    return [name for name in subject.tensors if name.startswith("blocks.") and name.endswith(".bias")]


def bias(subject: Subject, engine: str) -> Iterator[Finding]:
    named, found = subject.config.get("medusa_fc_bias"), biases(subject)
    if engine == "vllm" and found and not named:
        allowed = "true is allowed, as the blocks have biases: vLLM drops them in silence without it"
        yield config_error(engine, "medusa_fc_bias", named, allowed)


def spelling(subject: Subject, engine: str) -> Iterator[Finding]:
    """Under another name a tensor is passed over: the reference loads without a prefix, vLLM drops one alone."""
    taken = ("", "medusa_heads.") if engine == "vllm" else ("",)
    for name in sorted(subject.files.tensors):
        prefix = PREFIX.match(name)
        if prefix and prefix[0] not in taken:
            yield tensor_error(engine, name, name, f"{name.removeprefix(prefix[0])} is allowed")


def equal_layers(subject: Subject, engine: str) -> Iterator[Finding]:
    """The reference makes a head's layers one and the same module: the last one's weights stand for all."""
    if engine != "medusa":
        return
    for name, tensor in sorted(subject.tensors.items()):
        parts = name.split(".")
        if parts[0] == "blocks" and parts[3] != "0":
            first = subject.tensors.get(".".join([*parts[:3], "0", parts[4]]))
            if first is not None and not (first.shape == tensor.shape and torch.equal(first, tensor)):
                allowed = "one layer, or equal ones, is allowed: the reference uses the last layer's weights for all"
                yield tensor_error(engine, name, "other numbers than the first layer's", allowed)
