"""Acceptance by rejection sampling: draft tokens are sampled too, and the output keeps the target's distribution.

Of a node's k children, k - 1 are the likeliest tokens of the draft distribution q. The last one is
sampled from q', which is q without those, renormalised (arXiv 2502.18779; k = 1 gives a chain, arXiv 2211.17192). The
target's choice is distributed as p and maximally coupled to the sampled child. `inference.core.verify` then follows the
choices down the tree as usual, so it accepts as often as any lossless rule could with these children.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.inference.core.sampling import BatchSampling

# `BatchSampling.choose` uses stream 0 of the random numbers. Sampling a child, accepting it and choosing another token
# instead must be independent of each other, so each has a stream of its own.
DRAFT_STREAM, ACCEPT_STREAM = 1, 2


@dataclass(frozen=True)
class Proposals:
    """The sampled child of each node of a tree, and the distribution that it was sampled from."""

    tokens: Int[Tensor, "batch nodes"]  # the sampled child's token id in the target; -1 if the node has none
    log_q: Float[Tensor, "batch nodes vocab"]  # log q' over the target's vocabulary; ignored if the node has none


def propose(
    log_q: Float[Tensor, "batch nodes draft_vocab"],
    positions: Int[Tensor, "batch nodes"],
    sampling: BatchSampling,
    ids: Int[Tensor, " draft_vocab"],
    children: int,
) -> tuple[Int[Tensor, "batch nodes {children}"], Float[Tensor, "batch nodes draft_vocab"]]:
    """Draft each node's children: the likeliest ones, then one sampled from the rest. Returns them and log q'.

    `log_q` are the draft's logits after `sampling.warp`, `positions` those of the children, and `ids` the target's
    token id of each draft column. Children are returned as draft columns. Greedy rows get their likeliest tokens.
    """
    assert children <= log_q.shape[-1], f"{children} children of {log_q.shape[-1]} tokens"
    likeliest = log_q.topk(children - 1, dim=-1).indices
    rest = log_q.scatter(-1, likeliest, -torch.inf)
    # If truncation left only the likeliest tokens, any q' keeps the output exact; take it uniform over the others.
    rest = rest.masked_fill(rest.amax(-1, keepdim=True) == -torch.inf, 0).scatter(-1, likeliest, -torch.inf)
    rest = torch.log_softmax(rest, dim=-1)
    sampled = (rest + sampling.gumbel(positions, ids, DRAFT_STREAM)).argmax(-1, keepdim=True)
    return torch.cat([likeliest, sampled], dim=-1), rest


def rejection_choices(
    log_p: Float[Tensor, "batch nodes vocab"],
    positions: Int[Tensor, "batch nodes"],
    proposals: Proposals,
    sampling: BatchSampling,
) -> Int[Tensor, "batch nodes"]:
    """The target's choice at each node: distributed as p for any q', and the sampled child as often as possible.

    `log_p` are the target's logits after `sampling.warp`. A node without a sampled child gets the choice that
    `sampling.choose` would make, and a greedy row gets its argmax. Source: Leviathan et al., arXiv 2211.17192.
    """
    if sampling.all_greedy:
        return log_p.argmax(-1)
    sampled = (proposals.tokens >= 0) & ~sampling.greedy.unsqueeze(1)
    child = proposals.tokens.long().clamp(min=0)
    log_p_child, log_q_child = (of.gather(-1, child.unsqueeze(-1)).squeeze(-1) for of in (log_p, proposals.log_q))
    accepted = sampled & (sampling.uniform(positions, ACCEPT_STREAM).log() < log_p_child - log_q_child)
    residual = (log_p.exp() - proposals.log_q.exp()).clamp(min=0)  # unnormalised; sampled from after a rejection
    # The residual is zero everywhere if p equals q'. Then only rounding can have rejected, and p itself is exact.
    has_residual = sampled & (residual.amax(-1) > 0)
    gumbel = sampling.gumbel(positions, torch.arange(log_p.shape[-1], device=log_p.device))
    others = (torch.where(has_residual.unsqueeze(-1), residual.log(), log_p) + gumbel).argmax(-1)
    return torch.where(accepted, child, others)
