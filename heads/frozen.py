"""The target's embedding, final norm and lm_head, read from its safetensors without loading the rest of the model."""

import json
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from headstart.heads.files import read_index
from headstart.heads.target_config import TargetConfig
from headstart.heads.vocab import DraftVocab

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "gpt_neox.embed_in.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "wte.weight",
)
NORM_NAMES = (
    "model.norm",
    "transformer.ln_f",
    "gpt_neox.final_layer_norm",
    "model.language_model.norm",
    "language_model.model.norm",
    "ln_f",
)
LM_HEAD_NAMES = ("lm_head.weight", "embed_out.weight", "language_model.lm_head.weight")
GEMMA_TYPES = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"})  # their RMSNorm multiplies by 1 + weight
COPY_TOLERANCE = 1e-2  # relative to the largest entry: published copies of a target's tensors are in half precision


@dataclass(frozen=True)
class FrozenTarget:
    """A target's embedding, final norm and lm_head: everything a head needs from it besides features."""

    config: TargetConfig
    embedding: Float[Tensor, "vocab hidden"]
    norm_weight: Float[Tensor, " hidden"]
    norm_bias: Float[Tensor, " hidden"] | None
    lm_head: Float[Tensor, "scored hidden"]  # rows for the whole vocabulary, or those that `within` keeps

    @classmethod
    def from_folder(cls, folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> "FrozenTarget":
        """Read it from a folder of config.json and safetensors; raises ValueError that names a missing tensor."""
        found, config = SafetensorsFolder(folder), TargetConfig.from_folder(folder)
        tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", True)
        return cls._from_names(found.files, folder, config, tied, lambda name: found.read(name).to(device, dtype))

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, Tensor], config: TargetConfig, tied: bool, device: torch.device | str
    ) -> "FrozenTarget":
        """Take it from a state dict, copying only what is on another device; raises ValueError that names a missing or
        quantised tensor."""
        frozen = cls._from_names(tensors, config.model_type, config, tied, lambda name: tensors[name].to(device))
        if not frozen.lm_head.is_floating_point():
            stored = f"{config.model_type}: its lm_head is stored as {frozen.lm_head.dtype}"
            raise ValueError(f"{stored}, but a head needs floating point")
        return frozen

    @classmethod
    def _from_names(
        cls, names: Container[str], source: Path | str, config: TargetConfig, tied: bool, read: Callable[[str], Tensor]
    ) -> "FrozenTarget":
        embedding_name = first_of(EMBEDDING_NAMES, names, source, "embedding")
        norms = tuple(f"{name}.weight" for name in NORM_NAMES)
        norm = first_of(norms, names, source, "final norm").removesuffix(".weight")
        is_shared = tied and not any(name in names for name in LM_HEAD_NAMES)
        lm_head_name = embedding_name if is_shared else first_of(LM_HEAD_NAMES, names, source, "lm_head")
        norm_weight, embedding = read(f"{norm}.weight"), read(embedding_name)
        return cls(
            config=config,
            embedding=embedding,
            norm_weight=norm_weight + 1 if config.model_type in GEMMA_TYPES else norm_weight,
            norm_bias=read(f"{norm}.bias") if f"{norm}.bias" in names else None,
            lm_head=embedding if is_shared else read(lm_head_name),
        )

    def logits(self, last_hidden: Float[Tensor, "*axes hidden"]) -> Float[Tensor, "*axes vocab"]:
        """The target's logits, from its last hidden state before the final norm."""
        return self.unembed(self.norm(last_hidden))

    def choices(self, last_hidden: Float[Tensor, "*axes hidden"]) -> Int[Tensor, "*axes"]:
        """The token that the target likes best after each position, as the argmax of `logits`."""
        # `max` takes the first of equal logits as `argmax` does, and is several times as fast on a CPU.
        return functional.linear(self.norm(last_hidden), self.lm_head).max(-1).indices  # a softcap keeps the order

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
        logits = at_least_float32(functional.linear(normed, self.lm_head))
        cap = self.config.final_logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def within(self, vocab: DraftVocab) -> "FrozenTarget":
        """The same target, scoring only the tokens of a draft vocabulary."""
        return self if vocab.is_full else replace(self, lm_head=self.lm_head[vocab.ids.to(self.lm_head.device)])


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32 if its dtype is smaller, otherwise unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def is_copy(own: Tensor, target: Tensor) -> bool:
    """Is it a copy of the target's tensor, possibly in lower precision?"""
    if own.shape != target.shape:
        return False
    theirs = target.float()
    return bool((own.to(theirs) - theirs).abs().max() <= COPY_TOLERANCE * theirs.abs().max())


def drop_embedding(tensors: dict[str, Tensor], frozen: FrozenTarget) -> None:
    """Remove the target's embedding from the tensors of a head that shares it; raises ValueError for another one."""
    own = tensors.pop("embed_tokens.weight", None)
    if own is not None and not is_copy(own, frozen.embedding):
        advice = "give the target that the head was trained for"
        raise ValueError(f"embed_tokens.weight is not the target's embedding, which the head shares; {advice}")


def first_of(wanted: tuple[str, ...], names: Container[str], source: Path | str, what: str) -> str:
    """The first wanted tensor that the source has; raises ValueError if it has none of them."""
    for name in wanted:
        if name in names:
            return name
    looked = f"{source}: no {what} among its tensors (looked for {', '.join(wanted)})"
    raise ValueError(f"{looked}; give the whole target, not a head or a part of it")


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


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """An open safetensors file; any error while it is open becomes a ValueError that names the file."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy or download the target again") from error
