"""Features without a store: the target reads each sample when training is about to ask for it."""

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from data_pipelines.batches import length_buckets
from data_pipelines.features import Ask, on_host
from data_pipelines.responses import Text, count_written, responses_path
from data_pipelines.shard_work import pieces
from data_pipelines.shards import Sample, median_tap_sizes
from recipes import Recipe
from recipes.jsonl import read_jsonl

STEPS = 2  # whose samples are held: those of the running step, and those of the next that may be made meanwhile


class OnlineStore:
    """The samples that a harvest would store, made when the first of those that are expected together is asked for.

    Nothing is written. The first `cache_bytes` of them are kept; a cache that is full drops nothing: as every epoch
    asks for every sample once, keeping the first ones saves the most passes.
    """

    def __init__(self, recipe: Recipe, split: str, ask: Ask, cache_bytes: float) -> None:
        self.ask, self.cache_bytes, self.batch = ask, cache_bytes, recipe.data.harvest_batch
        parts = [piece for piece in pieces(recipe) if piece.split == split]
        self.texts = [Text.from_row(row) for piece in parts for row in read_jsonl(responses_path(recipe, piece))]
        self._shard_sizes = [len(piece.rows) for piece in parts]  # those of a store, for the same order
        self.num_tokens = sum(len(text.tokens) for text in self.texts)
        self.kept: dict[int, Sample] = {}
        self._kept_bytes = 0
        self._expected: deque[Sequence[int]] = deque(maxlen=STEPS)
        self._made: deque[dict[int, Sample]] = deque(maxlen=STEPS)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Sample:
        for made in (self.kept, *self._made):
            if index in made:
                return made[index]
        together = next((numbers for numbers in self._expected if index in numbers), [index])
        if len(self._made) == STEPS:
            self._made.popleft()  # before the new ones take memory
        self._made.append(dict(self._make([number for number in together if number not in self.kept])))
        return self._made[-1][index]

    @property
    def shard_sizes(self) -> list[int]:
        return self._shard_sizes

    def expect(self, numbers: Sequence[int]) -> None:
        """These will be made together, in batches of like length."""
        self._expected.append(numbers)

    def place_of(self, index: int) -> str:
        return f"response {index} of its split"

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often the target wrote each token. [vocab]"""
        return count_written(self.texts, vocab_size)

    def tap_sizes(self, taps: tuple[int, ...], num_layers: int) -> list[float]:
        """How large each tap is, over what would be the first shard."""
        numbers = list(range(self._shard_sizes[0]))
        return median_tap_sizes((sample for _, sample in self._make(numbers)), taps, num_layers)

    def close(self) -> None:
        """Nothing to end."""

    def _make(self, numbers: list[int]) -> Iterator[tuple[int, Sample]]:
        for places in length_buckets([len(self.texts[number].tokens) for number in numbers], self.batch):
            batch = [numbers[place] for place in places]
            texts = [self.texts[number] for number in batch]
            lengths = [len(text.tokens) for text in texts]
            states = on_host(vars(self.ask([text.tokens for text in texts])))
            parts = zip(states["taps"].split(lengths), states["last_hidden"].split(lengths), strict=True)
            for number, text, (taps, last_hidden) in zip(batch, texts, parts, strict=True):
                sample = Sample(torch.tensor(text.tokens), torch.tensor(text.loss_mask), taps, last_hidden)
                self._keep(number, sample)
                yield number, sample

    def _keep(self, number: int, sample: Sample) -> None:
        size = sample.taps.nbytes + sample.last_hidden.nbytes
        if self._kept_bytes + size <= self.cache_bytes and number not in self.kept:
            # Copies, as the states of a whole batch lie in one piece of memory.
            taps, last_hidden = sample.taps.clone(), sample.last_hidden.clone()
            self.kept[number] = Sample(sample.tokens, sample.loss_mask, taps, last_hidden)
            self._kept_bytes += size
