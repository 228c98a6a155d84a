"""Samples with the target's hidden states, and training batches of them: one sample per row, or several packed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.heads.attention_kernels import Documents


@dataclass(frozen=True)
class Sample:
    """One sequence of tokens, the prompt first, with the target's hidden states at each of them."""

    tokens: Tensor  # [seq], int64
    loss_mask: Tensor  # [seq], bool: the tokens that the target wrote
    taps: Tensor  # [seq, taps * hidden]: the tapped hidden states except the last one, in ascending order
    last_hidden: Tensor  # [seq, hidden]: before the final norm


def tapped(stored: Tensor, last_hidden: Tensor, taps: tuple[int, ...], num_layers: int) -> Tensor:
    """The input of a head with these taps: the stored taps, plus the last hidden state if it is one of them."""
    return torch.cat([stored, last_hidden], dim=-1) if taps[-1] == num_layers else stored


class SampleStore(ABC):
    """The samples of one split, by number, from any source."""

    num_tokens: int
    shard_sizes: list[int]  # number of samples in each shard

    def __len__(self) -> int:
        return sum(self.shard_sizes)

    @abstractmethod
    def __getitem__(self, index: int) -> Sample: ...

    @abstractmethod
    def place_of(self, index: int) -> str:
        """Where a sample is stored, for messages."""

    @abstractmethod
    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each token is trained on. [vocab]"""

    def tap_sizes(self, taps: tuple[int, ...], num_layers: int) -> list[float]:
        """The median size of each tap over the samples of the first shard."""
        return median_tap_sizes((self[number] for number in range(self.shard_sizes[0])), taps, num_layers)

    def batch_of(self, numbers: Sequence[int], limit: int | None = None) -> "TrainingBatch":
        """These samples as they are stored, on the CPU; packed in rows of at most `limit` tokens, if given."""
        samples = [self[number] for number in numbers]
        return TrainingBatch.collate(samples, packing=pack([len(sample.tokens) for sample in samples], limit))

    def follow(self, sample_at: Callable[[int], int], place: int) -> None:  # noqa: B027
        """Prepare to read the samples of a run from a place in it on; called before each step of training."""

    def expect(self, batches: Sequence[Sequence[int]], limit: int | None = None) -> None:  # noqa: B027
        """Announce the batches of a step, in the order in which they will be requested."""

    def finish_checks(self) -> None:  # noqa: B027
        """Wait until all that was read is known to be sound; raises ValueError if it is damaged."""

    def close(self) -> None:  # noqa: B027
        """Stop all reading; no sample may be requested after this."""


def median_tap_sizes(samples: Iterable[Sample], taps: tuple[int, ...], num_layers: int) -> list[float]:
    """The median over all tokens of each tap's root mean square; a text's first token is often far above the others."""
    sizes = []
    for sample in samples:
        states = tapped(sample.taps, sample.last_hidden, taps, num_layers).float()
        sizes.append(states.unflatten(-1, (len(taps), -1)).square().mean(-1).sqrt())  # [seq, taps]
    return torch.cat(sizes).median(dim=0).values.tolist()


@dataclass(frozen=True)
class TrainingBatch:
    """Samples padded on the right, one or several (packed documents) per row; the loss mask excludes padding."""

    tokens: Int[Tensor, "batch seq"]
    loss_mask: Bool[Tensor, "batch seq"]
    taps: Float[Tensor, "batch seq tapped"]
    last_hidden: Float[Tensor, "batch seq hidden"]
    documents: Documents | None = None  # where each sample lies in packed rows; None without packing
    lengths: tuple[int, ...] = ()  # tokens of each sample, in the order given
    drafted: Bool[Tensor, "batch seq"] | None = None  # whether the target's next token is in the draft vocabulary

    @classmethod
    def collate(
        cls,
        samples: list[Sample],
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        packing: list[list[int]] | None = None,
    ) -> "TrainingBatch":
        """Build a batch. `packing` comes from `pack`; None gives each sample its own row."""

        def arrange(tensors: list[Tensor]) -> Tensor:
            return in_rows(tensors, packing)

        lengths, documents = tuple(len(sample.tokens) for sample in samples), None
        if packing is not None:
            documents = Documents.in_rows([[lengths[number] for number in row] for row in packing])
        batch = cls(
            tokens=arrange([sample.tokens for sample in samples]),
            loss_mask=arrange([sample.loss_mask for sample in samples]),
            taps=arrange([sample.taps for sample in samples]),
            last_hidden=arrange([sample.last_hidden for sample in samples]),
            documents=documents,
            lengths=lengths,
        )
        return batch.to(device, dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "TrainingBatch":
        """The batch on this device, its states in this dtype; pinned tensors are copied while the caller goes on."""
        batch = self.mapped(lambda tensor: tensor.to(device, non_blocking=True))  # as stored, which is half the size
        documents = None if batch.documents is None else batch.documents.to(device)
        taps, last_hidden = batch.taps.to(dtype=dtype), batch.last_hidden.to(dtype=dtype)
        return replace(batch, taps=taps, last_hidden=last_hidden, documents=documents)

    @property
    def places(self) -> Int[Tensor, "*batch seq"]:
        """The position of each token in its sample; without packing the same in every row."""
        if self.documents is not None:
            return self.documents.places
        return torch.arange(self.tokens.shape[1], device=self.tokens.device)

    def pinned(self) -> "TrainingBatch":
        """The batch in memory that a GPU copies from at full speed."""
        return self.mapped(Tensor.pin_memory)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "TrainingBatch":
        changed: dict[str, Any] = {name: change(each) for name, each in vars(self).items() if isinstance(each, Tensor)}
        return replace(self, **changed)


def length_buckets(lengths: list[int], size: int, tokens: int = 0) -> list[list[int]]:
    """Sample numbers in groups of similar length, shortest first, to keep padding small.

    A group has at most `size` samples, or more where these hold at most `tokens` tokens, padding included.
    """
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):  # the sort is stable
        grown = len(groups[-1]) + 1 if groups else 0
        if not grown or (grown > size and grown * lengths[number] > tokens):
            groups.append([])
        groups[-1].append(number)
    return groups


def pack(lengths: list[int], limit: int | None) -> list[list[int]] | None:
    """The sample numbers of each row, first-fit by decreasing length; a row over `limit` tokens holds one sample."""
    if limit is None:
        return None
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):  # the sort is stable
        row = next((row for row, left in enumerate(room) if lengths[number] <= left), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(limit)
        rows[row].append(number)
        room[row] -= lengths[number]
    return rows


def of_samples(rows: Tensor, lengths: tuple[int, ...], packing: list[list[int]] | None) -> list[Tensor]:
    """The inverse of `in_rows`: the per-token tensors of the samples, by number."""
    found = dict[int, Tensor]()
    for row, numbers in zip(rows, packing or [[number] for number in range(len(lengths))], strict=True):
        used = [lengths[number] for number in numbers]
        found |= dict(zip(numbers, row[: sum(used)].split(used), strict=True))
    return [found[number] for number in range(len(lengths))]


def in_rows(tensors: list[Tensor], packing: list[list[int]] | None) -> Tensor:
    """Arrange per-token tensors of the samples, [seq, ...] each, in padded rows. [batch, longest row, ...]"""
    if packing is not None:
        tensors = [torch.cat([tensors[number] for number in row]) for row in packing]
    return pad_sequence(tensors, batch_first=True)
