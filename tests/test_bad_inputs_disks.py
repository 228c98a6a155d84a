"""Bad inputs on disks and networks: each ends in one message that names the file, what is wrong, and what to do."""

import errno
import fnmatch
import io
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import Says, assert_refused, type_command
from safetensors import SafetensorError
from tiny_run import build_run, tiny_recipe

from headstart.heads import files
from headstart.heads.formats.export import export
from headstart.trainers.run import run

QUICK_REPORT = "report.num_prompts=1", "report.baselines=[plain, chain]", "decode.max_new_tokens=2"
LONG = "n" * 300


@dataclass(frozen=True)
class Place:
    """A finished run of its own for one case: features, head, export; the folders that commands name."""

    folder: Path  # target, prompts, recipe
    run: Path

    @property
    def recipe(self) -> list[str]:
        return [str(self.folder / "recipe.yaml"), f"run_dir={self.run}"]

    @property
    def target(self) -> list[str]:
        return ["--target", str(self.folder / "target")]

    @property
    def exported(self) -> Path:
        return self.run / "export/vllm"


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and an export."""
    folder = tmp_path_factory.mktemp("finished")
    build_run(folder)
    run(tiny_recipe(folder))
    export(tiny_recipe(folder, "export.format=vllm"))
    return folder


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Place:
    shutil.copytree(finished / "run", tmp_path / "run")
    return Place(finished, tmp_path / "run")


# What happens to a file before the command is typed. Paths are relative to the run.

Damage = Callable[[Place, pytest.MonkeyPatch], None]


def nothing(place: Place, patch: pytest.MonkeyPatch) -> None:
    """Leave the run as it is."""


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def gone(*names: str) -> Damage:
    def damage(place: Place, patch: pytest.MonkeyPatch) -> None:
        for name in names:
            remove(place.run / name)

    return damage


def a_file(name: str, content: bytes = b"not what should be here") -> Damage:
    def damage(place: Place, patch: pytest.MonkeyPatch) -> None:
        remove(place.run / name)
        (place.run / name).parent.mkdir(parents=True, exist_ok=True)
        (place.run / name).write_bytes(content)

    return damage


def a_folder(name: str) -> Damage:
    def damage(place: Place, patch: pytest.MonkeyPatch) -> None:
        remove(place.run / name)
        (place.run / name).mkdir(parents=True)

    return damage


def half(name: str) -> Damage:
    def damage(place: Place, patch: pytest.MonkeyPatch) -> None:
        content = (place.run / name).read_bytes()
        (place.run / name).write_bytes(content[: len(content) // 2])

    return damage


def full_disk(pattern: str) -> Damage:
    """Let files of this name be written to /dev/full, where the kernel finds no space."""

    def damage(place: Place, patch: pytest.MonkeyPatch) -> None:
        real: Any = io.open

        def opened(file: Any, mode: str = "r", *others: Any, **options: Any) -> Any:
            writes = isinstance(file, str | Path) and set(mode) & set("wax") and fnmatch.fnmatch(str(file), pattern)
            return real("/dev/full" if writes else file, mode, *others, **options)

        patch.setattr(io, "open", opened)
        patch.setattr("builtins.open", opened)

    return damage


def refused(call: str, pattern: str, number: int) -> Damage:
    """Let a function of the module os, or io.open for writing, fail for paths of this name."""

    def damage(place: Place, patch: pytest.MonkeyPatch) -> None:
        module = io if call == "open" else os
        real: Any = getattr(module, call)

        def function(path: Any, *others: Any, **options: Any) -> Any:
            writes = call != "open" or (others and set(others[0]) & set("wax"))
            if writes and isinstance(path, str | Path) and fnmatch.fnmatch(str(path), pattern):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *others, **options)

        patch.setattr(module, call, function)

    return damage


def unwritable_weights(number: int) -> Damage:
    """Let safetensors fail as it does on a full or read-only disk, in its own words."""

    def damage(place: Place, patch: pytest.MonkeyPatch) -> None:
        def save_file(*arguments: object) -> None:
            raise SafetensorError(f"I/O error: {os.strerror(number)} (os error {number})")

        patch.setattr(files, "save_file", save_file)

    return damage


def together(*damages: Damage) -> Damage:
    def damage(place: Place, patch: pytest.MonkeyPatch) -> None:
        for each in damages:
            each(place, patch)

    return damage


# The commands.

Command = Callable[[Place], Sequence[str | Path]]


def with_recipe(name: str, *overrides: str) -> Command:
    """A command on the recipe; {run} and {folder} in an override stand for the place's."""
    return lambda place: [
        name,
        *place.recipe,
        *(each.format(run=place.run, folder=place.folder) for each in overrides),
    ]


