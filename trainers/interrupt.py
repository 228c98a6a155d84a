"""SIGTERM and the first Ctrl-C finish the current step, save a checkpoint and then exit."""

import signal
from types import FrameType


class Interrupts:
    """A context manager that records these signals for the training loop; a second Ctrl-C ends the process at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> "Interrupts":
        self._handlers = {number: signal.signal(number, self._record) for number in self.SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def name(self) -> str:
        return signal.Signals(self._number).name

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as shells report it."""
        return 128 + self._number

    @property
    def _number(self) -> int:
        """The signal; SIGTERM on a rank that stops because another rank received one."""
        return signal.SIGTERM if self.received is None else self.received
