"""Laws of training without a store: the same samples, the same losses, and nothing written."""

from pathlib import Path

import pytest
import torch
from tiny_run import build_run, modified, tiny_recipe
from torch.testing import assert_close

from data_pipelines.harvest import harvest
from data_pipelines.online import OnlineStore
from data_pipelines.shards import FeatureStore
from data_pipelines.sources import open_stores
from recipes import Recipe
from recipes.jsonl import read_jsonl
from trainers.eagle import run

TAPS = (2, 3, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose run went as far as the features."""
    folder = tmp_path_factory.mktemp("online")
    build_run(folder)
    harvest(tiny_recipe(folder))
    return folder


def online(folder: Path, *overrides: str) -> Recipe:
    return tiny_recipe(folder, "data.mode=online", *overrides)


def test_online_samples_are_those_that_a_harvest_stores(folder: Path) -> None:
    recipe = online(folder)
    before = modified(folder)
    made = open_stores(recipe, harvest(recipe), TAPS)
    for store, split in zip(made, ("train", "heldout"), strict=True):
        stored = FeatureStore(recipe.features_dir, split)
        assert (len(store), store.num_tokens) == (len(stored), stored.num_tokens)
        for number in range(len(stored)):
            for name, tensor in vars(stored[number]).items():
                assert_close(vars(store[number])[name], tensor, rtol=1e-4, atol=1e-4)
        assert store.token_counts(300).equal(stored.token_counts(300))
        assert_close(store.tap_sizes((2, 3, 4, 7), 7), stored.tap_sizes((2, 3, 4, 7), 7), rtol=1e-5, atol=0)
    assert modified(folder) == before


def test_training_online_has_the_losses_of_training_from_a_store(folder: Path, tmp_path: Path) -> None:
    """To 1e-5 in float32, with a cache that holds some of the samples; no features are written."""
    shared, losses = f"data.folder={folder / 'run'}", []
    runs = [tiny_recipe(folder, f"run_dir={tmp_path / 'offline'}", shared)]
    runs += [online(folder, f"run_dir={tmp_path / 'online'}", shared, "data.cache_gigabytes=2e-5")]
    before = modified(folder)
    for recipe in runs:
        run(recipe)
        lines = list(read_jsonl(recipe.metrics_path))
        losses.append([line[key] for line in lines for key in sorted(line) if "loss" in key])
    assert len(losses[0]) > 20
    assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-5, atol=1e-5)
    assert modified(folder) == before


def test_a_cache_keeps_what_fits_and_no_more(folder: Path) -> None:
    recipe = online(folder)
    [store, _] = open_stores(recipe, harvest(recipe), TAPS)
    assert isinstance(store, OnlineStore)
    store.cache_bytes = 4 * 32 * 4 * 60  # 60 tokens of 4 states of 32 numbers of 4 bytes
    for _ in range(2):
        for number in range(len(store)):
            store[number]
    kept = sum(len(sample.tokens) for sample in store.kept.values())
    assert 0 < len(store.kept) < len(store)
    assert kept <= 60
    assert store[next(iter(store.kept))] is store[next(iter(store.kept))]
