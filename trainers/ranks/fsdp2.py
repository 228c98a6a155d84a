"""A head under FSDP2: every rank holds a slice of each weight."""

from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipes.schema import TrainSection
from trainers.objective import UnrolledHead, UnrollScores
from trainers.optimizers import build_optimizers
from trainers.ranks.head_on_ranks import (
    HeadOnRanks,
    filled,
    gathered,
    named_state,
    on_main_rank,
    put_state,
    spare_and_shared,
    step_if_finite,
    unscale_and_clip,
)


class FullyShardedHead(HeadOnRanks):
    """FSDP2: every rank holds a slice of each weight and of its optimizer state.

    The head is one unit, whole while it computes: the unroll runs its only layer again and again, and the loss takes
    gradients of its norm and lm_head in the forward pass. accelerate shards on GPUs alone, so this is done here.
    """

    def __init__(self, accelerator: Accelerator, unrolled: UnrolledHead, section: TrainSection) -> None:
        super().__init__(accelerator, section)
        self.spare, self.unrolled = spare_and_shared(accelerator, unrolled)
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        fully_shard(self.unrolled, mesh=mesh)
        self.optimizers = build_optimizers(self.unrolled.head, section)

    def forward(self, *inputs: object) -> UnrollScores:
        scores: UnrollScores = self.unrolled(*inputs)
        return scores

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def update(self, scale: float = 1.0) -> float:
        norm = unscale_and_clip(self.unrolled, scale, self.clip_norm)
        step_if_finite(self.optimizers, norm)
        return norm

    def whole(self) -> UnrolledHead | None:
        return filled(self.spare, ((name, gathered(p)) for name, p in self.unrolled.head.named_parameters()))

    def state(self) -> dict[str, Tensor]:
        state = named_state(self.unrolled.head, self.optimizers)
        return on_main_rank(self.accelerator, ((name, gathered(value)) for name, value in state))

    def restore(self, state: dict[str, Tensor]) -> None:
        put_state(self.unrolled.head, self.optimizers, state)
