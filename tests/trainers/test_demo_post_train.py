"""Laws of the demo target's post-training: which texts are good, and what is learned from them."""

import math
from typing import Any

import pytest
import torch
from post_train import (
    Answer,
    collate,
    is_good,
    is_python_so_far,
    load,
    loops,
    pairs,
    preference_loss,
)
from tiny_run import build_target, build_tokenizer
from torch.testing import assert_close


@pytest.mark.parametrize(
    "text",
    [
        "def double(x):\n    return 2 * x\n",
        "    def inner(self):\n        if self:\n",  # an excerpt from a class, cut off
        "values = [\n    1,\n    2,\n",
        'def f():\n    """What it does:\n\n    no Python here\n',
        "x = 1\ny = (3 +\nz = ) hal",  # only whole lines count, and these two can continue
    ],
)
def test_incomplete_python_is_valid_so_far(text: str) -> None:
    assert is_python_so_far(text)


@pytest.mark.parametrize(
    "text",
    ["", "a half-written line", "no Python here\n", "def f():\nreturn 1\n", "x = (1]\n", "if x:\n    y\n  z\n"],
)
def test_python_that_no_continuation_can_fix_is_invalid(text: str) -> None:
    assert not is_python_so_far(text)


@pytest.mark.parametrize("period", [1, 3, 24, 40])
def test_a_text_loops_if_a_sequence_repeats_three_times_and_covers_24_tokens(period: int) -> None:
    lead, piece = [900, 901], list(range(period))
    times = max(3, -(-24 // period))
    assert loops(lead + piece * times)
    assert not loops(lead + piece * (times - 1))
    assert not loops(list(range(200)))
    assert not loops([*piece, 500, *piece, 501, *piece, 502])


def answer(prompt: str, response: str) -> Answer:
    tokenizer = build_tokenizer()
    return Answer(tokenizer(prompt)["input_ids"], tokenizer(response)["input_ids"])


def test_texts_with_a_loop_an_end_or_broken_python_are_rejected() -> None:
    tokenizer = build_tokenizer()
    good = answer("def f(x):\n", "    return x + 1\n\n\ndef g(y):\n    return 2\n")
    prose = answer("    Some words of a docstring\n", "    and some more of them\n")
    broken = answer("def f(x):\n", "return x\n")
    loop = answer("def f(x):\n", "    x += 1\n" * 12)
    ended = Answer(good.prompt, [*good.response, tokenizer.eos_token_id])
    assert [is_good(some, tokenizer) for some in (good, prose, broken, loop, ended)] == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(build_target(tmp_path_factory.mktemp("target")))[1]


def chance(model: Any, some: Answer) -> float:
    """A response's log-likelihood, computed alone and token by token."""
    log_p = model(torch.tensor([some.prompt + some.response])).logits.log_softmax(-1)[0].detach()
    at = len(some.prompt) - 1
    return sum(float(log_p[at + i, token]) for i, token in enumerate(some.response))


PROMPT = "def f(x):\n"
GOOD = [answer(PROMPT, f"    return x + {i}\n") for i in range(3)]
BAD = [answer(PROMPT, f"return x + {i}\n") for i in range(4)]
ONLY_GOOD = answer("def g(x):\n", "    return 2\n")


def test_pairs_are_the_likeliest_good_and_bad_answers_to_a_prompt(model: Any) -> None:
    found = pairs(model, [*GOOD, ONLY_GOOD, GOOD[0]], [*BAD, BAD[0]], 40, keep=2)
    assert [pair.good for pair in found] == sorted(GOOD, key=lambda some: -chance(model, some))[:2]
    assert [pair.bad for pair in found] == sorted(BAD, key=lambda some: -chance(model, some))[:2]
    margins = [chance(model, pair.good) - chance(model, pair.bad) for pair in found]
    assert_close([pair.margin for pair in found], margins, atol=1e-3, rtol=1e-5)


def test_the_loss_is_the_papers(model: Any) -> None:
    with torch.no_grad():
        loss = preference_loss(model, *collate([*GOOD[:2], *BAD[:2]], 40), torch.tensor([3.0, -2.0]), 0.1, 0.5)
    wanted = 0.0
    for good, bad, margin in zip(GOOD[:2], BAD[:2], (3.0, -2.0), strict=True):
        log_ratio = chance(model, good) - chance(model, bad) - margin
        wanted += math.log1p(math.exp(-0.1 * log_ratio)) / 2
        wanted -= 0.5 * chance(model, good) / len(good.response) / 2
    assert_close(loss.item(), wanted, atol=1e-4, rtol=1e-4)
