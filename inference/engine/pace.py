"""How many tokens of prompts are read between or during the steps of running rows, so that these do not stall."""

from collections import deque

FIRST_CHUNK = 16  # tokens of the first pass while rows run; later sizes follow from the time that it took
LEAST = 8  # tokens of a pass, however slow
# The time that a pass may take, in steps of the rows: a row then waits for about 2.5 plain steps. Steps with drafts
# take up to twice as long as plain ones.
SHARE, SHARE_OF_DRAFTING = 1.5, 0.75
BESIDE = 0.7  # how much longer a step may take for a chunk in the same pass: a row then waits for 1.7 plain steps
GROWTH = 1.5  # how much larger the next chunk may be at most
RECENT = 5  # steps of which the fastest counts: a machine that falters does not make rows wait longer
REFRESH = 16  # steps with a chunk after which one without measures a step's time again


class Pace:
    """Decides when the next pass over prompts is due, and how many tokens it reads."""

    def __init__(self, most: int, prompts_first: bool, beside: bool = False) -> None:
        """A pass reads at most `most` tokens. With `prompts_first`, rows wait for all prompts that have a place.

        `beside`: while rows run, prompts are read in the same passes as their steps, never in passes of their own. Such
        steps are plain: a step with drafts and a chunk would take longer than a row should wait.
        """
        if most < 1:
            raise ValueError(f"prefill_chunk: {most} given, 1 or more is allowed; leave it out for 512")
        self.most, self.prompts_first, self.beside = most, prompts_first, beside
        self.chunk = min(FIRST_CHUNK, most)
        self.steps: deque[float] = deque(maxlen=RECENT)  # seconds of the last steps; with `beside`, of plain ones
        self.share = 0.0  # the time that reading may take after the last step, in such steps
        self.read_last = False
        self.steps_beside = 0
        self.is_old = False  # whether rows have drafted since `steps` were measured

    def reads_next(self, has_rows: bool) -> bool:
        """Whether prompts are read next, if there are any. A pass of their own takes turns with the running rows."""
        if not has_rows or self.prompts_first:
            return True
        if self.beside:
            return self.steps_beside < (REFRESH if self.steps else 1)
        return not self.read_last

    def tokens(self, has_rows: bool) -> int:
        """How many tokens the next pass reads at most."""
        return self.chunk if has_rows and not self.prompts_first else self.most

    def stepped(self, seconds: float, drafts: bool, beside: int = 0) -> None:
        """Note the time of a step of the running rows, with drafts or without, and with `beside` tokens of prompts."""
        self.read_last = False
        if beside:
            self.steps_beside += 1
            if self.steps:
                self._adapt(beside, seconds - min(self.steps))
        elif self.beside and drafts:  # their time says nothing about steps with a chunk
            self.is_old = True
        else:
            if self.is_old:
                self.steps.clear()
                self.is_old = False
            self.steps.append(seconds)
            self.share = BESIDE if self.beside else SHARE_OF_DRAFTING if drafts else SHARE
            self.steps_beside = 0

    def has_read(self, tokens: int, seconds: float) -> None:
        """Note the time of a pass over prompts alone."""
        self.read_last = True
        if self.steps and not self.beside:
            self._adapt(tokens, seconds)

    def _adapt(self, tokens: int, seconds: float) -> None:
        if tokens < self.chunk // 2:  # too few to tell
            return
        may_take = self.share * min(self.steps)
        fitting = tokens * may_take / seconds if seconds > 0 else self.most
        self.chunk = round(min(max(fitting, self.chunk / 2, LEAST), GROWTH * self.chunk, self.most))
