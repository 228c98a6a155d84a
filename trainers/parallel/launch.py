"""The launch of `accelerate launch`: its ranks, how they hold the head, and the recipes that it cannot train.

Parallelism belongs to the launch (recipes/launch/), not to the recipe: a checkpoint of one launch fits every other.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType, InitProcessGroupKwargs, parse_flag_from_env

from headstart.common.errors import wrong_value
from headstart.common.process import refuse_separate_processes
from headstart.data_pipelines.stages.shard_work import RANK_TIMEOUT
from headstart.recipes import Recipe
from headstart.recipes.schema_train import TrainSection
from headstart.trainers.objectives.unrolled import HeadInTraining
from headstart.trainers.parallel.head_on_ranks import FullyShardedHead, HeadOnRanks, ReplicatedHead, ranks_of_a_machine

ACCELERATE_PRECISION = {"float32": "no", "bfloat16": "bf16"}  # train.precision -> its name there


def start_accelerator(recipe: Recipe) -> Accelerator:
    """Join the ranks of the launch; raises ValueError if it contradicts the recipe or cannot do what that asks for."""
    refuse_contradiction(recipe.train)
    on_cpu = not torch.accelerator.is_available()
    process_group = InitProcessGroupKwargs(timeout=RANK_TIMEOUT)
    if on_cpu and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        # With cpu=True accelerate would not start DeepSpeed.
        on_cpu, process_group = False, InitProcessGroupKwargs(backend="gloo", timeout=RANK_TIMEOUT)
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=[process_group])
    if is_deepspeed(accelerator):
        refuse_muon(recipe.train, "DeepSpeed")
        refuse_deepspeed(accelerator.state.deepspeed_plugin)
        # While this exists, transformers shards every model it loads, also the target that only the main rank loads
        # to decode with; it would wait for the other ranks forever.
        accelerator.state.deepspeed_plugin.dschf = None
    elif is_fsdp():
        refuse_muon(recipe.train, "FSDP2")
    if recipe.joint.mode is not None:
        refuse_for_joint(recipe.joint.mode, accelerator)
    refuse_separate_processes(accelerator.num_processes)
    return accelerator


def is_fsdp() -> bool:
    return parse_flag_from_env("ACCELERATE_USE_FSDP")


def is_deepspeed(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def ranks_of_a_copy(accelerator: Accelerator) -> int:
    """The ranks that hold the head together."""
    if is_fsdp():
        return ranks_of_a_machine(accelerator)
    return accelerator.num_processes if is_deepspeed(accelerator) else 1


def distribute_head(accelerator: Accelerator, unrolled: HeadInTraining, section: TrainSection) -> HeadOnRanks:
    """Put a head on the ranks as the launch asked for; `HeadOnRanks.whole` copies the weights back into `unrolled`."""
    if is_deepspeed(accelerator):
        from headstart.trainers.parallel.zero import ZeroHead  # DeepSpeed is an extra and may not be installed

        return ZeroHead(accelerator, unrolled, section)
    if is_fsdp():
        return FullyShardedHead(accelerator, unrolled, section)
    return ReplicatedHead(accelerator, unrolled, section)


def refuse_contradiction(section: TrainSection) -> None:
    """Raise ValueError if the launch sets another precision or accumulation than the recipe."""
    precision, accumulate = ACCELERATE_PRECISION[section.precision], str(section.micro_batches)
    for given, option, off, same in (
        (f"train.precision: {section.precision}", "mixed_precision", "no", precision),
        (f"train.accumulate: {accumulate}", "gradient_accumulation_steps", "1", accumulate),
    ):
        if (launched := os.environ.get(f"ACCELERATE_{option.upper()}", off)) not in (off, same):
            configured = f"--{option} {launched} of accelerate launch (or {option} in its configuration)"
            raise ValueError(f"{given} in the recipe contradicts {configured}; drop the latter")


def refuse_muon(section: TrainSection, sharding: str) -> None:
    """Raise ValueError if Muon, which needs whole matrices, should train slices of them."""
    if section.optimizer == "muon":
        remedy = f"{sharding} slices the weights: choose adamw, or launch with recipes/launch/ddp.yaml or one.yaml"
        raise wrong_value("train.optimizer", "muon", "only adamw is", remedy)


def refuse_for_joint(mode: str, accelerator: Accelerator) -> None:
    """Raise ValueError unless one process trains the target, with nothing sharded."""
    sharded = is_fsdp() or is_deepspeed(accelerator)
    if accelerator.num_processes > 1 or sharded:
        launched = "FSDP2 or DeepSpeed" if sharded else f"{accelerator.num_processes} processes"
        raise wrong_value("joint.mode", mode, f"only null under {launched} is", "launch with recipes/launch/one.yaml")


def refuse_deepspeed(plugin: DeepSpeedPlugin) -> None:
    """Raise ValueError for DeepSpeed settings that no test has shown to train the same head."""
    offloaded = {plugin.offload_optimizer_device, plugin.offload_param_device} - {None, "none"}
    if plugin.zero_stage not in (2, 3) or offloaded:
        raise ValueError(
            f"the launch asks DeepSpeed for stage {plugin.zero_stage}, offloading to {sorted(offloaded) or 'nothing'}; "
            "stage 2 or 3 without offloading is allowed: take recipes/launch/zero2.yaml or zero3.yaml"
        )


def refuse_lone_decoding(recipe: Recipe, num_ranks: int) -> None:
    """Raise ValueError if the main rank should decode alone with a target that all ranks hold together."""
    if recipe.target.split == "tensor" and recipe.train.eval_prompts and num_ranks > 1:
        allowed = f"only 0 with target.split tensor on {num_ranks} ranks is"
        remedy = "the main rank decodes alone: write 0, or train in one process with split layers"
        raise wrong_value("train.eval_prompts", recipe.train.eval_prompts, allowed, remedy)
