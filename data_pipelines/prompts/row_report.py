"""A report on the rows of a data source: every row that was dropped is named, and every one that was cut is counted."""

from collections import Counter
from dataclasses import dataclass, field

from headstart.data_pipelines.prompts.rows import BadRow
from headstart.data_pipelines.stages.stage import Json
from headstart.recipes.schema import DataSection

TOO_LONG, HELD_OUT = "too long", "held out too"  # kinds of rows that are left out without counting as unusable
UNUSABLE_SHARE_MAX = 0.01  # largest share of unusable rows
NAMED_ROWS_MAX = 5  # unusable rows named in a message; the report lists all
CANDIDATE = "candidate"  # `counts` of a report on self-written rows
HELD_OUT_SHARE_MAX = 0.1  # largest share of the training rows that may be held out too; they are dropped


@dataclass
class RowReport:
    """Counts the rows of one source and lists those that gave no sample."""

    source: str
    wanted: int | None = None  # samples that the recipe asks for
    wanted_by: str = ""  # the field that asks for them
    counts: str = "line"  # the unit of row numbers: line, row or candidate
    rows: int = 0
    samples: int = 0
    left_out: list[Json] = field(default_factory=list)  # {line, kind, why} of each row that gave no sample
    cut: int = 0  # rows whose prompt was too long and lost its beginning
    lost_system: int = 0  # samples whose system turn was cut off
    unanswered: int = 0  # rows that lost the turns after their last answer
    without_end: int = 0  # answers after which the chat template writes no end mark
    unread: Counter[str] = field(default_factory=Counter)  # fields that are not read -> rows
    added: Counter[str] = field(default_factory=Counter)  # text that the template adds before words -> answers

    def reject(self, line: int, error: BadRow) -> None:
        """Count a row that gives no sample."""
        self.left_out.append({"line": line, "kind": error.kind, "why": str(error)})

    @property
    def bad(self) -> list[Json]:
        """The unusable rows."""
        return [row for row in self.left_out if row["kind"] not in (TOO_LONG, HELD_OUT)]

    @property
    def held_out(self) -> list[int]:
        """Lines left out because they are held out too."""
        return [row["line"] for row in self.left_out if row["kind"] == HELD_OUT]

    def check(self) -> None:
        """Raise ValueError if too many rows are unusable or held out too, or no row is usable."""
        if len(bad := self.bad) > UNUSABLE_SHARE_MAX * self.rows:
            named = [f"{self.source} {self.counts} {row['line']}: {row['why']}" for row in bad[:NAMED_ROWS_MAX]]
            more = [f"and {len(bad) - NAMED_ROWS_MAX} more"] if len(bad) > NAMED_ROWS_MAX else []
            summary = f"{len(bad)} of {self.rows} rows are unusable, up to {UNUSABLE_SHARE_MAX:.0%} are allowed:"
            raise ValueError("\n  ".join([summary, *named, *more]) + "\nfix or remove them")
        if len(held_out := self.held_out) > HELD_OUT_SHARE_MAX * self.rows:
            lines = ", ".join([*map(str, held_out[:NAMED_ROWS_MAX]), *["..."] * (len(held_out) > NAMED_ROWS_MAX)])
            problem = f"{len(held_out)} of {self.rows} rows of {self.source} are held out too"
            allowed = f"up to {HELD_OUT_SHARE_MAX:.0%} are allowed; remove them from one of the two files"
            raise ValueError(f"data.heldout_prompts: {problem} ({self.counts} {lines}), {allowed}")
        if self.samples == 0:
            read = ", ".join([f"{self.rows} rows read", *self.dropped()])
            raise ValueError(f"{self.source} has no prompts ({read}); give at least one usable row")

    def dropped(self) -> list[str]:
        """In words, why rows gave no sample."""
        kinds, bad = Counter(row["kind"] for row in self.left_out), Counter(row["kind"] for row in self.bad)
        named = ", ".join(f"{kind} {count:,}" for kind, count in bad.items())
        reasons = [f"{bad.total():,} unusable ({named})"] if bad else []
        return reasons + [f"{kinds[kind]} {kind}" for kind in (HELD_OUT, TOO_LONG) if kinds[kind]]

    def summary(self, name: str, data: DataSection) -> str:
        """One line for the user: what was read, dropped and cut, and why."""
        if self.counts == CANDIDATE:
            counts = f"{name}: {self.rows:,} candidates written by the target, {self.samples:,} kept"
            return "; ".join([counts, *(f"dropped {why}" for why in [", ".join(self.dropped())] if why)])
        parts = [f"{name}: {self.rows:,} rows read from {self.source}, {self.samples:,} prompts kept"]
        if dropped := self.dropped():
            parts.append(f"dropped {', '.join(dropped)}")
        if self.cut:
            lost = f", with it the system turn of {self.lost_system:,}" if self.lost_system else ""
            parts.append(f"cut the beginning of {self.cut:,} to fit data.prompt_tokens={data.prompt_tokens}{lost}")
        if self.unanswered:
            parts.append(f"dropped the turns after the last answer of {self.unanswered:,}")
        parts += [f"the chat template adds {text!r} before {count:,} answers" for text, count in self.added.items()]
        if self.without_end:
            parts.append(f"the chat template writes no end mark after {self.without_end:,} answers, so none is learned")
        if self.unread:
            parts.append("not read: " + ", ".join(f"{name} ({count:,})" for name, count in self.unread.items()))
        if self.samples < (self.wanted or 0):
            parts.append(f"{self.wanted_by}={self.wanted:,} asks for more, but there are no more rows")
        return "; ".join(parts)
