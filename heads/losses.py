"""Objectives of a draft head, as pure functions of its logits and the target's."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def soft_cross_entropy(
    logits: Float[Tensor, "positions vocab"], target_logits: Float[Tensor, "positions vocab"]
) -> Float[Tensor, " positions"]:
    """Cross-entropy to the target's distribution, in nats; target_logits are those of the draft vocabulary only, so
    the teacher is renormalised within it (EAGLE-3)."""
    teacher = functional.softmax(target_logits.float(), dim=-1)
    return -(teacher * functional.log_softmax(logits.float(), dim=-1)).sum(-1)


def acceptance(
    logits: Float[Tensor, "positions vocab"], target_logits: Float[Tensor, "positions vocab"]
) -> Float[Tensor, " positions"]:
    """Chance that a token sampled from the head passes speculative sampling: sum of min(p, q) (arXiv 2211.17192)."""
    teacher = functional.softmax(target_logits.float(), dim=-1)
    student = functional.softmax(logits.float(), dim=-1)
    return teacher.minimum(student).sum(-1)
