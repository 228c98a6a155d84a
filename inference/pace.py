"""How much of the waiting prompts is read between two steps of the running rows, so that these do not stall."""

from collections import deque
from statistics import median

FIRST_PIECE = 16  # tokens of the first pass while rows run; the next ones follow from what it took
LEAST = 8  # tokens of a pass, however slow
SHARE = 1.5  # a pass may take this many times as long as a plain step, so that a row waits for about 2.5 of them
SHARE_OF_DRAFTING = 0.75  # and this many times as long as a step with drafts, which takes up to twice as long itself
RECENT = 5  # steps whose median counts


class Pace:
    """Decides when the next pass over prompts is due, and how many tokens it reads."""

    def __init__(self, most: int, prompts_first: bool) -> None:
        """A pass reads at most `most` tokens. With `prompts_first`, rows wait for all prompts that have a place."""
        if most < 1:
            raise ValueError(f"prefill_chunk: {most} given, 1 or more is allowed; leave it out for 512")
        self.most, self.prompts_first = most, prompts_first
        self.piece = min(FIRST_PIECE, most)
        self.steps: deque[float] = deque(maxlen=RECENT)  # seconds that a pass may take after such a step
        self.read_last = False

    def reads_next(self, has_rows: bool) -> bool:
        """Whether a pass over prompts comes next, if there is one to do. With running rows they take turns."""
        return not has_rows or self.prompts_first or not self.read_last

    def tokens(self, has_rows: bool) -> int:
        """How many tokens the next pass reads at most."""
        return self.piece if has_rows and not self.prompts_first else self.most

    def stepped(self, step: tuple[float, float] | None, drafts: bool) -> None:
        """A step of the running rows began and ended at these times, with drafts or without."""
        assert step is not None
        self.steps.append((SHARE_OF_DRAFTING if drafts else SHARE) * (step[1] - step[0]))
        self.read_last = False

    def has_read(self, tokens: int, seconds: float) -> None:
        """A pass has read so many tokens in so many seconds."""
        self.read_last = True
        if self.steps and tokens >= self.piece // 2:  # a shorter one tells little
            fitting = tokens * median(self.steps) / seconds
            self.piece = round(min(max(fitting, self.piece / 2, LEAST), 2 * self.piece, self.most))
