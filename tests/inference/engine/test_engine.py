"""Laws of a loop that runs while requests come and go: each finished text is the one that its request writes alone."""

import random
from dataclasses import replace
from typing import Any

import pytest
from families import FAMILIES
from matrix import slow_unless
from scripted import REQUESTS, HalfRightHead, LoadCosts, NoThirds, Texts, answered, finish, new_tokens
from shared_fixtures import ModelFactory
from sound_loop import assert_drafter_has_read
from torch import Tensor

from headstart.inference.core.drafter import Drafter
from headstart.inference.core.request import Request, StopStrings
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.engine.loop import DecodeLoop, generate, generate_batch, loop_of
from headstart.inference.engine.prefill import PrefillSchedule
from headstart.inference.engine.speculation import SpeculationByLoad
from headstart.inference.targets.model import TargetModel


def test_a_cancelled_request_leaves_its_row_at_once_and_others_untouched(target: TargetModel, texts: Texts) -> None:
    """One is cancelled while it decodes, one while it waits; a third takes the free row in the next step."""
    drafter = HeadDrafter(HalfRightHead(target, *texts.whole), Dynamic(3, 3, 8))
    loop = DecodeLoop(target, drafter, max_batch=2)
    for request in (REQUESTS[0], REQUESTS[5], REQUESTS[2], REQUESTS[1]):
        loop.submit(request)
    loop.step()
    loop.step()
    loop.cancel(0)
    loop.cancel(2)
    assert [row.number for row in loop.batch.rows] == [1]
    assert loop.batch.cache.target.lengths == [len(loop.batch.rows[0].text) - 1]
    partial = list(loop.generations[0].tokens)
    assert partial == new_tokens(texts)[0][: len(partial)]
    assert {block.number for block in loop.step()} == {1, 3}
    finish(loop)
    assert [loop.generations[number].finish for number in range(4)] == ["cancelled", "length", "cancelled", "length"]
    assert loop.generations[0].tokens == partial
    assert loop.generations[1].tokens == new_tokens(texts)[5]
    assert loop.generations[2].tokens == []
    assert loop.generations[3].tokens == new_tokens(texts)[1]
    loop.cancel(1)  # it has ended
    assert loop.generations[1].finish == "length"
    assert sorted(number for number, _ in loop.take_ended()) == [0, 1, 2, 3]


def test_requests_of_higher_priority_come_first_and_others_in_order(target: TargetModel) -> None:
    loop = DecodeLoop(target, max_batch=1)
    for priority in (0, 2, 1, 2, 0):
        loop.submit(replace(REQUESTS[0], max_new_tokens=1, priority=priority))
    assert [block.number for block in loop.run()] == [1, 3, 2, 0, 4]


def test_a_forgotten_output_is_dropped_and_a_run_that_is_closed_early_cancels_the_rest(target: TargetModel) -> None:
    loop = loop_of(target, REQUESTS[:2], max_batch=1)
    loop.step()
    for number in (0, 1):
        with pytest.raises(ValueError, match=f"request {number} has not ended.*cancel it first"):
            loop.forget(number)
    finish(loop)
    loop.forget(0)
    assert set(loop.generations) == {1}
    assert [number for number, _ in loop.take_ended()] == [1]
    loop = loop_of(target, REQUESTS[:2], max_batch=1)
    blocks = loop.run()
    next(blocks)
    blocks.close()
    assert loop.idle
    assert [generation.finish for generation in loop.generations.values()] == ["cancelled", "cancelled"]
    assert not loop.batch.is_open


LONG = [7 + (5 * i + i * i) % 71 for i in range(100)]


