"""Laws of the harvest: it ends in the same features for every response writer and after any number of kills."""

import multiprocessing
import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from completion_server import Server, serving
from pretended_cuda import CUDA, SECOND, on_two_cards, pretended_cuda
from rich.filesize import decimal
from seeing_target import build_seeing_run
from tiny_run import build_run, build_tokenizer, recipe_with_random_head, tiny_recipe
from torch.testing import assert_close

from headstart.common.files import read_jsonl
from headstart.data_pipelines.features.shard_files import bytes_per_token
from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.harvest import harvest
from headstart.data_pipelines.prompts.completion_client import CompletionClient, completion
from headstart.data_pipelines.prompts.responses import sampling_of, target_writer
from headstart.data_pipelines.stages import shard_work
from headstart.data_pipelines.stages.shard_work import DECODE_MEMORY_SHARE
from headstart.inference.core.request import cut_at_end
from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.budget import StepMemory
from headstart.inference.engine.loop import generate, generate_each
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, load_recipe


def responses(recipe: Recipe, split: str = "train") -> list[dict[str, Any]]:
    return [row for path in sorted(recipe.responses_dir.glob(f"{split}-*.jsonl")) for row in read_jsonl(path)]


def test_features_too_large_for_the_disk_are_refused_before_their_stages(harvested, tmp_path, monkeypatch, capsys):
    for name in ("prompts", "responses"):
        shutil.copytree(harvested / "run" / name, tmp_path / name)
    recipe, per_token = tiny_recipe(harvested, f"run_dir={tmp_path}"), bytes_per_token(32, 3, "float32")
    usage, texts = shutil.disk_usage(tmp_path), responses(recipe) + responses(recipe, "heldout")

    def refuse_with(tokens: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=tokens * per_token - 1))
        with pytest.raises(ValueError, match=r"data\.folder: the features need .* left; choose another data\.folder"):
            harvest(recipe)

    refuse_with(sum(len(row["prompt"] + row["response"]) for row in texts))
    assert not list(recipe.features_dir.glob("*.safetensors"))
    shutil.rmtree(recipe.responses_dir)
    refuse_with(tokens := sum(len(row["prompt"]) for row in texts))
    assert not recipe.responses_dir.exists()
    monkeypatch.undo()
    harvest(recipe)
    least, most = tokens * per_token, (tokens + 16 * 12) * per_token
    assert f"features take {decimal(least)} to {decimal(most)} on disk" in capsys.readouterr().out


def test_as_many_texts_decode_together_as_fit_into_memory(harvested, monkeypatch, capsys):
    recipe = tiny_recipe(harvested, "data.generate_batch=3")
    target, sizes = TargetModel.load(recipe.target, ()), []
    prompts = [{"tokens": [5, 6, 7 + number]} for number in range(5)]
    samplings = [sampling_of(recipe, "train", number) for number in range(5)]

    def watched(*given: Any) -> Iterator[tuple[int, Any]]:
        sizes.append(given[3])
        return generate_each(*given)

    wanted = dict(target_writer(recipe, target)(prompts, samplings))
    needed = StepMemory.of(target.config, target.dtype).needed(1, 1, 24 + 12)
    monkeypatch.setattr(shard_work, "CHECKED_STEP_BYTES_MIN", 0)
    monkeypatch.setattr("headstart.data_pipelines.prompts.responses.generate_each", watched)
    for texts, said in ((0.5, "3 given, 1 decode"), (2.5, "3 given, 2 decode"), (99, "")):
        free = int(texts / DECODE_MEMORY_SHARE * needed) + 1
        monkeypatch.setattr(shard_work, "free_memory", lambda _, free=free: free)
        assert dict(target_writer(recipe, target)(prompts, samplings)) == wanted
        assert said in (printed := capsys.readouterr().out)
        assert bool(said) == bool(printed)
    assert sizes == [1, 2, 3]
    monkeypatch.setattr(target.ranks, "least", lambda found: found - 1)  # ranks that share it decode the same number
    assert shard_work.texts_together(recipe, target, 36) == recipe.data.generate_batch - 1


