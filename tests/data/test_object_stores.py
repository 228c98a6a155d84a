"""Laws of folders at URLs: a run there is the local one, on any machine, and failures are survived or named."""

import functools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from accelerate import PartialState
from bad_inputs import assert_raises
from killed_runs import Killed
from matrix import slow
from object_store import BUCKET, ENVIRONMENT, Fault, Forward, every, moto_server, proxy
from tiny_run import contents, quiet_environment, tiny_recipe

from headstart.common import remote
from headstart.common.files import write_text
from headstart.common.remote import check_access, fetch, filesystem, mirror_of, pull, shown, url_of
from headstart.common.run_lock import OWNER, only_run_in
from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.harvest import harvest, harvest_part
from headstart.inference.serve.options import serve_options
from headstart.recipes import RecipeError
from headstart.recipes.command_line import Share
from headstart.trainers.eagle import train

pytest.importorskip("moto")
pytest.importorskip("s3fs")
DATA = ("prompts", "responses", "features")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    from botocore.loaders import JSONFileLoader

    with moto_server() as url, pytest.MonkeyPatch.context() as patch:
        # Each new machine has new clients, which would read the description of S3 again.
        patch.setattr(JSONFileLoader, "load_file", functools.cache(JSONFileLoader.load_file))
        yield url


