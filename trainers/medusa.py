"""Train Medusa or Hydra heads; stages that are missing before it are run, those that are there are reused.

    accelerate launch trainers/medusa.py recipes/tiny_medusa.yaml
    accelerate launch trainers/medusa.py recipes/tiny_medusa.yaml head.sequential=true

Stopped or killed at any step, the same command continues from the newest checkpoint and ends in the same weights.
"""

from recipes import run_command
from trainers.run import run


def main() -> None:
    run_command(__doc__, run)


if __name__ == "__main__":
    main()