def make_paced(target: TargetModel, drafter: Drafter | None, piece: int, static: bool = False) -> DecodeLoop:
    """A loop that reads `piece` tokens per pass while rows run, whatever the passes take."""
    loop = DecodeLoop(target, drafter, 3, static, prefill_chunk=piece)
    loop.schedule.chunk_with_rows = piece
    return loop


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["eagle3", "block", "draft model"])
@pytest.mark.parametrize("piece", slow_unless((7, 32), (1, 7, 32)))
@pytest.mark.parametrize("static", [False, True])
def test_a_prompt_in_pieces_is_continued_as_one_read_whole(target, make_head, make_model, kind, piece, static) -> None:
    """The same trees are drafted too: a head read each piece with the token after it, which the prompt holds, and a
    draft model reads each piece as the target does."""
    requests = [Request(LONG[:40], 6), Request([3], 14, Sampling(1.0, seed=1)), Request(LONG[:20], 4, Sampling(0.8))]
    if kind == "draft model":
        drafter: Drafter = ModelDrafter(TargetModel(make_model(seed=3), ()), Dynamic(3, 2, 6), target)
    else:
        drafter = head_drafter(make_head(kind), Dynamic(3, 3, 8))
    alone = [generate(target, r.prompt, r.max_new_tokens, r.sampling, drafter) for r in requests]
    loop = make_paced(target, drafter, piece, static)
    order = 1, 2, 0  # the short prompt first, so that its row runs while the others are read
    for number in order:
        loop.submit(requests[number])
    finish(loop)
    for place, number in enumerate(order):
        found, wanted = loop.generations[place], alone[number]
        assert found.tokens == wanted.tokens
        if static or number == order[-1]:  # rows do not draft while a prompt is read beside their steps
            assert found.stats.accepted_at_depth == wanted.stats.accepted_at_depth
    loop.close()


@pytest.mark.parametrize("family", slow_unless(("gpt_oss",), FAMILIES))
def test_every_family_reads_prompts_in_pieces_and_after_known_prefixes(family: str) -> None:
    """Sliding windows and position encodings of all kinds; prompts are longer than a window. The third is read beside
    the steps of another row."""
    target = TargetModel(FAMILIES[family](), ())
    request, other = Request([5 + (7 * i) % 60 for i in range(45)], 6, end_tokens=()), Request([7], 12, end_tokens=())
    alone, others = (generate_batch(target, [each])[0].tokens for each in (request, other))
    loop = DecodeLoop(target, max_batch=2, prefill_chunk=11, prefix_memory=2**20)
    for _ in range(2):
        assert answered(loop, request).tokens == alone
    assert loop.generations[1].cached_tokens == 32
    assert target.passes.allows_side_by_side
    assert loop.schedule.shares_steps
    loop.submit(other)
    loop.step()
    reversed_request = replace(request, prompt=request.prompt[::-1])
    assert answered(loop, reversed_request).tokens == generate_batch(target, [reversed_request])[0].tokens
    assert loop.generations[2].tokens == others


