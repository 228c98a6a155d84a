"""The law of batches: each of many requests gets the text, and takes the steps, that it would take alone."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scripted import DRAFTERS, LOPSIDED, HalfRightHead, Hidden, Moody, Oracle, Texts
from torch import Tensor

from heads.eagle3 import Eagle3Head, Eagle3Shape
from heads.vocab import DraftVocab
from inference.decode import DecodeLoop, generate, generate_batch
from inference.drafters.growth import Dynamic, Fixed, Growth
from inference.drafters.head import HeadDrafter
from inference.request import DecodeStats, Request
from inference.sampling import BatchSampling, Sampling
from inference.target.model import TargetModel

MakeHead = Callable[..., Eagle3Head]
MakeModel = Callable[..., Any]
INF = float("inf")
CHI_SQUARE_999 = {24: 51.18}  # 99.9 % of a chi-square distribution lies below, by its degrees of freedom
PENALTIES = Sampling(0.8, top_p=0.95, repetition_penalty=1.3, frequency_penalty=1.0, logit_bias=((3, -INF),), seed=7)
# Prompts of different lengths, texts of different lengths, rows that sample in different ways; three share one way.
REQUESTS = [
    Request([5, 6, 7, 11], 12),
    Request([3], 6, Sampling(1.0, seed=1)),
    Request([*range(40)], 9, Sampling(0.7, top_p=0.9, seed=2)),
    Request([9, 9, 1], 1),
    Request([8, 8, 8, 8, 8, 8], 8, PENALTIES),
    Request([50, 51], 14, Sampling(1.0, seed=3)),
    Request([5, 6, 7, 11], 4, Sampling(repetition_penalty=1.5)),
    Request([70, 2, 33, 41, 5], 7, Sampling(1.0, seed=4)),
    Request([12] * 17, 2, Sampling(1.0, top_k=3, min_p=0.05, seed=5)),
]
GREEDY = [replace(request, sampling=Sampling()) for request in REQUESTS]


def comparable(stats: DecodeStats) -> DecodeStats:
    """What a row's steps were, whoever stood beside it."""
    return replace(stats, seconds=0.0, bytes_moved=0, cache_bytes=0)


def texts_of(target: TargetModel, requests: list[Request], make_head: MakeHead) -> Texts:
    """As plain decoding writes them, each alone."""
    whole = [r.prompt + generate(target, r.prompt, r.max_new_tokens, r.sampling).tokens for r in requests]
    return Texts(target, whole, make_head)


@pytest.fixture(scope="module")
def texts(target: TargetModel, make_head: MakeHead) -> Texts:
    return texts_of(target, REQUESTS, make_head)


def new_tokens(texts: Texts, requests: list[Request] = REQUESTS) -> list[list[int]]:
    return [whole[len(request.prompt) :] for whole, request in zip(texts.whole, requests, strict=True)]


BATCH_DRAFTERS = [
    "head, wide tree",
    "head, fixed tree",
    "half right head, tree",
    "half right head, fixed tree",
    "half right head, cost-aware",
    "half right head, adaptive",
    "moody oracle",
    "careless oracle",
    "truth hidden in a tree",
    "duplicate siblings",
]


SHARED_SHAPE = ("half right head, cost-aware", "half right head, adaptive")  # chosen for all rows together


@pytest.mark.filterwarnings("error")  # of a row without any chance left, for one
@pytest.mark.parametrize("drafter", BATCH_DRAFTERS)
def test_a_batch_is_its_requests_one_by_one(target: TargetModel, texts: Texts, drafter: str) -> None:
    """Token for token and step for step, for any number of rows; those who wait come in as others end.

    With static shapes too.
    """
    made = DRAFTERS[drafter](texts)
    alone = [generate_batch(target, [request], made, static=False)[0] for request in REQUESTS]
    assert [generation.tokens for generation in alone] == new_tokens(texts)
    few = drafter in ("moody oracle", "truth hidden in a tree")
    for max_batch, static in [(3, False), (4, True), *([(1, True), (2, False), (16, False)] if few else [])]:
        together = generate_batch(target, REQUESTS, made, max_batch, static)
        assert [generation.tokens for generation in together] == new_tokens(texts), max_batch
        if drafter not in SHARED_SHAPE:
            assert [comparable(g.stats) for g in together] == [comparable(g.stats) for g in alone], max_batch


