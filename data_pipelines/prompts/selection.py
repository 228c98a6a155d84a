"""Select prompts from self-written candidates (data.prompts self): in order of their numbers, without near-duplicates.

Near-duplicates share most of their sequences of five letters. MinHash finds the few texts that may share that many
(Broder 1997), and the exact Jaccard similarity decides.
"""

import re
import textwrap
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import numpy as np

from headstart.data_pipelines.prompts.conversations import (
    Conversation,
    PromptAndAnswer,
    TokenRow,
    parse_row,
    texts_of,
)
from headstart.data_pipelines.prompts.row_report import (
    CANDIDATE,
    HELD_OUT,
    NAMED_ROWS_MAX,
    UNUSABLE_SHARE_MAX,
    RowReport,
)
from headstart.data_pipelines.prompts.rows import BadRow, read_rows
from headstart.data_pipelines.stages.stage import Json
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.recipes.schema import SELF, DataSection

SHINGLE_CHARACTERS = 5
SIMILARITY_MIN = 0.7  # Jaccard similarity from which two texts are near-duplicates
PERMUTATIONS, BANDS = 128, 32  # MinHash: misses a pair with a similarity of 0.7 once in 5,000 times
FACTORS = np.random.default_rng(0).integers(2**63, size=PERMUTATIONS, dtype=np.uint64) * 2 + 1
REPEATS = "repeats another"
PICTURE = "picture"  # it cannot be read
RECENT_CANDIDATES, RECENT_USABLE_MIN = 500, 5  # the selection gives up if fewer of a kind's last ones are usable
# The tokens, and digests of pictures, by which a training sample and a held-out one are recognised as the same.
Key = tuple[int | str, ...]


def key_of(row: Json) -> Key:
    """The prompt's tokens and pictures, by which a row is known, or the full text if it has no prompt."""
    prompt: list[int] = row["tokens"]
    return (*prompt, *(row.get("response", ()) if len(prompt) < 2 else ()), *pictures_of(row))


def pictures_of(row: Json) -> tuple[str, ...]:
    """The digests of the pictures that a prompt shows."""
    return tuple(row.get("images", {}).get("pictures", ()))


def images_of(row: Json) -> Json:
    return {"images": row["images"]} if "images" in row else {}


def shows_picture(data: DataSection, number: int) -> bool:
    """Whether a candidate asks about a picture."""
    return data.self_pictures is not None and number % 2 == 1


class SeenTexts:
    """Texts that a new one must not repeat."""

    def __init__(self) -> None:
        self.by_band = defaultdict[tuple[int, bytes], list[tuple[str, str]]](list)  # texts and their kinds

    def similar(self, text: str) -> str | None:
        """The kind of a text that this one repeats; None if there is none."""
        pieces = shingles(text)
        for other, kind in {each: None for band in bands(pieces) for each in self.by_band.get(band, ())}:
            if len(pieces & (others := shingles(other))) / len(pieces | others) >= SIMILARITY_MIN:
                return kind
        return None

    def add(self, text: str, kind: str) -> None:
        for band in bands(shingles(text)):
            self.by_band[band].append((text, kind))


def bands(pieces: Set[str]) -> Iterable[tuple[int, bytes]]:
    """Parts of a MinHash, one of which two similar sets have in common."""
    hashes = np.array([zlib.crc32(piece.encode()) for piece in pieces], dtype=np.uint64)
    lowest = (hashes[:, None] * FACTORS).min(0)  # modulo 2**64
    return enumerate(part.tobytes() for part in lowest.reshape(BANDS, -1))


def shingles(text: str) -> set[str]:
    """The sequences of five characters in the words of a text, in lower case and without punctuation."""
    words = " ".join(re.findall(r"\w+", text.casefold()))
    return {words[start : start + SHINGLE_CHARACTERS] for start in range(max(len(words) - SHINGLE_CHARACTERS, 0) + 1)}


