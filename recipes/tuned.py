"""Which target the head of a Medusa-2 run is for."""

from pathlib import Path

from recipes.schema import Recipe


def refuse_original_target(recipe: Recipe, head: Path | None) -> None:
    """ValueError for the run's own head (`head` may be None) beside the target from before joint.mode tuned it."""
    if recipe.joint.mode is None or (head is not None and head.resolve() != recipe.head_dir.resolve()):
        return
    if Path(recipe.target.path).resolve() != recipe.tuned_target_dir.resolve():
        raise ValueError(
            f"target.path: {recipe.target.path} given, the head of a run with joint.mode {recipe.joint.mode} is for "
            f"the tuned target; give target.path={recipe.tuned_target_dir}"
        )