def test_plain_decoding_in_batches_is_plain_decoding(target: TargetModel, texts: Texts) -> None:
    for max_batch, static in ((1, True), (2, False), (4, True), (16, False)):
        found = generate_batch(target, REQUESTS, None, max_batch, static)
        assert [generation.tokens for generation in found] == new_tokens(texts), max_batch
        assert [generation.stats.steps for generation in found] == [r.max_new_tokens - 1 for r in REQUESTS]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_p=0.9)], ids=["greedy", "T=1, top-p"])
def test_rows_that_all_sample_alike_take_static_steps(
    target: TargetModel, make_head: MakeHead, sampling: Sampling
) -> None:
    """Which are another code: fixed shapes, and no look at what was accepted. Steps and texts are the same."""
    chosen = [REQUESTS[number] for number in (0, 1, 2, 3, 6, 7)]
    requests = [replace(request, sampling=replace(sampling, seed=number)) for number, request in enumerate(chosen)]
    texts = texts_of(target, requests, make_head)
    for drafter in ("half right head, tree", "half right head, fixed tree", "truth hidden in a tree"):
        made = DRAFTERS[drafter](texts)
        alone = generate_batch(target, requests, made, max_batch=1, static=False)
        for max_batch in (1, 3):
            found = generate_batch(target, requests, made, max_batch, static=True)
            assert [generation.tokens for generation in found] == new_tokens(texts, requests)
            assert [comparable(g.stats) for g in found] == [comparable(g.stats) for g in alone]


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_static_steps_need_no_more_slots_than_a_drafter_says(target: TargetModel, count: int) -> None:
    """Up to the very end of the longest request, where the capacity ends too: trees of 20 nodes and of 1."""
    text = generate(target, [5, 6, 7, 11], count).tokens
    made = Hidden([5, 6, 7, 11, *text, *[1] * 9])
    made.continuation = lambda prefix, remaining: [1] * 5  # more than remain
    made.random_below = lambda end: min(end - 1, 3)  # so 1 + 5 * 4 nodes
    made.max_nodes = 21
    assert generate_batch(target, [Request([5, 6, 7, 11], count)], made, static=True)[0].tokens == text


def test_static_steps_of_earlier_runs_leave_no_trace(target: TargetModel, texts: Texts) -> None:
    """They are kept, with their cache, for the same drafter: after a run, after one left early, and beside another."""
    made = HeadDrafter(HalfRightHead(target, *texts.whole), Dynamic(5, 4, 16))
    pairs = list(zip(REQUESTS, new_tokens(texts), strict=True))
    first, second = [pairs[number] for number in (7, 1, 5)], [pairs[number] for number in (0, 7, 2, 5)]
    for some in (first, second, first):
        found = generate_batch(target, [request for request, _ in some], made, 3, static=True)
        assert [generation.tokens for generation in found] == [tokens for _, tokens in some]
    left = DecodeLoop(target, [request for request, _ in second], made, 3, static=True).run()
    for _ in range(7):
        next(left)
    found = generate_batch(target, [request for request, _ in first], made, 3, static=True)
    assert [generation.tokens for generation in found] == [tokens for _, tokens in first]
    loops = [DecodeLoop(target, [request for request, _ in some], made, 3, static=True) for some in (first, second)]
    for _ in itertools.zip_longest(left, *(loop.run() for loop in loops)):
        pass
    for loop, some in zip(loops, (first, second), strict=True):
        assert [generation.tokens for generation in loop.generations] == [tokens for _, tokens in some]


def test_requests_may_come_in_any_order(target: TargetModel, texts: Texts) -> None:
    made, pairs = Moody(*texts.whole), list(zip(REQUESTS, new_tokens(texts), strict=True))
    for shift in (1, 4, 8):
        shifted = pairs[shift:] + pairs[:shift]
        found = generate_batch(target, [request for request, _ in shifted], made, max_batch=4)
        assert [generation.tokens for generation in found] == [tokens for _, tokens in shifted]


def test_the_same_request_may_come_twice(target: TargetModel) -> None:
    first, second = generate_batch(target, [REQUESTS[5]] * 2)
    assert first.tokens == second.tokens
    assert len(first.tokens) == 14


def test_no_requests_are_no_texts(target: TargetModel) -> None:
    assert generate_batch(target, []) == []


