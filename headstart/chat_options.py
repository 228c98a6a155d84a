"""The command line of `headstart chat`, readable without torch."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.inference.generate.options import drafts_of, head_of, read_recipe
from headstart.recipes.command_line import command_name
from headstart.recipes.schema import DecodeSection, Recipe
from headstart.smollm2_options import FOLDER

HEAD = Path("assets/smollm2_head")


@dataclass(frozen=True)
class ChatOptions:
    """Who talks, and how. Without a recipe the target's dtype is `dtype`, or the fast one for this machine."""

    target: str | None  # None: SmolLM2-135M-Instruct, which is fetched if it is missing
    head: Path | None  # None: drafts need no head
    decode: DecodeSection
    recipe: Recipe | None  # its target section has all fields of the target
    dtype: str
    temperature: float
    seed: int
    max_new_tokens: int
    prompt: str | None  # the only question; None: questions are read from standard input


def chat_options(doc: str | None, argv: Sequence[str] | None = None) -> ChatOptions:
    """Who is to talk; `doc` opens --help. Mistakes go to stderr and end the process with status 2."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", help="recipe whose target and head talk, and draft as it says")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="replaces the recipe's value"
    )
    parser.add_argument("--target", help=f"folder or hub name of the model that talks (default: {FOLDER})")
    parser.add_argument(
        "--head",
        type=Path,
        help=f"folder of its draft head (default: {HEAD}; without it, and with --target: prompt lookup)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="number format of the target; auto, the default, is bfloat16 where this machine computes in it",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers (default: 0)")
    parser.add_argument("--max-new-tokens", type=int, help="longest answer (default: 512)")
    parser.add_argument("--prompt", help="answer this question and exit")
    given = parser.parse_args(argv)
    recipe = None if given.recipe is None else read_recipe(parser, given)
    decode, head = (recipe.decode, head_of(recipe)) if recipe is not None else own_drafts(given)
    longest = decode.max_new_tokens if given.max_new_tokens is None else given.max_new_tokens
    if longest < 1:
        parser.error(f"--max-new-tokens: {longest} given, 1 or more is allowed; raise it")
    return ChatOptions(
        given.target, head, decode, recipe, given.dtype or "auto", given.temperature, given.seed, longest, given.prompt
    )


def own_drafts(given: argparse.Namespace) -> tuple[DecodeSection, Path | None]:
    """Without a recipe: the given head, the bundled one for the bundled target if it is here, or prompt lookup."""
    bundled = HEAD if given.target is None and (HEAD / "config.json").is_file() else None
    head = given.head or bundled
    return drafts_of(head), head
