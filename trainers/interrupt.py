"""SIGTERM and the first Ctrl-C: a request to stop behind the running step, not in the middle of it."""

import signal
from types import FrameType


class Interrupts:
    """A context manager that notes these signals instead of dying of them; a second Ctrl-C ends the process at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def name(self) -> str:
        return signal.Signals(self._number).name

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as shells report it."""
        return 128 + self._number

    @property
    def _number(self) -> int:
        """On a rank that stops because another one was told to, SIGTERM."""
        return signal.SIGTERM if self.received is None else self.received
