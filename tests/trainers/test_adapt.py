"""Laws of adaptation: texts never change, no bad head is served, and a kill at any moment leaves a head to serve."""

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from matrix import slow
from server_run import Running, running, without
from tiny_run import build_target, recipe_with_random_head

from headstart.data_pipelines.features.batches import Sample
from headstart.data_pipelines.features.features import tap
from headstart.heads.base import DraftHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import draft_vocab, load_head_for, new_head, save_head
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import DecodeLoop, generate, generate_batch
from headstart.inference.serve.command import load
from headstart.inference.serve.options import serve_options
from headstart.inference.serve.traffic import Traffic
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import load_tokenizer, text_of
from headstart.recipes import Recipe
from headstart.recipes.other_commands import AdaptOptions
from headstart.recipes.schema import TargetSection
from headstart.trainers.refresh import command
from headstart.trainers.refresh import refresh as refreshing
from headstart.trainers.refresh.judge import Verdict, decoded, judge
from headstart.trainers.refresh.server import AdaptingServer, RefusedError
from headstart.trainers.refresh.versions import Versions

ROOT = Path(__file__).resolve().parents[2]
BETTER = Verdict(requests=9, served=1.0, candidate=2.0, low=0.5, high=1.5)
PROMPTS = [[5 + number, 40, 41 + number % 7, 60] for number in range(40)]


def random_head(recipe: Recipe, folder: Path, seed: int) -> Path:
    frozen = FrozenTarget.from_folder(Path(recipe.target.path), torch.float32)
    vocab = draft_vocab(recipe.head, torch.arange(frozen.config.vocab_size))
    save_head(new_head(recipe.head, frozen, vocab, seed), folder)
    return folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return recipe_with_random_head(tmp_path_factory.mktemp("adapt"))


@contextmanager
def serving(recipe: Recipe, *more: str, **settings: Any) -> Iterator[Running]:
    """A server of the recipe's head, with --adapt-memory 0.01 unless `more` is given."""
    more = more or ("--adapt-memory", "0.01")
    options = serve_options(None, [str(recipe.run_dir.parent / "recipe.yaml"), "--always-draft", *more])
    with ThreadPoolExecutor(1) as thread:
        served = thread.submit(load, options, thread).result()
        with running(served, replace(options.settings, max_batch=4, **settings)) as server:
            yield server


def options(server: Running, **changes: Any) -> AdaptOptions:
    plain = AdaptOptions(server.url, None, steps=1, after=1, once=True, roll_back=False)
    return replace(plain, **changes)


def complete(server: Running, prompt: list[int], temperature: float = 0.0, seed: int = 0, tokens: int = 8) -> str:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": temperature, "seed": seed}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def facts(server: Running) -> dict[str, object]:
    return dict(httpx.get(f"{server.url}/adapt").json())


