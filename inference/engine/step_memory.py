"""The memory that a decode step needs, so that a tree that cannot fit is refused before the system kills it."""

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.filesize import decimal

from headstart.heads.target_config import TargetConfig, locate_target
from headstart.inference.targets.loading import pick_device
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.recipes.schema import DecodeSection

SMALL = 2**30  # bytes; a smaller step is not compared with the free memory
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")  # of Linux


@dataclass(frozen=True)
class StepMemory:
    """The sizes that decide how much memory a decode step needs."""

    cached: int  # bytes of one token in the target's KV cache
    vocab_size: int
    element: int  # bytes of one number

    @classmethod
    def of(cls, target: TargetConfig, dtype: torch.dtype) -> "StepMemory":
        cached = 2 * target.num_layers * target.num_kv_heads * target.head_dim * dtype.itemsize
        return cls(cached, target.vocab_size, dtype.itemsize)

    def needed(self, rows: int, nodes: int, length: int) -> int:
        """Bytes for `rows` texts of up to `length` tokens, each with a tree of `nodes` nodes after it.

        Counted are the cache, the target's logits, its mask, and the product of two matrices that gives the mask.
        """
        of_tree = nodes * (self.vocab_size * self.element + nodes * (self.element + 2 * torch.float32.itemsize))
        return rows * ((length + nodes) * self.cached + of_tree)

    def most_nodes(self, rows: int, length: int, free: int) -> int:
        """The largest tree that fits into `free` bytes."""
        return bisect_right(range(2**31), free, key=lambda nodes: self.needed(rows, nodes, length)) - 1


def refuse_more_than_memory(target: TargetModel, rows: int, nodes: int, length: int) -> None:
    """Raise ValueError if the device lacks memory for a step of `rows` texts with trees of `nodes` nodes."""
    refuse_large_trees(StepMemory.of(target.config, target.dtype), target.device, rows, nodes, length)


def refuse_trees_of(recipe: Recipe, rows: int) -> None:
    """The same for the recipe's trees, from the target's config.json alone."""
    target = TargetConfig.from_folder(locate_target(recipe.target.path, recipe.target.revision, ["config.json"]))
    step = StepMemory.of(target, getattr(torch, recipe.target.dtype))
    device = pick_device(recipe.target.device)
    nodes, width = tree_nodes(recipe.decode), recipe.decode.width
    given = (
        "decode.nodes" if nodes == recipe.decode.nodes + 1 else f"decode.width: {width} given, draft tokens per tree"
    )
    refuse_large_trees(step, device, rows, nodes, recipe.decode.max_new_tokens, given)


def refuse_large_trees(
    step: StepMemory, device: torch.device, rows: int, nodes: int, length: int, given: str = "decode.nodes"
) -> None:
    needed = step.needed(rows, nodes, length)
    if needed < SMALL or needed <= (free := free_memory(device)):
        return
    most = step.most_nodes(rows, length, free)
    texts, fewer = ("1 text", "") if rows == 1 else (f"{rows} texts together", ", or decode fewer texts together")
    raise ValueError(
        f"{given}: {nodes - 1} given, up to {max(most - 1, 0)} is allowed here: a step of {texts} would need "
        f"{decimal(needed)} or more, and {device} has {decimal(free)} free; lower {given.partition(':')[0]}{fewer}"
    )


def tree_nodes(section: DecodeSection) -> int:
    """The nodes of the largest tree that the recipe's drafter proposes, the root included."""
    if section.growth in ("chain", "adaptive"):
        return section.depth + 1
    return max(section.nodes, section.width * section.depth) + 1


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device, as far as the system tells."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    free = figures(MEMINFO)["MemAvailable:"] * 1024 if MEMINFO.is_file() else 2**63
    limit = CGROUP / "memory.max"  # of a container
    if limit.is_file() and (most := limit.read_text().strip()) != "max":
        held = int((CGROUP / "memory.current").read_text()) - figures(CGROUP / "memory.stat")["inactive_file"]
        free = min(free, int(most) - held)
    return free


def figures(path: Path) -> dict[str, int]:
    """The numbers of a file with lines of a name and a number."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}
