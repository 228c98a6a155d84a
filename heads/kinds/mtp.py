"""A target's own multi-token-prediction (MTP) layer as a draft head (DeepSeek-V3, arXiv 2412.19437, section 2.2).

The layer is transformers' own: a decoder layer of the target's class over its embedding of the next token and its last
hidden state. Its tensors keep the names that they have in the target's files. Levels after the first run the same layer
on its own output, as vLLM and SGLang do.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AutoConfig, PreTrainedModel, __version__
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_layers import MtpModel

from headstart.heads.base import EXTRA_ROTARY_POSITIONS, Features, Hidden, LastHiddenHead, Mask
from headstart.heads.files import read_json_object
from headstart.heads.frozen import FrozenTarget, SafetensorsFolder
from headstart.heads.layers import AttentionCache, attention
from headstart.heads.quantised import SCALE_SUFFIXES
from headstart.heads.target_ends import auto_class
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema_heads import MtpSection
from headstart.recipes.target_sizes import text_section

OURS = "headstart_mtp"  # the attention that MTP layers run on
FULL = "full_attention"
STORED = re.compile(r"(?:(?:model|language_model)\.)*(mtp\.)?(?:layers\.(\d+)\.)?")
COPIES = re.compile(r"embed_tokens\.|shared_head\.head\.")  # the target's embedding and lm_head again
EAGLE = "choose another target, or head.kind eagle3"
OLDEST = 5, 23  # the release of transformers whose names of these tensors were tried


def attend(
    module: nn.Module,
    query: Float[Tensor, "batch heads seq head_dim"],
    key: Float[Tensor, "batch kv_heads seq head_dim"],
    value: Float[Tensor, "batch kv_heads seq value_dim"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    head_cache: AttentionCache | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "batch seq heads value_dim"], None]:
    """A head's attention as transformers calls it; values narrower than the keys (MLA) are padded for the cache."""
    width, size = key.shape[-1], value.shape[-1]
    if scaling is not None and scaling != width**-0.5:
        query = query * (scaling * width**0.5)
    value = functional.pad(value, (0, width - size)) if size < width else value
    inputs = query, key, value, attention_mask
    mixed = attention(*inputs) if head_cache is None else head_cache.attend(0, *inputs)
    return mixed[..., :size].transpose(1, 2), None


AttentionInterface.register(OURS, attend)


@dataclass(frozen=True)
class MtpShape:
    """The keys that the layer's attention keeps of each token."""

    num_kv_heads: int
    head_dim: int

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return 1, self.num_kv_heads, self.head_dim


class KeysSeen(Exception):
    """Ends a pass when the layer attends: what follows, such as experts, may not run without weights."""


