"""Translates published heads into our own layout: reports what it had to infer, refuses what our heads cannot do."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import DraftHead
from headstart.heads.files import HeadFiles
from headstart.heads.formats import block_rules, config_rules, tensor_rules
from headstart.heads.formats.config_rules import engine_default
from headstart.heads.formats.subject import BLOCK, SPECULATORS_BLOCK, Subject, layout_of
from headstart.heads.frozen import FrozenTarget, is_copy
from headstart.heads.kinds.block import CONFIDENCE
from headstart.heads.kinds.block_config import HIDDEN_STATES, LAYER_OUTPUTS, block_key
from headstart.heads.kinds.checkpoint import head_from_files
from headstart.heads.kinds.eagle3 import TAPS
from headstart.heads.kinds.medusa import MedusaShape
from headstart.heads.layers import rotary_table
from headstart.heads.target_config import Rope
from headstart.heads.vocab import DraftVocab

# Keys of config.json and the values that our layers can compute; the first one is meant where a key is absent.
LAYER_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "num_hidden_layers": (1,),
    "model_type": ("llama",),
    "speculators_model_type": ("eagle3",),
    "eagle_config.use_aux_hidden_state": (True,),
    "eagle_config.parallel_draft_step": (1,),
}
BLOCK_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "markov_head_type": ("vanilla", "gated"),
    "projector_type": ("dflash", "dspark"),
    "speculators_model_type": ("dflash", "dspark"),
    "selector_rank": (0,),  # of DFlash2
    "conv_kernel_size": (0,),  # of DFlash2
}
ENGINES_EPSILON = 1e-6  # what the engines assume if a Llama's config.json names no rms_norm_eps
UNRELATED = 0.9  # relative difference of two embeddings beyond which neither was trained from the other
UNREAD = ("verifier_lm_head.weight", "verifier_norm.weight", *CONFIDENCE)  # saved with heads, of no use here
NORMS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")  # absent from the first EAGLE-3 heads


# The Medusa authors' names: H.L.linear.weight, H.L.linear.bias and, with N layers, H.N.weight. vLLM reads them too.
MEDUSA_BLOCK = re.compile(r"(?:medusa_heads\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
MEDUSA_LM_HEAD = re.compile(r"(?:medusa_heads\.)?(\d+)\.\d+\.weight")


@dataclass
class Translation:
    """A published head in our own layout, changed step by step until it is complete."""

    config: dict[str, Any]  # flat
    tensors: dict[str, Tensor]  # under the reference's names
    inferred: list[str] = field(default_factory=list)  # a line for each fact that the files do not state
    refused: list[str] = field(default_factory=list)  # a line for each reason why our heads cannot represent it


def import_head(files: HeadFiles, frozen: FrozenTarget) -> tuple[DraftHead, list[str]]:
    """The head, in the dtype of `frozen`, and a line for each fact that had to be inferred.

    Raises one ValueError that names everything our heads cannot represent and every wrong tensor.
    """
    subject, translation = translate(files, frozen)
    rules = (*tensor_rules.WEIGHTS, config_rules.fits_the_target)
    translation.refused += [each.text for rule in rules for each in rule(subject, "headstart")]
    if translation.refused:
        wrong = [*translation.refused, *misfits(subject, translation)]
        advice = "correct the files, or get a head that headstart can represent"
        raise ValueError(f"{files.folder} cannot be converted: {'; '.join(wrong)}; {advice}")
    translation.config["headstart"] = {
        "taps": list(subject.taps),
        "target_num_layers": frozen.config.num_layers,
        "target_rope": asdict(frozen.config.rope),
        **{key: value for key, value in subject.note.items() if key != "engines"},
        "kind": subject.kind,
    }
    return head_from_files(files.folder, translation.config, translation.tensors, frozen), translation.inferred


def translate(files: HeadFiles, frozen: FrozenTarget) -> tuple[Subject, Translation]:
    """The files in our own layout, with everything inferred and refused on the way; builds no head yet."""
    unprefixed = {name.removeprefix("model."): tensor for name, tensor in files.tensors.items()}
    renamed = {vllm_name(name): tensor for name, tensor in unprefixed.items()}
    files_as_read = HeadFiles(files.folder, files.config, renamed)
    subject = Subject(files_as_read, layout_of(files_as_read), frozen)
    translation = Translation(dict(subject.config), dict(subject.tensors), [f"layout: {subject.layout}"])
    if subject.config.get("target_hidden_size") is None:
        translation.config.pop("target_hidden_size", None)
    if unprefixed.keys() != files.tensors.keys():
        translation.inferred.append("names: the prefix `model.` was removed")
    if renamed.keys() != unprefixed.keys():
        translation.inferred.append("names: the Medusa authors', replaced by vLLM's")
    for step in STEPS[subject.layout]:
        step(subject, translation)
    return subject, translation


def vllm_name(name: str) -> str:
    """vLLM's name of a tensor that has one of the Medusa authors' names; any other name unchanged."""
    if block := MEDUSA_BLOCK.fullmatch(name):
        return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
    if lm_head := MEDUSA_LM_HEAD.fullmatch(name):
        return f"lm_heads.{lm_head[1]}.weight"
    return name


def misfits(subject: Subject, translation: Translation) -> list[str]:
    """The missing, misshapen and unknown tensors of a refused head; others are checked when the head is built."""
    files = HeadFiles(subject.files.folder, subject.files.config, translation.tensors)
    wrong = tensor_rules.names_and_shapes(Subject(files, subject.layout, subject.frozen), "tensorrt_llm")
    return [each.text for each in wrong]


def refuse_other_values(subject: Subject, translation: Translation) -> None:
    """Refuse values in config.json that our layers cannot compute."""
    is_block, refused = subject.layout in BLOCK, translation.refused
    for key, allowed in (BLOCK_VALUES if is_block else LAYER_VALUES).items():
        _, is_nested, name = key.partition("eagle_config.")
        value = subject.eagle_config.get(name, allowed[0]) if is_nested else block_key(subject.config, key, allowed[0])
        if value not in allowed:
            refused.append(f"{key} {value!r}: only {' and '.join(map(repr, allowed))} is allowed")
    refused += [f"{key}: missing; add the head's size to config.json" for key in subject.missing_sizes]
    if is_block:
        rules = block_rules.mask_token, block_rules.block_size
        refused += [each.text for rule in rules for each in rule(subject, "headstart")]
        return
    if subject.config.get("pard_token") is not None or "mask_hidden" in translation.tensors:
        refused.append("pard_token, mask_hidden: P-EAGLE heads are not supported; DFlash and DSpark are allowed")
    if "sliding_attention" in (subject.config.get("layer_types") or []):
        refused.append("layer_types with sliding_attention: only full_attention is allowed")


def infer_rope(subject: Subject, translation: Translation) -> None:
    """Keep the head's own rotary embedding even if the target's differs: the EAGLE authors train with base 10000."""
    config = subject.config
    if not {"rope_parameters", "rope_theta", "rope_scaling"} & config.keys():
        translation.inferred.append("rope: no key for it, so base 10000, as every engine assumes")
    if "rms_norm_eps" not in config:
        translation.config["rms_norm_eps"] = ENGINES_EPSILON
        translation.inferred.append(f"rms_norm_eps: no key for it, so {ENGINES_EPSILON:g}, as every engine assumes")
    try:
        rotary_table(Rope.from_config(config), 2, 1)
    except (ValueError, KeyError) as error:
        translation.refused.append(f"rope: {error}")


def infer_attention(subject: Subject, translation: Translation) -> None:
    """Report the sizes that a Llama's config.json may omit; our layers fill them in as every engine does."""
    config = subject.config
    if subject.missing_sizes:
        return
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads") is None:
        translation.inferred.append(f"num_key_value_heads: missing, so {heads}, the same as num_attention_heads")
    if config.get("head_dim") is None:
        size = config["hidden_size"] // heads
        translation.inferred.append(f"head_dim: missing, so {size}, hidden_size / num_attention_heads")


