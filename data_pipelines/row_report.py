"""What became of the rows of a source: none is left out without being counted and named."""

from collections import Counter

from data_pipelines.rows import BadRow
from data_pipelines.stage import Json

SHOWN = 5  # bad rows in a message; the report holds all


class Intake:
    """Counts the rows of one source, and remembers every one that gave no sample or a shortened one."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.rows = 0
        self.bad: list[Json] = []  # {line, kind, why}
        self.cut: list[int] = []  # lines whose prompt lost its beginning

    def reject(self, line: int, error: BadRow) -> None:
        self.bad.append({"line": line, "kind": error.kind, "why": str(error)})

    def report(self) -> Json:
        kinds = Counter(row["kind"] for row in self.bad)
        return {"source": self.source, "rows": self.rows, "bad": dict(kinds), "cut": self.cut, "bad_rows": self.bad}

    def check(self, max_bad_fraction: float) -> None:
        """Raises ValueError where more rows are bad than the recipe allows, or none is left."""
        if len(self.bad) > max_bad_fraction * self.rows:
            named = [f"{self.source} line {row['line']}: {row['why']}" for row in self.bad[:SHOWN]]
            more = [f"and {len(self.bad) - SHOWN} more"] if len(self.bad) > SHOWN else []
            raise ValueError(
                f"{len(self.bad)} of {self.rows} rows are bad, data.max_bad_fraction allows {max_bad_fraction:.2%}:\n  "
                + "\n  ".join(named + more)
                + "\nmend them, or raise data.max_bad_fraction"
            )
        if len(self.bad) == self.rows:
            raise ValueError(f"{self.source} holds no prompts; give at least one row")