def test_a_model_that_changes_the_mask_reads_prompts_apart(make_model: ModelFactory, target: TargetModel) -> None:
    def with_plain_mask(module: Any, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        return args, {**kwargs, "attention_mask": None if mask is None else mask.as_subclass(Tensor) + 0.0}

    model = make_model()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(with_plain_mask, with_kwargs=True)
    changed = TargetModel(model, ())
    assert target.passes.allows_side_by_side
    assert not changed.passes.allows_side_by_side
    loop = make_paced(changed, None, 10)
    assert not loop.schedule.shares_steps
    for request in (Request([3], 40), Request(LONG, 5)):
        loop.submit(request)
        loop.step()
    finish(loop)
    assert loop.generations[1].tokens == generate(target, LONG, 5).tokens


@pytest.mark.parametrize("static", [False, True])
def test_running_rows_go_on_while_a_long_prompt_is_read(target: TargetModel, static: bool) -> None:
    """At least ten pieces, in the row's own steps, or in turn with them if these have static shapes."""
    loop = make_paced(target, None, 10, static)
    loop.submit(Request([3], 40))
    loop.step()
    loop.submit(Request(LONG, 5))
    blocks: list[list[int]] = []
    while not any(1 in numbers for numbers in blocks) and not loop.idle:
        blocks.append([block.number for block in loop.step()])
    pieces = len(blocks) // 2 if static else len(blocks)
    if static:
        assert blocks == [[0], *[[], [0]] * (pieces - 1), [1]]
    else:
        assert blocks == [*[[0]] * (pieces - 1), [0, 1]]
    assert pieces >= len(LONG) / 10
    loop.close()


def test_slots_that_became_free_are_filled_together_and_in_the_end() -> None:
    schedule = PrefillSchedule(512, 16, prompts_first=True)
    assert schedule.tokens(has_rows=True) == 512
    assert not schedule.reads_next(running=480, free=29, waiting=100)
    assert schedule.reads_next(running=480, free=30, waiting=100)
    assert schedule.reads_next(running=480, free=3, waiting=3)  # no more will come
    assert schedule.reads_next(running=15, free=1, waiting=100)
    schedule.read_last = True
    assert schedule.reads_next(running=510, free=2, waiting=60)  # until all slots are taken


def test_no_drafter_works_when_no_row_wants_drafts(target, texts, monkeypatch) -> None:
    drafter = HeadDrafter(HalfRightHead(target, *texts.whole), Dynamic(3, 3, 8))
    for name in ("prefill", "draft"):
        monkeypatch.setattr(drafter, name, lambda *inputs: pytest.fail("the drafter worked"))
    for static in (False, True):
        loop = DecodeLoop(target, drafter, max_batch=2, static=static)
        for request in REQUESTS[:4]:
            loop.submit(replace(request, speculative=False))
        finish(loop)
        assert [each.tokens for each in loop.generations.values()] == new_tokens(texts)[:4]


class Failure(Exception):
    """Raised in the work for one row."""


def detokenize(tokens: list[int]) -> str:
    """A letter for each token; nobody can read the last one."""
    if 96 in tokens:
        raise Failure("token 96 has no text")
    return "".join(chr(ord("0") + token) for token in tokens)


FAILING: dict[str, dict[str, Any]] = {
    "stop": {"stop": StopStrings(("nowhere",), lambda tokens: detokenize([*tokens, 96]))},
    "constraint, at once": {"constraint": NoThirds(fails_at=0)},
    "constraint, later": {"constraint": NoThirds(fails_at=4)},
    "scores": {"logprobs": True, "alternatives": -2},
}


@pytest.mark.each_value
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("what", FAILING)
def test_an_error_in_the_work_for_one_row_ends_that_row_alone(target, texts, what, drafted) -> None:
    drafter = HeadDrafter(HalfRightHead(target, *texts.whole), Dynamic(3, 3, 8)) if drafted else None
    loop = DecodeLoop(target, drafter, max_batch=3)
    numbers = [loop.submit(REQUESTS[number]) for number in (0, 5)]
    loop.step()
    failing = loop.submit(replace(REQUESTS[2], **FAILING[what]))
    finish(loop)
    assert [loop.generations[number].tokens for number in numbers] == [new_tokens(texts)[0], new_tokens(texts)[5]]
    found = loop.generations[failing]
    assert (found.finish, type(found.error)) == ("error", Failure if what == "stop" else RuntimeError)
    if what != "constraint, later":
        assert not found.tokens
    else:  # the tree of the last step may hold the state that fails
        assert len(found.tokens) in ((3, 4) if drafted else (4,))
    assert failing in [number for number, _ in loop.take_ended()]
    with pytest.raises((Failure, RuntimeError)):
        generate_batch(target, [replace(REQUESTS[2], **FAILING[what])], drafter)


def test_a_request_waits_until_its_longest_text_fits_in_the_memory(target: TargetModel) -> None:
    """A token is 256 bytes, and pages hold 128 tokens each, so that a text of 7 tokens may touch two of them."""
    loop = DecodeLoop(target, max_batch=4, memory=2 * 2 * 128 * 256)
    for number in range(4):
        loop.submit(Request([3 + number], 6, priority=number == 3))
    seen = []
    while not loop.idle:
        loop.step()
        seen.append(len(loop.batch.rows))
    assert max(seen) == 2
    assert [number for number, _ in loop.take_ended()] == [3, 0, 1, 2]
    for number in range(4):
        assert loop.generations[number].tokens == generate(target, [3 + number], 6).tokens
    text = loop.generations[0].tokens
    end = next(at for at in range(1, 6) if text[at] not in text[:at])
    loop = DecodeLoop(target, max_batch=4, memory=4 * 128 * 256)
    for count in (20, 140, 20):  # the second does not fit beside the first; the third would
        loop.submit(Request([3], count, end_tokens=(text[end],)))
    finish(loop)
    assert [number for number, _ in loop.take_ended()] == [0, 1, 2]


def test_what_never_fits_in_the_memory_is_refused_with_both_numbers(target: TargetModel) -> None:
    loop = DecodeLoop(target, max_batch=4, memory=2 * 128 * 256)
    loop.submit(Request([3], 100))
    message = r"memory: 65\.5 kB of cache given, and a prompt of 1 tokens with max_new_tokens 200 needs 98\.3 kB"
    with pytest.raises(ValueError, match=message):
        loop.submit(Request([3], 200))
    static = DecodeLoop(target, max_batch=4, memory=4 * 120 * 256, static=True)
    static.submit(Request([3], 100))
    with pytest.raises(ValueError, match=r"needs 205\.8 kB in each of 4 rows, which share one block of memory"):
        static.submit(Request([3], 199))


@pytest.mark.parametrize("memory", [4 * 256 * 256, None])
def test_the_cache_usage_tells_what_running_texts_reserve(target: TargetModel, memory: int | None) -> None:
    loop = DecodeLoop(target, max_batch=4, memory=memory)
    usages = [loop.batch.cache_usage]
    for _ in range(2):
        loop.submit(Request([3], 40, end_tokens=()))
        loop.step()
        usages.append(loop.batch.cache_usage)
    assert 0 == usages[0] < usages[1] <= 0.5
    assert usages[2] == pytest.approx(2 * usages[1])
    finish(loop)
    assert loop.batch.cache_usage == 0


def random_request(rng: random.Random) -> Request:
    """Many begin alike; they sample, end and draft differently, and some are more urgent."""
    samplings = [
        Sampling(),
        Sampling(1.0, seed=rng.randrange(99)),
        Sampling(0.7, top_p=0.9, seed=rng.randrange(99)),
        Sampling(0.8, repetition_penalty=1.3, presence_penalty=0.5, seed=rng.randrange(99)),
        Sampling(logit_bias=((3, -float("inf")), (9, 2.0))),
    ]
    shared = LONG[: rng.choice([0, 0, 20, 40, 70])]
    prompt = [*shared, *(rng.randrange(97) for _ in range(rng.randrange(1, 20)))]
    if rng.random() < 0.1:  # up to the end of the context
        prompt = (prompt * 256)[: rng.randrange(235, 256)]
    return Request(
        prompt,
        min(rng.randrange(1, 25), 256 - len(prompt)),
        rng.choice(samplings),
        StopStrings((chr(60), chr(71) + chr(80)), detokenize) if rng.random() < 0.3 else None,
        logprobs=rng.random() < 0.2,
        end_tokens=rng.choice([None, (5, 17, 60)]),
        priority=rng.randrange(3),
        speculative=rng.random() < 0.7,
        constraint=rng.choice([None, None, None, NoThirds(), NoThirds(patience=1), NoThirds(fails_at=3)]),
    )


@pytest.mark.parametrize(
    ("seed", "static", "count"),
    slow_unless([(0, False, 10)], [(0, False, 10), (0, False, 30), (1, False, 30), (2, True, 30)]),
)
def test_each_text_is_that_of_its_request_alone(target, make_head, monkeypatch, seed, static, count) -> None:
    """Requests come in bursts and are cancelled at random; prompts are read in pieces of random size; prefixes are
    found, or were dropped; memory is short; drafts stop with three rows, and the drafter catches up in several steps;
    some rows fail.
    """
    for module in ("step", "prefill"):
        monkeypatch.setattr(f"headstart.inference.engine.{module}.CATCH_UP_POSITIONS", 8)
    rng = random.Random(seed)
    drafter = HeadDrafter(make_head(), Dynamic(3, 3, 8))
    memory = None if static else 12 * 128 * (256 + 128)
    switch = SpeculationByLoad(LoadCosts())
    loop = DecodeLoop(target, drafter, 4, static, memory=memory, prefix_memory=90_000, speculation=switch)
    requests: dict[int, Request] = {}
    seen: dict[int, list[int]] = {}
    cancelled: set[int] = set()
    while len(requests) < count or not loop.idle:
        if len(requests) < count and (loop.idle or rng.random() < 0.2):
            for _ in range(rng.randrange(1, 4)):
                request = random_request(rng)
                requests[loop.submit(request)] = request
        if rng.random() < 0.1:
            cancelled.add(number := rng.choice([*requests]))
            loop.cancel(number)
        loop.schedule.chunk_with_rows = rng.randrange(1, 40)
        for block in loop.step():
            seen.setdefault(block.number, []).extend(block.tokens)
        if rng.random() < 0.1:
            assert_drafter_has_read(loop)
    ended = dict(loop.take_ended())
    assert set(ended) == set(requests)
    for number, request in requests.items():
        found = ended[number]
        alone = answered(DecodeLoop(target, max_batch=1), request)
        assert found.tokens == seen.get(number, [])
        if found.finish == "cancelled":
            assert number in cancelled
            assert found.tokens == alone.tokens[: len(found.tokens)]
        else:
            assert (found.tokens, found.finish) == (alone.tokens, alone.finish), number
    assert loop.prefix_counts[1] > 3 * count
    assert any(found.finish == "cancelled" for found in ended.values())
    assert any(found.stats.drafted for found in ended.values())
    assert loop.batch.cache.target.lengths == []
    assert loop.batch.prefixes is not None
    assert loop.batch.prefixes.num_bytes <= 90_000