def report(*overrides: str) -> Command:
    return with_recipe("report", *QUICK_REPORT, *overrides)


def lint(name: str = "export/vllm") -> Command:
    return lambda place: ["lint", place.run / name, *place.target]


def convert(source: str = "export/vllm", into: str = "converted") -> Command:
    return lambda place: ["convert", place.run / source, place.run / into, *place.target]


def doctor(name: str = "head", *options: str) -> Command:
    return lambda place: ["doctor", place.run / name, place.folder / "target", *options]


def store(*arguments: str) -> Command:
    return lambda place: ["store", arguments[0], *(place.run / each for each in arguments[1:])]


def recipe(path: str) -> Command:
    return lambda place: ["harvest", path.format(folder=place.folder)]


FILE_FOR_FOLDER = "this is a file", "only a folder is allowed here", "move the file away"
OTHER_RUN_DIR = "or choose another run_dir"
NO_SPACE = "no space left on device", "a disk with room for the whole file is needed", "make room there"
READ_ONLY = "read-only file system", "a disk that can be written to is needed", "mount it writable"
DENIED = "permission denied", "a path that this user may read and write is allowed", "change its permissions"
TOO_LONG = "file name too long", "most file systems allow 255 bytes in a name", "choose a shorter one"
TOO_LONG_IN_RECIPE = "a path with names of up to 255 bytes is allowed", "choose another, shorter one"
OFFLINE = "neither a local folder nor a model available on the hub", "a folder with config.json", "or a hub name"
NO_HEAD = "holds no head", "no config.json", "give"
WITHOUT_CHECKPOINTS = gone("checkpoints", "head", "metrics.jsonl")
FROM_SCRATCH = gone("prompts", "responses", "features")
FROM_RESPONSES = gone("responses", "features")

