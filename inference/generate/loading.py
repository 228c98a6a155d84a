"""What commands load: the target and drafter that a command line names; a recipe's heads and held-out prompts."""

import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from headstart.common.files import read_jsonl
from headstart.heads.files import read_config
from headstart.heads.kinds.checkpoint import load_taps
from headstart.heads.target_config import TargetConfig, TargetOrigin, folder_of
from headstart.inference.core.request import Request
from headstart.inference.generate.model import SpeculativeModel, with_fast_dtype
from headstart.inference.generate.options import ModelOptions
from headstart.inference.images.kept import KeptPictures
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.recipes import Recipe
from headstart.recipes.checks import refuse_original_target
from headstart.recipes.schema import TargetSection

FLAGS = {
    "target.path": "--target",
    "target": "--target",
    "target.adapter": "--adapter",
    "target.dtype": "--dtype",
    "decode.head": "--head",
}


def load_model(
    options: ModelOptions, last_hidden: bool = False
) -> tuple[SpeculativeModel, ChatTemplate, TargetSection]:
    """The target with its drafter, its chat template and its fields; raises ValueError for a wrong head.

    `last_hidden`: the target also gives its last hidden state, which training needs.
    """
    require_head(options)
    section = target_section(options)
    fields = section.model_dump(exclude={"path"})
    try:
        model = SpeculativeModel.from_folders(
            section.path, options.head, options.decode, last_hidden=last_hidden, **fields
        )
    except ValueError as error:
        raise error if options.recipe is not None else ValueError(in_flags(str(error))) from error
    if section.adapter is not None and options.head is not None:
        warn_of_other_targets({"the head": TargetOrigin.from_config(read_config(options.head))}, folder_of(section))
    template = ChatTemplate.of(section)
    if added := model.target.also_end_as(template):
        print(f"{section.path}: {added}", flush=True)
    return model, template, section


def in_flags(message: str) -> str:
    """A message about a field of a recipe, for a command line without one."""
    field = message.partition(":")[0]
    if field in FLAGS:
        return message.replace(field, FLAGS[field], 1)
    if not re.fullmatch(r"(target|decode)\.\w+", field):
        return message
    return f"{message} (in a recipe, as no option sets it: give a recipe with {field} in place of --target)"


def require_head(options: ModelOptions) -> None:
    """Raise ValueError, before the target is loaded, if the head's folder holds none."""
    if options.head is None or (options.head / "config.json").is_file():
        return
    field, instead = "decode.head", "set decode.drafter=prompt_lookup"
    if options.recipe is None:
        field, instead = "--head", "give --target without --head"
    allowed = f"a trained head's folder is allowed: train one with headstart train RECIPE, or {instead}"
    raise ValueError(f"{field}: {options.head} holds no head (no config.json); {allowed}, to draft by prompt lookup")


def target_section(options: ModelOptions) -> TargetSection:
    if options.recipe is not None:
        refuse_original_target(options.recipe)
        return options.recipe.target
    fields = {"path": options.target, "adapter": options.adapter, "exact": options.exact}
    if options.dtype != "auto":
        return TargetSection.model_validate({**fields, "dtype": options.dtype})
    return with_fast_dtype(TargetSection.model_validate({**fields, "dtype": "float32"}))


def warn_of_other_targets(trained_for: Mapping[str, TargetOrigin | None], folder: Path) -> None:
    """Print a line for each head, by name, that was trained for other weights than those of the target in a folder."""
    now = TargetOrigin.of(folder) if any(trained_for.values()) else None
    for name, origin in trained_for.items():
        if now is not None and origin is not None and origin.is_another(now):
            print(
                f"{name} was trained for {origin}, and target.path is {now}: fewer of its draft tokens may be accepted "
                f"(headstart doctor says more)"
            )


OWN_HEAD = ""  # name of the recipe's own head: its rows in the report have no prefix


def held_out_prompts(recipe: Recipe) -> list[Request]:
    """The first report.num_prompts held-out prompts of the run; raises ValueError if there are none yet."""
    path = recipe.prompts_dir / "heldout.jsonl"
    if not path.is_file():
        remedy = "make them with headstart prompts RECIPE (headstart report also takes report.prompts=FILE)"
        raise ValueError(f"{path} is missing; the run's held-out prompts are required: {remedy}")
    pictures, most = KeptPictures(recipe), recipe.decode.max_new_tokens
    return [pictures.request(row, most) for row in islice(read_jsonl(path), recipe.report.num_prompts)]


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
    target = TargetConfig.from_folder(folder_of(recipe.target))
    return tuple(sorted({tap for folder in folders.values() for tap in load_taps(folder, target)}))
