"""Laws of `headstart.refresh`: the policy is only read, a worse head is never returned, and no kill harms a head."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import slow
from tiny_run import contents, quiet_environment, recipe_with_random_head
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import headstart
from headstart.data_pipelines.features.features import tap
from headstart.heads.base import DraftHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for, new_head
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.recipes.schema_train import TrainSection
from headstart.trainers.refresh import refresh as refreshing
from headstart.trainers.refresh.judge import Verdict, judge
from headstart.trainers.refresh.refresh import Rollout, ends_of, refresh
from headstart.trainers.refresh.states import record

ROOT = Path(__file__).resolve().parents[2]
BETTER = Verdict(requests=9, served=1.0, candidate=2.0, low=0.5, high=1.5)
FAST = TrainSection(steps=4, learning_rate=1e-2, batch_size=4, unroll=2)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return recipe_with_random_head(tmp_path_factory.mktemp("refresh"))


def load_policy(recipe: Recipe, **fields: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(recipe.target.path, dtype=torch.float32, **fields)


def written_by(policy: PreTrainedModel) -> list[Rollout]:
    """Greedy answers of 10 tokens to 32 prompts; a quarter is held out."""
    prompts = torch.tensor([[170 + number, 20 + number % 5, 30 + number % 3] for number in range(32)])
    fields: dict[str, Any] = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    texts = policy.eval().generate(prompts, attention_mask=torch.ones_like(prompts), **fields).tolist()
    mask = [False] * 3 + [True] * 10
    return [Rollout(text, mask, held_out=number % 4 == 0) for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def rollouts(recipe: Recipe) -> list[Rollout]:
    return written_by(load_policy(recipe))


def facts(policy: PreTrainedModel) -> dict[str, Any]:
    """All that a refresh could change about a model."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        "modes": [module.training for module in policy.modules()],
        "hooks": [[*getattr(module, name)] for module in policy.modules() for name in hooks],
        "trained": [weight.requires_grad for weight in policy.parameters()],
        "gradients": [weight.grad for weight in policy.parameters()],
        "cache": policy.config.use_cache,
        "attention": policy.config._attn_implementation,
        "random": torch.get_rng_state().tolist(),
    }


def test_a_policy_is_as_before_and_its_next_step_has_the_same_bits(recipe, rollouts, tmp_path, monkeypatch):
    policy = load_policy(recipe, attention_dropout=0.1).train()
    policy.model.layers[1].eval()  # modes may differ
    policy.model.layers[0].requires_grad_(False)
    text = torch.tensor([rollouts[0].tokens])

    def step() -> list[Tensor]:
        with torch.random.fork_rng(devices=[]):
            policy.zero_grad()
            output = policy(text, labels=text)
            output.loss.backward()
            return [output.logits.detach(), *(each.grad for each in policy.parameters() if each.grad is not None)]

    expected = [each.clone() for each in step()]
    before = facts(policy)
    monkeypatch.setattr(refreshing, "judge", lambda *_: BETTER)
    done = headstart.refresh(recipe.head_dir, rollouts, policy, tmp_path / "new", steps=2, train=FAST)
    assert done.is_new
    after = facts(policy)
    for mine, its in zip(after.pop("gradients"), before.pop("gradients"), strict=True):
        assert mine is its
    assert after == before
    assert all(mine.equal(its) for mine, its in zip(step(), expected, strict=True))


def test_states_are_those_of_the_target_model(recipe: Recipe, rollouts: list[Rollout]) -> None:
    texts = [each.tokens for each in rollouts[:9]]
    found = record(load_policy(recipe).train(), texts, (1, 3))
    target = TargetModel(load_policy(recipe), (1, 3))
    for text, states in zip(texts, found, strict=True):
        expected = tap(target, [[*text]])
        torch.testing.assert_close(states, torch.cat([expected.taps, expected.last_hidden], -1), rtol=1e-4, atol=1e-4)


def test_a_head_follows_a_policy_that_has_moved(recipe: Recipe, tmp_path: Path) -> None:
    """The policy learned to repeat a phrase. A head that never saw it accepts little, a refreshed one more."""
    policy = load_policy(recipe)
    phrase = torch.tensor([[*range(250, 256)] * 4])
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-2)
    for _ in range(12):
        policy(phrase, labels=phrase).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    texts = written_by(policy)
    fields: dict[str, Any] = {"steps": 8, "train": FAST}
    done = refresh(recipe.head_dir, texts, policy, tmp_path / "one", **fields)
    assert done.is_new
    assert done.verdict.candidate > done.verdict.served + 0.2
    policy.save_pretrained(tmp_path / "policy")
    again = refresh(recipe.head_dir, texts, tmp_path / "policy", tmp_path / "two", device="cpu", **fields)
    assert (again.verdict, contents(again.head)) == (done.verdict, contents(done.head))  # same seed, same bytes
    ends = ends_of(policy)
    known = refreshing.with_states(texts, load_head_for(recipe.head_dir, ends), policy)
    assert contents(refresh(recipe.head_dir, known, ends, tmp_path / "three", **fields).head) == contents(done.head)
    timed = refresh(recipe.head_dir, texts, policy, tmp_path / "four", seconds=1e-6, **fields)
    assert timed.verdict.candidate < done.verdict.candidate  # after one step
    kept = refresh(done.head, written_by(load_policy(recipe)), policy, tmp_path / "five", steps=1)
    assert (kept.head, kept.is_new) == (done.head, False)


