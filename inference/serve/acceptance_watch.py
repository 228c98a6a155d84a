"""Warns when drafts are accepted far less often than the head's card promises."""

import json
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path

from headstart.inference.serve.engine import Update

WINDOW = 512  # drafting steps that are compared with the card
SHARE = 0.7  # of the promised draft tokens per step; below it something is wrong, such as another chat template
# As heads/formats/card.py writes it.
ON_CARD = re.compile(r"acceptance length after that step, on \d+ held-out prompts: (.+)")
AT_TEMPERATURE = re.compile(r"([\d.]+) at temperature")


class AcceptanceWatch:
    """Compares the last steps with a promise. It warns once, and again only after acceptance has recovered."""

    def __init__(self, promised: float | None, log: Callable[[str], None]) -> None:
        self.promised, self.log = promised, log
        self.steps: deque[int] = deque(maxlen=WINDOW)
        self.total = 0
        self.warned = False

    def count(self, update: Update) -> None:
        """Take in a step; steps without drafts do not count."""
        if self.promised is None or not update.drafted:
            return
        self.total += update.accepted - (self.steps[0] if len(self.steps) == WINDOW else 0)
        self.steps.append(update.accepted)
        if len(self.steps) < WINDOW:
            return
        measured = 1 + self.total / WINDOW
        is_low = measured - 1 < SHARE * (self.promised - 1)
        if is_low and not self.warned:
            self.log(json.dumps({"warning": self.message(measured)}))
        self.warned = is_low

    def message(self, measured: float) -> str:
        return (
            f"the acceptance length of the last {WINDOW} drafting steps is {measured:.2f}; the head's card promises "
            f"{self.promised:.2f}. Sampling at a high temperature and text of another kind lower it; so do another "
            f"chat template and another target than the head was trained for: headstart doctor HEAD TARGET"
        )


def promised_length(head: Path | None) -> float | None:
    """The lowest acceptance length, over the temperatures on the card in a head's folder; None if it has none.

    The lowest, because requests may have any temperature: at 1, where drafts are accepted least, nothing is wrong.
    """
    card = None if head is None else head / "README.md"
    if card is None or not card.is_file():
        return None
    found = ON_CARD.search(card.read_text(encoding="utf-8", errors="replace"))
    lengths = [] if found is None else [float(length) for length in AT_TEMPERATURE.findall(found[1])]
    return min(lengths, default=None)
