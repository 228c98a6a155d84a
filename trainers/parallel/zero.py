"""A head under DeepSpeed's ZeRO: stage 2 shards gradients and optimizer state, stage 3 the weights too."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from deepspeed.runtime.zero import register_external_parameter
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_optimizer_state
from torch import Tensor

from headstart.recipes.schema_train import TrainSection
from headstart.trainers.objectives.unrolled import HeadInTraining
from headstart.trainers.parallel.head_on_ranks import (
    HeadOnRanks,
    build_optimizers,
    copy_to_main_cpu,
    copy_weights,
    state_of_parameter,
    whole_and_sharded,
)


class ZeroHead(HeadOnRanks):
    """DeepSpeed's engine clips the gradient and steps."""

    def __init__(self, accelerator: Accelerator, unrolled: HeadInTraining, section: TrainSection) -> None:
        super().__init__(accelerator, section)
        self.whole_head, self.unrolled = whole_and_sharded(accelerator, unrolled)
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["gradient_clipping"] = section.clip_norm
        config["gradient_accumulation_steps"] = 1  # `micro_batch` says when a batch is complete
        config["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed requires it, but only for its bookkeeping
        # DeepSpeed replaces the caller's autocast by its own. Without modules whose weights it may send in bfloat16, it
        # gathers weights and sums gradients in float32, as the other launches do.
        half = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        config["torch_autocast"] = half if section.precision == "bfloat16" else {"enabled": False}
        # DeepSpeed would keep small weights whole; sharding all of them lets tiny tests run the code of large heads.
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        self.optimizers = build_optimizers(self.unrolled.head, section)
        self.engine, _ = accelerator.prepare(self.unrolled, *self.optimizers)
        self.module, self.zero = self.engine, self.engine.optimizer
        if self.engine.zero_optimization_stage() == 3:
            # The head stays whole while it computes: the unroll runs its one layer many times, and the loss takes
            # gradients of norm and lm_head during the forward pass, after their own modules would have released them.
            for parameter in self.unrolled.parameters():
                register_external_parameter(self.unrolled, parameter)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        self.engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # accelerate's own backward would also step.
        self.engine.backward(loss * self.accelerator.num_processes)

    def update(self) -> float:
        self.engine.step()  # DeepSpeed itself leaves the weights unchanged if the norm is not finite
        return float(self.engine.get_global_grad_norm())

    def whole(self) -> HeadInTraining | None:
        named = self.unrolled.head.named_parameters()
        return copy_weights(((name, safe_get_full_fp32_param(p)) for name, p in named), self.whole_head)

    def optimizer_state(self) -> dict[str, Tensor]:
        return copy_to_main_cpu(self.accelerator, self.full_optimizer_state())

    def full_optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Every optimizer tensor by parameter name; each parameter gets the step count of the flat tensor it is in."""
        [optimizer] = self.optimizers
        own = optimizer.state[self.flat_parameters()[0]]
        for name, parameter in self.unrolled.head.named_parameters():
            for key, value in own.items():
                flat = value.ndim > 0
                yield f"{name}.{key}", safe_get_full_optimizer_state(parameter, key) if flat else value

    def restore_optimizers(self, state: dict[str, Tensor]) -> None:
        if not state:  # a new run: DeepSpeed initialises its own
            return
        named = list(self.unrolled.head.named_parameters())
        self.allocate_optimizer_state(state_of_parameter(named[0][0], state))
        for name, parameter in named:
            for key, value in state_of_parameter(name, state).items():
                if value.ndim > 0:
                    safe_set_full_optimizer_state(parameter, value.to(self.accelerator.device), key)

    def allocate_optimizer_state(self, like: dict[str, Tensor]) -> None:
        """Zero state for every flat parameter, as the optimizer would allocate it in its first step."""
        [optimizer] = self.optimizers
        for flat in self.flat_parameters():
            optimizer.state[flat] = {
                key: value.clone() if value.ndim == 0 else torch.zeros_like(flat) for key, value in like.items()
            }
        if self.engine.zero_optimization_stage() < 3:
            self.zero._lazy_init_hp_params_optimizer_state()  # DeepSpeed calls it after its first step

    def flat_parameters(self) -> list[Tensor]:
        """This rank's share of all parameters, as DeepSpeed passes it to the optimizer."""
        if self.engine.zero_optimization_stage() == 3:
            return list(self.zero.fp32_partitioned_groups_flat)
        return list(self.zero.single_partition_of_fp32_groups)
