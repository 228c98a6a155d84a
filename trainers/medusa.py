"""Train Medusa or Hydra heads: run the stages before them that are missing, and reuse the others.

    accelerate launch trainers/medusa.py recipes/tiny_medusa.yaml
    accelerate launch trainers/medusa.py recipes/tiny_medusa.yaml head.sequential=true   # Hydra

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
    run_command(__doc__, partial(run, script="trainers/medusa.py"), CONTINUES)


if __name__ == "__main__":
    main()
