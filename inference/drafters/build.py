"""The drafter that a recipe names, made from what it names: a folder, a number of layers, a corpus, or nothing."""

import reprlib
from pathlib import Path

from heads.base import DraftHead
from heads.target_config import locate_target
from inference.drafter import Drafter
from inference.drafters.cost_aware import growth_from_recipe
from inference.drafters.growth import Dynamic, Fixed, Growth
from inference.drafters.head import HeadDrafter
from inference.drafters.lookahead import Lookahead
from inference.drafters.lookup import CorpusLookup, PromptLookup
from inference.drafters.model import EarlyExit, ModelDrafter
from inference.drafters.other_tokenizer import OtherTokenizerDrafter
from inference.drafters.suffix_automaton import SuffixAutomaton
from inference.drafters.trie import Shape
from inference.target.model import TargetModel
from inference.target.tokenizer import load_tokenizer, same_tokenizer
from recipes.jsonl import read_jsonl
from recipes.schema import DecodeSection, TargetSection


def build_drafter(
    section: DecodeSection, target: TargetModel, source: TargetSection, head: DraftHead | None = None
) -> Drafter:
    """`source` is where the target came from; a drafter of kind `head` needs the head.

    Raises ValueError for what does not fit the target.
    """
    if section.drafter == "head":
        assert head is not None
        return HeadDrafter(head, growth_from_recipe(section, target, head))
    if section.drafter == "prompt_lookup":
        return PromptLookup(lookup_shape(section), section.ngram)
    if section.drafter == "suffix":
        if section.corpus is None:
            raise ValueError("decode.corpus: missing; give a JSONL file of texts, or leave out the drafter suffix")
        texts = read_corpus(section.corpus, target.config.vocab_size)
        return CorpusLookup(lookup_shape(section), section.ngram, SuffixAutomaton(texts))
    if section.drafter == "lookahead":
        return Lookahead(section.width, section.depth)
    if section.drafter == "early_exit":
        layers = section.exit_layers or target.config.num_layers // 2
        return EarlyExit(target, layers, model_growth(section))
    return model_drafter(section, target, source)


def load_draft_model(section: DecodeSection, source: TargetSection) -> TargetModel:
    """The recipe's draft model, in the target's number format and place."""
    if section.draft_model is None:
        raise ValueError("decode.draft_model: missing; give a model, or leave out what drafts with one")
    return TargetModel.load(source.model_copy(update={"path": section.draft_model, "revision": None}), ())


def model_drafter(section: DecodeSection, target: TargetModel, source: TargetSection) -> Drafter:
    """A model of the target's tokenizer grows as the recipe says; any other one writes a chain of text."""
    model = load_draft_model(section, source)
    assert section.draft_model is not None
    folder = locate_target(section.draft_model, None)
    own, targets = (load_tokenizer(place) for place in (folder, locate_target(source.path, source.revision)))
    if same_tokenizer(own, targets):
        return ModelDrafter(model, model_growth(section), target)
    return OtherTokenizerDrafter(model, own, targets, section.depth)


def model_growth(section: DecodeSection) -> Growth:
    """The recipe's; one that goes by what was measured of a head gives way to a chain or a dynamic tree."""
    if section.growth == "fixed":
        assert section.paths is not None
        return Fixed(section.paths)
    if section.acceptance == "rejection":
        return Fixed.chain(section.depth)  # in place of a searched tree, too
    if section.growth in ("chain", "adaptive"):
        return Dynamic.chain(section.depth)
    return Dynamic(section.depth, section.width, section.nodes)


def lookup_shape(section: DecodeSection) -> Shape:
    if section.growth in ("chain", "adaptive"):
        return Shape(section.depth, 1, section.depth)
    return Shape(section.depth, section.width, section.nodes)


def read_corpus(path: Path, vocab_size: int) -> list[list[int]]:
    """The texts of a JSONL file, as the prompts and the responses of a run are written.

    Raises ValueError, naming the row, for what is no text of the target's tokens.
    """
    texts: list[list[int]] = []
    for number, row in enumerate(read_jsonl(path), start=1):
        place = f"decode.corpus: row {number} of {path}"
        names = ("tokens",) if "tokens" in row else ("prompt", "response")
        if not row.keys() >= set(names):
            raise ValueError(
                f"{place} has fields {sorted(row)}; tokens are allowed, or prompt and response, as a run writes them"
            )
        text: list[int] = []
        for name in names:
            tokens = row[name]
            if not isinstance(tokens, list):
                raise ValueError(f"{place}: {name} is {reprlib.repr(tokens)}, a list of the target's tokens is allowed")
            for token in tokens:
                if type(token) is not int or not 0 <= token < vocab_size:
                    raise ValueError(
                        f"{place}: {name} holds {token!r}, the target's tokens 0 to {vocab_size - 1} are allowed; was "
                        f"it made with another tokenizer?"
                    )
            text += tokens
        texts.append(text)
    return texts
