"""The interface of every drafter: it proposes trees of draft tokens, which `inference.engine.loop` verifies."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from headstart.inference.core.cache import KVCache
from headstart.inference.core.cache_memory import Shape
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import Verified, VerifiedOnHost


@runtime_checkable  # the shape checks in tests use isinstance
class Drafter(Protocol):
    """Proposes a tree of draft tokens per row. It may read the target's hidden states and use slots in its cache."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The indices of the target's hidden states that it reads; empty for none."""

    @property
    def cache_shape(self) -> Shape | None:
        """(layers, kv_heads, head_dim) of its own slots; None if it has none."""

    @property
    def max_nodes(self) -> int:
        """Upper bound on the slots that a step needs after the verified tokens, in the target's slots or its own."""

    @property
    def depth(self) -> int:
        """Upper bound on the depth of its trees, so on the draft tokens that one step may accept."""

    @property
    def static_shapes(self) -> bool:
        """Whether `draft` works on tensors alone, with the same shapes every time, so that a CUDA graph may hold it."""

    def prefill(self, taps: Float[Tensor, "1 count tapped"], text: Int[Tensor, "1 count+1"], row: KVCache) -> None:
        """Read the positions of a row that the target has just read, except the last one, into the row's slots.

        `text` begins with the token at the first of these positions, and ends with the token after the last one. A
        prompt may come in chunks: `row` holds the positions of earlier chunks.
        """

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        """A tree for each row, its root included; the target, which has read all tokens before the roots, verifies it.

        In some rows the drafter's slots may lag behind the target's: the positions of its keys come from its own slots,
        the positions of the Gumbel noise from the target's.
        """


class CapturedDrafter(Drafter, Protocol):
    """A drafter with static shapes."""

    @property
    def needs_host(self) -> bool:
        """Whether the host adds to its trees."""

    def shapes(self) -> Sequence["CapturedDrafter"]:
        """The drafters of all shapes: itself, if its trees have one shape and the host adds nothing to them."""

    def planned(self, rows: int) -> tuple["CapturedDrafter", int | None]:
        """Which of these shapes drafts for this many rows, and how many of its draft tokens are verified; None for all.

        If fewer than all are, its nodes are in the order of their chances.
        """

    def extended(self, tree: Tree, verified: VerifiedOnHost) -> Tree:
        """The tree with what the host adds to it."""

    def observe(self, tree: Tree) -> None:
        """Learn from all that was drafted."""


class NoDrafter:
    """Plain decoding: a tree of only the root."""

    taps: tuple[int, ...] = ()
    cache_shape: Shape | None = None
    max_nodes = 1
    static_shapes = True

    def __init__(self, depth: int = 0) -> None:
        """`depth` bounds the trees of others that a captured step verifies; 0: it verifies roots."""
        self.depth = depth

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """Do nothing."""

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        return Tree.root_only(verified.roots)


PLAIN = NoDrafter()
