"""Laws of constrained output: every text that ends is valid, and drafts change none of it."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import verified
from matrix import slow
from scripted import noisy_copy, paths
from tiny_run import build_target, build_tokenizer
from transformers import PreTrainedTokenizerBase

from headstart.heads.kinds.checkpoint import new_head
from headstart.heads.target_config import TargetConfig
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.cache import KVCache
from headstart.inference.core.constraint import Constraint, GuardedState, NoWayOnError
from headstart.inference.core.drafter import Drafter
from headstart.inference.core.request import Generation, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic, Growth
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.engine.loop import generate_batch, loop_of
from headstart.inference.generate.text_rules import TextRules
from headstart.inference.serve.api.constraints import Grammar, Grammars
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import TargetSection
from headstart.recipes.schema_heads import BlockSection, Eagle3Section

KINDS = {"enum": ["cat", "catfish", "dog"]}
SCHEMA = {
    "type": "object",
    "properties": {"kind": KINDS, "age": {"type": "integer", "minimum": 0, "maximum": 99}, "tame": {"type": "boolean"}},
    "required": ["kind", "age", "tame"],
    "additionalProperties": False,
}
DIGITS = r"[0-9]{1,3}(-[0-9]{2}){2}"
GROWTH = Dynamic(4, 3, 12)
LIMITS = Growth(depth=5, width=3, nodes=12)
VOCABULARY = build_tokenizer().get_vocab()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder: Path = build_target(tmp_path_factory.mktemp("constrained"), num_layers=2)
    taps = TargetConfig.from_folder(folder).default_taps()
    return TargetModel.load(TargetSection(path=str(folder), dtype="float32", device="cpu"), taps)


@pytest.fixture(scope="module")
def grammars(target: TargetModel) -> Grammars:
    return Grammars(build_tokenizer(), target.config.vocab_size, [0])


@pytest.fixture(scope="module")
def requests(grammars: Grammars) -> list[Request]:
    """Two of a schema, one of a regular expression, and one that is free."""
    schema, digits = grammars.json_schema(SCHEMA), grammars.regex(DIGITS)
    return [
        Request([5, 6, 7], 60, Sampling(), constraint=schema, end_tokens=(0,)),
        Request([9, 8], 60, Sampling(1.0, seed=3), constraint=schema, end_tokens=(0,), logprobs=True),
        Request([11] * 20, 30, Sampling(0.8, top_p=0.9, seed=4), constraint=digits, end_tokens=(0,)),
        Request([12, 13], 12, Sampling(1.0, seed=5)),
    ]


def head_of(target: TargetModel, vocab: DraftVocab | None = None) -> Any:
    full = DraftVocab.full(target.config.vocab_size)
    return new_head(Eagle3Section(kind="eagle3"), target.frozen, vocab or full, seed=1).eval().requires_grad_(False)


def text(tokens: list[int]) -> str:
    return str(build_tokenizer().decode([token for token in tokens if token]))


def assert_valid(request: Request, tokens: list[int]) -> None:
    assert tokens[-1] == 0
    if len(request.prompt) == 20:
        assert re.fullmatch(DIGITS, text(tokens))
    else:
        found = json.loads(text(tokens))
        assert found.keys() == {"kind", "age", "tame"}
        assert found["kind"] in ("cat", "catfish", "dog")
        assert 0 <= found["age"] <= 99


@pytest.fixture(scope="module")
def ruled(target: TargetModel, requests: list[Request]) -> list[Request]:
    """`requests`, one that text rules constrain, and one with the same rules and a schema."""
    size = target.config.vocab_size
    rules = TextRules((9, 8), size, 20, (0,), min_new_tokens=13, no_repeat_ngram_size=2, forced_eos=0)
    free = Request([9, 8], 20, Sampling(0.3, seed=3), end_tokens=(0,), constraint=rules)
    return [*requests, free, replace(requests[1], constraint=replace(rules, grammar=requests[1].constraint))]


@pytest.fixture(scope="module")
def plain(target: TargetModel, ruled: list[Request]) -> list[Generation]:
    return generate_batch(target, ruled, None, 4)


@pytest.mark.each_value
@pytest.mark.parametrize("name", [slow("head"), "head of 40 tokens", "draft model", slow("prompt lookup")])
@pytest.mark.parametrize("static", [False, True])
def test_constrained_texts_are_valid_and_the_same_with_drafts(target, ruled, plain, name, static) -> None:
    size = target.config.vocab_size
    vocab = DraftVocab(torch.arange(0, size, size // 40), size)
    drafters: dict[str, Drafter] = {
        "head": HeadDrafter(head_of(target), GROWTH),
        "head of 40 tokens": HeadDrafter(head_of(target, vocab), GROWTH),
        "draft model": ModelDrafter(noisy_copy(target, 0.03), GROWTH, target),
        "prompt lookup": Lookup(LIMITS),
    }
    found = generate_batch(target, ruled, drafters[name], 4, static)
    assert [each.tokens for each in found] == [each.tokens for each in plain]
    for request, each in zip(ruled[:3], found, strict=False):
        assert each.finish == "end"
        assert_valid(request, each.tokens)
    assert plain[3].tokens == generate_batch(target, [ruled[3]])[0].tokens
    written = (9, 8, *plain[4].tokens)
    assert len({*pairwise(written)}) == len(written) - 1 >= 14
    assert written[-1] == 0
    assert_valid(ruled[1], plain[5].tokens)
    # Log-probabilities are the target's own, without the constraint.
    logprobs: Any = plain[1].logprobs
    logits = target.passes.forward(torch.tensor([[9, 8, *plain[1].tokens]])).logits[0, 1:-1].log_softmax(-1)
    wanted = logits.gather(1, torch.tensor(plain[1].tokens).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(logprobs), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["head without these tokens", "block head without these tokens", "lookup"])
def test_the_only_way_on_is_drafted_and_accepted(target: TargetModel, grammars: Grammars, name: str) -> None:
    """Also by a head that does not score the tokens that the grammar forces, and by lookup, which saw no such text."""
    size = target.config.vocab_size
    digits = {token for text, token in VOCABULARY.items() if any(map(str.isdigit, text))}
    others = DraftVocab(torch.tensor([token for token in range(size) if token not in digits]), size)
    section = BlockSection(kind="block", block_size=5, markov_rank=6, taps=target.taps)
    block_head = new_head(section, target.frozen, others, seed=1).eval()
    drafters: dict[str, Drafter] = {
        "head without these tokens": HeadDrafter(head_of(target, others), Dynamic.chain(4)),
        "block head without these tokens": head_drafter(block_head.requires_grad_(False), Dynamic.chain(4)),
        "lookup": Lookup(Growth(depth=4, width=3, nodes=12)),
    }
    request = Request([5, 6], 40, constraint=grammars.regex("9876543210" * 3), end_tokens=(0,))
    found = generate_batch(target, [request], drafters[name])[0]
    assert text(found.tokens) == "9876543210" * 3
    assert found.stats.acceptance_length > 4


def test_lookup_proposes_nothing_that_the_grammar_refuses(target: TargetModel, grammars: Grammars) -> None:
    """The text goes on with `9a` in one place and with `98-7` in another; after two digits a dash is forced.

    root - 9 - 8 - dash
    """
    x, a, nine, eight, seven, dash = (VOCABULARY[letter] for letter in "xa987-")
    before = [x, nine, a, a, x, nine, eight, seven, x]
    free = verified(target, Sampling(), (0, len(before) - 1), texts=[before])
    constrained = replace(free, rows=[replace(free.rows[0], constraint=started(grammars.regex("[0-9]{2}-[a-z]+")))])
    lookup, cache = Lookup(LIMITS, ngram=2), KVCache.allocate((1, 1, 1), None, 1)
    assert paths(lookup.draft(free, cache))[0] >= {(nine, a), (nine, eight, seven)}
    assert paths(lookup.draft(constrained, cache))[0] == {(nine,), (nine, eight), (nine, eight, dash)}


def test_a_text_may_end_only_where_the_grammar_does(target: TargetModel, grammars: Grammars) -> None:
    state, (a, b, c) = started(grammars.regex("ab?")), (VOCABULARY[letter] for letter in "abc")
    assert not state.allowed(())[0]
    assert state.advance([a]) == 1
    assert state.allowed(())[0]
    assert state.allowed((b,)).nonzero().flatten().tolist() == [0]
    assert state.allowed((0,)).nonzero().flatten().tolist() == [0]  # after its end only that is repeated
    assert state.advance([b, b]) == 1
    assert state.advance([0, 0]) == 2
    state = started(Grammars(build_tokenizer(), target.config.vocab_size, [0, b]).regex("a[bc]+d"))
    assert state.allowed((a,)).nonzero().flatten().tolist() == [c]


def test_calls_follow_their_tools_and_nothing_else(grammars: Grammars) -> None:
    cat = {"properties": {"name": {"type": "string"}, "of": {"$ref": "#/$defs/Owner"}}, "required": ["name"]}
    parameters = {**cat, "$defs": {"Owner": {"properties": {"age": {"type": "integer"}}}}}
    parts = [{"properties": {name: {"const": 1}}, "required": [name]} for name in "ab"]
    tools = {'an "odd" <tool_call> \\ name': parameters, "any": {"type": "object"}, "both": {"allOf": parts}}
    odd = f'{{"name": {json.dumps(next(iter(tools)))}, "arguments": '
    calls = f'{odd}{{"name": "Tom </tool_call>", "of": {{"age": 3}}}}}}', '{"name": "any", "arguments": {"x": [1]}}'
    marked = [f"<tool_call>{newline}{call}{newline}</tool_call>" for newline in ("", "\n") for call in calls]
    refused = "{}", '{"name": 1}', '{"name": "x", "more": 1}', '{"name": "x", "of": {"more": 1}}'
    wrong = [f"<tool_call>{odd}{arguments}}}</tool_call>" for arguments in refused]
    for only_one in (True, False):
        grammar = grammars.tool_calls(tools, only_one)
        assert all(spells(grammar, call) for call in marked)
        assert spells(grammar, "\n".join(marked)) == spells(grammar, "".join(marked)) == (not only_one)
        assert not any(spells(grammar, text) for text in ["", "so", '{"a": 1}', f"so {marked[0]}", *wrong])
    both = '<tool_call>{"name": "both", "arguments": {"a": 1, "b": 1}}</tool_call>'
    assert spells(grammar, both)
    either = grammars.tool_calls(tools, True, content={"type": "array"})
    assert spells(either, marked[0])
    assert spells(either, "[1, 2]")


def spells(grammar: Grammar, text: str) -> bool:
    tokens = [*build_tokenizer()(text)["input_ids"], 0]
    return started(grammar).advance(tokens) == len(tokens)


def started(constraint: Constraint) -> GuardedState:
    """The state of a text without output, as a row has it."""
    return GuardedState(constraint, len(build_tokenizer()))


def test_a_text_without_a_way_on_ends_in_an_error_and_not_as_a_proper_end(target, grammars) -> None:
    """A bias forbids what the grammar allows, at the first token or later. The step, and other rows, go on."""
    banned = [token for name, token in VOCABULARY.items() if "3" in name]
    sampling = Sampling(logit_bias=tuple((token, -float("inf")) for token in banned))
    requests = [
        Request([5, 6], 20, sampling, constraint=grammars.regex("123"), end_tokens=(0,)),
        Request([5, 6], 20, sampling, constraint=grammars.regex("3"), end_tokens=(0,)),
        Request([7], 20, end_tokens=()),
    ]
    loop = loop_of(target, requests)
    while not loop.idle:
        assert all(block.tokens for block in loop.step())
    found = [*loop.generations.values()]
    assert [text(each.tokens) for each in found[:2]] == ["12", ""]
    assert [each.finish for each in found] == ["error", "error", "length"]
    assert all(isinstance(each.error, NoWayOnError) for each in found[:2])
    assert found[2].tokens == generate_batch(target, requests[2:])[0].tokens
    with pytest.raises(NoWayOnError, match="the format allows no token after the"):
        generate_batch(target, requests)


@pytest.mark.parametrize("string", ["a<end>b", "<end>", "é<end>"])
def test_a_constant_may_spell_an_end_token(target: TargetModel, grammars: Grammars, string: str) -> None:
    """The library forces the token that the tokenizer would write, which here would end the text within the string."""
    request = Request([5, 6], 40, constraint=grammars.json_schema({"const": string}), end_tokens=(0,))
    for drafter in (None, ModelDrafter(noisy_copy(target, 0.03), GROWTH, target)):
        [found] = generate_batch(target, [request], drafter)
        assert found.finish == "end"
        assert found.tokens.count(0) == 1
        assert json.loads(text(found.tokens)) == string


def test_an_error_of_the_library_while_drafts_are_checked_does_not_end_the_text(grammars: Grammars) -> None:
    """Its errors are final, so the text goes on from a new matcher, and without drafts."""
    state, (a, b, c) = started(grammars.regex("ab+c")), (VOCABULARY[letter] for letter in "abc")
    assert state.advance([a, b]) == 2
    assert state.allowed((b,)).any()
    grammar_state: Any = state.state
    grammar_state.matcher.consume_token(a)  # an error
    assert not state.allowed((b, b)).any()
    assert state.allowed(()).nonzero().flatten().tolist() == [b, c]
    assert state.advance([b, c, a]) == 2
    assert state.advance([0]) == 1


def test_a_grammar_comes_before_rules_that_would_leave_it_no_way_on(target: TargetModel, grammars: Grammars) -> None:
    a, b, d = (VOCABULARY[letter] for letter in "abd")
    rules = TextRules((a, b), target.config.vocab_size, 9, (0,), min_new_tokens=9, bad_words=((b, a), (a, b)))
    state = started(replace(rules, grammar=grammars.regex("[ab][abc]d")))
    assert state.allowed(()).nonzero().flatten().tolist() == [b]  # a would complete a bad word
    assert not state.allowed((b,))[a]
    assert state.allowed((b,))[b]
    assert state.advance([b, b, d]) == 3
    assert state.allowed(()).nonzero().flatten().tolist() == [0]  # before its least length


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: g.json_schema([1], "response_format"), "response_format: a list given, a JSON object is allowed"),
        (lambda g: g.json_schema({"pattern": object()}), "schema: .*not JSON serializable.*correct it"),
        (lambda g: g.regex("(?=a)b", "pattern"), r"pattern: .*look-around"),
        (lambda g: Grammars(build_tokenizer(), g.vocab_size, []), "end_tokens: none given, 1 or more are allowed"),
        (lambda g: Grammars(PreTrainedTokenizerBase(), g.vocab_size, [0]), "the tokenizer PreTrainedTokenizerBase"),
    ],
)
def test_what_cannot_constrain_is_refused(grammars: Grammars, make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        make(grammars)
