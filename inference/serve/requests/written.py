"""The text of one choice as its tokens arrive: held back where a stop string may begin, and cut before one."""

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.inference.core.request import Detokenize
from headstart.inference.show.text_stream import TextStream


@dataclass(frozen=True)
class Piece:
    """The text of one token and the draft depth it came from: BONUS for a bonus token, None if nothing was drafted."""

    text: str
    depth: int | None


class WrittenText:
    """Gives text out once it is certain that no stop string begins in it. The pieces joined are the whole text."""

    def __init__(
        self, text: Detokenize, prompt: list[int], stops: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        """`include_stop` keeps the stop string that ends the text."""
        self.stream = TextStream(text, prompt)
        self.stops, self.include_stop = tuple(stops), include_stop
        self.held: list[Piece] = []
        self.stopped: str | None = None  # the stop string that was found

    def add(self, token: int, depth: int | None) -> list[Piece]:
        """Take in a token; returns what is certain now. After a stop string nothing is."""
        return [] if self.stopped is not None else self._take(Piece(self.stream.piece(token), depth))

    def end(self) -> list[Piece]:
        """What was held back, after the last token."""
        if self.stopped is not None:
            return []
        found = self._take(Piece(self.stream.rest(), None))
        rest, self.held = self.held, []
        return found + rest

    def _take(self, piece: Piece) -> list[Piece]:
        if piece.text:
            self.held.append(piece)
        text = "".join(each.text for each in self.held)
        if (end := self._cut(text)) is not None:
            found, self.held = first_characters(self.held, end), []
            return found
        keep = self._beginning(text)
        found = []
        while self.held and len(text) - len(self.held[0].text) >= keep:
            text = text[len(self.held[0].text) :]
            found.append(self.held.pop(0))
        return found

    def _cut(self, text: str) -> int | None:
        """Where the text ends, if it holds a stop string; of several the first in the text, then the longest."""
        places = [(place, -len(stop), stop) for stop in self.stops if (place := text.find(stop)) >= 0]
        if not places:
            return None
        place, _, self.stopped = min(places)
        return place + len(self.stopped) if self.include_stop else place

    def _beginning(self, text: str) -> int:
        """How many of the last characters may begin a stop string."""
        longest = max(map(len, self.stops), default=1) - 1
        counts = range(min(longest, len(text)), 0, -1)
        return next((count for count in counts if any(stop.startswith(text[-count:]) for stop in self.stops)), 0)


def first_characters(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """The pieces up to this many characters, the last of them cut."""
    found = []
    for piece in pieces:
        if count <= 0:
            break
        found.append(Piece(piece.text[:count], piece.depth))
        count -= len(piece.text)
    return found
