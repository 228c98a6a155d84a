"""Loads the target and the drafter that a command line names."""

from headstart.heads.target_config import locate_target
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.generate.options import ModelOptions
from headstart.inference.targets.loading import fast_dtype, pick_device
from headstart.inference.targets.tokenizer import Tokenizer, load_tokenizer
from headstart.recipes.checks import refuse_original_target
from headstart.recipes.schema import TargetSection


def load_model(options: ModelOptions) -> tuple[SpeculativeModel, Tokenizer, TargetSection]:
    """The target with its drafter, the tokenizer, and the fields of the target; raises ValueError for a wrong head."""
    require_head(options)
    section = target_section(options)
    fields = section.model_dump(exclude={"path"})
    model = SpeculativeModel.from_folders(section.path, options.head, options.decode, **fields)
    tokenizer = load_tokenizer(locate_target(section.path, section.revision), section.trust_remote_code)
    if added := model.target.also_end_as(tokenizer):
        print(f"{section.path}: {added}", flush=True)
    return model, tokenizer, section


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
