"""Laws of names: headstart works from a folder that holds files named like our folders."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import quiet_environment

import headstart

ROOT = Path(__file__).resolve().parents[2]
OURS = ["recipes", "heads", "inference", "data_pipelines", "trainers", "benchmarks", "tests"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a module of each of our names, which must never be imported by us."""
    for name in OURS:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('the {name}.py of the user was imported')\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, cwd=folder, env=quiet_environment(ROOT), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_a_script_beside_a_heads_py_of_its_own_uses_the_python_api_and_commands(folder: Path) -> None:
    target, head = ROOT / "assets/demo_target", ROOT / "assets/demo_head"
    start = "import sys; sys.argv = ['headstart', 'train', '--help']; from headstart.cli import main; main()"
    assert "usage: headstart train" in run(folder, "-c", start)
    (folder / "heads.py").write_text("mine = 1\n")
    (folder / "script.py").write_text(
        "import torch, heads\n"
        "from headstart import SpeculativeModel, load_recipe\n"
        f"model = SpeculativeModel.from_folders({str(target)!r}, {str(head)!r})\n"
        "print(heads.mine, model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4).shape)\n"
    )
    assert run(folder, "script.py").strip().endswith("1 torch.Size([1, 7])")


def test_a_module_runs_in_a_folder_with_a_heads_py_and_importing_headstart_loads_no_torch(folder: Path) -> None:
    module = "headstart.data_pipelines.harvest"
    assert f"usage: python -m {module}" in run(folder, "-m", module, "--help")
    assert run(folder, "-c", "import headstart, sys; print('torch' in sys.modules)").strip() == "False"


def test_every_public_name_is_there() -> None:
    assert {*headstart.MODULES, "train"} == set(headstart.__all__)
    for name in headstart.__all__:
        assert getattr(headstart, name).__name__ == name
    with pytest.raises(AttributeError, match="SpeculativeModel"):
        headstart.speculate  # noqa: B018
