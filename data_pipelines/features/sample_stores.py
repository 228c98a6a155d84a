"""The sources of training samples: a feature store on disk, or the target itself."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Protocol

from torch import Tensor

from headstart.data_pipelines.features.batches import Sample
from headstart.data_pipelines.features.features import TapTexts, tap
from headstart.data_pipelines.features.online import OnlineStore, TargetProcess
from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.stages.stage import Stage
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.ranks import Ranks
from headstart.recipes import Recipe

IN_THIS_PROCESS = ("auto",)  # data.online


class SampleStore(Protocol):
    """The interface that training uses for samples from any source."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def shard_sizes(self) -> list[int]:
        """The number of samples in each shard."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def expect(self, numbers: Sequence[int]) -> None:
        """Announce the samples that will be requested next."""

    def place_of(self, index: int) -> str:
        """Where a sample is stored, for messages."""

    def token_counts(self, vocab_size: int) -> Tensor: ...

    def tap_sizes(self, taps: tuple[int, ...], num_layers: int) -> list[float]: ...

    def close(self) -> None:
        """Stop all reading; no sample may be requested after this."""


class ReadAhead:
    """Wraps a store: one background thread reads the samples announced by `expect`, in that order.

    A read error is raised when its sample is requested. Announced samples that nobody requests stay in memory until
    `close`; after that, requests fail.
    """

    def __init__(self, store: SampleStore) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self._coming: dict[int, Future[Sample]] = {}

    @property
    def num_tokens(self) -> int:
        return self.store.num_tokens

    @property
    def shard_sizes(self) -> list[int]:
        return self.store.shard_sizes

    def __len__(self) -> int:
        return len(self.store)

    def expect(self, numbers: Sequence[int]) -> None:
        """Start reading these samples in the background."""
        self._thread.submit(self.store.expect, numbers)
        for number in numbers:
            if number not in self._coming:
                self._coming[number] = self._thread.submit(self.store.__getitem__, number)

    def __getitem__(self, index: int) -> Sample:
        # An unannounced sample also goes through the thread, because a store is read from one thread only.
        coming = self._coming.pop(index, None) or self._thread.submit(self.store.__getitem__, index)
        return coming.result()

    def place_of(self, index: int) -> str:
        return self.store.place_of(index)

    def token_counts(self, vocab_size: int) -> Tensor:
        return self._thread.submit(self.store.token_counts, vocab_size).result()

    def tap_sizes(self, taps: tuple[int, ...], num_layers: int) -> list[float]:
        return self._thread.submit(self.store.tap_sizes, taps, num_layers).result()

    def close(self) -> None:
        """Stop the thread after its current read, drop the other announced samples, and close the store."""
        self._thread.shutdown(cancel_futures=True)
        self._coming.clear()
        self.store.close()


@contextmanager
def open_stores(recipe: Recipe, harvested: Stage, taps: tuple[int, ...]) -> Iterator[tuple[SampleStore, SampleStore]]:
    """Open the training and held-out samples of the stage that `harvest` returned.

    `taps` are the head's taps without the last hidden state, which is always part of a sample.
    """
    devices, splits = recipe.data.online, ("train", "heldout")
    with ExitStack() as stack:
        train: SampleStore
        heldout: SampleStore
        if devices is None:
            train, heldout = (FeatureStore(harvested.folder, split, taps) for split in splits)
        else:
            if devices == IN_THIS_PROCESS:
                tap_texts: TapTexts = partial(tap, TargetModel.load(recipe.target, taps))
            else:
                process = TargetProcess(recipe.target, taps, devices[Ranks().rank % len(devices)])
                tap_texts = stack.enter_context(closing(process)).tap
            batch = recipe.data.harvest_batch
            train, heldout = (OnlineStore(harvested, split, tap_texts, batch) for split in splits)
        if devices != IN_THIS_PROCESS:  # reading ahead in this process would slow training down
            train = stack.enter_context(closing(ReadAhead(train)))
        yield train, heldout
