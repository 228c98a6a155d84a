"""The layout of Medusa heads in vLLM, which silently ignores most mistakes."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from headstart.heads.formats import config_rules, tensor_rules
from headstart.heads.formats.commands import vllm_command
from headstart.heads.formats.subject import (
    Layout,
    Rule,
    ServedTarget,
    Subject,
    Translation,
    Violation,
    config_error,
    tensor_error,
)
from headstart.heads.kinds.medusa import BLOCK, MedusaHead, MedusaShape

ASSUMED_HIDDEN_SIZE = 4096  # without the key
# The Medusa authors' names: H.L.linear.weight, H.L.linear.bias and, with N layers, H.N.weight. vLLM reads them too.
MEDUSA_BLOCK = re.compile(r"(?:medusa_heads\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
MEDUSA_LM_HEAD = re.compile(r"(?:medusa_heads\.)?(\d+)\.\d+\.weight")


def vllm_name(name: str) -> str:
    """vLLM's name of a tensor that has one of the Medusa authors' names; any other name unchanged."""
    if block := MEDUSA_BLOCK.fullmatch(name):
        return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
    if lm_head := MEDUSA_LM_HEAD.fullmatch(name):
        return f"lm_heads.{lm_head[1]}.weight"
    return name


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


def needed(subject: Subject, engine: str) -> dict[str, Tensor]:
    """Its tensors and its target say all sizes: config.json gives none."""
    target = subject.frozen.config
    frozen, vocab = tensor_rules.target_of_sizes(target, target.vocab_size)
    shape = MedusaShape.of_tensors(subject.tensors, target.hidden_size)
    has_bias = shape.bias or bool(subject.config.get("medusa_fc_bias"))
    return MedusaHead(replace(shape, bias=has_bias, lm_head_rank=None), frozen, vocab).state_dict()


def infer_medusa_sizes(subject: Subject, translation: Translation) -> None:
    """Sizes that the Medusa authors' config.json omits, or states wrongly: the tensors are right."""
    hidden, vocab_size = subject.frozen.config.hidden_size, subject.frozen.config.vocab_size
    if subject.tensors.keys() != subject.files.tensors.keys():
        translation.inferred.append("names: the Medusa authors', replaced by vLLM's")
    if subject.config.get("original_lm_head"):
        translation.refused.append("original_lm_head true: only false, an lm_head for each head, is allowed")
    scored = translation.tensors.get("lm_heads.0.weight")
    if scored is None or scored.ndim != 2:
        translation.refused.append("lm_heads.0.weight (0.N.weight of the authors): a matrix is required for each head")
        return
    rows = vocab_size if "token_map" in translation.tensors else scored.shape[0]
    for key, value, its in (("hidden_size", scored.shape[1], hidden), ("vocab_size", rows, vocab_size)):
        if key not in subject.config:
            translation.config[key] = value
            translation.inferred.append(f"{key}: {value}, from lm_heads.0.weight (the target has {its})")
    if not subject.config.get("medusa_fc_bias") and "blocks.0.layers.0.bias" in translation.tensors:
        translation.inferred.append("medusa_fc_bias: true, because the blocks have biases")
    named = subject.config.get("num_heads", subject.config.get("medusa_num_heads"))
    if named != (count := MedusaShape.of_tensors(translation.tensors, hidden).num_heads):
        translation.inferred.append(f"num_heads: {count}, counted from the tensors; config.json says {named}")


def command(head: MedusaHead, target: ServedTarget, folder: Path) -> str:
    note = "Requires vLLM 0.32 or older; later versions cannot serve Medusa heads."
    return f"{vllm_command('medusa', head, target, folder)}\n\n{note}"


RULES: tuple[Rule, ...] = (
    config_rules.architectures,
    counts,
    hidden_size,
    full_vocabulary,
    bias,
    tensor_rules.names_and_shapes,
    config_rules.fits_the_target,
    *tensor_rules.WEIGHTS,
)
MEDUSA = Layout(
    name="medusa",
    kind=MedusaHead,
    recognises=lambda files: any(BLOCK.fullmatch(vllm_name(name)) for name in files.names),
    rules={"vllm": RULES},
    commands={"vllm": command},
    steps=(infer_medusa_sizes,),
    needed=needed,
    optional=frozenset({"token_map"}),
    rename=vllm_name,
    sizes=(),
    architectures={"vllm": {"MedusaModel", None}},
)
