"""Training of draft heads: one script for each family of heads. Importing this does not load torch."""

from headstart.recipes.command_line import DeviceMemory
from headstart.recipes.schema import Recipe

SCRIPTS = {
    "eagle1": "trainers/eagle.py",
    "eagle3": "trainers/eagle.py",
    "medusa": "trainers/medusa.py",
    "block": "trainers/block.py",
    "mtp": "trainers/eagle.py",
}


def run(recipe: Recipe, given: DeviceMemory | None = None) -> None:
    """Train the recipe's head as the script for its kind does; a dry run may plan for `given` devices."""
    from headstart.trainers.eagle import train

    train(recipe, given, SCRIPTS[recipe.head.kind])
