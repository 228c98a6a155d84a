"""Heads as others publish them, brought into our own layout: what is inferred is said, what has no place is refused."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.base import DraftHead
from heads.checkpoint import head_from_files
from heads.formats import medusa_rules, tensor_rules
from heads.formats.files import HeadFiles
from heads.formats.medusa_rules import num_heads
from heads.formats.subject import MEDUSA, Subject, layout_of
from heads.formats.tap_rules import KEY, engine_default
from heads.frozen import FrozenTarget
from heads.layers import rotary_table
from heads.target_config import Rope
from heads.vocab import DraftVocab

ENGINES_EPSILON = 1e-6  # of a Llama's config.json that names none
NOT_SERVED = ("verifier_lm_head.weight", "verifier_norm.weight")  # speculators keeps them beside the head for training


NORMS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")  # that later heads than the first have


@dataclass
class Import:
    """A head on its way in: a flat config.json, tensors by the reference's names, and what was not written there."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    inferred: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def import_head(files: HeadFiles, frozen: FrozenTarget) -> tuple[DraftHead, list[str]]:
    """The head, in the dtype of `frozen`, and what had to be inferred.

    Raises ValueError naming everything that our heads have no place for, and all tensors that are missing, misshapen or
    unknown.
    """
    subject, found = gather(files, frozen)
    if found.refused:
        wrong = [*found.refused, *misfits(subject, found)]
        raise ValueError(f"{files.folder} cannot be brought in: " + "; ".join(wrong))
    return build(files.folder, subject, found), found.inferred


def gather(files: HeadFiles, frozen: FrozenTarget) -> tuple[Subject, Import]:
    """What the files say in our own layout, with all that was inferred and refused; nothing is built yet."""
    unprefixed = {name.removeprefix("model."): tensor for name, tensor in files.tensors.items()}
    subject = Subject(HeadFiles(files.folder, files.config, unprefixed), layout_of(files), frozen)
    found = Import(dict(subject.config), dict(subject.tensors), [f"layout: {subject.layout}"])
    if unprefixed.keys() != files.tensors.keys():
        found.inferred.append("names: the prefix `model.` left out")
    for step in STEPS[subject.layout]:
        step(subject, found)
    return subject, found


def widest_dtype(files: HeadFiles) -> torch.dtype:
    """The dtype that holds every number of the file, so that no bit is lost."""
    floats = {tensor.dtype for tensor in files.tensors.values() if tensor.is_floating_point()}
    return reduce(torch.promote_types, sorted(floats, key=str)) if floats else torch.float32


def misfits(subject: Subject, found: Import) -> list[str]:
    """Tensors that are missing, misshapen or unknown, of a head that is refused before it could be built to say so."""
    files = HeadFiles(subject.files.folder, subject.files.config, found.tensors)
    rules = medusa_rules if subject.layout in MEDUSA else tensor_rules
    wrong = rules.names_and_shapes(Subject(files, subject.layout, subject.frozen), "tensorrt_llm")
    return [f"{each.where}: {each.value} found, {each.allowed}" for each in wrong]


def build(folder: Path, subject: Subject, found: Import) -> DraftHead:
    """The head itself, every tensor checked."""
    target = subject.frozen.config
    found.config["headstart"] = {
        "taps": list(subject.taps),
        "target_num_layers": target.num_layers,
        "target_rope": asdict(target.rope),
        **{key: value for key, value in subject.own.items() if key != "engines"},
        "kind": subject.kind,
    }
    return head_from_files(folder, found.config, found.tensors, subject.frozen)


def refuse_other_layers(subject: Subject, found: Import) -> None:
    """What a config.json may ask for and our layer does not do."""
    config = subject.config
    if "speculators_model_type" in config and config["speculators_model_type"] != "eagle3":
        found.refused.append(f"speculators_model_type {config['speculators_model_type']!r}: 'eagle3' is allowed")
    for key, allowed in (("hidden_act", "silu"), ("num_hidden_layers", 1), ("model_type", "llama")):
        if config.get(key, allowed) != allowed:
            found.refused.append(f"{key} {config[key]!r}: {allowed!r} is allowed")
    for key, allowed in (("use_aux_hidden_state", True), ("parallel_draft_step", 1)):
        if subject.eagle_config.get(key, allowed) != allowed:
            found.refused.append(f"eagle_config.{key} {subject.eagle_config[key]!r}: {allowed!r} is allowed")
    if "sliding_attention" in (config.get("layer_types") or []):
        found.refused.append("layer_types with sliding_attention: full_attention is allowed")
    found.refused += [f"{key}: nothing found, the head's size is allowed" for key in subject.missing_sizes]


