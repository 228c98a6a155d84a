"""A head under DeepSpeed's ZeRO: stage 2 shares out gradients and optimizer state, stage 3 the weights too."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from deepspeed.runtime.zero import register_external_parameter
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
)
from torch import Tensor

from recipes.schema import TrainSection
from trainers.objective import UnrolledHead, UnrollScores
from trainers.optimizers import build_optimizers
from trainers.ranks.head_on_ranks import HeadOnRanks, filled, on_main_rank, spare_and_shared, state_of


class ZeroHead(HeadOnRanks):
    """DeepSpeed's engine does the clipping and the step."""

    def __init__(self, accelerator: Accelerator, unrolled: UnrolledHead, section: TrainSection) -> None:
        super().__init__(accelerator, section)
        self.spare, self.unrolled = spare_and_shared(accelerator, unrolled)
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["gradient_clipping"] = section.clip_norm
        config["gradient_accumulation_steps"] = 1  # `part` says when a batch is complete
        config["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed asks for it and only counts with it
        # Small weights are cut up as large ones are, so that a tiny head takes the way of a big one.
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        self.optimizers = build_optimizers(self.unrolled.head, section)
        self.engine, _ = accelerator.prepare(self.unrolled, *self.optimizers)
        self.zero = self.engine.optimizer
        if self.engine.zero_optimization_stage() == 3:
            # Whole while it computes: the unroll runs the only layer again and again, and the loss takes gradients of
            # norm and lm_head in the forward pass, where their own modules would let go of them.
            for parameter in self.unrolled.parameters():
                register_external_parameter(self.unrolled, parameter)

    def part(self, last: bool) -> AbstractContextManager[object]:
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def forward(self, *inputs: object) -> UnrollScores:
        assert not torch.is_autocast_enabled(self.accelerator.device.type), "DeepSpeed would switch it off in silence"
        scores: UnrollScores = self.engine(*inputs)
        return scores

    def backward(self, loss: Tensor) -> None:
        # Not accelerate's, which would step at once.
        self.engine.backward(loss * self.accelerator.num_processes)

    def update(self, scale: float = 1.0) -> float:
        assert scale == 1.0, "float16 is for launches without DeepSpeed, whose engine clips what it is given"
        self.engine.step()  # DeepSpeed itself leaves the weights alone where the norm is not finite
        return float(self.engine.get_global_grad_norm())

    def whole(self) -> UnrolledHead | None:
        named = self.unrolled.head.named_parameters()
        return filled(self.spare, ((name, safe_get_full_fp32_param(p)) for name, p in named))

    def state(self) -> dict[str, Tensor]:
        return on_main_rank(self.accelerator, self.full_state())

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors by parameter, and beside them the number of steps, which is that of the flat one they are in."""
        [optimizer] = self.optimizers
        own = optimizer.state[self.flat_parameters()[0]]
        for name, parameter in self.unrolled.head.named_parameters():
            for what, value in own.items():
                flat = value.ndim > 0
                yield f"{name}.{what}", safe_get_full_optimizer_state(parameter, what) if flat else value

    def restore(self, state: dict[str, Tensor]) -> None:
        if not state:  # at the start of a run DeepSpeed makes its own
            return
        named = list(self.unrolled.head.named_parameters())
        self.make_state(state_of(named[0][0], state))
        for name, parameter in named:
            for what, value in state_of(name, state).items():
                if value.ndim > 0:
                    safe_set_full_optimizer_state(parameter, value.to(self.accelerator.device), what)

    def make_state(self, like: dict[str, Tensor]) -> None:
        """Empty state for every flat parameter, as the optimizer itself would make at its first step."""
        [optimizer] = self.optimizers
        for flat in self.flat_parameters():
            optimizer.state[flat] = {
                what: value.clone() if value.ndim == 0 else torch.zeros_like(flat) for what, value in like.items()
            }
        if self.engine.zero_optimization_stage() < 3:
            self.zero._lazy_init_hp_params_optimizer_state()  # what DeepSpeed does behind its first step

    def flat_parameters(self) -> list[Tensor]:
        """This rank's share of all parameters, as DeepSpeed hands it to the optimizer."""
        stage_3 = self.engine.zero_optimization_stage() == 3
        flat: list[Tensor] = (
            self.zero.fp32_partitioned_groups_flat if stage_3 else self.zero.single_partition_of_fp32_groups
        )
        return flat
