"""How the ranks (processes) of a launch use the target: each has its own, or all share one.

target.split  what a rank holds        forward passes of the target
null, layers  the whole model          each rank runs its own, independently
tensor        a part of every layer    all ranks compute every pass; rank 0 decides which
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from transformers import PreTrainedConfig

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Item = TypeVar("Item")


class Ranks:
    """The ranks of a launch, each with its own target; without a launch, this process is the only rank."""

    may_capture = True  # can a forward pass be captured as a CUDA graph?
    in_step = False  # do all ranks compute every pass together?

    def __init__(self) -> None:
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def share(self, work: Sequence[Item]) -> Sequence[Item]:
        """This rank's part of the work."""
        return work[self.rank :: self.count]

    def carry_out(
        self, run_target: Callable[Arguments, Result], work: Callable[[Callable[Arguments, Result]], None]
    ) -> None:
        """Call `work` with a function that it must use in place of `run_target`. All ranks must call this.

        Within `work`, only that function may use the target, and nothing may wait for other ranks.
        """
        work(run_target)

    def agreed(self, value: Item) -> Item:
        """One value for all ranks, from each rank's own, such as times. All ranks must call this."""
        return value

    def least(self, value: int) -> int:
        """The minimum over ranks, such as rows that fit. All ranks must call this."""
        return value


class TensorParallel(Ranks):
    """All ranks compute every forward pass together: rank 0 does the work and broadcasts the arguments of each pass.

    The other ranks only repeat these passes, so they need not see the files that the work reads.
    """

    may_capture, in_step = False, True

    def share(self, work: Sequence[Item]) -> Sequence[Item]:
        return work if self.rank == 0 else work[:0]

    def carry_out(
        self, run_target: Callable[Arguments, Result], work: Callable[[Callable[Arguments, Result]], None]
    ) -> None:
        def run_on_all(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            broadcast((args, kwargs))
            return run_target(*args, **kwargs)

        if self.rank == 0:
            work(run_on_all)
            broadcast(None)  # the work is done
        else:
            while (message := broadcast(None)) is not None:
                args, kwargs = message
                result = run_target(*args, **kwargs)
                if isinstance(result, Iterator):  # it runs the target only while it is read
                    deque(result, maxlen=0)

    def agreed(self, value: Item) -> Item:
        """Rank 0's value."""
        return broadcast(value)

    def least(self, value: int) -> int:
        every = [value] * self.count
        dist.all_gather_object(every, value)
        return min(every)


def broadcast(message: Any) -> Any:
    """The message of rank 0, on every rank."""
    messages = [message]
    dist.broadcast_object_list(messages, src=0)
    return messages[0]


def refuse_split(config: PreTrainedConfig, count: int) -> None:
    """Raise ValueError if transformers has no plan to split the model, or `count` does not divide its heads."""
    if config.base_model_tp_plan is None:
        raise ValueError(
            f"target.split: tensor given, transformers has no plan for a {config.model_type!r} model; choose layers, "
            "and launch a single process"
        )
    sizes = config.to_dict()
    heads = sizes["num_attention_heads"], sizes.get("num_key_value_heads") or sizes["num_attention_heads"]
    if any(number % count for number in heads):
        raise ValueError(
            f"target.split: tensor given, {count} ranks cannot share {heads[0]} attention heads and {heads[1]} key and "
            "value heads evenly; launch a number of ranks that divides both"
        )
