"""Laws of the repository: which folder may import what, and which names scripts must not take."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = "headstart."
FOLDERS = ["recipes", "heads", "inference", "data_pipelines", "trainers"]  # each imports only from those before it

# Library -> the only folders and files that may import it.
ONLY_IN = {
    "transformers": (
        "inference/target/",
        "inference/cache.py",  # the cache is a transformers Cache
        "data_pipelines/demo/",
    ),
    "tokenizers": ("data_pipelines/",),
    "accelerate": (
        "trainers/",
        "data_pipelines/harvest.py",
        "data_pipelines/shard_work.py",
        "data_pipelines/self_prompts.py",
        "data_pipelines/together.py",
        "data_pipelines/lifeline.py",
    ),
    "deepspeed": ("trainers/", "inference/target/ranks.py"),
    "peft": ("trainers/medusa2.py",),
    "matplotlib": ("inference/report/",),
    "wandb": ("trainers/",),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "prometheus_client"), ("inference/serve/",)),
    "torch": ("heads/", "inference/", "data_pipelines/", "trainers/"),
}

# The rest of inference/ is the decode core, which must not import these.
OUTSIDE_THE_CORE = ["inference/report/", "inference/doctor/", "inference/chat/", "inference/serve/"]

# These may be missing here, but torch, transformers or accelerate import them on machines that have them.
OPTIONAL_LIBRARIES = {
    "datasets",
    "deepspeed",
    "evaluate",
    "kernels",
    "onnx",
    "optimum",
    "pandas",
    "peft",
    "scipy",
    "tensorboard",
    "timm",
    "triton",
    "trl",
}


def imported_names(source: str) -> set[str]:
    """Top-level names of all modules that a source imports, also inside functions; our own without `headstart.`."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {module.removeprefix(OURS).partition(".")[0] for module in modules}


def violations(file: str, source: str) -> list[str]:
    """One line for each import that a file in one of the folders must not have."""
    folder = file.partition("/")[0]
    later_folders = FOLDERS[FOLDERS.index(folder) + 1 :]
    names = sorted(imported_names(source))
    backward = [f"{file} imports {name}, which comes after {folder}" for name in names if name in later_folders]
    out_of_place = [
        f"{file} imports {name}, which belongs to {', '.join(ONLY_IN[name])}"
        for name in names
        if name in ONLY_IN and not file.startswith(ONLY_IN[name])
    ]
    return backward + out_of_place


def imported_files(file: Path) -> set[Path]:
    """Our own files that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        paths = (ROOT / f"{module.removeprefix(OURS).replace('.', '/')}.py" for module in modules)
        found |= {path for path in paths if path.is_file()}
    return found


def circle_in(imports: dict[Path, set[Path]]) -> list[Path]:
    """Files that import each other in a circle, with the first one again at the end; empty if there is no circle."""
    done: set[Path] = set()

    def visit(file: Path, path: list[Path]) -> list[Path]:
        if file in path:
            return [*path[path.index(file) :], file]
        if file not in done:
            for other in sorted(imports[file]):
                if found := visit(other, [*path, file]):
                    return found
        done.add(file)
        return []

    return next(filter(None, (visit(file, []) for file in sorted(imports))), [])


def our_files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def is_shadowing(name: str) -> bool:
    """Would a script NAME.py hide a library or one of our packages? Its folder comes first on sys.path."""
    return name in {*FOLDERS, *sys.stdlib_module_names, *installed(), *OPTIONAL_LIBRARIES}


@cache
def installed() -> frozenset[str]:
    """Top-level names of all installed libraries."""
    return frozenset(importlib.metadata.packages_distributions())


def test_imports_follow_the_data_flow() -> None:
    files = our_files()
    assert len(files) > len(FOLDERS)
    found = [line for path in files for line in violations(path.relative_to(ROOT).as_posix(), path.read_text())]
    assert not found, "\n".join(found)


def test_no_files_import_each_other_in_a_circle() -> None:
    imports = {file: imported_files(file) for file in our_files()}
    assert sum(map(len, imports.values())) > len(imports)
    assert not circle_in(imports), " -> ".join(str(file.relative_to(ROOT)) for file in circle_in(imports))


def test_a_circle_of_imports_is_found() -> None:
    a, b, c, d = map(Path, "abcd")
    assert circle_in({a: {b}, b: {c}, c: {b}, d: set()}) == [b, c, b]
    assert circle_in({a: {b, c}, b: {c}, c: set(), d: {a}}) == []


def test_the_decode_core_imports_none_of_the_report_doctor_chat_and_server() -> None:
    outside = [ROOT / folder for folder in OUTSIDE_THE_CORE]
    core = [file for file in (ROOT / "inference").rglob("*.py") if not any(map(file.is_relative_to, outside))]
    assert len(core) > 10
    forbidden = [
        (file, other) for file in core for other in imported_files(file) if any(map(other.is_relative_to, outside))
    ]
    assert not forbidden


def test_training_loads_neither_the_report_nor_the_doctor_nor_matplotlib() -> None:
    program = "import headstart.trainers.run, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = loaded.stdout.split()
    assert "headstart.inference.decode" in modules
    assert not [
        name
        for name in modules
        if name.startswith(("matplotlib", "headstart.inference.report", "headstart.inference.doctor"))
    ]


def test_documents_link_to_files_that_exist() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "assets").rglob("*.md")]
    links = [(document, link) for document in documents for link in re.findall(r"\]\(([^)#]+)", document.read_text())]
    assert len(links) > 20
    assert not [
        f"{document.name}: {link}"
        for document, link in links
        if not link.startswith("http") and not (document.parent / link).exists()
    ]


@pytest.mark.parametrize("folder", ["trainers", "benchmarks"])
def test_no_script_shadows_a_library(folder: str) -> None:
    names = {path.stem for path in (ROOT / folder).iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not {name for name in names - {"__init__", "__pycache__"} if is_shadowing(name)}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("heads/eagle3.py", "from headstart.inference.tree import Tree"),
        ("heads/eagle3.py", "def late():\n    import headstart.trainers.loop"),
        ("inference/decode.py", "from transformers import AutoModel"),
        ("inference/decode.py", "import wandb"),
        ("recipes/schema.py", "from torch import nn"),
        ("data_pipelines/shards.py", "import accelerate"),
    ],
)
def test_a_forbidden_import_is_found(file: str, source: str) -> None:
    assert len(violations(file, source)) == 1


@pytest.mark.parametrize("name", ["evaluate", "datasets", "profile", "torch", "heads"])
def test_a_shadowing_name_is_found(name: str) -> None:
    assert is_shadowing(name)
