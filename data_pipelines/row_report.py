"""A report on the rows of a data source: every unusable row is counted and named."""

from collections import Counter

from headstart.data_pipelines.rows import BadRow
from headstart.data_pipelines.stage import Json

SHOWN = 5  # unusable rows named in a message; the report lists all


class RowReport:
    """Counts the rows of one source and lists those that gave no sample or a shortened prompt."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.rows = 0
        self.bad: list[Json] = []  # {line, kind, why}
        self.cut: list[int] = []  # lines whose prompt was too long and lost its beginning

    def reject(self, line: int, error: BadRow) -> None:
        self.bad.append({"line": line, "kind": error.kind, "why": str(error)})

    def to_json(self) -> Json:
        kinds = Counter(row["kind"] for row in self.bad)
        return {"source": self.source, "rows": self.rows, "bad": dict(kinds), "cut": self.cut, "bad_rows": self.bad}

    def check(self, max_bad_fraction: float) -> None:
        """Raise ValueError if more rows are unusable than data.max_bad_fraction allows, or no row is usable."""
        if len(self.bad) > max_bad_fraction * self.rows:
            named = [f"{self.source} line {row['line']}: {row['why']}" for row in self.bad[:SHOWN]]
            more = [f"and {len(self.bad) - SHOWN} more"] if len(self.bad) > SHOWN else []
            raise ValueError(
                f"{len(self.bad)} of {self.rows} rows are unusable, data.max_bad_fraction allows "
                f"{max_bad_fraction:.2%}:\n  "
                + "\n  ".join(named + more)
                + "\nfix them, or raise data.max_bad_fraction"
            )
        if len(self.bad) == self.rows:
            raise ValueError(f"{self.source} has no prompts; give at least one row")
