"""Objectives of a draft head, as pure functions of its distribution q and the target's p at each position.

All take log-probabilities, are in nats where they have a unit, and are least where q is p. With a draft vocabulary p is
the target's distribution within it, renormalised (EAGLE-3).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

LogQ = Float[Tensor, "*#axes vocab"]
LogP = Float[Tensor, "*#axes vocab"]
Positions = Float[Tensor, "*#axes"]

BLEND_SHARPNESS = 3.0  # of the Kullback-Leibler share exp(-3 alpha) in `blended_acceptance`


def soft_cross_entropy(log_q: LogQ, log_p: LogP) -> Positions:
    """Cross-entropy of q to p: the forward Kullback-Leibler divergence plus p's entropy, with the same gradient."""
    return -(log_p.exp() * log_q).sum(-1)


def forward_kl(log_q: LogQ, log_p: LogP) -> Positions:
    """KL(p || q), which makes q cover all that p does."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_q: LogQ, log_p: LogP) -> Positions:
    """KL(q || p), which makes q keep to what p does."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def acceptance(log_q: LogQ, log_p: LogP) -> Positions:
    """Chance that a token sampled from q passes speculative sampling: sum of min(p, q) (arXiv 2211.17192)."""
    return log_p.exp().minimum(log_q.exp()).sum(-1)


def total_variation(log_q: LogQ, log_p: LogP) -> Positions:
    """Half the sum of |p - q|, which is one minus the acceptance."""
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def log_acceptance(log_q: LogQ, log_p: LogP) -> Positions:
    """Minus the log of the acceptance (LK losses, arXiv 2602.23881); steep where next to nothing is accepted."""
    return -torch.minimum(log_p, log_q).logsumexp(-1)


def blended_acceptance(log_q: LogQ, log_p: LogP) -> Positions:
    """From forward KL to total variation as the acceptance of the position grows (LK losses, arXiv 2602.23881).

    lambda KL + (1 - lambda) TV with lambda = exp(-3 alpha), alpha being the acceptance and a constant to the gradient.
    """
    share = (-BLEND_SHARPNESS * acceptance(log_q, log_p)).exp().detach()
    return share * forward_kl(log_q, log_p) + (1 - share) * total_variation(log_q, log_p)


OBJECTIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "soft_cross_entropy": soft_cross_entropy,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "log_acceptance": log_acceptance,
    "blended_acceptance": blended_acceptance,
}


def feature_distance(
    hidden: Float[Tensor, "*#axes feature"], feature: Float[Tensor, "*#axes feature"]
) -> Float[Tensor, "*#axes"]:
    """Smooth-L1 distance of a guessed feature to the target's, mean over its entries (EAGLE-1)."""
    return functional.smooth_l1_loss(hidden, feature.expand_as(hidden), reduction="none").mean(-1)
