"""Costs of a decode step: measured at load and never in a request, kept on disk, corrected by the steps that run."""

import gc
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from families import make_family
from shared_fixtures import HeadFactory

from headstart.heads.kinds.checkpoint import new_head
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.heads.vocab import DraftVocab
from headstart.inference.core import recurrent
from headstart.inference.core.drafter import PLAIN
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters import cost_measurement
from headstart.inference.drafters.build import growth_for, growth_from_recipe, load_costs
from headstart.inference.drafters.cost_measurement import NEEDED_WORKS, cost_table, surface_from, time_works
from headstart.inference.drafters.costs import CORRECTION_STEPS, CostAware, CostSurface, CostTable, Drafted, Situation
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.engine.loop import generate
from headstart.inference.kernels import FastForm
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import DecodeSection
from headstart.recipes.schema_heads import Eagle3Section

PROMPT, NEW_TOKENS = [5, 17, 3], 10
SURFACE = CostSurface((1, 2, 8, 32), (1.0, 1.1, 1.3, 2.0), 32, (1e-4, 4e-4), (0.1, 0.3), (0.2, 1e-5), (0.1, 1e-5))
AT = Situation(context=300, batch=1, greedy=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_measurement, "SECONDS_ON_CPU", 2.0)  # all that is timed, once
    monkeypatch.setattr(cost_measurement, "TIMED_RUNS", 1)
    return tmp_path / "costs"


@pytest.fixture
def fresh(target: TargetModel) -> Callable[[], TargetModel]:
    """The shared target as another process would load it: nothing is kept with it."""
    return lambda: TargetModel(target.model, target.taps)


@pytest.fixture
def anew(folder, fresh, make_head, monkeypatch) -> Callable[..., CostTable]:
    """anew(**sizes): the costs for a target that was just loaded, from disk or measured in a moment."""
    gc.collect()  # tables of tests before would write what they observed here
    shutil.rmtree(folder, ignore_errors=True)

    def load(head: Any = None, **sizes: int) -> CostTable:
        return cost_table(fresh(), head or make_head(), **{"width": 2, "nodes": 6, **sizes})

    return load


def refuse(*_: Any) -> CostSurface:
    raise AssertionError("measured")


def cost_aware(target: TargetModel, head: Eagle3Head, width: int, nodes: int) -> CostAware:
    section = DecodeSection(growth="cost_aware", depth=3, width=width, nodes=nodes)
    growth = growth_from_recipe(section, target, head)
    assert isinstance(growth, CostAware)
    return growth


def test_costs_of_other_kernels_on_disk_were_taken_for_those_of_new_ones(target, make_head, monkeypatch) -> None:
    head, keys = make_head(), []
    found = ("torch", "16", "3000"), ("own", "16", "3000"), ("own", "8", "3000"), ("own", "8", "20000")
    for kernel, bits, turns in found:
        monkeypatch.setattr(FastForm, "packed_as", lambda *_, packed=(kernel, bits): [*packed])
        monkeypatch.setenv("GOMP_SPINCOUNT", turns)
        keys.append(cost_measurement.cost_key(target, head, 2, 4, 1))
    assert keys[0] != keys[1] != keys[2] != keys[3]


def test_no_request_measures_and_every_request_is_observed(folder, fresh, make_head, monkeypatch) -> None:
    target, head = fresh(), make_head()
    growth = cost_aware(target, head, 3, 12)
    monkeypatch.setattr(cost_measurement, "measure_costs", refuse)
    for number, sampling in enumerate((Sampling(), Sampling(1.0, seed=3)), start=1):
        plain = generate(target, PROMPT, NEW_TOKENS, sampling)
        drafted = generate(target, PROMPT, NEW_TOKENS, sampling, HeadDrafter(head, growth))
        assert drafted.tokens == plain.tokens
        assert growth.costs.num_observed > number * NEW_TOKENS / 5
    assert growth.costs.ratios.keys() == {1}


