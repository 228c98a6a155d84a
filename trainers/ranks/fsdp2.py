"""A head under FSDP2: every rank holds a slice of each weight."""

from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from headstart.recipes.schema import TrainSection
from headstart.trainers.objectives.unrolled import UnrolledHead
from headstart.trainers.optimizers import build_optimizers
from headstart.trainers.ranks.head_on_ranks import (
    HeadOnRanks,
    copy_to_main_cpu,
    copy_weights,
    full_tensor,
    named_optimizer_state,
    step_if_finite,
    unscale_and_clip,
    whole_and_sharded,
)


class FullyShardedHead(HeadOnRanks):
    """FSDP2: every rank holds a slice of each weight and of its optimizer state.

    The head is a single FSDP unit, whole while it computes: the unroll runs its one layer many times, and the loss
    takes gradients of norm and lm_head during the forward pass. accelerate shards on GPUs only, so it is done here.
    """

    def __init__(self, accelerator: Accelerator, unrolled: UnrolledHead, section: TrainSection) -> None:
        super().__init__(accelerator, section)
        self.whole_head, self.unrolled = whole_and_sharded(accelerator, unrolled)
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        fully_shard(self.unrolled, mesh=mesh)
        self.module = self.unrolled
        self.optimizers = build_optimizers(self.unrolled.head, section)

    def update(self, scale: float = 1.0) -> float:
        norm = unscale_and_clip(self.unrolled, scale, self.clip_norm)
        step_if_finite(self.optimizers, norm)
        return norm

    def whole(self) -> UnrolledHead | None:
        named = self.unrolled.head.named_parameters()
        return copy_weights(((name, full_tensor(parameter)) for name, parameter in named), self.whole_head)

    def optimizer_state(self) -> dict[str, Tensor]:
        state = named_optimizer_state(self.unrolled.head, self.optimizers)
        return copy_to_main_cpu(self.accelerator, ((name, full_tensor(value)) for name, value in state))