def infer_taps(subject: Subject, translation: Translation) -> None:
    """Which hidden states the head reads, from ids in either counting; their number must match the width of `fc`."""
    top, nested = subject.config.get(TAPS), subject.eagle_config.get(TAPS)
    taps = list(subject.taps)
    if top and nested and [layer + 1 for layer in nested] != list(top):
        differ = f"{TAPS} {top} and eagle_config's {nested} name different hidden states"
        translation.refused.append(f"{differ}; eagle_config counts layer outputs, one less: remove the wrong list")
    if nested and not top and not subject.note:
        translation.inferred.append(f"taps: hidden_states {taps}, as eagle_config counts layer outputs {nested}")
    elif not top and not subject.note:
        translation.inferred.append(f"taps: hidden_states {taps}, the default of every engine")
        if taps != engine_default(subject.frozen.config.num_layers):
            translation.refused.append(f"{TAPS}: missing, and the default taps collide in such a small target; add it")
    projection = translation.tensors.get("fc.weight")
    width = len(taps) * subject.frozen.config.hidden_size
    if projection is not None and projection.ndim == 2 and projection.shape[1] != width:
        reads = f"fc.weight reads {projection.shape[1]} features but {len(taps)} hidden states have {width}"
        translation.refused.append(f"{reads}; set {TAPS} in config.json")
    translation.config[TAPS] = taps


