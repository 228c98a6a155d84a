"""Which target and head a command decodes with, read from its command line without torch."""

import argparse
import sys
from pathlib import Path

from headstart.recipes.load import RecipeError, load_recipe
from headstart.recipes.schema import DecodeSection, Recipe

# Small trees, of the size that the measured step times of this machine ask for.
DRAFTS = DecodeSection(growth="cost_aware", depth=4, width=3, nodes=15, repeats=8)
LOOKUP = DecodeSection(drafter="prompt_lookup", growth="chain")


def drafts_of(head: Path | None) -> DecodeSection:
    """How to draft without a recipe: trees of a head, otherwise by prompt lookup."""
    return LOOKUP if head is None else DRAFTS


def head_of(recipe: Recipe) -> Path | None:
    """The folder of the recipe's head; None if the recipe drafts without one."""
    return recipe.head_in_use if recipe.decode.drafter == "head" else None


def read_recipe(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Recipe:
    """The recipe; ends the process for a wrong one, and for options that say what it says already."""
    fields = {"target": "target.path", "head": "decode.head", "dtype": "target.dtype"}
    for option, field in fields.items():
        if (value := getattr(given, option)) is not None:
            parser.error(
                f"--{option}: {value} given with the recipe {given.recipe}, one of the two is allowed; write "
                f"{field}={value}, or leave the recipe out"
            )
    try:
        return load_recipe(given.recipe, given.overrides)
    except RecipeError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def require_head(head: Path | None, recipe: Recipe | None) -> None:
    """Raise ValueError, before the target is loaded, if the head's folder holds none."""
    if head is None or (head / "config.json").is_file():
        return
    field = "--head" if recipe is None else "decode.head"
    instead = "give --target without --head" if recipe is None else "set decode.drafter=prompt_lookup"
    raise ValueError(
        f"{field}: {head} holds no head (no config.json); a trained head's folder is allowed: train one with "
        f"headstart train RECIPE, or {instead}, to draft by prompt lookup"
    )