def test_the_fullest_device_of_a_spread_target_bounds_the_texts(harvested, make_model, monkeypatch, capsys):
    """The whole cache was compared with what the first device had free. The second has three of the seven layers."""
    recipe = tiny_recipe(harvested, "data.generate_batch=3")
    monkeypatch.setattr(shard_work, "CHECKED_STEP_BYTES_MIN", 0)
    with pretended_cuda():
        target = TargetModel(on_two_cards(make_model()), ())
        slot = 2 * 2 * 8 * 4  # bytes of a token in one layer
        assert [StepMemory.on(device, target).cached for device in (CUDA, SECOND)] == [4 * slot, 3 * slot]
        room = {CUDA: 10**9, SECOND: int(2.5 * StepMemory.on(SECOND, target).needed(1, 1, 36) / DECODE_MEMORY_SHARE)}
        monkeypatch.setattr(shard_work, "free_memory", room.__getitem__)
        assert shard_work.texts_together(recipe, target, 36) == 2
    assert "3 given, 2 decode together, as cuda:1 has" in capsys.readouterr().out


def test_a_target_split_by_layers_computes_the_same_states(harvested: Path) -> None:
    plain, spread = (tiny_recipe(harvested, f"target.split={word}").target for word in ("null", "layers"))
    tokens = torch.arange(20)[None]
    outputs = [TargetModel.load(section, (2, 4)).passes.forward(tokens) for section in (plain, spread)]
    assert_close(*outputs, rtol=1e-3, atol=1e-3)  # by other kernels


@pytest.fixture
def server() -> Iterator[tuple[str, type[Server]]]:
    with serving() as found:
        yield found


def test_responses_come_from_a_server_that_sometimes_fails(server, harvested, tmp_path):
    url, handler = server
    handler.failures = iter([503, 0, 429, 0, 0])
    recipe = tiny_recipe(harvested, f"run_dir={tmp_path}", f"data.server={url}")
    harvest(recipe)
    rows = responses(recipe)
    assert [row["id"] for row in rows] == list(range(12))
    assert all(row["response"] == row["prompt"][::-1][:12] for row in rows)
    assert len(handler.seen) == 12 + 4  # each sample of both splits was answered once
    assert {(body["temperature"], body["model"]) for body in handler.seen} == {(0.0, "tiny"), (0.8, "tiny")}
    assert len({body["seed"] for body in handler.seen}) == 16
    assert FeatureStore(recipe.features_dir, "train").about["written_by"] == "the server of data.server"


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"text": "Oslo.", "finish_reason": "stop", **fields}]}


def test_all_requests_of_a_batch_are_in_flight_at_once(server: tuple[str, type[Server]]) -> None:
    url, handler = server
    handler.together = threading.Barrier(120)
    client = CompletionClient([url], pause=lambda seconds: None)
    prompts = [[number, 7] for number in range(120)]
    found = dict(client.each([completion(prompt, Sampling(), 4) for prompt in prompts], 120))
    assert [found[number].choice["token_ids"] for number in range(120)] == [prompt[::-1] for prompt in prompts]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("text", " answers without choices"),
        ([1], " answers without choices"),
        ({"choices": []}, " answers without choices"),
        (choice(token_ids=[5, 300]), " answered with token 300, 0 to 299 of the target"),
        (choice(token_ids=[5, -1]), " answered with token -1, 0 to 299 of the target"),
        (choice(), " answers without token_ids, and text alone .*; use a server that knows return_token_ids"),
        (choice(token_ids=None), " answers without token_ids"),
        (choice(token_ids=[5, 7]), r" answered with finish_reason 'stop' after token 7, an end token .*\(0, 150,"),
        (choice(token_ids=[]), " answered with finish_reason 'stop' after no token, an end token"),
    ],
)
def test_an_answer_whose_tokens_are_not_the_targets_is_refused(server, harvested, tmp_path, answer, why):
    """From text alone an end token was guessed, which the target did not write."""
    url, handler = server
    handler.odd = answer
    with pytest.raises(ValueError, match=rf"^data\.server: {url}{why}"):
        harvest(tiny_recipe(harvested, f"run_dir={tmp_path}", f"data.server={url}"))


