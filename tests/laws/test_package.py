"""Laws of the wheel: it holds every file of ours, however the sources were fetched, and works from any folder."""

import io
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from tiny_run import quiet_environment

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("common", "recipes", "heads", "inference", "data_pipelines", "trainers")
SOURCES = (*FOLDERS, "examples", "headstart", "pyproject.toml", "README.md", "LICENSE")

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares with what git holds")


def packaged_files() -> set[str]:
    """Every file of the last commit that a wheel must hold, by its path in the wheel."""
    command = ["git", "ls-tree", "-r", "--format=%(objectmode) %(path)", "HEAD", *FOLDERS, "examples", "headstart"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [line.partition(" ")[2] for line in listed if not line.startswith("120000")]  # links
    return {path if path.startswith("headstart/") else f"headstart/{path}" for path in files}


def unpack(folder: Path) -> Path:
    command = ["git", "archive", "--format=zip", "HEAD", *SOURCES]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    zipfile.ZipFile(io.BytesIO(archive)).extractall(folder)
    assert (folder / "headstart/heads").read_text() == "../heads"
    return folder


def build(sources: Path, into: Path) -> Path:
    """The wheel, built by the build backend that pyproject.toml names."""
    program = f"import setuptools.build_meta; setuptools.build_meta.build_wheel({str(into)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=sources, capture_output=True, check=True)
    return next(into.glob("*.whl"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(unpack(tmp_path_factory.mktemp("unzipped")), tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_a_wheel_from_a_zip_file_holds_exactly_the_files_of_the_packages(wheel: Path) -> None:
    found = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert len(found) > 200
    assert found == packaged_files()


@pytest.mark.slow
def test_a_clone_and_a_zip_file_give_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    clone = unpack(tmp_path / "clone")
    for folder in FOLDERS:
        (clone / "headstart" / folder).unlink()
        (clone / "headstart" / folder).symlink_to(f"../{folder}")
    assert contents(build(clone, tmp_path / "wheel")) == contents(wheel)


def test_the_listed_packages_are_the_folders_with_code() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [file.parent for folder in FOLDERS for file in (ROOT / folder).rglob("__init__.py")]
    names = [".".join(("headstart", *folder.relative_to(ROOT).parts)) for folder in folders]
    assert sorted(listed) == sorted(["headstart", "headstart.examples", *names])
    with_code = {file.parent for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")}
    assert with_code == set(folders)


@pytest.mark.slow
def test_an_installed_wheel_chats_imports_and_trains_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    environment, here = tmp_path / "venv", tmp_path / "elsewhere"
    here.mkdir()
    python = environment / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, *install], check=True)
    site = next(environment.glob("lib/python*/site-packages"))
    (site / "libraries.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")) + "\n")

    values = yaml.safe_load((ROOT / "recipes/tiny.yaml").read_text())
    values["target"]["path"] = str(ROOT / "assets/demo_target")
    values["data"] |= {name: str(ROOT / values["data"][name]) for name in ("prompts", "heldout_prompts")}
    values["data"] |= {"num_prompts": 8, "response_tokens": 8, "heldout_samples": 2}
    values["train"] |= {"steps": 2, "warmup_steps": 0, "eval_prompts": 0}
    (here / "recipe.yaml").write_text(yaml.safe_dump(values))

    variables = {key: value for key, value in quiet_environment(ROOT).items() if key != "PYTHONPATH"}

    def output(program: str, *arguments: str) -> str:
        command = [str(environment / "bin" / program), *arguments]
        ended = subprocess.run(command, cwd=here, env=variables, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    shown = output("python", "-c", "from headstart import SpeculativeModel; import headstart as h; print(h)")
    assert str(site) in shown
    assert "usage: headstart chat" in output("headstart", "chat", "--help")
    output("headstart", "train", "recipe.yaml")
    assert (here / "runs/tiny/head/model.safetensors").is_file()
