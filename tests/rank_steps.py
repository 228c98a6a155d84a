"""A few optimizer steps by all ranks of a launch, for test_launch.py:

accelerate launch --config_file recipes/launch/MODE.yaml --num_processes N tests/rank_steps.py RUN RESULT
"""

import math
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data_pipelines.batches import Batch
from data_pipelines.shards import FeatureStore, Sample
from heads.checkpoint import draft_vocab, new_head
from heads.frozen import FrozenTarget
from recipes import load_recipe
from trainers.objective import Objective, Teacher, UnrolledHead
from trainers.optimizers import set_learning_rates
from trainers.ranks.head_on_ranks import HeadOnRanks, gathered
from trainers.ranks.launch import share_out, start_accelerator

STEPS, HALF, BATCH = 4, 2, 8
CLIP_NORM = 3.3  # longer than some of the steps' gradients and shorter than others'


def main(folder: Path, result: Path, begun: Path | None = None) -> None:
    """Writes the losses, the gradient and its norm of each step, the weights and the optimizer state behind the last.

    Every other step takes its batch in two parts; a last one has no finite gradient and must change nothing.
    """
    recipe = load_recipe(folder / "recipe.yaml", [f"train.clip_norm={CLIP_NORM}"])
    accelerator = start_accelerator(recipe.train)
    frozen = FrozenTarget.from_folder(folder / "target", torch.float32, accelerator.device)
    store = FeatureStore(recipe.features_dir, "train")
    vocab = draft_vocab(recipe.head, store.token_counts(frozen.config.vocab_size))
    head = new_head(recipe.head, frozen, vocab, recipe.seed).to(accelerator.device)
    make_dense(head)
    taken_up = {} if begun is None else load_file(begun)
    if taken_up:
        head.load_state_dict(named(taken_up, "weight"))
    unrolled = UnrolledHead(head, Teacher(frozen, vocab), Objective.from_recipe(recipe), activation_checkpointing=True)
    ranks, found = share_out(accelerator, unrolled, recipe.train), {}
    ranks.restore(named(taken_up, "state"))
    for step in range(HALF if taken_up else 0, STEPS):
        set_learning_rates(ranks.optimizers, recipe.train, step)
        samples = [store[(BATCH * step + place) % len(store)] for place in range(BATCH)]
        found[f"loss.{step}"] = accumulate(ranks, samples, parts=1 + step % 2)
        found |= {f"gradient.{step}.{name}": gradient for name, gradient in full_gradients(ranks).items()}
        found[f"norm.{step}"] = torch.tensor(ranks.update())
        if step + 1 == HALF:
            save(ranks, {}, result.with_suffix(".half"))
    accumulate(ranks, samples, parts=1, scale=math.inf)
    assert not math.isfinite(ranks.update())
    save(ranks, found, result)
    accelerator.end_training()


def save(ranks: HeadOnRanks, found: dict[str, Tensor], path: Path) -> None:
    whole, state = ranks.whole(), ranks.state()
    if whole is not None:
        found = found | {f"weight.{name}": weight for name, weight in whole.head.state_dict().items()}
        found |= {f"state.{name}": value for name, value in state.items()}
        save_file({name: tensor.cpu().contiguous() for name, tensor in found.items()}, path)


def named(found: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{kind}."): value for name, value in found.items() if name.startswith(f"{kind}.")}


def make_dense(head: nn.Module) -> None:
    """No weight is zero, so that every path through the head counts."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)


def accumulate(ranks: HeadOnRanks, samples: list[Sample], parts: int, scale: float = 1.0) -> Tensor:
    """The loss of a batch, whose gradient all ranks then have."""
    accelerator, unrolled = ranks.accelerator, ranks.unrolled
    share = samples[accelerator.process_index :: accelerator.num_processes]
    batches = [Batch.collate(share[first::parts], torch.float32, accelerator.device) for first in range(parts)]
    supervisions = [unrolled.teacher.supervise(batch) for batch in batches]
    unroll, loss = unrolled.objective.unroll, torch.zeros((), device=accelerator.device)
    counts = accelerator.reduce(torch.stack([each.counts(unroll) for each in supervisions]).sum(0), "sum")
    for number, (batch, supervision) in enumerate(zip(batches, supervisions, strict=True), start=1):
        with ranks.part(last=number == parts):
            scores = ranks.forward(batch, supervision, counts)
            ranks.backward(scores.loss * scale)
        loss += scores.loss.detach()
    return accelerator.reduce(loss, "sum")


def full_gradients(ranks: HeadOnRanks) -> dict[str, Tensor]:
    """The loss's gradient by parameter name: of its sum over the ranks, whose average the ranks hold of N times it."""
    gradients = {}
    for name, parameter in ranks.unrolled.head.named_parameters():
        if ranks.accelerator.distributed_type == "DEEPSPEED":
            from deepspeed.utils import safe_get_full_grad

            gradients[name] = safe_get_full_grad(parameter)
        else:
            assert parameter.grad is not None
            gradients[name] = gathered(parameter.grad)
    return {name: gradient.clone() for name, gradient in gradients.items()}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