def infer_vocabulary(subject: Subject, translation: Translation) -> None:
    """The draft vocabulary, from the offsets of `d2t` or from the members in `t2d`."""
    tensors, vocab_size = translation.tensors, subject.frozen.config.vocab_size
    scored = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else vocab_size
    if (named := subject.config.get("draft_vocab_size")) != scored:
        says = "no key for it" if named is None else f"config.json says {named}"
        translation.inferred.append(f"draft_vocab_size: {scored}, the number of rows in lm_head; {says}")
    if "d2t" not in tensors and "t2d" in tensors and scored != vocab_size:
        ids = tensors["t2d"].bool().nonzero().flatten()
        tensors["d2t"] = DraftVocab(ids, vocab_size).offsets()
        translation.inferred.append("d2t: from t2d")
    if "d2t" not in tensors and scored < vocab_size:
        translation.refused.append(f"d2t is missing: which {scored} of {vocab_size} tokens lm_head scores is unknown")
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].long()
        if "t2d" not in tensors:
            translation.inferred.append("t2d: from d2t")


def share_embedding(subject: Subject, translation: Translation) -> None:
    """Drop the embedding if it is a copy of the target's; keep another one, unless it is unrelated to the target's."""
    embedding, target = translation.tensors.get("embed_tokens.weight"), subject.frozen.embedding.float()
    if embedding is None:
        return
    # The size of the difference relative to the target's is about 1.4 for unrelated tensors of equal size.
    away = float((embedding.float() - target).norm() / target.norm()) if embedding.shape == target.shape else None
    if embedding.shape == target.shape and torch.equal(embedding, subject.frozen.embedding.to(embedding.dtype)):
        del translation.tensors["embed_tokens.weight"]
        translation.inferred.append("embed_tokens.weight: a copy of the target's, left out")
    elif away is not None and away > UNRELATED:
        differs = f"embed_tokens.weight: differs from the target's by {away:.0%}, like another target's"
        translation.refused.append(f"{differs}; one near the target's is allowed: name the target of its training")
    else:
        translation.inferred.append("embed_tokens.weight: differs from the target's, kept")


def flatten_norms(subject: Subject, translation: Translation) -> None:
    if subject.eagle_config.get("norm_before_fc"):
        translation.config["norm_before_fc"] = True
        translation.inferred.append("norm_before_fc: from eagle_config")
    if absent := [key for key in NORMS if key not in translation.config]:
        translation.inferred.append(f"{', '.join(absent)}: missing, so false")
    if subject.layout == "speculators" and "norm_before_residual" not in subject.config:
        translation.refused.append("norm_before_residual: missing; vLLM assumes true, speculators false: add it")


def drop_unread_tensors(subject: Subject, translation: Translation) -> None:
    for name in UNREAD:
        if translation.tensors.pop(name, None) is not None:
            translation.inferred.append(f"{name}: not used in drafting, left out")


def infer_medusa_sizes(subject: Subject, translation: Translation) -> None:
    """Sizes that the Medusa authors' config.json omits, or states wrongly: the tensors are right."""
    hidden, vocab_size = subject.frozen.config.hidden_size, subject.frozen.config.vocab_size
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


