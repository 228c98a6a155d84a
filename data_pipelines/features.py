"""From texts to shards of hidden states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from data_pipelines.background import Behind
from data_pipelines.batches import length_buckets
from data_pipelines.responses import Text, responses_path
from data_pipelines.shard_work import Meter, Piece
from data_pipelines.shards import ShardBuffer, shard_is_whole, shard_name, stored_states, stored_tokens
from inference.target.model import TargetModel
from recipes import Recipe
from recipes.jsonl import read_jsonl


@dataclass(frozen=True)
class States:
    """Hidden states of several texts, one behind the other and without padding, where the target is."""

    taps: Float[Tensor, "tokens tapped"]
    last_hidden: Float[Tensor, "tokens hidden"]


Ask = Callable[[list[list[int]]], States]  # `tap`, by however many ranks compute it


def tap(target: TargetModel, texts: list[list[int]]) -> States:
    """The states of each text alone, from one causal pass padded on the right."""
    lengths = [len(text) for text in texts]
    tokens = torch.tensor([text + [0] * (max(lengths) - len(text)) for text in texts], device=target.device)
    with torch.inference_mode():
        taps, last_hidden = target.states(tokens)
    return States(without_padding(taps, lengths, last_hidden), without_padding([last_hidden], lengths, last_hidden))


def without_padding(
    parts: list[Float[Tensor, "batch seq part"]], lengths: list[int], like: Tensor
) -> Float[Tensor, "tokens parts"]:
    """The parts side by side and the rows one behind the other, in one copy; of the type of `like`."""
    joined = like.new_empty(sum(lengths), sum(part.shape[-1] for part in parts))
    rows = joined.split(lengths)
    column = 0
    for part in parts:
        for number, row in enumerate(rows):
            row[:, column : column + part.shape[-1]] = part[number, : lengths[number]]
        column += part.shape[-1]
    return joined


def write_features(
    recipe: Recipe,
    taps: tuple[int, ...],
    ask: Ask,
    device: torch.device,
    work: Sequence[Piece],
    made_from: str,
    meter: Meter,
) -> None:
    """Tap the hidden states of every sample of these shards; `device` is the target's.

    A GPU goes on at once: threads copy the states of a batch and write those of a whole shard behind its back.
    On a CPU they would take the target's cores.
    """
    behind = device.type != "cpu"
    with Behind(ahead=1 if behind else 0) as writing, Behind(ahead=2 if behind else 0) as placing:
        for piece in work:
            path = recipe.features_dir / shard_name(piece.split, piece.index)
            if shard_is_whole(path, made_from):
                meter.skip(len(piece.rows))
                continue
            texts = [Text.from_row(row) for row in read_jsonl(responses_path(recipe, piece))]
            lengths = [len(text.tokens) for text in texts]
            buffer = ShardBuffer(lengths)
            buffer.put(range(len(texts)), joined(texts))
            for numbers in length_buckets(lengths, recipe.data.harvest_batch):
                states = ask([texts[number].tokens for number in numbers])
                placing.add(partial(place, buffer, numbers, states, taps, recipe.data.dtype))
                meter.add(len(numbers), sum(lengths[number] for number in numbers))
            placing.add(partial(writing.add, partial(buffer.write, path, made_from)))


def joined(texts: list[Text]) -> dict[str, Tensor]:
    """What is stored of the texts themselves, one behind the other."""
    tokens = torch.tensor([token for text in texts for token in text.tokens])
    return stored_tokens(tokens, torch.tensor([flag for text in texts for flag in text.loss_mask]))


def place(buffer: ShardBuffer, numbers: list[int], states: States, taps: tuple[int, ...], storage: str) -> None:
    """Put the states of a batch where they belong; in 8 bits they are before they leave a GPU."""
    buffer.put(numbers, on_host(stored_states(taps, states.taps, states.last_hidden, storage)))


def on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in memory of the CPU; from a GPU by way of pinned memory, which is several times as fast."""
    copied = {
        name: torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda").copy_(tensor)
        for name, tensor in tensors.items()
        if tensor.device.type != "cpu"
    }
    return tensors | copied
