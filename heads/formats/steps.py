"""Steps that translate published heads of several layouts into our own: they report what the files do not state."""

import torch

from headstart.heads.formats.subject import Subject, Translation
from headstart.heads.layers import rotary_table
from headstart.heads.target_config import Rope
from headstart.heads.vocab import DraftVocab

UNRELATED = 0.9  # relative difference of two embeddings beyond which neither was trained from the other
ENGINES_EPSILON = 1e-6  # what the engines assume if a Llama's config.json names no rms_norm_eps
UNUSED = ("verifier_lm_head.", "verifier_norm.", "confidence_head.")  # saved with speculators' and DSpark's heads


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
        translation.refused += [f"{key}: missing; add the head's size to config.json" for key in subject.missing_sizes]
        return
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads") is None:
        translation.inferred.append(f"num_key_value_heads: missing, so {heads}, the same as num_attention_heads")
    if config.get("head_dim") is None:
        size = config["hidden_size"] // heads
        translation.inferred.append(f"head_dim: missing, so {size}, hidden_size / num_attention_heads")


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
    own, target = translation.tensors.get("embed_tokens.weight"), subject.frozen.embedding.float()
    if own is None:
        return
    # The size of the difference relative to the target's is about 1.4 for unrelated tensors of equal size.
    away = float((own.float() - target).norm() / target.norm()) if own.shape == target.shape else None
    if own.shape == target.shape and torch.equal(own, subject.frozen.embedding.to(own.dtype)):
        del translation.tensors["embed_tokens.weight"]
        translation.inferred.append("embed_tokens.weight: a copy of the target's, left out")
    elif away is not None and away > UNRELATED:
        differs = f"embed_tokens.weight: differs from the target's by {away:.0%}, as that of another target does"
        translation.refused.append(f"{differs}; one near the target's is allowed: name the target of its training")
    else:
        translation.inferred.append("embed_tokens.weight: differs from the target's, kept")


def leave_out_unused(subject: Subject, translation: Translation) -> None:
    for name in [name for name in translation.tensors if name.startswith(UNUSED)]:
        del translation.tensors[name]
        translation.inferred.append(f"{name}: not used in drafting, left out")
