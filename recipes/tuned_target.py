"""A Medusa-2 head belongs to the target that was tuned with it."""

from pathlib import Path

from headstart.recipes.schema import Recipe


def refuse_original_target(recipe: Recipe, head: Path | None) -> None:
    """Raise ValueError if the run's own head would be used with the target from before joint training.

    `head` is the folder of the head in use; None means the head that this run trained.
    """
    if recipe.joint.mode is None or (head is not None and head.resolve() != recipe.head_dir.resolve()):
        return
    if Path(recipe.target.path).resolve() != recipe.tuned_target_dir.resolve():
        raise ValueError(
            f"target.path: {recipe.target.path} given, but a head trained with joint.mode {recipe.joint.mode} is for "
            f"the tuned target; give target.path={recipe.tuned_target_dir}"
        )
