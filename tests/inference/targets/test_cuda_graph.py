"""Laws of static steps: they draft and accept exactly what dynamic steps do."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from matrix import slow, slow_unless
from scripted import SetCosts, Texts, half_right
from shared_fixtures import HeadFactory, ModelFactory

from headstart.heads.calibration import Calibration
from headstart.inference.core.drafter import Drafter
from headstart.inference.core.request import Generation, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import stacked, verify
from headstart.inference.drafters.costs import CostAware
from headstart.inference.drafters.growth import Dynamic, Fixed
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.drafters.repeats import Repeats
from headstart.inference.engine import step
from headstart.inference.engine.loop import DecodeLoop, generate, generate_batch, loop_of
from headstart.inference.targets.cuda_graph import SpareSteps
from headstart.inference.targets.model import TargetModel

PROMPTS = [[5, 6, 7, 11], [3], [*range(30)], [9, 9, 1], [40, 41]]
NEW_TOKENS = [3, 16, 6, 16, 9]  # short texts end first, and then the last row moves into their place
MIXED = [Sampling(), Sampling(1.0, seed=1), Sampling(0.7, seed=2), Sampling(), Sampling(1.0, seed=3)]
SHAPES = [Dynamic.chain(3), Dynamic(4, 4, 12), Fixed(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))]


def run(target: TargetModel, drafter: HeadDrafter, samplings: list[Sampling], static: bool) -> list[Generation]:
    rows = zip(PROMPTS, NEW_TOKENS, samplings, strict=True)
    requests = [Request(prompt, count, sampling) for prompt, count, sampling in rows]
    return generate_batch(target, requests, drafter, 3, static)


@pytest.fixture
def verified_trees(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    trees: list[list[list[int]]] = []

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def record(tree: Tree, *rest: object) -> Any:
            trees.append(tree.tokens.tolist())
            return function(tree, *rest)

        return record

    monkeypatch.setattr(step, "stacked", recording(stacked))
    monkeypatch.setattr(step, "verify", recording(verify))
    return trees


@pytest.mark.each_value
@pytest.mark.parametrize("growth", SHAPES, ids=lambda growth: type(growth).__name__ + str(growth.depth))
@pytest.mark.parametrize("samplings", [[Sampling()] * 5, [Sampling(1.0, seed=s) for s in range(5)]], ids=["T=0", "T=1"])
def test_a_row_that_moved_drafts_as_before(target, make_head, verified_trees, growth, samplings) -> None:
    """The head's slots from a captured step must move with the row. When they did not, only acceptance suffered."""
    head = make_head()
    if growth.depth == 4:
        head.calibration = Calibration((2.0, 1.5), (1.1, 0.8), (0.5, 0.0, 0.3))
    drafter = HeadDrafter(head, growth)
    static = run(target, drafter, samplings, True)
    static_trees = [*verified_trees]
    verified_trees.clear()
    dynamic = run(target, drafter, samplings, False)
    assert [g.tokens for g in static] == [g.tokens for g in dynamic]
    # Near the end of a text the dynamic trees are smaller; until then every node is the same.
    trees = zip(static_trees, verified_trees, strict=True)
    pairs = [(one, other) for one, other in trees if len(one[0]) == len(other[0])]
    assert len(pairs) > 8
    assert all(one == other for one, other in pairs)


@pytest.mark.parametrize("samplings", [slow([Sampling()] * 5), MIXED], ids=["greedy", "mixed"])
def test_rows_that_fill_a_captured_batch_up_leave_the_prompt_that_is_being_read_alone(
    target: TargetModel, make_head: HeadFactory, samplings: list[Sampling]
) -> None:
    drafter = HeadDrafter(make_head(), Dynamic(3, 4, 12))
    loop = DecodeLoop(target, drafter, 5, True, prefill_chunk=4)
    prompts = [[5, 6, 7], [3], [8, 9], [*range(40)], [40, 41]]
    requests = [Request(prompt, 12, own) for prompt, own in zip(prompts, samplings, strict=True)]
    rows_while_reading = set()
    for request in requests:
        loop.submit(request)
    while not loop.idle:
        loop.step()
        if loop.batch.partial is not None:
            rows_while_reading.add(len(loop.batch.rows))
    assert 3 in rows_while_reading  # they are run as four
    alone = [generate_batch(target, [request], drafter, 1, False)[0].tokens for request in requests]
    assert [found.tokens for found in loop.generations.values()] == alone


