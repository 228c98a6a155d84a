"""Features without a store on disk: the target computes them shortly before training uses them."""

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headstart.common.files import read_jsonl
from headstart.data_pipelines.features.batches import Sample, length_buckets
from headstart.data_pipelines.features.features import TapTexts, on_host
from headstart.data_pipelines.features.shards import median_tap_sizes
from headstart.data_pipelines.prompts.responses import Text, count_written, responses_path
from headstart.data_pipelines.stages.shard_work import prompt_shards
from headstart.recipes import Recipe

STEPS = 2  # training steps whose samples are held: the current one, and the next, which may be read ahead


class OnlineStore:
    """The samples that a harvest would store, computed on demand: asking for one computes all that `expect` grouped it
    with.

    Nothing is written to disk. The first samples, up to `cache_bytes`, stay in memory for the whole run: every epoch
    asks for every sample once, so replacing cached samples would save nothing.
    """

    def __init__(self, recipe: Recipe, split: str, tap_texts: TapTexts, cache_bytes: float) -> None:
        self.tap_texts, self.cache_bytes, self.batch = tap_texts, cache_bytes, recipe.data.harvest_batch
        parts = [shard for shard in prompt_shards(recipe) if shard.split == split]
        self.texts = [Text.from_row(row) for shard in parts for row in read_jsonl(responses_path(recipe, shard))]
        self._shard_sizes = [len(shard.rows) for shard in parts]  # as in a stored harvest: the order depends on it
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
            self._made.popleft()  # first free the oldest step's memory
        self._made.append(dict(self._make([number for number in together if number not in self.kept])))
        return self._made[-1][index]

    @property
    def shard_sizes(self) -> list[int]:
        return self._shard_sizes

    def expect(self, numbers: Sequence[int]) -> None:
        """Announce samples to be computed together, in batches of similar length."""
        self._expected.append(numbers)

    def place_of(self, index: int) -> str:
        return f"response {index} of its split"

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each token is trained on. [vocab]"""
        return count_written(self.texts, vocab_size)

    def tap_sizes(self, taps: tuple[int, ...], num_layers: int) -> list[float]:
        """The median size of each tap over the samples of the first shard."""
        numbers = list(range(self._shard_sizes[0]))
        return median_tap_sizes((sample for _, sample in self._make(numbers)), taps, num_layers)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _make(self, numbers: list[int]) -> Iterator[tuple[int, Sample]]:
        for places in length_buckets([len(self.texts[number].tokens) for number in numbers], self.batch):
            batch = [numbers[place] for place in places]
            texts = [self.texts[number] for number in batch]
            lengths = [len(text.tokens) for text in texts]
            states = on_host(vars(self.tap_texts([text.tokens for text in texts])))
            parts = zip(states["taps"].split(lengths), states["last_hidden"].split(lengths), strict=True)
            for number, text, (taps, last_hidden) in zip(batch, texts, parts, strict=True):
                sample = Sample(torch.tensor(text.tokens), torch.tensor(text.loss_mask), taps, last_hidden)
                self._keep(number, sample)
                yield number, sample

    def _keep(self, number: int, sample: Sample) -> None:
        size = sample.taps.nbytes + sample.last_hidden.nbytes
        if self._kept_bytes + size <= self.cache_bytes and number not in self.kept:
            # Clone, or one sample would keep the memory of its whole batch.
            taps, last_hidden = sample.taps.clone(), sample.last_hidden.clone()
            self.kept[number] = Sample(sample.tokens, sample.loss_mask, taps, last_hidden)
            self._kept_bytes += size
