"""headstart's public Python API, importable from any folder.

    from headstart import SpeculativeModel, load_recipe

The code lies in the top-level folders of the repository; this folder links to them, so that `headstart.heads` cannot be
mistaken for a `heads.py` of yours. Importing `headstart` does not load torch; using one of its names does.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstart.heads.checkpoint import load_head
    from headstart.inference.generate.model import SpeculativeModel
    from headstart.recipes import Recipe, RecipeError, load_recipe

__all__ = ["Recipe", "RecipeError", "SpeculativeModel", "load_head", "load_recipe"]

MODULES = {
    "Recipe": "headstart.recipes",
    "RecipeError": "headstart.recipes",
    "SpeculativeModel": "headstart.inference.generate.model",
    "load_head": "headstart.heads.checkpoint",
    "load_recipe": "headstart.recipes",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562)."""
    if name not in MODULES:
        raise AttributeError(f"module 'headstart' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(MODULES[name]), name)
