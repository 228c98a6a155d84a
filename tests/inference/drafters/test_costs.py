"""Costs of a decode step: measured at load and never in a request, kept on disk, corrected by the steps that run."""

import json
import shutil
from collections.abc import Callable
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
from headstart.inference.drafters.cost_measurement import NEEDED_WORKS, cost_table, measured_from, time_works
from headstart.inference.drafters.costs import CORRECTION_STEPS, CostAware, CostTable, MeasuredCosts, Ran
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.engine.loop import generate
from headstart.inference.kernels import FastForm
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.ranks import Ranks
from headstart.recipes.schema import DecodeSection
from headstart.recipes.schema_heads import Eagle3Section

PROMPT, NEW_TOKENS = [5, 17, 3], 10
MEASURED = MeasuredCosts((1, 2, 8, 32), (1.0, 1.1, 1.3, 2.0), 0.2, 0.1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_measurement, "SECONDS_ON_CPU", 4.0)  # all that is timed, once
    monkeypatch.setattr(cost_measurement, "TIMED_RUNS", 1)
    monkeypatch.setattr(cost_measurement, "FREE_SHARE", 0.0)  # as if nothing else ran
    return tmp_path / "costs"


@pytest.fixture
def fresh(target: TargetModel) -> Callable[[], TargetModel]:
    """The shared target as another process would load it: nothing is kept with it."""
    return lambda: TargetModel(target.model, target.taps)


@pytest.fixture
def anew(folder, fresh, make_head, monkeypatch) -> Callable[..., CostTable]:
    """anew(**sizes): the costs for a target that was just loaded, from disk or measured in a moment."""
    shutil.rmtree(folder, ignore_errors=True)

    def load(head: Any = None, **sizes: int) -> CostTable:
        return cost_table(fresh(), head or make_head(), **{"width": 2, "nodes": 6, **sizes})

    return load


def refuse(*_: Any) -> MeasuredCosts:
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
        assert len(growth.costs.ratios[1, True]) > number * NEW_TOKENS / 5
    assert growth.costs.ratios.keys() == {(1, True)}


def test_costs_are_read_from_disk_and_not_measured_again(folder, anew, make_head, monkeypatch) -> None:
    measured = anew().measured
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(cost_measurement, "measure_costs", refuse)
    assert anew(make_head(seed=2)).measured == measured
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
        assert table.measured.first_level > 0
    assert load_costs(section, target, PLAIN) is None


def test_costs_measured_on_a_busy_machine_were_kept_for_quiet_ones(folder, anew, monkeypatch) -> None:
    """A step of 19 tokens had been timed beside a test suite, and trees were too large in every later run."""
    monkeypatch.setattr(cost_measurement, "FREE_SHARE", 2.0)  # others take the machine
    assert anew().measured.level >= 0
    assert not folder.exists()
    monkeypatch.setattr(cost_measurement, "FREE_SHARE", 0.0)
    monkeypatch.setattr(cost_measurement, "SECONDS_ON_CPU", 0.0)  # a large target, which was measured at every start
    assert len(anew().measured.tokens) == 2
    assert len(list(folder.iterdir())) == 1


DAMAGES: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[: len(text) // 2],
    "other dtype": lambda text: text.replace('"dtype": "torch.float32"', '"dtype": "torch.float16"'),
    "other key": lambda text: text.replace('"width": 2', '"width": "2"'),
    "negative": lambda text: with_measured(text, target=[-1.0] * 4),
    "descending": lambda text: with_measured(text, tokens=[4, 2, 1, 8]),
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
        assert min(json.loads(path.read_text())["measured"]["target"]) > 0
        assert path.read_text() != damaged, symptom
    shutil.rmtree(folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "file"))
    assert anew().measured.target[0] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def with_measured(text: str, **changed: Any) -> str:
    content = json.loads(text)
    return json.dumps({**content, "measured": {**content["measured"], **changed}})


def test_costs_grow_with_nodes_and_rows_and_captured_steps_cost_the_next_power_of_two() -> None:
    table = CostTable(MEASURED, width=4, most=100)
    for rows in (1, 3):
        costs, more = table.of(rows), table.of(rows + 1)
        assert len(costs.verify) == 100
        assert (numpy.diff([costs.plain, *costs.verify]) > 0).all()
        assert (numpy.subtract(more.verify, costs.verify) > 0).all()
        assert more.level > costs.level
        assert costs.drafting(3) == pytest.approx(costs.first_level + 2 * costs.level)
    verify = CostTable(MEASURED, width=4, most=40, captured=True).of(1).verify
    assert len(set(verify[8:15])) == 1  # 10 to 16 nodes
    assert verify[15] > verify[14]


