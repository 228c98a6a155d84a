"""What `accelerate launch` asked for: the ranks, what they cannot do, and how they hold the head.

How the ranks share is the launch's choice (recipes/launch/), not the recipe's: a checkpoint of one fits all others.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType, InitProcessGroupKwargs, parse_flag_from_env

from data_pipelines.shard_work import RANK_TIMEOUT
from recipes.schema import TrainSection
from trainers.objective import UnrolledHead
from trainers.ranks.fsdp2 import FullyShardedHead
from trainers.ranks.head_on_ranks import HeadOnRanks, ReplicatedHead


def start_accelerator(section: TrainSection) -> Accelerator:
    """The ranks as `accelerate launch` asked for them, in float32; without a GPU they are processes on the CPU.

    Raises ValueError where the recipe asks for what such ranks cannot do.
    """
    on_cpu = not torch.accelerator.is_available()
    waiting = InitProcessGroupKwargs(timeout=RANK_TIMEOUT)
    if on_cpu and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        # accelerate starts DeepSpeed only where it believes in a GPU.
        on_cpu, waiting = False, InitProcessGroupKwargs(backend="gloo", timeout=RANK_TIMEOUT)
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=[waiting])
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        refuse_for_slices(section, "DeepSpeed")
        refuse_half_precision(section)
        refuse_deepspeed(accelerator.state.deepspeed_plugin)
        # While this lives, transformers cuts up every model that it loads: the target too, which the main rank alone
        # loads to decode with. The others would wait for ever.
        accelerator.state.deepspeed_plugin.dschf = None
    elif parse_flag_from_env("ACCELERATE_USE_FSDP"):
        refuse_for_slices(section, "FSDP2")
    return accelerator


def refuse_for_slices(section: TrainSection, way: str) -> None:
    """What needs whole weights on every rank."""
    if section.optimizer == "muon":
        raise ValueError(
            f"train.optimizer: muon turns whole matrices, and under {way} a rank holds slices of them; adamw is "
            "allowed, or launch with recipes/launch/ddp.yaml or one.yaml"
        )
    if section.ema_decay is not None:
        raise ValueError(
            f"train.ema_decay: {section.ema_decay} averages whole weights, under {way} a rank holds slices of them; "
            "null is allowed, or launch with recipes/launch/ddp.yaml or one.yaml"
        )


def refuse_many_for_joint(accelerator: Accelerator) -> None:
    """A target under training is on one process, and not shared out."""
    shared_out = accelerator.distributed_type == DistributedType.DEEPSPEED or parse_flag_from_env("ACCELERATE_USE_FSDP")
    if accelerator.num_processes > 1 or shared_out:
        way = "FSDP2 or DeepSpeed" if shared_out else f"{accelerator.num_processes} processes"
        raise ValueError(
            f"joint.mode: given in a launch of {way}, one plain process is allowed; launch with "
            "recipes/launch/one.yaml, or leave joint out"
        )


def refuse_half_precision(section: TrainSection) -> None:
    """DeepSpeed switches autocast off and scales losses by itself."""
    if section.precision != "float32":
        raise ValueError(
            f"train.precision: {section.precision} and DeepSpeed do not go together; float32 is allowed, or launch "
            "with recipes/launch/fsdp2.yaml or ddp.yaml"
        )


def refuse_deepspeed(plugin: DeepSpeedPlugin) -> None:
    """What DeepSpeed could do, but nothing here has proved to train the same."""
    offloaded = {plugin.offload_optimizer_device, plugin.offload_param_device} - {None, "none"}
    if plugin.zero_stage not in (2, 3) or offloaded:
        raise ValueError(
            f"the launch asks DeepSpeed for stage {plugin.zero_stage}, offloading to {sorted(offloaded) or 'nothing'}; "
            "2 or 3 without offloading is allowed: take recipes/launch/zero2.yaml or zero3.yaml"
        )


def share_out(accelerator: Accelerator, unrolled: UnrolledHead, section: TrainSection) -> HeadOnRanks:
    """Give every rank its share of a head, as the launch asked for.

    What comes in stays whole on the main rank; there `HeadOnRanks.whole` brings the trained weights back into it.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from trainers.ranks.zero import ZeroHead  # needs DeepSpeed, which need not be installed

        return ZeroHead(accelerator, unrolled, section)
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return FullyShardedHead(accelerator, unrolled, section)
    return ReplicatedHead(accelerator, unrolled, section)
