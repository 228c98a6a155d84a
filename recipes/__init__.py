"""Recipes: one typed YAML file describes a whole run; every command takes it, plus `section.key=value` overrides."""

from headstart.recipes.command_line import recipe_from_command_line, run_command
from headstart.recipes.load import RecipeError, load_recipe
from headstart.recipes.schema import Recipe

__all__ = ["Recipe", "RecipeError", "load_recipe", "recipe_from_command_line", "run_command"]
