"""The law of batches: each request gets the text, and takes the steps, that it would alone."""

import itertools
from dataclasses import replace

import pytest
import torch
from matrix import slow, slow_unless
from scripted import DRAFTERS, REQUESTS, HalfRightHead, Hidden, Texts, new_tokens
from shared_fixtures import ModelFactory

from headstart.heads.kinds.eagle3 import Eagle3Head, Eagle3Shape
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.request import DecodeStats, Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.drafters.growth import Dynamic, Fixed, GrowthPolicy
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.engine.loop import generate, generate_batch, loop_of
from headstart.inference.targets.model import TargetModel

CHI_SQUARE_999 = {24: 51.18}  # the 99.9 % quantile of the chi-square distribution, by degrees of freedom


def comparable(stats: DecodeStats) -> DecodeStats:
    """The stats without time and memory, which depend on the other rows of the batch."""
    return replace(stats, seconds=0.0, bytes_moved=0)


SOME = ("half right head, fixed tree", "half right head, cost-aware chain")


# A warning may be about a row in which no token has any probability left.
@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")
@pytest.mark.parametrize("drafter_name", slow_unless(SOME, DRAFTERS))
def test_a_batch_writes_what_its_requests_write_alone(target: TargetModel, texts: Texts, drafter_name: str) -> None:
    """Token for token and step for step, for any number of rows, with dynamic and with static shapes.

    Requests that wait start when others end.
    """
    drafter = DRAFTERS[drafter_name](texts)
    alone = [generate_batch(target, [request], drafter, static=False)[0] for request in REQUESTS]
    assert [generation.tokens for generation in alone] == new_tokens(texts)
    more_sizes = drafter_name in ("moody oracle", "truth hidden in a tree")
    for max_batch, static in [(3, False), (4, True), *([(1, True), (2, False), (16, False)] if more_sizes else [])]:
        together = generate_batch(target, REQUESTS, drafter, max_batch, static)
        assert [generation.tokens for generation in together] == new_tokens(texts), max_batch
        # Costs choose one tree shape for all rows, and repeats come from all texts: a row's steps depend on the others.
        if "cost-aware" not in drafter_name and "repeats" not in drafter_name:
            assert [comparable(g.stats) for g in together] == [comparable(g.stats) for g in alone], max_batch


def test_static_steps_need_no_more_slots_than_a_drafter_declares(target: TargetModel) -> None:
    """Every tree has the declared 21 nodes, even at the very end of the longest request."""
    for count in (1, 2, 3, 9):
        text = generate(target, [5, 6, 7, 11], count).tokens
        drafter = Hidden([5, 6, 7, 11, *text, *[1] * 9])
        drafter.continuation = lambda prefix, remaining: [1] * 5  # however few tokens remain
        drafter.random_below = lambda end: min(end - 1, 3)  # three random nodes per token: trees have 1 + 5 * 4 nodes
        drafter.max_nodes = 21
        assert generate_batch(target, [Request([5, 6, 7, 11], count)], drafter, static=True)[0].tokens == text


def test_static_steps_of_earlier_runs_leave_no_trace(target: TargetModel, texts: Texts) -> None:
    """The next run with the same drafter reuses the step and its cache, also after or during an unfinished run."""
    drafter = HeadDrafter(HalfRightHead(target, *texts.whole), Dynamic(5, 4, 16))
    pairs = list(zip(REQUESTS, new_tokens(texts), strict=True))
    first, second = [pairs[number] for number in (7, 1, 5)], [pairs[number] for number in (0, 7, 2, 5)]
    for chosen in (first, second):
        found = generate_batch(target, [request for request, _ in chosen], drafter, 3, static=True)
        assert [generation.tokens for generation in found] == [tokens for _, tokens in chosen]
    unfinished = loop_of(target, [request for request, _ in second], drafter, 3, static=True).run()
    for _ in range(7):
        next(unfinished)
    found = generate_batch(target, [request for request, _ in first], drafter, 3, static=True)
    assert [generation.tokens for generation in found] == [tokens for _, tokens in first]
    loops = [loop_of(target, [request for request, _ in chosen], drafter, 3, static=True) for chosen in (first, second)]
    for _ in itertools.zip_longest(unfinished, *(loop.run() for loop in loops)):
        pass
    for loop, chosen in zip(loops, (first, second), strict=True):
        assert [generation.tokens for generation in loop.generations.values()] == [tokens for _, tokens in chosen]


