"""A pass of the target that pauses between its layers, so that rows which decode meanwhile need not wait for all of it.

A pass over many tokens costs less per token than many passes over few, above all after a long context. The pass runs on
a stack of its own (a greenlet: the same thread, and so the same threads of torch), which is left where a layer asks the
cache for its keys and values, and entered there again later.
"""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from greenlet import getcurrent, greenlet
from torch import Tensor

from headstart.inference.core.cache import Slots

Result = TypeVar("Result")
Pause = Callable[[], None]


class SlicedWork(Generic[Result]):
    """Work that is done a slice at a time, all by one thread. Not for a GPU, whose queue hides what a layer takes."""

    def __init__(self, work: Callable[[Pause], Result], seen: dict[int, Tensor]) -> None:
        """`work` is given the function to call wherever it may pause; `seen` is kept for it while it does."""
        self._work = greenlet(lambda: work(self._pause))
        self._seen = seen
        self.seconds = 0.0  # that all slices took
        self.pauses = 0  # places where it could pause so far
        self._ends = self._last = 0.0

    def go_on(self, seconds: float) -> Result | None:
        """Work for about so many seconds, at least up to the next place to pause; the result once all is done."""
        started = self._last = time.perf_counter()
        self._ends = started + seconds
        self._work.parent = getcurrent()
        result: Result | None = self._work.switch()
        self.seconds += time.perf_counter() - started
        return result

    def give_up(self) -> None:
        """Leave the work undone, and the contexts that it is in."""
        if self._work:
            self._work.throw()

    def _pause(self) -> None:
        """Pause if what comes next is unlikely to end in time, as it takes about as long as what came before."""
        now = time.perf_counter()
        self.pauses += 1
        before, self._last = self._last, now
        if now + (now - before) > self._ends:
            seen = dict(self._seen)
            self._seen.clear()
            assert self._work.parent is not None
            self._work.parent.switch(None)
            self._seen.update(seen)


class PausingSlots(Slots):
    """A row's slots in a pass that may pause in each layer."""

    def __init__(self, slots: Slots, pause: Pause) -> None:
        super().__init__(slots.storage, len(slots.lengths))
        self.pause = pause

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.pause()
        return super().append(layer, key, value)
