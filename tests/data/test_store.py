"""Laws of the feature store: compact, checked, mergeable, read in an order that depends on seed and step alone."""

import gc
import math
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from bad_inputs import assert_raises
from exported import edit_tensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_run import build_run, contents, tiny_recipe, write_shard
from torch import Tensor
from torch.testing import assert_close

from headstart.common.files import write_jsonl
from headstart.data_pipelines import harvest_stages
from headstart.data_pipelines.features import shard_files
from headstart.data_pipelines.features.batches import Sample
from headstart.data_pipelines.features.features import GPU_PASS, BackgroundThread, States, write_features
from headstart.data_pipelines.features.sample_stores import ReadAhead
from headstart.data_pipelines.features.shards import FeatureStore, read_manifest, write_manifest
from headstart.data_pipelines.features.store import merge, refuse_damage, verify
from headstart.data_pipelines.harvest import harvest
from headstart.data_pipelines.prompts.responses import responses_path
from headstart.data_pipelines.stages.shard_work import ShardProgress, ShardPrompts
from headstart.data_pipelines.stages.stage import checksum
from headstart.recipes import Recipe
from headstart.trainers import train
from headstart.trainers.loop import SampleOrder


def sample_of(length: int, hidden: int, num_taps: int) -> Sample:
    sizes = torch.tensor([0.01, 3.0, 200.0])[:num_taps, None]  # sizes differ as much as those of real taps
    taps = (torch.randn(length, num_taps, hidden) * sizes).flatten(1)
    tokens = torch.randint(1000, (length,))
    return Sample(tokens, torch.arange(length) > 3, taps, torch.randn(length, hidden) * 10)


@pytest.mark.parametrize(("storage", "size"), [("float32", 4), ("bfloat16", 2), ("float8", 1), ("int8", 1)])
def test_a_token_takes_the_space_of_its_states(tmp_path: Path, storage: str, size: int) -> None:
    """Within 2 % of (taps + 1) * hidden * bytes per number, plus id and mask; 8-bit formats take half of bfloat16."""
    samples = [sample_of(400, 128, 3) for _ in range(8)]
    write_shard(tmp_path / "shard", samples, (1, 5, 9), "x", storage)
    plain = (3 + 1) * 128 * size + 4 + 1
    found = (tmp_path / "shard").stat().st_size / 3200
    assert found == pytest.approx(plain, rel=0.02)
    assert shard_files.bytes_per_token(128, 3, storage) == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize(
    ("storage", "error", "smallest"),
    [("float32", 0, 0), ("bfloat16", 2**-8, 0), ("float8", 2**-4, 2**-12), ("int8", 2**-8, 1 / 254)],
)
def test_stored_numbers_have_the_precision_of_their_format(tmp_path, storage, error, smallest):
    """Errors are at most `error` of a number, or `smallest` of the largest of its row: half a step in int8."""
    states = torch.randn(50, 64) * torch.logspace(-4, 4, 50)[:, None]
    states[27] = 0
    save_file(shard_files.encode("x", states, storage), tmp_path / "file")
    decoded, states = shard_files.decode(safe_open(tmp_path / "file", "pt"), "x", 10, 40).float(), states[10:40]
    allowed = torch.maximum(error * states.abs(), smallest * states.abs().amax(1, keepdim=True)) * 1.01
    assert ((decoded - states).abs() <= allowed).all()


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
def test_samples_written_in_any_order_give_the_file_that_safetensors_writes_of_all(tmp_path, storage):
    """Two batches of samples, [2, 0] and [1], after the half of a shard that a killed run left."""
    (tmp_path / "shard.partial").write_bytes(b"half a shard" * 1000)
    samples, taps = [sample_of(length, 16, 2) for length in (5, 3, 9)], (1, 10)
    file = shard_files.ShardFile(tmp_path / "shard", [5, 3, 9], "x")

    def stored(numbers: list[int]) -> dict[str, Tensor]:
        whole = [torch.cat(each) for each in zip(*(vars(samples[n]).values() for n in numbers), strict=True)]
        states = shard_files.stored_states(taps, whole[2], whole[3], storage)
        return shard_files.stored_tokens(whole[0], whole[1]) | states

    for numbers in ([2, 0], [1]):
        file.put(numbers, stored(numbers))
    file.finish()
    expected = {name: tensor.contiguous() for name, tensor in stored([0, 1, 2]).items()}
    save_file({**expected, "offsets": torch.tensor([0, 5, 8, 17])}, tmp_path / "expected", {"made_from": "x"})
    assert (tmp_path / "shard").read_bytes() == (tmp_path / "expected").read_bytes()
    assert not (tmp_path / "shard.partial").exists()