@pytest.fixture
def store(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    move_to("first", tmp_path, monkeypatch)
    yield f"s3://{BUCKET}/{tmp_path.name}"
    filesystem.cache_clear()


def move_to(machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on as another machine: with another cache and new connections. Recipes must be loaded again."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "caches" / machine))
    filesystem.cache_clear()


@pytest.fixture(scope="module")
def local(harvested: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(harvested, tmp_path_factory.mktemp("local"), dirs_exist_ok=True)
    recipe = folder / "recipe.yaml"
    text = recipe.read_text().replace(str(harvested / "run"), str(folder / "run")).replace("every: 4", "every: 1")
    recipe.write_text(text.replace(" steps: 8", " steps: 2"))
    train(tiny_recipe(folder))
    return folder


def fill(url: str, run: Path, *folders: str) -> None:
    place = url.removeprefix("s3://")
    filesystem("s3").pipe({f"{place}/{name}": data for name, data in contents(run).items() if name.startswith(folders)})


def stored(url: str) -> dict[str, bytes]:
    found, place = filesystem("s3").find(url), url.removeprefix("s3://")
    return {name.removeprefix(f"{place}/"): filesystem("s3").cat_file(name) for name in found}


def assert_same_run(url: str, local: Path) -> None:
    found, expected = stored(url), contents(local / "run")
    assert found.keys() == expected.keys()
    assert [name for name in found if name != "metrics.jsonl" and found[name] != expected[name]] == []


def test_a_run_in_a_bucket_is_the_local_one_and_goes_on_on_another_machine(store, local, tmp_path, monkeypatch):
    """The first machine is killed while it uploads a checkpoint, which is none without its last file."""
    fill(store, local / "run", "prompts", "responses")
    upload = remote.upload

    def killed_at_the_state(source: Path, path: Path) -> None:
        if path.parent.name == "step-2" and path.name == "state.json":
            raise Killed
        upload(source, path)

    with monkeypatch.context() as patch:
        patch.setattr(remote, "upload", killed_at_the_state)
        with pytest.raises(Killed):
            train(tiny_recipe(local, f"run_dir={store}"))
    assert filesystem("s3").exists(f"{store}/checkpoints/step-2/head.safetensors")
    move_to("second", tmp_path, monkeypatch)
    recipe = tiny_recipe(local, f"run_dir={store}")
    train(recipe)
    assert_same_run(store, local)
    assert recipe.model_dump(mode="json")["run_dir"] == store
    move_to("third", tmp_path, monkeypatch)
    serve_options(None, [str(local / "recipe.yaml"), f"run_dir={store}"])
    recipe = tiny_recipe(local, f"run_dir={store}")
    assert contents(recipe.run_dir) == {f"head/{name}": data for name, data in contents(local / "run/head").items()}
    pull(recipe.run_dir)
    assert not list(recipe.features_dir.glob("*.safetensors"))  # read only by those who train


@pytest.mark.slow
def test_data_and_features_of_other_runs_are_read_by_url(store: str, local: Path, tmp_path: Path) -> None:
    data = tiny_recipe(local, f"data.folder={store}/data", f"run_dir={tmp_path}/data")
    harvest(data)
    assert data.features_dir == mirror_of(f"{store}/data/features")
    for number, override in enumerate([f"data.folder={store}/data", f"data.store={store}/data/features"]):
        recipe = tiny_recipe(local, f"run_dir={tmp_path}/{number}", override)
        train(recipe)
        assert contents(recipe.head_dir).keys() == {"config.json", "model.safetensors"}
    weights = [(tmp_path / f"{number}/head/model.safetensors").read_bytes() for number in range(2)]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["parts", "ray"])
def test_parts_and_workers_of_ray_that_share_a_bucket_leave_the_local_harvest(store, local, tmp_path, monkeypatch, how):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for part in ("2/3", "1/3", "3/3") if how == "parts" else ():
        move_to(f"machine of {part[0]}", tmp_path, monkeypatch)
        harvest_part(tiny_recipe(local, f"run_dir={store}"), Share.parse(part), PartialState())
    recipe = tiny_recipe(local, f"run_dir={store}")
    if how == "ray":
        pytest.importorskip("ray")
        from headstart.data_pipelines.on_ray import harvest_on_ray

        harvest_on_ray(recipe, PartialState())
    found, expected = stored(shown(recipe.run_dir)), contents(local / "run")
    assert found == {name: data for name, data in expected.items() if name.startswith(DATA)}


@pytest.mark.slow
def test_a_cache_smaller_than_the_features_changes_nothing(store, local, tmp_path, monkeypatch):
    """Two shards of three fit. The harvest keeps no more, and training fetches them as it goes."""
    largest = max(path.stat().st_size for path in (local / "run/features").glob("train-*.safetensors"))
    monkeypatch.setenv("HEADSTART_CACHE_GB", str(2.5 * largest / 1e9))
    recipe = tiny_recipe(local, f"run_dir={store}")
    harvest(recipe)
    assert sum(path.stat().st_size for path in recipe.features_dir.glob("*.safetensors")) <= 2.5 * largest
    train(recipe)
    assert_same_run(store, local)


def test_an_order_is_followed_with_no_more_shards_than_fit(store, local, monkeypatch):
    """An order by shard, of 5, 5 and 2 samples, and room for one shard: each is fetched once and then dropped."""
    fill(store, local / "run", "features")
    recipe = tiny_recipe(local, f"run_dir={store}")
    pull(recipe.run_dir)
    sizes = [path.stat().st_size for path in sorted((local / "run/features").glob("train-*.safetensors"))]
    monkeypatch.setenv("HEADSTART_CACHE_GB", str((max(sizes) + 1) / 1e9))
    fetched = []

    def fetch_and_note(path: Path, is_sound: Callable[[Path], bool]) -> None:
        fetched.append(path.name)
        fetch(path, is_sound)

    monkeypatch.setattr("headstart.data_pipelines.features.shards.fetch", fetch_and_note)
    features = FeatureStore(recipe.features_dir, "train", (2,))
    order = [*range(5, 10), *range(5), 10, 11] * 2
    for place, number in enumerate(order[:12]):
        features.follow(order.__getitem__, place)
        assert len(features[number].tokens)
        assert sum(path.stat().st_size for path in recipe.features_dir.glob("train-*.safetensors")) <= max(sizes) + 1
    features.close()
    assert fetched[:3] == [f"train-0000{number}.safetensors" for number in (1, 0, 2)]


def timed_out(handler: Forward) -> bool:
    time.sleep(1)
    handler.close_connection = True
    return True


def cut(handler: Forward) -> bool:
    """Half a body, under the length of the whole."""
    if handler.command != "GET":
        return False
    status, headers, body = handler.forwarded()
    handler.answer(status, headers, body[: len(body) // 2], len(body))
    return True


def answering_shards(change: Callable[[bytes], bytes], checksums: bool = False) -> Fault:
    """Other bytes in place of a shard, as if they were the whole; by default the store sends no checksums."""

    def fault(handler: Forward) -> bool:
        is_shard = "/features/" in handler.path and handler.path.endswith(".safetensors")
        if handler.command != "GET" or not is_shard:
            return False
        status, headers, body = handler.forwarded()
        sent = {name: value for name, value in headers.items() if checksums or "checksum" not in name.lower()}
        handler.answer(status, sent, change(body))
        return True

    return fault


def with_a_wrong_bit(body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 1])


@pytest.mark.slow
@pytest.mark.parametrize("fault", [cut, lambda handler: handler.refuse(503, "SlowDown"), timed_out])
def test_requests_that_fail_now_and_then_are_survived(store, server, local, tmp_path, monkeypatch, fault):
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 0.5)
    with proxy(server, every(7, fault)) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        if fault is cut:  # of what is read alone
            fill(store, local / "run", *DATA)
        else:
            harvest(tiny_recipe(local, f"run_dir={store}"))
        move_to("second", tmp_path, monkeypatch)
        train(tiny_recipe(local, f"run_dir={store}"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    filesystem.cache_clear()
    assert_same_run(store, local)


@pytest.mark.parametrize(
    "fault",
    [
        answering_shards(with_a_wrong_bit),
        slow(answering_shards(lambda body: body[: len(body) // 2])),
        slow(answering_shards(with_a_wrong_bit, checksums=True)),
    ],
)
def test_a_shard_that_arrives_wrong_is_fetched_again_or_named(store, server, local, tmp_path, monkeypatch, fault):
    fill(store, local / "run", "features")
    for machine, often in (("second", 2), ("third", 1)):
        with proxy(server, every(often, fault)) as address:
            monkeypatch.setenv("AWS_ENDPOINT_URL", address)
            move_to(machine, tmp_path, monkeypatch)
            recipe = tiny_recipe(local, f"run_dir={store}")
            pull(recipe.run_dir)
            features = FeatureStore(recipe.features_dir, "train")
            if often == 2:
                expected = FeatureStore(local / "run/features", "train")
                for number in range(len(features)):
                    assert features[number].last_hidden.equal(expected[number].last_hidden)
            else:
                named = f"{store}/features/train-00000.safetensors | the same command"
                assert_raises(lambda features=features: features[0], named)
                assert not list(recipe.features_dir.glob("*.safetensors"))
            features.close()


SECRET = r"run_dir: .*without user, password and query.*AWS_PROFILE"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run_dir=s3://AKIAX:hunter2@bucket/run", SECRET),
        ("run_dir=s3://bucket/run?token=hunter2", SECRET),
        ("run_dir=gs://bucket/run", r"run_dir: .*gs:// needs gcsfs.*pip install -e '\.\[gcs\]'"),
        ("data.store=ftp://host/run", r"data\.store: .*s3://, gs://, az:// is allowed"),
        ("data.folder=s3://", r"data\.folder: .*s3://bucket/folder"),
        ("data.draft_head=s3://bucket/head", r"data\.draft_head: .*only run_dir, data\.folder, data\.store may"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(local, monkeypatch, override, message):
    find = remote.find_spec
    monkeypatch.setattr(remote, "find_spec", lambda name: None if name == "gcsfs" else find(name))
    with pytest.raises(RecipeError, match=message) as refused:
        tiny_recipe(local, override)
    assert "hunter2" not in str(refused.value)


def test_a_store_that_cannot_be_used_is_named_before_any_work(store, server, local, monkeypatch):
    recipe, unknown = tiny_recipe(local, f"run_dir={store}"), tiny_recipe(local, "run_dir=s3://no-such-bucket/run")
    assert_raises(lambda: train(unknown), "run_dir: s3://no-such-bucket/run: | bucket | correct the name")
    with monkeypatch.context() as patch:
        patch.setenv("HEADSTART_CACHE_GB", "1 TB")
        assert_raises(lambda: train(recipe), "HEADSTART_CACHE_GB: 1 TB given, a number of gigabytes is allowed")
    assert stored(store) == {}
    with proxy(server, lambda handler: handler.refuse(403, "AccessDenied")) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        filesystem.cache_clear()
        assert_raises(lambda: train(recipe), "run_dir: s3://bucket/ | AWS_PROFILE")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "missing")
    filesystem.cache_clear()
    assert_raises(lambda: check_access(recipe.run_dir), "s3://bucket/ | redentials | AWS_PROFILE")


KILLED = """
import os, sys
from headstart.common.remote import mirror_of
from headstart.common.run_lock import only_run_in
print(os.getpid(), flush=True)
with only_run_in(mirror_of(sys.argv[1]), "training"):
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_second_command_is_refused_on_any_machine_and_a_killed_one_makes_way(store, tmp_path, monkeypatch):
    command, environment = [sys.executable, "-c", KILLED, store], quiet_environment(Path(__file__).parents[2])
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    number = process.stdout.strip()
    assert filesystem("s3").exists(f"{store}/{OWNER}")
    move_to("second", tmp_path, monkeypatch)
    message = rf"{store} is in use by training as process {number} .*if it was killed, remove {store}/{OWNER}"
    with pytest.raises(ValueError, match=message), only_run_in(mirror_of(store), "training"):
        pass
    move_to("first", tmp_path, monkeypatch)
    with only_run_in(mirror_of(store), "training"):
        move_to("second", tmp_path, monkeypatch)
        with pytest.raises(ValueError, match="in use by training"), only_run_in(mirror_of(store), "a harvest"):
            pass
        move_to("first", tmp_path, monkeypatch)
    assert not filesystem("s3").exists(f"{store}/{OWNER}")


def test_a_rank_that_pulls_leaves_another_rank_the_file_that_it_is_writing(store, monkeypatch):
    folder, upload = mirror_of(store), remote.upload

    def upload_beside_a_pull(source: Path, path: Path) -> None:
        upload(source, path)
        pull(folder)

    monkeypatch.setattr(remote, "upload", upload_beside_a_pull)
    write_text(folder / "stage.json", "{}")
    assert contents(folder) == {"stage.json": b"{}"}


def test_what_is_removed_in_the_store_is_gone_here(store: str, tmp_path: Path) -> None:
    folder = mirror_of(store)
    for name in ("kept.txt", "removed.txt"):
        filesystem("s3").pipe_file(f"{store}/{name}", b"1")
    pull(folder)
    (folder / "own.txt.partial").touch()
    filesystem("s3").rm_file(f"{store}/removed.txt")
    time.sleep(0.01)
    pull(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["kept.txt", "own.txt.partial"]
    assert url_of(folder / "kept.txt") == f"{store}/kept.txt"
    assert url_of(tmp_path) is None
    shutil.rmtree(folder)
