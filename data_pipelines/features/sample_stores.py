"""The sources of training samples: a feature store on disk, or the target itself, shortly before they are used."""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from threading import Lock

import torch
from safetensors.torch import load, save
from torch import Tensor

from headstart.common.process import end_with_parent
from headstart.data_pipelines.features.batches import (
    Sample,
    SampleStore,
    TrainingBatch,
    length_buckets,
    median_tap_sizes,
)
from headstart.data_pipelines.features.features import GPU_PASS, States, TapTexts, on_host, refuse_non_finite, tap
from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.prompts.responses import read_texts
from headstart.data_pipelines.stages.stage import Stage
from headstart.inference.core.request import Images
from headstart.inference.images.kept import KeptPictures
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.ranks import Ranks
from headstart.recipes import Recipe
from headstart.recipes.schema import TargetSection

IN_THIS_PROCESS = ("auto",)  # data.online
BATCHES_AHEAD = 2  # batches that are made before they are requested
STEPS = 2  # training steps whose samples an online store holds: the current one, and the next, which may be read ahead
ON_DEVICE = 2**30  # bytes of a step's states that stay on the target's device; those of a larger step wait on the host


@contextmanager
def open_stores(
    recipe: Recipe, harvested: Stage, taps: tuple[int, ...], load: Callable[[], TargetModel]
) -> Iterator[tuple[SampleStore, SampleStore]]:
    """Open the training and held-out samples of a harvest; `taps` are the head's without the last hidden state.

    Only samples that are computed in this process `load` the target.
    """
    devices, splits = recipe.data.online, ("train", "heldout")
    with ExitStack() as stack:
        train: SampleStore
        heldout: SampleStore
        if devices is None:
            train, heldout = (FeatureStore(harvested.folder, split, taps, checks_later=True) for split in splits)
            stack.enter_context(closing(heldout))
        else:
            if devices == IN_THIS_PROCESS:
                tap_texts: TapTexts = partial(tap, load(), taps=taps)
            else:
                process = TargetProcess(recipe.target, taps, devices[Ranks().rank % len(devices)])
                tap_texts = stack.enter_context(closing(process)).tap
            batch, dtype = recipe.data.harvest_batch, recipe.target.dtype
            most = GPU_PASS if torch.cuda.is_available() else 0
            pictures = KeptPictures(recipe)
            train, heldout = (
                OnlineStore(harvested, split, tap_texts, batch, dtype, pictures, most) for split in splits
            )
        if devices != IN_THIS_PROCESS:  # reading ahead in this process would slow training down
            train = stack.enter_context(closing(ReadAhead(train)))
        yield train, heldout


class OnlineStore(SampleStore):
    """The samples that a harvest would store, computed on demand, those that `expect` announces together."""

    def __init__(
        self,
        responses: Stage,
        split: str,
        tap_texts: TapTexts,
        batch: int,
        dtype: str,
        pictures: KeptPictures,
        tokens: int = 0,
    ) -> None:
        """One forward of the target, whose number format is `dtype`, has the texts of a group of `length_buckets`."""
        self.tap_texts, self.batch, self.dtype, self.pictures, self.tokens = tap_texts, batch, dtype, pictures, tokens
        names = [name for name in sorted(responses.facts()["files"]) if name.startswith(f"{split}-")]
        shards = [read_texts(responses.folder / name) for name in names]
        self.texts = [text for shard in shards for text in shard]
        self.shard_sizes = [len(shard) for shard in shards]  # as in a stored harvest: the order depends on it
        self.num_tokens = sum(len(text.tokens) for text in self.texts)
        self._expected: deque[Sequence[int]] = deque(maxlen=STEPS)
        self._made: deque[dict[int, Sample]] = deque(maxlen=STEPS)

    def __getitem__(self, index: int) -> Sample:
        for made in self._made:
            if index in made:
                return made[index]
        together = next((numbers for numbers in self._expected if index in numbers), [index])
        if len(self._made) == STEPS:
            self._made.popleft()  # first free the oldest step's memory
        self._made.append(dict(self._make(together)))
        return self._made[-1][index]

    def expect(self, batches: Sequence[Sequence[int]], limit: int | None = None) -> None:
        self._expected.append([*dict.fromkeys(number for numbers in batches for number in numbers)])

    def place_of(self, index: int) -> str:
        return f"response {index} of its split"

    def token_counts(self, vocab_size: int) -> Tensor:
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for text in self.texts:
            counts += torch.bincount(torch.tensor(text.tokens)[torch.tensor(text.loss_mask)], minlength=vocab_size)
        return counts

    def tap_sizes(self, taps: tuple[int, ...], num_layers: int) -> list[float]:
        samples = self._make(range(self.shard_sizes[0]))
        return median_tap_sizes((sample for _, sample in samples), taps, num_layers)

    def _make(self, numbers: Sequence[int]) -> Iterator[tuple[int, Sample]]:
        all_lengths = [len(self.texts[number].tokens) for number in numbers]
        for places in length_buckets(all_lengths, self.batch, self.tokens):
            batch = [numbers[place] for place in places]
            texts = [self.texts[number] for number in batch]
            lengths = [len(text.tokens) for text in texts]
            images = [self.pictures.read(text.images) for text in texts]
            found = self.tap_texts([text.tokens for text in texts], images)
            refuse_non_finite(self.dtype, found, f"responses {', '.join(map(str, batch))}")
            states = vars(found)
            if sum(each[0].nbytes for each in states.values()) * sum(all_lengths) > ON_DEVICE:
                states = on_host(states)
            parts = zip(states["taps"].split(lengths), states["last_hidden"].split(lengths), strict=True)
            for number, text, (taps, last_hidden) in zip(batch, texts, parts, strict=True):
                yield number, Sample(torch.tensor(text.tokens), torch.tensor(text.loss_mask), taps, last_hidden)


