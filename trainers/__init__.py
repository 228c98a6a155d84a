"""Training of draft heads: one script for each family of heads. Importing this does not load torch."""

from importlib import import_module

from headstart.recipes.command_line import DeviceMemory
from headstart.recipes.schema import Recipe

SCRIPTS = {
    "eagle1": "trainers/eagle.py",
    "eagle3": "trainers/eagle.py",
    "medusa": "trainers/medusa.py",
    "block": "trainers/block.py",
}


def run(recipe: Recipe, given: DeviceMemory | None = None) -> None:
    """Train the recipe's head with the script for its kind; a dry run may plan for `given` devices."""
    import_module("headstart." + SCRIPTS[recipe.head.kind].removesuffix(".py").replace("/", ".")).train(recipe, given)
