"""What a head is worth while it trains: held-out accuracy at each depth, and accepted length by real decoding."""

import torch

from data_pipelines.batches import Batch
from data_pipelines.shards import FeatureStore
from data_pipelines.stage import read_jsonl
from heads.base import DraftHead
from heads.frozen import FrozenTarget
from inference.decode import DecodeStats, check_length, generate
from inference.drafters.growth import growth_from_recipe
from inference.drafters.head import HeadDrafter
from inference.target import TargetModel
from recipes import Recipe
from trainers.objective import UnrolledHead, supervise


@torch.no_grad()
def held_out_scores(
    unrolled: UnrolledHead, frozen: FrozenTarget, store: FeatureStore, batch_size: int
) -> dict[str, float]:
    """Loss (nats), top-1 accuracy and expected acceptance at each depth over the held-out samples."""
    device, total = frozen.embedding.device, torch.zeros(4, unrolled.unroll)
    outside = 0
    for start in range(0, len(store), batch_size):
        samples = [store[number] for number in range(start, min(start + batch_size, len(store)))]
        batch = Batch.collate(samples, frozen.embedding.dtype, device)
        supervision = supervise(batch, frozen, unrolled.head)
        total += unrolled(batch, supervision).detached().cpu()
        outside += supervision.outside
    return {**depth_metrics("heldout", total), "heldout/outside_vocab": outside / max(outside + float(total[0, 0]), 1)}


def depth_metrics(prefix: str, sums: torch.Tensor) -> dict[str, float]:
    """Means from the sums [4, unroll] of UnrollScores."""
    counts = sums[0].clamp(min=1)
    metrics = {}
    for name, values in (("loss", sums[1]), ("accuracy", sums[2]), ("acceptance", sums[3])):
        for depth, value in enumerate((values / counts).tolist()):
            metrics[f"{prefix}/{name}_{depth}"] = value
    return metrics


def accepted_length(recipe: Recipe, target: TargetModel, head: DraftHead) -> float:
    """tau of greedy tree decoding on the first held-out prompts, with the recipe's tree."""
    prompts = [row["tokens"] for row in read_jsonl(recipe.prompts_dir / "heldout.jsonl")][: recipe.train.eval_prompts]
    stats, new_tokens = DecodeStats(), min(recipe.decode.max_new_tokens, recipe.data.response_tokens)
    drafter = HeadDrafter(head, growth_from_recipe(recipe.decode))
    for prompt in prompts:
        check_length(target, prompt, new_tokens)
        stats.add(generate(target, prompt, new_tokens, drafter=drafter).stats)
    return stats.tau
