"""Train an EAGLE-1 or EAGLE-3 draft head: run the stages before it that are missing, and reuse the others.

    accelerate launch trainers/eagle.py recipes/tiny.yaml
    accelerate launch trainers/eagle.py recipes/llama3_8b.yaml train.learning_rate=1e-4
    python trainers/eagle.py recipes/llama3_8b.yaml train.dry_run=true   # print what it would take, then exit

Killed at any step, the same command continues from the newest checkpoint and ends in the same weights. SIGTERM, or
Ctrl-C once, finishes the current step, saves and exits.
"""

from headstart.recipes import recipe_from_command_line

if __name__ == "__main__":
    recipe_from_command_line(__doc__)  # --help and mistakes end the process here, before torch is loaded

from functools import partial

from headstart.common.errors import CONTINUES
from headstart.recipes import run_command
from headstart.trainers.run import run


def main() -> None:
    run_command(__doc__, partial(run, script="trainers/eagle.py"), CONTINUES)


if __name__ == "__main__":
    main()
