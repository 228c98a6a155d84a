"""Train the recipe's draft head in this process, after running the earlier stages that are missing.

The recipe's head.kind chooses the script: trainers/eagle.py (eagle1, eagle3, mtp), trainers/medusa.py (medusa)
or trainers/block.py (block). To train on several GPUs, start one process for each:

    accelerate launch --config_file recipes/launch/ddp.yaml --num_processes 8 trainers/eagle.py RECIPE
"""

from headstart.recipes.command_line import DeviceMemory
from headstart.recipes.schema import Recipe


def train(recipe: Recipe, given: DeviceMemory | None = None) -> None:
    """Train the recipe's head, after the earlier stages that are missing, as `headstart train RECIPE` does.

    A dry run may plan for `given` devices.
    """
    ranks = f"accelerate launch --config_file recipes/launch/ddp.yaml --num_processes N {recipe.head.script}"
    print(f"training in one process; to use several GPUs: {ranks} RECIPE", flush=True)
    from headstart.trainers import eagle  # here, as it loads torch when it trains

    eagle.train(recipe, given, recipe.head.script)