def infer_rope(subject: Subject, found: Import) -> None:
    """The head keeps its own, whatever the target's: the reference trains with base 10000."""
    own = subject.config
    if not {"rope_parameters", "rope_theta", "rope_scaling"} & own.keys():
        found.inferred.append("rope: no key for it, so base 10000, as every engine takes it")
    if "rms_norm_eps" not in own:
        found.config["rms_norm_eps"] = ENGINES_EPSILON
        found.inferred.append(f"rms_norm_eps: no key for it, so {ENGINES_EPSILON:g}, as every engine takes it")
    try:
        rotary_table(Rope.from_config(own), 2, 1)
    except (ValueError, KeyError) as error:
        found.refused.append(f"rope: {error}")


def infer_attention(subject: Subject, found: Import) -> None:
    """What a Llama's config.json may leave open, and the layers take as every engine does."""
    config = subject.config
    if subject.missing_sizes:
        return
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads") is None:
        found.inferred.append(f"num_key_value_heads: nothing found, so {heads}, as many as num_attention_heads")
    if config.get("head_dim") is None:
        found.inferred.append(f"head_dim: nothing found, so {config['hidden_size'] // heads}, hidden_size by heads")


def infer_taps(subject: Subject, found: Import) -> None:
    """Which hidden states the head reads, from ids in either counting, and as many as `fc` is wide."""
    top, beside = subject.config.get(KEY), subject.eagle_config.get(KEY)
    taps = list(subject.taps)
    if top and beside and [layer + 1 for layer in beside] != list(top):
        found.refused.append(
            f"{KEY} {top} and eagle_config's {beside} name different hidden states; the latter count layer outputs and "
            f"must be one less: leave the wrong ones out"
        )
    if beside and not top and not subject.own:
        found.inferred.append(f"taps: hidden_states {taps}, as eagle_config counts layer outputs {beside}")
    elif not top and not subject.own:
        found.inferred.append(f"taps: hidden_states {taps}, where every engine looks by default")
        if taps != engine_default(subject.frozen.config.num_layers):
            found.refused.append(f"{KEY}: nothing found, and the usual places collide in so small a target; add it")
    projection = found.tensors.get("fc.weight")
    width = len(taps) * subject.frozen.config.hidden_size
    if projection is not None and projection.ndim == 2 and projection.shape[1] != width:
        found.refused.append(
            f"fc.weight reads {projection.shape[1]} features and {len(taps)} hidden states of the target have {width}; "
            f"add {KEY} to config.json"
        )
    found.config[KEY] = taps


def infer_vocabulary(subject: Subject, found: Import) -> None:
    """`d2t` of offsets, or what `t2d` says of it."""
    tensors, vocab_size = found.tensors, subject.frozen.config.vocab_size
    scored = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else vocab_size
    if "draft_vocab_size" not in subject.config:
        found.inferred.append(f"draft_vocab_size: {scored}, the rows of lm_head")
    if "d2t" not in tensors and "t2d" in tensors and scored != vocab_size:
        ids = tensors["t2d"].bool().nonzero().flatten()
        tensors["d2t"] = DraftVocab(ids, vocab_size).offsets()
        found.inferred.append("d2t: from t2d")
    if "d2t" not in tensors and scored != vocab_size:
        found.refused.append(f"d2t is missing: lm_head scores {scored} of {vocab_size} tokens, and which is not said")
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].long()
        if "t2d" not in tensors:
            found.inferred.append("t2d: from d2t")


def share_embedding(subject: Subject, found: Import) -> None:
    """A copy of the target's embedding is left out; another one stays the head's own."""
    own, target = found.tensors.get("embed_tokens.weight"), subject.frozen.embedding
    if own is not None and own.shape == target.shape and torch.equal(own, target.to(own.dtype)):
        del found.tensors["embed_tokens.weight"]
        found.inferred.append("embed_tokens.weight: the target's, left out")
    elif own is not None:
        found.inferred.append("embed_tokens.weight: another than the target's, kept")