class TargetProcess:
    """A target in a process of its own, on its own device, which ends when closed or when this process ends."""

    def __init__(self, section: TargetSection, taps: tuple[int, ...], device: str) -> None:
        self.device = device
        context = multiprocessing.get_context("spawn")  # a forked process could not use a GPU
        self._pipe, its_end = context.Pipe()
        section = section.model_copy(update={"device": device})
        self._process = context.Process(target=serve, args=(section, taps, its_end), daemon=True)
        self._process.start()
        its_end.close()
        self._lock = Lock()  # training samples are requested from a thread, held-out ones from the main thread

    def tap(self, texts: list[list[int]], images: Sequence[Images | None] = ()) -> States:
        """The states of the texts; raises ValueError if the process has ended."""
        try:
            with self._lock:
                self._pipe.send((texts, images))
                answer = self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise ValueError(f"data.online: the target's process on {self.device} ended; see its error") from error
        return States(**load(answer))

    def close(self) -> None:
        self._pipe.close()  # the process ends when its pipe closes
        self._process.join()


def serve(section: TargetSection, taps: tuple[int, ...], pipe: Connection) -> None:
    """Answer requests until the pipe is closed or the other process is gone."""
    # Ctrl-C reaches every process; training saves first, then closes this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    target = TargetModel.load(section, taps)
    while True:
        try:
            texts, images = pipe.recv()
        except EOFError:
            return
        states = tap(target, texts, images)
        pipe.send_bytes(save({name: tensor.cpu() for name, tensor in vars(states).items()}))


class ReadAhead(SampleStore):
    """Makes announced batches of a store in a background thread; errors are raised where the batch is requested.

    Only the next BATCHES_AHEAD are made, which bounds memory. Where there is a GPU they are pinned.
    """

    def __init__(self, store: SampleStore) -> None:
        self.store, self.num_tokens, self.shard_sizes = store, store.num_tokens, store.shard_sizes
        # A store is read from one thread only, so what was not announced also goes through it.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self._announced: deque[tuple[Sequence[int], int | None]] = deque()
        self._coming: deque[tuple[tuple[Sequence[int], int | None], Future[TrainingBatch]]] = deque()

    def follow(self, sample_at: Callable[[int], int], place: int) -> None:
        self._thread.submit(self.store.follow, sample_at, place)

    def expect(self, batches: Sequence[Sequence[int]], limit: int | None = None) -> None:
        self._thread.submit(self.store.expect, batches, limit)
        self._announced.extend((numbers, limit) for numbers in batches)
        self._make_ahead()

    def batch_of(self, numbers: Sequence[int], limit: int | None = None) -> TrainingBatch:
        if self._coming and self._coming[0][0] == (numbers, limit):
            _, coming = self._coming.popleft()
        else:
            coming = self._thread.submit(self._make, numbers, limit)
        self._make_ahead()
        return coming.result()

    def _make_ahead(self) -> None:
        while self._announced and len(self._coming) < BATCHES_AHEAD:
            announced = self._announced.popleft()
            self._coming.append((announced, self._thread.submit(self._make, *announced)))

    def _make(self, numbers: Sequence[int], limit: int | None) -> TrainingBatch:
        batch = self.store.batch_of(numbers, limit)
        return batch.pinned() if torch.cuda.is_available() else batch

    def __getitem__(self, index: int) -> Sample:
        return self._thread.submit(self.store.__getitem__, index).result()

    def place_of(self, index: int) -> str:
        return self.store.place_of(index)

    def token_counts(self, vocab_size: int) -> Tensor:
        return self._thread.submit(self.store.token_counts, vocab_size).result()

    def tap_sizes(self, taps: tuple[int, ...], num_layers: int) -> list[float]:
        return self._thread.submit(self.store.tap_sizes, taps, num_layers).result()

    def finish_checks(self) -> None:
        self._thread.submit(self.store.finish_checks).result()

    def close(self) -> None:
        """Stop the thread after its current batch, drop the other announced ones, and close the store."""
        self._thread.shutdown(cancel_futures=True)
        self._coming.clear()
        self.store.close()
