"""What a head is worth while it trains: held-out accuracy at each depth, and accepted length by real decoding."""

from dataclasses import dataclass
from typing import Any

import torch

from data_pipelines.batches import Batch
from data_pipelines.sample_stores import SampleStore
from heads.base import DraftHead
from heads.calibration import Calibration
from inference.calibrate import fit_calibration
from inference.cuda_graph import SpareSteps
from inference.decode import check_length, generate_batch
from inference.drafters.cost_aware import growth_from_recipe
from inference.drafters.head import HeadDrafter
from inference.request import DecodeStats, Request
from inference.sampling import sampling_from_recipe
from inference.target.model import TargetModel
from recipes import Recipe
from recipes.jsonl import read_jsonl
from trainers.checkpoint import Tensors
from trainers.objective import UnrolledHead

TEMPERATURES = {"tau": 0.0, "tau_t1": 1.0}  # accepted length is measured greedily and where sampling is hardest


@dataclass(frozen=True)
class Decoding:
    """A target and a head beside it that drafts for it, both in the target's number format.

    The head under training computes in float32 and may lie in shares on many ranks; this one takes over its weights.
    """

    recipe: Recipe
    target: TargetModel
    head: DraftHead

    def take(self, head: Tensors, target: Tensors) -> None:
        """Decode with these weights of the head, and of the target where training changes them."""
        self.head.load_state_dict(head)
        found = self.target.model.load_state_dict(target, strict=False)
        assert not found.unexpected_keys, found.unexpected_keys

    def stats(self, temperature: float) -> DecodeStats:
        """Of tree decoding on the first held-out prompts, as the recipe decodes."""
        drafter = HeadDrafter(self.head, growth_from_recipe(self.recipe.decode, self.target, self.head))
        sampling, stats = sampling_from_recipe(self.recipe.decode, temperature), DecodeStats()
        requests = [Request(prompt, self.new_tokens, sampling) for prompt in self.prompts()]
        for generation in generate_batch(self.target, requests, drafter, self.recipe.decode.max_batch):
            stats.add(generation.stats)
        self.target.kept(SpareSteps).clear()  # the training needs their memory
        return stats

    def calibration(self) -> Calibration:
        """Fitted on the same prompts."""
        found = fit_calibration(self.target, self.head, self.prompts(), self.recipe.decode.depth, self.new_tokens)
        self.target.kept(SpareSteps).clear()
        return found

    @property
    def new_tokens(self) -> int:
        return min(self.recipe.decode.max_new_tokens, self.recipe.data.response_tokens)

    def prompts(self) -> list[list[int]]:
        """The first held-out ones."""
        rows = list(read_jsonl(self.recipe.prompts_dir / "heldout.jsonl"))[: self.recipe.train.eval_prompts]
        for row in rows:
            check_length(self.target, row["tokens"], self.new_tokens)
        return [row["tokens"] for row in rows]

    def conditions(self) -> dict[str, Any]:
        """What accepted lengths must have in common to be compared."""
        return {"eval_prompts": self.recipe.train.eval_prompts, **self.recipe.decode.model_dump(mode="json")}


@torch.no_grad()
def held_out_scores(unrolled: UnrolledHead, store: SampleStore, batch_size: int) -> dict[str, float]:
    """Loss, top-1 accuracy and expected acceptance at each depth over the held-out samples; of a target under training
    also its divergence from the original, in nats a token."""
    embedding, unroll = unrolled.head.embedding, unrolled.objective.unroll
    total = torch.zeros(4, unroll)
    outside, divergences = 0, []
    for start in range(0, len(store), batch_size):
        numbers = range(start, min(start + batch_size, len(store)))
        store.expect(numbers)
        samples = [store[number] for number in numbers]
        batch = Batch.collate(samples, embedding.dtype, embedding.device)
        supervision = unrolled.teacher.supervise(batch)
        scores = unrolled(batch, supervision, supervision.counts(unroll))
        total += scores.sums().cpu()
        outside += supervision.outside
        if scores.divergence is not None:
            divergences.append(float(scores.divergence))
    metrics = {"heldout/outside_vocab": outside / max(outside + float(total[0, 0]), 1)}
    if divergences:
        metrics["heldout/divergence"] = sum(divergences) / max(float(total[0, 0]), 1)
    return {**depth_metrics("heldout", total), **metrics}


def depth_metrics(prefix: str, sums: torch.Tensor) -> dict[str, float]:
    """Means from the sums [4, unroll] of UnrollScores."""
    counts = sums[0].clamp(min=1)
    metrics = {}
    for name, values in (("loss", sums[1]), ("accuracy", sums[2]), ("acceptance", sums[3])):
        for depth, value in enumerate((values / counts).tolist()):
            metrics[f"{prefix}/{name}_{depth}"] = value
    return metrics


def decoded_scores(decoding: Decoding) -> dict[str, float]:
    """Accepted length at both temperatures, their mean, and the share of steps that accepted at least 1, 2, ..."""
    metrics = {}
    if decoding.recipe.decode.growth.startswith("searched"):  # a tree that suits the head as it is now
        decoding.head.calibration = decoding.calibration()
    for name, temperature in TEMPERATURES.items():
        stats = decoding.stats(temperature)
        metrics[f"heldout/{name}"] = stats.acceptance_length
        for depth, share in enumerate(stats.acceptance, start=1):
            metrics[f"heldout/{name}_accepts_{depth}"] = share
    metrics["heldout/score"] = sum(metrics[f"heldout/{name}"] for name in TEMPERATURES) / len(TEMPERATURES)
    return metrics
