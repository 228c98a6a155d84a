"""A candidate for the served head: what it is trained on, and its training from the served head's weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headstart.data_pipelines.features.batches import Sample, SampleStore
from headstart.data_pipelines.features.shards import MANIFEST, FeatureStore, stored_taps
from headstart.data_pipelines.stages.stage import Stage
from headstart.heads.base import DraftHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for, save_head, stored_dtype
from headstart.heads.target_config import folder_of
from headstart.recipes import Recipe
from headstart.trainers.loop import train
from headstart.trainers.new_head import build_head
from headstart.trainers.stages import TrainingRun
from headstart.trainers.step import TrainingInputs

RATE = 0.1  # of the recipe's learning rates, which are those of a new head
REPLAYED = 0.5  # share of a candidate's samples that come from the recipe's own features


class Samples(SampleStore):
    """Samples in memory."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.shard_sizes = [len(samples)]
        self.num_tokens = sum(len(sample.tokens) for sample in samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def place_of(self, index: int) -> str:
        return f"sample {index} of the traffic"

    def token_counts(self, vocab_size: int) -> Tensor:
        written = torch.cat([sample.tokens[sample.loss_mask] for sample in self.samples])
        return torch.bincount(written, minlength=vocab_size)


@dataclass(frozen=True)
class Snapshot:
    """The traffic that a candidate is made from, and the head that was served then."""

    served: str  # name of the version
    train: list[Sample]
    heldout: list[Sample]


def train_candidate(recipe: Recipe, folder: Path, served: Path, snapshot: Snapshot, steps: int) -> Path:
    """Train the served head on a snapshot and a share of the recipe's own features; returns the folder of the result.

    Its weights follow from the served head, the snapshot, the recipe and the steps. Checkpoints are in `folder`, too.
    """
    recipe = candidate_recipe(recipe, folder, served, steps)
    run = TrainingRun.start(recipe, recipe.head.script)
    frozen = FrozenTarget.from_folder(folder_of(recipe.target), torch.float32, run.accelerator.device)
    before = load_head_for(served, frozen)
    old = replayed(recipe, before, len(snapshot.train), snapshot.train[0].last_hidden.dtype)
    store, heldout = Samples([*snapshot.train, *old]), Samples(snapshot.heldout)
    stage = Stage("traffic", folder, {"served": snapshot.served, "samples": len(store)})
    stage.finish({})
    checkpoints, start = run.open_checkpoints(stage, frozen, store)
    head = build_head(recipe, frozen, start)
    train(recipe, head, TrainingInputs(frozen, store, heldout, None), run.accelerator, checkpoints)
    newest = checkpoints.load()
    assert newest is not None
    head.load_state_dict(newest.weights)
    head.calibration, head.origin = before.calibration, before.origin
    save_head(head.to(getattr(torch, stored_dtype(served))), folder / "head")
    return folder / "head"


def candidate_recipe(recipe: Recipe, folder: Path, served: Path, steps: int) -> Recipe:
    """The recipe with its train section for a candidate's steps from the served head."""
    rates = {name: RATE * getattr(recipe.train, name) for name in ("learning_rate", "muon_learning_rate")}
    changes = {**rates, "steps": steps, "start_from": served, "eval_prompts": 0, "fitted_start": False}
    changes |= {"warmup_steps": min(recipe.train.warmup_steps, steps // 10), "checkpoint_every": max(steps // 4, 1)}
    # The features that are replayed stay those of the recipe's own run.
    data = recipe.data.model_copy(update={"store": recipe.data.store or recipe.features_dir})
    train_section = recipe.train.model_copy(update=changes)
    return recipe.model_copy(update={"run_dir": folder, "train": train_section, "data": data})


def replayed(recipe: Recipe, head: DraftHead, count: int, dtype: torch.dtype) -> list[Sample]:
    """A share of old samples beside `count` new ones, drawn by the seed; none if the recipe has no features."""
    folder = recipe.data.store
    assert folder is not None
    if not (folder / MANIFEST).is_file():
        return []
    store = FeatureStore(folder, "train", stored_taps(head.taps, head.target.num_layers))
    wanted = min(round(count * REPLAYED / (1 - REPLAYED)), len(store))
    drawn = torch.randperm(len(store), generator=torch.Generator().manual_seed(recipe.seed))[:wanted]
    found = [store[number] for number in drawn.tolist()]
    store.close()
    return [Sample(each.tokens, each.loss_mask, each.taps.to(dtype), each.last_hidden.to(dtype)) for each in found]
