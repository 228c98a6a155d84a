"""Where a target keeps its embedding, final norm and lm_head, and how its code computes with them.

All of it is read from the model's own class in transformers, built without weights, so no family needs a table here.
"""

import json
import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from headstart.heads.target_config import TargetConfig

FORM_TOLERANCE = 1e-3  # relative: above float32's rounding and a norm's epsilon, below any other form's
TINY_LOGITS = 1e-3  # so small that a soft cap has no effect
Naming = Callable[[Iterable[str]], dict[str, str]]
PROBED_TOKENS = 4  # of the lm_head that stands in for the target's


@dataclass(frozen=True)
class TargetEnds:
    """The modules at a target's ends, by name, and the form of its final norm and of its logits."""

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    is_tied: bool = False
    norm_has_weight: bool = True
    norm_centres: bool | None = None  # whether it subtracts the mean; None if only a bias tells
    norm_adds_one: bool = False  # whether it multiplies by 1 + weight
    logit_scale: float = 1.0
    has_softcap: bool = True  # whether the configuration's soft cap of logits applies

    @classmethod
    def from_class(cls, model: PreTrainedModel) -> "TargetEnds":
        """From the class of a model, without touching this one; raises ValueError if it has no such ends."""
        key = type(model), model.config.to_json_string(use_diff=False)
        if key not in ENDS_OF_CLASSES:
            with torch.device("meta"):  # with an attention that every class knows
                twin = type(model)._from_config(deepcopy(model.config), attn_implementation="eager")
            ENDS_OF_CLASSES[key] = cls.of_twin(twin, TargetConfig.from_dict(model.config.to_dict()))
        return ENDS_OF_CLASSES[key]

    @classmethod
    def of_twin(cls, twin: PreTrainedModel, config: TargetConfig) -> "TargetEnds":
        """From a model without weights of its own, which this changes; raises ValueError if it has no such ends."""
        names = {module: name for name, module in twin.named_modules()}
        embedding, lm_head = twin.get_input_embeddings(), twin.get_output_embeddings()
        if lm_head is None:
            lm_head = next((module for module, name in names.items() if name.endswith("lm_head")), None)
        norm = final_norm(twin, config)
        if lm_head is None or norm is None:
            raise ValueError(f"a {type(twin).__name__} has no lm_head over a final norm after its decoder layers")
        centres, adds_one = norm_form(norm, config.hidden_size)
        ends = cls(
            names[embedding],
            names[norm],
            names[lm_head],
            lm_head.weight is embedding.weight,
            any(True for _ in norm.parameters()),
            centres,
            adds_one,
        )
        try:
            return replace(ends, **logit_form(twin, ends, config))
        except Exception:  # a class that computes otherwise; `FrozenTarget.refuse_other_logits` says by how much
            return ends


ENDS_OF_CLASSES: dict[tuple[type[PreTrainedModel], str], TargetEnds] = {}  # by configuration, as JSON text


@lru_cache(maxsize=4)
def ends_in(folder: Path, text: str) -> "tuple[TargetEnds, Naming]":
    """The ends of the model in a folder whose config.json is this text, and `stored_names`.

    For a class that transformers cannot build, they have the names that most models have.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            twin = auto_class(config).from_config(config)
    except Exception:  # a class from outside transformers; or else loading the model fails too, and says why
        tied = bool(json.loads(text).get("tie_word_embeddings", True))
        return TargetEnds(is_tied=tied), lambda names: {name: name for name in names}
    naming = stored_names(twin)
    return TargetEnds.of_twin(twin, TargetConfig.from_dict(config.to_dict())), naming


def auto_class(config: Any) -> Any:
    """The class of transformers that loads a model: with its image tower if its configuration names such a class, or if
    there is no other."""
    seeing: Any = AutoModelForImageTextToText._model_mapping
    if type(config) not in seeing:
        return AutoModelForCausalLM
    is_named = seeing[type(config)].__name__ in (config.architectures or ())
    is_alone = type(config) not in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if is_named or is_alone else AutoModelForCausalLM


def stored_names(twin: PreTrainedModel) -> Naming:
    """A function from names in files to {name in the model: name in files}, as transformers loads them; a tensor that
    it would put together from several has none."""
    changes, prefix = get_model_conversion_mapping(twin), twin.base_model_prefix
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    in_model: dict[str, Any] = dict.fromkeys(twin.state_dict(), True)

    def naming(names: Iterable[str]) -> dict[str, str]:
        parts_of: dict[str, list[str]] = {}
        for name in names:
            if not re.search(r"\.\d+\.", name):  # not in a layer
                renamed = rename_source_key(name, renamings, converters, prefix, in_model)[0]
                parts_of.setdefault(name if name in in_model and renamed not in in_model else renamed, []).append(name)
        return {name: parts[0] for name, parts in parts_of.items() if len(parts) == 1}

    return naming


def final_norm(model: PreTrainedModel, config: TargetConfig) -> nn.Module | None:
    """The final norm: a sibling of the decoder layers, preferably after them; the shortest name wins."""
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_layers
    ]
    # A vision tower may have as many layers; the decoder's are nearest to the embedding.
    lists.sort(key=lambda name: -common_depth(name, embedding))
    if not lists:
        return None
    parent, _, layers = lists[0].rpartition(".")
    children = dict(model.get_submodule(parent).named_children())
    order = list(children)
    norms = [name for name, module in children.items() if is_norm(module, config.hidden_size)]
    after = [name for name in norms if order.index(name) > order.index(layers)] or norms
    return children[min(after, key=len)] if after else None  # longer names say which part they belong to


def common_depth(one: str, other: str) -> int:
    """How many parts of two modules' names are the same from the start."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])


