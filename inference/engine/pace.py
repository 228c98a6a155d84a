"""How much of the waiting prompts is read beside the steps of running rows, so that these do not stall."""

import math
from collections import deque

FIRST_PIECE = 16  # tokens of the first pass while rows run; the next ones follow from what it took
LEAST = 3  # tokens of a pass, however slow
# Beside a step, tokens share the reading of the weights with it. After a long context, attention costs them much more
# in pieces of few: when fewer than these fit, the rest of the prompt is read in slices of larger passes.
LEAST_BESIDE = 8
FIRST_SLICED = 64  # tokens of the first pass that is sliced
OF_SLICE = 0.5  # what a layer of such a pass may take, in slices: a slice can only end with a layer
DEEPER = 2  # as far into the next prompt, slices have to prove better again
# What a pass may take, in steps of the rows: a row then waits for about 2.5 plain steps. Steps with drafts take up to
# twice as long as plain ones.
SHARE, SHARE_OF_DRAFTING = 1.5, 0.75
BESIDE = 0.7  # how much longer a step may take for a piece beside it, or for a slice: a row waits for 1.7 plain steps
GROWTH = 1.5  # how much larger the next piece may be at most
RECENT = 5  # steps of which the fastest counts: a machine that falters does not make rows wait longer
REFRESH = 16  # steps with a piece beside them, after which one without tells how long a step takes by now


class Pace:
    """Decides when the next pass over prompts is due, and how many tokens it reads."""

    def __init__(self, most: int, prompts_first: bool, beside: bool = False, slices: bool = False) -> None:
        """A pass reads at most `most` tokens. With `prompts_first`, rows wait for all prompts that have a place.

        `beside`: prompts are read within the steps of running rows, and in passes of their own only if there are none.
        Such steps are plain: a step with drafts and a piece would take longer than a row should wait. `slices`: passes
        of their own can pause between layers, and take turns with the steps; with `beside`, only passes over what
        comes after a long context do.
        """
        if most < 1:
            raise ValueError(f"prefill_chunk: {most} given, 1 or more is allowed; leave it out for 512")
        self.most, self.prompts_first, self.beside = most, prompts_first, beside
        self.slices = slices and not prompts_first
        self.piece = min(FIRST_PIECE, most)
        self.sliced = min(FIRST_SLICED, most)  # tokens of the next pass that is sliced
        self.deep: float = math.inf if beside else 0  # from how many tokens of a prompt on its passes are sliced
        self.steps: deque[float] = deque(maxlen=RECENT)  # seconds of the last steps; with `beside`, of plain ones
        self.last = 0.0  # seconds of the last step
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
        """How many tokens the next pass reads at most, if it is not sliced."""
        return self.piece if has_rows and not self.prompts_first else self.most

    def in_slices(self, known: int) -> bool:
        """Whether the pass over a prompt after so many known tokens of it is sliced, if rows run."""
        return self.slices and known >= self.deep

    @property
    def slice_seconds(self) -> float:
        """How long a slice after the last step may take: what that step, if it took longer than others, has left of it.

        0 or less if there is no time for one.
        """
        return (1 + self.share) * self.step - self.last if self.steps else 0.0

    def has_read_in_slices(self, tokens: int, layer: float, is_last: bool) -> None:
        """A sliced pass over so many tokens took so many seconds per layer, and was the last one over its prompt."""
        fitting = tokens * OF_SLICE * self.share * self.step / layer if self.steps and layer > 0 else self.most
        if self.steps and tokens >= self.sliced // 2:
            self.sliced = round(min(max(fitting, self.sliced / 2, LEAST), GROWTH * self.sliced, self.most))
        if is_last:
            self.deep *= DEEPER

    def stepped(self, seconds: float, drafts: bool, beside: int = 0, known: int = 0) -> None:
        """A step of the running rows took so long, with drafts or without, and with so many tokens of prompts.

        `known`: how many tokens of the prompt came before these.
        """
        self.read_last, self.last = False, seconds
        if beside:
            self.steps_beside += 1
            if self.steps:
                self._adapt(beside, seconds - self.step)
                if self.slices and self.piece < LEAST_BESIDE:
                    self.deep = min(self.deep, known + beside)
                    self.piece = min(LEAST_BESIDE, self.most)
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
