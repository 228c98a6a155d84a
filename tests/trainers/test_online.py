"""Laws of training without a store: same samples, same losses, nothing written to disk."""

from pathlib import Path
from typing import Any

import pytest
from tiny_run import assert_same_sample, modified, tiny_recipe
from torch.testing import assert_close

from headstart.data_pipelines.features.batches import SampleStore
from headstart.data_pipelines.features.features import States, tap
from headstart.data_pipelines.features.sample_stores import OnlineStore, TargetProcess, open_stores
from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.harvest import harvest
from headstart.data_pipelines.harvest_stages import OneTarget
from headstart.heads.base import DraftHead
from headstart.inference.images.kept import KeptPictures
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.trainers import stages
from headstart.trainers import train as run
from headstart.trainers.step import TrainingInputs

pytestmark = pytest.mark.usefixtures("log_every_step")
TAPS = (1, 2, 3)
WHERE = ["auto", pytest.param("cpu", marks=pytest.mark.slow)]  # a process takes seconds to start


def online(folder: Path, *overrides: str, where: str = "auto") -> Recipe:
    return tiny_recipe(folder, f"data.online=[{where}]", *overrides)


class Counted:
    def __init__(self, recipe: Recipe) -> None:
        self.target, self.asked = TargetModel.load(recipe.target, TAPS), list[list[int]]()

    def __call__(self, texts: list[list[int]], images: Any = ()) -> States:
        self.asked.append([len(text) for text in texts])
        return tap(self.target, texts)


def assert_same_samples(made: SampleStore, stored: FeatureStore, numbers: range | list[int]) -> None:
    for number in numbers:
        assert_same_sample(made[number], stored[number])


@pytest.mark.parametrize("where", WHERE)
def test_online_samples_equal_those_that_a_harvest_stores(harvested: Path, where: str) -> None:
    recipe = online(harvested, where=where)
    before = modified(harvested)
    with open_stores(recipe, harvest(recipe), TAPS, OneTarget(recipe)) as made:
        for store, split in zip(made, ("train", "heldout"), strict=True):
            stored = FeatureStore(recipe.features_dir, split)
            assert (len(store), store.num_tokens) == (len(stored), stored.num_tokens)
            store.expect([range(len(stored))])
            assert_same_samples(store, stored, range(len(stored)))
            assert store.token_counts(300).equal(stored.token_counts(300))
            assert_close(store.tap_sizes((1, 2, 3, 4), 4), stored.tap_sizes((1, 2, 3, 4), 4), rtol=1e-5, atol=0)
    assert modified(harvested) == before


def test_samples_announced_together_are_read_together_in_batches_of_similar_length(harvested):
    """Step 1 reads 7 samples in 2 forwards, step 2 reads 3 in one; an unannounced sample is read alone."""
    recipe = online(harvested, "data.harvest_batch=4")
    target = Counted(recipe)
    store = OnlineStore(harvest(recipe), "train", target, 4, "float32", KeptPictures(recipe))
    stored = FeatureStore(online(harvested).features_dir, "train")
    steps = [[0, 5, 2, 9, 4, 7, 1], [3, 6, 8]]
    for numbers in steps:
        store.expect([numbers])
    for numbers in steps:
        assert_same_samples(store, stored, numbers)
        assert_same_samples(store, stored, numbers)  # a second request reads nothing again
    lengths = [sorted(len(store.texts[number].tokens) for number in numbers) for numbers in steps]
    assert target.asked == [lengths[0][:4], lengths[0][4:], lengths[1]]
    assert_same_samples(store, stored, [11])
    assert target.asked[3:] == [[len(store.texts[11].tokens)]]
    for numbers in ([0, 1], [2, 3], [4, 5], [0, 1]):  # those of two steps are kept, so 0 and 1 are read again
        store.expect([numbers])
        for number in numbers:
            store[number]
    assert len(target.asked) == 4 + 4


def test_one_target_harvests_decodes_and_teaches(harvested, tmp_path, monkeypatch):
    """It was loaded again to make samples, and once more to decode; its lm_head was read a fourth time."""
    load, train = TargetModel.load, stages.train
    loads, ends = [], []

    def count(*given: Any, **named: Any) -> TargetModel:
        loads.append(load(*given, **named))
        return loads[-1]

    def look(recipe: Recipe, head: DraftHead, inputs: TrainingInputs, *more: Any) -> None:
        assert inputs.decoding is not None
        ends.append((inputs.decoding.target, inputs.frozen.lm_head.data_ptr()))
        train(recipe, head, inputs, *more)

    monkeypatch.setattr(TargetModel, "load", count)
    monkeypatch.setattr(stages, "train", look)
    run(online(harvested, f"run_dir={tmp_path}", "train.eval_prompts=1", "train.steps=2"))
    assert len(loads) == 1
    assert ends == [(loads[0], loads[0].frozen.lm_head.data_ptr())]


@pytest.mark.slow
def test_a_target_process_that_has_ended_is_reported_by_name(harvested: Path) -> None:
    process = TargetProcess(online(harvested).target, TAPS, "cpu")
    assert process.tap([[1, 2, 3]]).last_hidden.shape == (3, 32)
    process._process.kill()
    with pytest.raises(ValueError, match=r"data\.online: the target's process on cpu ended; see its error"):
        process.tap([[1, 2]])
    process.close()
    assert process._process.exitcode is not None