class KeyProbe:
    """Stands in for a cache, to learn the shape of the keys."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        raise KeysSeen(key.shape[1], key.shape[3])


@dataclass(frozen=True)
class StoredTensor:
    """Where the files keep a tensor: under one name or, of experts, one name each for one or more matrices."""

    names: list[list[str]]  # by matrix, then by expert
    of_experts: bool = False

    def join(self, tensors: dict[str, Tensor]) -> Tensor:
        if not self.of_experts:
            return tensors[self.names[0][0]]
        return torch.cat([torch.stack([tensors[name] for name in matrix]) for matrix in self.names], dim=1)

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """The inverse of `join`."""
        if not self.of_experts:
            return {self.names[0][0]: tensor}
        matrices = zip(self.names, tensor.chunk(len(self.names), dim=1), strict=True)
        return {name: expert for names, matrix in matrices for name, expert in zip(names, matrix, strict=True)}


class MtpHead(LastHiddenHead):
    """A target's MTP layer; the target's embedding, final norm and lm_head stay shared and frozen."""

    kind = "mtp"
    title = "MTP"
    is_target_layer = True
    shape: MtpShape
    has_rope = False  # the layer's own is part of the target's config.json, which the head's repeats

    def __init__(self, text: dict[str, Any], names: Iterable[str], frozen: FrozenTarget) -> None:
        """`text` is the decoder's section of the target's config.json, `names` those of the files' tensors.

        Raises ValueError for a target without such a layer, or with one that cannot be a head.
        """
        super().__init__(None, frozen, DraftVocab.full(frozen.config.vocab_size))
        # A head's own weights are dense, whatever the target's are.
        self.text = {key: value for key, value in text.items() if key != "quantization_config"}
        stored = [name for name in mtp_names(names, frozen.config.num_layers) if not name.endswith(SCALE_SUFFIXES)]
        model, twin = mtp_model(self.text, stored)
        self.stored = stored_tensors(model, twin, stored)
        rotary_class: Any = type(model.rotary_emb)
        with torch.device("cpu"):
            positions = torch.arange(1, self.target.max_positions + EXTRA_ROTARY_POSITIONS + 1)
            turns = rotary_class(model.config)(torch.zeros(1), positions.unsqueeze(0))
        table = torch.cat(turns, dim=-1)[0]  # [positions, 2 * head_dim]
        self.register_buffer("rotary", table.to(self.embedding), persistent=False)
        self.layer = model.layers[0].float()
        self.shape = self.probed_shape()
        self.layer.to_empty(device=self.embedding.device)

    def probed_shape(self) -> MtpShape:
        empty = torch.empty(1, 1, self.feature_size, device="meta")
        try:
            self.run(empty, empty, self.rotary[:1].unsqueeze(0).to("meta", torch.float32), None, KeyProbe())
        except KeysSeen as seen:
            return MtpShape(*seen.args)
        raise ValueError(f"the MTP layer of a {self.text['model_type']} model does not attend; {EAGLE}")

    @classmethod
    def from_section(cls, section: MtpSection, frozen: FrozenTarget, vocab: DraftVocab) -> "MtpHead":
        assert vocab.is_full
        folder = target_folder(frozen)
        text = text_section(read_json_object(folder / "config.json", "target"))
        return cls(text, SafetensorsFolder(folder).files, frozen)

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], frozen: FrozenTarget) -> "MtpHead":
        added = {"headstart", "torch_dtype", "architectures"}
        head = cls({key: value for key, value in config.items() if key not in added}, tensors, frozen)
        known = {name for stored in head.stored.values() for names in stored.names for name in names}
        joined = {name: stored.join(tensors) for name, stored in head.stored.items()}
        unknown = {name: tensor for name, tensor in tensors.items() if name not in known}
        tensors.clear()
        tensors.update({**joined, **unknown})
        return head

    @torch.no_grad()
    def initialise(self, frozen: FrozenTarget, generator: torch.Generator) -> None:
        """Start with the weights of the target's files."""
        files = SafetensorsFolder(target_folder(frozen))
        names = (name for stored in self.stored.values() for names in stored.names for name in names)
        read = {name: files.dense(name) for name in names}
        state = {name: stored.join(read) for name, stored in self.stored.items()}
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise ValueError(f"{files.folder} lacks tensors of its MTP layer: {', '.join(missing)}; download it again")
        self.load_state_dict(state)

    def engine_config(self) -> dict[str, Any]:
        """The target's own, from which the layer is built again."""
        return {**self.text, "architectures": ["MtpModel"]}

    def engine_tensors(self) -> dict[str, Tensor]:
        """Under the names, and in the parts, of the target's files."""
        state = self.state_dict()
        return {name: part for key, stored in self.stored.items() for name, part in stored.split(state[key]).items()}

    def run(
        self, embedded: Hidden, features: Features, rotary: Tensor, mask: Mask | None, cache: AttentionCache | None
    ) -> Hidden:
        turns = rotary.expand(len(embedded), -1, -1).chunk(2, dim=-1)  # cosines and sines, [batch, seq, head_dim] each
        inputs = {"attention_mask": mask, "position_ids": None, "past_key_values": None, "head_cache": cache}
        return self.layer(embedded, features, position_embeddings=turns, **inputs)


