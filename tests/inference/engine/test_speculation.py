"""Laws of speculation by load: drafts stop where they do not pay, and come back as if they had never stopped."""

import itertools
import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from matrix import slow
from scripted import LoadCosts, SetCosts, finish, paths
from shared_fixtures import HeadFactory

from headstart.inference.core.cache import KVCache
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import Accepted, Verified, VerifiedOnHost
from headstart.inference.drafters.costs import CostTable, MeasuredCosts, Ran
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.engine import speculation
from headstart.inference.engine.loop import DecodeLoop, generate
from headstart.inference.engine.speculation import DRAFT_RETRY_STEPS_MAX, DRAFT_RETRY_STEPS_MIN, SpeculationByLoad
from headstart.inference.targets.model import TargetModel

GROWTH = Dynamic(3, 2, 6)
LONG, SHORT = Request([5, 6, 7, 11], 60), Request([3, 8], 20, Sampling(1.0, seed=1))


class Watched(HeadDrafter):
    """Notes the rows of each draft, and what it drafts at each length of a text that begins with LONG's prompt."""

    static_shapes = False

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.rows: list[int] = []
        self.missed: list[int] = []  # positions of each call of prefill
        self.trees: dict[int, set[tuple[int, ...]]] = {}

    def prefill(self, taps: torch.Tensor, text: torch.Tensor, row: KVCache) -> None:
        self.missed.append(taps.shape[1] - 1)
        super().prefill(taps, text, row)

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        tree = super().draft(verified, cache)
        self.rows.append(len(verified.rows))
        for row, found in zip(verified.rows, paths(tree), strict=True):
            if row.text[:4] == LONG.prompt and row.remaining:
                self.trees[len(row.text)] = found
        return tree


