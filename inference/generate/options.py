"""The target and head in a command line, parsed without torch."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from headstart.common.remote import pull
from headstart.recipes.load import load_recipe
from headstart.recipes.schema import DecodeSection, Recipe

# Small trees, sized by this machine's measured step times. No field counts as set, so the head's limits override them.
DRAFTS = DecodeSection.model_construct(
    set(), **DecodeSection(growth="cost_aware", depth=4, width=3, nodes=15, repeats=8).model_dump()
)
LOOKUP = DecodeSection(drafter="prompt_lookup", growth="chain")


@dataclass(frozen=True)
class ModelOptions:
    """A target, its head and how they draft."""

    target: str | None  # None: the command's default
    head: Path | None  # None: drafts need no head
    decode: DecodeSection
    recipe: Recipe | None  # its target section has all fields of the target
    dtype: str  # without a recipe; auto is the fast one for this machine
    exact: bool = False  # without a recipe; target.exact
    adapter: Path | None = None  # a PEFT LoRA adapter of the target

    @property
    def drafts(self) -> str:
        """The drafter's name for messages."""
        return self.decode.drafter.replace("_", " ") if self.head is None else f"head {self.head}"


def add_model(parser: argparse.ArgumentParser, target: str, head: str) -> None:
    """Add the options of `model_options`; `target` and `head` are their help texts."""
    parser.add_argument("recipe", nargs="?", help="recipe that names target, head, and how to draft")
    replaces = "replaces the recipe's value"
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help=replaces)
    parser.add_argument("--target", help=target)
    parser.add_argument("--adapter", type=Path, help="folder of a PEFT LoRA adapter to merge into the target")
    parser.add_argument("--head", type=Path, help=head)
    auto = "number format of the target; auto, the default, is bfloat16 where this machine computes in it"
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), help=auto)
    exact = "refuse a target whose tokens do not get the same bits in every pass (target.exact)"
    parser.add_argument("--exact", action="store_true", help=exact)


def model_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> ModelOptions:
    """The target and head of the recipe or of the options; errors, such as giving both, exit the process."""
    if arguments.recipe is None:
        decode = LOOKUP if arguments.head is None else DRAFTS
        dtype, exact = arguments.dtype or "auto", arguments.exact
        return ModelOptions(arguments.target, arguments.head, decode, None, dtype, exact, arguments.adapter)
    fields = {"head": "decode.head", **{name: f"target.{name}" for name in ("adapter", "dtype", "exact")}}
    for option, field in {"target": "target.path", **fields}.items():
        if (value := getattr(arguments, option)) not in (None, False):
            both = f"{value} given with the recipe {arguments.recipe}, one of the two is allowed"
            parser.error(f"--{option}: {both}; write {field}={value}, or leave the recipe out")
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        head = recipe.head_in_use if recipe.decode.drafter == "head" else None
        if head is not None:
            pull(head)
    except ValueError as error:  # a RecipeError, or a store that cannot be read
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    target = recipe.target
    return ModelOptions(target.path, head, recipe.decode, recipe, target.dtype, adapter=target.adapter)
