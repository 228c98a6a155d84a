"""The rows of a report, from its recipe: plain decoding, transformers' own, heads, and drafters without training."""

from collections.abc import Iterator, Mapping

from heads.base import DraftHead
from heads.checkpoint import new_head
from inference.drafters.build import build_drafter, load_draft_model
from inference.drafters.cost_aware import growth_from_recipe
from inference.drafters.growth import Growth
from inference.drafters.head import HeadDrafter
from inference.inputs import OWN
from inference.report.compare import Way
from inference.target.model import TargetModel
from recipes import Recipe
from recipes.schema import Baseline

OF_HEADS: tuple[Baseline, ...] = ("chain", "tree", "untrained")  # rows that need the recipe's head


def build_ways(recipe: Recipe, target: TargetModel, heads: Mapping[str, DraftHead]) -> list[Way]:
    """A row for each of report.baselines, plain decoding among them; chain and tree once for each head, by its name."""
    named = recipe.report.baselines
    kinds = named if "plain" in named else ("plain", *named)
    return [way for kind in kinds for way in ways_of(kind, recipe, target, heads)]


def ways_of(kind: Baseline, recipe: Recipe, target: TargetModel, heads: Mapping[str, DraftHead]) -> Iterator[Way]:
    if kind == "untrained":
        head = new_head(recipe.head, target.frozen, heads[OWN].vocab, recipe.seed).eval().requires_grad_(False)
        growth = growth_of(kind, OWN, recipe, target, heads[OWN])  # of the same sizes as the trained one's
        yield Way(kind, HeadDrafter(head.to(target.device, target.dtype), growth))
    elif kind in OF_HEADS:
        for name, head in heads.items():
            yield Way(f"{name} {kind}".strip(), HeadDrafter(head, growth_of(kind, name, recipe, target, head)))
    elif kind.startswith("generate"):
        yield transformers_way(kind, recipe)
    elif kind == "plain":
        yield Way(kind)
    else:
        section = recipe.decode.model_copy(update={"drafter": kind})
        yield Way(kind, build_drafter(section, target, recipe.target))


def transformers_way(kind: Baseline, recipe: Recipe) -> Way:
    """`generate`, alone or assisted with as many drafts as our own have levels."""
    depth = recipe.decode.depth
    if kind == "generate_lookup":
        return Way(kind, transformers=True, lookup=depth)
    if kind == "generate_assisted":
        return Way(kind, transformers=True, assistant=(load_draft_model(recipe.decode, recipe.target), depth))
    return Way(kind, transformers=True)


def growth_of(kind: Baseline, name: str, recipe: Recipe, target: TargetModel, head: DraftHead) -> Growth:
    """A chain, or as the recipe says; each way has its own, as one that adapts would learn from the others."""
    section = recipe.decode
    if name != OWN and head.max_levels is not None:
        section = section.model_copy(update={"depth": min(section.depth, head.max_levels)})
    if kind == "chain":
        section = section.model_copy(update={"growth": "chain"})
    return growth_from_recipe(section, target, head)
