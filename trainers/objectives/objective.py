"""The loss that training minimises: that of the head's paper, except where the recipe names another."""

import math
from dataclasses import dataclass, replace
from typing import Any

from headstart.recipes import Recipe
from headstart.recipes.schema import BlockSection, HeadSection


@dataclass(frozen=True)
class Objective:
    """The named loss, a feature regression and the cross-entropy to the text, each by its weight, summed over weighted
    unroll steps."""

    name: str = "soft_cross_entropy"  # a key of heads.losses.OBJECTIVES
    weight: float = 1.0
    regression_weight: float = 0.0
    input_noise: float = 0.0  # width of the noise on the features at NOISE_LENGTH tokens; 0 for none
    unroll_weights: tuple[float, ...] = ()
    text_weight: float = 0.0

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> "Objective":
        """The objective of the head's paper, with the fields that the recipe gives."""
        train = recipe.train
        given = {
            "name": train.objective,
            "weight": train.objective_weight,
            "regression_weight": train.regression_weight,
            "input_noise": train.input_noise,
        }
        decay = decay_of(recipe.head) if train.unroll_decay is None else train.unroll_decay
        weights = tuple(decay**k for k in range(recipe.unroll))
        chosen: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
        return replace(PAPERS[paper_of(recipe.head)], unroll_weights=weights, **chosen)

    @property
    def unroll(self) -> int:
        return len(self.unroll_weights)


PAPERS = {  # by head.kind, or by the paper that a block head follows
    "eagle1": Objective(weight=0.1, regression_weight=1.0, input_noise=0.2),
    "eagle3": Objective(),
    "medusa": Objective(),
    "dspark": Objective("total_variation", weight=1.8, text_weight=0.1),  # .9 of the L1 distance, which is 2 TV
    "dflash": Objective(weight=0.0, text_weight=1.0),
    "jetspec": Objective(),
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
