"""A few optimizer steps of all ranks of a launch, for test_launch.py:

accelerate launch --config_file recipes/launch/MODE.yaml --num_processes N tests/support/rank_steps.py RUN RESULT
"""

import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_run import make_dense
from torch import Tensor

from headstart.data_pipelines.features.batches import Sample, TrainingBatch
from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.together import settle
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import draft_vocab, new_head
from headstart.recipes import load_recipe
from headstart.trainers.objectives.unrolled import Teacher
from headstart.trainers.parallel.head_on_ranks import HeadOnRanks, full_tensor, set_learning_rates
from headstart.trainers.parallel.launch import distribute_head, start_accelerator
from headstart.trainers.step import autocast, head_in_training

STEPS, HALF, BATCH = 4, 2, 8
CLIP_NORM = 3.44  # between the gradient norms of the steps, so that some are clipped and others are not


def main(folder: Path, result: Path, resumed: Path | None = None) -> None:
    """Write loss, gradient and gradient norm of each step, and the weights and optimizer state after the last step.

    Every other step splits its batch into two micro-batches. One more step has no finite gradient and must change
    nothing.
    """
    own = [f"train.clip_norm={CLIP_NORM}", "train.activation_checkpointing=true"]
    recipe = load_recipe(folder / "recipe.yaml", own)
    accelerator = start_accelerator(recipe)
    if "RANKS_OF_A_MACHINE" in os.environ:
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["RANKS_OF_A_MACHINE"]
    frozen = FrozenTarget.from_folder(folder / "target", torch.float32, accelerator.device)
    store = FeatureStore(recipe.features_dir, "train")
    vocab = draft_vocab(recipe.head, store.token_counts(frozen.config.vocab_size))
    head = new_head(recipe.head, frozen, vocab, recipe.seed).to(accelerator.device)
    make_dense(head)
    start = {} if resumed is None else load_file(resumed)
    if start:
        head.load_state_dict(named(start, "weight"))
    unrolled = head_in_training(recipe, head, Teacher(frozen, vocab, getattr(torch, recipe.train.precision)))
    head_on_ranks, found = distribute_head(accelerator, unrolled, recipe.train), {}
    head_on_ranks.restore_optimizers(named(start, "state"))
    for step in range(HALF if start else 0, STEPS):
        set_learning_rates(head_on_ranks.optimizers, recipe.train, step)
        samples = [store[(BATCH * step + place) % len(store)] for place in range(BATCH)]
        found[f"loss.{step}"] = accumulate(head_on_ranks, recipe.train, samples, micro_batches=1 + step % 2)
        found |= {f"gradient.{step}.{name}": gradient for name, gradient in full_gradients(head_on_ranks).items()}
        found[f"norm.{step}"] = torch.tensor(head_on_ranks.update())
        if step + 1 == HALF:
            save(head_on_ranks, {}, result.with_suffix(".half"))
    accumulate(head_on_ranks, recipe.train, samples, micro_batches=1, scale=math.inf)
    assert not math.isfinite(head_on_ranks.update())
    save(head_on_ranks, found, result)
    settle()
    accelerator.end_training()


def save(head: HeadOnRanks, found: dict[str, Tensor], path: Path) -> None:
    whole, state = head.whole(), head.optimizer_state()
    if whole is not None:
        found = found | {f"weight.{name}": weight for name, weight in whole.head.state_dict().items()}
        found |= {f"state.{name}": value for name, value in state.items()}
        save_file({name: tensor.cpu().contiguous() for name, tensor in found.items()}, path)


def named(found: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{kind}."): value for name, value in found.items() if name.startswith(f"{kind}.")}


def accumulate(head: HeadOnRanks, section: Any, samples: list[Sample], micro_batches: int, scale: float = 1) -> Tensor:
    """Take the gradient of a batch on all ranks; returns its loss."""
    accelerator, unrolled = head.accelerator, head.unrolled
    own = samples[accelerator.process_index :: accelerator.num_processes]
    parts = [own[number::micro_batches] for number in range(micro_batches)]
    batches = [TrainingBatch.collate(part, torch.float32, accelerator.device) for part in parts]
    supervisions = [unrolled.supervise(batch, "key") for batch in batches]
    unroll, loss = unrolled.objective.unroll, torch.zeros((), device=accelerator.device)
    counts = accelerator.reduce(torch.stack([each.counts(unroll) for each in supervisions]).sum(0), "sum")
    for number, (batch, supervision) in enumerate(zip(batches, supervisions, strict=True), start=1):
        with head.micro_batch(is_last=number == micro_batches):
            with autocast(section, accelerator.device):
                scores = head.forward(batch, supervision, counts)
            head.backward(scores.loss * scale)
        loss += scores.loss.detach()
    return accelerator.reduce(loss, "sum")


def full_gradients(head: HeadOnRanks) -> dict[str, Tensor]:
    """The gradient of the loss, summed over all ranks, by parameter name."""
    gradients = {}
    for name, parameter in head.unrolled.head.named_parameters():
        if head.accelerator.distributed_type == "DEEPSPEED":
            from deepspeed.utils import safe_get_full_grad

            gradients[name] = safe_get_full_grad(parameter)
        else:
            assert parameter.grad is not None
            gradients[name] = full_tensor(parameter.grad)
    return {name: gradient.clone() for name, gradient in gradients.items()}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
