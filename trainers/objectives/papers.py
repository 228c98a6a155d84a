"""The losses of the papers, which a recipe gets where it names no other."""

import math
from typing import NamedTuple

from headstart.recipes.schema import BlockSection, HeadSection


class Weights(NamedTuple):
    """The loss of a paper."""

    name: str = "soft_cross_entropy"
    objective: float = 1.0
    text: float = 0.0
    regression: float = 0.0
    input_noise: float = 0.0


# By head.kind or the paper that a block head follows.
PAPERS = {
    "eagle1": Weights(objective=0.1, regression=1.0, input_noise=0.2),
    "eagle3": Weights(),
    "medusa": Weights(),
    "dspark": Weights("total_variation", objective=1.8, text=0.1),  # .9 of the L1 distance, which is 2 TV
    "dflash": Weights(objective=0.0, text=1.0),
    "jetspec": Weights(),
}


def paper_of(section: HeadSection) -> str:
    """The paper whose loss a head is trained with by default."""
    if not isinstance(section, BlockSection):
        return section.kind
    if section.markov_rank:
        return "dspark"
    return "jetspec" if section.causal else "dflash"


def decay_of(section: HeadSection) -> float:
    """The weight of an unroll step relative to the one before; DFlash's decay is slower for larger blocks."""
    if not isinstance(section, BlockSection):
        return 0.8
    slots = 4 if section.block_size <= 8 else 5 if section.block_size <= 10 else 7
    return math.exp(-1 / slots)
