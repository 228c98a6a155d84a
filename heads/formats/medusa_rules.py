"""Rules for Medusa heads in vLLM and in the Medusa authors' code, both of which silently ignore most mistakes."""

from collections.abc import Iterator

import torch

from headstart.heads.formats.subject import Subject, Violation, config_error, tensor_error
from headstart.heads.formats.tensor_rules import wrong_shapes
from headstart.heads.kinds.medusa import PREFIX

ARCHITECTURE = "MedusaModel"


def architecture(subject: Subject, engine: str) -> Iterator[Violation]:
    """vLLM assumes MedusaModel if none is named; HydraHeads is our own name for heads that no engine can serve."""
    named = subject.config.get("architectures") or [ARCHITECTURE]
    if engine == "vllm" and ARCHITECTURE not in named:
        allowed = f"{ARCHITECTURE} is allowed; sequential (Hydra) heads can be served by headstart only"
        yield config_error(engine, "architectures", named, allowed)


def counts(subject: Subject, engine: str) -> Iterator[Violation]:
    """vLLM reads any key with "num" and "heads" or "layers", the Medusa authors' code two, by default 4 and 1."""
    for what, own, when_absent, found in (
        ("heads", "medusa_num_heads", 4, num_heads(subject)),
        ("layers", "medusa_num_layers", 1, num_layers(subject)),
    ):
        if engine == "vllm":
            named = {key: value for key, value in subject.config.items() if "num" in key and what in key}
        else:
            named = {own: subject.config.get(own, when_absent)}
        for key, value in (named or {own: None}).items():
            if value != found:
                yield config_error(engine, key, value, f"{found} is allowed: the file has tensors for {found} {what}")


def num_heads(subject: Subject) -> int:
    return len({name.split(".")[1] for name in subject.tensors if name.startswith(("blocks.", "lm_heads."))})


def num_layers(subject: Subject) -> int:
    return len({name.split(".")[3] for name in subject.tensors if name.startswith("blocks.")})


def sizes(subject: Subject, engine: str) -> Iterator[Violation]:
    """vLLM assumes hidden_size 4096 if the key is absent; it takes the other sizes from the target."""
    target = subject.frozen.config
    if engine != "vllm":
        return
    facts = (("hidden_size", target.hidden_size, 4096), ("vocab_size", target.vocab_size, target.vocab_size))
    for key, allowed, when_absent in facts:
        if subject.config.get(key, when_absent) != allowed:
            yield config_error(engine, key, subject.config.get(key), f"the target's {allowed} is allowed")


def whole_vocabulary(subject: Subject, engine: str) -> Iterator[Violation]:
    """vLLM refuses an lm_head over less than the whole vocabulary; the Medusa authors' code has no draft vocabulary."""
    config, vocab_size = subject.config, subject.frozen.config.vocab_size
    size = config.get("truncated_vocab_size")
    if engine == "vllm" and size not in (None, vocab_size):
        allowed = f"{vocab_size} is allowed: vLLM refuses heads that score only some of the vocabulary"
        yield config_error(engine, "truncated_vocab_size", size, allowed)
    if engine == "vllm" and config.get("original_lm_head"):
        allowed = "false is allowed: with true vLLM uses one lm_head for all heads and ignores the others"
        yield config_error(engine, "original_lm_head", config["original_lm_head"], allowed)
    if "token_map" in subject.tensors:
        allowed = "remove it and let each lm_head score the whole vocabulary"
        yield tensor_error(engine, "token_map", list(subject.tensors["token_map"].shape), allowed)


def names_and_shapes(subject: Subject, engine: str) -> Iterator[Violation]:
    """Every missing, misshapen or unknown tensor, under vLLM's names."""
    expected = expected_shapes(subject, engine)
    yield from wrong_shapes(subject, engine, expected)
    for name in sorted(subject.tensors.keys() - expected.keys() - {"token_map"} - set(biases(subject))):
        yield tensor_error(engine, name, list(subject.tensors[name].shape), "no such tensor is allowed")


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


def bias(subject: Subject, engine: str) -> Iterator[Violation]:
    named, found = subject.config.get("medusa_fc_bias"), biases(subject)
    if engine == "vllm" and found and not named:
        allowed = "true is required: the blocks have biases, and vLLM silently drops them without this key"
        yield config_error(engine, "medusa_fc_bias", named, allowed)


def spelling(subject: Subject, engine: str) -> Iterator[Violation]:
    """Tensors under other names are ignored: the Medusa authors' code accepts no prefix, vLLM strips only one."""
    stripped = ("", "medusa_heads.") if engine == "vllm" else ("",)
    for name in sorted(subject.files.tensors):
        prefix = PREFIX.match(name)
        if prefix and prefix[0] not in stripped:
            yield tensor_error(engine, name, name, f"{name.removeprefix(prefix[0])} is allowed")


def equal_layers(subject: Subject, engine: str) -> Iterator[Violation]:
    """In the Medusa authors' code a head's layers are one and the same module, so the last layer's weights win."""
    if engine != "medusa":
        return
    for name, tensor in sorted(subject.tensors.items()):
        parts = name.split(".")
        if parts[0] == "blocks" and parts[3] != "0":
            first = subject.tensors.get(".".join([*parts[:3], "0", parts[4]]))
            if first is not None and not (first.shape == tensor.shape and torch.equal(first, tensor)):
                allowed = "only equal layers are allowed: the Medusa authors' code uses the last one's weights for all"
                yield tensor_error(engine, name, "weights unlike the first layer's", allowed)
