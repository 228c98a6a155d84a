"""The one thread in which the target works, from its loading to its last step."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class ModelThread:
    """Runs calls one after another in a daemon thread.

    OpenMP keeps a pool of threads for every thread that computes. As soon as the pools hold more threads than there are
    cores, GNU's lets them sleep between operations, and waking them takes a quarter to a third of a small target's step
    on two cores. So the thread that decodes is the only one that computes: it also loads the target and times it.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._takes_calls = True
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run this call after those before it; the future holds what it returns or raises."""
        if not self._takes_calls:
            raise RuntimeError("the thread of this target has ended: one loaded target serves one engine")
        future: Future[Result] = Future()
        self._calls.put(lambda: settle(future, call))
        return future

    def end(self) -> None:
        """Let the thread end after the calls that it has."""
        self._takes_calls = False
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def settle(future: Future[Any], call: Callable[[], object]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # also SystemExit: whoever waits for the result raises it
        future.set_exception(error)
