"""Hidden states of texts, and the feature shards that store them."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.common.files import removed_on_failure
from headstart.data_pipelines.features.batches import length_buckets
from headstart.data_pipelines.features.shard_files import (
    ShardFile,
    compute_dtype,
    non_finite,
    shard_is_whole,
    stored_states,
    stored_tokens,
)
from headstart.data_pipelines.prompts.responses import Response, read_texts, responses_path
from headstart.data_pipelines.stages.shard_work import ShardProgress, ShardPrompts
from headstart.inference.core.request import Images
from headstart.inference.images.kept import KeptPictures
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe

# A GPU's batches are padded to a multiple of this many tokens: attention kernels may be planned for each new length.
GPU_LENGTHS = 64
GPU_PASS = 2**13  # tokens, padding included, up to which a pass takes more texts than data.harvest_batch


@dataclass(frozen=True)
class States:
    """Hidden states of several texts, concatenated without padding, on the target's device."""

    taps: Float[Tensor, "tokens tapped"]
    last_hidden: Float[Tensor, "tokens hidden"]


# `tap` of a target in this process, in another, or over several ranks, with the images of each text.
TapTexts = Callable[[list[list[int]], list[Images | None]], States]


def tap(
    target: TargetModel,
    texts: list[list[int]],
    images: Sequence[Images | None] = (),
    taps: tuple[int, ...] | None = None,
) -> States:
    """The hidden states of each text, from one causal forward of the texts padded on the right, or one for each text if
    any has images.

    `taps` are some of the target's; None is all of them.
    """
    if any(each is not None for each in images):
        parts = [tap_one(target, text, shown, taps) for text, shown in zip(texts, images, strict=True)]
        return States(torch.cat([each.taps for each in parts]), torch.cat([each.last_hidden for each in parts]))
    lengths = [len(text) for text in texts]
    padded = max(lengths)
    if target.device.type == "cuda":
        padded = max(padded, min(math.ceil(padded / GPU_LENGTHS) * GPU_LENGTHS, target.max_positions))
    tokens = torch.tensor([text + [0] * (padded - len(text)) for text in texts], device=target.device)
    with torch.inference_mode():
        states, last_hidden = target.passes.hidden_states(tokens)
    if taps is not None:
        states = [states[target.taps.index(each)] for each in taps]
    return States(without_padding(states, lengths, last_hidden), without_padding([last_hidden], lengths, last_hidden))


def tap_one(target: TargetModel, text: list[int], images: Images | None, taps: tuple[int, ...] | None) -> States:
    """The hidden states of a text that may begin with images."""
    if images is None:
        return tap(target, [text], taps=taps)
    passes, columns = target.passes, None if taps is None else target.tap_columns(taps)
    tokens = torch.tensor([text], device=target.device)
    output = passes.forward(tokens, last_only=True, images=images.over_text(text))
    return States(output.taps[0] if columns is None else output.taps[0, :, columns], output.last_hidden[0])


def without_padding(
    parts: list[Float[Tensor, "batch seq part"]], lengths: list[int], like: Tensor
) -> Float[Tensor, "tokens parts"]:
    """Concatenate the rows without padding and join the parts' features, in one copy with the dtype of `like`."""
    joined = like.new_empty(sum(lengths), sum(part.shape[-1] for part in parts))
    rows = joined.split(lengths)
    column = 0
    for part in parts:
        for number, row in enumerate(rows):
            row[:, column : column + part.shape[-1]] = part[number, : lengths[number]]
        column += part.shape[-1]
    return joined


class BackgroundThread:
    """Runs tasks one after another on one thread; as a context manager, it waits for all of them at exit.

    At most `max_pending` tasks are unfinished, which bounds memory; with 0, `add` runs the task in the caller's thread.
    A task's error is raised at the next `add` or at exit.
    """

    def __init__(self, max_pending: int) -> None:
        self.max_pending = max_pending
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._unfinished: deque[Future[None]] = deque()

    def add(self, task: Callable[[], None]) -> None:
        if self.max_pending == 0:
            task()
            return
        while len(self._unfinished) >= self.max_pending:
            self._unfinished.popleft().result()
        self._unfinished.append(self._thread.submit(task))

    def __enter__(self) -> "BackgroundThread":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            while kind is None and self._unfinished:
                self._unfinished.popleft().result()
        finally:
            self._thread.shutdown(cancel_futures=True)


