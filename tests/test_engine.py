"""Laws of a loop that runs while requests come and go: each finished text is the one that its request writes alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from scripted import DRAFTERS, HalfRightHead, Oracle, Texts

from headstart.heads.eagle3 import Eagle3Head
from headstart.inference.decode import DecodeLoop, generate
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.request import Request
from headstart.inference.sampling import Sampling
from headstart.inference.target.model import TargetModel
from headstart.inference.verify import BONUS

MakeHead = Callable[..., Eagle3Head]
REQUESTS = [
    Request([5, 6, 7, 11], 12),
    Request([3], 6, Sampling(1.0, seed=1)),
    Request([*range(40)], 9, Sampling(0.7, top_p=0.9, seed=2)),
    Request([9, 9, 1], 1),
    Request([8, 8, 8, 8, 8, 8], 8, Sampling(0.8, repetition_penalty=1.3, frequency_penalty=1.0, seed=7)),
    Request([50, 51], 14, Sampling(1.0, seed=3)),
]


@pytest.fixture(scope="module")
def texts(target: TargetModel, make_head: MakeHead) -> Texts:
    """The requests with what each writes alone."""
    whole = [r.prompt + generate(target, r.prompt, r.max_new_tokens, r.sampling).tokens for r in REQUESTS]
    return Texts(target, whole, make_head)


def written(texts: Texts, number: int) -> list[int]:
    """What a request writes alone."""
    return texts.whole[number][len(REQUESTS[number].prompt) :]


def finish(loop: DecodeLoop) -> None:
    while not loop.idle:
        loop.step()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("drafter_name", ["head, wide tree", "half right head, tree", "truth hidden in a tree"])
def test_requests_may_come_while_others_decode(
    target: TargetModel, texts: Texts, drafter_name: str, static: bool
) -> None:
    """A new one every other step, the longest in the middle, so that caches must grow under running rows."""
    loop = DecodeLoop(target, DRAFTERS[drafter_name](texts), max_batch=3, static=static)
    assert loop.idle
    assert loop.step() == []
    for number, request in enumerate(REQUESTS):
        assert loop.submit(request) == number
        loop.step()
        loop.step()
    finish(loop)
    for number in range(len(REQUESTS)):
        assert loop.generations[number].tokens == written(texts, number), number
    assert sorted(number for number, _ in loop.take_ended()) == [*range(len(REQUESTS))]
    loop.submit(REQUESTS[0])  # an idle loop goes on
    finish(loop)
    assert loop.generations[len(REQUESTS)].tokens == written(texts, 0)
    loop.close()


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
    assert [row.number for row in loop.rows] == [1]
    assert loop.cache.target.lengths == [len(loop.rows[0].text) - 1]
    partial = list(loop.generations[0].tokens)
    assert partial == written(texts, 0)[: len(partial)]
    assert {block.number for block in loop.step()} == {3}
    finish(loop)
    assert [loop.generations[number].finish for number in range(4)] == ["cancelled", "length", "cancelled", "length"]
    assert loop.generations[0].tokens == partial
    assert loop.generations[1].tokens == written(texts, 5)
    assert loop.generations[2].tokens == []
    assert loop.generations[3].tokens == written(texts, 1)
    loop.cancel(1)  # it has ended
    assert loop.generations[1].finish == "length"
    assert sorted(number for number, _ in loop.take_ended()) == [0, 1, 2, 3]


def test_requests_of_higher_priority_come_first_and_others_in_order(target: TargetModel) -> None:
    loop = DecodeLoop(target, max_batch=1)
    for priority in (0, 2, 1, 2, 0):
        loop.submit(replace(REQUESTS[0], max_new_tokens=1, priority=priority))
    assert [block.number for block in loop.run()] == [1, 3, 2, 0, 4]


def test_a_block_tells_the_draft_depth_of_each_token(target: TargetModel, texts: Texts) -> None:
    loop = DecodeLoop(target, Oracle(*texts.whole, ahead=3), max_batch=1)
    loop.submit(REQUESTS[0])
    blocks = list(loop.run())
    assert [block.depths for block in blocks] == [[None], *[[1, 2, 3, BONUS]] * 2, [1, 2, BONUS]]
    assert [token for block in blocks for token in block.tokens] == written(texts, 0)
    plain = DecodeLoop(target, max_batch=1)
    plain.submit(REQUESTS[0])
    assert {depth for block in plain.run() for depth in block.depths} == {None}


def test_a_forgotten_output_is_dropped_and_a_running_one_is_kept(target: TargetModel) -> None:
    loop = DecodeLoop(target, max_batch=1)
    for request in REQUESTS[:2]:
        loop.submit(request)
    loop.step()
    for number in (0, 1):
        with pytest.raises(ValueError, match=f"request {number} has not ended.*cancel it first"):
            loop.forget(number)
    finish(loop)
    loop.forget(0)
    assert set(loop.generations) == {1}
    assert [number for number, _ in loop.take_ended()] == [1]


def test_what_is_refused_is_not_queued(target: TargetModel) -> None:
    loop = DecodeLoop(target, max_batch=2)
    for request, message in (
        (Request([], 5), "the prompt is empty"),
        (Request([1], 256), "exceed the target's 256 positions"),
        (Request([97], 5), "token id 97"),
        (Request([1], 5, Sampling(logit_bias=((97, 1.0),))), "logit_bias: token 97"),
    ):
        with pytest.raises(ValueError, match=message):
            loop.submit(request)
    assert loop.idle
    assert loop.generations == {}
    loop.submit(Request([1], 5))
    with pytest.raises(ValueError, match=r"must agree on decode\.acceptance"):
        loop.submit(Request([1], 5, Sampling(1.0, rule="typical")))
    finish(loop)
    assert loop.submit(Request([1], 5, Sampling(1.0, rule="typical"))) == 1  # alone, it may have any rule


def test_a_run_that_is_closed_early_cancels_the_rest(target: TargetModel) -> None:
    loop = DecodeLoop(target, max_batch=1)
    for request in REQUESTS[:2]:
        loop.submit(request)
    blocks = loop.run()
    next(blocks)
    blocks.close()
    assert loop.idle
    assert [generation.finish for generation in loop.generations.values()] == ["cancelled", "cancelled"]
    assert not loop.is_open
