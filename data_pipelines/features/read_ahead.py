"""A sample store that reads the next samples while the current batch is trained on."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from headstart.data_pipelines.features.batches import Sample
from headstart.data_pipelines.features.online import OnlineStore
from headstart.data_pipelines.features.shards import FeatureStore


class ReadAhead:
    """Wraps a store: one background thread reads the samples announced by `expect`, in that order.

    A read error is raised when its sample is requested. Announced samples that nobody requests stay in memory until
    `close`; after that, requests fail.
    """

    def __init__(self, store: FeatureStore | OnlineStore) -> None:
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
