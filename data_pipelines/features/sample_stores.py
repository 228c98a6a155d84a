"""The sources of training samples: a feature store on disk, or the target itself."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Protocol

from torch import Tensor

from headstart.data_pipelines.features.batches import Sample
from headstart.data_pipelines.features.features import TapTexts, tap
from headstart.data_pipelines.features.online import OnlineStore
from headstart.data_pipelines.features.read_ahead import ReadAhead
from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.features.target_process import TargetProcess
from headstart.data_pipelines.stages.stage import Stage
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.ranks import Ranks
from headstart.recipes import Recipe

GIGABYTE = 1e9


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


@contextmanager
def open_stores(recipe: Recipe, harvested: Stage, taps: tuple[int, ...]) -> Iterator[tuple[SampleStore, SampleStore]]:
    """Open the training and held-out samples of the stage that `harvest` returned.

    `taps` are the head's taps without the last hidden state, which is always part of a sample.
    """
    data, splits = recipe.data, ("train", "heldout")
    with ExitStack() as stack:
        if data.mode == "offline":
            stored, heldout = (FeatureStore(harvested.folder, split, taps) for split in splits)
            yield stack.enter_context(closing(ReadAhead(stored))), heldout
            return
        if data.online_devices is None:
            tap_texts: TapTexts = partial(tap, TargetModel.load(recipe.target, taps))
        else:
            device = data.online_devices[Ranks().rank % len(data.online_devices)]
            tap_texts = stack.enter_context(closing(TargetProcess(recipe.target, taps, device))).tap
        made, made_heldout = (
            OnlineStore(recipe, split, tap_texts, data.cache_gigabytes * GIGABYTE) for split in splits
        )
        # Reading ahead only helps if the target runs in another process; in this one it would slow training down.
        train = made if data.online_devices is None else stack.enter_context(closing(ReadAhead(made)))
        yield train, made_heldout