@pytest.mark.parametrize("checked_first", [True, False])
def test_states_too_large_for_the_format_stop_the_harvest(tmp_path, monkeypatch, checked_first):
    build_run(tmp_path)
    edit_tensors(tmp_path / "target", lambda tensors: tensors["model.embed_tokens.weight"].mul_(1e6))
    if not checked_first:  # as if only later texts had such states
        monkeypatch.setattr(harvest_stages, "check_states", lambda *_: None)
    recipe = tiny_recipe(tmp_path, "data.dtype=float16")
    of = "the first prompt" if checked_first else r"rows [\d, ]+ of train-00000"
    with pytest.raises(ValueError, match=rf"data\.dtype: float16 given, .* reach [\d,]+ \({of}\).*bfloat16, float32"):
        harvest(recipe)
    assert bool(list(recipe.responses_dir.glob("*.jsonl*"))) != checked_first
    assert not list(recipe.features_dir.glob("*.safetensors"))


@pytest.fixture
def folder(harvested: Path, tmp_path: Path) -> Path:
    return shutil.copytree(harvested / "run/features", tmp_path / "features")


def test_numbers_in_a_store_that_are_not_finite_are_found(folder: Path, tmp_path: Path) -> None:
    refuse_damage(folder)
    about, path = read_manifest(folder), folder / "heldout-00000.safetensors"
    spoiled = load_file(path)
    spoiled["tap.3"][4, 5] = math.inf
    save_file(spoiled, path)
    write_manifest(folder, [shard["file"] for shard in about["shards"]], about)
    for refuses in (refuse_damage, lambda folder: merge(tmp_path / "merged", [folder])):
        assert_raises(partial(refuses, folder), "heldout-00000.safetensors: its tap.3 holds | another data.dtype")