def test_costs_and_observed_steps_are_read_from_disk_and_not_measured_again(
    folder, anew, make_head, monkeypatch
) -> None:
    table = anew()
    surface, before = table.surface, table.now(AT).target
    for _ in range(CORRECTION_STEPS):
        observe(table, AT, 4, 100)
    del table
    gc.collect()
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(cost_measurement, "measure_costs", refuse)
    found = anew(make_head(seed=2))
    assert found.surface == surface
    assert found.now(AT).target[2] > 3 * before[2]
    for other in ({"width": 3}, {"nodes": 7}, {"batch": 4}, {"head": make_head(intermediate_size=48)}):
        with pytest.raises(AssertionError, match="measured"):
            anew(**other)


def test_drafts_of_every_kind_are_measured(folder: Path, target: TargetModel, make_head: HeadFactory) -> None:
    """Only those of heads were, so that prompt lookup went on at .6 of plain decoding's speed."""
    section = DecodeSection(drafter="prompt_lookup", growth="dynamic", depth=3, max_batch=1)
    growth = Dynamic(3, 2, 6)
    head, lookup = HeadDrafter(make_head(), growth), Lookup(growth_for(section, target))
    drafters = head, lookup, ModelDrafter(target, growth, target)
    tables: list[Any] = [load_costs(section, target, drafter) for drafter in drafters]
    assert len({id(table) for table in tables}) == len(list(folder.iterdir())) == 3
    for table in tables:
        assert table.surface.first_level[0] > 0
        assert table.surface.complete
    assert load_costs(section, target, PLAIN) is None


def test_a_measurement_that_had_no_time_for_all_sizes_is_not_kept_on_disk(folder, anew, monkeypatch) -> None:
    monkeypatch.setattr(cost_measurement, "PATIENCE_FACTOR", 0.0)
    monkeypatch.setattr(cost_measurement, "FREE_SHARE", math.inf)  # other processes took the machine
    table = anew()
    assert not table.surface.complete
    observe(table, AT, 4, 1.0)
    del table
    gc.collect()
    assert not folder.exists()
    monkeypatch.setattr(cost_measurement, "FREE_SHARE", 0.0)  # a large target was measured at every start
    anew()
    assert len(list(folder.iterdir())) == 1


def test_costs_measured_on_a_busy_machine_were_kept_for_quiet_ones(folder, anew) -> None:
    for factor, kept in ((0.6, True), (0.3, False)):
        table = anew()
        for _ in range(CORRECTION_STEPS):
            observe(table, AT, 4, factor, factor)
        del table
        gc.collect()
        assert len([*folder.iterdir()]) == kept


DAMAGES: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[: len(text) // 2],
    "other dtype": lambda text: text.replace('"dtype": "torch.float32"', '"dtype": "torch.float16"'),
    "other key": lambda text: text.replace('"width": 2', '"width": "2"'),
    "negative": lambda text: with_surface(text, target=[-1.0] * 4),
    "descending": lambda text: with_surface(text, tokens=[4, 2, 1, 8]),
}


def test_a_broken_file_is_measured_anew_and_a_locked_cache_is_no_error(folder, anew, tmp_path, monkeypatch) -> None:
    anew()
    (path,) = folder.iterdir()
    for symptom, damage in DAMAGES.items():
        damaged = damage(path.read_text())
        assert damaged != path.read_text(), symptom
        path.write_text(damaged)
        anew()
        assert json.loads(path.read_text())["key"]["width"] == 2
        assert min(json.loads(path.read_text())["surface"]["target"]) > 0
        assert path.read_text() != damaged, symptom
    shutil.rmtree(folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "file"))
    assert anew().surface.target[0] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def with_surface(text: str, **changed: Any) -> str:
    content = json.loads(text)
    return json.dumps({**content, "surface": {**content["surface"], **changed}})


