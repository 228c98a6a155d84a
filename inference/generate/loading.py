"""What commands load: the target and drafter that a command line names; a recipe's heads and held-out prompts."""

import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from headstart.common.errors import named_errors
from headstart.common.files import read_jsonl
from headstart.heads.files import read_config
from headstart.heads.kinds.checkpoint import load_taps
from headstart.heads.target_config import TargetConfig, TargetOrigin, folder_of
from headstart.inference.core.request import Request
from headstart.inference.generate.model import SpeculativeModel, read_section
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
    if options.head is not None:
        with named_errors("--head" if options.recipe is None else "decode.head"):
            read_config(options.head)  # before the target is loaded
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


def target_section(options: ModelOptions) -> TargetSection:
    if options.recipe is not None:
        refuse_original_target(options.recipe)
        return options.recipe.target
    assert options.target is not None
    return read_section(options.target, {"adapter": options.adapter, "exact": options.exact, "dtype": options.dtype})


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


def held_out_prompts(recipe: Recipe, count: int | None = None, most: int | None = None) -> list[Request]:
    """The first `count` held-out prompts of the run, by default report.num_prompts, each for `most` new tokens.

    Raises ValueError if the run has not made its prompts yet.
    """
    path = recipe.prompts_dir / "heldout.jsonl"
    if not path.is_file():
        remedy = "make them with headstart prompts RECIPE (headstart report also takes report.prompts=FILE)"
        raise ValueError(f"{path} is missing; the run's held-out prompts are required: {remedy}")
    pictures, most = KeptPictures(recipe), most or recipe.decode.max_new_tokens
    return [pictures.request(row, most) for row in islice(read_jsonl(path), count or recipe.report.num_prompts)]


def head_folders(recipe: Recipe) -> dict[str, Path]:
    """The folder of every head to measure, by the name that prefixes its rows in the report."""
    return {OWN_HEAD: recipe.head_in_use, **recipe.report.other_heads}


def taps_to_read(recipe: Recipe) -> tuple[int, ...]:
    """The union of the taps that the heads read; ValueError names a folder without a head, or one that does not fit."""
    target, taps = TargetConfig.from_folder(folder_of(recipe.target)), set[int]()
    for name, folder in head_folders(recipe).items():
        with named_errors("decode.head" if name == OWN_HEAD else f"report.other_heads.{name}"):
            taps |= {*load_taps(folder, target)}
    return tuple(sorted(taps))
