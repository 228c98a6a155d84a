"""A store that reads what will be asked for next while the current batch is being trained on."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from data_pipelines.online import OnlineStore
from data_pipelines.shards import FeatureStore, Sample


class ReadAhead:
    """The same samples as the store's; one background thread reads those that `expect` named, in that order.

    An error of reading is raised where the sample is asked for. Samples that are expected and never asked for stay in
    memory until `close`, behind which nothing can be asked for.
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
        """Begin to read these samples."""
        self._thread.submit(self.store.expect, numbers)
        for number in numbers:
            if number not in self._coming:
                self._coming[number] = self._thread.submit(self.store.__getitem__, number)

    def __getitem__(self, index: int) -> Sample:
        # Also a surprise goes through the thread: stores are read from one thread.
        coming = self._coming.pop(index, None) or self._thread.submit(self.store.__getitem__, index)
        return coming.result()

    def place_of(self, index: int) -> str:
        return self.store.place_of(index)

    def token_counts(self, vocab_size: int) -> Tensor:
        return self._thread.submit(self.store.token_counts, vocab_size).result()

    def tap_sizes(self, taps: tuple[int, ...], num_layers: int) -> list[float]:
        return self._thread.submit(self.store.tap_sizes, taps, num_layers).result()

    def close(self) -> None:
        """End the thread; what is being read is finished, the rest is dropped."""
        self._thread.shutdown(cancel_futures=True)
        self._coming.clear()
        self.store.close()