@pytest.mark.parametrize(("name", "damage"), [("train-00001", "flip"), ("train-00002", "lose"), ("manifest", "tear")])
def test_the_remedy_for_a_damaged_store_makes_the_same_store(harvested, tmp_path, name, damage):
    shutil.copytree(harvested / "run", tmp_path / "run")
    recipe, folder = tiny_recipe(harvested, f"run_dir={tmp_path / 'run'}"), tmp_path / "run" / "features"
    path = folder / (f"{name}.json" if damage == "tear" else f"{name}.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[:-9] + b"x" * 9 if damage == "flip" else content[:9])
    if damage == "lose":
        path.unlink()
    with pytest.raises(ValueError, match="manifest") as problem:
        FeatureStore(folder, "train").batch_of(range(12))
    found = re.search(r"\((rm .*?)\)", str(problem.value))
    assert found is not None
    subprocess.run(shlex.split(found[1]), check=True)
    harvest(recipe)
    assert contents(tmp_path / "run") == contents(harvested / "run")


def test_a_merged_store_holds_all_samples_once_and_serves_a_recipe(harvested, folder, tmp_path):
    other = tiny_recipe(harvested, f"run_dir={tmp_path / 'other'}", "seed=9", "data.num_prompts=4")
    sources = [harvested / "run" / "features", harvest(other).folder]
    merge(tmp_path / "merged", [sources[0], folder, sources[1]])
    assert not verify(tmp_path / "merged")
    recipe = tiny_recipe(harvested, f"data.store={tmp_path / 'merged'}")
    assert harvest(recipe).folder == tmp_path / "merged"
    merged = FeatureStore(tmp_path / "merged", "train")
    wanted = [store[n] for store in (FeatureStore(source, "train") for source in sources) for n in range(len(store))]
    assert len(merged) == len(wanted) == 16
    for number, sample in enumerate(wanted):
        assert_close(vars(merged[number]), vars(sample), rtol=0, atol=0)
    origins = [(about["mask_rule"], about["written_by"]) for about in merged.about["merged_from"]]
    assert origins == [("response", "plain decoding")] * 3


def test_the_order_depends_on_seed_and_step_alone_and_an_epoch_reads_a_few_shards_at_a_time(monkeypatch):
    """So a cache of some shards is enough. An order of all samples at random needed every shard at any time."""
    whole = SampleOrder([4] * 9, seed=1).of_step(0, 36)
    monkeypatch.setattr("headstart.trainers.loop.WINDOW", 36)
    assert SampleOrder([4] * 9, seed=1).of_step(0, 36) == whole
    monkeypatch.setattr("headstart.trainers.loop.WINDOW", 11)
    order = SampleOrder([4] * 9, seed=1)
    for epoch in range(2):
        numbers = order.of_step(epoch, 36)
        assert sorted(numbers) == list(range(36))
        windows = [{number // 4 for number in numbers[start : start + 12]} for start in (0, 12, 24)]
        assert [len(shards) for shards in windows] == [3, 3, 3]
    assert order.of_step(0, 36) != order.of_step(1, 36)
    again, other = SampleOrder([4] * 9, seed=1), SampleOrder([4] * 9, seed=2)
    assert [again.of_step(step, 3) for step in (25, 0, 5)] == [order.of_step(step, 3) for step in (25, 0, 5)]
    assert other.of_step(0, 36) != order.of_step(0, 36)


def change_a_state(path: Path) -> None:
    tensors = load_file(path)
    tensors["last_hidden"][0, 0] += 1
    with safe_open(path, "pt") as file:
        save_file(tensors, path, file.metadata())


class Checksums:
    """Computes checksums once it is `allowed` to."""

    def __init__(self) -> None:
        self.allowed, self.checked = threading.Event(), list[str]()

    def __call__(self, path: Path) -> str:
        assert self.allowed.wait(timeout=60)
        self.checked.append(path.name)
        return checksum(path)


@pytest.fixture
def checksums(monkeypatch: pytest.MonkeyPatch) -> Checksums:
    waiting = Checksums()
    monkeypatch.setattr("headstart.data_pipelines.features.shards.checksum", waiting)
    return waiting


def test_the_first_sample_of_a_shard_does_not_wait_for_the_checksum_of_the_whole(folder, checksums):
    """Each shard was read whole for its first sample: 2 TB in the first steps of a large run. Damage is still found."""
    checksums.allowed.set()
    sound = FeatureStore(folder, "train")
    expected = [sound[number] for number in range(len(sound))]
    checksums.allowed.clear()
    checksums.checked.clear()
    change_a_state(folder / sound.shards[1]["file"])
    store = FeatureStore(folder, "train", checks_later=True)
    for number in (0, 1, len(store) - 1, 5):
        assert store[number].tokens.equal(expected[number].tokens)
    assert checksums.checked == []
    checksums.allowed.set()
    assert_raises(store.finish_checks, f"{store.shards[1]['file']} is not what the harvest wrote")
    store.close()
    assert sorted(checksums.checked) == sorted(shard["file"] for shard in store.shards)  # once each


class Counted:
    """An open shard that counts the bytes that are read from it; it stands for each of its slices, too."""

    def __init__(self, opened: Any) -> None:
        self.opened, self.num_bytes = opened, 0

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[:]

    def get_slice(self, name: str) -> "Counted":
        self.whole = self.opened.get_slice(name)
        return self

    def __getitem__(self, rows: slice) -> Tensor:
        read: Tensor = self.whole[rows]
        self.num_bytes += read.nbytes
        return read


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_the_first_sample_of_a_shard_costs_its_own_bytes(tmp_path, monkeypatch, checksums, storage):
    """And eight bytes for each sample of the shard, the offsets; it used to cost the whole shard."""
    samples = [sample_of(length, 64, 3) for length in (90, 7, 300, 45)]
    write_shard(tmp_path / "train-00000.safetensors", samples, (1, 5, 9), "x", storage)
    write_manifest(tmp_path, ["train-00000.safetensors"], {"taps": [1, 5, 9]})
    opened = Counted(shard_files.open_shard(tmp_path / "train-00000.safetensors"))
    monkeypatch.setattr("headstart.data_pipelines.features.shards.open_shard", lambda path: opened)
    store = FeatureStore(tmp_path, "train", checks_later=True)
    assert store[1].tokens.equal(samples[1].tokens)
    assert opened.num_bytes == 7 * shard_files.bytes_per_token(64, 3, storage) + 8 * 5
    checksums.allowed.set()
    store.finish_checks()
    store.close()


def tensor_bytes() -> int:
    dense = (each for each in gc.get_objects() if type(each) is Tensor and each.layout is torch.strided)
    found = (each.untyped_storage() for each in dense if each.device.type == "cpu")
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def test_a_harvest_holds_a_few_batches_and_no_shard(harvested, tmp_path, monkeypatch):
    """At most 8 GB at the sizes of the 8B recipe. Here texts are a 64th as long, a 32nd as wide, in 2 x 32 batches."""
    monkeypatch.setattr("headstart.data_pipelines.features.features.GPU_PASS", GPU_PASS // 64)
    recipe = tiny_recipe(harvested, f"run_dir={tmp_path}/run", "data.harvest_batch=8", "data.dtype=bfloat16")
    recipe.responses_dir.mkdir(parents=True)
    rows = [{"id": number, "prompt": [5] * 16, "response": [6] * 16} for number in range(256)]
    work = [ShardPrompts("train", index, rows) for index in range(2)]
    for shard in work:
        write_jsonl(responses_path(recipe, shard), rows)
    before, calls, held = tensor_bytes(), count(1), []

    def tap_texts(texts: list[list[int]], images: Any) -> States:
        if next(calls) % 32 == 0:  # the last batch of a shard
            held.append(tensor_bytes() - before)
        tokens = sum(map(len, texts))
        return States(*(torch.zeros(tokens, taps * 128, dtype=torch.bfloat16) for taps in (3, 1)))

    identities = {shard.features_file: "x" for shard in work}
    with ShardProgress(work, PartialState(), "features") as meter:
        write_features(recipe, (2, 16, 29), tap_texts, torch.device("cuda"), work, identities, meter)
    shard_bytes = (recipe.features_dir / work[1].features_file).stat().st_size
    batch_bytes = 8 * 2048 * shard_files.bytes_per_token(4096, 3, "bfloat16")  # of the 8B recipe, 0.5 GB
    scale = batch_bytes / (shard_bytes / 32)
    assert len(held) == 2
    assert max(held) * scale < 8e9


def test_no_checkpoint_holds_what_was_learned_from_a_damaged_shard(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe("run")
    change_a_state(recipe.features_dir / "train-00001.safetensors")
    assert_raises(lambda: train(recipe), "train-00001.safetensors is not what the harvest wrote")
    assert not list(recipe.checkpoints_dir.glob("step-*"))


class Watched(FeatureStore):
    """Notes what is read, by which thread; it waits for `gate` before each read."""

    def __init__(self, run: Path) -> None:
        super().__init__(run / "features", "train")
        self.read, self.readers = list[int](), set[str]()
        self.begun, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def __getitem__(self, index: int) -> Sample:
        self.begun.set()
        self.gate.wait()
        self.read.append(index)
        self.readers.add(threading.current_thread().name)
        return super().__getitem__(index)


@pytest.mark.parametrize("limit", [None, 80])
def test_reading_ahead_returns_the_same_batches_made_by_one_background_thread(harvested, limit):
    """[3, 1] is announced twice, as a step reads it; [7] was not announced."""
    store, watched = FeatureStore(harvested / "run" / "features", "train"), Watched(harvested / "run")
    ahead = ReadAhead(watched)
    ahead.expect([[3, 1], [0, 2, 5], [3, 1]], limit)
    for numbers in ([3, 1], [7], [0, 2, 5], [3, 1]):
        made, wanted = ahead.batch_of(numbers, limit), store.batch_of(numbers, limit)
        assert made.lengths == wanted.lengths
        assert (made.documents is None) == (limit is None)
        for name, tensor in vars(made).items():
            assert not isinstance(tensor, Tensor) or tensor.equal(vars(wanted)[name])
    with pytest.raises(IndexError):
        ahead[99]
    assert ahead.token_counts(300).equal(store.token_counts(300))
    assert (len(ahead), ahead.num_tokens) == (len(store), store.num_tokens)
    ahead.close()
    assert watched.readers == {"read-ahead_0"}


def test_at_most_two_batches_are_made_before_they_are_requested(harvested: Path) -> None:
    watched = Watched(harvested / "run")
    ahead = ReadAhead(watched)
    ahead.expect([[number] for number in range(5)])
    for number in range(5):
        ahead.finish_checks()  # the thread has nothing left to do
        assert watched.read == [*range(min(number + 2, 5))]
        ahead.batch_of([number])
    ahead.close()


@pytest.mark.parametrize("most", [0, 3])
def test_all_tasks_are_done_in_order_when_the_block_ends_or_by_the_caller_where_none_may_wait(most: int) -> None:
    done, threads = list[int](), set[int]()

    def work(number: int) -> None:
        time.sleep(0.001)
        done.append(number)
        threads.add(threading.get_ident())

    with BackgroundThread(max_pending=most) as background:
        for number in range(10):
            background.add(partial(work, number))
    assert done == list(range(10))
    assert (threads == {threading.get_ident()}) == (most == 0)


@pytest.mark.parametrize("more", [0, 1, 5])
def test_an_error_is_raised_at_the_next_task_or_at_the_end(more: int) -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("the disk is full")

    def add_all() -> None:
        with BackgroundThread(max_pending=1) as background:
            background.add(fail)
            for number in range(more):
                background.add(partial(done.append, number))

    assert_raises(add_all, "the disk is full")
    assert done == []
