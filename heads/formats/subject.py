"""A head's files in the one view that all rules check: its layout, its keys flat, its tensors under one spelling."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from headstart.heads.files import HeadFiles
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block_config import is_block_config, named_taps
from headstart.heads.kinds.checkpoint import KINDS
from headstart.heads.kinds.medusa import BLOCK as MEDUSA_BLOCK

SPECULATORS_BLOCK = "speculators_block"
BLOCK = ("block", SPECULATORS_BLOCK)
MISSING = "missing"  # the value of a tensor that the file does not hold
LAYER_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def layout_of(files: HeadFiles) -> str:
    """The layout, a key of `lint.RULES`, recognised by the files' content; ValueError for an unknown one."""
    names = {name.removeprefix("model.") for name in files.tensors}
    if any(map(MEDUSA_BLOCK.fullmatch, names)):
        return "medusa"
    if is_block_config(files.config) or "hidden_norm.weight" in names:
        return SPECULATORS_BLOCK if "speculators_model_type" in files.config else "block"
    if "speculators_model_type" in files.config:
        return "speculators"
    if {"layers.0.hidden_norm.weight", "d2t"} & names or any(name.startswith("midlayer.") for name in names):
        return "eagle3"
    if "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names:
        return "eagle1"
    kind = files.config.get("headstart", {}).get("kind")
    if kind in ("eagle1", "eagle3", "medusa", "block", "mtp"):
        return str(kind)
    unknown = f"the layout of this draft head is unknown (its tensors: {', '.join(sorted(names)[:4])}, ...)"
    allowed = "EAGLE-1, EAGLE-3, speculators' eagle3, Medusa, DFlash and DSpark are allowed"
    advice = "give the folder of such a head, or bring a whole target's MTP layer in with headstart convert"
    raise ValueError(f"{files.folder}: {unknown}; {allowed}: {advice}")


@dataclass(frozen=True)
class Subject:
    """A head's files under inspection, with the target that the head drafts for."""

    files: HeadFiles
    layout: str
    frozen: FrozenTarget

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json as engines read it, flat: speculators nests the layer's keys in a section of their own."""
        config = self.files.config
        if self.layout not in ("speculators", SPECULATORS_BLOCK):
            return config
        top_level = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
        return {**config.get("transformer_layer_config", {}), **top_level}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors under one spelling: `midlayer.` for EAGLE-3."""
        if self.kind != "eagle3":
            return self.files.tensors
        return {midlayer_name(name): tensor for name, tensor in self.files.tensors.items()}

    @property
    def note(self) -> dict[str, Any]:
        """The `headstart` section that our own heads carry; empty for published heads."""
        return self.files.config.get("headstart", {})

    @property
    def eagle_config(self) -> dict[str, Any]:
        return self.config.get("eagle_config") or {}

    @property
    def kind(self) -> str:
        """The head's kind, a key of `heads.checkpoint.KINDS`."""
        if self.layout in BLOCK:
            return "block"
        return "eagle3" if self.layout == "speculators" else self.layout

    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden_states that the head reads; empty for a block head that names none."""
        if self.layout in BLOCK:
            return named_taps(self.config)
        return KINDS[self.kind].config_taps(self.config, self.frozen.config)

    @property
    def target_hidden_size(self) -> Any:
        return self.config.get("target_hidden_size") or self.config.get("hidden_size")

    @property
    def draft_vocab_size(self) -> Any:
        return self.config.get("draft_vocab_size") or self.config.get("vocab_size")

    @property
    def missing_sizes(self) -> list[str]:
        """The size keys that config.json does not give; no tensor shape can be checked without them.

        A Medusa head gives none: its tensors and its target say them all.
        """
        if self.layout == "medusa":
            return []
        needed = LAYER_SIZES + (("num_hidden_layers",) if self.layout in BLOCK else ())
        return [key for key in needed if not isinstance(self.config.get(key), int)]


def midlayer_name(name: str) -> str:
    """The reference's name of an EAGLE-3 tensor: midlayer, which speculators and others call layers.0."""
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


@dataclass(frozen=True)
class Violation:
    """One breach of an engine's contract."""

    engine: str
    severity: str  # error: the engine fails or drafts worse than trained; warning: correct only if trained that way
    where: str  # a key of config.json, or a tensor of the weights file
    value: object  # as the file holds it; None for an absent key
    allowed: str  # the allowed values, or what to do

    @property
    def text(self) -> str:
        """The violation without engine and severity."""
        value = repr(self.value)
        shown = value if len(value) <= 80 else f"{value[:77]}..."
        content = MISSING if self.value is None or self.value == MISSING else f"{shown} found"
        return f"{self.where}: {content}; {self.allowed}"

    def __str__(self) -> str:
        return f"{self.engine}: {self.severity}: {self.text}"


def config_error(engine: str, key: str, value: object, allowed: str) -> Violation:
    return Violation(engine, "error", f"config.json {key}", value, allowed)


def tensor_error(engine: str, name: str, value: object, allowed: str) -> Violation:
    return Violation(engine, "error", f"tensor {name}", value, allowed)
