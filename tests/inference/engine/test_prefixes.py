"""Laws of prefix reuse: a prompt that begins like an earlier text is continued as if it had been read whole."""

from dataclasses import replace

import pytest
import torch
from matrix import slow_unless
from scripted import answered, finish
from shared_fixtures import HeadFactory, ModelFactory

from headstart.inference.core.cache import KVCache
from headstart.inference.core.drafter import PLAIN, Drafter
from headstart.inference.core.request import Generation, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.engine.loop import DecodeLoop, generate
from headstart.inference.engine.prefixes import BLOCK, Cached, CachedRow, PrefixIndex
from headstart.inference.targets.model import TargetModel

SYSTEM = [7 + (5 * i + i * i) % 71 for i in range(40)]  # two and a half blocks
MEBIBYTE = 2**20
GROWTH = Dynamic(3, 3, 8)


PARTS = ["none", "head", "medusa", "block head", "draft model"]


@pytest.fixture(params=PARTS)
def parts(
    request: pytest.FixtureRequest, target: TargetModel, make_head: HeadFactory, make_model: ModelFactory
) -> tuple[TargetModel, Drafter]:
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
def test_logprobs_of_a_prompt_are_whole_however_it_is_read(
    make_model: ModelFactory, make_head: HeadFactory, how: str
) -> None:
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
    scored = [
        Request([*SYSTEM, *rest], 3, logprobs=True, prompt_logprobs=True, alternatives=2) for rest in ([60], [61, 8])
    ]
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


def test_a_text_that_was_written_without_drafts_serves_one_with_drafts(
    target: TargetModel, make_head: HeadFactory
) -> None:
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
