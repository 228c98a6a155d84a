"""Train an EAGLE-1, EAGLE-3 or P-EAGLE draft head: run the stages before it that are missing, and reuse the others.

    accelerate launch trainers/eagle.py recipes/tiny.yaml
    accelerate launch trainers/eagle.py recipes/llama3_8b.yaml train.learning_rate=1e-4
    python trainers/eagle.py recipes/llama3_8b.yaml train.dry_run=true   # print what it would take, then exit
    python trainers/eagle.py recipes/llama3_8b.yaml train.dry_run=true --device-memory 80GB   # on another machine

Killed at any step, the same command continues from the newest checkpoint and ends in the same weights. SIGTERM, or
Ctrl-C once, finishes the current step, saves and exits.
"""

from headstart.common.errors import CONTINUES
from headstart.recipes import Recipe, run_command
from headstart.recipes.command_line import DeviceMemory, recipe_and_devices


def train(recipe: Recipe, given: DeviceMemory | None = None, script: str = "trainers/eagle.py") -> None:
    """Run the stages from prompts to head; those that are complete and match the recipe are reused.

    `script` is what the user started: medusa.py and block.py run the same stages for heads of their kinds.
    """
    # Here, so that torch is loaded only when the recipe is known to be right.
    from headstart.data_pipelines.harvest import open_harvest
    from headstart.data_pipelines.harvest_stages import OneTarget
    from headstart.trainers.stages import TrainingRun

    run = TrainingRun.start(recipe, script, given)
    if recipe.train.dry_run:
        return run.check()
    target = OneTarget(recipe)  # it harvests, then decodes and teaches
    with run.on_all_ranks():
        with open_harvest(recipe, target) as harvest:
            prompts = harvest.prompts()
            responses = harvest.responses(prompts)
            features = harvest.features(prompts, responses)
        head = run.train(features, target)
        run.export(head)


if __name__ == "__main__":
    run_command(__doc__, train, CONTINUES, recipe_and_devices)
