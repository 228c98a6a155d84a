"""A head's files in the one view that all rules check: its layout, its keys flat, its tensors under one spelling."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from headstart.heads.base import DraftHead
from headstart.heads.files import HeadFiles
from headstart.heads.frozen import FrozenTarget

LAYER_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
Files = tuple[dict[str, Any], dict[str, Tensor]]  # config.json and tensors


@dataclass(frozen=True)
class ServedTarget:
    """The target and the draft length that an export's files and commands name."""

    name: str  # folder or hub name, as the recipe gives it
    architectures: list[str]
    draft_tokens: int  # per step
    revision: str | None = None  # hub branch, tag or commit; None is the default branch
    adapter: str | None = None  # folder of a PEFT LoRA adapter, which is merged into the target


@dataclass(frozen=True)
class Violation:
    """One breach of an engine's contract."""

    engine: str
    severity: str  # error: the engine fails or drafts worse than trained; warning: correct only if trained that way
    where: str  # a key of config.json, or a tensor of the weights file
    value: object  # as the file holds it; None for an absent key or tensor
    allowed: str  # the allowed values, or what to do

    @property
    def text(self) -> str:
        """The violation without engine and severity."""
        value = repr(self.value)
        shown = value if len(value) <= 80 else f"{value[:77]}..."
        found = "missing" if self.value is None else f"{shown} found"
        return f"{self.where}: {found}; {self.allowed}"

    def __str__(self) -> str:
        return f"{self.engine}: {self.severity}: {self.text}"


def config_error(engine: str, key: str, value: object, allowed: str) -> Violation:
    return Violation(engine, "error", f"config.json {key}", value, allowed)


def tensor_error(engine: str, name: str, value: object, allowed: str) -> Violation:
    return Violation(engine, "error", f"tensor {name}", value, allowed)


@dataclass
class Translation:
    """A published head in our own layout, changed step by step until it is complete."""

    config: dict[str, Any]  # flat
    tensors: dict[str, Tensor]  # under the reference's names
    inferred: list[str] = field(default_factory=list)  # a line for each fact that the files do not state
    refused: list[str] = field(default_factory=list)  # a line for each reason why our heads cannot represent it


@dataclass(frozen=True)
class Layout:
    """A form in which the files of a kind of head are written: how to recognise, check, translate and serve it."""

    name: str
    kind: type[DraftHead]
    recognises: Callable[[HeadFiles], bool]
    rules: dict[str, tuple["Rule", ...]]  # engine that can serve it -> what the engine's loader needs
    commands: dict[str, "Command"]  # engine -> how to serve it, for its README.md
    steps: tuple["Step", ...] = ()  # of the translation into our own layout
    needed: Callable[["Subject", str], dict[str, Tensor]] = lambda subject, engine: {}  # tensors, without memory
    optional: frozenset[str] = frozenset()  # tensors that it may have, too
    sizes: tuple[str, ...] = LAYER_SIZES  # keys of config.json that give the shapes
    # By engine, the names one of which is needed; with None among them, it may be left out.
    architectures: dict[str, set[str | None]] = field(default_factory=dict)
    rename: Callable[[str], str] = str  # the one spelling of a tensor's name
    write: Callable[[Any, ServedTarget], Files] | None = None  # the files of a head, if a format of its own has them
    captured_taps: Callable[["Subject", str], list[int]] | None = None  # those of an engine, if they may differ
    float8: frozenset[str] = frozenset()  # the engines that read projections in float8


@dataclass(frozen=True)
class Subject:
    """A head's files under inspection, with the target that the head drafts for."""

    files: HeadFiles
    layout: Layout
    frozen: FrozenTarget

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json as engines read it, flat: speculators nests the layer's keys in a section of their own."""
        config = self.files.config
        if not self.files.is_speculators:
            return config
        others = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
        return {**config.get("transformer_layer_config", {}), **others}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors under one spelling."""
        return {self.layout.rename(name): tensor for name, tensor in self.files.tensors.items()}

    @property
    def note(self) -> dict[str, Any]:
        """The `headstart` section that our own heads carry; empty for published heads."""
        return self.files.config.get("headstart", {})

    @property
    def eagle_config(self) -> dict[str, Any]:
        return self.config.get("eagle_config") or {}

    @property
    def kind(self) -> str:
        return self.layout.kind.kind

    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden_states that the head reads; empty if config.json has to name them but does not."""
        try:
            return self.layout.kind.config_taps(self.config, self.frozen.config)
        except ValueError:
            return ()

    @property
    def draft_vocab_size(self) -> Any:
        return self.config.get("draft_vocab_size") or self.config.get("vocab_size")

    @property
    def missing_sizes(self) -> list[str]:
        """The size keys that config.json does not give; no tensor shape can be checked without them."""
        return [key for key in self.layout.sizes if not isinstance(self.config.get(key), int)]


Rule = Callable[[Subject, str], Iterator[Violation]]  # what keeps an engine from serving the head as it was trained
Step = Callable[[Subject, Translation], None]
Command = Callable[[Any, ServedTarget, Path], str]  # for a head, in an export's folder
