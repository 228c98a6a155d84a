"""What a head is worth while it trains: held-out accuracy at each depth, and accepted length by real decoding."""

import torch

from data_pipelines.batches import Batch
from data_pipelines.sources import SampleStore
from data_pipelines.stage import read_jsonl
from heads.base import DraftHead
from heads.calibration import Calibration
from inference.calibrate import fit_calibration
from inference.decode import DecodeStats, Request, check_length, generate_batch
from inference.drafters.cost_aware import growth_from_recipe
from inference.drafters.head import HeadDrafter
from inference.target import TargetModel
from recipes import Recipe
from trainers.objective import UnrolledHead


@torch.no_grad()
def held_out_scores(unrolled: UnrolledHead, store: SampleStore, batch_size: int) -> dict[str, float]:
    """Loss, top-1 accuracy and expected acceptance at each depth over the held-out samples."""
    embedding, unroll = unrolled.head.embedding, unrolled.objective.unroll
    total = torch.zeros(4, unroll)
    outside = 0
    for start in range(0, len(store), batch_size):
        samples = [store[number] for number in range(start, min(start + batch_size, len(store)))]
        batch = Batch.collate(samples, embedding.dtype, embedding.device)
        supervision = unrolled.teacher.supervise(batch)
        total += unrolled(batch, supervision, supervision.counts(unroll)).sums().cpu()
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


def measured_prompts(recipe: Recipe, target: TargetModel) -> list[Request]:
    """The first held-out prompts, to be continued greedily."""
    rows = list(read_jsonl(recipe.prompts_dir / "heldout.jsonl"))[: recipe.train.eval_prompts]
    new_tokens = min(recipe.decode.max_new_tokens, recipe.data.response_tokens)
    for row in rows:
        check_length(target, row["tokens"], new_tokens)
    return [Request(row["tokens"], new_tokens) for row in rows]


def accepted_length(recipe: Recipe, target: TargetModel, head: DraftHead) -> float:
    """tau of greedy tree decoding on the first held-out prompts, with the recipe's tree."""
    drafter, stats = HeadDrafter(head, growth_from_recipe(recipe.decode, target, head)), DecodeStats()
    for generation in generate_batch(target, measured_prompts(recipe, target), drafter, recipe.decode.max_batch):
        stats.add(generation.stats)
    target.spare_steps.clear()  # the training needs their memory
    return stats.tau


def calibrate(recipe: Recipe, target: TargetModel, head: DraftHead) -> Calibration:
    """Fitted on the same prompts."""
    requests = measured_prompts(recipe, target)
    prompts = [request.prompt for request in requests]
    found = fit_calibration(target, head, prompts, recipe.decode.depth, requests[0].max_new_tokens)
    target.spare_steps.clear()
    return found
