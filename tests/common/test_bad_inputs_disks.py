"""Bad inputs on disks and networks: each ends in one message that names the file, what is wrong, and what to do."""

import ast
import errno
import fnmatch
import io
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import assert_refused, filled, table, type_command
from safetensors import SafetensorError
from tiny_run import build_run, tiny_recipe

from headstart.heads import files
from headstart.heads.formats.export import export
from headstart.trainers import run

# Each case types a command on a copy of a finished run, after damage to the run: `remove` files, put a `file` (with
# some content) or a `folder` in place of one, keep `half` of a file, `refuse` to write or read files of a pattern with
# an error, let safetensors fail to write `weights`, or find the disk `full` when files are copied.
CASES = table(r"""
train: run_dir is on a read-only disk | train {recipe} run_dir={run}/new | refuse write */new EROFS => run/new
harvest: responses/ is a file | harvest {recipe} | remove responses features | file responses => run/responses
harvest: a shard on a read-only disk | harvest {recipe} | remove features | refuse write *.safetensors.partial EROFS
    features/train-00000.safetensors: | Read-only file system
inspect: a file of responses may not be read | inspect {recipe} | refuse read */train-00000.jsonl EACCES
    responses/train-00000.jsonl: | Permission denied
train: the note of the export is cut | train {recipe} | half checkpoints/exported.json => checkpoints/exported.json
report: report.json is a folder | report {recipe} {quick} | folder report/report.json => report/report.json:
export: the training log is damaged | export {recipe} export.format=sglang | file metrics.jsonl b'not JSON\n{}\n'
    metrics.jsonl line 1 is not JSON | fix or remove the line
lint: the head is a file | lint {run}/file {target} | file file => run/file | holds no head | no config.json | give
lint: the target is on the hub, without a network | lint {run}/export/vllm --target org/none => 'org/none'
convert: no space for the output | convert {run}/export/vllm {run}/converted {target} | weights ENOSPC
    run/converted/model.safetensors: | No space left on device
store merge: no space | store merge {run}/all {run}/features | full copies => run/all/train-00000.safetensors:
harvest: the server does not answer | harvest {recipe} {new} data.server=http://127.0.0.1:9
    data.server: http://127.0.0.1:9 | gave no answer | check the server and run the command again
""")
PLACES = {  # what a word in braces stands for; {run} and {folder} are the finished run and what its recipe names
    "recipe": "{folder}/recipe.yaml run_dir={run}",
    "quick": "report.num_prompts=1 'report.baselines=[plain, chain]' decode.max_new_tokens=2",
    "target": "--target {folder}/target",
    "new": "run_dir={run}/new",
}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    build_run(folder)
    run(tiny_recipe(folder))
    export(tiny_recipe(folder, "export.format=vllm"))
    return folder


def damage(run: Path, kind: str, *words: str, patch: pytest.MonkeyPatch) -> None:
    if kind == "refuse":
        access, pattern, name = words
        refuse(access, pattern, name, patch)
    elif kind == "weights":
        refuse_weights(getattr(errno, words[0]), patch)
    elif words == ("copies",):
        patch.setattr(shutil, "copy", copy_to_a_full_disk)
    elif kind == "half":
        content = (run / words[0]).read_bytes()
        (run / words[0]).write_bytes(content[: len(content) // 2])
    elif kind == "remove":
        for name in words:
            remove(run / name)
    else:
        path = run / words[0]
        remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "folder":
            path.mkdir()
        else:
            path.write_bytes(ast.literal_eval(" ".join(words[1:]) or "b'not what should be here'"))


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def refuse(access: str, pattern: str, name: str, patch: pytest.MonkeyPatch) -> None:
    number = getattr(errno, name)

    def refusing(real: Callable[..., Any], always: bool) -> Callable[..., Any]:
        def function(path: Any, *others: Any, **options: Any) -> Any:
            matches = isinstance(path, str | Path) and fnmatch.fnmatch(str(path), pattern)
            if matches and (always or (others and set(others[0]) & set("wax"))):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *others, **options)

        return function

    if access == "read":
        patch.setattr(Path, "open", refusing(Path.open, True))
    else:
        patch.setattr(os, "mkdir", refusing(os.mkdir, True))
        patch.setattr(io, "open", refusing(io.open, False))


def refuse_weights(number: int, patch: pytest.MonkeyPatch) -> None:
    """Let safetensors fail as it does on a full or read-only disk, in its own words."""

    def save_file(*arguments: object) -> None:
        raise SafetensorError(f"I/O error: {os.strerror(number)} (os error {number})")

    patch.setattr(files, "save_file", save_file)


def copy_to_a_full_disk(source: Path, into: Path) -> None:
    into.write_bytes(source.read_bytes()[:100])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(into))


@pytest.mark.parametrize("case", CASES)
def test_a_failing_disk_or_network_is_one_message(
    case: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (command, *damages), facts = CASES[case]
    copy = tmp_path / "run"
    shutil.copytree(finished / "run", copy)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("headstart.data_pipelines.prompts.completion_client.RETRIES", 0)
    for each in damages:
        damage(copy, *each.split(" "), patch=monkeypatch)
    before = names(copy)
    places = {**PLACES, "run": copy, "folder": finished}
    outcome = type_command(shlex.split(filled(command, **places)), monkeypatch, capsys)
    monkeypatch.undo()
    assert_refused(outcome, filled(facts, **places))
    assert outcome.err.count("error: ") <= 1
    assert not [name for name in names(copy) - before if ".partial" in name or "/.tmp" in name]


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
