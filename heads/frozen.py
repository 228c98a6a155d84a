"""The target's embedding, final norm and lm_head, straight from its safetensors: the 70B itself is never loaded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from heads.target_config import TargetConfig

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


@dataclass(frozen=True)
class FrozenTarget:
    """The two ends of a target, all that a head needs of it besides features."""

    config: TargetConfig
    embedding: Float[Tensor, "vocab hidden"]
    norm_weight: Float[Tensor, " hidden"]
    norm_bias: Float[Tensor, " hidden"] | None
    lm_head: Float[Tensor, "vocab hidden"]

    @classmethod
    def from_folder(cls, folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> "FrozenTarget":
        """Read it from a folder with config.json and safetensors, single-file or sharded, tied or not.

        Raises ValueError naming the tensor that is missing.
        """
        reader = SafetensorsFolder(folder)
        embedding_name = reader.find(EMBEDDING_NAMES, "embedding")
        norm = reader.find(tuple(f"{name}.weight" for name in NORM_NAMES), "final norm").removesuffix(".weight")
        config = TargetConfig.from_folder(folder)
        tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", True)
        if tied and not any(name in reader for name in LM_HEAD_NAMES):
            lm_head_name = embedding_name
        else:
            lm_head_name = reader.find(LM_HEAD_NAMES, "lm_head")

        def read(name: str) -> Tensor:
            return reader.read(name).to(device, dtype)

        norm_weight = read(f"{norm}.weight")
        embedding = read(embedding_name)
        return cls(
            config=config,
            embedding=embedding,
            norm_weight=norm_weight + 1 if config.model_type in GEMMA_TYPES else norm_weight,
            norm_bias=read(f"{norm}.bias") if f"{norm}.bias" in reader else None,
            lm_head=embedding if lm_head_name == embedding_name else read(lm_head_name),
        )

    def logits(self, last_hidden: Float[Tensor, "*axes hidden"]) -> Float[Tensor, "*axes vocab"]:
        """The target's own logits, from its last hidden state before the final norm."""
        hidden, eps = last_hidden.float(), self.config.norm_eps
        if self.norm_bias is None:
            normed = functional.rms_norm(hidden, hidden.shape[-1:], self.norm_weight.float(), eps)
        else:
            normed = functional.layer_norm(
                hidden, hidden.shape[-1:], self.norm_weight.float(), self.norm_bias.float(), eps
            )
        logits = functional.linear(normed.to(self.lm_head.dtype), self.lm_head).float()
        cap = self.config.final_logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class SafetensorsFolder:
    """Tensors by name from a model's folder, single-file or sharded; each is read only when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self.files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (folder / "model.safetensors").is_file():
            with opened(folder / "model.safetensors") as file:
                self.files = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise ValueError(
                f"{folder} has neither model.safetensors nor model.safetensors.index.json; pickled weights are not "
                f"read: convert the model with save_pretrained(safe_serialization=True)"
            )

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def find(self, names: tuple[str, ...], what: str) -> str:
        for name in names:
            if name in self.files:
                return name
        raise ValueError(f"{self.folder}: no {what} among its tensors (looked for {', '.join(names)})")

    def read(self, name: str) -> Tensor:
        with opened(self.folder / self.files[name]) as file:
            return file.get_tensor(name)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file; whatever fails while it is open comes out as a ValueError that names it."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy or download the target again") from error