CASES: dict[str, tuple[Command, Damage, Says]] = {
    # run_dir
    "harvest: run_dir is a file": (
        with_recipe("harvest", "run_dir={run}/file"),
        a_file("file"),
        Says("run_dir", "run/file is a file", "a folder that exists or can be made is allowed", "choose another"),
    ),
    "train: run_dir lies below a file": (
        with_recipe("train", "run_dir={run}/file/run"),
        a_file("file"),
        Says("run_dir", "run/file is a file", "a folder that exists or can be made is allowed", "choose another"),
    ),
    "harvest: run_dir has too long a name": (
        with_recipe("harvest", f"run_dir={{run}}/{LONG}"),
        nothing,
        Says("run_dir", LONG, *TOO_LONG_IN_RECIPE),
    ),
    "inspect: run_dir has too long a name": (
        with_recipe("inspect", f"run_dir={{run}}/{LONG}"),
        nothing,
        Says("run_dir", LONG, *TOO_LONG_IN_RECIPE),
    ),
    "harvest: run_dir may not be made": (
        with_recipe("harvest", "run_dir={run}/new"),
        refused("mkdir", "*/new", errno.EACCES),
        Says("run/new", *DENIED),
    ),
    "train: run_dir is on a read-only disk": (
        with_recipe("train", "run_dir={run}/new"),
        refused("mkdir", "*/new", errno.EROFS),
        Says("run/new", *READ_ONLY),
    ),
    "inspect: run_dir is where no folder can be": (
        with_recipe("inspect", "run_dir=/proc/headstart"),
        nothing,
        Says("/proc/headstart", "no such file or directory", "an existing path is allowed", OTHER_RUN_DIR),
    ),
    # prompts, responses, features
    "harvest: prompts/ is a file": (
        with_recipe("harvest"),
        together(FROM_SCRATCH, a_file("prompts")),
        Says("run/prompts", *FILE_FOR_FOLDER),
    ),
    "harvest: responses/ is a file": (
        with_recipe("harvest"),
        together(FROM_RESPONSES, a_file("responses")),
        Says("run/responses", *FILE_FOR_FOLDER),
    ),
    "harvest: features/ is a file": (
        with_recipe("harvest"),
        together(gone("features"), a_file("features")),
        Says("run/features", *FILE_FOR_FOLDER),
    ),
    "inspect: no space for the prompts": (
        with_recipe("inspect"),
        together(FROM_SCRATCH, full_disk("*/train.jsonl.partial")),
        Says("prompts/train.jsonl:", *NO_SPACE),
    ),
    "harvest: no space for the journal of the responses": (
        with_recipe("harvest"),
        together(FROM_RESPONSES, full_disk("*.journal")),
        Says("responses/train-00000.jsonl.journal:", *NO_SPACE),
    ),
    "harvest: no space for the responses": (
        with_recipe("harvest"),
        together(FROM_RESPONSES, full_disk("*/train-00000.jsonl.partial")),
        Says("responses/train-00000.jsonl:", *NO_SPACE),
    ),
    "harvest: the responses may not be written": (
        with_recipe("harvest"),
        together(FROM_RESPONSES, refused("open", "*/responses/*", errno.EACCES)),
        Says("responses/stage.json:", *DENIED),
    ),
    "harvest: no space for a shard": (
        with_recipe("harvest"),
        together(gone("features"), unwritable_weights(errno.ENOSPC)),
        Says("features/train-00000.safetensors:", *NO_SPACE),
    ),
    "harvest: a shard on a read-only disk": (
        with_recipe("harvest"),
        together(gone("features"), unwritable_weights(errno.EROFS)),
        Says("features/train-00000.safetensors:", *READ_ONLY),
    ),
    "harvest: no space for a shard's manifest entry": (
        with_recipe("harvest"),
        together(gone("features"), full_disk("*.note.partial")),
        Says("features/train-00000.safetensors.note:", *NO_SPACE),
    ),
    "harvest: no space for the manifest": (
        with_recipe("harvest"),
        together(gone("features"), full_disk("*/manifest.json.partial")),
        Says("features/manifest.json:", *NO_SPACE),
    ),
    "harvest: the disk fails": (
        with_recipe("harvest"),
        together(gone("features"), unwritable_weights(errno.EIO)),
        Says("features/train-00000.safetensors:", "input/output error", "a disk without errors is needed", "check it"),
    ),
    "harvest: the quota is exceeded": (
        with_recipe("harvest"),
        together(gone("features"), unwritable_weights(errno.EDQUOT)),
        Says("features/train-00000.safetensors:", "disk quota exceeded", *NO_SPACE[1:]),
    ),
    "inspect: the list of prompts is missing": (
        with_recipe("inspect"),
        gone("prompts/train.jsonl", "responses"),
        Says(
            "prompts/train.jsonl:",
            "no such file or directory",
            "an existing path is allowed",
            "prompts/stage.json, and",
        ),
    ),
    "inspect: the report on rows is cut": (
        with_recipe("inspect"),
        half("prompts/rows.json"),
        Says("prompts/rows.json cannot be read", "", "it must say what became of the rows", "rm /"),
    ),
    "harvest: a file of responses is missing": (
        with_recipe("harvest"),
        gone("responses/train-00000.jsonl", "features"),
        Says(
            "responses/train-00000.jsonl:", "no such file", "an existing path is allowed", "responses/stage.json, and"
        ),
    ),
    "inspect: a file of responses is a folder": (
        with_recipe("inspect"),
        a_folder("responses/train-00000.jsonl"),
        Says("responses/train-00000.jsonl:", "is a directory", "only a file is allowed here", OTHER_RUN_DIR),
    ),
    "inspect: a file of responses may not be read": (
        with_recipe("inspect"),
        lambda place, patch: patch.setattr(Path, "open", denied(Path.open, "*/responses/train-00000.jsonl")),
        Says("responses/train-00000.jsonl:", *DENIED),
    ),
    # training
    "train: checkpoints/ is a file": (
        with_recipe("train"),
        together(WITHOUT_CHECKPOINTS, a_file("checkpoints")),
        Says("run/checkpoints:", *FILE_FOR_FOLDER),
    ),
    "train: no space for a checkpoint": (
        with_recipe("train"),
        together(WITHOUT_CHECKPOINTS, unwritable_weights(errno.ENOSPC)),
        Says("checkpoints/step-4 cannot be written", *NO_SPACE),
    ),
    "train: metrics.jsonl is a folder": (
        with_recipe("train"),
        together(WITHOUT_CHECKPOINTS, a_folder("metrics.jsonl")),
        Says("metrics.jsonl:", "is a directory", "only a file is allowed here", OTHER_RUN_DIR),
    ),
    "train: no space for the metrics": (
        with_recipe("train"),
        together(WITHOUT_CHECKPOINTS, full_disk("*/metrics.jsonl")),
        Says("metrics.jsonl:", *NO_SPACE),
    ),
    "train: head/ is a file": (
        with_recipe("train"),
        a_file("head"),
        Says("run/head:", *FILE_FOR_FOLDER),
    ),
    "train: no space for the head": (
        with_recipe("train"),
        together(gone("head"), unwritable_weights(errno.ENOSPC)),
        Says("head/model.safetensors:", *NO_SPACE),
    ),
    "train: the note of the export is cut": (
        with_recipe("train"),
        half("checkpoints/exported.json"),
        Says("checkpoints/exported.json", "is not JSON", "", "remove it"),
    ),
    "train: a checkpoint's weights are cut": (
        with_recipe("train"),
        half("checkpoints/step-8/head.safetensors"),
        Says("checkpoints/step-8 cannot be read", "incomplete", "", "remove it to resume from the one before it"),
    ),
    # calibrate
    "calibrate: the head is a file": (
        with_recipe("calibrate"),
        a_file("head"),
        Says(
            "run/head", "holds no head", "a trained head's folder is required", "name another with report.head=FOLDER"
        ),
    ),
    "calibrate: the head's weights are a folder": (
        with_recipe("calibrate"),
        a_folder("head/model.safetensors"),
        Says(
            "head/model.safetensors",
            "cannot be read",
            "a whole safetensors file is required",
            "copy or download the head",
        ),
    ),
    "calibrate: no space for the calibrated head": (
        with_recipe("calibrate", *QUICK_REPORT),
        unwritable_weights(errno.ENOSPC),
        Says("head/model.safetensors:", *NO_SPACE),
    ),
    # report
    "report: report/ is a file": (report(), a_file("report"), Says("run/report", *FILE_FOR_FOLDER)),
    "report: report/ is on a read-only disk": (
        report(),
        refused("mkdir", "*/report", errno.EROFS),
        Says("run/report:", *READ_ONLY),
    ),
    "report: report.json is a folder": (
        report(),
        a_folder("report/report.json"),
        Says("report/report.json:", "is a directory", "only a file is allowed here", OTHER_RUN_DIR),
    ),
    "report: no space for the figure": (report(), full_disk("*.png.partial"), Says("report/report.png:", *NO_SPACE)),
    "report: no space for the page": (report(), full_disk("*.html.partial"), Says("report/report.html:", *NO_SPACE)),
    "report: the questions are a folder": (
        report("report.prompts={folder}"),
        nothing,
        Says("report.prompts", "finished", "an existing JSONL file is allowed", "put the prompts there"),
    ),
    "report: the other head is missing": (
        report("report.other_heads={{other: {run}/none}}"),
        nothing,
        Says("report.other_heads.other", "holds no head", "a trained head's folder is required", "name another"),
    ),
    # export
    "export: export/ is a file": (
        with_recipe("export", "export.format=vllm"),
        a_file("export"),
        Says("export/vllm:", "run/export is a file", "only a folder is allowed here", OTHER_RUN_DIR),
    ),
    "export: no space for the weights": (
        with_recipe("export", "export.format=sglang"),
        unwritable_weights(errno.ENOSPC),
        Says("sglang/model.safetensors:", *NO_SPACE[:2], OTHER_RUN_DIR),
    ),
    "export: no space for the README": (
        with_recipe("export", "export.format=sglang"),
        full_disk("*/README.md.partial"),
        Says("README.md:", *NO_SPACE),
    ),
    "export: the head is a file": (
        with_recipe("export", "export.format=sglang", "export.head={run}/file"),
        a_file("file"),
        Says("run/file", *NO_HEAD),
    ),
    "export: the log of the training is damaged": (
        with_recipe("export", "export.format=sglang"),
        a_file("metrics.jsonl", b"not JSON\n{}\n"),
        Says("metrics.jsonl line 1 is not JSON", "", "", "fix or remove the line"),
    ),
    # lint
    "lint: the head is a file": (lint("file"), a_file("file"), Says("run/file", *NO_HEAD)),
    "lint: config.json is a folder": (lint(), a_folder("export/vllm/config.json"), Says("export/vllm", *NO_HEAD)),
    "lint: config.json is no text": (
        lint(),
        a_file("export/vllm/config.json", b"\xff\xfe\x00"),
        Says("export/vllm/config.json", "is not JSON", "", "copy or download the head again"),
    ),
    "lint: the weights are cut": (
        lint(),
        half("export/vllm/model.safetensors"),
        Says("export/vllm/model.safetensors cannot be read", "incomplete", "", "copy or download the head again"),
    ),
    "lint: the weights are empty": (
        lint(),
        a_file("export/vllm/model.safetensors", b""),
        Says("export/vllm/model.safetensors cannot be read", "header", "", "copy or download the head again"),
    ),
    "lint: the head has too long a name": (lint(LONG), nothing, Says(LONG, *TOO_LONG)),
    "lint: the target is on the hub, without a network": (
        lambda place: ["lint", place.exported, "--target", "org/none"],
        nothing,
        Says("'org/none'", *OFFLINE),
    ),
    "lint: the target is an empty folder": (
        lambda place: ["lint", place.exported, "--target", place.run / "empty"],
        a_folder("empty"),
        Says("run/empty", "neither model.safetensors nor", "", "convert the model"),
    ),
    # convert
    "convert: the head is missing": (convert("none"), nothing, Says("run/none", *NO_HEAD)),
    "convert: the output lies below a file": (
        convert(into="file/head"),
        a_file("file"),
        Says("run/file:", *FILE_FOR_FOLDER),
    ),
    "convert: the output has too long a name": (convert(into="n" * 250), nothing, Says("n" * 250, *TOO_LONG)),
    "convert: no space for the output": (
        convert(),
        unwritable_weights(errno.ENOSPC),
        Says("run/converted/model.safetensors:", *NO_SPACE),
    ),
    "convert: the output is on a read-only disk": (
        convert(),
        refused("mkdir", "*/converted.partial", errno.EROFS),
        Says("run/converted:", *READ_ONLY),
    ),
    "convert: the target is on the hub, without a network": (
        lambda place: ["convert", place.exported, place.run / "converted", "--target", "org/none"],
        nothing,
        Says("'org/none'", *OFFLINE),
    ),
    # doctor
    "doctor: the head is missing": (doctor("none"), nothing, Says("run/none", *NO_HEAD)),
    "doctor: the samples are a folder": (
        doctor("head", "--samples", "/"),
        nothing,
        Says("--samples: /", "not found", "a JSONL file", "name a JSONL file"),
    ),
    "doctor: the samples may not be read": (
        doctor(),
        lambda place, patch: patch.setattr(Path, "open", denied(Path.open, "*/prompts/heldout.jsonl")),
        Says("prompts/heldout.jsonl:", *DENIED),
    ),
    "doctor: the head's weights are cut": (
        doctor(),
        half("head/model.safetensors"),
        Says("head/model.safetensors cannot be read", "incomplete", "", "copy or download the head again"),
    ),
    # store
    "store verify: the folder is missing": (
        store("verify", "none"),
        nothing,
        Says("run/none holds no features", "no manifest.json", "", "harvest"),
    ),
    "store verify: the manifest is a folder": (
        store("verify", "features"),
        a_folder("features/manifest.json"),
        Says("features holds no features", "no manifest.json", "", "harvest"),
    ),
    "store stats: the manifest is a list": (
        store("stats", "features"),
        a_file("features/manifest.json", b"[]"),
        Says("features/manifest.json cannot be read", "no list of shards", "a harvest's manifest is needed", "harvest"),
    ),
    "store verify: a shard is cut": (
        store("verify", "features"),
        half("features/train-00001.safetensors"),
        Says("features/train-00001.safetensors", "not what the harvest wrote", "", ""),
    ),
    "store verify: a shard may not be read": (
        store("verify", "features"),
        lambda place, patch: patch.setattr(Path, "open", denied(Path.open, "*/train-00001.safetensors")),
        Says("features/train-00001.safetensors:", *DENIED),
    ),
    "store merge: the new store lies below a file": (
        store("merge", "file/all", "features"),
        a_file("file"),
        Says("run/file/all:", "run/file is a file", "only a folder is allowed here", "move the file away"),
    ),
    "store merge: no space": (
        store("merge", "all", "features"),
        lambda place, patch: patch.setattr(shutil, "copy", out_of_space),
        Says("run/all/train-00000.safetensors:", *NO_SPACE),
    ),
    # recipes and what they name
    "harvest: the recipe is a folder": (
        recipe("{folder}"),
        nothing,
        Says("", "Is a directory", "", "give the path of a recipe"),
    ),
    "harvest: the recipe has too long a name": (
        recipe(LONG),
        nothing,
        Says(LONG, "File name too long", "", "give the path of a recipe"),
    ),
    "harvest: the prompts have too long a name": (
        with_recipe("harvest", f"data.prompts={LONG}.jsonl"),
        nothing,
        Says("data.prompts", LONG, *TOO_LONG_IN_RECIPE),
    ),
    "harvest: the target is on the hub, without a network": (
        with_recipe("harvest", "run_dir={run}/new", "target.path=org/none"),
        nothing,
        Says("target.path: 'org/none'", *OFFLINE),
    ),
    "harvest: the server does not answer": (
        with_recipe("harvest", "run_dir={run}/new", "data.server=http://127.0.0.1:9", "data.server_retries=0"),
        nothing,
        Says("data.server: http://127.0.0.1:9", "gave no answer", "", "check the server and run the command again"),
    ),
}


def denied(real: Callable[..., Any], pattern: str) -> Callable[..., Any]:
    """Path.open, which the system refuses for paths of this name."""

    def opened(path: Path, *others: Any, **options: Any) -> Any:
        if fnmatch.fnmatch(str(path), pattern):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *others, **options)

    return opened


def out_of_space(source: Path, into: Path) -> None:
    """What shutil.copy does on a full disk."""
    into.write_bytes(source.read_bytes()[:100])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(into))


@pytest.mark.parametrize("case", CASES)
def test_a_failing_disk_or_network_is_one_message(
    case: str, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, damage, says = CASES[case]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    damage(place, monkeypatch)
    before = names(place.run)
    outcome = type_command(list(map(str, command(place))), monkeypatch, capsys)
    monkeypatch.undo()
    assert_refused(outcome, says)
    assert outcome.err.count("error: ") <= 1
    assert not [name for name in names(place.run) - before if ".partial" in name or "/.tmp" in name]


def names(folder: Path) -> set[str]:
    """The relative paths of everything below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
