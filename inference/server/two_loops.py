"""Two decode loops behind one interface: one drafts, the other decodes plainly for requests that ask for it."""

from headstart.inference.decode import DecodeLoop
from headstart.inference.drafter import Drafter
from headstart.inference.request import Block, Generation, Request
from headstart.inference.target.model import TargetModel


class TwoLoops:
    """Numbers requests anew; the loops take turns while both have work."""

    def __init__(self, target: TargetModel, drafter: Drafter, max_batch: int) -> None:
        self.loops = {True: DecodeLoop(target, drafter, max_batch), False: DecodeLoop(target, None, max_batch)}
        self.numbers: dict[tuple[bool, int], int] = {}  # (which loop, its number) -> ours
        self.places: dict[int, tuple[bool, int]] = {}
        self.generations: dict[int, Generation] = {}
        self.submitted = 0
        self.turn = True

    @property
    def idle(self) -> bool:
        return all(loop.idle for loop in self.loops.values())

    def submit(self, request: Request, speculative: bool) -> int:
        own = self.loops[speculative].submit(request)
        number, self.submitted = self.submitted, self.submitted + 1
        self.numbers[speculative, own] = number
        self.places[number] = speculative, own
        self.generations[number] = self.loops[speculative].generations[own]
        return number

    def step(self) -> list[Block]:
        self.turn = not self.turn
        which = self.turn if not self.loops[self.turn].idle else not self.turn
        return [
            Block(self.numbers[which, block.number], block.tokens, block.depths) for block in self.loops[which].step()
        ]

    def cancel(self, number: int) -> None:
        which, own = self.places[number]
        self.loops[which].cancel(own)

    def take_ended(self) -> list[tuple[int, Generation]]:
        return [
            (self.numbers[which, own], generation)
            for which, loop in self.loops.items()
            for own, generation in loop.take_ended()
        ]

    def forget(self, number: int) -> None:
        which, own = self.places.pop(number)
        del self.numbers[which, own], self.generations[number]
        self.loops[which].forget(own)

    def close(self) -> None:
        for loop in self.loops.values():
            loop.close()
