"""Work on a background thread, so that copying and writing do not hold up the target."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


class BackgroundThread:
    """Runs tasks one after another on one thread; as a context manager, it waits for all of them at exit.

    At most `max_pending` tasks are unfinished: `add` waits for a free place, which bounds the memory that tasks hold.
    With 0, `add` runs the task in the caller's thread. A task's error is raised at the next `add` or at exit.
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            while kind is None and self._unfinished:
                self._unfinished.popleft().result()
        finally:
            self._thread.shutdown(cancel_futures=True)
