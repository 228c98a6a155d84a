"""A disk that fills up in any stage costs nothing: after space is made, the same command ends in the same files."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import Typed
from matrix import slow, slow_unless
from safetensors import SafetensorError
from tiny_run import build_run, contents

from headstart.heads import files as head_files

Type = Callable[..., str]  # type a command; returns what it printed
SHORT = "data.num_prompts=6", "data.response_tokens=5", "train.steps=2", "train.checkpoint_every=1"


class SmallDisk:
    """Files of a run are written to /dev/full, tensors to half of a file, from the write on that `is_full` says."""

    def __init__(self, patch: pytest.MonkeyPatch, is_full: Callable[[int, str], bool]) -> None:
        self.names: list[str] = []  # of the files written, in order
        self.is_full, self.full = is_full, False
        self.open, self.save_file = io.open, head_files.save_file
        patch.setattr(io, "open", self._open)
        patch.setattr("builtins.open", self._open)
        patch.setattr(head_files, "save_file", self._save_file)

    def _take(self, path: Path) -> bool:
        self.names.append("/".join(path.parts[-2:]))
        self.full = self.full or self.is_full(len(self.names), self.names[-1])
        return not self.full

    def _open(self, file: Any, mode: str = "r", *others: Any, **options: Any) -> Any:
        writes = isinstance(file, str | Path) and "/run/" in str(file) and set(mode) & set("wax+")
        if writes and not self._take(Path(file)):
            return self.open("/dev/full", mode.replace("x", "w"), *others, **options)  # it exists, so "x" would fail
        return self.open(file, mode, *others, **options)

    def _save_file(self, tensors: Any, path: Path, metadata: Any) -> None:
        has_room = self._take(path)
        self.save_file(tensors, path, metadata)
        if not has_room:
            os.truncate(path, path.stat().st_size // 2)
            raise SafetensorError(f"I/O error: {os.strerror(errno.ENOSPC)} (os error {errno.ENOSPC})")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("full")).parent


@pytest.fixture
def typed(folder: Path, tmp_path: Path, typed: Typed) -> Type:
    def run(code: int, command: str, *overrides: str) -> str:
        arguments = [command, str(folder / "recipe.yaml"), f"run_dir={tmp_path}/run", *SHORT, *overrides]
        outcome = typed(*arguments)
        assert "Traceback" not in outcome.text
        assert outcome.code == code, outcome.text
        return outcome.err

    return run


@pytest.fixture(scope="module")
def undisturbed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run on a large disk, and the names of all that it wrote, in order."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        disk = SmallDisk(patch, lambda count, name: False)
        patch.setattr(sys, "argv", ["headstart", "train", str(folder / "recipe.yaml"), f"run_dir={run_dir}", *SHORT])
        from headstart import cli

        cli.main()
    return run_dir, disk.names


@pytest.fixture
def trained(undisturbed: tuple[Path, list[str]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(undisturbed[0], tmp_path / "run"))


def files(run_dir: Path) -> dict[str, bytes]:
    """The content of all files of a run; of the metrics, everything but the measured speed."""
    found = contents(run_dir)
    rows = [json.loads(line) for line in found["metrics.jsonl"].splitlines()]
    kept = [{name: value for name, value in row.items() if name != "train/tokens_per_second"} for row in rows]
    return {**found, "metrics.jsonl": json.dumps(kept).encode()}


def assert_recovers(typed: Type, run_dir: Path, expected: dict[str, bytes], disk_is_full: Callable[..., bool]) -> str:
    """Train on a small disk, then on a large one; returns the message in between."""
    with pytest.MonkeyPatch.context() as patch:
        disk = SmallDisk(patch, disk_is_full)
        said = typed(1, "train")
        assert disk.full
    assert "No space left on device" in said
    assert "run the same command again" in said
    assert not [name for name in contents(run_dir) if ".partial" in name or "/.tmp" in name]
    typed(0, "train")
    assert files(run_dir) == expected
    return said


# The file whose write finds the disk full, and what the message names.
FULL_AT = {
    "responses/train-00001.jsonl.journal": "responses/train-00001.jsonl.journal: ",
    "optimizers.safetensors.partial/optimizers.safetensors": "checkpoints/step-1 cannot be written",
}


@pytest.mark.parametrize("name", slow_unless([*FULL_AT][:1], FULL_AT))
def test_after_space_is_made_the_same_command_gives_the_undisturbed_run(typed, tmp_path, undisturbed, name):
    run_dir, written = undisturbed
    expected = files(run_dir)
    assert name in written
    said = assert_recovers(typed, tmp_path / "run", expected, lambda _, here: here.endswith(name))
    assert FULL_AT[name] in said


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_a_disk_may_fill_up_at_any_write(typed, tmp_path, undisturbed, part):
    expected, written = files(undisturbed[0]), undisturbed[1]
    for number in range(part + 1, len(written) + 1, 6):
        run_dir = tmp_path / "run"
        assert_recovers(typed, run_dir, expected, lambda count, here, number=number: count == number)
        subprocess.run(["rm", "-r", str(run_dir)], check=True)


def test_a_full_disk_leaves_no_half_export(typed: Type, trained: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json.partial", "README.md.partial"):
        with pytest.MonkeyPatch.context() as patch:
            SmallDisk(patch, lambda _, here: here.endswith(name))  # noqa: B023
            assert "No space left on device" in typed(1, "export", "export.format=vllm")
        assert not list((tmp_path / "run/export").iterdir())
    typed(0, "export", "export.format=vllm")
    names = {"README.md", "config.json", "custom_generate/generate.py", "model.safetensors"}
    assert contents(tmp_path / "run/export/vllm").keys() == names


def test_metrics_of_which_a_full_disk_cut_the_last_line_are_continued(typed: Type, trained: Path) -> None:
    metrics = trained / "metrics.jsonl"
    rows = metrics.read_text()
    metrics.write_text(rows + '{"step": 3, "train/lo')
    subprocess.run(["rm", "-r", str(trained / "checkpoints/step-2"), str(trained / "head")], check=True)
    typed(0, "train")
    steps = [[json.loads(line)["step"] for line in text.splitlines()] for text in (metrics.read_text(), rows)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("name", slow_unless(("config.json",), ("config.json", "model.safetensors")))
def test_a_damaged_head_is_written_again_by_the_same_command(typed: Type, trained: Path, name: str) -> None:
    expected = contents(trained / "head")
    (trained / "head" / name).write_bytes(expected[name][:100])
    typed(0, "train")
    assert contents(trained / "head") == expected


@pytest.mark.parametrize("name", [slow("prompts/train.jsonl"), "responses/train-00001.jsonl"])
def test_a_lost_file_of_a_stage_is_made_again_after_what_the_message_says(typed, trained, tmp_path, name):
    expected = contents(trained)
    (tmp_path / "run" / name).unlink()
    if name.startswith("responses"):  # they are not read again otherwise
        subprocess.run(["rm", "-r", f"{tmp_path}/run/features"], check=True)
    said = typed(1, "harvest")
    assert f"{tmp_path}/run/{name}: No such file or directory" in said
    [command] = [part for part in said.split("; ") if part.startswith("rm ")]
    subprocess.run(command.partition(",")[0], shell=True, check=True)
    typed(0, "harvest")
    found = contents(trained)
    assert all(found[file] == expected[file] for file in expected if file.startswith(("prompts", "resp", "features")))
