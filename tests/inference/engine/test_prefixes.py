"""Laws of prefix reuse and of batches: a prompt that begins like an earlier text is continued as if it had been read
whole; each request of a batch gets the text, and takes the steps, that it would alone."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from matrix import slow, slow_unless
from scripted import DRAFTERS, REQUESTS, HalfRightHead, Hidden, Texts, answered, finish, new_tokens
from shared_fixtures import HeadFactory, ModelFactory

from headstart.heads.kinds.eagle3 import Eagle3Head, Eagle3Shape
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.cache import KVCache
from headstart.inference.core.drafter import PLAIN, Drafter
from headstart.inference.core.request import DecodeStats, Generation, Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic, Fixed, GrowthPolicy
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.engine.loop import DecodeLoop, generate, generate_batch, loop_of
from headstart.inference.engine.prefixes import BLOCK, Cached, CachedRow, PrefixIndex
from headstart.inference.targets.model import TargetModel

SYSTEM = [7 + (5 * i + i * i) % 71 for i in range(40)]  # two and a half blocks
MEBIBYTE = 2**20
GROWTH = Dynamic(3, 3, 8)
PARTS = ["none", "head", "medusa", "block head", "draft model"]


@pytest.fixture(params=PARTS)
def parts(request, target, make_head, make_model) -> tuple[TargetModel, Drafter]:
    match request.param:
        case "none":
            return target, PLAIN
        case "head":
            return target, HeadDrafter(make_head(), GROWTH)
        case "medusa":
            head = make_head("medusa")
            return TargetModel(make_model(num_hidden_layers=7), head.taps), HeadDrafter(head, Dynamic(2, 3, 8))
        case "block head":
            return target, head_drafter(make_head("block"), GROWTH)
    return target, ModelDrafter(TargetModel(make_model(seed=3), ()), GROWTH, target)


def assert_as_alone(target: TargetModel, drafter: Drafter, request: Request, found: Generation) -> None:
    alone = generate(target, request.prompt, request.max_new_tokens, request.sampling, drafter)
    assert found.tokens == alone.tokens
    if request.speculative:
        assert found.stats.accepted_at_depth == alone.stats.accepted_at_depth


@pytest.mark.parametrize("parts", slow_unless(("head",), PARTS), indirect=True)
@pytest.mark.parametrize("static", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_turn_of_a_chat_reads_only_what_is_new(parts: tuple[TargetModel, Drafter], static: bool) -> None:
    """Prompt and answer of the turns before are found again, up to their last whole block; so are the head's drafts."""
    target, drafter = parts
    loop, prompt = DecodeLoop(target, drafter, 2, static, prefix_memory=MEBIBYTE), SYSTEM
    for turn in range(3):
        request = Request(prompt, 12, Sampling(1.0 if turn == 1 else 0.0, seed=turn))
        found = answered(loop, request)
        assert_as_alone(target, drafter, request, found)
        # The last token of an answer was never read, and the last one of a prompt is always read.
        assert found.cached_tokens == (0 if turn == 0 else (len(prompt) - 4) // BLOCK * BLOCK)
        prompt = [*prompt, *found.tokens, 3, 4, 5]
    assert loop.prefix_counts == (40 + 55 + 70, 48 + 64)


def test_requests_that_begin_alike_share_what_the_first_one_read(target: TargetModel, make_head: HeadFactory) -> None:
    """They need not wait for its end. One opts out of drafts, one is read in pieces."""
    drafter = HeadDrafter(make_head(), GROWTH)
    requests = [Request([*SYSTEM, *range(number, 3 * number)], 6) for number in range(1, 5)]
    requests[2] = replace(requests[2], speculative=False)
    loop = DecodeLoop(target, drafter, 3, prefix_memory=MEBIBYTE)
    loop.schedule.chunk_with_rows = 4
    for request in requests:
        loop.submit(request)
    finish(loop)
    for number, request in enumerate(requests):
        assert loop.generations[number].cached_tokens == (32 if number else 0)
        assert_as_alone(target, drafter, request, loop.generations[number])


@pytest.mark.each_value
@pytest.mark.parametrize("parts", slow_unless(("none", "head", "medusa", "block head"), PARTS), indirect=True)
@pytest.mark.parametrize("how", ["static", "dynamic", "in the step of a running row"])
def test_prompts_with_known_beginnings_are_read_in_one_pass(parts: tuple[TargetModel, Drafter], how: str) -> None:
    target, drafter = parts
    loop = DecodeLoop(target, drafter, 6, how == "static", prefix_memory=MEBIBYTE)
    answered(loop, Request(SYSTEM, 3))
    running = [loop.submit(Request([7], 30))] if how.startswith("in") else []
    for _ in running * 2:
        loop.step()
    loop.schedule.chunk_with_rows = 512
    rests = ([60, 61, 9], [60], [62, 7, 5, 3, 9, 1], [63, *range(30)])
    # The third one knows a block less than the others, and the last one beside a running row nothing.
    prompts = [(SYSTEM[:20] if number == 2 else SYSTEM) + rest for number, rest in enumerate(rests)]
    prompts += [[*range(70, 80)]] * len(running)
    requests = [
        Request(prompt, 4, Sampling(1.0 if number == 1 else 0.0, seed=number)) for number, prompt in enumerate(prompts)
    ]
    numbers = [loop.submit(request) for request in requests]
    assert [block.number for block in loop.step()] == [*running, *numbers]
    finish(loop)
    for number, request, cached in zip(numbers, requests, (32, 32, 16, 32, 0), strict=False):
        assert loop.generations[number].cached_tokens == cached
        assert_as_alone(target, drafter, request, loop.generations[number])


def test_a_prompt_waits_for_another_that_begins_with_more_of_it_than_is_known(target: TargetModel) -> None:
    loop = DecodeLoop(target, PLAIN, 4, prefix_memory=MEBIBYTE)
    answered(loop, Request(SYSTEM[:20], 3))
    numbers = [loop.submit(Request([*SYSTEM, last], 3)) for last in (60, 61)]
    assert [block.number for block in loop.step()] == numbers[:1]
    finish(loop)
    assert [loop.generations[number].cached_tokens for number in numbers] == [16, 32]


WAYS = ["together", "piece by piece", "beside rows", "apart", "static"]


@pytest.mark.parametrize("how", slow_unless(("piece by piece", "beside rows", "static"), WAYS))
def test_logprobs_of_a_prompt_are_whole_however_it_is_read(make_model, make_head, how) -> None:
    model = make_model()
    if how == "apart":
        model.set_attn_implementation("eager")
    target, piece = TargetModel(model, make_head().taps), 7 if how == "piece by piece" else 512
    drafter, static = HeadDrafter(make_head(), GROWTH), how == "static"
    loop = DecodeLoop(target, drafter, 5, static, prefill_chunk=piece, prefix_memory=MEBIBYTE)
    answered(loop, Request(SYSTEM, 3))
    if how == "beside rows":
        loop.submit(Request([7], 20))
        loop.step()
        loop.step()
    asked = Request([*SYSTEM, 60], 3, logprobs=True, prompt_logprobs=True, alternatives=2)
    scored = [asked, replace(asked, prompt=[*SYSTEM, 61, 8])]
    numbers = [loop.submit(request) for request in [*scored, Request([*SYSTEM, 60], 3), Request([9], 3)]]
    finish(loop)
    for request, number in zip(scored, numbers, strict=False):
        found = loop.generations[number]
        assert_as_alone(target, drafter, request, found)
        logits = target.passes.forward(torch.tensor([request.prompt])).logits[0, :-1].log_softmax(-1)
        wanted = logits.gather(1, torch.tensor(request.prompt[1:]).unsqueeze(1)).squeeze(1)
        assert found.prompt_scores is not None
        torch.testing.assert_close(torch.tensor(found.prompt_scores.chosen), wanted, atol=1e-4, rtol=0)
        best = [[value for _, value in pairs] for pairs in found.prompt_scores.alternatives]
        torch.testing.assert_close(torch.tensor(best), logits.topk(2).values, atol=1e-4, rtol=0)
    assert loop.generations[numbers[2]].prompt_scores is None
    assert loop.generations[numbers[2]].cached_tokens == 32


def test_a_text_that_was_written_without_drafts_serves_one_with_drafts(target, make_head) -> None:
    """The head reads the prefix then, from the hidden states that were kept for it; the next text finds it read."""
    drafter = HeadDrafter(make_head(), GROWTH)
    loop = DecodeLoop(target, drafter, 2, prefix_memory=MEBIBYTE)
    answered(loop, Request(SYSTEM, 14, speculative=False))
    prompt = [*SYSTEM, *loop.generations[0].tokens, 9]
    assert all(cached.head is None for _, cached in loop.batch.prefixes.blocks.values())  # type: ignore[union-attr]
    for _ in range(2):
        request = Request(prompt, 6)
        found = answered(loop, request)
        assert found.cached_tokens == 48
        assert_as_alone(target, drafter, request, found)
    assert all(cached.head is not None for _, cached in loop.batch.prefixes.blocks.values())  # type: ignore[union-attr]


class Row(CachedRow):
    """A row of these tokens whose blocks are full of one value."""

    def __init__(self, tokens: list[int], value: float) -> None:
        super().__init__(KVCache.allocate((1, 1, 4), None, 1), 0, tokens, torch.full((1, 3), value), 0, 0)

    def block(self, first: int, end: int) -> Cached:
        return Cached((self.taps[0, 0].expand(1, 2, 1, BLOCK, 4),), None, self.taps)


def test_the_least_recently_used_blocks_go_first_and_never_one_before_its_followers() -> None:
    """A block takes 524 bytes. a - b - c is one text, a - d the other; with room for three, c goes and then b."""
    a, b, c, d = ([letter] * BLOCK for letter in range(4))
    index = PrefixIndex(3 * 524, keeps_all_taps=False)
    index.add(Row([*a, *b, *c], 1.0))
    assert index.num_bytes == 3 * 524
    assert index.use([*a, *b, *c, 9]).tokens == 48  # type: ignore[union-attr]
    index.add(Row([*a, *d], 2.0))
    assert index.num_bytes == 3 * 524
    assert index.known_tokens([*a, *b, *c, 9]) == 32
    assert index.known_tokens([*a, *d, 9]) == 32
    index.add(Row([*d, *c], 3.0))
    assert index.known_tokens([*a, *d, 9]) == 16
    assert index.known_tokens([*d, *c, 9]) == 32
    assert index.known_tokens(a) == 0  # its last token is always read
    assert index.known_tokens([*b, 9]) == 0  # the same tokens elsewhere are another block
    assert (index.queries, index.hits) == (49, 48)


def test_prefixes_are_off_by_default_and_a_closed_loop_keeps_none(target: TargetModel) -> None:
    loop = DecodeLoop(target, max_batch=2)
    assert [answered(loop, Request(SYSTEM, 3)).cached_tokens for _ in range(2)] == [0, 0]
    assert loop.prefix_counts == (0, 0)
    loop = DecodeLoop(target, max_batch=2, prefix_memory=MEBIBYTE)
    answered(loop, Request(SYSTEM, 3))
    assert loop.batch.prefixes is not None
    assert loop.batch.prefixes.num_bytes > 0
    loop.close()
    assert loop.batch.prefixes.num_bytes == 0


def comparable(stats: DecodeStats) -> DecodeStats:
    """The stats without time, which depends on the other rows of the batch."""
    return replace(stats, seconds=0.0)


# A warning may be about a row in which no token has any probability left.
@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")
@pytest.mark.parametrize("drafter_name", slow_unless(["half right head, fixed tree"], DRAFTERS))
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
def test_each_row_ends_at_its_own_end_token(target, texts, monkeypatch, drafter_name) -> None:
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
    sizes: Any = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 16)
    shape = Eagle3Shape(**sizes, num_heads=1, num_kv_heads=1, taps=target.taps)
    head = Eagle3Head(shape, target.frozen, DraftVocab.full(5))
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
        *map(slow, itertools.product((Dynamic.chain(2), SHALLOW), (Sampling(1.0), WARPED), (2_000,))),
    ],
)
def test_sampled_texts_have_the_targets_distribution(five_token_target, growth, sampling, count) -> None:
    assert chi_square(five_token_target, growth, sampling, count) < 51.18  # its 99.9 % quantile, with 24 degrees
