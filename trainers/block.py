"""Train a block head: run the stages before it that are missing, and reuse the others.

    accelerate launch trainers/block.py recipes/tiny_block.yaml
    accelerate launch trainers/block.py recipes/tiny_block.yaml head.markov_rank=0 head.causal=true   # JetSpec

Stopped or killed at any step, the same command continues from the newest checkpoint and ends in the same weights.
"""

from headstart.recipes import recipe_from_command_line

if __name__ == "__main__":
    recipe_from_command_line(__doc__)  # --help and mistakes end the process here, before torch is loaded

from functools import partial

from headstart.common.errors import CONTINUES
from headstart.recipes import run_command
from headstart.trainers.run import run


def main() -> None:
    run_command(__doc__, partial(run, script="trainers/block.py"), CONTINUES)


if __name__ == "__main__":
    main()