@pytest.mark.parametrize("static", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_drafts_stop_when_rows_come_and_resume_when_they_go(target, make_head, monkeypatch, static) -> None:
    """While they are off the head does nothing at all. Then it reads what it missed, in pieces, and drafts what it
    would have drafted. This head is never right, so that all lengths of the text are met.
    """
    monkeypatch.setattr("headstart.inference.engine.step.CATCH_UP_POSITIONS", 6)
    always, by_load = Watched(make_head(), GROWTH), Watched(make_head(), GROWTH)
    alone = generate(target, LONG.prompt, LONG.max_new_tokens, drafter=always)
    loop = DecodeLoop(target, by_load, 3, static, speculation=SpeculationByLoad(LoadCosts()))
    # It takes steps with drafts to give two tokens, as this law is about the switch.
    monkeypatch.setattr(SpeculationByLoad, "observe", lambda self, *seen: setattr(self, "steps", 1.0))
    switch: Any = loop.decode_step.speculation
    switch.tokens, switch.nodes, switch.levels = 2.0, 6.0, 3.0
    loop.submit(LONG)
    for _ in range(10):
        loop.step()
    assert by_load.rows == [1] * 9
    for seed in (1, 2):
        loop.submit(replace(SHORT, sampling=Sampling(1.0, seed=seed)))
    while len(loop.batch.rows) < 3:
        loop.step()
    by_load.rows.clear()
    for _ in range(4):
        loop.step()
    assert by_load.rows == []  # with three rows a step costs 30 plain ones, so that not one more is tried
    by_load.missed.clear()
    while len(loop.batch.rows) == 3:
        loop.step()
    assert by_load.rows == by_load.missed == []
    length = len(loop.batch.rows[0].text)
    finish(loop)
    assert sum(by_load.missed) >= 14
    assert max(by_load.missed) <= 6
    assert len(by_load.rows) > 15
    assert loop.generations[0].tokens == alone.tokens
    for number, seed in ((1, 1), (2, 2)):
        wanted = generate(target, SHORT.prompt, SHORT.max_new_tokens, Sampling(1.0, seed=seed))
        assert loop.generations[number].tokens == wanted.tokens
    after = [at for at in by_load.trees if at > length]
    assert all(by_load.trees[at] == always.trees[at] for at in after if at in always.trees)
    assert sum(at in always.trees for at in after) > 15


def test_reading_the_prompts_of_new_rows_makes_no_step_look_slow(target: TargetModel, make_head: HeadFactory) -> None:
    read: list[float] = []
    began: list[float] = []

    class Timed(HeadDrafter):
        static_shapes = False

        def prefill(self, taps: torch.Tensor, text: torch.Tensor, row: KVCache) -> None:
            super().prefill(taps, text, row)
            read.append(time.perf_counter())

    class Costs(LoadCosts):
        def observe(self, step: Ran, seconds: float) -> None:
            began.append(time.perf_counter() - seconds)

    loop = DecodeLoop(target, Timed(make_head(), GROWTH), 2, speculation=SpeculationByLoad(Costs()))
    for request in (LONG, SHORT):
        loop.submit(request)
    while len(read) < 2:
        loop.step()
        assert began[-1:] >= read[-1:]
    assert began


@pytest.mark.parametrize(("prompt", "caught_up"), [(60, True), slow((4, False))], ids=["long", "short"])
def test_rows_write_without_drafts_beside_a_prompt_then_draft_as_before(target, make_head, prompt, caught_up) -> None:
    """A step with drafts and a piece of a prompt takes longer than a row should wait. Of a few missed positions the
    head reads all with its next draft, so that no row waits for the others' catching up.
    """
    head = make_head()

    def run(others: list[Request]) -> tuple[Watched, list[int], set[bool]]:
        drafter = Watched(head, GROWTH)
        loop = DecodeLoop(target, drafter, 2, prefill_chunk=8)
        assert loop.schedule.shares_steps
        loop.submit(replace(LONG, max_new_tokens=40))
        for _ in range(6):
            loop.step()
        drafter.missed.clear()
        drafted_beside = set()
        for request in others:
            number = loop.submit(request)
            while not loop.generations[number].tokens:
                before = len(drafter.rows)
                loop.step()
                drafted_beside.add(len(drafter.rows) > before)
        finish(loop)
        return drafter, loop.generations[0].tokens, drafted_beside

    alone, text, _ = run([])
    drafter, found, drafted_beside = run([Request([9] * prompt, 8)])
    assert found == text
    assert drafted_beside == {False}
    of_prompt = sum(drafter.missed) - (prompt - 1)
    assert of_prompt > 0 if caught_up else of_prompt == 0
    assert {length: tree for length, tree in alone.trees.items() if length in drafter.trees} == drafter.trees
    assert len(drafter.trees) > 20


def accepted(tokens: int) -> list[Accepted]:
    return [Accepted([*range(tokens)], [7] * tokens, drafted=6)]


RESTS = [*(DRAFT_RETRY_STEPS_MIN * times for times in (1, 2, 4)), DRAFT_RETRY_STEPS_MAX]
STEP = Ran(1, 7, 3)


def test_the_switch_neither_flickers_nor_sticks() -> None:
    """With 2 rows a step with six draft tokens costs 1 + 6 * 0.08 + 0.03 = 1.51 plain steps."""
    by_load = SpeculationByLoad(LoadCosts())
    assert by_load.pays(2)  # nothing is known yet
    by_load.observe(accepted(2), STEP)
    assert by_load.gain(2) == pytest.approx(2 / 1.51)
    for _ in range(300):
        by_load.observe(accepted(1), STEP)
    assert by_load.gain(2) == pytest.approx(1 / 1.51, rel=0.01)
    for _ in range(math.ceil(speculation.PATIENCE / 0.51)):
        assert by_load.is_on
        by_load.pays(2)
    assert not by_load.is_on
    # Between the two limits the state stays, whichever it is.
    by_load.tokens = 1.51 * 1.02 * by_load.steps
    assert not by_load.pays(2)
    by_load.tokens = 1.51 * 1.06 * by_load.steps
    assert by_load.pays(2)
    by_load.tokens = 1.51 * 1.02 * by_load.steps
    assert all(by_load.pays(2) for _ in range(50))


def test_drafts_that_still_do_not_pay_are_tried_again_ever_less_often() -> None:
    by_load = SpeculationByLoad(LoadCosts())

    def states(steps: int, tokens: int) -> list[bool]:
        found = []
        for _ in range(steps):
            found.append(by_load.pays(2))
            if found[-1]:
                by_load.observe(accepted(tokens), STEP)
        return found

    text = "".join("x" if on else " " for on in states(2000, tokens=1))
    rests = [len(rest) for rest in text.split("x") if rest]
    assert rests[:4] == RESTS
    assert max(rests) == DRAFT_RETRY_STEPS_MAX
    # The texts become easier: the next trial stays. Once it has lasted longer than the rest before it, rests are short
    # again.
    assert all(states(DRAFT_RETRY_STEPS_MAX + 200, tokens=3)[-150:])
    states(DRAFT_RETRY_STEPS_MAX, tokens=3)
    assert by_load.rest == DRAFT_RETRY_STEPS_MIN


def test_a_fall_of_the_load_ends_the_long_rests_of_a_busy_time() -> None:
    by_load, drafted = SpeculationByLoad(LoadCosts()), itertools.cycle([1, 2])
    rests = []
    for rows, steps in ((3, 6000), (1, 40)):  # a step costs 31 and 1.09 plain ones
        for _ in range(steps):
            if by_load.pays(rows):
                by_load.observe(accepted(next(drafted)), STEP)
        rests.append(by_load.rest)
    assert by_load.is_on
    assert rests == [DRAFT_RETRY_STEPS_MAX, DRAFT_RETRY_STEPS_MIN]


def test_a_lucky_step_in_each_trial_kept_the_rests_short() -> None:
    by_load = SpeculationByLoad(LoadCosts())
    text, lucky = "", 0
    for _ in range(4000):
        text += "x" if by_load.pays(2) else " "
        if text[-1] == "x":
            lucky = 0 if text[-2:] == " x" else lucky + 1
            by_load.observe(accepted(5 if lucky == 2 else 1), STEP)
    rests = [len(rest) for rest in text.split("x") if rest]
    assert rests[:4] == RESTS
    assert rests.count(DRAFT_RETRY_STEPS_MIN) == 1


def test_a_hard_passage_does_not_end_drafts_and_rows_without_drafts_teach_nothing() -> None:
    """A few steps below the average ended them for 256 steps: two of the next answers had no drafts."""
    by_load = SpeculationByLoad(LoadCosts())
    for tokens in [2] * 50 + [1] * 12 + [2] * 50:
        assert by_load.pays(2)
        by_load.observe(accepted(tokens), STEP)
    by_load = SpeculationByLoad(LoadCosts())
    by_load.observe([Accepted([0], [7], drafted=0)], STEP)
    assert by_load.gain(1) is None


@pytest.mark.parametrize("cost", [1.02, 1.1, 1.3, 1.6, 2.0, 3.0, 5.0, 9.0])
def test_drafts_of_which_none_is_accepted_cost_a_text_at_most_a_twentieth(cost: float) -> None:
    """Prompt lookup wrote at .6 of plain decoding's speed. A plain step takes 1, one with drafts `cost`."""
    by_load, seconds = SpeculationByLoad(SetCosts(level=cost - 1, nodes=1e9)), 0.0
    for _ in range(200):
        drafts = by_load.pays(1)
        seconds += cost if drafts else 1.0
        if drafts:
            by_load.observe(accepted(1), Ran(1, 2, 1))
    assert 200 / seconds > 0.95


def test_plain_steps_that_were_measured_on_a_busy_machine_are_corrected() -> None:
    """Drafts went on at 1.19 tokens a step: plain steps had been timed at three times what they take."""
    table = CostTable(MeasuredCosts((1, 2, 8), (3.0, 3.0, 3.1), 0.1, 0.1), width=1, most=8)
    by_load = SpeculationByLoad(table)
    by_load.observe(accepted(2), Ran(1, 2, 1))
    before: Any = by_load.gain(1)
    for _ in range(32):
        table.observe(Ran(1), 1.0)
        table.observe(Ran(1, 2, 1), 3.1)
    after: Any = by_load.gain(1)
    assert after < 0.5 * before
