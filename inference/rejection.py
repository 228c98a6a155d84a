"""Drafts that are sampled, and the target's choice given them: accepted more often than by looking at p alone.

A node's children are the likeliest k - 1 tokens of the draft's q and one sampled from q' = q without them (arXiv
2502.18779; a chain is k = 1, arXiv 2211.17192). The choice couples p with q' maximally, and may be a likely child too;
so the walk of `inference.verify`, down while the choice is a child, accepts as often as these children allow.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from inference.sampling import BatchSampling

# Streams of noise beside the choices' own, number 0: what was drafted must be independent of what judges it.
DRAFT, ACCEPT = 1, 2


@dataclass(frozen=True)
class Proposals:
    """What was sampled while drafting, for each node of a tree."""

    tokens: Int[Tensor, "batch nodes"]  # the sampled child's target token; -1 where there is none
    log_q: Float[Tensor, "batch nodes vocab"]  # log q' over the target's vocabulary; not read where there is none


def propose(
    log_q: Float[Tensor, "batch nodes draft_vocab"],
    positions: Int[Tensor, "batch nodes"],
    sampling: BatchSampling,
    ids: Int[Tensor, " draft_vocab"],
    children: int,
) -> tuple[Int[Tensor, "batch nodes {children}"], Float[Tensor, "batch nodes draft_vocab"]]:
    """Children as columns of the draft vocabulary, the sampled one last, and log q' that it was sampled from.

    `log_q` is what `sampling.warp` makes of the draft's logits, `positions` those of the children, and `ids` the
    target's tokens of the columns. A greedy row gets its likeliest tokens.
    """
    assert children <= log_q.shape[-1], f"{children} children of {log_q.shape[-1]} tokens"
    likeliest = log_q.topk(children - 1, dim=-1).indices
    rest = log_q.scatter(-1, likeliest, -torch.inf)
    # Where truncation left nothing beside the likeliest, any q' is exact: here all other tokens alike.
    rest = rest.masked_fill(rest.amax(-1, keepdim=True) == -torch.inf, 0).scatter(-1, likeliest, -torch.inf)
    rest = torch.log_softmax(rest, dim=-1)
    sampled = (rest + sampling.gumbel(positions, ids, DRAFT)).argmax(-1, keepdim=True)
    return torch.cat([likeliest, sampled], dim=-1), rest


def rejection_choices(
    log_p: Float[Tensor, "batch nodes vocab"],
    positions: Int[Tensor, "batch nodes"],
    proposals: Proposals,
    sampling: BatchSampling,
) -> Int[Tensor, "batch nodes"]:
    """The target's choice at each node, distributed as p whatever q' is: the sampled child as often as can be.

    `log_p` is what `sampling.warp` makes of the target's logits. A node without a sampled child gets the choice that
    `sampling.choose` would make, and a greedy row its argmax.
    """
    if sampling.all_greedy:
        return log_p.argmax(-1)
    sampled = (proposals.tokens >= 0) & ~sampling.greedy.unsqueeze(1)
    child = proposals.tokens.long().clamp(min=0)
    log_p_child, log_q_child = (of.gather(-1, child.unsqueeze(-1)).squeeze(-1) for of in (log_p, proposals.log_q))
    accepted = sampled & (sampling.uniform(positions, ACCEPT).log() < log_p_child - log_q_child)
    beyond = (log_p.exp() - proposals.log_q.exp()).clamp(min=0)  # what a rejected child leaves, up to a factor
    # It is zero everywhere when p equals q'; then only rounding can have rejected, and p itself will do.
    leaves = sampled & (beyond.amax(-1) > 0)
    noise = sampling.gumbel(positions, torch.arange(log_p.shape[-1], device=log_p.device))
    others = (torch.where(leaves.unsqueeze(-1), beyond.log(), log_p) + noise).argmax(-1)
    return torch.where(accepted, child, others)


def check_proposals(
    tokens: Int[Tensor, " nodes"], parents: Int[Tensor, " nodes"], proposed: Int[Tensor, " nodes"]
) -> None:
    """Assert, of one row, that each sampled child is in the tree: nothing was pruned after a look at what was sampled.

    Neither may a node go because of what was sampled below it, which a finished tree cannot show.
    """
    children = set(zip(parents.tolist(), tokens.tolist(), strict=True))
    for node, token in enumerate(proposed.tolist()):
        assert token < 0 or (node, token) in children, (
            f"node {node}: its sampled child, token {token}, was pruned, which biases the output"
        )


def typical_allowed(
    log_p: Float[Tensor, "batch nodes vocab"],
    tokens: Int[Tensor, "batch nodes"],
    parents: Int[Tensor, "batch nodes"],
    sampling: BatchSampling,
) -> Bool[Tensor, "batch nodes"]:
    """Is each node's token typical enough of p at its parent? Medusa's rule (arXiv 2401.10774, section 2.3.1); lossy.

    Allowed if p(x) > min(epsilon, delta * exp(-entropy of p)); in a greedy row, if it is the argmax. What is said of a
    node without a parent (-1) means nothing.
    """
    above = parents.long().clamp(min=0)
    entropy = torch.special.entr(log_p.float().exp()).sum(-1)
    limit = torch.minimum(sampling.typical_epsilon, sampling.typical_delta * torch.exp(-entropy)).gather(1, above)
    of_parents = log_p.gather(1, above.unsqueeze(-1).expand_as(log_p))
    typical = of_parents.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1).exp() > limit
    return torch.where(sampling.greedy.unsqueeze(1), tokens == log_p.argmax(-1).gather(1, above), typical)
