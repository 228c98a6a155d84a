"""Training objectives: pure functions of the head's distribution q and the target's distribution p at each position.

All take log-probabilities and are in nats where they have a unit; every objective is minimal where q equals p. With a
draft vocabulary, p is the target's distribution restricted to it and renormalised (EAGLE-3).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

LogQ = Float[Tensor, "*#axes vocab"]
LogP = Float[Tensor, "*#axes vocab"]
Positions = Float[Tensor, "*#axes"]

BLEND_SHARPNESS = 3.0  # the 3 in exp(-3 alpha), the weight of the KL divergence in `blended_acceptance`


def soft_cross_entropy(log_q: LogQ, log_p: LogP) -> Positions:
    """Cross-entropy of q relative to p: the forward KL divergence plus the entropy of p, with the same gradient."""
    return -(log_p.exp() * log_q).sum(-1)


def forward_kl(log_q: LogQ, log_p: LogP) -> Positions:
    """KL(p || q), which makes q cover everything that p covers."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_q: LogQ, log_p: LogP) -> Positions:
    """KL(q || p), which makes q avoid everything that p avoids."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def acceptance(log_q: LogQ, log_p: LogP) -> Positions:
    """Probability that speculative sampling accepts a token drawn from q: sum of min(p, q) (arXiv 2211.17192)."""
    return log_p.exp().minimum(log_q.exp()).sum(-1)


def total_variation(log_q: LogQ, log_p: LogP) -> Positions:
    """Half the sum of |p - q|, which is 1 - acceptance."""
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def log_acceptance(log_q: LogQ, log_p: LogP) -> Positions:
    """-log(acceptance) (LK losses, arXiv 2602.23881); its gradient is large where almost nothing is accepted."""
    return -torch.minimum(log_p, log_q).logsumexp(-1)


def blended_acceptance(log_q: LogQ, log_p: LogP) -> Positions:
    """A blend that moves from forward KL to total variation as acceptance grows (LK losses, arXiv 2602.23881).

    lambda KL + (1 - lambda) TV; lambda = exp(-3 acceptance), through which no gradient flows.
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
    """Smooth-L1 distance between a predicted feature and the target's, averaged over its entries (EAGLE-1)."""
    return functional.smooth_l1_loss(hidden, feature.expand_as(hidden), reduction="none").mean(-1)
