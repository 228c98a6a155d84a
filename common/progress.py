"""The progress of a stage: a bar on a terminal; elsewhere, such as in a log file, a line now and then."""

import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich import progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

# A line is printed after SHARE of the work or SECONDS, whichever comes first, and at least APART seconds after another.
SHARE, SECONDS, APART = 0.05, 30.0, 5.0


class NoteColumn(progress.ProgressColumn):
    """The note after the bar, which is cut first where a terminal is narrow."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=False))

    def render(self, task: progress.Task) -> Text:
        return Text(task.fields["text"], no_wrap=True, overflow="ellipsis")


class Progress:
    """A context manager that shows how much of `total` is done, the speed, and the time left.

    `unit` is a plural, such as samples; `done` counts those that an earlier run finished. Units that are worked on
    `together` count half while they are: the first text of a batch ends when the others are about to. Nothing is shown
    unless `active`. A line appears when work is reported, so no thread disturbs what is measured.
    """

    def __init__(
        self,
        what: str,
        total: int,
        unit: str,
        done: int = 0,
        active: bool = True,
        clock: Callable[[], float] = time.monotonic,
        together: int = 1,
    ) -> None:
        self.what, self.total, self.unit, self.done, self.active, self.clock = what, total, unit, done, active, clock
        self.together = together
        self.text = ""
        self.console = Console()
        self.on_terminal = active and self.console.is_terminal and not self.console.is_dumb_terminal
        left = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn()
        right = NoteColumn(), progress.TimeElapsedColumn(), progress.TextColumn("{task.fields[left]}")
        hidden = not self.on_terminal
        self._bar = progress.Progress(*left, *right, console=self.console, refresh_per_second=2, disable=hidden)
        self._task = self._bar.add_task(what, total=total, completed=done, text="", left="")

    def __enter__(self) -> Self:
        self._bar.start()
        self._started, self._own = self.clock(), 0  # what this process has done
        self._print_line()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None and self.done >= self.total:
            self._bar.update(self._task, text="done")
            self._say_in_log(f"{self.what}: all {self.total} {self.unit} done in {duration(self._seconds())}")
        self._bar.stop()

    def advance(self, count: int, text: str | None = None) -> None:
        """Count work that is done now; `text` replaces the note, such as a loss."""
        self._own += count
        self.skip(count, text)

    def skip(self, count: int, text: str | None = None) -> None:
        """Count work that an earlier run has done, which says nothing about the speed."""
        self.done += count
        self.text = self.text if text is None else text
        left = duration(self._estimate()[1]) if self._own else ""
        self._bar.update(self._task, completed=self.done, text=self.text, left=left)
        waited = self.clock() - self._line_at
        enough = self.done - self._line_done >= SHARE * self.total
        if self.done < self.total and (waited >= SECONDS or (enough and waited >= APART)):
            self._print_line()

    def say(self, text: str) -> None:
        """Print a line, above the bar on a terminal."""
        if self.on_terminal:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._say_in_log(text)

    def _print_line(self) -> None:
        self._line_at, self._line_done = self.clock(), self.done
        parts = [f"{self.what}: {self.done} of {self.total} {self.unit} ({self.done / max(self.total, 1):.0%})"]
        if self._own:
            rate, left = self._estimate()
            parts += [f"{rate:.3g} {self.unit}/s", f"{duration(left)} left"]
        self._say_in_log(", ".join([*parts, self.text] if self.text else parts))

    def _estimate(self) -> tuple[float, float]:
        """Units per second, and the seconds that are left."""
        missing = self.total - self.done
        begun = min(self.together - 1, missing) / 2
        rate = (self._own + begun) / max(self._seconds(), 1e-9)
        return rate, (missing - begun) / rate

    def _say_in_log(self, text: str) -> None:
        if self.active and not self.on_terminal:
            print(text, flush=True)

    def _seconds(self) -> float:
        return self.clock() - self._started


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as in 1:02:03."""
    return str(timedelta(seconds=round(seconds)))
