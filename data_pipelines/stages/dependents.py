"""Which folders of a run are made from which, so that a message can name all that a change makes useless."""

from pathlib import Path

from headstart.recipes import Recipe


def dependents(recipe: Recipe, folder: Path) -> list[Path]:
    """The folders of a run that are made from one of its stages' folders, directly or not.

    What lies in a shared data.folder is left out: other recipes may use it.
    """
    stages = [recipe.prompts_dir, recipe.responses_dir, recipe.features_dir]
    made = [recipe.checkpoints_dir, recipe.head_dir, recipe.report_dir, recipe.export_dir]
    if recipe.joint.mode is not None:  # without it, the folder of this name is not the run's
        made.append(recipe.tuned_target_dir)
    return made if is_shared(recipe) else [*stages[stages.index(folder) + 1 :], *made]


def is_shared(recipe: Recipe) -> bool:
    """Whether the recipe's prompts, responses and features lie in a folder that other recipes may use too."""
    return recipe.data_folder.resolve() != recipe.run_dir.resolve()
