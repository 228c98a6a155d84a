"""Laws of the progress display: counted bars on a terminal; in a log, a line now and then in every stage."""

import re
import sys
from io import StringIO
from logging import StreamHandler, getLogger
from pathlib import Path

import pytest
from bad_inputs import Typed
from families import make_family
from tiny_run import build_run
from transformers.utils import logging

from headstart.common.progress import Progress
from headstart.inference.engine.loop import generate
from headstart.inference.targets import check
from headstart.inference.targets.loading import MISSING_KERNELS
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import TargetSection

ROOT = Path(__file__).resolve().parents[2]
CODES = r"\x1b\[[0-9;?]*[A-Za-z]"  # of a terminal: colours, cursor


class Screen(StringIO):
    """A terminal that keeps everything written."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "lines", "second"),
    [
        (10.0, 335, "work: 3 of 1000 items (0%), 0.1 items/s, 2:46:10 left"),  # one every 30 seconds
        (0.15, 21, "work: 50 of 1000 items (5%), 6.67 items/s, 0:02:23 left"),  # one every 5 percent
        (1 / 64, 5, "work: 320 of 1000 items (32%), 64 items/s, 0:00:11 left"),  # at least 5 seconds apart
    ],
)
def test_a_log_gets_a_line_now_and_then(capsys, seconds, lines, second):
    clock = Clock()
    with Progress("work", 2, "items", active=False) as silent:  # of another rank
        silent.advance(2)
        silent.say("a line")
    with Progress("work", 1000, "items", clock=clock) as progress:
        for _ in range(1000):
            clock.now += seconds
            progress.advance(1)
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["work: 0 of 1000 items (0%)", second]
    assert said[-1].startswith("work: all 1000 items done in ")
    assert len(said) == lines


def test_what_an_earlier_run_did_does_not_count_for_the_speed(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with pytest.raises(KeyboardInterrupt), Progress("work", 100, "items", done=20, clock=clock) as progress:  # noqa: PT012
        progress.skip(30)
        clock.now += 40
        progress.advance(10, "loss 1.25")
        raise KeyboardInterrupt
    assert capsys.readouterr().out.splitlines() == [
        "work: 20 of 100 items (20%)",
        "work: 60 of 100 items (60%), 0.25 items/s, 0:02:40 left, loss 1.25",
    ]


def test_the_first_text_of_a_batch_does_not_stand_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with pytest.raises(KeyboardInterrupt), Progress("work", 80, "texts", clock=clock, together=8) as progress:  # noqa: PT012
        clock.now += 40
        progress.advance(1)
        progress.advance(7)
        clock.now += 40
        progress.advance(1)
        raise KeyboardInterrupt
    assert capsys.readouterr().out.splitlines()[1:] == [
        "work: 1 of 80 texts (1%), 0.113 texts/s, 0:11:11 left",
        "work: 9 of 80 texts (11%), 0.156 texts/s, 0:07:12 left",
    ]


@pytest.mark.slow
def test_every_stage_says_in_a_log_how_far_it_is(tmp_path: Path, typed: Typed) -> None:
    recipe = str(build_run(tmp_path))
    said = typed("train", recipe)
    report = ["report", recipe, "report.num_prompts=2", "report.baselines=[plain, chain]", "report.temperatures=[0.0]"]
    said_by_report = typed(*report)
    assert said.code == said_by_report.code == 0
    lines = (said.out + said_by_report.out).splitlines()
    for stage, what in (("responses", "16 samples"), ("features", "16 samples"), ("training", "8 steps")):
        assert f"{stage}: 0 of {what} (0%)" in lines
        assert [line for line in lines if line.startswith(f"{stage}: all {what} done in 0:00:")]
    assert "report: 0 of 4 texts (0%)" in lines
    assert [line for line in lines if line.startswith("report: all 4 texts done in 0:00:")]
    assert "measured after step" not in lines[-1]


def test_on_a_terminal_the_bar_counts_and_ends_saying_that_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen := Screen())
        with Progress("training", 4, "steps") as progress:
            for step in range(4):
                progress.advance(1, f"measured after step {step + 1}")
            progress.say("a line [with] brackets")
    shown = re.sub(CODES, "", screen.getvalue())
    assert "a line [with] brackets" in shown
    assert re.search(r"training ━+ 4/4 done 0:00:\d\d 0:00:00\s*$", shown), shown
    assert "4 steps done" not in shown  # that is for logs


def test_a_target_is_loaded_without_the_bar_of_transformers(target_folder, capfd):
    TargetModel.load(TargetSection(path=str(target_folder), dtype="float32", device="cpu"), ())
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled()


def test_a_hybrid_decodes_without_the_lines_of_transformers_on_missing_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, seen = getLogger("transformers"), list[str]()
    monkeypatch.setattr(logger, "handlers", [handler := StreamHandler()])
    monkeypatch.setattr(handler, "emit", lambda record: seen.append(record.getMessage()))
    logging.warning_once.cache_clear()  # each is told once in a process
    monkeypatch.setattr(MISSING_KERNELS, "packages", set())
    monkeypatch.setattr(check, "KNOWN_METHODS", {})
    generate(TargetModel(make_family("qwen3_next"), ()), [5, 17, 3], 4)
    assert seen == []
    assert MISSING_KERNELS.packages == {"causal_conv1d", "flash-linear-attention"}
