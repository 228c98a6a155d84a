"""Laws of the tree: which folder may import what, and which names scripts must not take."""

import ast
import importlib.metadata
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ["recipes", "heads", "inference", "data_pipelines", "trainers"]  # each imports only from those before it

# Library -> the only folders and files that may import it.
ONLY_IN = {
    "transformers": (
        "inference/target.py",
        "inference/shared.py",  # a target that ranks hold together is loaded by its means
        "inference/tokenizer.py",  # where decoding needs text
        "inference/architecture.py",
        "inference/cache.py",  # the cache is a transformers Cache
        "data_pipelines/demo_target.py",
        "data_pipelines/demo_post_train.py",
    ),
    "tokenizers": ("data_pipelines/",),
    "accelerate": ("trainers/", "data_pipelines/harvest.py", "data_pipelines/work.py"),
    "deepspeed": ("trainers/", "inference/shared.py"),
    "peft": ("trainers/joint.py",),
    "wandb": ("trainers/",),
    "torch": ("heads/", "inference/", "data_pipelines/", "trainers/"),
}

# Perhaps not installed, but imported by torch, transformers or accelerate on machines that have them.
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


def imported(source: str) -> set[str]:
    """Top-level names of every module that a source imports, also inside functions; relative imports stay at home."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names.add(node.module.partition(".")[0])
    return names


def violations(file: str, source: str) -> list[str]:
    """What a file of one of the folders imports and must not."""
    folder = file.partition("/")[0]
    to_the_right = FOLDERS[FOLDERS.index(folder) + 1 :]
    names = sorted(imported(source))
    against_the_flow = [f"{file} imports {name}, which comes after {folder}" for name in names if name in to_the_right]
    out_of_place = [
        f"{file} imports {name}, which belongs to {', '.join(ONLY_IN[name])}"
        for name in names
        if name in ONLY_IN and not file.startswith(ONLY_IN[name])
    ]
    return against_the_flow + out_of_place


def is_shadowing(name: str) -> bool:
    """Would a script called NAME.py, whose folder comes first on sys.path, hide a library or one of our packages?"""
    return name in {*FOLDERS, *sys.stdlib_module_names, *installed(), *OPTIONAL_LIBRARIES}


@cache
def installed() -> frozenset[str]:
    """Top-level names of all libraries that are here."""
    return frozenset(importlib.metadata.packages_distributions())


def test_imports_follow_the_data_flow() -> None:
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    assert len(files) > len(FOLDERS)
    found = [line for path in files for line in violations(path.relative_to(ROOT).as_posix(), path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["trainers", "benchmarks"])
def test_no_script_shadows_a_library(folder: str) -> None:
    names = {path.stem for path in (ROOT / folder).iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not {name for name in names - {"__init__", "__pycache__"} if is_shadowing(name)}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("heads/eagle3.py", "from inference.tree import Tree"),
        ("heads/eagle3.py", "def late():\n    import trainers.loop"),
        ("inference/decode.py", "from transformers import AutoModel"),
        ("inference/decode.py", "import wandb"),
        ("recipes/schema.py", "from torch import nn"),
        ("data_pipelines/shards.py", "import accelerate"),
    ],
)
def test_a_wrong_import_is_found(file: str, source: str) -> None:
    assert len(violations(file, source)) == 1


@pytest.mark.parametrize("name", ["evaluate", "datasets", "profile", "torch", "heads"])
def test_a_shadowing_name_is_found(name: str) -> None:
    assert is_shadowing(name)
