"""The number formats of training: autocast, and the loss scale that float16 needs."""

import torch

from headstart.recipes.schema import TrainSection


def autocast(section: TrainSection, device: torch.device) -> torch.autocast:
    """Matrix products in `train.precision`; weights, softmaxes, losses and the sums of norms stay in float32."""
    enabled = section.precision != "float32"
    dtype = compute_dtype(section) if enabled else torch.bfloat16  # torch checks it even when disabled
    return torch.autocast(device.type, dtype=dtype, enabled=enabled)


def compute_dtype(section: TrainSection) -> torch.dtype:
    """The number format of matrix products."""
    dtype: torch.dtype = getattr(torch, section.precision)
    return dtype


class LossScale:
    """The factor on a float16 loss that keeps small gradients from vanishing; 1 in every other precision.

    A gradient that overflows skips its step and halves the scale; a long run of finite steps doubles it. The scale is a
    power of two, so scaling is exact.
    """

    START, LARGEST, GOOD_STEPS = 2.0**16, 2.0**24, 2000

    def __init__(self, section: TrainSection) -> None:
        self.active = section.precision == "float16"
        self.factor = self.START if self.active else 1.0
        self.good_steps, self.skipped = 0, 0

    def update(self, step: int, finite: bool) -> None:
        """Adapt to whether a step's gradient was finite; raises ValueError if it was not at a scale of 1."""
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