def sort_token_map(subject: Subject, translation: Translation) -> None:
    """Sort the draft vocabulary: ours is ascending, vLLM's may be in any order, such as by frequency."""
    ids = translation.tensors.get("token_map")
    if ids is None:
        return
    order = ids.long().argsort()
    ascending, vocab_size = ids.long()[order], translation.config["vocab_size"]
    if bool((ascending.diff() <= 0).any()) or int(ascending[0]) < 0 or int(ascending[-1]) >= vocab_size:
        translation.refused.append(f"token_map: distinct ids among the target's {vocab_size} tokens are required")
    elif not torch.equal(ascending, ids.long()):
        translation.tensors["token_map"] = ascending
        for name in [name for name in translation.tensors if name.startswith("lm_heads.")]:
            translation.tensors[name] = translation.tensors[name][order]
        translation.inferred.append("token_map: sorted, with the rows of lm_heads")


def infer_slots(subject: Subject, translation: Translation) -> None:
    """The slot convention, which the first DFlash and DSpark files do not name, and the layers that the head reads."""
    if block_key(subject.config, "sample_from_anchor") is None:
        is_dspark = "DSparkModel" in str(subject.config.get("architectures"))
        if subject.layout == SPECULATORS_BLOCK:
            takes = "vLLM takes false, speculators true for dspark"
            translation.refused.append(f"sample_from_anchor: missing; {takes}: add the one of training")
        translation.config["sample_from_anchor"] = is_dspark
        value, authors = ("true", "DeepSpec") if is_dspark else ("false", "the DFlash authors")
        translation.inferred.append(f"sample_from_anchor: missing, so {value}, the only convention of {authors}")
    if not subject.taps:
        takes = f"vLLM takes hidden_states {engine_default(subject.frozen.config.num_layers)}"
        translation.refused.append(f"{LAYER_OUTPUTS}: missing; {takes}; add the layers of its training")
    elif not subject.note:
        key = HIDDEN_STATES if subject.layout == SPECULATORS_BLOCK else LAYER_OUTPUTS
        translation.inferred.append(f"taps: hidden_states {list(subject.taps)}, from {key}")


def share_target_tensors(subject: Subject, translation: Translation) -> None:
    """Drop copies of the target's embedding and lm_head, which our block heads share."""
    tensors, frozen = translation.tensors, subject.frozen
    embedding = tensors.pop("embed_tokens.weight", None)
    if embedding is not None and not is_copy(embedding, frozen.embedding):
        allowed = "only a copy of it is allowed: name the head's own target"
        translation.refused.append(f"embed_tokens.weight: differs from the target's; {allowed}")
    elif embedding is not None:
        translation.inferred.append("embed_tokens.weight: a copy of the target's, left out")
    if "d2t" not in tensors and "lm_head.weight" in tensors and is_copy(tensors["lm_head.weight"], frozen.lm_head):
        del tensors["lm_head.weight"]
        translation.inferred.append("lm_head.weight: a copy of the target's, left out")
    if "d2t" in tensors and len(tensors["d2t"]) == frozen.config.vocab_size:  # speculators writes one for all tokens
        del tensors["d2t"]
        tensors.pop("t2d", None)


LAYER_STEPS = (refuse_other_values, infer_rope, infer_attention)
EAGLE3_STEPS = (infer_taps, infer_vocabulary, flatten_norms)
BLOCK_STEPS = (*LAYER_STEPS, infer_slots, share_target_tensors, infer_vocabulary, drop_unread_tensors)
STEPS: dict[str, tuple[Callable[[Subject, Translation], None], ...]] = {
    "eagle1": (*LAYER_STEPS, share_embedding),
    "eagle3": (*LAYER_STEPS, *EAGLE3_STEPS, share_embedding),
    "speculators": (*LAYER_STEPS, *EAGLE3_STEPS, drop_unread_tensors, share_embedding),
    "medusa": (infer_medusa_sizes, sort_token_map),
    "block": BLOCK_STEPS,
    "speculators_block": BLOCK_STEPS,
    "mtp": (),  # in our own layout already
}
