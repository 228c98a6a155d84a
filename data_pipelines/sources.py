"""Where training samples come from: a store on disk, or the target itself."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from data_pipelines.online import OnlineStore
from data_pipelines.read_ahead import ReadAhead
from data_pipelines.shards import FeatureStore, Sample
from data_pipelines.stage import Stage
from inference.target import TargetModel
from recipes import Recipe

GIGABYTE = 1e9


class SampleStore(Protocol):
    """What training asks of features, wherever they come from."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def shard_sizes(self) -> list[int]:
        """Samples of each part that is best read as a whole."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def expect(self, numbers: Sequence[int]) -> None:
        """Say which samples will be asked for next."""

    def place_of(self, index: int) -> str:
        """Where a sample lies, for those who look for it."""

    def token_counts(self, vocab_size: int) -> Tensor: ...

    def tap_sizes(self, taps: tuple[int, ...], num_layers: int) -> list[float]: ...


def open_stores(recipe: Recipe, harvested: Stage, taps: tuple[int, ...]) -> tuple[SampleStore, SampleStore]:
    """The samples to train on and those held out, from what `harvest` returned; `taps` are those below the last one."""
    if recipe.data.mode == "offline":
        train, heldout = (FeatureStore(harvested.folder, split, taps) for split in ("train", "heldout"))
        return ReadAhead(train), heldout
    target, cache_bytes = TargetModel.load(recipe.target, taps), recipe.data.cache_gigabytes * GIGABYTE
    return OnlineStore(recipe, "train", target, cache_bytes), OnlineStore(recipe, "heldout", target, cache_bytes)