def test_a_draft_head_writes_the_targets_own_text_in_any_batch_and_shard(tmp_path: Path) -> None:
    head = recipe_with_random_head(tmp_path).head_dir
    recipe = tiny_recipe(tmp_path, f"data.draft_head={head}", "data.num_prompts=6", "data.heldout_samples=1")
    harvest(recipe)
    target, rows = TargetModel.load(recipe.target, ()), responses(recipe)
    assert [row["temperature"] for row in rows[:4]] == [0, 0.8, 0, 0.8]
    for row in rows:
        assert row["response"] == generate(target, row["prompt"], 12, sampling_of(recipe, "train", row["id"])).tokens
    assert FeatureStore(recipe.features_dir, "train").about["written_by"] == "speculative decoding"


def test_answers_end_where_the_chat_template_ends_them(harvested, tmp_path, capsys):
    before = {tuple(row["prompt"]): row["response"] for row in responses(tiny_recipe(harvested))}
    mark = next(row[2] for row in before.values() if len(row) > 3)
    tokenizer, target = build_tokenizer(), shutil.copytree(harvested / "target", tmp_path / "target")
    name = str(tokenizer.convert_ids_to_tokens(mark))
    tokenizer.add_special_tokens({"additional_special_tokens": [name]})
    written = "{{ m.content }}{% if m.role == 'assistant' %}MARK{% endif %}".replace("MARK", name)
    tokenizer.chat_template = str(tokenizer.chat_template).replace("{{ m.content }}", written)
    tokenizer.save_pretrained(target)
    overrides = f"target.path={target}", f"run_dir={tmp_path / 'run'}", "data.online=[auto]"
    marked = tiny_recipe(harvested, *overrides)
    harvest(marked)
    assert f"texts also end at {name!r}, an end token of its tokenizer or chat template" in capsys.readouterr().out
    after = {tuple(row["prompt"]): row["response"] for row in responses(marked)}
    assert len(after.keys() & before.keys()) > 3
    for prompt in after.keys() & before.keys():
        assert after[prompt] == cut_at_end(before[prompt], [mark])


FORKING = multiprocessing.get_context("forkserver")  # children fork from a process that has only imported modules
FORKING.set_forkserver_preload(["headstart.data_pipelines.harvest", "tiny_run"])


def one_rank(folder: Path, rank: int, ranks: int, port: int) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    os.environ.update({**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"})
    torch.set_num_threads(1)
    Accelerator(cpu=True)
    harvest(load_recipe(folder / "recipe.yaml"))


def start(folder: Path, ranks: int) -> list[BaseProcess]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = [(folder, rank, ranks, port) for rank in range(ranks)]
    processes: list[BaseProcess] = [FORKING.Process(target=one_rank, args=each) for each in given]
    for process in processes:
        process.start()
    return processes


def killed(processes: list[BaseProcess], folder: Path, new_files: int, delay: float) -> bool:
    """Kill all processes `delay` seconds after `new_files` files were written; False if they end before that."""
    there = len(list(folder.rglob("*")))
    while any(process.is_alive() for process in processes):
        if len(list(folder.rglob("*"))) >= there + new_files:
            time.sleep(delay)
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            return True
        time.sleep(0.005)
    assert [process.exitcode for process in processes] == [0] * len(processes)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("build", [build_run, build_seeing_run])
def test_a_harvest_killed_20_times_with_changing_ranks_equals_an_uninterrupted_one(build, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
        build(folder)
        recipe = (folder / "recipe.yaml").read_text()
        (folder / "recipe.yaml").write_text(recipe.replace("shard_samples: 5", "shard_samples: 2"))
    assert not killed(start(whole, 1), whole / "run", 10_000, 0)
    rng, kills = random.Random(0), 0
    while kills < 20:
        if killed(start(cut, ranks=1 + kills % 2), cut / "run", rng.randint(1, 4), rng.uniform(0, 0.05)):
            kills += 1
        else:  # it finished: delete most of it and harvest again
            for name in ("features", "responses"):
                shutil.rmtree(cut / "run" / name)
    assert not killed(start(cut, 2), cut / "run", 10_000, 0)
    assert not [path for path in (cut / "run").rglob("*") if path.suffix in (".journal", ".partial", ".note")]
    for split in ("train", "heldout"):
        mine, its = (FeatureStore(folder / "run" / "features", split) for folder in (cut, whole))
        assert len(mine) == len(its)
        for number in range(len(its)):
            assert_close(vars(mine[number]), vars(its[number]), rtol=0, atol=0)
