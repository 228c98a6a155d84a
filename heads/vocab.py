"""The draft vocabulary: the target's most frequent tokens, which spares a head from scoring a large vocabulary."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

OFFSETS = "must hold offsets: target id minus draft id"


@dataclass(frozen=True)
class DraftVocab:
    """The target token of each draft id, ascending; `ids` is the identity if the head drafts the whole vocabulary."""

    ids: Int[Tensor, " draft_vocab"]
    target_size: int

    def __post_init__(self) -> None:
        assert bool((self.ids.diff() > 0).all())
        assert int(self.ids[-1]) < self.target_size

    @classmethod
    def full(cls, target_size: int) -> "DraftVocab":
        return cls(torch.arange(target_size, device="cpu"), target_size)

    @classmethod
    def most_frequent(cls, counts: Int[Tensor, " vocab"], size: int | None) -> "DraftVocab":
        """The `size` most frequent tokens, or all; the smaller id wins a tie, so the result depends on the counts."""
        if size is None:
            return cls.full(len(counts))
        if not 1 <= size <= len(counts):
            raise ValueError(f"head.draft_vocab_size: {size} given, 1 to the target's {len(counts)} is allowed")
        order = torch.sort(counts, descending=True, stable=True).indices
        return cls(order[:size].sort().values, len(counts))

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], target_size: int) -> "DraftVocab":
        """From a head's file, whose d2t and t2d are taken out of `tensors`; the whole vocabulary if it has no d2t.

        Raises ValueError if the two disagree, or d2t is not a list of offsets.
        """
        d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
        if d2t is None:
            return cls.full(target_size)
        vocab = cls.from_offsets(d2t, target_size)
        if t2d is not None and not torch.equal(t2d.bool(), vocab.members()):
            raise ValueError(f"d2t and t2d name different target tokens; d2t {OFFSETS}")
        return vocab

    @classmethod
    def from_offsets(cls, d2t: Tensor, target_size: int) -> "DraftVocab":
        """From offsets, target id = draft id + d2t[draft id]; raises ValueError unless it holds offsets."""
        check_list("d2t", d2t)
        return cls._ascending("d2t", torch.arange(len(d2t), device="cpu") + d2t, target_size, f"it {OFFSETS}")

    @classmethod
    def from_ids(cls, ids: Tensor, target_size: int) -> "DraftVocab":
        """From the ids in the token_map of a head's file; raises ValueError for ids that are not ascending."""
        check_list("token_map", ids)
        return cls._ascending("token_map", ids.long(), target_size, "sort it, and the rows of lm_heads with it")

    @classmethod
    def _ascending(cls, name: str, ids: Tensor, target_size: int, advice: str) -> "DraftVocab":
        if not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= target_size:
            given_ids = f"{name} gives ids {int(ids.min())} to {int(ids.max())}"
            raise ValueError(f"{given_ids}; ascending target ids below {target_size} are required: {advice}")
        return cls(ids, target_size)

    @property
    def is_full(self) -> bool:
        return len(self.ids) == self.target_size

    def offsets(self) -> Int[Tensor, " draft_vocab"]:
        """`d2t` in a head's file: target id minus draft id."""
        return self.ids - torch.arange(len(self.ids))

    def members(self) -> Tensor:
        """`t2d` in a head's file: for each target token, whether the head can draft it. [vocab], bool"""
        inside = torch.zeros(self.target_size, dtype=torch.bool, device="cpu")
        inside[self.ids] = True
        return inside

    def columns(self) -> Int[Tensor, " vocab"]:
        """The draft id of each target token, -1 for one that the head cannot draft."""
        columns = torch.full((self.target_size,), -1)
        columns[self.ids] = torch.arange(len(self.ids))
        return columns

    def coverage(self, counts: Int[Tensor, " vocab"]) -> float:
        """The fraction of the counted tokens that the head can draft, an upper bound on the acceptance rate."""
        return float(counts[self.ids].sum() / counts.sum().clamp(min=1))


def check_list(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless a tensor of a head's file is a list of whole numbers."""
    if tensor.is_floating_point() or tensor.ndim != 1 or not len(tensor):
        held = f"{name} is {str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
        raise ValueError(f"{held}; int64 of shape [draft vocabulary] is required: write the head's files again")
