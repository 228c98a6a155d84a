"""A Medusa-2 head belongs to the target that was tuned with it."""

from pathlib import Path

from headstart.recipes.schema import Recipe


def refuse_original_target(recipe: Recipe) -> None:
    """Raise ValueError if the run's own head would be used with the target from before joint training."""
    if recipe.joint.mode is None or recipe.head_in_use.resolve() != recipe.head_dir.resolve():
        return
    if Path(recipe.target.path).resolve() != recipe.tuned_target_dir.resolve():
        raise ValueError(
            f"target.path: {recipe.target.path} given, but a head trained with joint.mode {recipe.joint.mode} is for "
            f"the tuned target; give target.path={recipe.tuned_target_dir}"
        )
