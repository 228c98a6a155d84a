"""Does vLLM serve a head trained by speculators as we decode it? Compares steps and accepted draft tokens by depth.

    python benchmarks/served.py recipes/tiny.yaml train.steps=100 train.unroll=3 --peer speculators=VENV --vllm VENV

speculators trains and saves the head as in train_quality.py, on the features of the recipe's run. vLLM serves the saved
files unchanged (`make check-vllm` makes its environment), heads.formats.convert imports them here, and both decode the
same prompts greedily. tests/interop/check_vllm.py compares them and prints its table. Exit code 1 if anything differs.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from train_quality import PEER, ROOT, train_theirs
from train_step import peer_python

from headstart.data_pipelines.harvest import harvest
from headstart.heads.target_config import folder_of
from headstart.recipes import Recipe
from headstart.recipes.command_line import recipe_from_command_line

RATE = 1e-2  # the best in train_quality's sweep for this few steps


def run(recipe: Recipe, peer: str, vllm: str) -> int:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    harvest(recipe)
    target = folder_of(recipe.target)
    with tempfile.TemporaryDirectory() as place:
        saved = train_theirs(peer, recipe, target, RATE, recipe.train.steps, Path(place)).parent / "saved"
        check = [sys.executable, str(ROOT / "tests/interop/check_vllm.py"), vllm, "--saved", str(saved)]
        return subprocess.run(check, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--peer", type=peer_python)
    parser.add_argument("--vllm", type=Path)
    given, arguments = parser.parse_known_args()
    recipe = recipe_from_command_line(__doc__, arguments)
    if given.vllm is None or given.peer is None or given.peer[0] != PEER:
        raise SystemExit(f"error: --peer {PEER}=VENV and --vllm VENV are needed; --help explains them")
    try:
        sys.exit(run(recipe, given.peer[1], str(given.vllm / "bin/python")))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
