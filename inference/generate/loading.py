"""Loads the target and the drafter that a command line names."""

import re

from headstart.heads.target_config import locate_target
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.generate.options import ModelOptions
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.loading import fast_dtype, pick_device
from headstart.inference.targets.tokenizer import load_tokenizer
from headstart.recipes.checks import refuse_original_target
from headstart.recipes.schema import TargetSection

FLAGS = {"target.path": "--target", "target": "--target", "target.dtype": "--dtype", "decode.head": "--head"}


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
    tokenizer = load_tokenizer(locate_target(section.path, section.revision), section.trust_remote_code)
    template = ChatTemplate(tokenizer, section.chat_template_kwargs)
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
    dtype = fast_dtype(pick_device("auto")) if options.dtype == "auto" else options.dtype
    return TargetSection.model_validate({"path": options.target, "dtype": dtype})