def observe(table: CostTable, at: Situation, nodes: int, of_target: float, of_drafting: float = 1.0) -> None:
    """Let a table learn from a step of three levels whose parts took these times what was measured."""
    first, further = table.surface.drafting(at, table.width)
    drafting = of_drafting * (first + 2 * further)
    target = of_target * float(table.surface.seconds(numpy.array([float(nodes)]), at)[0])
    table.observe(Drafted(at, nodes, 3, drafting), drafting + target)


def test_costs_grow_with_nodes_context_and_batch_and_captured_steps_cost_the_next_power_of_two() -> None:
    numbers = random.Random(0)
    table = CostTable(SURFACE, width=4)
    situations = [Situation(64 * n, batch, greedy) for n in (2, 9, 40) for batch in (1, 3) for greedy in (True, False)]
    for _ in range(2):
        for at in situations:
            costs = table.now(at).verify(100)
            assert (numpy.diff(costs) > 0).all()
            assert (table.now(replace(at, context=at.context + 64)).verify(100) > costs).all()
            if not table.num_observed:
                assert (table.now(replace(at, batch=at.batch + 1)).verify(100) > costs).all()
        for _ in range(400):
            observe(table, numbers.choice(situations), numbers.randint(1, 64), numbers.uniform(0.1, 10))
    costs = CostTable(SURFACE, width=4, captured=True).now(AT).verify(40)
    assert len(set(costs[8:15].tolist())) == 1  # 10 to 16 nodes
    assert costs[15] > costs[14]


