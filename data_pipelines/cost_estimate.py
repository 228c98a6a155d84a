"""What a harvest will cost in disk and time, said before it starts."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data_pipelines.responses import Text, responses_path
from data_pipelines.shard_work import Piece
from data_pipelines.state_encoding import bytes_per_token
from heads.target_config import TargetConfig
from recipes import Recipe
from recipes.jsonl import read_jsonl

SAFETY = 1.01  # of the disk: headers, offsets and the manifest


@dataclass(frozen=True)
class Plan:
    """The features of a run: tokens of each shard, and the bytes that a token takes."""

    tokens: dict[tuple[str, int], int]  # by split and index
    token_bytes: int

    @classmethod
    def of(cls, recipe: Recipe, config: TargetConfig, taps: tuple[int, ...], work: list[Piece]) -> "Plan":
        """From the responses, which must be there."""
        tokens = {
            (piece.split, piece.index): sum(
                len(Text.from_row(row).tokens) for row in read_jsonl(responses_path(recipe, piece))
            )
            for piece in work
        }
        return cls(tokens, bytes_per_token(config.hidden_size, len(taps), recipe.data.dtype))

    @property
    def bytes(self) -> int:
        return sum(self.tokens.values()) * self.token_bytes

    def check_disk(self, folder: Path) -> None:
        """Raises ValueError where the disk has no room for what is not there yet."""
        there = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        needed, free = self.bytes * SAFETY - there, shutil.disk_usage(folder).free
        if needed > free:
            raise ValueError(no_room(needed, folder, free))

    def in_words(self, seconds_per_token: float) -> str:
        tokens = sum(self.tokens.values())
        minutes = tokens * seconds_per_token / 60
        return (
            f"features of {tokens:,} tokens: {gigabytes(self.bytes)} on disk, {self.token_bytes:,} bytes per token; "
            f"about {minutes:.1f} minutes"
        )


def foreseen(recipe: Recipe, config: TargetConfig, taps: tuple[int, ...], work: list[Piece]) -> str:
    """What the features will take on disk, before a response is written; how long those get is not known then.

    Raises ValueError where there is not even room for the features of the prompts.
    """
    per_token = bytes_per_token(config.hidden_size, len(taps), recipe.data.dtype)
    rows = [row for piece in work for row in piece.rows]
    least = per_token * sum(len(row["text"] if "text" in row else row["tokens"]) for row in rows)
    written = recipe.data.response_tokens * len(rows) if recipe.data.responses == "target" else 0
    free = shutil.disk_usage(recipe.data_folder).free
    if least * SAFETY > free:
        raise ValueError(no_room(least, recipe.data_folder, free))
    most = least + per_token * written
    return f"features will take {gigabytes(least)} to {gigabytes(most)} on disk, where {gigabytes(free)} are free"


def no_room(needed: float, folder: Path, free: int) -> str:
    return (
        f"the features need {gigabytes(needed)} more in {folder} and its disk has {gigabytes(free)} left; choose "
        "another data.folder, data.dtype int8 or float8, fewer data.num_prompts, or data.mode online"
    )


def first_batch(recipe: Recipe, piece: Piece) -> list[list[int]]:
    """Texts to time a pass on."""
    rows = read_jsonl(responses_path(recipe, piece))
    return [Text.from_row(row).tokens for row, _ in zip(rows, range(recipe.data.harvest_batch), strict=False)]


def timed(run: Callable[[], object]) -> float:
    """Seconds of the second of two runs."""
    run()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
