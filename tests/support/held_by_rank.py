"""How much of a target each rank of a launch holds, for test_target_on_ranks.py:

accelerate launch ... tests/support/held_by_rank.py RECIPE RESULT section.key=value ...
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from headstart.data_pipelines.features.features import tap
from headstart.data_pipelines.stages.shard_work import start_processes
from headstart.data_pipelines.together import settle
from headstart.inference.targets.model import TargetModel
from headstart.recipes import load_recipe


def held(parameter: nn.Parameter) -> int:
    """How many values of a parameter this rank keeps between forward passes."""
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


def main(recipe_path: str, result: str, *overrides: str) -> None:
    """Write how many values each rank holds before and after its forward passes; rank r makes r + 1 of them."""
    start_processes()
    target = TargetModel.load(load_recipe(Path(recipe_path), overrides).target, (2, 4))
    counts = [sum(map(held, target.model.parameters()))]

    def work(ask):
        for number in range(1, dist.get_rank() + 2):
            states = ask([[number, 5, 6], [7, 8]])
            assert states.taps.shape == (5, 2 * target.config.hidden_size)
            assert torch.isfinite(states.taps).all()

    target.ranks.carry_out(lambda texts: tap(target, texts), work)
    counts.append(sum(map(held, target.model.parameters())))
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, counts)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(gathered))
    settle()


if __name__ == "__main__":
    main(*sys.argv[1:])