@pytest.mark.parametrize("drafter_name", [slow("half right head, tree"), "careless oracle"])
def test_each_row_ends_at_its_own_end_token(
    target: TargetModel, texts: Texts, monkeypatch: pytest.MonkeyPatch, drafter_name: str
) -> None:
    end_tokens = [new_tokens(texts)[row][place] for row, place in ((0, 7), (1, 0), (2, 5), (5, 9), (7, 3))]
    monkeypatch.setattr(target, "end_tokens", end_tokens)
    wanted = []
    for tokens in new_tokens(texts):
        first = next((place for place, token in enumerate(tokens) if token in end_tokens), len(tokens))
        wanted.append(tokens[: first + 1])
    assert len({len(tokens) for tokens in wanted}) > 3
    for static in (False, True):
        found = generate_batch(target, REQUESTS, DRAFTERS[drafter_name](texts), 4, static)
        assert [generation.tokens for generation in found] == wanted
        assert [g.finish for g in found] == ["end" if tokens[-1] in end_tokens else "length" for tokens in wanted]


def test_a_waiting_request_starts_as_soon_as_a_row_is_free(target: TargetModel) -> None:
    """In three rows, texts of 9, 2, 5, 4, 2 and 3 tokens take 8 steps, each with up to three rows.

    row 0  a a a a a a a a      b needs one step after its first token, then d takes its place, and so on;
    row 1  b d d d f f          a request for one token takes no step
    row 2  c c c c e
    """
    requests = [Request([3 + number], count) for number, count in enumerate([9, 2, 5, 4, 2, 3, 1])]
    loop, batch_sizes = loop_of(target, requests, max_batch=3), []
    embedding = target.model.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda module, args: batch_sizes.append(len(args[0])))
    seen: list[list[int]] = [[] for _ in requests]
    for block in loop.run():
        assert block.tokens
        seen[block.number] += block.tokens
    handle.remove()
    assert seen == [generation.tokens for generation in loop.generations.values()]
    assert [len(tokens) for tokens in seen] == [9, 2, 5, 4, 2, 3, 1]
    # The first three prompts are read in one pass, before the first step; later ones as rows become free.
    assert batch_sizes[:4] == [1, 3, 1, 3]
    assert sum(batch_sizes) == 4 + (8 + 1 + 4 + 3 + 1 + 2)
    assert len(batch_sizes) == 4 + 8


@pytest.fixture(scope="module")
def five_token_target(make_model: ModelFactory) -> TargetModel:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    return TargetModel(make_model(vocab_size=5, initializer_range=0.25, intermediate_size=16, **sizes), (0, 1))


def chi_square(target: TargetModel, growth: GrowthPolicy, sampling: Sampling, num_texts: int) -> float:
    """The chi-square statistic of the second and third new tokens against their exact probabilities."""
    sizes = Eagle3Shape(
        hidden_size=16, intermediate_size=16, num_heads=1, num_kv_heads=1, head_dim=16, taps=target.taps
    )
    head = Eagle3Head(sizes, target.frozen, DraftVocab.full(5))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    drafter, prompt = HeadDrafter(head.requires_grad_(False), growth), [1, 4, 2]
    requests = [Request(prompt, 4, replace(sampling, seed=seed)) for seed in range(num_texts)]
    counts = torch.zeros(5, 5)
    for generation in generate_batch(target, requests, drafter, max_batch=128):
        counts[generation.tokens[1], generation.tokens[2]] += 1
    continuations = torch.tensor(list(itertools.product(range(5), repeat=3)))
    whole = torch.cat([torch.tensor(prompt).expand(125, -1), continuations], dim=1)
    scores = BatchSampling([sampling], "cpu").scores(target.passes.forward(whole).logits[:, 2:-1], None)
    log_p = scores.log_softmax(-1)
    probabilities = log_p.gather(2, continuations.unsqueeze(2)).sum((1, 2)).exp().view(5, 5, 5).sum(0)
    assert probabilities.sum() == pytest.approx(1, abs=1e-4)
    expected = probabilities * num_texts
    assert counts[expected == 0].sum() == 0
    return float(((counts - expected) ** 2 / expected)[expected > 0].sum())


WARPED = Sampling(0.7, top_k=4, top_p=0.95)
SHALLOW = Fixed(((0,), (1,), (0, 0), (0, 1), (1, 0)))


@pytest.mark.parametrize(
    ("growth", "sampling", "count"),
    [
        (SHALLOW, Sampling(1.0), 200),
        *(
            slow((growth, sampling, 2_000))
            for growth in (Dynamic.chain(2), SHALLOW)
            for sampling in (Sampling(1.0), WARPED)
        ),
    ],
)
def test_sampled_texts_have_the_targets_distribution(
    five_token_target: TargetModel, growth: GrowthPolicy, sampling: Sampling, count: int
) -> None:
    assert chi_square(five_token_target, growth, sampling, count) < CHI_SQUARE_999[24]