class Selection:
    """Takes candidates in the order of their numbers until there are enough prompts."""

    def __init__(
        self, data: DataSection, rows: Sequence[Json] = (), report: RowReport | None = None, texts: Iterable[str] = ()
    ) -> None:
        """`rows`, their report and their opening texts come from a held-out file; without one the first prompts are
        held out."""
        self.data = data
        self.num_heldout = data.heldout_samples if report is None else 0
        self.train: list[Json] = []
        self.heldout = [*rows]
        self.reports = [
            RowReport(SELF, data.num_prompts, "data.num_prompts", CANDIDATE),
            report or RowReport(SELF, data.heldout_samples, "data.heldout_samples", CANDIDATE),
        ]
        self.next = 0  # number of the next candidate
        self.accepted = 0
        # Whether each became a prompt, by whether it is about a picture.
        self.recent = {kind: deque[bool](maxlen=RECENT_CANDIDATES) for kind in (False, True)}
        self.held_out_keys = {key_of(row) for row in rows}
        self.openings = defaultdict[tuple[str, ...], SeenTexts](SeenTexts)  # by the pictures that they are about
        for text in texts:
            self.openings[()].add(text, HELD_OUT)

    @property
    def wanted(self) -> int:
        return self.data.num_prompts + self.num_heldout

    @property
    def missing(self) -> int:
        return self.wanted - self.accepted

    def take_all(self, candidates: Mapping[int, Json]) -> None:
        """Take candidates until there are enough prompts, or the next one is not written yet."""
        while self.missing and self.next in candidates:
            self.take(candidates[self.next])

    def take(self, candidate: Json) -> None:
        """Take the next candidate; raises ValueError if hardly any of the last ones was usable."""
        assert candidate["candidate"] == self.next
        self.next += 1
        is_heldout = len(self.heldout) < self.num_heldout
        rows, report = (self.heldout, self.reports[1]) if is_heldout else (self.train, self.reports[0])
        report.rows += 1
        opening, reason, shown = candidate["turns"][0], candidate["rejected"], pictures_of(candidate)
        if reason is None:
            is_held_out = key_of(candidate) in self.held_out_keys
            reason = HELD_OUT if is_held_out else self.openings[shown].similar(opening)
        if reason is None:
            self.openings[shown].add(opening, REPEATS)
            rows.append({"id": len(rows), "tokens": candidate["tokens"], "cut": False, **images_of(candidate)})
            report.samples += 1
            self.accepted += 1
        else:
            words = opening if reason == PICTURE else textwrap.shorten(opening, 80, placeholder="...")
            report.reject(candidate["candidate"], BadRow(reason, words))
        recent = self.recent[shows_picture(self.data, candidate["candidate"])]
        recent.append(reason is None)
        rejected = [row for each in self.reports for row in each.left_out] if reason == PICTURE else []
        broken = [row["why"] for row in rejected if row["kind"] == PICTURE]
        if len(broken) > UNUSABLE_SHARE_MAX * max(self.next, RECENT_CANDIDATES):
            problem = f"{len(broken)} of {self.next} candidates show pictures that cannot be read"
            lines = [f"{problem}, up to {UNUSABLE_SHARE_MAX:.0%} are allowed:", *sorted({*broken})[:NAMED_ROWS_MAX]]
            raise ValueError("\n  ".join(lines) + "\nrepair or remove them")
        if len(recent) == RECENT_CANDIDATES and sum(recent) < RECENT_USABLE_MIN:
            raise ValueError(self._gives_up(sum(recent)))

    def rejections(self) -> dict[str, int]:
        """The rejected candidates by reason."""
        reports = [report for report in self.reports if report.counts == CANDIDATE]
        return dict(Counter(row["kind"] for report in reports for row in report.left_out).most_common())

    def _gives_up(self, usable: int) -> str:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.rejections().items())
        reachable = max(self.accepted - self.num_heldout, 0)
        return (
            f"data.num_prompts: {self.data.num_prompts} {self.data.origin('num_prompts')}, but the target wrote only "
            f"{self.accepted} usable prompts in {self.next:,} candidates, {usable} of them in the last "
            f"{RECENT_CANDIDATES} ({reasons}); up to {reachable} can be reached: lower it, raise "
            "data.self_prompt_tokens if most have no end, add data.self_system_prompts for more topics if most repeat "
            "others, or name a file in data.prompts"
        )


def opening_texts(source: str, template: ChatTemplate) -> Iterator[str]:
    """The first words of the user in each usable row of a file."""
    for row in read_rows(source):
        try:
            parsed = parse_row(row.read(), template.is_turn)
        except BadRow:
            continue
        if isinstance(parsed, Conversation):
            yield "".join(texts_of(next(message for message in parsed.messages if message["role"] == "user")))
        elif isinstance(parsed, TokenRow):
            yield str(template.tokenizer.decode(parsed.tokens, skip_special_tokens=True))
        elif isinstance(parsed, PromptAndAnswer):
            yield parsed.prompt
        elif isinstance(parsed, str):
            yield parsed
