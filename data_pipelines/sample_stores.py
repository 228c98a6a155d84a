"""Where training samples come from: a store on disk, or the target itself."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Protocol

from torch import Tensor

from data_pipelines.features import Ask, tap
from data_pipelines.online import OnlineStore
from data_pipelines.read_ahead import ReadAhead
from data_pipelines.shards import FeatureStore, Sample
from data_pipelines.stage import Stage
from data_pipelines.target_process import TargetProcess
from inference.target.model import TargetModel
from inference.target.ranks import Ranks
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

    def close(self) -> None:
        """End whatever reads; nothing is asked for behind it."""


@contextmanager
def open_stores(recipe: Recipe, harvested: Stage, taps: tuple[int, ...]) -> Iterator[tuple[SampleStore, SampleStore]]:
    """The samples to train on and those held out, from what `harvest` returned; `taps` are those below the last one."""
    data, splits = recipe.data, ("train", "heldout")
    with ExitStack() as ends:
        if data.mode == "offline":
            stored, heldout = (FeatureStore(harvested.folder, split, taps) for split in splits)
            yield ends.enter_context(closing(ReadAhead(stored))), heldout
            return
        if data.online_devices is None:
            ask: Ask = partial(tap, TargetModel.load(recipe.target, taps))
        else:
            device = data.online_devices[Ranks().rank % len(data.online_devices)]
            ask = ends.enter_context(closing(TargetProcess(recipe.target, taps, device))).ask
        made, made_heldout = (OnlineStore(recipe, split, ask, data.cache_gigabytes * GIGABYTE) for split in splits)
        # A target of this process would only get in the way of the training.
        train = made if data.online_devices is None else ends.enter_context(closing(ReadAhead(made)))
        yield train, made_heldout
