"""The inputs of commands that measure heads: the heads' folders and taps, and held-out prompts."""

from itertools import islice
from pathlib import Path

from headstart.common.files import read_jsonl
from headstart.heads.checkpoint import load_taps
from headstart.heads.target_config import TargetConfig, locate_target
from headstart.recipes import Recipe

OWN_HEAD = ""  # name of the recipe's own head: its rows in the report have no prefix


def held_out_prompts(recipe: Recipe) -> list[list[int]]:
    """The first report.num_prompts held-out prompts of the run, as tokens; raises ValueError if there are none yet."""
    path = recipe.prompts_dir / "heldout.jsonl"
    if not path.is_file():
        remedy = "make them with headstart prompts RECIPE (headstart report also takes report.prompts=FILE)"
        raise ValueError(f"{path} is missing; the run's held-out prompts are required: {remedy}")
    return [row["tokens"] for row in islice(read_jsonl(path), recipe.report.num_prompts)]


def head_folders(recipe: Recipe) -> dict[str, Path]:
    """The folder of every head to measure, by the name that prefixes its rows in the report."""
    return {OWN_HEAD: recipe.head_in_use, **recipe.report.other_heads}


def taps_to_read(recipe: Recipe) -> tuple[int, ...]:
    """The union of the taps that the heads read; ValueError for folders without a head, or a head that does not fit."""
    folders = head_folders(recipe)
    fields = {name: f"report.other_heads.{name}" for name in folders} | {OWN_HEAD: "decode.head"}
    wrong = [
        f"{fields[name]}: {folder} holds no head (no config.json)"
        for name, folder in folders.items()
        if not (folder / "config.json").is_file()
    ]
    if wrong:
        remedy = "train one with headstart train RECIPE, name another with decode.head=FOLDER, or compare methods that "
        remedy += "need none: report.baselines='[plain, prompt_lookup]'"
        raise ValueError(f"{'; '.join(wrong)}; a trained head's folder is required: {remedy}")
    target = TargetConfig.from_folder(locate_target(recipe.target.path, recipe.target.revision))
    return tuple(sorted({tap for folder in folders.values() for tap in load_taps(folder, target)}))
