"""Features on disk: samples of variable length in safetensors shards, and a manifest with a checksum per shard.

The shards of a store at a URL are fetched shortly before training reads them, into a cache of a bounded size.
"""

import json
import shlex
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.common.files import read_json, write_text
from headstart.common.remote import cache_limit, delete, fetch, url_of
from headstart.data_pipelines.features.batches import Sample, SampleStore
from headstart.data_pipelines.features.shard_files import decode, note_path, open_shard, read_tensors, shard_entry
from headstart.data_pipelines.stages.stage import CHECKSUM, Json, checksum

MANIFEST = "manifest.json"
FETCHES = 4  # shards that are fetched at the same time


def stored_taps(taps: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The taps to store for a head: all but the last hidden state, which is stored anyway."""
    return tuple(tap for tap in taps if tap < num_layers)


def shard_name(split: str, index: int) -> str:
    return f"{split}-{index:05d}.safetensors"


def write_manifest(folder: Path, names: Iterable[str], about: Json) -> None:
    """Write the manifest of the named shards, with sizes and checksums; other shards in the folder are not listed."""
    paths = [folder / name for name in sorted(names)]
    noted = {path: read_json(note_path(path), "remove it") for path in paths if note_path(path).is_file()}
    shards = [noted[path] if path in noted else shard_entry(path) for path in paths]
    write_text(folder / MANIFEST, json.dumps({**about, "shards": shards}, indent=1))
    delete(*map(note_path, noted))
    for path in noted:
        note_path(path).unlink()


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
        if is_first and not self.holds_all:  # remove what an earlier run has left
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


class FeatureStore(SampleStore):
    """The samples of one split by number, read from disk; a shard's checksum is verified when it is first opened.

    With `taps`, samples hold only these taps, so one store serves many heads. Raises ValueError naming a tap that is
    not stored, or a shard that is missing, changed or not in the manifest. With `checks_later` a thread verifies the
    checksums, which would take seconds for the first sample of a large shard; `finish_checks` waits for it.
    """

    def __init__(
        self, folder: Path, split: str, taps: tuple[int, ...] | None = None, checks_later: bool = False
    ) -> None:
        self.folder = folder
        self._checker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksums") if checks_later else None
        self._checks: list[Future[None]] = []
        self.about = read_manifest(folder)
        stored = tuple(self.about["taps"])
        self.taps = stored if taps is None else taps
        if not set(self.taps) <= set(stored):
            raise ValueError(f"{folder} holds taps {list(stored)} and the head reads {list(self.taps)}; harvest again")
        if foreign := foreign_shards(folder):
            names, command = ", ".join(path.name for path in foreign), shlex.join(["rm", *map(str, foreign)])
            raise ValueError(f"{folder}: {names} is not in its manifest, which lists all shards; remove it ({command})")
        self.shards = [shard for shard in self.about["shards"] if shard["file"].startswith(f"{split}-")]
        self.shard_sizes = [shard["samples"] for shard in self.shards]
        self.places = [(shard, row) for shard, size in enumerate(self.shard_sizes) for row in range(size)]
        self.num_tokens = sum(shard["tokens"] for shard in self.shards)
        self._cache = None if url_of(folder) is None else ShardCache(folder, self.shards)
        self._opened: dict[int, Any] = {}
        self._offsets: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> Sample:
        shard, row = self.places[index]
        opened = self._shard(shard)
        start, end = self._offsets[shard][row : row + 2].tolist()
        last_hidden = decode(opened, "last_hidden", start, end)
        taps = [decode(opened, f"tap.{tap}", start, end) for tap in self.taps]
        return Sample(
            tokens=opened.get_slice("tokens")[start:end].long(),
            loss_mask=opened.get_slice("loss_mask")[start:end].bool(),
            taps=torch.cat(taps, dim=-1) if taps else last_hidden[:, :0],
            last_hidden=last_hidden,
        )

    def place_of(self, index: int) -> str:
        shard, row = self.places[index]
        return f"row {row} of {self.shards[shard]['file']}"

    def token_counts(self, vocab_size: int) -> Tensor:
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for shard in self.shards:  # reads no states, so no checksum either
            tensors = read_tensors(self.folder / shard["file"], ["loss_mask", "tokens"])
            counts += torch.bincount(tensors["tokens"][tensors["loss_mask"].bool()], minlength=vocab_size)
        return counts

    def follow(self, sample_at: Callable[[int], int], place: int) -> None:
        if self._cache is not None:
            self._cache.follow(lambda place: self.places[sample_at(place)][0], place, len(self.places))

    def finish_checks(self) -> None:
        while self._checks:
            self._checks.pop(0).result()

    def close(self) -> None:
        self._opened.clear()
        if self._cache is not None:
            self._cache.close()
        if self._checker is not None:
            self._checker.shutdown(cancel_futures=True)

    def _shard(self, shard: int) -> Any:
        """An open shard; it is opened and checked on first use."""
        while self._checks and self._checks[0].done():
            self._checks.pop(0).result()
        if self._cache is not None:
            opened = self._cache.opened(shard)
            if shard not in self._offsets:
                self._offsets[shard] = opened.get_tensor("offsets")
            return opened
        if shard in self._opened:
            return self._opened[shard]
        if self._checker is None:
            refuse_damaged(self.folder, self.shards[shard])
        else:
            self._checks.append(self._checker.submit(refuse_damaged, self.folder, self.shards[shard]))
        self._opened[shard] = open_shard(self.folder / self.shards[shard]["file"])
        self._offsets[shard] = self._opened[shard].get_tensor("offsets")
        return self._opened[shard]


def refuse_damaged(folder: Path, shard: Json) -> None:
    """Raise ValueError, with the remedy, if a shard that the manifest lists is not what the harvest wrote."""
    if problem := shard_damage(folder, shard):
        raise ValueError(f"{problem}; {repair(folder, [folder / shard['file']])}")


def shard_damage(folder: Path, shard: Json) -> str | None:
    """The damage of a shard in the manifest, down to a single flipped bit; None if it is intact."""
    path = folder / shard["file"]
    if not path.is_file():
        return f"{path} is in the manifest but missing on disk"
    if path.stat().st_size != shard["bytes"] or checksum(path) != shard[CHECKSUM]:
        return f"{path} is not what the harvest wrote (its checksum differs from the manifest's)"
    return None


def foreign_shards(folder: Path) -> list[Path]:
    """The shards in a store's folder that its manifest does not list."""
    listed = {shard["file"] for shard in read_manifest(folder)["shards"]}
    return [path for path in sorted(folder.glob("*.safetensors")) if path.name not in listed]


def repair(folder: Path, wrong: Iterable[Path]) -> str:
    """The remedy for shards that are damaged or lost, or that the manifest does not list."""
    files = [*(path for path in wrong if path.is_file()), folder / "stage.json", folder / MANIFEST]
    return (
        f"remove the wrong files ({shlex.join(['rm', *map(str, files)])}) and harvest again, which reuses undamaged "
        "shards; merge a merged store again"
    )


def read_manifest(folder: Path) -> Json:
    """Read a store's manifest; raises ValueError if it is missing or unreadable."""
    path = folder / MANIFEST
    if not path.is_file():
        advice = "give a folder of features, such as runs/tiny/features, or make one with headstart harvest RECIPE"
        raise ValueError(f"{folder} holds no features (no {MANIFEST}); {advice}")
    try:
        about: Json = json.loads(path.read_text())
        if not is_manifest(about):
            raise ValueError("it has no list of shards, with sizes and checksums, or of taps")
    except ValueError as error:
        needed = f"{path} cannot be read ({error}); a harvest's manifest is needed"
        raise ValueError(f"{needed}; {repair(folder, [])}") from error
    return about


def is_manifest(about: object) -> bool:
    """Whether a manifest has what every reader needs."""
    if not isinstance(about, dict) or not all(isinstance(about.get(key), list) for key in ("shards", "taps")):
        return False
    needed = {"file", "samples", "tokens", "bytes", CHECKSUM}
    return all(isinstance(shard, dict) and needed <= shard.keys() for shard in about["shards"])