def test_observed_steps_of_both_kinds_correct_what_plain_steps_take() -> None:
    table = CostTable(MEASURED, width=4, most=8)
    costs, measured = table.of(1), table.plain(1)

    def observe(count: int, plain: float, drafted: float) -> float:
        """Steps took these times what was measured; returns the correction."""
        for _ in range(count):
            table.observe(Ran(1), plain * costs.plain)
            table.observe(Ran(1, 8, 3), drafted * (costs.drafting(3) + costs.verify[6]))
        return table.plain(1) / measured

    assert table.plain(1) == costs.plain
    assert observe(CORRECTION_STEPS // 4, 1.5, 3.0) == pytest.approx(0.5 ** (2 / 3))
    assert 0.5 < observe(CORRECTION_STEPS, 1.5, 3.0) < 0.6
    assert observe(CORRECTION_STEPS // 4, 1000.0, 3.0) < 0.6  # a few slow steps
    assert observe(CORRECTION_STEPS, 3.0, 1.0) == costs.verify[0] / costs.plain  # no more than with a draft token
    assert table.plain(2) == table.of(2).plain
    assert table.of(1) == costs
    still = CostTable(MEASURED, width=4, most=8, learns=False)
    still.observe(Ran(1), 1.0)
    assert not still.ratios


def test_a_slow_moment_makes_no_size_dear_and_a_slow_machine_measures_only_what_is_needed(monkeypatch) -> None:
    times = {("target", size): 30.0 + size for size in (1, 2, 6, 16, 64)} | {("target", 6): 197.0}
    times |= {("levels", 1): 5.0, ("levels", 3): 9.0}
    assert measured_from(times) == MeasuredCosts((1, 2, 6, 16, 64), (31.0, 32.0, 46.0, 46.0, 94.0), 5.0, 2.0)
    now = [0.0]
    monkeypatch.setattr(cost_measurement, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def work() -> None:
        now[0] += 60

    target: Any = SimpleNamespace(device=torch.device("cpu"), ranks=Ranks())
    works = {("target", size): work for size in range(10)}
    times = time_works(works, target)
    assert list(times) == [("target", size) for size in range(NEEDED_WORKS)]
    assert now[0] == NEEDED_WORKS * 60
    target.ranks.agreed = lambda mine: True  # ranks that compute every pass together follow the first one's clock
    assert len(time_works(dict.fromkeys(works, lambda: None), target)) == NEEDED_WORKS


def test_captured_steps_are_measured_and_observed_too(folder, fresh, make_head, monkeypatch) -> None:
    """On a CPU the functions that CUDA would capture run as they are."""
    monkeypatch.setattr(TargetModel, "may_capture", True)
    target, head = fresh(), make_head()
    for width, nodes, sizes in ((3, 12, (1, 2, 4, 8, 16)), (1, 3, (1, 2, 4))):
        growth = cost_aware(target, head, width, nodes)
        assert growth.costs.captured
        assert growth.costs.measured.tokens == sizes
    plain = generate(target, PROMPT, NEW_TOKENS)
    drafted = generate(target, PROMPT, NEW_TOKENS, drafter=HeadDrafter(head, growth), static=True)
    assert drafted.tokens == plain.tokens
    assert growth.costs.ratios[1, True]


def test_the_costs_of_a_target_that_verifies_chains_are_measured_once(folder, monkeypatch) -> None:
    """`headstart chat` ended in an index error: a chain is deeper than the positions whose noise a step draws. And the
    server measured a second table, of wider trees."""
    target = TargetModel(make_family("qwen3_next"), (0, 1, 2))
    head = new_head(Eagle3Section(kind="eagle3", taps=target.taps), target.frozen, DraftVocab.full(97), seed=1).eval()
    section = DecodeSection(growth="cost_aware", depth=3)
    growth = growth_from_recipe(section, target, head)
    assert isinstance(growth, CostAware)
    assert growth.width == 1
    assert growth.costs.measured.tokens[-1] >= recurrent.WINDOW + 4  # a pass reads accepted tokens again
    monkeypatch.setattr(cost_measurement, "measure_costs", refuse)
    assert load_costs(section, target, HeadDrafter(head, growth)) is growth.costs
    plain = generate(target, PROMPT, NEW_TOKENS)
    assert generate(target, PROMPT, NEW_TOKENS, drafter=HeadDrafter(head, growth)).tokens == plain.tokens
