"""Estimates of a harvest's disk space and time, made before it starts."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from headstart.common.jsonl import read_jsonl
from headstart.data_pipelines.features.shard_files import bytes_per_token
from headstart.data_pipelines.prompts.responses import Text, responses_path
from headstart.data_pipelines.stages.shard_work import ShardPrompts
from headstart.data_pipelines.stages.stage import Stage
from headstart.heads.target_config import TargetConfig
from headstart.recipes import Recipe

UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))  # and their length in seconds
DISK_MARGIN = 1.01  # factor for headers, offsets and the manifest


@dataclass(frozen=True)
class FeatureCost:
    """The size of a run's features."""

    tokens: int
    token_bytes: int  # bytes per token

    @classmethod
    def of(cls, recipe: Recipe, config: TargetConfig, taps: tuple[int, ...], responses: Stage) -> "FeatureCost":
        """The size of the features of all responses, which must be complete."""
        facts = responses.facts()
        tokens = facts["prompt_tokens"] + facts["response_tokens"]
        return cls(tokens, bytes_per_token(config.hidden_size, len(taps), recipe.data.dtype))

    @property
    def bytes(self) -> int:
        return self.tokens * self.token_bytes

    def check_disk(self, folder: Path) -> None:
        """Raise ValueError if the disk has no room for the shards that are still missing."""
        written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        needed, free = self.bytes * DISK_MARGIN - written, shutil.disk_usage(folder).free
        if needed > free:
            raise ValueError(disk_full_message(needed, folder, free))

    def describe(self, seconds_per_token: float) -> str:
        """The size on disk and the time to compute the features, in words for the user."""
        return (
            f"features of {self.tokens:,} tokens take {decimal(self.bytes)} on disk ({self.token_bytes:,} bytes per "
            f"token) and {duration(self.tokens * seconds_per_token)}"
        )


def forecast_disk(recipe: Recipe, config: TargetConfig, taps: tuple[int, ...], shards: list[ShardPrompts]) -> str:
    """Describe the disk space that the features will need, as a range: response lengths are not known yet.

    Raises ValueError if the disk cannot hold even the features of the prompts.
    """
    per_token = bytes_per_token(config.hidden_size, len(taps), recipe.data.dtype)
    rows = [row for shard in shards for row in shard.rows]
    least = per_token * sum(len(row["text"] if "text" in row else row["tokens"]) for row in rows)
    written = recipe.data.response_tokens * len(rows) if recipe.data.responses == "target" else 0
    free = shutil.disk_usage(recipe.data_folder).free
    if least * DISK_MARGIN > free:
        raise ValueError(disk_full_message(least, recipe.data_folder, free))
    most = least + per_token * written
    size = f"{decimal(least)} to {decimal(most)}" if most > least else decimal(least)
    return f"features will take {size} on disk ({decimal(free)} free)"


def disk_full_message(needed: float, folder: Path, free: int) -> str:
    return (
        f"data.folder: the features need {decimal(int(needed))} more in {folder}, whose disk has {decimal(free)} left; "
        "choose another data.folder, data.dtype int8 or float8, fewer data.num_prompts, or data.online=[auto]"
    )


def first_batch(recipe: Recipe, shard: ShardPrompts) -> list[list[int]]:
    """The first texts of a shard, as many as one forward reads, to time it."""
    rows = read_jsonl(responses_path(recipe, shard))
    return [Text.from_row(row).tokens for row, _ in zip(rows, range(recipe.data.harvest_batch), strict=False)]


def time_second_run(run: Callable[[], object]) -> float:
    """Seconds that the second of two runs takes; the first warms up."""
    run()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds < 1:
        return "less than a second"
    unit, length = next((unit, length) for unit, length in UNITS if seconds >= length)
    return f"about {seconds / length:.1f} {unit}"
