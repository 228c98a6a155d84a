"""How the ranks of a launch work with a target: each with one of its own, or all with one that no rank could hold.

way               what a rank holds                          passes over the target
(none)            all of it                                  its own, whenever it likes
target.tp_plan    a part of every layer                      all ranks compute every pass; the first one leads
target.zero_stage a slice of every weight, gathered for      its own, but all ranks make equally many
                  the moment that its layer computes
"""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.integrations import HfDeepSpeedConfig

from recipes.schema import TargetSection

Asked = ParamSpec("Asked")
Found = TypeVar("Found")
Item = TypeVar("Item")


class Ranks:
    """The ranks of a launch, or the one process that there is; each has a whole target."""

    may_capture = True  # a pass as a CUDA graph

    def __init__(self) -> None:
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    @property
    def num_workers(self) -> int:
        """How many of them have work of their own."""
        return self.count

    def share(self, work: Sequence[Item]) -> Sequence[Item]:
        """This rank's part of the work."""
        return work[self.rank :: self.count]

    def carry_out(self, ask: Callable[Asked, Found], work: Callable[[Callable[Asked, Found]], None]) -> None:
        """Do this rank's work, which is given a function to call in place of `ask`; all ranks must enter.

        Nothing but `ask` may use the target, and nothing within may wait for other ranks.
        """
        work(ask)


class TensorParallel(Ranks):
    """All ranks compute every pass together: what the first one asks for, the others ask for too.

    They know of the work only what they are told, so it does not matter what they see of its files.
    """

    may_capture = False

    @property
    def num_workers(self) -> int:
        return 1

    def share(self, work: Sequence[Item]) -> Sequence[Item]:
        return work if self.rank == 0 else work[:0]

    def carry_out(self, ask: Callable[Asked, Found], work: Callable[[Callable[Asked, Found]], None]) -> None:
        def lead(*args: Asked.args, **kwargs: Asked.kwargs) -> Found:
            told((args, kwargs))
            return ask(*args, **kwargs)

        if self.rank == 0:
            work(lead)
            told(None)
        else:
            while (asked := told(None)) is not None:
                args, kwargs = asked
                ask(*args, **kwargs)


class ZeroSlices(Ranks):
    """Every pass gathers its weights from all ranks, so that all of them must make it: who is done goes on for them."""

    may_capture = False

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.engine = engine  # its hooks gather the weights; it takes them away when it goes
        self.model: nn.Module = engine.module
        self.is_working = False
        # Before DeepSpeed's own hook, which begins to gather.
        self.model.register_forward_pre_hook(self._announce, prepend=True)

    def carry_out(self, ask: Callable[Asked, Found], work: Callable[[Callable[Asked, Found]], None]) -> None:
        self.is_working = True
        work(ask)
        self.is_working = False
        with torch.no_grad():
            while self._somebody_works():
                self.model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.engine.device), use_cache=False)

    def _announce(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self.is_working:
            self._somebody_works()

    def _somebody_works(self) -> bool:
        """Before each pass of a rank that works, and each that one makes for the others."""
        working: Tensor = torch.tensor(float(self.is_working), device=self.engine.device)
        dist.all_reduce(working)
        return bool(working)


def told(asked: Any) -> Any:
    """What the first rank says, on all of them."""
    message = [asked]
    dist.broadcast_object_list(message, src=0)
    return message[0]


def load_over_ranks(
    section: TargetSection, config: PreTrainedConfig, load: Callable[..., PreTrainedModel]
) -> tuple[PreTrainedModel, Ranks]:
    """One model for all ranks together, on the device of each; raises ValueError where it cannot be split.

    `load` is from_pretrained with all that has nothing to do with ranks.
    """
    if section.zero_stage is not None:
        return load_zero_slices(section, load)
    refuse_split(config.get_text_config(), Ranks().count)
    return load(distributed_config=DistributedConfig(tp_plan=section.tp_plan)), TensorParallel()


def refuse_split(config: PreTrainedConfig, count: int) -> None:
    """Raises ValueError for a model that transformers has no plan for, or whose heads do not come out even."""
    if config.base_model_tp_plan is None:
        raise ValueError(
            f"target.tp_plan: auto given, transformers has no plan for a {config.model_type!r} model; choose "
            "target.zero_stage 3 or target.device_map auto"
        )
    sizes = config.to_dict()
    heads = sizes["num_attention_heads"], sizes.get("num_key_value_heads") or sizes["num_attention_heads"]
    if any(number % count for number in heads):
        raise ValueError(
            f"target.tp_plan: auto given, {count} ranks cannot share {heads[0]} attention heads and {heads[1]} of keys "
            "and values; launch a divisor of both, or choose target.zero_stage 3"
        )


def load_zero_slices(section: TargetSection, load: Callable[[], PreTrainedModel]) -> tuple[PreTrainedModel, Ranks]:
    try:
        import deepspeed
    except ImportError as error:
        raise ValueError("target.zero_stage: 3 given, which needs DeepSpeed; pip install -e .[deepspeed]") from error
    config = {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": section.dtype == "bfloat16"},
        "fp16": {"enabled": section.dtype == "float16"},
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed asks for it and only counts with it
    }
    slicing = HfDeepSpeedConfig(config)  # while it lives, transformers slices what it loads
    model = load()
    del slicing
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return model, ZeroSlices(engine)
