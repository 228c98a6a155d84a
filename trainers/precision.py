"""The number formats of training: what the head computes in, and the loss scale that float16 cannot do without."""

import os

import torch

from recipes.schema import TrainSection

ACCELERATE_NAMES = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


def autocast(section: TrainSection, device: torch.device) -> torch.autocast:
    """Matrix products in `train.precision`; weights, norms' sums, softmaxes and losses stay in float32."""
    enabled = section.precision != "float32"
    dtype = getattr(torch, section.precision) if enabled else torch.bfloat16  # asked for even when it is not used
    return torch.autocast(device.type, dtype=dtype, enabled=enabled)


def refuse_contradiction(section: TrainSection) -> None:
    """The recipe decides. What `accelerate launch` sets unasked may stand; ValueError where it was asked otherwise."""
    mine, its = ACCELERATE_NAMES[section.precision], os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if its not in ("no", mine):
        raise ValueError(
            f"train.precision: {section.precision} in the recipe and --mixed_precision {its} of accelerate launch (or "
            f"mixed_precision of its configuration) contradict each other; drop the latter"
        )
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps not in ("1", str(section.accumulate)):
        raise ValueError(
            f"train.accumulate: {section.accumulate} in the recipe and --gradient_accumulation_steps {steps} of "
            "accelerate launch (or of its configuration) contradict each other; drop the latter"
        )


class LossScale:
    """What a float16 loss is multiplied with, so that small gradients do not vanish; 1 in every other precision.

    A gradient that overflows costs its step and halves the scale; a long run of good steps doubles it. Powers of two,
    so scaling is exact.
    """

    START, LARGEST, GOOD_STEPS = 2.0**16, 2.0**24, 2000

    def __init__(self, section: TrainSection) -> None:
        self.active = section.precision == "float16"
        self.factor = self.START if self.active else 1.0
        self.good_steps, self.skipped = 0, 0

    def update(self, step: int, finite: bool) -> None:
        """Learn what became of a step's gradient; raises ValueError when no scale is left to try."""
        if finite:
            self.good_steps += 1
            if self.active and self.good_steps == self.GOOD_STEPS:
                self.factor, self.good_steps = min(self.factor * 2, self.LARGEST), 0
            return
        assert self.active
        self.skipped, self.good_steps = self.skipped + 1, 0
        if self.factor == 1.0:
            raise ValueError(
                f"the gradient of step {step + 1} is not finite at any loss scale, down to 1; choose train.precision "
                "bfloat16 or float32, or lower train.learning_rate; the last checkpoint is good"
            )
        self.factor /= 2

    def metrics(self) -> dict[str, float]:
        return {"train/loss_scale": self.factor, "train/skipped_steps": self.skipped} if self.active else {}

    def state(self) -> dict[str, float]:
        return {"factor": self.factor, "good_steps": self.good_steps, "skipped": self.skipped}

    def restore(self, state: dict[str, float]) -> None:
        self.factor, self.good_steps, self.skipped = state["factor"], int(state["good_steps"]), int(state["skipped"])
