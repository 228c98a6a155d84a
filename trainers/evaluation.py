"""Measurements of a head in training: held-out accuracy at each depth, and the acceptance length of real decoding."""

from dataclasses import dataclass, replace

import torch

from headstart.data_pipelines.features.batches import SampleStore
from headstart.heads.base import DraftHead
from headstart.heads.calibration import Calibration
from headstart.heads.files import Tensors
from headstart.inference.calibrate import fit_calibration
from headstart.inference.core.request import DecodeStats, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.build import growth_from_recipe
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Growth
from headstart.inference.engine.budget import check_length
from headstart.inference.engine.loop import generate_batch
from headstart.inference.generate.loading import held_out_prompts
from headstart.inference.targets.cuda_graph import SpareSteps
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.trainers.objectives.unrolled import HeadInTraining

BLOCKS_SEED = "held out"  # decides which blocks of a held-out text are scored, the same ones at every measurement
TEMPERATURES = {"tau": 0.0, "tau_t1": 1.0}  # metric of acceptance length -> the temperature it is measured at


@dataclass(frozen=True)
class HeldOutDecoding:
    """Decodes held-out prompts with a target and a copy of the head, both in the target's number format.

    The head under training computes in float32 and may be sharded over many ranks; the copy takes over its weights.
    """

    recipe: Recipe
    target: TargetModel
    head: DraftHead

    def load_weights(self, head: Tensors, target: Tensors) -> None:
        """Decode with these weights from now on; `target` holds only the weights that training has changed."""
        self.head.load_state_dict(head)
        found = self.target.model.load_state_dict(target, strict=False)
        assert not found.unexpected_keys, found.unexpected_keys

    def decode(self, temperature: float) -> DecodeStats:
        """Decode the prompts as the recipe says; returns the statistics of all of them."""
        sampling = Sampling(temperature, seed=self.recipe.seed)
        requests = [replace(prompt, sampling=sampling) for prompt in self.prompts()]
        most = self.recipe.decode.max_batch
        growth = growth_from_recipe(self.recipe.decode, self.target, self.head, batch=min(most, len(requests)))
        generations = generate_batch(self.target, requests, head_drafter(self.head, growth), most)
        self.target.singleton(SpareSteps).clear()  # training needs their memory
        return DecodeStats.sum_of(generation.stats for generation in generations)

    def fit_calibration(self) -> Calibration:
        """A calibration of the head, fitted on the same prompts."""
        depth = Growth.from_section(self.recipe.decode, self.head.max_levels).depth
        calibration = fit_calibration(self.target, self.head, self.prompts(), depth)
        self.target.singleton(SpareSteps).clear()
        return calibration

    def prompts(self) -> list[Request]:
        """The first `train.eval_prompts` held-out prompts."""
        most = min(self.recipe.decode.max_new_tokens, self.recipe.data.response_tokens)
        requests = held_out_prompts(self.recipe, self.recipe.train.eval_prompts, most)
        for request in requests:
            check_length(self.target, request.prompt, most)
        return requests


@torch.no_grad()
def held_out_metrics(unrolled: HeadInTraining, store: SampleStore, batch_size: int) -> dict[str, float]:
    """Loss, accuracy and expected acceptance at each depth, and a trained target's divergence in nats per token."""
    embedding, unroll = unrolled.head.embedding, unrolled.objective.unroll
    total, divergences = torch.zeros(4, unroll), []
    for start in range(0, len(store), batch_size):
        numbers = range(start, min(start + batch_size, len(store)))
        store.expect([numbers])
        batch = store.batch_of(numbers).to(embedding.device, embedding.dtype)
        batch = unrolled.teacher.with_drafted(store, numbers, batch)
        supervision = unrolled.supervise(batch, BLOCKS_SEED)
        scores = unrolled(batch, supervision, supervision.counts(unroll))
        total += scores.sums().cpu()
        if scores.divergence is not None:
            divergences.append(float(scores.divergence))
    metrics = metrics_by_depth("heldout", total)
    if divergences:
        metrics["heldout/divergence"] = sum(divergences) / max(float(total[0, 0]), 1)
    return metrics


def metrics_by_depth(prefix: str, sums: torch.Tensor) -> dict[str, float]:
    """Means at each depth from `UnrollScores.sums`, [4, unroll], and the expected acceptance length.

    The latter is that of chains at temperature 1, if each depth were accepted independently: 1 + a_0 + a_0 a_1 + ...
    """
    counts = sums[0].clamp(min=1)
    metrics = {f"{prefix}/expected_tau": 1 + float((sums[3] / counts).cumprod(0).sum())}
    for name, values in (("loss", sums[1]), ("accuracy", sums[2]), ("acceptance", sums[3])):
        for depth, value in enumerate((values / counts).tolist()):
            metrics[f"{prefix}/{name}_{depth}"] = value
    return metrics


def decoding_metrics(decoding: HeldOutDecoding) -> dict[str, float]:
    """Acceptance length at each temperature."""
    metrics = {}
    if Growth.from_section(decoding.recipe.decode).is_searched:  # search the best tree for the current weights
        decoding.head.calibration = decoding.fit_calibration()
    for name, temperature in TEMPERATURES.items():
        metrics[f"heldout/{name}"] = decoding.decode(temperature).acceptance_length
    return metrics