def write_features(
    recipe: Recipe,
    taps: tuple[int, ...],
    tap_texts: TapTexts,
    device: torch.device,
    work: Iterable[ShardPrompts],
    made_from: Mapping[str, str],
    meter: ShardProgress,
) -> None:
    """Write the feature shards of `work` that are missing; `device` is the target's.

    `made_from` identifies the inputs of each shard, by file name. With a GPU, background threads write the states of
    each batch, and checksum each whole shard, while the target continues; on a CPU they would take the target's cores.
    """
    on_gpu, pictures = device.type != "cpu", KeptPictures(recipe)
    with (
        ExitStack() as unfinished,
        BackgroundThread(max_pending=1 if on_gpu else 0) as finisher,
        BackgroundThread(max_pending=2 if on_gpu else 0) as writer,
    ):
        for shard in work:
            path = recipe.features_dir / shard.features_file
            if shard_is_whole(path, made_from[path.name]):
                meter.skip(len(shard.rows))
                continue
            texts = read_texts(responses_path(recipe, shard))
            lengths = [len(text.tokens) for text in texts]
            file = ShardFile(path, lengths, made_from[path.name])
            unfinished.enter_context(removed_on_failure(file.partial))
            for numbers in length_buckets(lengths, recipe.data.harvest_batch, GPU_PASS if on_gpu else 0):
                batch = [texts[number] for number in numbers]
                states = tap_texts([text.tokens for text in batch], [pictures.read(text.images) for text in batch])
                writer.add(partial(write_batch, recipe, file, numbers, batch, states, taps))
                meter.add(len(numbers), sum(lengths[number] for number in numbers))
            writer.add(partial(finisher.add, file.finish))


def token_tensors(texts: list[Response]) -> dict[str, Tensor]:
    """The stored tokens and loss masks of the texts, concatenated."""
    tokens = torch.tensor([token for text in texts for token in text.tokens])
    return stored_tokens(tokens, torch.tensor([flag for text in texts for flag in text.loss_mask]))


def write_batch(
    recipe: Recipe, file: ShardFile, numbers: list[int], texts: list[Response], states: States, taps: tuple[int, ...]
) -> None:
    """Write the samples of these numbers to their shard; their states are encoded before they leave a GPU."""
    rows = ", ".join(map(str, numbers))
    stored = finite_states(recipe, states, taps, f"rows {rows} of {file.path.stem}")
    file.put(numbers, token_tensors(texts) | on_host(stored))


def finite_states(recipe: Recipe, states: States, taps: tuple[int, ...], of: str) -> dict[str, Tensor]:
    """The stored form of states; raises ValueError, naming their source `of`, if it holds numbers that are not finite.

    A head would be trained on them only until the first step that reads one.
    """
    stored = stored_states(taps, states.taps, states.last_hidden, recipe.data.dtype)
    if not non_finite(stored):
        return stored
    refuse_non_finite(recipe.target.dtype, states, of)
    largest = max(float(part.abs().max()) for part in (states.taps, states.last_hidden) if part.numel())
    most = torch.finfo(compute_dtype(recipe.data.dtype)).max
    given = f"{recipe.data.dtype} given, which holds up to {most:,.0f}, but hidden states reach {largest:,.0f} ({of})"
    raise ValueError(f"data.dtype: {given}; choose one of bfloat16, float32, int8 and float8")


def refuse_non_finite(dtype: str, states: States, of: str) -> None:
    """Raise ValueError if the target itself computes states that are not finite; `dtype` is its number format."""
    if not all(part.isfinite().all() for part in (states.taps, states.last_hidden)):
        wider = "bfloat16 or float32" if dtype == "float16" else "float32"
        given = f"target.dtype: {dtype} given, but the target's hidden states are not finite in it ({of})"
        raise ValueError(f"{given}; choose {wider}, or else copy or download the model again")


def on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in CPU memory; copies from a GPU go to pinned memory, which is several times as fast."""
    copied = {
        name: torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda").copy_(tensor)
        for name, tensor in tensors.items()
        if tensor.device.type != "cpu"
    }
    return tensors | copied
