"""Training of draft heads: one script for each family of heads. Importing this does not load torch."""

from headstart.recipes.command_line import DeviceMemory
from headstart.recipes.schema import Recipe


def run(recipe: Recipe, given: DeviceMemory | None = None) -> None:
    """Train the recipe's head as the script for its kind does; a dry run may plan for `given` devices."""
    from headstart.trainers.eagle import train

    train(recipe, given, recipe.head.script)
