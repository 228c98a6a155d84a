"""The target's embedding, final norm and lm_head, read from its safetensors without loading the rest of the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.files import read_index
from headstart.heads.quantised import SCALE_SUFFIXES, dequantised, requantised
from headstart.heads.target_config import TargetConfig
from headstart.heads.target_ends import TargetEnds, ends_in
from headstart.heads.vocab import DraftVocab

COPY_TOLERANCE = 1e-2  # relative to the largest entry: published copies of a target's tensors are in half precision


@dataclass(frozen=True)
class FrozenTarget:
    """A target's embedding, final norm and lm_head: everything a head needs from it besides features."""

    config: TargetConfig
    embedding: Float[Tensor, "vocab hidden"]
    norm_weight: Float[Tensor, " hidden"]
    norm_bias: Float[Tensor, " hidden"] | None  # of a norm that subtracts the mean, which others have not
    lm_head: Float[Tensor, "scored hidden"]  # rows for the whole vocabulary, or those that `within` keeps
    lm_head_bias: Float[Tensor, " scored"] | None = None
    logit_scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_folder(cls, folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> "FrozenTarget":
        """Read it from a folder of config.json and safetensors; raises ValueError that names a missing tensor, or one
        that is quantised in a way that cannot be undone."""
        stored_tensors, config = SafetensorsFolder(folder), TargetConfig.from_folder(folder)
        ends, naming = ends_in(folder, (folder / "config.json").read_text())
        stored = naming(stored_tensors.files)

        def read(name: str) -> Tensor | None:
            return stored_tensors.dense(stored[name]).to(device, dtype) if name in stored else None

        return cls._from_ends(ends, folder, config, read)

    @classmethod
    def from_model(
        cls, model: nn.Module, ends: TargetEnds, config: TargetConfig, device: torch.device | str
    ) -> "FrozenTarget":
        """Take it from a model in memory, copying only what is on another device; raises ValueError that names a
        missing tensor, or one that is quantised in a way that cannot be undone."""
        shared = model.get_submodule(ends.embedding).state_dict()["weight"].data_ptr() if ends.is_tied else None

        def read(name: str) -> Tensor | None:
            module, _, tensor_name = name.rpartition(".")
            tensors = model.get_submodule(module).state_dict()
            if tensor_name not in tensors or (module == ends.lm_head and tensors[tensor_name].data_ptr() == shared):
                return None
            scales = [tensors[tensor_name + suffix] for suffix in SCALE_SUFFIXES if tensor_name + suffix in tensors]
            return dequantised(tensors[tensor_name], scales, f"{config.model_type}: {name}").to(device)

        return cls._from_ends(ends, config.model_type, config, read)

    @classmethod
    def _from_ends(
        cls, ends: TargetEnds, source: Path | str, config: TargetConfig, read: Callable[[str], Tensor | None]
    ) -> "FrozenTarget":
        def needed(name: str, part: str) -> Tensor:
            if (tensor := read(f"{name}.weight")) is None:
                looked = f"{source}: no {part} among its tensors (looked for {name}.weight)"
                raise ValueError(f"{looked}; give the whole target, not a head or a part of it")
            return tensor

        embedding, lm_head = needed(ends.embedding, "embedding"), read(f"{ends.lm_head}.weight")
        if lm_head is None:
            lm_head = embedding if ends.is_tied else needed(ends.lm_head, "lm_head")
        norm_weight = needed(ends.norm, "final norm") if ends.norm_has_weight else torch.ones_like(embedding[0])
        norm_bias = read(f"{ends.norm}.bias")
        if norm_bias is None and ends.norm_centres:
            norm_bias = torch.zeros_like(norm_weight)
        return cls(
            config=config,
            embedding=embedding,
            norm_weight=norm_weight + 1 if ends.norm_adds_one else norm_weight,
            norm_bias=norm_bias,
            lm_head=lm_head,
            lm_head_bias=read(f"{ends.lm_head}.bias"),
            logit_scale=ends.logit_scale,
            softcap=config.final_logit_softcap if ends.has_softcap else None,
        )

    def logits(self, last_hidden: Float[Tensor, "*axes hidden"]) -> Float[Tensor, "*axes vocab"]:
        """The target's logits, from its last hidden state before the final norm."""
        return self.unembed(self.norm(last_hidden))

    def choices(self, last_hidden: Float[Tensor, "*axes hidden"]) -> Int[Tensor, "*axes"]:
        """The token that the target likes best after each position, as the argmax of `logits`."""
        # `max` takes the first of equal logits as `argmax` does, and is several times as fast on a CPU.
        # A scale and a softcap keep the order.
        return functional.linear(self.norm(last_hidden), self.lm_head, self.lm_head_bias).max(-1).indices

    def norm(self, last_hidden: Float[Tensor, "*axes hidden"]) -> Float[Tensor, "*axes hidden"]:
        """The target's final norm, computed in float32 or float64."""
        hidden, weight = at_least_float32(last_hidden), at_least_float32(self.norm_weight)
        size, eps = hidden.shape[-1:], self.config.norm_eps
        if self.norm_bias is None:
            normed = functional.rms_norm(hidden, size, weight.to(hidden.dtype), eps)
        else:
            bias = self.norm_bias.to(hidden.dtype)
            normed = functional.layer_norm(hidden, size, weight.to(hidden.dtype), bias, eps)
        return normed.to(self.lm_head.dtype)

    def unembed(self, normed: Float[Tensor, "*axes hidden"]) -> Float[Tensor, "*axes vocab"]:
        """The target's logits, from the output of the final norm; in float32 or float64."""
        logits = at_least_float32(functional.linear(normed, self.lm_head, self.lm_head_bias))
        logits = logits if self.logit_scale == 1 else logits * self.logit_scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def scoring_in(self, dtype: torch.dtype, other: "FrozenTarget | None") -> "FrozenTarget":
        """The same target with its lm_head in this number format: that of `other`, if it has it on the same device."""
        is_there = other is not None and (other.lm_head.dtype, other.lm_head.device) == (dtype, self.lm_head.device)
        lm_head = other.lm_head if other is not None and is_there else self.lm_head.to(dtype)
        return replace(self, lm_head=lm_head)

    def within(self, vocab: DraftVocab) -> "FrozenTarget":
        """The same target, scoring only the tokens of a draft vocabulary."""
        if vocab.is_full:
            return self
        rows = vocab.ids.to(self.lm_head.device)
        bias = None if self.lm_head_bias is None else self.lm_head_bias[rows]
        return replace(self, lm_head=self.lm_head[rows], lm_head_bias=bias)

    def refuse_other_logits(
        self, logits: Float[Tensor, "tokens scored"], last_hidden: Float[Tensor, "tokens hidden"], tolerance: float
    ) -> None:
        """Raise ValueError unless the target's own logits are its lm_head over its final norm, which training needs.

        The difference that is allowed, and the one that is told, is relative to the largest logit.
        """
        rebuilt = self.logits(last_hidden)
        problem = f"the logits of a {self.config.model_type!r} model are not its lm_head over its final norm"
        advice = "such models cannot be trained for, so choose another target"
        if rebuilt.shape != logits.shape:
            raise ValueError(f"target.path: {problem}: there are {logits.shape[-1]} of {rebuilt.shape[-1]}; {advice}")
        error = float((logits - rebuilt).abs().max() / logits.abs().max())
        if error <= tolerance:
            return
        raise ValueError(f"target.path: {problem} (they differ by {error:.1%}); {advice}")


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32 if its dtype is smaller, otherwise unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def is_copy(tensor: Tensor, target: Tensor) -> bool:
    """Is it a copy of the target's tensor, possibly in lower precision?"""
    if tensor.shape != target.shape:
        return False
    theirs = target.float()
    return bool((tensor.to(theirs) - theirs).abs().max() <= COPY_TOLERANCE * theirs.abs().max())


def drop_embedding(tensors: dict[str, Tensor], frozen: FrozenTarget) -> None:
    """Remove the target's embedding from the tensors of a head that shares it; raises ValueError for another one."""
    embedding = tensors.pop("embed_tokens.weight", None)
    if embedding is not None and not is_copy(embedding, frozen.embedding):
        advice = "give the target that the head was trained for"
        raise ValueError(f"embed_tokens.weight is not the target's embedding, which the head shares; {advice}")


class SafetensorsFolder:
    """The tensors of a model's folder by name, single-file or sharded; each is read only when needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self.files = read_index(index, "target")
        elif (folder / "model.safetensors").is_file():
            with open_safetensors(folder / "model.safetensors") as file:
                self.files = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            advice = "pickled weights are not read: convert the model with save_pretrained(safe_serialization=True)"
            raise ValueError(f"{folder} has neither model.safetensors nor model.safetensors.index.json; {advice}")

    def read(self, name: str) -> Tensor:
        with open_safetensors(self.folder / self.files[name]) as file:
            return file.get_tensor(name)

    def dense(self, name: str) -> Tensor:
        """A tensor in floating point; raises ValueError as `dequantised` does."""
        return dequantised(self.read(name), list(self.scales(name).values()), f"{self.folder}: {name}")

    def as_stored(self, name: str, dense: Tensor) -> dict[str, Tensor]:
        """New values of a tensor in its own number format, by name, with new scales if it is quantised: the inverse of
        `dense`, which raises the same errors. What `dense` returned stays bit for bit."""
        stored, scales = self.read(name), self.scales(name)
        if torch.equal(dequantised(stored, list(scales.values()), f"{self.folder}: {name}").to(dense), dense):
            return {name: stored, **scales}
        if not scales:
            return {name: dense.to(stored.dtype)}
        [(of_scale, scale)] = scales.items()
        return dict(zip((name, of_scale), requantised(dense, stored, scale), strict=True))

    def scales(self, name: str) -> dict[str, Tensor]:
        return {name + suffix: self.read(name + suffix) for suffix in SCALE_SUFFIXES if name + suffix in self.files}


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """An open safetensors file; any error while it is open becomes a ValueError that names the file."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy or download the target again") from error
