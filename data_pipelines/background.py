"""Work that goes on behind the caller's back, so that copying and writing cost no time of the target."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


class Behind:
    """A thread that does one piece of work after the other; a context manager that ends when all are done.

    At most `ahead` pieces are unfinished: `add` waits until there is room, so what they hold in memory is bounded; with
    0 it does the work itself. The error of a piece is raised at the next `add` or at the end.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._unfinished: deque[Future[None]] = deque()

    def add(self, work: Callable[[], None]) -> None:
        if self.ahead == 0:
            work()
            return
        while len(self._unfinished) >= self.ahead:
            self._unfinished.popleft().result()
        self._unfinished.append(self._thread.submit(work))

    def __enter__(self) -> "Behind":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            while kind is None and self._unfinished:
                self._unfinished.popleft().result()
        finally:
            self._thread.shutdown(cancel_futures=True)
