"""The earlier tokens of each row, and the penalties for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class History:
    """The counts that penalties need: each row's tokens in the prompt, and their occurrences in the output so far.

    "So far" differs between the nodes of a tree: it includes the path from the root to the node.
    """

    prompt: Bool[Tensor, "batch vocab"]  # does the prompt contain the token?
    counts: Float[Tensor, "batch nodes vocab"]  # occurrences in the output; with nodes = 1 they hold for every node

    @classmethod
    def start(cls, prompts: Sequence[list[int]], vocab_size: int, device: torch.device | str) -> "History":
        """The history of rows that have no output yet."""
        seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
        for row, prompt in zip(seen, prompts, strict=True):
            row[prompt] = True
        return cls(seen.to(device), torch.zeros(len(prompts), 1, vocab_size, device=device))

    def count(self, row: int, tokens: list[int]) -> None:
        """Add tokens to a row's output, in place."""
        read = torch.tensor(tokens, dtype=torch.long, device=self.counts.device)
        self.counts[row, 0].index_add_(0, read, torch.ones(len(tokens), device=self.counts.device))

    def followed_by(
        self, tokens: Int[Tensor, "batch nodes"], ancestors: Bool[Tensor, "batch nodes nodes"]
    ) -> "History":
        """The history at each node of a tree: counts its own token and those of its ancestors, root included."""
        batch, nodes = tokens.shape
        counts = self.counts.expand(-1, nodes, -1).scatter_add(
            -1, tokens.long().unsqueeze(1).expand(batch, nodes, nodes), ancestors.float()
        )
        return History(self.prompt, counts)

    def at(self, nodes: Int[Tensor, "batch chosen"]) -> "History":
        """The history at the chosen nodes of each row."""
        index = nodes.long().unsqueeze(-1).expand(-1, -1, self.counts.shape[-1])
        return History(self.prompt, self.counts.gather(1, index))

    def extend(self, parents: Int[Tensor, "batch chosen"], tokens: Int[Tensor, "batch chosen"]) -> "History":
        """The history at new children: their parents' (node indices), plus one for each child's own token."""
        counts = self.at(parents).counts
        return History(
            self.prompt, counts.scatter_add(-1, tokens.long().unsqueeze(-1), torch.ones_like(counts[..., :1]))
        )

    def select(self, rows: Int[Tensor, " rows"]) -> "History":
        """The history of some rows."""
        return History(self.prompt[rows], self.counts[rows])


def apply_penalties(
    logits: Float[Tensor, "batch nodes vocab"],
    history: History,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Apply the repetition penalty (Keskar et al., arXiv 1909.05858), then OpenAI's frequency and presence penalty."""
    in_output = history.counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(history.prompt.unsqueeze(1) | in_output, repeated, logits)
    return logits - frequency * history.counts - presence * in_output