@pytest.mark.parametrize("drafter", ["half right head, tree", "careless oracle", "truth hidden in a tree"])
def test_end_tokens_end_rows_at_their_own_times(
    target: TargetModel, texts: Texts, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    ends = [new_tokens(texts)[row][place] for row, place in ((0, 7), (1, 0), (2, 5), (5, 9), (7, 3))]
    monkeypatch.setattr(target, "end_tokens", ends)
    wanted = []
    for tokens in new_tokens(texts):
        first = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
        wanted.append(tokens[: first + 1])
    assert len({len(tokens) for tokens in wanted}) > 3
    for static in (False, True):
        found = generate_batch(target, REQUESTS, DRAFTERS[drafter](texts), 4, static)
        assert [generation.tokens for generation in found] == wanted
        assert [g.finish for g in found] == ["end" if tokens[-1] in ends else "length" for tokens in wanted]


def test_who_waits_comes_in_as_soon_as_a_row_is_free(target: TargetModel) -> None:
    """Three rows: texts of 9, 2, 5, 4, 2, 3 tokens take 8 steps of three rows or fewer.

    row 0  a a a a a a a a      b needs one step behind its first token, then d has its place, and so on; a request of
    row 1  b d d d f f          one token takes no step at all
    row 2  c c c c e
    """
    requests = [Request([3 + number], count) for number, count in enumerate([9, 2, 5, 4, 2, 3, 1])]
    loop, rows = DecodeLoop(target, requests, max_batch=3), []
    embedding = target.model.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    seen: list[list[int]] = [[] for _ in requests]
    for number, block in loop.run():
        seen[number] += block
    handle.remove()
    assert seen == [generation.tokens for generation in loop.generations]
    assert [len(tokens) for tokens in seen] == [9, 2, 5, 4, 2, 3, 1]
    # A prompt is read by itself: three to begin with.
    assert rows[:3] == [1, 1, 1]
    assert rows[3:6] == [3, 1, 3]
    assert sum(rows) == 7 + (8 + 1 + 4 + 3 + 1 + 2)
    assert len(rows) == 7 + 8


def test_blocks_of_all_rows_come_as_they_become_certain(target: TargetModel, texts: Texts) -> None:
    """A request's first block is one token; later ones are what a step made certain, and none is empty."""
    loop = DecodeLoop(target, REQUESTS, Moody(*texts.whole), max_batch=4)
    blocks: dict[int, list[list[int]]] = {}
    for number, block in loop.run():
        blocks.setdefault(number, []).append(block)
        assert block
    assert [list(itertools.chain(*blocks[number])) for number in range(len(REQUESTS))] == new_tokens(texts)
    for number, generation in enumerate(loop.generations):
        assert len(blocks[number][0]) == 1
        assert len(blocks[number]) == 1 + generation.stats.steps


def test_logprobs_of_a_batch_are_each_rows_own(target: TargetModel, texts: Texts) -> None:
    """Of those that ask for them: those of a full forward over the text."""
    requests = [replace(request, logprobs=number != 2) for number, request in enumerate(REQUESTS)]
    found = generate_batch(target, requests, Hidden(*texts.whole), max_batch=3)
    for request, whole, generation in zip(requests, texts.whole, found, strict=True):
        if not request.logprobs:
            assert generation.logprobs is None
            continue
        logits = target.forward(torch.tensor([whole])).logits[0, len(request.prompt) - 1 : -1]
        written = torch.tensor(whole[len(request.prompt) :]).unsqueeze(1)
        wanted = logits.log_softmax(-1).gather(1, written).squeeze(1)
        torch.testing.assert_close(torch.tensor(generation.logprobs), wanted, atol=1e-4, rtol=0)


def test_requests_that_accept_by_different_rules_are_refused_before_any_work(target: TargetModel) -> None:
    requests = [Request([1], 5), Request([1], 5, Sampling(1.0, rule="typical"))]
    with pytest.raises(ValueError, match=r"the requests of a batch must agree on decode\.acceptance"):
        DecodeLoop(target, requests)


@pytest.mark.parametrize("max_batch", [0, -1])
def test_a_batch_of_no_rows_is_refused(target: TargetModel, max_batch: int) -> None:
    """Instead of waiting for a row for ever."""
    with pytest.raises(ValueError, match=f"max_batch: {max_batch} given, 1 or more is allowed"):
        generate_batch(target, [Request([1], 5)], max_batch=max_batch)


def test_stats_of_a_batch_say_what_was_moved_and_how_long_it_took(target: TargetModel, texts: Texts) -> None:
    found = generate_batch(target, REQUESTS, Hidden(*texts.whole), max_batch=3)
    assert all(generation.stats.seconds > 0 for generation in found)
    assert found[0].stats.bytes_moved > 0
    assert found[3].stats.bytes_moved == 0  # a single token, out of the prompt's pass
    still = generate_batch(target, REQUESTS, Oracle(*texts.whole), max_batch=3)
    assert {generation.stats.bytes_moved for generation in still} == {0}


# Rejection sampling through the loop: other texts than plain decoding's, of the same distribution.

REJECTION_GROWTHS = {"chain": Fixed.chain(3), "tree": LOPSIDED}


def by_rule(rule: Any, requests: list[Request] = REQUESTS, **changes: Any) -> list[Request]:
    return [replace(request, sampling=replace(request.sampling, rule=rule, **changes)) for request in requests]


@pytest.mark.parametrize("rule", ["rejection", "typical"])
@pytest.mark.parametrize("growth", REJECTION_GROWTHS)
def test_greedy_is_greedy_by_any_rule(target: TargetModel, make_head: MakeHead, growth: str, rule: str) -> None:
    texts = texts_of(target, GREEDY, make_head)
    made = HeadDrafter(HalfRightHead(target, *texts.whole), REJECTION_GROWTHS[growth])
    found = generate_batch(target, by_rule(rule, GREEDY), made, max_batch=3)
    assert [generation.tokens for generation in found] == new_tokens(texts, GREEDY)


@pytest.mark.parametrize("growth", REJECTION_GROWTHS)
def test_rejection_in_a_batch_is_rejection_alone(target: TargetModel, texts: Texts, growth: str) -> None:
    """Though rows have room for different depths, with penalties and truncation; and a seed says it all."""
    made = HeadDrafter(HalfRightHead(target, *texts.whole), REJECTION_GROWTHS[growth])
    requests = by_rule("rejection")
    alone = [generate_batch(target, [request], made)[0] for request in requests]
    for max_batch in (4, 16):
        together = generate_batch(target, requests, made, max_batch)
        assert [generation.tokens for generation in together] == [generation.tokens for generation in alone]
        assert [comparable(g.stats) for g in together] == [comparable(g.stats) for g in alone]
    other = generate_batch(target, by_rule("rejection", seed=99), made)
    assert other[1].tokens != alone[1].tokens
    assert max(g.stats.acceptance_length for g in alone) > 1


def test_rejection_without_proposals_is_plain_decoding(target: TargetModel, texts: Texts) -> None:
    """Drafts that nobody sampled, as an oracle's, are judged by the seeded choices."""
    for made in (None, Moody(*texts.whole)):
        found = generate_batch(target, by_rule("rejection"), made, max_batch=4)
        assert [generation.tokens for generation in found] == new_tokens(texts)


@pytest.mark.parametrize("growth", [Dynamic.chain(3), Dynamic(3, 3, 8)], ids=["chain", "tree"])
def test_rejection_refuses_a_tree_that_grows_by_what_was_drawn(
    target: TargetModel, head: Eagle3Head, growth: Growth
) -> None:
    with pytest.raises(ValueError, match=r"decode\.growth: a dynamic tree chooses its nodes after it has drawn them"):
        generate_batch(target, by_rule("rejection"), HeadDrafter(head, growth))


@pytest.fixture(scope="module")
def five(make_model: MakeModel) -> TargetModel:
    """A target of five symbols."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    return TargetModel(make_model(vocab_size=5, initializer_range=0.25, intermediate_size=16, **sizes), (0, 1))


def chi_square(target: TargetModel, growth: Growth, sampling: Sampling, draws: int) -> float:
    """Of the second and third new tokens against all 125 texts of three, enumerated."""
    sizes = Eagle3Shape(
        hidden_size=16, intermediate_size=16, num_heads=1, num_kv_heads=1, head_dim=16, taps=target.taps
    )
    head = Eagle3Head(sizes, target.config, DraftVocab.full(5), target.model.get_input_embeddings().weight)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    drafter, prompt = HeadDrafter(head.requires_grad_(False), growth), [1, 4, 2]
    requests = [Request(prompt, 4, replace(sampling, seed=seed)) for seed in range(draws)]
    counts = torch.zeros(5, 5)
    for generation in generate_batch(target, requests, drafter, max_batch=128):
        counts[generation.tokens[1], generation.tokens[2]] += 1
    texts = torch.tensor(list(itertools.product(range(5), repeat=3)))
    whole = torch.cat([torch.tensor(prompt).expand(125, -1), texts], dim=1)
    log_p = BatchSampling([sampling] * 125, "cpu").warp(target.forward(whole).logits[:, 2:-1])
    chances = log_p.gather(2, texts.unsqueeze(2)).sum((1, 2)).exp().view(5, 5, 5).sum(0)
    assert chances.sum() == pytest.approx(1, abs=1e-4)
    expected = chances * draws
    assert counts[expected == 0].sum() == 0
    return float(((counts - expected) ** 2 / expected)[expected > 0].sum())


SHALLOW = Fixed(((0,), (1,), (0, 0), (0, 1), (1, 0)))


def test_texts_by_rejection_are_distributed_as_the_targets(five: TargetModel) -> None:
    assert chi_square(five, SHALLOW, Sampling(1.0, rule="rejection"), 300) < CHI_SQUARE_999[24]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=4, top_p=0.95)], ids=["T=1", "warped"])
@pytest.mark.parametrize("rule", ["rejection", "seeded"])
@pytest.mark.parametrize("growth", [Fixed.chain(2), SHALLOW], ids=["chain", "tree"])
def test_many_texts_are_distributed_as_the_targets(
    five: TargetModel, growth: Growth, rule: Any, sampling: Sampling
) -> None:
    assert chi_square(five, growth, replace(sampling, rule=rule), 2_000) < CHI_SQUARE_999[24]


# Typical acceptance: lossy by as much as its two numbers say.


def test_typical_acceptance_that_passes_everything_writes_what_was_drafted(target: TargetModel) -> None:
    sampling = Sampling(1.0, rule="typical", typical_epsilon=1e-30)
    first = generate(target, [5, 6, 7], 1, sampling).tokens
    made = Oracle([5, 6, 7, *first, *range(20, 60)], ahead=4)
    request = Request([5, 6, 7], 5, sampling)
    found = generate_batch(target, [request], made)[0]
    assert found.tokens[:4] == [*first, 20, 21, 22]  # there is no room for 23, as the bonus comes for free
    assert found.stats.accepted_at_depth == [1, 1, 1]


def test_typical_acceptance_that_passes_nothing_is_plain_decoding(target: TargetModel, texts: Texts) -> None:
    requests = by_rule("typical", typical_epsilon=1.0, typical_delta=1e9)
    sampled = [number for number, request in enumerate(requests) if request.sampling.temperature]
    found = generate_batch(target, requests, Hidden(*texts.whole), max_batch=3)
    assert [generation.tokens for generation in found] == new_tokens(texts)
    assert all(found[number].stats.steps == len(found[number].tokens) - 1 for number in sampled)


def test_every_token_of_a_typical_text_is_typical_or_the_seeds_choice(target: TargetModel, texts: Texts) -> None:
    """p(x) > min(epsilon, delta * exp(-entropy)) under a full forward, p after temperature and truncation."""
    requests = [request for request in by_rule("typical") if not request.sampling.needs_history]
    made = HeadDrafter(texts.make_head(), Dynamic(2, 12, 60))
    others = 0
    for request, found in zip(requests, generate_batch(target, requests, made, max_batch=3), strict=True):
        start, sampling = len(request.prompt), BatchSampling([request.sampling], "cpu")
        logits = target.forward(torch.tensor([request.prompt + found.tokens])).logits[:, start - 1 : -1]
        choices = sampling.choose(logits, torch.arange(start, start + len(found.tokens)).unsqueeze(0))[0]
        p: Tensor = sampling.warp(logits)[0].softmax(-1)
        entropy = torch.special.entr(p).sum(-1)
        limits = torch.minimum(torch.tensor(0.09), 0.3 * torch.exp(-entropy))
        for place, token in enumerate(found.tokens):
            if token != choices[place]:
                assert request.sampling.temperature
                assert p[place, token] > limits[place] - 1e-4
                others += 1
    assert others > 3  # it is lossy
