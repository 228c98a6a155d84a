"""Sampled children, for acceptance by rejection sampling: the tree's shape is fixed before anything is drawn."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.heads.vocab import DraftVocab
from headstart.inference.core.drafter import Verified
from headstart.inference.core.rejection import Proposals, propose
from headstart.inference.core.sampling import BatchSampling, History
from headstart.inference.core.tree import Tree
from headstart.inference.drafters.growth import Fixed, Growth


class SampledChildren:
    """Of a node's k children, the first k - 1 are the likeliest tokens and the last is drawn from the rest.

    The tree's shape must not depend on what was drawn (non-anticipation), so it is a chain or a fixed tree.
    """

    def __init__(self, growth: Growth, vocab: DraftVocab) -> None:
        """Raise ValueError for a growth that chooses its nodes by their scores."""
        if not isinstance(growth, Fixed):
            raise ValueError(
                f"decode.growth: a {type(growth).__name__.lower()} tree chooses its nodes after it has drawn them, "
                f"which rejection sampling does not allow; use chain or searched, or decode.acceptance=seeded"
            )
        self.growth, self.vocab = growth, vocab
        self.tokens: list[Int[Tensor, "batch frontier"]] = []
        self.log_q: list[Float[Tensor, "batch frontier vocab"]] = []

    def draw(
        self, level: int, logits: Tensor, positions: Tensor, sampling: BatchSampling, history: History | None
    ) -> tuple[Tensor, Tensor]:
        """Log chances and columns of each node's children, each [batch, frontier, children].

        A node with fewer children than others has arbitrary entries at the end.
        """
        ids = self.vocab.ids.to(logits.device)
        log_q = sampling.warp(logits, history, ids).float()
        counts = self.growth.child_counts(level)
        columns = torch.zeros(*logits.shape[:2], max(counts), dtype=torch.long, device=logits.device)
        rest = torch.empty_like(log_q)
        for count in set(counts):
            nodes = torch.tensor([i for i, own in enumerate(counts) if own == count], device=logits.device)
            drawn, left = propose(log_q[:, nodes], positions[:, nodes], sampling, ids, count)
            columns[:, nodes, :count] = drawn
            rest[:, nodes] = left
        last = torch.tensor(counts, device=logits.device).expand(len(logits), -1).unsqueeze(-1) - 1
        self.tokens.append(ids[columns.gather(2, last).squeeze(-1)])
        over_target = torch.full((*rest.shape[:2], self.vocab.target_size), -torch.inf, device=rest.device)
        over_target[..., ids] = rest
        self.log_q.append(over_target)
        return log_q.gather(-1, columns), columns

    def label(self, tree: Tree, verified: Verified) -> Tree:
        """The same tree, with the distributions that its children were drawn from."""
        batch, nodes = tree.shape
        tokens = torch.full((batch, nodes), -1, device=tree.tokens.device)
        log_q = torch.zeros(batch, nodes, self.log_q[0].shape[-1], device=tokens.device)
        above = [path for level in self.growth.by_level for path in level]  # in the tree's order, without the root
        number = {path: i for i, path in enumerate([(), *above])}
        for level, (drawn, level_log_q) in enumerate(zip(self.tokens, self.log_q, strict=True)):
            index = torch.tensor([number[path] for path in self.growth.expanded[level]], device=tokens.device)
            # A row that is finished before this level has no children there, whatever was drawn.
            finished = verified.finished(level)
            tokens[:, index] = drawn if finished is None else torch.where(finished[:, None], -1, drawn)
            log_q[:, index] = level_log_q
        return replace(tree, proposals=Proposals(tokens, log_q))
