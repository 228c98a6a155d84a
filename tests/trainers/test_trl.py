"""Laws of the TRL callback: training with it is training without it, and new heads reach whatever generates."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from completion_server import Server, serving
from matrix import slow
from tiny_run import recipe_with_random_head
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import headstart.trl
from headstart.heads.kinds.checkpoint import load_head, save_head
from headstart.recipes import Recipe
from headstart.recipes.schema_train import TrainSection
from headstart.trainers.refresh import refresh as refreshing
from headstart.trainers.refresh.judge import Verdict
from headstart.trl import Drafting, RefreshCallback

FAST = TrainSection(steps=2, learning_rate=1e-3, batch_size=4, unroll=2)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return recipe_with_random_head(tmp_path_factory.mktemp("trl"))


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.texts: list[list[list[int]]] = []

    def reward(self, completion_ids: list[list[int]], **_: object) -> list[float | None]:
        self.texts.append(completion_ids)
        return [sum(ids) % 97 / 97 for ids in completion_ids]


def make_trainer(recipe: Recipe, folder: Path, recorder: Recorder, steps: int = 4) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(recipe.target.path, pad_token="<end>")
    policy = AutoModelForCausalLM.from_pretrained(recipe.target.path, dtype="float32")
    config = GRPOConfig(
        str(folder), max_steps=steps, per_device_train_batch_size=4, num_generations=2, steps_per_generation=2,
        max_completion_length=4, learning_rate=1e-2, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        disable_tqdm=True, seed=1,
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": f"the head {number} " * (1 + number % 3)} for number in range(16)])
    return GRPOTrainer(policy, recorder.reward, config, prompts, processing_class=tokenizer)


def trained(recipe: Recipe, folder: Path, **fields: Any) -> tuple[list[Any], dict[str, torch.Tensor], RefreshCallback]:
    recorder = Recorder()
    trainer: Any = make_trainer(recipe, folder, recorder)
    callback = RefreshCallback(trainer, recipe.head_dir, folder / "heads", train=FAST, steps=2, **fields)
    trainer.add_callback(callback)
    trainer.train()
    return recorder.texts, {name: each.clone() for name, each in trainer.model.state_dict().items()}, callback


def test_training_is_the_same_without_drafts_with_a_frozen_head_and_with_new_ones(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(refreshing, "judge", lambda *_: Verdict(9, 1.0, 2.0, 0.5, 1.5))
    monkeypatch.setattr(refreshing, "LEAST", 1)
    monkeypatch.setattr(refreshing, "is_held_out", lambda prompt: sum(prompt) % 2 == 0)
    monkeypatch.setattr("headstart.trl.speculation_for", lambda *_: None)  # a random head does not pay
    texts, weights, _ = trained(recipe, tmp_path / "frozen", every=1000)
    assert len(texts) == 2
    fresh, new_weights, callback = trained(recipe, tmp_path / "fresh", every=2)
    assert callback.versions.names() == ["0000", "0001"]
    assert fresh == texts
    assert all(new_weights[name].equal(each) for name, each in weights.items())
    with monkeypatch.context() as patch:
        patch.setattr(RefreshCallback, "newest", property(lambda _: None))
        patch.setattr("headstart.trl.load_head_for", lambda *_: None)
        plain, plain_weights, without = trained(recipe, tmp_path / "plain", every=1000)
    assert without.drafting.stats.drafted == 0
    assert callback.drafting.stats.drafted > 0
    assert plain == texts
    assert all(plain_weights[name].equal(each) for name, each in weights.items())
    rows = [json.loads(row) for row in (tmp_path / "fresh/heads/verdicts.jsonl").read_text().splitlines()]
    assert [Path(row["head"]).name for row in rows] == ["0000", "0001"]


class InThisProcess:
    """Does what a process would do, before it is looked at."""

    def __init__(self, command: list[str]) -> None:
        headstart.trl.main(Path(command[-1]))

    def poll(self) -> int:
        return 0

    wait = poll


@pytest.mark.parametrize("pretended", [True, slow(False)])
def test_a_process_beside_the_trainer_makes_the_same_head(recipe, tmp_path, capfd, monkeypatch, pretended):
    if pretended:
        monkeypatch.setattr("headstart.trl.subprocess.Popen", InThisProcess)
        monkeypatch.setattr(os, "nice", lambda _: None)
    trainer = make_trainer(recipe, tmp_path, Recorder(), steps=2)
    callback = RefreshCallback(trainer, recipe.head_dir, tmp_path / "heads", every=2, beside=True, steps=2, train=FAST)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.process is None
    assert "held-out texts" in capfd.readouterr().out  # too few of them: the process has said so
    assert callback.newest == recipe.head_dir


def test_rollouts_are_the_texts_without_padding_and_tools_are_not_learned(recipe: Recipe, tmp_path: Path) -> None:
    trainer = make_trainer(recipe, tmp_path, Recorder())
    callback = RefreshCallback(trainer, recipe.head_dir, tmp_path / "heads", tokens=4)
    batch = {
        "prompt_ids": torch.tensor([[0, 5, 6], [7, 8, 9]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[10, 11, 0, 0], [12, 13, 14, 0]]),
        "completion_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]),
    }
    callback.keep([batch | {"tool_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]])}])
    assert [each.tokens for each in callback.rollouts] == [[5, 6, 10, 11], [7, 8, 9, 12, 13, 14]]
    masks = [[*map(int, each.loss_mask)] for each in callback.rollouts]
    assert masks == [[0, 0, 1, 1], [0, 0, 0, 1, 0, 1]]
    callback.keep([batch])  # 4 tokens of answers are kept, or none of a text
    assert [each.tokens for each in callback.rollouts] == [[7, 8, 9, 12, 13, 14]]


def test_a_refresh_that_fails_leaves_the_old_head(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("headstart.trl.refresh", lambda *_, **__: load_head(tmp_path / "nowhere", recipe.target.path))
    texts, _, callback = trained(recipe, tmp_path, every=1)
    assert len(texts) == 2
    assert callback.newest == recipe.head_dir
    assert f"{recipe.head_dir} stays the head" in capsys.readouterr().out
    assert "generate" not in vars(callback.model)


class VllmServer(Server):
    """Writes down what it is asked, and answers with the code of a path."""

    codes: dict[str, int]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append({"path": self.path} | body)
        self.answer(self.codes.get(self.path, 200), {})


class Client:
    """TRL's VLLMClient without NCCL, which needs GPUs: the tensors stay here."""

    def __init__(self, url: str) -> None:
        self.base_url, self._updating_weights = url, False
        self.received: dict[str, torch.Tensor] = {}

    def _post(self, url: str, **fields: Any) -> Any:
        answer = httpx.post(url, **fields)
        if answer.status_code != 200:
            raise Exception(f"Request failed: {answer.status_code}")
        return answer.json()

    def update_named_params(self, metadata: list[tuple[str, str, list[int]]], named_params: Any) -> None:
        assert self._updating_weights
        names, dtypes, shapes = zip(*metadata, strict=True)
        self._post(f"{self.base_url}/update_weights", json={"names": names, "dtypes": dtypes, "shapes": shapes})
        self.received = dict(named_params)


