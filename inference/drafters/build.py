"""Builds the drafter that a recipe's decode section describes."""

import reprlib
import sys
from functools import cache
from pathlib import Path
from typing import Any

from headstart.common.files import read_jsonl
from headstart.heads.base import DraftHead
from headstart.heads.calibration import StaticTree
from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.checkpoint import load_head_for
from headstart.heads.target_config import folder_of, locate_target
from headstart.inference.core.drafter import Drafter
from headstart.inference.drafters.block import head_drafter
from headstart.inference.drafters.cost_measurement import cost_table
from headstart.inference.drafters.costs import CostAware, CostAwareShape, Costly, CostTable
from headstart.inference.drafters.growth import Dynamic, Fixed, Growth
from headstart.inference.drafters.head import TreeDrafter
from headstart.inference.drafters.lookup import Lookup, SuffixAutomaton
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.drafters.repeats import Repeats, TreeLimits
from headstart.inference.kernels import is_packed_linear, join_linears
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import load_tokenizer, same_tokenizer
from headstart.recipes.schema import DecodeSection, TargetSection


def build_drafter(
    section: DecodeSection, target: TargetModel, source: TargetSection, head: DraftHead | None = None
) -> Drafter:
    """The drafter that `section.drafter` names; `source` is the recipe's section from which the target was loaded.

    The drafter head needs `head`. Raises ValueError for a drafter that does not fit the target.
    """
    section = fitting(section, target)
    if section.drafter == "head":
        assert head is not None
        repeats = Repeats(section.repeats) if section.repeats else None
        return head_drafter(head, growth_from_recipe(section, target, head, section.max_batch), repeats)
    if section.drafter == "prompt_lookup":
        return Lookup(lookup_limits(section))
    if section.drafter == "suffix":
        if section.corpus is None:
            raise ValueError("decode.corpus: missing; give a JSONL file of texts, or choose another decode.drafter")
        texts = read_corpus(section.corpus, target.config.vocab_size)
        return Lookup(lookup_limits(section), SuffixAutomaton(texts))
    return model_drafter(section, target, source)


def fitting(section: DecodeSection, target: TargetModel) -> DecodeSection:
    """The section with a growth that the target can verify; one line says so if the recipe asks for another.

    Raises ValueError for a target that takes no drafts.
    """
    if target.passes.verifies_trees:
        return section
    if not target.passes.verifies_drafts:
        raise ValueError(
            f"decode.drafter: {section.drafter} given, but a {target.config.model_type!r} target takes no drafts: "
            f"after a text's beginning, its pass over several tokens computes other logits than its own forward; "
            f"decode without a drafter"
        )
    if section.growth == "chain" or (section.growth == "cost_aware" and section.width == 1):
        return section
    chain: dict[str, Any] = {"growth": "chain"}
    shape = "chain"
    if section.growth in ("cost_aware", "searched_cost_aware"):
        nodes = min(section.nodes, section.depth)
        chain, shape = {"growth": "cost_aware", "width": 1, "nodes": nodes}, "cost_aware of width 1"
    if "growth" in section.model_fields_set and target.ranks.rank == 0:
        why = f"a {target.config.model_type!r} target verifies chains, as {target.passes.why_no_trees}"
        say_once(f"decode.growth: {shape} in place of {section.growth}: {why}")
    return section.model_copy(update=chain)


@cache
def say_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load_drafting_head(folder: Path, target: TargetModel) -> DraftHead:
    """A saved head that drafts for this target, in the target's fast form. Raises the errors of `load_head_for`."""
    head = load_head_for(folder, target.frozen)
    if target.fast_form.is_packed and isinstance(head, BlockHead):
        lm_head = target.model.get_output_embeddings()
        is_shared = is_packed_linear(lm_head) and target.frozen.lm_head_bias is None
        head.hold_lm_head(lm_head if is_shared else None)
    target.fast_form.apply_to(head, head.decoder_layers)
    if target.device.type == "cuda":
        join_linears(head)
    return head