def is_norm(module: nn.Module, size: int) -> bool:
    weights = list(module.parameters())
    is_own = not any(isinstance(child, nn.Embedding) for child in module.modules())
    return is_own and "norm" in type(module).__name__.lower() and all(weight.shape == (size,) for weight in weights)


@torch.no_grad()
def norm_form(norm: nn.Module, size: int) -> tuple[bool | None, bool]:
    """(whether it subtracts the mean, whether it adds 1 to its weight), from what it makes of random numbers."""
    norm.to_empty(device="cpu")
    random = torch.Generator().manual_seed(0)
    for weight in norm.parameters():
        weight.data = torch.randn(size, generator=random)
    hidden = 3 + torch.randn(size, generator=random)
    weights, output = dict(norm.named_parameters()), norm(hidden)
    for centres in (False, True):
        normed = functional.layer_norm(hidden, (size,)) if centres else functional.rms_norm(hidden, (size,))
        for added in (0, 1):
            weighted = normed * (weights["weight"] + added) if "weight" in weights else normed
            wanted = weighted + weights["bias"] if "bias" in weights else weighted
            if (output - wanted).norm() <= FORM_TOLERANCE * wanted.norm():
                return centres, bool(added)
    return None, False


def logit_form(twin: PreTrainedModel, ends: TargetEnds, config: TargetConfig) -> dict[str, Any]:
    """`logit_scale` and `has_softcap`, from what the class makes of random hidden states and a small lm_head."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(PROBED_TOKENS, config.hidden_size, generator=random)
    hidden = torch.randn(1, 1, config.hidden_size, generator=random)
    hidden /= (hidden @ weight.T).norm()  # logits of about 1
    path, owner = ends.norm.split(".")[:-1], ends.lm_head.rpartition(".")[0]
    outer = common_depth(ends.norm, owner)

    def logits(size: float) -> Float[Tensor, " tokens"]:
        for end in range(outer + 1, len(path) + 1):  # whichever of them the class asks for the last hidden states
            twin.get_submodule(".".join(path[:end])).forward = lambda *args, **kwargs: LastHidden(hidden * size)
        twin.get_submodule(ends.lm_head).forward = lambda states: states @ weight.T
        return twin.get_submodule(owner)(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits[0, -1]

    plain, cap = (hidden @ weight.T)[0, -1], config.final_logit_softcap
    scale = float(logits(TINY_LOGITS).norm() / (TINY_LOGITS * plain.norm()))
    scale = float(f"{scale:.6g}")  # without its rounding
    if cap is None:
        return {"logit_scale": scale}
    capped = cap * torch.tanh(plain)
    is_capped = bool((logits(cap / scale) - capped).norm() <= FORM_TOLERANCE * capped.norm())
    return {"logit_scale": scale, "has_softcap": is_capped}


class LastHidden(tuple[Tensor]):
    """A decoder's output with these last hidden states and nothing else."""

    def __new__(cls, last_hidden_state: Tensor) -> "LastHidden":
        return super().__new__(cls, (last_hidden_state,))

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None
