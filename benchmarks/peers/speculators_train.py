"""Train an EAGLE-3 head with speculators, in its own environment, on our features.

speculators' trainer needs an accelerator and does not run on a CPU. This script repeats its training loop with its own
model, packing, loss, optimizers, schedule and clipping, and with its defaults for everything that the job leaves open.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig
from torch import Tensor
from transformers import LlamaConfig, get_linear_schedule_with_warmup

CLIP_NORM = 1.0  # a constant in speculators' training loop
WARMUP_SHARE = 100  # its default warm-up is one hundredth of the steps


def read_samples(shards: list[str], taps: list[int]) -> list[dict[str, Tensor]]:
    """Read our shards, stored in a float format, as samples of speculators' data set."""
    samples = []
    for shard in shards:
        tensors = load_file(shard)
        states = torch.cat([tensors[f"tap.{tap}"] for tap in taps], dim=-1)
        for start, end in tensors["offsets"].unfold(0, 2, 1).tolist():
            samples.append(
                {
                    "hidden_states": states[start:end],
                    "input_ids": tensors["tokens"][start:end].long(),
                    "verifier_last_hidden_states": tensors["last_hidden"][start:end],
                    "loss_mask": tensors["loss_mask"][start:end].bool(),
                    "lengths": torch.tensor([end - start]),
                    "position_ids": torch.arange(end - start),
                }
            )
    return samples


def new_model(job: dict[str, Any]) -> Eagle3DraftModel:
    layer = LlamaConfig.from_pretrained(job["target"])
    layer.num_hidden_layers = 1
    ids = torch.tensor(job["draft_vocab"])  # ascending
    members = torch.zeros(layer.vocab_size, dtype=torch.bool)
    members[ids] = True
    return Eagle3DraftModel.from_training_args(
        layer,
        verifier_name_or_path=job["target"],
        draft_vocab_size=len(ids),
        t2d=members,
        d2t=ids - torch.arange(len(ids)),
        target_layer_ids=job["taps"],
        draft_attn_impl="sdpa",
        norm_before_residual=False,
        fc_norm=job["fc_norm"],
        norm_output=job["norm_output"],
        ttt_steps=job["unroll"],
    )


def train(model: Eagle3DraftModel, job: dict[str, Any]) -> None:
    samples, rate, steps = read_samples(job["shards"], job["taps"]), job["learning_rate"], len(job["batches"])
    config = TrainerConfig(lr=rate, muon_lr=rate, optimizer="muon", num_epochs=1, save_path=job["head"])
    optimizers = build_optimizers(model, config)
    schedules = [get_linear_schedule_with_warmup(each, steps // WARMUP_SHARE, steps) for each in optimizers]
    options, _ = model.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", ttt_steps=job["unroll"], ttt_step_loss_decay=1.0
    )
    for numbers in job["batches"]:
        chosen = [samples[number] for number in numbers]
        length = sum(len(sample["input_ids"]) - 1 for sample in chosen)  # no padding
        collate = CollateFn(length, model.hidden_size, len(job["taps"]), torch.float32, shift_batch)
        _, loss, _ = model(**collate(chosen), **options)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for each in (*optimizers, *schedules):
            each.step()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(job["seed"])
    torch.set_num_threads(job["threads"])
    model = new_model(job)
    train(model, job)
    model.save_pretrained(job["head"])


if __name__ == "__main__":
    main()