def target_folder(frozen: FrozenTarget) -> Path:
    folder = frozen.config.folder
    assert folder is not None
    return folder


def mtp_names(names: Iterable[str], num_layers: int) -> list[str]:
    """The names of the tensors of MTP layers: mtp.*, or those of layers after the target's last."""
    matches = []
    for name in names:
        match = STORED.match(name)
        assert match is not None
        after_last = match[2] is not None and int(match[2]) >= num_layers
        if (match[1] or after_last) and not COPIES.search(name):
            matches.append(name)
    return matches


def mtp_model(text: dict[str, Any], names: list[str]) -> tuple[MtpModel, PreTrainedModel]:
    """transformers' MTP model of a decoder, and the decoder's own, both without weights.

    Raises ValueError unless it has exactly one MTP layer, with full attention.
    """
    family, needed = text.get("model_type"), "exactly one, with full attention, is allowed"
    if tuple(map(int, __version__.split(".")[:2])) < OLDEST:
        newer = "5.23 or newer is needed: run pip install -U transformers"
        raise ValueError(f"head.kind: 'mtp' given with transformers {__version__}, {newer}")
    if not names:
        raise ValueError(f"head.kind: 'mtp' given, but the target's files hold no MTP layer (mtp.*); {needed}; {EAGLE}")
    numbers = {place[2] for name in names if (place := STORED.match(name)) and place[2]}
    if len(numbers) != 1:
        raise ValueError(f"head.kind: 'mtp' given, but the target has {len(numbers)} MTP layers; {needed}; {EAGLE}")
    try:
        config = AutoConfig.for_model(**text)
        config.num_mtp_layers = 1  # published files name it in several ways, or not at all
        known = config.to_dict()
        if known.get("layer_types") and not known.get("mtp_layer_types"):
            config.mtp_layer_types = [FULL]
        if known.get("mlp_layer_types") and not known.get("mtp_mlp_layer_types"):
            config.mtp_mlp_layer_types = known["mlp_layer_types"][-1:]
        with torch.device("meta"):
            twin = auto_class(config).from_config(config)
            model = MtpModel(twin, 1)
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        why = f"transformers builds no MTP layer of a {family} model ({error})"
        raise ValueError(f"head.kind: 'mtp' given, but {why}; {EAGLE}") from error
    kinds = model.config.to_dict().get("layer_types") or [FULL]
    if kinds != [FULL] or model.rotary_emb is None or model.has_per_layer_rope or model.use_shared_post_norm:
        layer = f"the MTP layer of a {family} model has {', '.join(kinds)}"
        raise ValueError(f"head.kind: 'mtp' given, but {layer} or no plain rotary embedding; {needed}; {EAGLE}")
    model.config._attn_implementation = OURS
    return model, twin


def stored_tensors(model: MtpModel, twin: PreTrainedModel, names: list[str]) -> dict[str, StoredTensor]:
    """By the head's own name, where the files keep each tensor, as transformers loads them.

    Raises ValueError for tensors that it would put together in other ways than experts'.
    """
    changes = model.get_weight_conversions(twin)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    parts: dict[str, dict[str | None, list[str]]] = {}
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters)
        parts.setdefault(renamed.replace("layers.0.", "layer.", 1), {}).setdefault(pattern, []).append(name)
    result = {}
    for key, by_pattern in parts.items():
        pattern = next(iter(by_pattern))
        if pattern is None:
            result[key] = StoredTensor([by_pattern[None]])
            continue
        converter = next(each for each in converters if pattern in each.source_patterns)
        steps = [(type(step), vars(step).get("dim")) for step in converter.operations]
        if steps not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            raise ValueError(f"head.kind: 'mtp' given, but the files keep {key} in another form than experts; {EAGLE}")
        result[key] = StoredTensor([by_pattern[each] for each in converter.source_patterns], of_experts=True)
    return result
