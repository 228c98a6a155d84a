"""Every model in a folder, shared by all ranks and on each rank alone, for test_target_on_ranks.py:

accelerate launch ... tests/support/families_on_ranks.py FOLDER RESULT
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from headstart.data_pipelines.features.features import tap
from headstart.data_pipelines.stages.shard_work import start_processes
from headstart.data_pipelines.together import settle
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.loop import generate_batch
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import TargetSection

TEXTS = [list(range(3, 43)), [7, 8, 9], [50] * 20]
REQUESTS = [Request([5, 6, 7], 6), Request([9, 4], 9, Sampling(0.8, seed=1))]


def largest_error(folder: Path) -> float | str:
    """The largest error of a hidden state relative to the largest state, or a text that says what went wrong."""
    alone = TargetModel.load(TargetSection(path=str(folder), dtype="float32", device="cpu"), (1, 2))
    try:
        shared = TargetModel.load(TargetSection(path=str(folder), dtype="float32", split="tensor"), (1, 2))
    except ValueError as error:
        return f"refused: {error}"
    found = []

    def ask(what):
        texts = [generation.tokens for generation in generate_batch(shared, REQUESTS)] if what == "text" else []
        return texts, tap(shared, TEXTS)

    shared.ranks.carry_out(ask, lambda ask: found.extend([ask("text"), ask("states")]))
    if not found:  # only the first rank leads, and it reports
        return "follows"
    texts, states = found[0]
    if texts != [generation.tokens for generation in generate_batch(alone, REQUESTS)]:
        return "other text"
    expected = tap(alone, TEXTS)
    pairs = zip(vars(states).values(), vars(expected).values(), strict=True)
    return max(float((mine - its).abs().max() / its.abs().max()) for mine, its in pairs)


def held_shares(folder: Path) -> list[float]:
    """The share of a target's weights that this rank keeps, before and after its forward passes."""
    shared = TargetModel.load(TargetSection(path=str(folder), dtype="float32", split="tensor"), (1, 2))

    def share() -> float:
        weights = [*shared.model.parameters()]
        local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
        return sum(each.numel() for each in local) / sum(each.numel() for each in weights)

    before = share()

    def work(texts):
        return tap(shared, texts)

    shared.ranks.carry_out(work, lambda ask: ask(TEXTS))
    return [before, share()]


def main(folder: str, result: str) -> None:
    start_processes()
    errors = {path.name: largest_error(path) for path in sorted(Path(folder).iterdir())}
    shares: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(shares, held_shares(Path(folder) / "llama"))
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps({"errors": errors, "shares": shares}, indent=1))
    settle()


if __name__ == "__main__":
    main(*sys.argv[1:])
