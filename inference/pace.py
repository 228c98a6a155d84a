"""How much of the waiting prompts is read beside the steps of running rows, so that these do not stall."""

from collections import deque

FIRST_PIECE = 16  # tokens of the first pass while rows run; the next ones follow from what it took
LEAST = 3  # tokens of a pass, however slow
# What a pass may take, in steps of the rows: a row then waits for about 2.5 plain steps. Steps with drafts take up to
# twice as long as plain ones.
SHARE, SHARE_OF_DRAFTING = 1.5, 0.75
BESIDE = 0.8  # how much longer a step may take for a piece beside it: a row then waits for 1.8 plain steps
GROWTH = 1.5  # how much larger the next piece may be at most
RECENT = 5  # steps of which the fastest counts: a machine that falters does not make rows wait longer
REFRESH = 16  # steps with a piece beside them, after which one without tells how long a step takes by now


class Pace:
    """Decides when the next pass over prompts is due, and how many tokens it reads."""

    def __init__(self, most: int, prompts_first: bool, beside: bool = False) -> None:
        """A pass reads at most `most` tokens. With `prompts_first`, rows wait for all prompts that have a place.

        `beside`: prompts are read within the steps of running rows, and in passes of their own only if there are none.
        Such steps are plain: a step with drafts and a piece would take longer than a row should wait.
        """
        if most < 1:
            raise ValueError(f"prefill_chunk: {most} given, 1 or more is allowed; leave it out for 512")
        self.most, self.prompts_first, self.beside = most, prompts_first, beside
        self.piece = min(FIRST_PIECE, most)
        self.steps: deque[float] = deque(maxlen=RECENT)  # seconds of the last steps; with `beside`, of plain ones
        self.share = 0.0  # what reading may take after the last of them, in such steps
        self.read_last = False
        self.steps_beside = 0
        self.is_old = False  # whether rows have drafted since

    @property
    def step(self) -> float:
        """The seconds of a step of the rows alone."""
        return min(self.steps)

    def reads_next(self, has_rows: bool) -> bool:
        """Whether prompts are read next, if there are any. A pass of their own takes turns with the running rows."""
        if not has_rows or self.prompts_first:
            return True
        if self.beside:
            return self.steps_beside < (REFRESH if self.steps else 1)
        return not self.read_last

    def tokens(self, has_rows: bool) -> int:
        """How many tokens the next pass reads at most."""
        return self.piece if has_rows and not self.prompts_first else self.most

    def stepped(self, seconds: float, drafts: bool, beside: int = 0) -> None:
        """A step of the running rows took so long, with drafts or without, and with so many tokens of prompts."""
        self.read_last = False
        if beside:
            self.steps_beside += 1
            if self.steps:
                self._adapt(beside, seconds - self.step)
        elif self.beside and drafts:  # their time tells nothing about steps with a piece
            self.is_old = True
        else:
            if self.is_old:
                self.steps.clear()
                self.is_old = False
            self.steps.append(seconds)
            self.share = BESIDE if self.beside else SHARE_OF_DRAFTING if drafts else SHARE
            self.steps_beside = 0

    def has_read(self, tokens: int, seconds: float) -> None:
        """A pass of their own has read so many tokens of prompts in so many seconds."""
        self.read_last = True
        if self.steps and not self.beside:
            self._adapt(tokens, seconds)

    def _adapt(self, tokens: int, seconds: float) -> None:
        if tokens < self.piece // 2:  # it tells little
            return
        may_take = self.share * self.step
        fitting = tokens * may_take / seconds if seconds > 0 else self.most
        self.piece = round(min(max(fitting, self.piece / 2, LEAST), GROWTH * self.piece, self.most))
