"""Requests that wait for a row: those of higher priority first, and in the order in which they came within one."""

from bisect import insort
from collections.abc import Callable

from headstart.inference.core.request import Request


class Queue:
    """Requests with their numbers, in the order in which they will be decoded."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Request]] = []

    def __len__(self) -> int:
        return len(self.waiting)

    def __contains__(self, number: int) -> bool:
        return number in self.numbers

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.waiting]

    @property
    def first(self) -> Request:
        """The next one."""
        return self.waiting[0][1]

    def add(self, number: int, request: Request) -> None:
        insort(self.waiting, (number, request), key=lambda entry: (-entry[1].priority, entry[0]))

    def remove(self, number: int) -> bool:
        """Take a request out; returns whether it was waiting."""
        before = len(self.waiting)
        self.waiting = [entry for entry in self.waiting if entry[0] != number]
        return len(self.waiting) < before

    def take(self, rows: int, join: Callable[[list[Request]], bool]) -> list[tuple[int, Request]]:
        """The next requests: one, and up to `rows` as long as the last of them may `join` those before it.

        It stops at the first that may not; the one that waits longest never gives way.
        """
        count = 1
        while count < min(rows, len(self.waiting)) and join([request for _, request in self.waiting[: count + 1]]):
            count += 1
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken
