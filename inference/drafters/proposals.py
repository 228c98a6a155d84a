"""Children that are sampled, for acceptance by rejection: a shape fixed beforehand, and what was drawn from what."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heads.vocab import DraftVocab
from inference.drafters.growth import Fixed, Growth
from inference.rejection import Proposals, propose
from inference.sampling import BatchSampling, History
from inference.tree import Tree


class SampledChildren:
    """Of each node with k children the first k - 1 are the likeliest and the last is drawn from the rest.

    The shape must not look at what was drawn (the rule of non-anticipation), so it is a chain's or a fixed tree's.
    """

    def __init__(self, growth: Growth, vocab: DraftVocab) -> None:
        """Raises ValueError for a growth that chooses its nodes by their scores."""
        if not isinstance(growth, Fixed):
            raise ValueError(
                f"decode.growth: a {type(growth).__name__.lower()} tree looks at the tokens that it drew before it "
                f"keeps them, which rejection sampling does not allow; use chain or fixed, or decode.acceptance=seeded"
            )
        self.growth, self.vocab = growth, vocab
        self.tokens: list[Int[Tensor, "batch frontier"]] = []
        self.log_q: list[Float[Tensor, "batch frontier vocab"]] = []

    def draw(
        self, level: int, logits: Tensor, positions: Tensor, sampling: BatchSampling, history: History | None
    ) -> tuple[Tensor, Tensor]:
        """Log chances and columns [batch, frontier, children]; those that a node does not have come last."""
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

    def label(self, tree: Tree, remaining: list[int]) -> Tree:
        """The same tree with what its children were drawn from."""
        batch, nodes = tree.shape
        tokens = torch.full((batch, nodes), -1, device=tree.tokens.device)
        log_q = torch.zeros(batch, nodes, self.log_q[0].shape[-1], device=tokens.device)
        above = [path for level in self.growth.by_level for path in level]  # in the tree's order, behind the root
        number = {path: i for i, path in enumerate([(), *above])}
        for level, (drawn, level_log_q) in enumerate(zip(self.tokens, self.log_q, strict=True)):
            index = torch.tensor([number[path] for path in self.growth.expanded[level]], device=tokens.device)
            # A row without room for this level has no children there, whatever was drawn.
            roomy = torch.tensor([room > level for room in remaining], device=tokens.device)
            tokens[:, index] = torch.where(roomy[:, None], drawn, -1)
            log_q[:, index] = level_log_q
        return replace(tree, proposals=Proposals(tokens, log_q))