@pytest.mark.parametrize("code", [200, 500])
def test_a_vllm_server_gets_the_new_head_in_a_session_for_drafts(recipe, tmp_path, code, capsys):
    trainer: Any = make_trainer(recipe, tmp_path, Recorder())
    callback = RefreshCallback(trainer, recipe.head_dir, tmp_path / "heads")
    made = tmp_path / "heads/made"
    save_head(load_head(recipe.head_dir, recipe.target.path), made)
    callback.versions.choose(callback.versions.add(made).name)
    with serving(VllmServer, codes={"/update_weights": code}) as (url, server):
        trainer.use_vllm, trainer.vllm_generation = True, SimpleNamespace(vllm_client=Client(url))
        state = SimpleNamespace(global_step=1)
        trainer._buffered_inputs = []
        callback.on_step_end(None, state, None)
        client, asked = trainer.vllm_generation.vllm_client, server.seen
        paths = [each["path"] for each in asked]
        assert paths == ["/start_draft_weight_update", "/update_weights", "/finish_weight_update"]
        assert not client._updating_weights
        expected = load_head(callback.newest, recipe.target.path).served_tensors()
        if code == 200:
            assert asked[1]["names"] == [*expected]
            assert asked[1]["shapes"] == [[*each.shape] for each in expected.values()]
            assert all(client.received[name].equal(each) for name, each in expected.items())
        else:
            assert "Request failed: 500" in capsys.readouterr().out
        callback.on_step_end(None, state, None)
        assert len(asked) == (3 if code == 200 else 6)  # what failed is tried again


def test_a_trainer_that_takes_no_head_is_refused_by_name(recipe: Recipe, tmp_path: Path) -> None:
    trainer: Any = make_trainer(recipe, tmp_path, Recorder())
    with pytest.raises(ValueError, match="trainer: SimpleNamespace given, one that generates, a GRPOTrainer, is"):
        RefreshCallback(SimpleNamespace(), recipe.head_dir, tmp_path / "heads")
    trainer.use_vllm, trainer.vllm_mode = True, "colocate"
    with pytest.raises(ValueError, match="vllm_mode: colocate given, only server is allowed"):
        RefreshCallback(trainer, recipe.head_dir, tmp_path / "heads")


def test_a_policy_drafts_with_the_weights_of_the_moment(recipe: Recipe, tmp_path: Path) -> None:
    policy: Any = AutoModelForCausalLM.from_pretrained(recipe.target.path, dtype="float32")
    drafting = Drafting(policy, lambda: recipe.head_dir, None)
    text = torch.tensor([[5, 6, 7]])

    def written() -> tuple[list[list[int]], list[list[int]]]:
        fields: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        mine = drafting.generate(text, torch.ones_like(text), None, **fields)
        return mine.tolist(), policy.generate(text, attention_mask=torch.ones_like(text), **fields).tolist()

    first, expected = written()
    assert first == expected
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    second, expected = written()
    assert second == expected != first
    assert all(weight.requires_grad for weight in policy.parameters())