def flatten_norms(subject: Subject, found: Import) -> None:
    if subject.eagle_config.get("norm_before_fc"):
        found.config["norm_before_fc"] = True
        found.inferred.append("norm_before_fc: from eagle_config")
    if absent := [key for key in NORMS if key not in found.config]:
        found.inferred.append(f"{', '.join(absent)}: nothing found, so false")
    if subject.layout == "speculators" and "norm_before_residual" not in subject.config:
        found.refused.append(
            "norm_before_residual: nothing found; vLLM takes it for true, speculators for false: add it"
        )
    if found.config.get("target_hidden_size") is None:
        found.config.pop("target_hidden_size", None)


def leave_out_training(subject: Subject, found: Import) -> None:
    for name in NOT_SERVED:
        if found.tensors.pop(name, None) is not None:
            found.inferred.append(f"{name}: only for training, left out")


def refuse_other_medusa(subject: Subject, found: Import) -> None:
    if subject.config.get("original_lm_head"):
        found.refused.append("original_lm_head true: false is allowed, an lm_head for each head")


def infer_medusa_sizes(subject: Subject, found: Import) -> None:
    """The reference's config.json says neither; how many heads there are, the tensors know best."""
    hidden, vocab_size = subject.frozen.config.hidden_size, subject.frozen.config.vocab_size
    scored = found.tensors.get("lm_heads.0.weight")
    if scored is None or scored.ndim != 2:
        found.refused.append("lm_heads.0.weight (0.N.weight of the reference): a matrix is allowed, for each head")
        return
    rows = vocab_size if "token_map" in found.tensors else scored.shape[0]
    for key, value, reason in (("hidden_size", scored.shape[1], hidden), ("vocab_size", rows, vocab_size)):
        if key not in subject.config:
            found.config[key] = value
            found.inferred.append(f"{key}: {value}, of lm_heads.0.weight (the target has {reason})")
    if not subject.config.get("medusa_fc_bias") and "blocks.0.layers.0.bias" in found.tensors:
        found.inferred.append("medusa_fc_bias: true, as the blocks have biases")
    named, count = subject.config.get("num_heads", subject.config.get("medusa_num_heads")), num_heads(subject)
    if named != count:
        found.inferred.append(f"num_heads: {count}, as many as there are tensors for; config.json says {named}")


def sort_token_map(subject: Subject, found: Import) -> None:
    """Ours is ascending; vLLM's may come in any order, such as by frequency."""
    ids = found.tensors.get("token_map")
    if ids is None:
        return
    order = ids.long().argsort()
    ascending = ids.long()[order]
    if (
        bool((ascending.diff() <= 0).any())
        or not 0 <= int(ascending[0]) <= int(ascending[-1]) < found.config["vocab_size"]
    ):
        found.refused.append(
            f"token_map: different ids of the target's {found.config['vocab_size']} tokens are allowed"
        )
    elif not torch.equal(ascending, ids.long()):
        found.tensors["token_map"] = ascending
        for name in [name for name in found.tensors if name.startswith("lm_heads.")]:
            found.tensors[name] = found.tensors[name][order]
        found.inferred.append("token_map: sorted, and the rows of lm_heads with it")


LAYER_STEPS = (refuse_other_layers, infer_rope, infer_attention)
EAGLE3_STEPS = (infer_taps, infer_vocabulary, flatten_norms)
MEDUSA_STEPS = (refuse_other_medusa, infer_medusa_sizes, sort_token_map)
STEPS: dict[str, tuple[Callable[[Subject, Import], None], ...]] = {
    "eagle1": (*LAYER_STEPS, share_embedding),
    "eagle3": (*LAYER_STEPS, *EAGLE3_STEPS, share_embedding),
    "speculators": (*LAYER_STEPS, *EAGLE3_STEPS, leave_out_training, share_embedding),
    "medusa": MEDUSA_STEPS,
    "medusa_reference": MEDUSA_STEPS,
}
