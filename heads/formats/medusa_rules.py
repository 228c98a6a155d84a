"""Rules for Medusa heads in vLLM, which silently ignores most mistakes."""

from collections.abc import Iterator

from headstart.heads.formats.subject import Subject, Violation, config_error, tensor_error
from headstart.heads.kinds.medusa import MedusaShape

ARCHITECTURE = "MedusaModel"
ASSUMED_HIDDEN_SIZE = 4096  # without the key


def architecture(subject: Subject, engine: str) -> Iterator[Violation]:
    names = subject.config.get("architectures") or [ARCHITECTURE]
    if ARCHITECTURE not in names:
        yield config_error(engine, "architectures", names, f"{ARCHITECTURE} is allowed")


def counts(subject: Subject, engine: str) -> Iterator[Violation]:
    """vLLM reads any key with "num" and "heads" or "layers" in its name."""
    shape = MedusaShape.of_tensors(subject.tensors, subject.frozen.config.hidden_size)
    for part, count in (("heads", shape.num_heads), ("layers", shape.num_layers)):
        named = {key: value for key, value in subject.config.items() if "num" in key and part in key}
        for key, value in (named or {f"medusa_num_{part}": None}).items():
            if value != count:
                yield config_error(engine, key, value, f"{count} is allowed: the file has tensors for {count} {part}")


def hidden_size(subject: Subject, engine: str) -> Iterator[Violation]:
    """vLLM takes the vocabulary's size from the target if the key is absent, but not the hidden size."""
    size = subject.frozen.config.hidden_size
    if subject.config.get("hidden_size") is None and size != ASSUMED_HIDDEN_SIZE:
        yield config_error(engine, "hidden_size", None, f"the target's {size} is allowed")


def full_vocabulary(subject: Subject, engine: str) -> Iterator[Violation]:
    config, vocab_size = subject.config, subject.frozen.config.vocab_size
    if (size := config.get("truncated_vocab_size")) not in (None, vocab_size):
        allowed = f"{vocab_size} is allowed: vLLM refuses heads that score only some of the vocabulary"
        yield config_error(engine, "truncated_vocab_size", size, allowed)
    if config.get("original_lm_head"):
        allowed = "false is allowed: with true vLLM uses one lm_head for all heads and ignores the others"
        yield config_error(engine, "original_lm_head", config["original_lm_head"], allowed)
    if (token_map := subject.tensors.get("token_map")) is not None:
        allowed = "remove it and let each lm_head score the full vocabulary"
        yield tensor_error(engine, "token_map", list(token_map.shape), allowed)


def bias(subject: Subject, engine: str) -> Iterator[Violation]:
    named = subject.config.get("medusa_fc_bias")
    if not named and MedusaShape.of_tensors(subject.tensors, subject.frozen.config.hidden_size).bias:
        allowed = "true is required: the blocks have biases, and vLLM silently drops them without this key"
        yield config_error(engine, "medusa_fc_bias", named, allowed)
