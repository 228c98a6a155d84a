"""Train a block head: run the stages before it that are missing, and reuse the others.

    accelerate launch trainers/block.py recipes/tiny_block.yaml
    accelerate launch trainers/block.py recipes/tiny_block.yaml head.markov_rank=0 head.causal=true   # JetSpec

Stopped or killed at any step, the same command continues from the newest checkpoint and ends in the same weights.
"""

from functools import partial

from headstart.common.errors import CONTINUES
from headstart.recipes import run_command
from headstart.recipes.command_line import recipe_and_devices
from headstart.trainers.eagle import train

if __name__ == "__main__":
    run_command(__doc__, partial(train, script="trainers/block.py"), CONTINUES, recipe_and_devices)
