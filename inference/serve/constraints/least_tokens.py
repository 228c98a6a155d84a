"""A constraint that lets a text end only after some number of tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from headstart.inference.core.constraint import Path


@dataclass(frozen=True)
class LeastTokens:
    """Forbids end tokens before a text has `count` tokens."""

    count: int
    end_tokens: tuple[int, ...]
    vocab_size: int

    def start(self) -> "LeastTokensState":
        every = torch.ones(self.vocab_size, dtype=torch.bool)
        without_ends = every.clone()
        without_ends[list(self.end_tokens)] = False
        return LeastTokensState(self.count, every, without_ends)


@dataclass
class LeastTokensState:
    """Where one text stands."""

    left: int  # tokens until it may end
    every: Bool[Tensor, " vocab"]
    without_ends: Bool[Tensor, " vocab"]

    def allowed(self, path: Path) -> Bool[Tensor, " vocab"]:
        return self.without_ends if len(path) < self.left else self.every

    def advance(self, tokens: list[int]) -> int:
        self.left = max(self.left - len(tokens), 0)
        return len(tokens)
