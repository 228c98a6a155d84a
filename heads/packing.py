"""Where documents lie in packed rows: several samples share a row, one after another."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """The documents of a batch of packed rows.

    Padding at a row's end counts as a document of its own, so the documents fill the rows completely.
    """

    lengths: tuple[tuple[int, ...], ...]  # length of each document, row by row
    places: Int[Tensor, "batch seq"]  # position of each token within its document
    starts: Int[Tensor, " documents_and_end"]  # where each document starts in the concatenated rows; int32 for kernels

    @classmethod
    def in_rows(cls, rows: list[list[int]], device: torch.device | str = "cpu") -> "Documents":
        """The documents of rows with these document lengths, each row padded to the longest."""
        seq = max(map(sum, rows))
        lengths = tuple(tuple(row) + ((seq - sum(row),) if sum(row) < seq else ()) for row in rows)
        flat = torch.tensor([0, *(length for row in lengths for length in row)])
        starts = flat.cumsum(0)
        places = torch.arange(len(rows) * seq) - starts[:-1].repeat_interleave(flat[1:])
        return cls(lengths, places.view(len(rows), seq).to(device), starts.to(device, torch.int32))

    @property
    def longest(self) -> int:
        return max(map(max, self.lengths))

    def spans(self) -> list[tuple[slice, slice]]:
        """The row and the columns of each document."""
        found = []
        for row, lengths in enumerate(self.lengths):
            start = 0
            for length in lengths:
                found.append((slice(row, row + 1), slice(start, start + length)))
                start += length
        return found
