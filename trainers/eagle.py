"""Train an EAGLE draft head; stages that are missing before it are run, those that are there are reused.

    accelerate launch trainers/eagle.py recipes/tiny.yaml
    accelerate launch trainers/eagle.py recipes/llama3_8b.yaml train.learning_rate=1e-4
    python trainers/eagle.py recipes/llama3_8b.yaml train.dry_run=true   # what it would take; spends nothing

Killed at any step, the same command continues from the newest checkpoint and ends in the same weights. SIGTERM, or
Ctrl-C once, saves behind the running step first.
"""

from recipes import run_command
from trainers.run import run


def main() -> None:
    run_command(__doc__, run)


if __name__ == "__main__":
    main()
