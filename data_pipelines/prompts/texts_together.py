"""How many texts of a harvest decode together: data.generate_batch, or as many as fit into memory."""

from rich.filesize import decimal

from headstart.inference.engine.budget import SMALL, StepMemory, free_memory
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe

ROOM = 0.9  # share of the free memory for the texts' cache and logits; passes over prompts need the rest


def longest_sample(recipe: Recipe) -> int:
    return recipe.data.prompt_tokens + recipe.data.response_tokens


def texts_together(recipe: Recipe, target: TargetModel, length: int, nodes: int = 1) -> int:
    """How many texts of up to `length` tokens, with draft trees of `nodes` nodes, decode together.

    It is one at the least, which decoding refuses if not even that fits. All ranks must call this.
    """
    wanted, rooms = recipe.data.generate_batch, []
    for device in dict.fromkeys(target.layout.devices):
        free, needed = max(free_memory(device), SMALL), StepMemory.on(device, target).needed(1, nodes, length)
        rooms.append((int(ROOM * free) // needed, free, needed, device))
    most, free, needed, device = min(rooms, key=lambda room: room[0])
    found = target.ranks.least(max(min(wanted, most), 1))
    if found < wanted and target.ranks.rank == 0:
        print(
            f"data.generate_batch: {wanted} given, {found} decode together, as {device} has {decimal(free)} "
            f"free and a text of {length} tokens needs {decimal(needed)}"
        )
    return found
