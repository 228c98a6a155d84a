"""Which candidates of data.prompts self become prompts: in the order of their numbers, those that repeat no other.

Near-duplicates share most of their sequences of five letters. MinHash finds the few texts that may share that many
(Broder 1997, by the library rensa), and the exact share decides.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

from headstart.data_pipelines.prompts.conversations import Conversation, PromptAndAnswer, TokenRow, parse_row
from headstart.data_pipelines.prompts.row_report import CANDIDATE, RowReport
from headstart.data_pipelines.prompts.rows import BadRow, read_rows
from headstart.data_pipelines.stages.stage import Json
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.recipes.schema import SELF, DataSection

SHINGLE = 5  # characters of the sequences that two texts may share
SIMILARITY = 0.7  # two texts are near-duplicates from this share of common sequences (Jaccard similarity)
PERMUTATIONS, BANDS = 128, 32  # MinHash: a pair with a similarity of 0.7 is missed once in 5,000 times
MINHASH_SEED = 42
REPEATS = "repeats another"
NEARLY_REPEATS = "nearly repeats another"
HELD_OUT = "held out too"
WINDOW, FEWEST = 500, 5  # the target gives up if fewer than 5 of its last 500 candidates are usable


class SeenTexts:
    """Texts that a new one must not repeat."""

    def __init__(self) -> None:
        self.rensa = optional_rensa()
        self.lsh = self.rensa.RMinHashLSH(threshold=SIMILARITY, num_perm=PERMUTATIONS, num_bands=BANDS)
        self.texts: list[str] = []  # normalised

    def like(self, text: str) -> float:
        """The similarity of the text to the most similar one, if that is a near-duplicate, else 0."""
        wanted = normalised(text)
        pieces = shingles(wanted)
        found = [self.texts[number] for number in self.lsh.query(self.minhash(pieces))]
        return max((share for each in found if (share := jaccard(pieces, shingles(each))) >= SIMILARITY), default=0.0)

    def add(self, text: str) -> None:
        self.lsh.insert(len(self.texts), self.minhash(shingles(normalised(text))))
        self.texts.append(normalised(text))

    def minhash(self, pieces: Set[str]) -> Any:
        found = self.rensa.RMinHash(num_perm=PERMUTATIONS, seed=MINHASH_SEED)
        found.update(sorted(pieces))
        return found


def optional_rensa() -> Any:
    """The library rensa, which is an extra; raises ValueError that names the field if it is missing."""
    try:
        import rensa
    except ImportError as error:
        advice = "run pip install -e '.[self]', or choose other prompts"
        raise ValueError(f"data.prompts: {SELF} given, which needs rensa; {advice}") from error
    return rensa


def normalised(text: str) -> str:
    """The words of a text in lower case, without punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def shingles(text: str) -> set[str]:
    return {text[start : start + SHINGLE] for start in range(max(len(text) - SHINGLE, 0) + 1)}


def jaccard(one: Set[str], other: Set[str]) -> float:
    return len(one & other) / max(len(one | other), 1)


class Selection:
    """Takes candidates by number until there are enough."""

    def __init__(
        self, data: DataSection, rows: Sequence[Json] = (), report: RowReport | None = None, texts: Iterable[str] = ()
    ) -> None:
        """`rows` are a held-out file's, with its report and what users say first; else the first are held out."""
        self.data = data
        self.num_heldout = data.heldout_samples if report is None else 0
        self.train: list[Json] = []
        self.heldout = [*rows]
        self.reports = [
            RowReport(SELF, data.num_prompts, "data.num_prompts", CANDIDATE),
            report or RowReport(SELF, data.heldout_samples, "data.heldout_samples", CANDIDATE),
        ]
        self.next = 0  # the number of the candidate that is taken next
        self.accepted = 0
        self.recent: deque[bool] = deque(maxlen=WINDOW)  # whether each of the last candidates became a prompt
        self.held_out_keys = {tuple(row["tokens"]) for row in rows}
        self.held_out_texts, self.openings = SeenTexts(), SeenTexts()
        for text in texts:
            self.held_out_texts.add(text)

    @property
    def wanted(self) -> int:
        return self.data.num_prompts + self.num_heldout

    @property
    def missing(self) -> int:
        return self.wanted - self.accepted

    def take(self, candidate: Json) -> None:
        """Take the next candidate; raises ValueError if hardly any of the last ones was usable."""
        assert candidate["candidate"] == self.next
        self.next += 1
        is_heldout = len(self.heldout) < self.num_heldout
        rows, report = (self.heldout, self.reports[1]) if is_heldout else (self.train, self.reports[0])
        report.rows += 1
        why = candidate["rejected"] or self._repetition(candidate)
        if why is None:
            self.openings.add(candidate["turns"][0])
            rows.append({"id": len(rows), "tokens": candidate["tokens"], "cut": False})
            report.samples += 1
            self.accepted += 1
        elif why == HELD_OUT:
            report.held_out.append(candidate["candidate"])
        else:
            words = shortened(candidate["turns"][0])
            report.bad.append({"line": candidate["candidate"], "kind": why, "why": words})
        self.recent.append(why is None)
        if len(self.recent) == WINDOW and sum(self.recent) < FEWEST:
            raise ValueError(self._gives_up())

    def _repetition(self, candidate: Json) -> str | None:
        """Why a candidate that is usable by itself is left out, if it is."""
        opening = candidate["turns"][0]
        if tuple(candidate["tokens"]) in self.held_out_keys or self.held_out_texts.like(opening):
            return HELD_OUT
        similarity = self.openings.like(opening)
        if not similarity:
            return None
        return REPEATS if similarity == 1 else NEARLY_REPEATS

    def rejections(self) -> dict[str, int]:
        """The rejected candidates by reason."""
        own = [report for report in self.reports if report.counts == CANDIDATE]
        counts = Counter(row["kind"] for report in own for row in report.bad)
        held_out = sum(len(report.held_out) for report in own)
        return dict(counts.most_common()) | ({HELD_OUT: held_out} if held_out else {})

    def _gives_up(self) -> str:
        reasons = ", ".join(f"{why} {count:,}" for why, count in self.rejections().items())
        most = max(self.accepted - self.num_heldout, 0)
        return (
            f"data.num_prompts: {self.data.num_prompts} given, but the target wrote only {self.accepted} usable "
            f"prompts in {self.next:,} candidates, {sum(self.recent)} of them in the last {WINDOW} ({reasons}); up to "
            f"{most} can be reached: lower it, raise data.self_prompt_tokens if most have no end, add "
            "data.self_system_prompts for more topics if most repeat others, or name a file in data.prompts"
        )


def shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:77]}..."


def opening_texts(source: str, template: ChatTemplate) -> Iterator[str]:
    """The user's first words in each usable row of a file."""
    for row in read_rows(source):
        try:
            parsed = parse_row(row.read(), template.is_turn)
        except BadRow:
            continue
        if isinstance(parsed, Conversation):
            yield next(message["content"] for message in parsed.messages if message["role"] == "user")
        elif isinstance(parsed, TokenRow):
            yield str(template.tokenizer.decode(parsed.tokens, skip_special_tokens=True))
        elif isinstance(parsed, PromptAndAnswer):
            yield parsed.prompt
        elif isinstance(parsed, str):
            yield parsed