def load_costs(decode: DecodeSection, target: TargetModel, drafter: Drafter) -> CostTable | None:
    """Step times by which a head stops drafting where that does not pay, measured before any request waits for them."""
    if not isinstance(drafter, TreeDrafter) or not isinstance(drafter.head, DraftHead):
        return None
    if isinstance(drafter.growth, Costly):  # its own table, which its steps correct
        return drafter.growth.watch.costs
    return cost_table(target, drafter.head, drafter.growth.width, drafter.growth.nodes, decode.max_batch)


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
    model, folder = load_draft_model(section, source), draft_model_folder(section)
    if not same_tokenizer(load_tokenizer(folder), load_tokenizer(folder_of(source))):
        raise ValueError(
            f"decode.draft_model: {section.draft_model} has another tokenizer than {source.path}, the target's is "
            f"allowed; choose a smaller model of the target's own family"
        )
    return ModelDrafter(model, model_growth(section), target)


def model_growth(section: DecodeSection) -> Growth:
    """The recipe's growth for a drafter without measured costs: a chain or a dynamic tree."""
    if section.acceptance == "rejection":
        return Fixed.chain(section.depth)  # rejection sampling needs a fixed shape
    if section.growth == "chain":
        return Dynamic.chain(section.depth)
    return Dynamic(section.depth, section.width, section.nodes)


def depth_for(section: DecodeSection, head: DraftHead) -> int:
    """The section's depth; where it is a default that nobody chose, no more than the head can draft."""
    if head.max_levels is None or "depth" in section.model_fields_set:
        return section.depth
    return min(section.depth, head.max_levels)


def growth_from_recipe(section: DecodeSection, target: TargetModel, head: DraftHead, batch: int = 1) -> Growth:
    """The recipe's growth for a head. Cost-aware policies measure this target and head, unless an earlier run did.

    `batch` is the number of rows that will be decoded together, if that is known.
    """
    section = fitting(section, target).model_copy(update={"depth": depth_for(section, head)})
    if section.growth == "searched":
        return Fixed(searched_tree(head).best(section.nodes))
    if section.growth == "searched_cost_aware":
        tree, costs = searched_tree(head), cost_table(target, head, section.width, section.nodes, batch)
        return CostAwareShape(tree, section.nodes, costs)
    if section.growth == "cost_aware":
        costs = cost_table(target, head, section.width, section.nodes, batch)
        return CostAware(section.depth, section.width, section.nodes, costs)
    return model_growth(section)


def searched_tree(head: DraftHead) -> StaticTree:
    if head.calibration.tree is None:
        raise ValueError(
            "decode.growth: searched given, which is allowed for a head with a fitted tree, and this head has none; "
            "fit one with headstart calibrate RECIPE, or choose another growth, such as dynamic"
        )
    return head.calibration.tree


def lookup_limits(section: DecodeSection) -> TreeLimits:
    """How large the trees of a lookup may grow under the recipe."""
    if section.growth == "chain":
        return TreeLimits(section.depth, 1, section.depth)
    return TreeLimits(section.depth, section.width, section.nodes)


def read_corpus(path: Path, vocab_size: int) -> list[list[int]]:
    """The texts of a JSONL file whose rows hold token ids, in the format of a run's prompts or responses.

    Raises ValueError, naming the row, for a row that is not a text in the target's tokens.
    """
    if not path.is_file():
        raise ValueError(
            f"decode.corpus: {path} is missing; a JSONL file of texts in the target's tokens is allowed, such as "
            f"RUN_DIR/prompts/train.jsonl of a run"
        )
    texts: list[list[int]] = []
    for number, row in enumerate(read_jsonl(path), start=1):
        place = f"decode.corpus: row {number} of {path}"
        names = ("tokens",) if "tokens" in row else ("prompt", "response")
        if not row.keys() >= set(names):
            raise ValueError(
                f"{place}: fields {sorted(row)} given, tokens or prompt and response are allowed, as a run writes them"
            )
        texts.append([token for name in names for token in read_tokens(f"{place}: {name}", row[name], vocab_size)])
    return texts


def read_tokens(place: str, given: Any, vocab_size: int) -> list[int]:
    if not isinstance(given, list):
        raise ValueError(f"{place} is {reprlib.repr(given)}, a list of the target's token ids is allowed")
    for token in given:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(
                f"{place} holds {token!r}, token ids 0 to {vocab_size - 1} of the target are allowed; encode the text "
                f"with the target's tokenizer"
            )
    return given
