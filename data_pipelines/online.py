"""Features without a store: the target runs in the training process, and reads each sample when it is asked for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from data_pipelines.harvest import tap
from data_pipelines.responses import Text, count_written, responses_path
from data_pipelines.shards import Sample, median_tap_sizes
from data_pipelines.work import pieces
from inference.target import TargetModel
from recipes import Recipe
from recipes.jsonl import read_jsonl


class OnlineStore:
    """The samples that a harvest would store, made as they are asked for; the first `cache_bytes` of them are kept.

    Nothing is written. A cache that is full drops nothing: as every epoch asks for every sample once, keeping the first
    ones saves the most passes.
    """

    def __init__(self, recipe: Recipe, split: str, target: TargetModel, cache_bytes: float) -> None:
        self.target, self.cache_bytes = target, cache_bytes
        parts = [piece for piece in pieces(recipe) if piece.split == split]
        self.texts = [Text.from_row(row) for piece in parts for row in read_jsonl(responses_path(recipe, piece))]
        self._shard_sizes = [len(piece.rows) for piece in parts]  # those of a store, for the same order
        self.num_tokens = sum(len(text.tokens) for text in self.texts)
        self.kept: dict[int, Sample] = {}
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Sample:
        if index in self.kept:
            return self.kept[index]
        text = self.texts[index]
        [(tokens, taps, last_hidden)] = tap(self.target, [text.tokens], self.target.dtype)
        sample = Sample(tokens, torch.tensor(text.loss_mask), taps, last_hidden)
        size = taps.nbytes + last_hidden.nbytes
        if self._kept_bytes + size <= self.cache_bytes:
            self.kept[index] = sample
            self._kept_bytes += size
        return sample

    @property
    def shard_sizes(self) -> list[int]:
        return self._shard_sizes

    def expect(self, numbers: Sequence[int]) -> None:
        """Nothing to prepare: the target works when it is asked."""

    def place_of(self, index: int) -> str:
        return f"response {index} of its split"

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often the target wrote each token. [vocab]"""
        return count_written(self.texts, vocab_size)

    def tap_sizes(self, taps: tuple[int, ...], num_layers: int) -> list[float]:
        """How large each tap is, over what would be the first shard."""
        return median_tap_sizes((self[number] for number in range(self._shard_sizes[0])), taps, num_layers)
