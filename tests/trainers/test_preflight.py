"""Laws of the first second: what can be known at the start is said at the start, and leaves nothing behind."""

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from bad_inputs import Says, assert_raises, assert_refused, filled, table
from tiny_run import build_run, build_tokenizer, tiny_recipe

from headstart.inference.core import cache_memory
from headstart.inference.core.cache_memory import free_memory
from headstart.inference.engine import budget
from headstart.inference.engine.budget import StepMemory, refuse_large_trees
from headstart.trainers import train as run
from headstart.trainers.tracking import wandb_mode

GIGABYTE = 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_run(tmp_path_factory.mktemp("preflight")).parent
    (folder / "empty.jsonl").write_text("\n\n")
    (folder / "one.jsonl").write_text('{"prompt": "import os"}\n')
    for name in ("no_tokenizer", "no_template"):
        (folder / name).mkdir()
        for file in ("config.json", "model.safetensors", "generation_config.json"):
            (folder / name / file).symlink_to(folder / "target" / file)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "no_template")
    return folder


# Overrides, then the facts of the message: the field, its value, what is allowed, what to do.
CASES = table("""
no CUDA device | target.device=cuda => target.device | 'cuda' given | one of auto, cpu | choose another
no other device | target.device=mps => target.device | 'mps' given | one of auto, cpu | choose another
one row | data.prompts={folder}/one.jsonl => train.batch_size | 3 given | up to 1 is allowed | more prompts
no held-out row | data.heldout_prompts={folder}/empty.jsonl => data.heldout_prompts | empty.jsonl given
a batch above the prompts | train.batch_size=13 => train.batch_size | 13 given | up to 12 is allowed | lower it
more micro-batches than samples | train.accumulate=4 => train.accumulate | 4 given | up to 3 is allowed | lower it
no tokenizer | target.path={folder}/no_tokenizer => no_tokenizer | cannot be loaded | tokenizer.json | again
own prompts of a base model | target.path={folder}/no_template | data.prompts=self => data.prompts | self given
no draft head | data.draft_head=/nowhere => data.draft_head | /nowhere | head | give
a head above the memory | head={kind: eagle3, intermediate_size: 100000000000} => head: | 38.4 TB of weights | up to the
trees above the memory | decode.nodes=1000000 | train.eval_prompts=2 => decode.nodes | 1000000 given | is allowed here
a run_dir in /proc | run_dir=/proc/x => run_dir | /proc/x given | a writable folder is allowed | choose another
""")


@pytest.mark.each_value
@pytest.mark.parametrize("dry_run", ["true", "false"])
@pytest.mark.parametrize("name", CASES)
def test_what_would_fail_after_the_harvest_is_refused_before_it(folder, monkeypatch, name, dry_run):
    monkeypatch.setattr("headstart.data_pipelines.harvest.open_harvest", None)
    overrides, facts = CASES[name]
    recipe = tiny_recipe(folder, *(filled(each, folder=folder) for each in overrides), f"train.dry_run={dry_run}")
    before = sorted(folder.iterdir())
    assert_raises(lambda: run(recipe), facts)
    assert sorted(folder.iterdir()) == before


def test_lora_without_peft_is_refused_at_the_start_and_planned_all_the_same(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    options = ["head={kind: medusa, medusa_heads: 3}", "joint.mode=lora", "joint.lora_rank=2"]
    recipe = tiny_recipe(folder, *options)
    assert_raises(lambda: run(recipe), Says("joint.mode", "lora given", "null or full is allowed", "pip install"))
    run(tiny_recipe(folder, *options, "train.dry_run=true"))
    said = capsys.readouterr().out
    assert "parameters learn, joint.mode lora" in " ".join(said.split())
    assert "needs peft" in said
    assert not (folder / "run").exists()


def test_wandb_without_a_key_is_refused_before_training_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr("wandb.login", lambda **options: False)
    for mode, remedy in (("online", "wandb login"), ("on", "unset it")):
        monkeypatch.setenv("WANDB_MODE", mode)
        assert_raises(lambda: run(tiny_recipe(folder)), Says("WANDB_MODE", f"{mode} given", "is allowed", remedy))
    monkeypatch.setattr("headstart.trainers.tracking.is_wandb_available", lambda: False)
    assert wandb_mode() == "disabled"


def test_trees_are_bounded_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    step, cpu = StepMemory(cached=4096, vocab_size=1000, element=4), torch.device("cpu")
    most = step.most_nodes(rows=2, length=500, free=20 * GIGABYTE)
    assert step.needed(2, most, 500) <= 20 * GIGABYTE < step.needed(2, most + 1, 500)
    monkeypatch.setattr(budget, "free_memory", lambda device: 20 * GIGABYTE)
    refuse_large_trees(step, cpu, rows=2, nodes=most, length=500)
    said = Says("decode.nodes", "100000 given", f"up to {most - 1} is allowed", "lower decode.nodes")
    assert_raises(lambda: refuse_large_trees(step, cpu, rows=2, nodes=100_001, length=500), said)


def test_a_harvest_whose_texts_lost_their_memory_to_another_program_was_told_to_lower_decode_nodes(monkeypatch):
    step = StepMemory(cached=23_040, vocab_size=49_152, element=2)
    monkeypatch.setattr(budget, "free_memory", lambda device: 7 * GIGABYTE)
    fits = 7 * GIGABYTE // step.needed(1, 1, 768)
    said = Says("512 texts of up to 768 tokens", "7.0 GB is free on cpu", f"enough for {fits}", "decode fewer texts")
    assert_raises(lambda: refuse_large_trees(step, torch.device("cpu"), rows=512, nodes=1, length=768), said)
    refuse_large_trees(step, torch.device("cpu"), rows=fits, nodes=1, length=768)


def test_free_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8000 * 1024))
    monkeypatch.setattr(cache_memory, "CGROUP", tmp_path)
    assert free_memory(torch.device("cpu")) == 8000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(torch.device("cpu")) == 8000 * 1024
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\ninactive_file 500000\n")
    assert free_memory(torch.device("cpu")) == 2_500_000


QUESTIONS = table("""
empty => report.prompts | questions.jsonl given, which is empty | one prompt or more | add rows
no fields | {} => report.prompts: row 1 | {} | turns (a list of texts), prompt or text | fix or remove the row
turns as text | {"turns": "abc"} => report.prompts: row 1 | abc | turns (a list of texts) | fix or remove
no JSON | no json => line 1 | not JSON | fix or remove the line
""")
REPORT = table("""
a device that is not there | target.device=cuda:3 => target.device | 'cuda:3' given | auto, cpu | choose
no questions | report.prompts=/gone.jsonl => report.prompts | /gone.jsonl given | an existing | put the prompts
""")


@pytest.mark.parametrize("name", [*QUESTIONS, *REPORT])
def test_a_report_that_cannot_work_is_refused_before_the_target_is_loaded(folder, tmp_path, monkeypatch, typed, name):
    monkeypatch.setattr("headstart.inference.targets.model.TargetModel.load", None)
    rows, overrides = (['{"prompt": "import os"}'], REPORT[name][0]) if name in REPORT else (QUESTIONS[name][0], [])
    (tmp_path / "questions.jsonl").write_text("\n".join(rows) + "\n")
    options = ["report.baselines=[plain]", f"report.prompts={tmp_path}/questions.jsonl", f"run_dir={tmp_path}/run"]
    outcome = typed("report", str(folder / "recipe.yaml"), *options, *overrides)
    assert_refused(outcome, (REPORT | QUESTIONS)[name][1])