@pytest.mark.parametrize("candidates", [3, slow(100)])
def test_no_head_that_accepts_less_is_returned(recipe, rollouts, tmp_path, monkeypatch, candidates):
    """Random candidates against one head; what is written is what was judged."""
    frozen = FrozenTarget.from_folder(Path(recipe.target.path), torch.float32)
    served = load_head_for(recipe.head_dir, frozen)
    texts = refreshing.with_states(rollouts, served, load_policy(recipe))
    _, held_out = refreshing.split(texts, served, Path(recipe.target.path))
    samples, seeds = [source[number] for source, number in held_out], iter(range(candidates))
    changes: list[Callable[[Tensor], Tensor]] = [torch.zeros_like, lambda weight: weight * torch.nan]

    def random_head(before: DraftHead, *_: object) -> DraftHead:
        seed = next(seeds)
        made = new_head(recipe.head, frozen, before.vocab, seed)
        if seed < len(changes):
            for weight in made.parameters():
                weight.data = changes[seed](weight.data)
        return made.eval().requires_grad_(False)

    monkeypatch.setattr(refreshing, "fit", random_head)
    outcomes, before = [], contents(recipe.head_dir)
    for number in range(candidates):
        out = tmp_path / str(number)
        done = refresh(recipe.head_dir, texts, recipe.target.path, out, device="cpu")
        outcomes.append(done.is_new)
        assert out.exists() == done.is_new == (done.verdict.low > 0)
        if done.is_new:
            verdict = judge(load_head_for(done.head, frozen), served, samples, 5, 4)
            assert verdict == done.verdict
            assert verdict.candidate > verdict.served
        else:
            assert done.head == recipe.head_dir
    assert not any(outcomes[: len(changes)])
    assert contents(recipe.head_dir) == before


PROGRAM = """
import sys, torch
from headstart.trainers.refresh import refresh as refreshing
from headstart.trainers.refresh.judge import Verdict
head, target, folder = sys.argv[1:]
rollouts = torch.load(folder + "/rollouts.pt", weights_only=False)
refreshing.judge = lambda *_: Verdict(9, 1.0, 2.0, 0.5, 1.5)
print("ready", flush=True)
number = 0
while True:
    refreshing.refresh(head, rollouts, target, f"{folder}/new-{number}", steps=2, device="cpu")
    number += 1
"""


@pytest.mark.slow
def test_a_kill_at_any_time_leaves_whole_heads(recipe: Recipe, rollouts: list[Rollout], tmp_path: Path) -> None:
    frozen = FrozenTarget.from_folder(Path(recipe.target.path), torch.float32)
    known = refreshing.with_states(rollouts, load_head_for(recipe.head_dir, frozen), load_policy(recipe))
    torch.save(known, tmp_path / "rollouts.pt")
    before, draw = contents(recipe.head_dir), random.Random(0)
    for _ in range(30):
        arguments = [sys.executable, "-c", PROGRAM, str(recipe.head_dir), recipe.target.path, str(tmp_path)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=quiet_environment(ROOT)) as process:
            assert process.stdout is not None
            process.stdout.readline()
            while not (tmp_path / "new-0").exists():
                time.sleep(0.01)
            time.sleep(draw.random() * 0.5)
            os.kill(process.pid, signal.SIGKILL)
        for made in tmp_path.glob("new-*[0-9]"):
            load_head_for(made, frozen)
            subprocess.run(["rm", "-r", made], check=True)
        assert contents(recipe.head_dir) == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: replace(text, tokens=[*text.tokens[:-1], 300]), r"rollouts\[0\].tokens: 300 given, .* 0 to 299"),
        (lambda text: replace(text, tokens=[-1, *text.tokens[1:]]), r"rollouts\[0\].tokens: -1 given"),
        (lambda text: replace(text, loss_mask=[False] * len(text.tokens)), r"rollouts\[0\].loss_mask: no token is"),
        (lambda text: replace(text, loss_mask=[True]), r"rollouts\[0\].loss_mask: 1 flags given"),
        (lambda text: replace(text, tokens=[5] * 200, loss_mask=[True] * 200), r"200 tokens given, up to 128"),
        (lambda text: replace(text, states=torch.zeros(3, 4)), r"rollouts\[0\].states: \[3, 4\] given"),
    ],
)
def test_bad_rollouts_are_named(recipe, rollouts, tmp_path, change, says):
    with pytest.raises(ValueError, match=says):
        refresh(recipe.head_dir, [change(rollouts[0])], load_policy(recipe), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_weights_that_are_not_finite_are_named_and_a_head_of_another_target_is_refused(recipe, rollouts, tmp_path):
    for name in ("model.layers.2.mlp.up_proj.weight", "lm_head.weight"):
        policy = load_policy(recipe)
        policy.get_parameter(name).data[0, 0] = torch.inf
        with pytest.raises(ValueError, match=f"target: {name} holds NaN or infinity"):
            refresh(recipe.head_dir, rollouts, policy, tmp_path / "new")
    policy = LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=64, num_hidden_layers=4, num_attention_heads=4))
    with pytest.raises(ValueError, match="does not fit the target"):
        refresh(recipe.head_dir, rollouts, policy, tmp_path / "new")
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match=r"out: .*taken given, a folder that does not exist"):
        refresh(recipe.head_dir, rollouts, load_policy(recipe), tmp_path / "taken")


def test_too_few_held_out_texts_judge_nothing(recipe: Recipe, rollouts: list[Rollout], tmp_path: Path) -> None:
    few = [replace(each, held_out=number < 7) for number, each in enumerate(rollouts)]
    done = refresh(recipe.head_dir, few, load_policy(recipe), tmp_path / "new")
    assert (done.head, done.is_new) == (recipe.head_dir, False)
    assert "7 held-out texts, 8 are needed" in str(done.verdict)
