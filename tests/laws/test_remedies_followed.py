"""What a message says to do is done, word for word, and the same command then succeeds."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from bad_inputs import Outcome, type_command
from safetensors.torch import load_file
from tiny_run import build_run, recipe_values, write_prompts

from headstart import cli

pytestmark = pytest.mark.slow  # each runs the commands that a message names

Type = Callable[..., Outcome]  # headstart ARGUMENTS

REPORT = (
    "report.num_prompts=1",
    "report.temperatures=[0]",
    "report.baselines=[plain, tree]",
)


@pytest.fixture
def headstart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Type:
    return lambda *arguments: type_command([str(each) for each in arguments], monkeypatch, capsys)


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        values = recipe_values(folder)
        build_run(folder)
        values["train"] |= yaml.safe_load("{steps: 2, warmup_steps: 0, checkpoint_every: 1}")
        (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
        patch.setattr("sys.argv", ["bin/headstart", "train", str(folder / "recipe.yaml")])
        cli.main()
    return folder


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained_once / "run", tmp_path / "run")
    (tmp_path / "target").symlink_to(trained_once / "target")
    values = yaml.safe_load((trained_once / "recipe.yaml").read_text())
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**values, "run_dir": str(tmp_path / "run")}))
    return tmp_path


def refused(outcome: Outcome) -> str:
    assert outcome.code != 0, f"accepted: {outcome.text}"
    assert "Traceback" not in outcome.text, outcome.text
    return " ".join(outcome.err.split())


def succeeded(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.text
    assert "Traceback" not in outcome.text, outcome.text
    return outcome


def remove_what_it_names(message: str) -> None:
    """Type the `rm` of the message, or else remove the paths that it names from the word `remove` on, `it` included."""
    commands = re.findall(r"\brm (?:-r )?([^;)]*)", message)
    about, _, advice = message.partition("remove ")
    paths = re.findall(r"(/[^\s;,)]+)", advice) + ["manifest.json"] * ("and manifest.json" in advice)
    if advice.startswith("it "):
        paths.append(re.findall(r"/[^\s;,)]+", about)[0])
    paths = shlex.split(commands[-1]) if commands else [str(Path(paths[0]).parent / path) for path in paths]
    assert paths, f"nothing to remove is named in: {message}"
    for path in map(Path, paths):
        assert path.exists(), f"{path} is named, but does not exist: {message}"
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def command_it_names(message: str, name: str, recipe: Path) -> list[str]:
    """The arguments of the `headstart NAME ...` that a message names, with the user's recipe for RECIPE."""
    found = re.search(rf"headstart ({name}(?: [\w./=-]+)*)", message)
    assert found is not None, f"no headstart {name} in: {message}"
    return [str(recipe) if word == "RECIPE" else word for word in found[1].split()]


@pytest.mark.parametrize("change", ["seed=4", "data.dtype=bfloat16", "train.unroll=2"])
def test_each_remedy_for_a_changed_recipe_is_enough(trained: Path, headstart: Type, change: str) -> None:
    command = ("train", trained / "recipe.yaml", change)
    message = refused(headstart(*command))
    assert "choose another run_dir" in message
    succeeded(headstart(*command, f"run_dir={trained / 'another'}"))
    assert "undo the change" in message
    succeeded(headstart("train", trained / "recipe.yaml"))
    remove_what_it_names(message)
    succeeded(headstart(*command))


def test_the_prompts_of_another_run_are_not_named_for_removal(trained: Path, headstart: Type) -> None:
    shared = f"data.folder={trained / 'run'}"
    command = ("train", trained / "recipe.yaml", "seed=4", f"run_dir={trained / 'mine'}")
    message = refused(headstart(*command, shared))
    assert "data.folder" in message
    assert not re.search(rf"(?:remove|rm -r) .*{re.escape(str(trained / 'run'))}", message), message
    succeeded(headstart(*command, f"data.folder={trained / 'other'}"))


def test_a_finished_run_goes_on_after_its_damaged_shard_was_removed(trained: Path, headstart: Type) -> None:
    shard = next((trained / "run/features").glob("train-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    shutil.rmtree(trained / "run/checkpoints")
    message = refused(headstart("train", trained / "recipe.yaml"))
    remove_what_it_names(message)
    assert "harvest again" in message
    succeeded(headstart("harvest", trained / "recipe.yaml"))
    succeeded(headstart("train", trained / "recipe.yaml"))


def test_a_run_goes_on_from_the_checkpoint_before_a_broken_one(trained: Path, headstart: Type) -> None:
    (trained / "run/checkpoints/step-2/head.safetensors").write_bytes(b"")
    shutil.rmtree(trained / "run/head")
    message = refused(headstart("train", trained / "recipe.yaml"))
    remove_what_it_names(message)
    assert "step 1" in succeeded(headstart("train", trained / "recipe.yaml")).text


def test_a_format_that_cannot_hold_the_head_is_left_for_one_that_is_named(trained: Path, headstart: Type) -> None:
    command = ("export", trained / "recipe.yaml")
    message = refused(headstart(*command, "export.format=gguf"))
    named = re.findall(r"\b(vllm|sglang|tensorrt_llm|speculators|native)\b", message)
    assert named, message
    for name in named:
        succeeded(headstart(*command, f"export.format={name}"))


@pytest.mark.parametrize(("missing", "command"), [("head", "train"), ("prompts", "prompts")])
def test_a_report_without_heads_or_prompts_names_a_command_that_makes_them_and_overrides_that_do_without(
    trained: Path, headstart: Type, missing: str, command: str
) -> None:
    shutil.copytree(trained / "run/head", trained / "saved")
    shutil.rmtree(trained / "run" / missing)
    report = ("report", trained / "recipe.yaml", *REPORT)
    message = refused(headstart(*report))
    named = re.findall(r"(report\.\w+)=('[^']*'|\w+)", message)
    write_prompts(trained / "questions.jsonl", count=3, first=200)
    words = {"FOLDER": str(trained / "saved"), "FILE": str(trained / "questions.jsonl")}
    if missing == "head":
        named = [(field, value) for field, value in named if field == "report.baselines"]
    assert named, message
    succeeded(headstart(*report, *(f"{field}={words.get(value, value.strip(chr(39)))}" for field, value in named)))
    succeeded(headstart(*command_it_names(message, command, trained / "recipe.yaml")))
    succeeded(headstart(*report))


def test_a_head_of_pickled_weights_is_converted_by_the_command_that_is_named(trained: Path, headstart: Type) -> None:
    weights = trained / "run/head/model.safetensors"
    torch.save(load_file(weights), trained / "run/head/pytorch_model.bin")
    weights.unlink()
    report = ("report", trained / "recipe.yaml", *REPORT)
    command = command_it_names(refused(headstart(*report)), "convert", trained / "recipe.yaml")
    words = {"NEW_FOLDER": str(trained / "new"), "TARGET": str(trained / "target")}
    succeeded(headstart(*(words.get(word, word) for word in command)))
    succeeded(headstart(*report, f"decode.head={trained / 'new'}"))
