"""The loss that training minimises: that of the head's paper, except where the recipe names another."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from headstart.recipes import Recipe
from headstart.recipes.schema import BlockSection, HeadSection


class PaperLoss(NamedTuple):
    """The loss of a paper; fields as in `Objective`."""

    name: str = "soft_cross_entropy"
    weight: float = 1.0
    text_weight: float = 0.0
    regression_weight: float = 0.0
    input_noise: float = 0.0


# By head.kind or the paper that a block head follows.
PAPERS = {
    "eagle1": PaperLoss(weight=0.1, regression_weight=1.0, input_noise=0.2),
    "eagle3": PaperLoss(),
    "medusa": PaperLoss(),
    "dspark": PaperLoss("total_variation", weight=1.8, text_weight=0.1),  # .9 of the L1 distance, which is 2 TV
    "dflash": PaperLoss(weight=0.0, text_weight=1.0),
    "jetspec": PaperLoss(),
}


@dataclass(frozen=True)
class Objective:
    """The named loss, the cross-entropy to the text and a feature regression, each by its weight, summed over weighted
    unroll steps."""

    name: str  # a key of heads.losses.OBJECTIVES
    weight: float
    regression_weight: float
    input_noise: float  # width of the noise on the features at NOISE_LENGTH tokens; 0 for none
    unroll_weights: tuple[float, ...]
    text_weight: float = 0.0

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> "Objective":
        """The recipe's objective; fields that the recipe leaves open are those of the head's paper."""
        train, paper = recipe.train, PAPERS[paper_of(recipe.head)]
        decay = decay_of(recipe.head) if train.unroll_decay is None else train.unroll_decay
        return cls(
            name=train.objective or paper.name,
            weight=paper.weight if train.objective_weight is None else train.objective_weight,
            regression_weight=paper.regression_weight if train.regression_weight is None else train.regression_weight,
            input_noise=paper.input_noise if train.input_noise is None else train.input_noise,
            unroll_weights=tuple(decay**k for k in range(recipe.unroll)),
            text_weight=paper.text_weight,
        )

    @property
    def unroll(self) -> int:
        return len(self.unroll_weights)


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