def test_rows_that_come_and_go_with_temperatures_of_their_own_share_few_graphs(make_model, make_head) -> None:
    """One for each power of two of rows, and for whether any row is sampled."""
    target = TargetModel(make_model(), (0, 1, 2))
    drafter = HeadDrafter(make_head(), Dynamic(3, 4, 12))
    samplings = [Sampling(0.3 * (number % 4), top_p=1 - 0.1 * (number % 3), seed=number) for number in range(9)]
    requests = [Request([5, number], 4 + number, own) for number, own in enumerate(samplings)]
    found = generate_batch(target, requests, drafter, 8, True)
    assert [each.tokens for each in found] == [
        each.tokens for each in generate_batch(target, requests, drafter, 8, False)
    ]
    (step,) = target.singleton(SpareSteps)
    keys = {(shapes[0][0], form.sampled) for _, shapes, form, _ in step.captured}
    assert keys <= {(rows, sampled) for rows in (1, 2, 4, 8) for sampled in (False, True)}
    assert len(step.captured) <= 2 * len(keys)  # the form of top-p besides that of temperatures


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_server_captures_next_to_nothing_while_requests_wait(make_model, make_head, temperature) -> None:
    """25 requests come and go in 16 rows, whose trees are of all sizes: at most 3 % of the steps capture."""
    target = TargetModel(make_model(), (0, 1, 2))
    drafter = HeadDrafter(make_head(), CostAware(3, 4, 12, SetCosts()), Repeats(4))
    loop, draw = DecodeLoop(target, drafter, 16, True), random.Random(0)
    loop.capture_ahead()
    step = loop.batch.static
    assert step is not None
    before, steps, waiting = set(step.captured), 0, 25
    while waiting or not loop.idle:
        if waiting and draw.random() < 0.3:
            prompt, count = [draw.randrange(90) for _ in range(6)], draw.randrange(4, 12)
            loop.submit(Request(prompt, count, Sampling(temperature, seed=waiting)))
            waiting -= 1
        if not loop.idle:
            loop.step()
            steps += 1
    assert step is loop.batch.static
    assert steps > 40
    assert len(set(step.captured) - before) <= 0.03 * steps


def test_a_static_step_is_reused_by_the_next_run_that_it_fits(make_model: ModelFactory) -> None:
    target = TargetModel(make_model(), ())
    prompt = [*range(20)]
    for _ in range(3):
        generate(target, prompt, 10, static=True)
    assert len(target.singleton(SpareSteps)) == 1
    (first,) = target.singleton(SpareSteps)
    stream = loop_of(target, [Request(prompt, 10)], static=True).run()
    next(stream)
    assert target.singleton(SpareSteps) == []  # in use
    generate(target, prompt, 5, static=True)  # meanwhile, in a cache of its own
    stream.close()
    assert target.singleton(SpareSteps) == [first]
    loop_of(target, [Request(prompt, 10)], static=True)  # a loop that never runs borrows no step
    assert target.singleton(SpareSteps) == [first]
    target = TargetModel(make_model(max_position_embeddings=4096), ())
    for length in (10, 300, 600, 900):  # growing prompts do not pile up caches
        generate(target, [1] * length, 2, static=True)
    assert [spare.cache.target.capacity for spare in target.singleton(SpareSteps)] == [1024]


AHEAD: dict[str, Callable[[Texts], Drafter | None]] = {
    "plain": lambda texts: None,
    "tree": half_right(Dynamic(3, 3, 9)),
    "cost-aware": half_right(CostAware(4, 3, 9, SetCosts())),
    "chain": half_right(Dynamic.chain(4)),
    "fixed": half_right(SHAPES[2]),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", slow_unless(["plain", "tree", "cost-aware"], AHEAD))
@pytest.mark.parametrize("cancelled", [None, 1])
def test_steps_are_launched_before_the_last_one_is_read(target, make_head, monkeypatch, name, cancelled) -> None:
    """Texts that come, end by their length or by an end token, stop, or are cancelled, are those of steps in turn."""
    alone = [generate(target, prompt, 12, own).tokens for prompt, own in zip(PROMPTS, MIXED, strict=True)]
    whole = [prompt + text for prompt, text in zip(PROMPTS, alone, strict=True)]
    ends, events = alone[3][7], list[str]()
    launch, read = step.DecodeStep._launch, step.InFlight.read

    def noting(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*given: Any) -> Any:
            events.append(event)
            return function(*given)

        return note

    def decoded() -> tuple[list[Generation], list[list[int]]]:
        drafter = AHEAD[name](Texts(target, whole, make_head))
        loop = DecodeLoop(target, drafter, 3, True, prefix_memory=2**20)
        for number, (prompt, own) in enumerate(zip(PROMPTS, MIXED, strict=True)):
            loop.submit(Request(prompt, 12, own, end_tokens=(ends,) if number == 3 else ()))
        written: list[list[int]] = [[] for _ in PROMPTS]
        while not loop.idle:
            for block in loop.step():
                written[block.number] += block.tokens
            if cancelled is not None and len(loop.generations[cancelled].tokens) > 4:
                loop.cancel(cancelled)
        loop.close()
        return [*loop.generations.values()], written

    with monkeypatch.context() as patch:
        patch.setattr(step.DecodeStep, "_runs_ahead", lambda _: False)
        in_turn, _ = decoded()
    monkeypatch.setattr(step.DecodeStep, "_launch", noting("launch", launch))
    monkeypatch.setattr(step.InFlight, "read", noting("read", read))
    found, written = decoded()
    assert [text.tokens for text in found] == written == [text.tokens for text in in_turn]
    assert written[0] == alone[0]
    assert written[3] == alone[3][: alone[3].index(ends) + 1]
    if name != "cost-aware":  # it plans from surveys, which come in other steps
        assert [text.stats.accepted_at_depth for text in found] == [text.stats.accepted_at_depth for text in in_turn]
    reads = [place for place, event in enumerate(events) if event == "read"]
    ahead = [2 * events[:place].count("launch") - place for place in reads]
    if cancelled is None:  # else the step in flight is run again
        assert ahead.count(2) > len(ahead) / 3
        assert max(ahead) == 2
