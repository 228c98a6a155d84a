"""Laws of the messages for failing disks, networks and Ctrl-C, and of the files that commands write."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from bad_inputs import Typed
from huggingface_hub.errors import LocalEntryNotFoundError
from matrix import slow
from tiny_run import build_run, quiet_environment
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.common.errors import errors_as_messages, explained
from headstart.common.files import whole_file, write_text
from headstart.heads.files import write_safetensors
from headstart.recipes import load_recipe
from headstart.trainers.objectives.medusa2 import save_model

ROOT = Path(__file__).resolve().parents[2]


def failed(number: int, *paths: Path) -> OSError:
    first, second = (*map(str, paths), None, None)[:2]
    return OSError(number, os.strerror(number), first, None, second)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EINVAL])
def test_every_error_names_the_path_the_reason_and_what_to_do(number: int, tmp_path: Path) -> None:
    path, advice = str(explained(failed(number, tmp_path / "file"))).split("; ")
    assert path == f"{tmp_path}/file: {os.strerror(number)}"
    assert advice == "correct the cause, then run the same command again, or give another path"


def test_the_field_nearest_to_the_path_is_named(tmp_path: Path) -> None:
    recipe = load_recipe(build_run(tmp_path), [f"decode.head={tmp_path}/run/other"])
    places = {
        tmp_path / "run": "run_dir",
        tmp_path / "run/features/train-00000.safetensors": "run_dir",
        tmp_path / "run/other/config.json": "decode.head",
        tmp_path / "target/config.json": "target.path",
        tmp_path / "prompts.jsonl": "data.prompts",
    }
    for path, field in places.items():
        assert str(explained(failed(errno.EACCES, path), recipe)).endswith(f", or choose another {field}"), path
    assert str(explained(failed(errno.EACCES, Path("/elsewhere")), recipe)).endswith(", or give another path")


def test_a_file_in_place_of_a_folder_is_found_and_the_name_until_a_file_is_whole_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as error:
        (tmp_path / "file/a/b").mkdir(parents=True)
    assert f"{tmp_path}/file is a file; correct the cause" in str(explained(error.value))
    said = explained(failed(errno.ENOSPC, tmp_path / "head.partial/model.safetensors.partial"))
    assert str(said).startswith(f"{tmp_path}/head/model.safetensors: No space left")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (httpx.ConnectError("no route to host"), "network: ConnectError: no route to host; check the network"),
        (LocalEntryNotFoundError("not cached"), "network: LocalEntryNotFoundError: not cached; check the network"),
        (type("CommError", (Exception,), {"__module__": "wandb.errors"})("no key"), "wandb: no key; run `wandb login`"),
        (OSError("Can't load\n the tokenizer"), "OSError: Can't load the tokenizer; correct the cause"),
        (ValueError("train.steps: 0 given"), "train.steps: 0 given"),
    ],
)
def test_errors_of_libraries_say_what_is_needed(error: Exception, says: str) -> None:
    assert str(explained(error)).startswith(says)


def test_our_own_mistakes_keep_their_traceback() -> None:
    assert explained(AssertionError("ours")) is None
    with pytest.raises(KeyError), errors_as_messages():
        raise KeyError("ours")


def printed_to(stdout: int, program: str) -> "subprocess.Popen[str]":
    program = f"from headstart.common.errors import errors_as_messages\nwith errors_as_messages():\n    {program}"
    command, environment = [sys.executable, "-c", program], quiet_environment(ROOT)
    return subprocess.Popen(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_a_reader_such_as_head_that_has_enough_ends_a_command_quietly() -> None:
    process = printed_to(subprocess.PIPE, "for line in range(100_000): print(line)")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    with process.stderr as said:
        assert said.read() == ""


@pytest.mark.parametrize("program", ["print('short')", slow("print('long' * 100_000)")])
def test_a_full_disk_under_a_log_is_an_error(program: str) -> None:
    with Path("/dev/full").open("w") as log:
        process = printed_to(log.fileno(), program)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.startswith("error: standard output, or a temporary file: No space left on device; correct the cause")
    assert len(said.splitlines()) == 1


INTERRUPTED = {  # command -> the function in which Ctrl-C arrives, and what is said
    "harvest": ("headstart.data_pipelines.harvest.Harvest.make_features", "continues where it stopped"),
    "train": ("headstart.data_pipelines.harvest.open_harvest", "continues where it stopped"),
    "report": ("headstart.inference.report.command.refuse_original_target", "starts over"),
}


@pytest.mark.parametrize("command", INTERRUPTED)
def test_ctrl_c_is_one_line_and_exit_code_130(command, harvested, tmp_path, monkeypatch, typed):
    function, said = INTERRUPTED[command]
    monkeypatch.setattr(function, interrupted)
    data = f"data.folder={tmp_path if command == 'harvest' else harvested / 'run'}"
    outcome = typed(command, str(harvested / "recipe.yaml"), f"run_dir={tmp_path}/run", data)
    assert outcome.code == 130, outcome.text
    assert outcome.err.strip() == f"interrupted; the same command {said}"


def interrupted(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_while_a_command_is_loading_is_one_line(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    monkeypatch.setattr("headstart.cli.import_module", interrupted)
    outcome = typed("lint", "HEAD", "--target", "TARGET")
    assert outcome.code == 130
    assert outcome.err.strip() == "interrupted before the work began; run the same command again"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder/file.txt"
    write_text(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "second \ud800")  # half of a surrogate pair
    with pytest.raises(KeyboardInterrupt), whole_file(path):
        raise KeyboardInterrupt
    assert path.read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


def test_what_a_killed_writer_of_weights_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / "a.safetensors.partial"
    left.mkdir()
    (left / ".tmpowLZXY").write_bytes(b"half of it")
    write_safetensors({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == [tmp_path / "a.safetensors"]


def test_weights_get_the_mode_of_any_other_file(tmp_path: Path) -> None:
    config = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=9, intermediate_size=8)
    before = os.umask(umask := 0o007)  # the group may write, others may not read
    try:
        write_safetensors({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
        write_text(tmp_path / "a.json", "{}")
        save_model(LlamaForCausalLM(config), tmp_path / "tuned")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~umask}
