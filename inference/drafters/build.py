"""Builds the drafter that a recipe's decode section describes."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from headstart.heads.base import DraftHead
from headstart.heads.calibration import StaticTree
from headstart.heads.kinds.checkpoint import load_head_for
from headstart.heads.target_config import folder_of, locate_target
from headstart.inference.core.drafter import Drafter
from headstart.inference.drafters.cost_measurement import Source, cost_table
from headstart.inference.drafters.costs import CostAware, CostTable
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Fixed, Growth, GrowthPolicy
from headstart.inference.drafters.head import TreeDrafter
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.drafters.repeats import Repeats
from headstart.inference.kernels import is_packed_linear, join_linears
from headstart.inference.targets.attention import fuse_head
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import load_tokenizer, same_tokenizer
from headstart.recipes.schema import DecodeSection, TargetSection
from headstart.recipes.values import DrafterKind


def build_drafter(
    section: DecodeSection, target: TargetModel, source: TargetSection, head: DraftHead | None = None
) -> Drafter:
    """The drafter that `section.drafter` names; `source` is the recipe's section from which the target was loaded.

    The drafter head needs `head`. Raises ValueError for a drafter that does not fit the target.
    """
    if head is not None:
        repeats = Repeats(section.repeats) if section.repeats else None
        return head_drafter(head, growth_from_recipe(section, target, head, section.max_batch), repeats)
    return WITHOUT_A_HEAD[section.drafter](section, target, source)


def growth_for(section: DecodeSection, target: TargetModel, max_levels: int | None = None) -> Growth:
    """The section's growth, or a chain where the target cannot verify trees; one line says so if the recipe asked.

    Raises ValueError for a target that cannot verify drafts.
    """
    growth = Growth.from_section(section, max_levels)
    if target.passes.verifies_trees:
        return growth
    if not target.passes.verifies_drafts:
        raise ValueError(
            f"decode.drafter: {section.drafter} {section.origin('drafter')}, but a {target.config.model_type!r} target "
            f"takes no drafts: in a running text, its pass over several tokens computes other logits than its own "
            f"forward; decode without a drafter"
        )
    chain = growth.as_chain()
    if chain != growth and "growth" in section.model_fields_set and target.ranks.rank == 0:
        why = f"a {target.config.model_type!r} target verifies chains, as {target.passes.why_no_trees}"
        say_once(f"decode.growth: {chain} in place of {growth}: {why}")
    return chain


@cache
def say_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load_drafting_head(folder: Path, target: TargetModel) -> DraftHead:
    """A saved head that drafts for this target, in the target's fast form.

    Rounding float32 weights to half precision may change draft tokens, never the text. Raises as `load_head_for` does.
    """
    head = load_head_for(folder, target.frozen)
    if target.fast_form.is_packed:
        lm_head = target.model.get_output_embeddings()
        is_shared = is_packed_linear(lm_head) and target.frozen.lm_head_bias is None
        head.hold_lm_head(lm_head if is_shared else None)
    target.fast_form.apply_to(head, head.decoder_layers)
    if target.device.type == "cuda":
        join_linears(head)
        fuse_head(head, target.fast_form.fused)
        target.fast_form.choose_products(head)
    return head


def load_costs(decode: DecodeSection, target: TargetModel, drafter: Drafter) -> CostTable | None:
    """Step times by which drafts stop where they do not pay, measured before any request waits for them.

    None for a drafter whose costs cannot be measured.
    """
    if isinstance(drafter, TreeDrafter) and isinstance(drafter.growth, CostAware):
        return drafter.growth.costs
    source = drafter.head if isinstance(drafter, TreeDrafter) and isinstance(drafter.head, DraftHead) else drafter
    if not isinstance(source, Source) or not isinstance(drafter, TreeDrafter | Lookup):
        return None
    return cost_table(target, source, drafter.growth.width, drafter.growth.nodes, decode.max_batch)


def draft_model_folder(section: DecodeSection) -> Path:
    if section.draft_model is None:
        raise ValueError("decode.draft_model: missing; give a model's folder or hub name, or choose another drafter")
    return locate_target(section.draft_model, None, field="decode.draft_model")


def load_draft_model(section: DecodeSection, source: TargetSection) -> TargetModel:
    """The recipe's draft model, in the target's dtype and on its device."""
    draft_model_folder(section)
    changes = {"path": section.draft_model, "revision": None}
    if source.split == "layers":  # the head's part of the cache is on one device, and the model is small enough for it
        changes["split"] = None
    return TargetModel.load(source.model_copy(update=changes), ())


def model_drafter(section: DecodeSection, target: TargetModel, source: TargetSection) -> Drafter:
    """A drafter for the recipe's draft model. Raises ValueError for one with another tokenizer than the target's."""
    growth = growth_for(section, target)
    model, folder = load_draft_model(section, source), draft_model_folder(section)
    if not same_tokenizer(load_tokenizer(folder), load_tokenizer(folder_of(source))):
        raise ValueError(
            f"decode.draft_model: {section.draft_model} has another tokenizer than {source.path}, the target's is "
            f"allowed; choose a smaller model of the target's own family"
        )
    return ModelDrafter(model, growth.policy(), target)


def lookup(section: DecodeSection, target: TargetModel, source: TargetSection) -> Drafter:
    return Lookup(growth_for(section, target))


WITHOUT_A_HEAD: dict[DrafterKind, Callable[[DecodeSection, TargetModel, TargetSection], Drafter]] = {
    "draft_model": model_drafter,
    "prompt_lookup": lookup,
}


def growth_from_recipe(section: DecodeSection, target: TargetModel, head: DraftHead, batch: int = 1) -> GrowthPolicy:
    """The recipe's growth for a head. Cost-aware policies measure this target and head, unless an earlier run did.

    `batch` is the number of rows that will be decoded together, if that is known.
    """
    growth = growth_for(section, target, head.max_levels)
    if growth.is_searched:
        return Fixed(searched_tree(head).best(growth.nodes))
    if not growth.weighs_costs:
        return growth.policy()
    costs = cost_table(target, head, growth.width, growth.nodes, batch)
    return CostAware(growth.depth, growth.width, growth.nodes, costs)


def searched_tree(head: DraftHead) -> StaticTree:
    if head.calibration.tree is None:
        raise ValueError(
            "decode.growth: searched given, which is allowed for a head with a fitted tree; fit one with headstart "
            "calibrate RECIPE, or choose another growth, such as dynamic"
        )
    return head.calibration.tree