@pytest.mark.parametrize("count", [10, slow(200)])
def test_texts_are_those_of_plain_decoding_while_heads_swap(recipe: Recipe, tmp_path: Path, count: int) -> None:
    heads = [random_head(recipe, tmp_path / f"head-{seed}", seed) for seed in range(4)]
    asked = [(PROMPTS[n % 40] + [n // 40 + 70], [0.0, 1.0][n % 2], n) for n in range(count)]
    with serving(recipe) as server:
        with ThreadPoolExecutor(8) as clients:
            texts = [clients.submit(complete, server, *each, tokens=16) for each in asked]
            swaps = 0
            while not texts[-1].done():
                AdaptingServer(server.url).serve(str(heads[swaps % 4]))
                swaps += 1
                time.sleep(0.1)  # the new head serves for a while
            found = [text.result() for text in texts]
        assert swaps >= 2
        assert facts(server)["swaps"] == swaps
        page = httpx.get(f"{server.url}/metrics").text
        assert "headstart:head_swaps{" in page
    target = TargetModel.load(recipe.target, ())
    tokenizer = load_tokenizer(Path(recipe.target.path))
    requests = [Request(prompt, 16, Sampling(temperature, seed=seed)) for prompt, temperature, seed in asked]
    for (prompt, temperature, _), text, alone in zip(asked, found, generate_batch(target, requests), strict=True):
        assert text == text_of(tokenizer, without(alone.tokens)), (prompt, temperature)


def test_a_head_that_does_not_fit_is_refused_and_the_old_one_goes_on(recipe: Recipe, tmp_path: Path) -> None:
    build_target(tmp_path / "other", num_layers=3)
    other = recipe.model_copy(update={"target": recipe.target.model_copy(update={"path": str(tmp_path / "other")})})
    wrong = random_head(other, tmp_path / "wrong", 1)
    with serving(recipe) as server:
        before, text = facts(server)["head"], complete(server, PROMPTS[0])
        for folder, says in ((wrong, "does not fit the target"), (tmp_path / "nowhere", "holds no head")):
            with pytest.raises(RefusedError, match=says):
                AdaptingServer(server.url).serve(str(folder))
        assert facts(server)["head"] == before
        assert complete(server, PROMPTS[0]) == text


def test_traffic_is_for_this_machine_and_absent_without_the_option(recipe: Recipe) -> None:
    right = {"Authorization": "Bearer secret"}
    with serving(recipe, api_keys=("secret",)) as server:
        for headers, code in ({}, 401), (right, 200), ({**right, "X-Forwarded-For": "203.0.113.5"}, 403):
            assert httpx.get(f"{server.url}/adapt/traffic", headers=headers).status_code == code
    with serving(recipe, "--max-batch", "2") as server, pytest.raises(RefusedError, match="--adapt-memory"):
        AdaptingServer(server.url).facts()


def test_recorded_states_are_those_of_one_pass_over_the_text(recipe: Recipe) -> None:
    taps = (1, 2, 3, 4)
    target = TargetModel.load(recipe.target, taps)
    head = load_head_for(recipe.head_dir, target.frozen)
    kept = Traffic(2**20, 60.0, taps)
    loop = DecodeLoop(target, head_drafter(head, Dynamic(2, 2, 4)), 2, prefix_memory=2**20, record=kept.add)
    shared = [*range(20, 60)]
    first, *others = (Request([*shared, *prompt], 9) for prompt in PROMPTS[:4])
    loop.submit(first)
    list(loop.run())
    for request in others:  # each begins with blocks that are in memory
        loop.submit(request)
    list(loop.run())
    assert len(kept.finished) == 4
    assert kept.num_bytes == sum(each.num_bytes for each in kept.finished)
    texts = [[*request.prompt, *generate(target, request.prompt, 9).tokens] for request in (first, *others)]
    for each in kept.finished:
        tokens = each.tokens.tolist()
        text = next(text for text in texts if "".join(map(chr, tokens)) in "".join(map(chr, text)))
        start = "".join(map(chr, text)).index("".join(map(chr, tokens)))
        whole = tap(target, [text]).taps[start : start + len(tokens)]
        torch.testing.assert_close(each.states, whole, rtol=1e-4, atol=1e-4)
        assert start + each.response == len(shared) + 4


def test_traffic_keeps_to_its_bytes_and_its_time(recipe: Recipe) -> None:
    target = TargetModel.load(recipe.target, (1, 4))
    kept = Traffic(12_000, 60.0, target.taps)
    loop = DecodeLoop(target, None, 2, record=kept.add)
    for prompt in PROMPTS[:9]:
        loop.submit(Request(prompt, 9))
    list(loop.run())
    held = [each.number for each in kept.finished]
    assert 0 < len(held) < kept.number
    assert held == list(range(held[0], kept.number + 1))  # the newest
    assert kept.num_bytes <= 12_000
    kept.keep = 0.0
    kept.drop_old()
    assert not kept.finished
    assert kept.num_bytes == 0


@pytest.fixture(scope="module")
def demo() -> tuple[DraftHead, list[Sample], list[int]]:
    """The demo's head, texts of its target, and the steps that each took with chains of the head."""
    place = ROOT / "assets/demo_target"
    head = load_head_for(ROOT / "assets/demo_head", FrozenTarget.from_folder(place, torch.float32))
    target = TargetModel.load(TargetSection(path=str(place), dtype="float32", device="cpu"), head.taps)
    tokenizer = load_tokenizer(place)
    rows = (place / "heldout_prompts.jsonl").read_text().splitlines()[:8]
    prompts = [tokenizer(json.loads(row)["prompt"])["input_ids"][:24] for row in rows]
    written = generate_batch(target, [Request(prompt, 8) for prompt in prompts], head_drafter(head, Dynamic.chain(3)))
    samples = []
    for prompt, answer in zip(prompts, written, strict=True):
        text = prompt + answer.tokens
        states = tap(target, [text])
        mask = torch.arange(len(text)) >= len(prompt)
        samples.append(Sample(torch.tensor(text), mask, states.taps.clone(), states.last_hidden.clone()))
    return head, samples, [each.stats.steps for each in written]


def damaged(head: DraftHead, change: Callable[[torch.Tensor], torch.Tensor]) -> DraftHead:
    found = deepcopy(head)
    for parameter in found.parameters():
        parameter.data = change(parameter.data)
    return found


@pytest.mark.slow
def test_the_judge_counts_the_steps_of_decoding_with_chains(demo: tuple[DraftHead, list[Sample], list[int]]) -> None:
    head, samples, steps = demo
    counted = [decoded(head, sample, 3, 1) for sample in samples]
    assert [found for _, found in counted] == steps
    assert sum(steps) < 0.6 * sum(int(sample.loss_mask.sum()) for sample in samples)  # some drafts were accepted


def test_a_planted_bad_candidate_is_refused(demo: tuple[DraftHead, list[Sample], list[int]]) -> None:
    head, samples, _ = demo
    random = torch.Generator().manual_seed(0)
    bad = {
        "not finite": lambda weight: weight * torch.nan,
        "noisy": lambda weight: weight + 0.7 * weight.std(correction=0) * torch.randn(weight.shape, generator=random),
    }
    for name, change in bad.items():
        candidate = damaged(head, change)
        verdict = judge(candidate, head, samples, 3, 2)
        assert not verdict.is_better, name
        assert verdict.high < 0, name
    assert judge(head, candidate, samples, 3, 2).is_better
    assert not judge(head, head, samples, 3, 2).is_better
    assert not judge(head, damaged(head, torch.zeros_like), samples[:4], 3, 2).is_better  # too few to tell


def test_a_better_candidate_is_served_and_rolled_back(recipe, monkeypatch, capsys):
    monkeypatch.setattr(os, "nice", lambda _: None)
    monkeypatch.setattr(refreshing, "judge", lambda *_: BETTER)
    monkeypatch.setattr(refreshing, "LEAST", 1)
    versions, prompts = Versions(recipe.run_dir / "versions"), PROMPTS[:9]
    with serving(recipe) as server:
        command.adapt(recipe, options(server))
        assert "held-out texts, 8 are needed" in capsys.readouterr().out
        assert versions.names() == ["0000"]
        texts = [complete(server, prompt) for prompt in prompts]
        command.adapt(recipe, options(server))
        assert versions.names() == ["0000", "0001"]
        assert facts(server)["head"] == str(versions.served) == str(versions.folder / "0001")
        assert not (versions.folder / "candidate").exists()  # neither the traffic nor what was made of it
        monkeypatch.setattr(refreshing, "judge", lambda *_: replace(BETTER, low=-0.1))
        command.adapt(recipe, options(server))
        assert versions.names() == ["0000", "0001"]
        command.adapt(recipe, options(server, roll_back=True))
        assert facts(server)["head"] == str(versions.folder / "0000")
        with pytest.raises(ValueError, match="no head was before it"):
            command.adapt(recipe, options(server, roll_back=True))
        assert [complete(server, prompt) for prompt in prompts[:3]] == texts[:3]
    monkeypatch.setattr(refreshing, "judge", lambda *_: BETTER)
    with serving(recipe) as server:  # started again, with the head of the recipe
        assert facts(server)["head"] == str(recipe.head_dir.resolve())
        command.adapt(recipe, options(server))
        assert facts(server)["head"] == str(versions.folder / "0000")
    kept = b"".join(path.read_bytes() for path in versions.folder.rglob("*") if path.is_file())
    assert torch.tensor(PROMPTS[0], dtype=torch.int32).numpy().tobytes() not in kept
