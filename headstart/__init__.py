"""headstart's public Python API, importable from any folder.

    from headstart import SpeculativeModel, load_recipe, train

    train(load_recipe("recipes/tiny.yaml"))  # as `headstart train recipes/tiny.yaml` does

The code lies in the top-level folders of the repository; this folder links to them, so that `headstart.heads` cannot be
mistaken for a `heads.py` of yours. Importing `headstart` does not load torch; using one of its names does.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

# OpenMP's threads wait for each other in a loop, and sleep after this many turns: after more than lies between the
# products of a layer, as to wake one takes as long as a product, and fewer than by default, as another process may need
# the core. It is read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

if TYPE_CHECKING:
    from headstart.heads.kinds.checkpoint import load_head
    from headstart.inference.core.sampling import Sampling
    from headstart.inference.generate.model import SpeculativeModel
    from headstart.recipes import Recipe, RecipeError, load_recipe
    from headstart.recipes.schema import DecodeSection
    from headstart.trainers import train
    from headstart.trainers.refresh.refresh import Refreshed, Rollout, refresh

__all__ = [
    "DecodeSection",
    "Recipe",
    "RecipeError",
    "Refreshed",
    "Rollout",
    "Sampling",
    "SpeculativeModel",
    "load_head",
    "load_recipe",
    "refresh",
    "train",
]

MODULES = {
    "DecodeSection": "headstart.recipes.schema",
    "Recipe": "headstart.recipes",
    "RecipeError": "headstart.recipes",
    "Refreshed": "headstart.trainers.refresh.refresh",
    "Rollout": "headstart.trainers.refresh.refresh",
    "Sampling": "headstart.inference.core.sampling",
    "SpeculativeModel": "headstart.inference.generate.model",
    "load_head": "headstart.heads.kinds.checkpoint",
    "load_recipe": "headstart.recipes",
    "refresh": "headstart.trainers.refresh.refresh",
    "train": "headstart.trainers",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562)."""
    if name not in MODULES:
        raise AttributeError(f"module 'headstart' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(MODULES[name]), name)
