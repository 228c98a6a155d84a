"""Checks of a harvest's needs before any work: target, device, tokenizer, rows, draft head, folders and disk space."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryFile

from rich.filesize import decimal

from headstart.common.errors import named_errors
from headstart.common.remote import cache_limit, check_access, pull, url_of
from headstart.data_pipelines.features.shard_files import bytes_per_token
from headstart.data_pipelines.features.shards import read_manifest
from headstart.data_pipelines.prompts.candidates import UserTemplate
from headstart.data_pipelines.prompts.rows import read_rows
from headstart.data_pipelines.stages.stage import Stage
from headstart.heads.kinds.checkpoint import load_taps
from headstart.heads.target_config import SAFE_FILES, TargetConfig, folder_of
from headstart.inference.images.kept import KeptPictures
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.loading import pick_device
from headstart.inference.targets.tokenizer import Tokenizer, load_tokenizer
from headstart.recipes import Recipe
from headstart.recipes.checks import size_mistakes
from headstart.recipes.schema import HUB_PREFIX, SELF

DISK_FACTOR = 1.01  # for headers, offsets and the manifest
WITHOUT_WEIGHTS = [pattern for pattern in SAFE_FILES if pattern != "*.safetensors"]


def check_harvest(recipe: Recipe, is_here: bool = True) -> TargetConfig:
    """The target's sizes; raises ValueError for the first thing that keeps the harvest from running.

    A run on another machine, not `is_here`, may have devices that this one lacks.
    """
    for field, folder_or_url in {"run_dir": recipe.run_dir, "data.folder": recipe.data.folder}.items():
        if folder_or_url is not None:
            refuse_unwritable(field, folder_or_url)
    folder = folder_of(recipe.target, WITHOUT_WEIGHTS)
    target = TargetConfig.from_folder(folder)
    refuse_size_mistakes(recipe, folder)
    if is_here and recipe.target.split is None:
        pick_device(recipe.target.device)
    for name in (recipe.data.online or ()) if is_here else ():
        pick_device(name, "data.online")
    tokenizer = load_tokenizer(folder, recipe.target.trust_remote_code)
    if recipe.data.draft_head is not None:
        with named_errors("data.draft_head"):
            load_taps(recipe.data.draft_head, target)
    if recipe.data.store is not None:
        with named_errors("data.store"):
            pull(recipe.data.store)
            read_manifest(recipe.data.store)
    if not Stage("prompts", recipe.prompts_dir, {}).was_complete():  # its inputs would need the weights
        check_rows(recipe, tokenizer)
    return target


def refuse_size_mistakes(recipe: Recipe, folder: Path) -> None:
    """Raise ValueError for sizes that do not fit a target on the hub; a local one was checked with the recipe."""
    values, config = recipe.model_dump(mode="json"), json.loads((folder / "config.json").read_text(encoding="utf-8"))
    lines = []
    for path, allowed_and_advice in size_mistakes(config, recipe):
        section, _, key = path.partition(".")
        lines.append(f"{path}: {values[section][key]} given, {allowed_and_advice}")
    if lines:
        raise ValueError("the recipe does not fit the target:\n  " + "\n  ".join(lines))


def refuse_unwritable(field: str, folder: Path) -> None:
    """Raise ValueError if a folder, or the one that it would be made in, takes no new file."""
    if url_of(folder) is not None:
        cache_limit()  # raises ValueError for what the environment says
        with named_errors(field):
            check_access(folder)
        return
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        with TemporaryFile(dir=existing):
            pass
    except OSError as error:
        allowed = f"a writable folder is allowed, and {existing} is not writable ({error.strerror})"
        raise ValueError(f"{field}: {folder} given, {allowed}; choose another, or make {existing} writable") from error


def check_rows(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Raise ValueError if a file of prompts has no rows, or the target cannot write its own."""
    data = recipe.data
    sources = {} if data.holds_out_own_prompts else {"data.heldout_prompts": str(data.heldout_prompts)}
    if data.prompts == SELF:
        template = ChatTemplate(tokenizer, recipe.target.chat_template_kwargs)
        UserTemplate(template, data, KeptPictures(recipe, template))
    elif not data.prompts.startswith(HUB_PREFIX):
        sources["data.prompts"] = data.prompts
    for field, source in sources.items():
        if next(iter(read_rows(source)), None) is None:
            raise ValueError(f"{field}: {source} given, a file with one row or more is allowed; add prompts to it")


def check_disk(recipe: Recipe, config: TargetConfig, taps: tuple[int, ...], least: int, most: int) -> str:
    """The disk space that features of `least` to `most` tokens take, in words.

    Raises ValueError if the disk cannot hold the missing features of `least` tokens.
    """
    token_bytes = bytes_per_token(config.hidden_size, len(taps), recipe.data.dtype)
    stored = sum(path.stat().st_size for path in recipe.features_dir.glob("*.safetensors"))
    sizes = " to ".join(dict.fromkeys(decimal(token_bytes * tokens) for tokens in (least, most)))
    if (url := url_of(recipe.features_dir)) is not None:
        return f"features take {sizes} in {url} ({token_bytes:,} bytes per token)"
    needed, free = token_bytes * least * DISK_FACTOR - stored, shutil.disk_usage(recipe.data_folder).free
    if needed > free:
        raise ValueError(
            f"data.folder: the features need {decimal(int(needed))} more in {recipe.features_dir}, whose disk has "
            f"{decimal(free)} left; choose another data.folder, data.dtype int8 or float8, fewer data.num_prompts, or "
            "data.online=[auto]"
        )
    return f"features take {sizes} on disk ({token_bytes:,} bytes per token; {decimal(free)} free)"
