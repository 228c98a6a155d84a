"""The shards of a store at a URL: fetched shortly before training reads them, into a cache of a bounded size."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headstart.common.remote import cache_limit, fetch
from headstart.data_pipelines.features.shard_files import open_shard
from headstart.data_pipelines.stages.stage import CHECKSUM, Json, checksum

FETCHES = 4  # shards that are fetched at the same time


class ShardCache:
    """The open shards of a store; it holds the next ones in the order of training that fit into its limit together.

    Ranks of one machine share the files. A rank that removes one takes it from no other, which has it open or fetches
    it again.
    """

    def __init__(self, folder: Path, shards: list[Json]) -> None:
        """`shards` are the manifest's entries."""
        self.folder, self.shards, self.limit = folder, shards, cache_limit()
        self.holds_all = sum(shard["bytes"] for shard in shards) <= self.limit
        self.held = 0  # bytes
        self._fetchers = ThreadPoolExecutor(max_workers=FETCHES, thread_name_prefix="shards")
        self._coming: dict[int, Future[Any]] = {}
        self._last_use: dict[int, int] = {}  # place in the order of training, as far as it has been looked at
        self._looked_at: int | None = None  # places before it have been

    def opened(self, shard: int) -> Any:
        """The open shard, of the size and checksum that the manifest says; fetched now if that was not foreseen."""
        if shard not in self._coming:
            while self._coming and self.held + self.shards[shard]["bytes"] > self.limit:
                self._drop(next(iter(self._coming)))
            self._begin(shard, -1)
        return self._coming[shard].result()

    def follow(self, shard_at: Callable[[int], int], place: int, epoch: int) -> None:
        """Drop the shards that are not needed from `place` on, and begin to fetch those that are, up to the limit.

        `shard_at` is the shard that is read at a place; `epoch` is the number of places in which all are read.
        """
        if not self.holds_all:
            for shard in [shard for shard, last in self._last_use.items() if last < place]:
                self._drop(shard)
        is_first, ahead = self._looked_at is None, max(self._looked_at or 0, place)
        while ahead < place + epoch:
            shard = shard_at(ahead)
            if shard not in self._coming:
                if self._coming and self.held + self.shards[shard]["bytes"] > self.limit:
                    break
                self._begin(shard, ahead)
            self._last_use[shard] = ahead
            ahead += 1
        self._looked_at = ahead
        if is_first and not self.holds_all:  # of an earlier run
            for number in range(len(self.shards)):
                if number not in self._coming:
                    self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        self._fetchers.shutdown(cancel_futures=True)
        self._coming.clear()

    def _path(self, shard: int) -> Path:
        return self.folder / self.shards[shard]["file"]

    def _begin(self, shard: int, place: int) -> None:
        self.held += self.shards[shard]["bytes"]
        self._last_use[shard] = place
        self._coming[shard] = self._fetchers.submit(self._fetched, shard)

    def _fetched(self, shard: int) -> Any:
        entry, path = self.shards[shard], self._path(shard)

        def is_sound(path: Path) -> bool:
            return path.stat().st_size == entry["bytes"] and checksum(path) == entry[CHECKSUM]

        try:
            if not is_sound(path):
                path.unlink()
        except FileNotFoundError:
            pass
        while True:
            fetch(path, is_sound)
            try:
                return open_shard(path)
            except ValueError:
                if path.is_file():  # else another rank has removed it
                    raise

    def _drop(self, shard: int) -> None:
        path, coming = self._path(shard), self._coming.pop(shard)
        self.held -= self.shards[shard]["bytes"]
        del self._last_use[shard]
        coming.cancel()
        coming.add_done_callback(lambda _: path.unlink(missing_ok=True))
