"""Samples of text with the target's hidden states, and training batches of them, one sample to a row or several."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from heads.packing import Documents


@dataclass(frozen=True)
class Sample:
    """One sequence of tokens, the prompt first, with the target's hidden states at each of them."""

    tokens: Tensor  # [seq], int64
    loss_mask: Tensor  # [seq], bool: the tokens that the target wrote
    taps: Tensor  # [seq, taps * hidden]: the tapped hidden states except the last one, in ascending order
    last_hidden: Tensor  # [seq, hidden]: before the final norm


def tapped(stored: Tensor, last_hidden: Tensor, taps: tuple[int, ...], num_layers: int) -> Tensor:
    """The hidden states that a head with these taps reads: the stored ones, and the last one if it is a tap too."""
    return torch.cat([stored, last_hidden], dim=-1) if taps[-1] == num_layers else stored


@dataclass(frozen=True)
class Batch:
    """Samples padded on the right, or several to a row and then padded; padding is outside every loss mask."""

    tokens: Int[Tensor, "batch seq"]
    loss_mask: Bool[Tensor, "batch seq"]
    taps: Float[Tensor, "batch seq tapped"]
    last_hidden: Float[Tensor, "batch seq hidden"]
    documents: Documents | None = None  # where each sample lies in packed rows; None where each has a row of its own

    @classmethod
    def collate(
        cls,
        samples: list[Sample],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        packing: list[list[int]] | None = None,
    ) -> "Batch":
        """`packing` is that of `pack`; without it each sample has a row."""

        def laid(tensors: list[Tensor]) -> Tensor:
            return in_rows(tensors, packing).to(device)

        documents = None
        if packing is not None:
            lengths = [[len(samples[number].tokens) for number in row] for row in packing]
            documents = Documents.in_rows(lengths, device)
        return cls(
            tokens=laid([sample.tokens for sample in samples]),
            loss_mask=laid([sample.loss_mask for sample in samples]),
            taps=laid([sample.taps for sample in samples]).to(dtype),
            last_hidden=laid([sample.last_hidden for sample in samples]).to(dtype),
            documents=documents,
        )


def length_buckets(lengths: list[int], size: int) -> list[list[int]]:
    """All samples by number, at most `size` together, the shortest first, so that little of a batch is padding."""
    order = sorted(range(len(lengths)), key=lambda number: lengths[number])  # a stable order
    return [order[start : start + size] for start in range(0, len(order), size)]


def pack(lengths: list[int], limit: int | None) -> list[list[int]] | None:
    """Which samples share a row of at most `limit` tokens: the longest first, each into the first row with room for it.

    Every sample is in one row, whole; one beyond the limit has a row of its own. Of the lengths alone. Without a limit
    nothing is packed.
    """
    if limit is None:
        return None
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):  # a stable order
        row = next((row for row, left in enumerate(room) if lengths[number] <= left), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(limit)
        rows[row].append(number)
        room[row] -= lengths[number]
    return rows


def in_rows(tensors: list[Tensor], packing: list[list[int]] | None) -> Tensor:
    """What belongs to each sample's tokens, [seq, ...] each, where the samples lie. [batch, longest row, ...]"""
    if packing is not None:
        tensors = [torch.cat([tensors[number] for number in row]) for row in packing]
    return pad_sequence(tensors, batch_first=True)
