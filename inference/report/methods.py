"""The decoding methods that a recipe compares: plain, transformers' own, heads, drafters without training."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headstart.heads.base import DraftHead
from headstart.heads.kinds.checkpoint import new_head
from headstart.inference.core.drafter import Drafter
from headstart.inference.drafters.build import build_drafter, growth_for, growth_from_recipe, load_draft_model
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import GrowthPolicy
from headstart.inference.drafters.repeats import Repeats
from headstart.inference.engine.speculation import SpeculationByLoad, speculation_for
from headstart.inference.generate.loading import OWN_HEAD
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.recipes.values import Baseline

NEED_A_HEAD: tuple[Baseline, ...] = ("chain", "tree", "cost_aware", "repeats", "untrained")  # report.baselines


@dataclass(frozen=True)
class Method:
    """A decoding method of the report; with neither a drafter nor `transformers` it is plain decoding."""

    name: str
    drafter: Drafter | None = None
    speculation: SpeculationByLoad | None = None  # switches drafts off while they do not pay
    transformers: bool = False  # decode with transformers' `generate`
    lookup: int | None = None  # draft tokens per step of transformers' prompt lookup
    assistant: tuple[TargetModel, int] | None = None  # assisted generation: draft model, draft tokens per step

    @property
    def one_prompt_at_a_time(self) -> bool:
        """Does transformers draft? It then refuses batches."""
        return self.lookup is not None or self.assistant is not None


def build_methods(recipe: Recipe, target: TargetModel, heads: Mapping[str, DraftHead]) -> list[Method]:
    """The methods of report.baselines, with plain decoding always among them; a head's rows are repeated for each head.

    The tree has no row if it would repeat the chain's, as on a target that cannot verify trees.
    """
    baselines = recipe.report.baselines
    if "plain" not in baselines:
        baselines = ("plain", *baselines)
    if {"chain", "tree"} <= {*baselines}:
        growth = growth_for(recipe.decode, target)
        if growth.is_chain and not growth.weighs_costs:
            baselines = tuple(each for each in baselines if each != "tree")
    return [method for baseline in baselines for method in methods_of(baseline, recipe, target, heads)]


def methods_of(
    baseline: Baseline, recipe: Recipe, target: TargetModel, heads: Mapping[str, DraftHead]
) -> Iterator[Method]:
    """The methods of one value of report.baselines."""
    if baseline == "untrained":
        trained = heads[OWN_HEAD]
        head = new_head(recipe.head, target.frozen, trained.vocab, recipe.seed).eval().requires_grad_(False)
        growth = growth_of(baseline, OWN_HEAD, recipe, target, trained)  # trees as large as the trained head's
        yield drafting(baseline, head_drafter(head.to(target.device, target.dtype), growth), recipe, target)
    elif baseline in NEED_A_HEAD:
        for name, head in heads.items():
            repeats = Repeats(recipe.decode.repeats) if baseline == "repeats" else None
            drafter = head_drafter(head, growth_of(baseline, name, recipe, target, head), repeats)
            yield drafting(f"{name} {baseline}".strip(), drafter, recipe, target)
    elif baseline == "plain":
        yield Method(baseline)
    elif baseline == "generate":
        yield Method(baseline, transformers=True)
    elif baseline == "generate_lookup":
        yield Method(baseline, transformers=True, lookup=recipe.decode.depth)
    elif baseline == "generate_assisted":
        draft_model = load_draft_model(recipe.decode, recipe.target)
        yield Method(baseline, transformers=True, assistant=(draft_model, recipe.decode.depth))
    else:
        section = recipe.decode.model_copy(update={"drafter": baseline})
        yield drafting(baseline, build_drafter(section, target, recipe.target), recipe, target)


def drafting(name: str, drafter: Drafter, recipe: Recipe, target: TargetModel) -> Method:
    """The method that decodes with this drafter, as chat and server do."""
    return Method(name, drafter, speculation_for(recipe.decode, target, drafter))


def growth_of(baseline: Baseline, name: str, recipe: Recipe, target: TargetModel, head: DraftHead) -> GrowthPolicy:
    """How a head's tree grows, by its row's name or the recipe; a new object each time, since some growths learn."""
    section = recipe.decode
    if name != OWN_HEAD and head.max_levels is not None:
        section = section.model_copy(update={"depth": min(section.depth, head.max_levels)})
    if baseline in ("chain", "cost_aware"):
        section = section.model_copy(update={"growth": baseline})
    return growth_from_recipe(section, target, head)
