"""The disk space that a harvest's features need, known before they are computed."""

import shutil
from pathlib import Path

from rich.filesize import decimal

from headstart.data_pipelines.features.shard_files import bytes_per_token
from headstart.data_pipelines.stages.shard_work import ShardPrompts
from headstart.data_pipelines.stages.stage import Stage
from headstart.heads.target_config import TargetConfig
from headstart.recipes import Recipe

DISK_MARGIN = 1.01  # factor for headers, offsets and the manifest


def forecast_disk(recipe: Recipe, config: TargetConfig, taps: tuple[int, ...], shards: list[ShardPrompts]) -> str:
    """The features' disk space in words, as a range; raises ValueError if even those of the prompts do not fit."""
    token_bytes = bytes_per_token(config.hidden_size, len(taps), recipe.data.dtype)
    rows = [row for shard in shards for row in shard.rows]
    least = token_bytes * sum(len(row["text"] if "text" in row else row["tokens"]) for row in rows)
    written = recipe.data.response_tokens * len(rows) if recipe.data.responses == "target" else 0
    free = refuse_full_disk(least, recipe.data_folder)
    most = least + token_bytes * written
    size = f"{decimal(least)} to {decimal(most)}" if most > least else decimal(least)
    return f"features will take {size} on disk ({decimal(free)} free)"


def check_disk(recipe: Recipe, config: TargetConfig, taps: tuple[int, ...], responses: Stage) -> str:
    """Describe the size of the features of all responses; raises ValueError if the disk cannot hold what is missing."""
    tokens = responses.facts()["prompt_tokens"] + responses.facts()["response_tokens"]
    token_bytes = bytes_per_token(config.hidden_size, len(taps), recipe.data.dtype)
    there = sum(path.stat().st_size for path in recipe.features_dir.glob("*.safetensors"))
    refuse_full_disk(tokens * token_bytes, recipe.features_dir, there)
    return (
        f"features of {tokens:,} tokens take {decimal(tokens * token_bytes)} on disk ({token_bytes:,} bytes per token)"
    )


def refuse_full_disk(size: int, folder: Path, there: int = 0) -> int:
    """The free space of a folder's disk, in bytes; raises ValueError if it is too little for features of this size."""
    needed, free = size * DISK_MARGIN - there, shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"data.folder: the features need {decimal(int(needed))} more in {folder}, whose disk has {decimal(free)} "
            "left; choose another data.folder, data.dtype int8 or float8, fewer data.num_prompts, or data.online=[auto]"
        )
    return free
