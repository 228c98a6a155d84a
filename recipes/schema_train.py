"""The recipe's sections on training: of the head alone, and of its target with it."""

import math
from typing import Literal

from pydantic import Field

from headstart.recipes.values import HomePath, Objective, Section


class TrainSection(Section):
    """How the head is trained on the features."""

    steps: int = Field(gt=0, description="Optimizer steps.")
    batch_size: int = Field(default=8, gt=0, description="Samples per optimizer step, over all processes.")
    accumulate: int | None = Field(
        default=None,
        gt=0,
        description="Micro-batches per optimizer step and process; more of them need less memory; null: as few as fit "
        "a GPU, on a CPU one.",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Number format of the head's computation; weights and losses stay in float32."
    )
    pack_tokens: int | None = Field(
        default=None, gt=0, description="Pack a step's samples into rows of up to this many tokens; null pads each."
    )
    learning_rate: float = Field(default=1e-4, gt=0, description="AdamW's peak learning rate.")
    warmup_steps: int = Field(
        default=100, ge=0, description="Steps in which the learning rate rises from zero; then it falls as a cosine."
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="adamw updates all weights; muon the layer's matrices, with AdamW for the rest."
    )
    muon_learning_rate: float = Field(default=0.02, gt=0, description="Muon's peak learning rate.")
    clip_norm: float = Field(
        default=0.5, gt=0, description="Largest gradient norm; larger gradients are scaled down to it."
    )
    unroll: int = Field(
        default=7,
        gt=0,
        le=32,
        description="Depths trained by unrolling an EAGLE head on its own output (training-time test). Other heads "
        "train all the levels that they draft.",
    )
    unroll_decay: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Loss weight of each depth, relative to the one before; null is 0.8, for block heads 0.78 to 0.87 "
        "by their size (DFlash).",
    )
    objective: Objective | None = Field(
        default=None,
        description="Loss between the head's and the target's distributions; log_ and blended_acceptance are the LK "
        "losses; null is total_variation for block heads with a Markov head, none for other block "
        "heads, whose loss is that to the text alone, and soft_cross_entropy for others.",
    )
    objective_weight: float | None = Field(
        default=None,
        gt=0,
        description="Weight of the objective; null is 0.1 for eagle1, 1.8 for block heads with a Markov head (DSpark), "
        "1 for others.",
    )
    anchors: int = Field(
        default=512, gt=0, description="Blocks per sample and step that a block head is trained on, drawn at random."
    )
    start_from: HomePath | None = Field(
        default=None,
        description="Folder of a trained head, ours or converted, whose weights and draft vocabulary training starts "
        "from; null starts a new head.",
    )
    fitted_start: bool = Field(
        default=False,
        description="Start an EAGLE-3 head as the linear map, fitted by least squares, that predicts the target's next "
        "state; false starts at random.",
    )
    activation_checkpointing: bool | None = Field(
        default=None,
        description="Save memory by recomputing unroll steps in the backward pass; null: only where no number of "
        "micro-batches fits the GPU.",
    )
    checkpoint_every: int = Field(
        default=500, gt=0, description="Steps between checkpoints; each is measured on held-out data."
    )
    eval_prompts: int = Field(
        default=8, ge=0, description="Held-out prompts decoded at each measurement; 0 decodes none."
    )
    dry_run: bool = Field(
        default=False,
        description="Print the run's sizes, memory, disk space and steps, then exit without running it; with "
        "--device-memory 8x80GB, for those devices.",
    )

    def samples_at_once(self, ranks: int) -> int:
        """The samples of a micro-batch on each rank, at most."""
        return math.ceil(math.ceil(self.batch_size / ranks) / self.micro_batches)

    @property
    def micro_batches(self) -> int:
        return self.accumulate or 1


class JointSection(Section):
    """Medusa-2: the target's layers train with the heads; its embedding, final norm and lm_head stay frozen."""

    mode: Literal["lora", "full"] | None = Field(
        default=None,
        description="Train the target's layers together with the Medusa heads: lora trains low-rank additions (needs "
        "peft), full trains all layer weights in float32; null trains the heads only.",
    )
    lora_rank: int = Field(default=32, gt=0, description="Rank of the low-rank additions with mode lora.")
    learning_rate: float = Field(default=1e-4, ge=0, description="AdamW's peak learning rate for the target.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps at the start that train the heads alone.")