def test_observed_steps_move_the_costs_of_their_batch_size_towards_what_they_took() -> None:
    table = CostTable(SURFACE, width=4)
    before = table.now(AT)
    for count in (CORRECTION_STEPS // 4, CORRECTION_STEPS):
        for _ in range(count):
            observe(table, AT, 8, of_target=3, of_drafting=2)
        ratio = table.now(AT).target[0] / before.target[0]
        assert 2 < ratio < 3.01
    assert ratio > 2.6
    assert table.now(AT).target == pytest.approx([ratio * seconds for seconds in before.target])
    assert table.now(AT).first_level / before.first_level == pytest.approx(2, rel=0.1)
    assert table.now(AT).level / before.level == pytest.approx(2, rel=0.1)
    other = replace(AT, batch=2)
    assert table.now(other) == CostTable(SURFACE, width=4).now(other)


def test_a_few_slow_steps_do_not_move_the_costs_and_both_parts_follow_a_sum() -> None:
    table = CostTable(SURFACE, width=4)
    usual = table.now(AT)
    for step in range(CORRECTION_STEPS):
        slow = step % 8 == 0
        observe(table, AT, 4 if slow else 8, 1000 if slow else 1, 1000 if slow else 1)
    assert table.now(AT) == usual
    first, further = SURFACE.drafting(AT, 4)
    seconds = first + 2 * further + float(SURFACE.seconds(numpy.array([8.0]), AT)[0])
    for _ in range(2 * CORRECTION_STEPS):
        table.observe(Drafted(AT, 8, 3, None), 2 * seconds)
    now = table.now(AT)
    assert now.target[0] / usual.target[0] == pytest.approx(now.first_level / usual.first_level)
    assert now.level / usual.level == pytest.approx(2, rel=0.1)


def test_measured_costs_are_those_of_the_machine() -> None:
    """On a machine whose steps cost what a formula says, the surface says the same between the timed sizes."""

    def step(nodes: int, context: int, batch: int = 1, sampled: bool = False) -> float:
        return 30 + 2 * nodes * batch + batch * context * (0.01 + 0.001 * nodes) + batch * sampled * (1 + nodes / 2)

    def draft(levels: int, context: int) -> float:
        return 5 + 0.002 * context + (levels - 1) * (3 + 0.001 * context)

    times = {("target", size): step(size, 128) for size in (1, 2, 8, 32)}
    times |= {("far", size): step(size, 2048) for size in (1, 32)}
    times |= {("sampled", size): step(size, 128, sampled=True) for size in (1, 32)}
    times |= {("batch", size): step(size, 128, batch=4) for size in (16, 32)}
    times |= {("first", context): draft(1, context) for context in (128, 2048)}
    times |= {("levels", context): draft(3, context) for context in (128, 2048)}
    surface = surface_from(times, 128, 2048, 32, 4, 3)
    for nodes in (1, 5, 20, 32):
        for context, batch, sampled in ((128, 1, False), (1000, 1, True), (4000, 2, False), (700, 4, True)):
            found = surface.seconds(numpy.array([float(nodes)]), Situation(context, batch, not sampled))
            assert found[0] == pytest.approx(step(nodes, context, batch, sampled))
    first, further = surface.drafting(Situation(700, 1, True), 4)
    assert (first, first + 2 * further) == pytest.approx((draft(1, 700), draft(3, 700)))


def test_a_slow_moment_makes_no_size_dear_and_a_slow_machine_measures_only_what_is_needed(monkeypatch) -> None:
    times = {("target", size): 30.0 + size for size in (1, 2, 6, 16, 64)} | {("target", 6): 197.0}
    times |= {("first", 128): 5.0, ("levels", 128): 9.0}
    surface = surface_from(times, 128, 2048, 64, 1, 3)
    assert surface.target == (31.0, 32.0, 46.0, 46.0, 94.0)
    now = [0.0]
    monkeypatch.setattr(cost_measurement, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def work() -> None:
        now[0] += 60

    times = time_works({("target", size): work for size in range(10)}, torch.device("cpu"))
    assert list(times) == [("target", size) for size in range(NEEDED_WORKS)]
    assert now[0] == NEEDED_WORKS * 60
    few = {("target", 1): 60.0, ("first", 128): 5.0, ("target", 32): 90.0, ("levels", 128): 15.0}
    assert surface_from(few, 128, 2048, 32, 1, 3).target == (60.0, 90.0)


def test_captured_steps_are_measured_and_observed_too(folder, fresh, make_head, monkeypatch) -> None:
    """On a CPU the functions that CUDA would capture run as they are."""
    monkeypatch.setattr(TargetModel, "may_capture", True)
    target, head = fresh(), make_head()
    for width, nodes, sizes in ((3, 12, (1, 2, 4, 8, 16)), (1, 3, (1, 2, 4))):
        growth = cost_aware(target, head, width, nodes)
        assert growth.costs.captured
        assert growth.costs.surface.tokens == sizes
    plain = generate(target, PROMPT, NEW_TOKENS)
    drafted = generate(target, PROMPT, NEW_TOKENS, drafter=HeadDrafter(head, growth), static=True)
    assert drafted.tokens == plain.tokens
    assert growth.costs.ratios


def test_the_costs_of_a_target_that_verifies_chains_are_measured_once(folder, monkeypatch) -> None:
    """`headstart chat` ended in an index error: a chain is deeper than the positions whose noise a step draws. And the
    server measured a second table, of wider trees."""
    target = TargetModel(make_family("qwen3_next"), (0, 1, 2))
    head = new_head(Eagle3Section(kind="eagle3", taps=target.taps), target.frozen, DraftVocab.full(97), seed=1).eval()
    section = DecodeSection(growth="cost_aware", depth=3)
    growth = growth_from_recipe(section, target, head)
    assert isinstance(growth, CostAware)
    assert growth.width == 1
    assert growth.costs.surface.tokens[-1] >= recurrent.WINDOW + 4  # a pass reads accepted tokens again
    monkeypatch.setattr(cost_measurement, "measure_costs", refuse)
    assert load_costs(section, target, HeadDrafter(head, growth)) is growth.costs
    plain = generate(target, PROMPT, NEW_TOKENS)
    assert generate(target, PROMPT, NEW_TOKENS, drafter=HeadDrafter(head, growth)).tokens == plain.tokens
