"""Laws of the repository: which folder may import what, and which names scripts must not take."""

import importlib.metadata
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = "headstart."
# A room imports only from itself and from rooms before it. A file belongs to the longest path that matches.
IN_ORDER = """
    common/ recipes/ heads/ heads/kinds/ heads/formats/
    inference/core/ inference/kernels/ inference/targets/ inference/images/ inference/drafters/ inference/engine/
    inference/generate/ inference/show.py inference/calibrate.py inference/report/ inference/serve/api/ inference/serve/
    inference/doctor/
    data_pipelines/stages/ data_pipelines/prompts/ data_pipelines/features/ data_pipelines/
    trainers/objectives/ trainers/parallel/ trainers/ trainers/refresh/
    headstart/
"""
ROOMS = IN_ORDER.split()
FOLDERS = ["common", "recipes", "heads", "inference", "data_pipelines", "trainers"]
JOINED_TO_PARENT = {ROOT / "heads/formats/kinds"}  # folders that may import files of their parent and the reverse
FILES_MAX = {"source": 12, "tests": 22}  # in a folder, not counting its __init__.py
FILE_LINES_MAX = 450
# Lines of source that a folder may hold, those of folders in it not counted. Who adds takes away elsewhere.
BUDGETS = {
    "common": 988,
    "data_pipelines": 1_215,
    "data_pipelines/features": 1_495,
    "data_pipelines/prompts": 2_431,
    "data_pipelines/stages": 404,
    "heads": 2_422,
    "heads/formats": 1_311,
    "heads/formats/kinds": 668,
    "heads/kinds": 2_018,
    "headstart": 1_146,
    "inference": 256,
    "inference/core": 2_485,
    "inference/doctor": 697,
    "inference/drafters": 1_917,
    "inference/engine": 1_678,
    "inference/generate": 1_168,
    "inference/images": 454,
    "inference/kernels": 1_825,
    "inference/kernels/gpu": 878,
    "inference/report": 1_046,
    "inference/serve": 1_691,
    "inference/serve/api": 1_857,
    "inference/targets": 3_380,
    "recipes": 1_702,
    "trainers": 1_929,
    "trainers/objectives": 808,
    "trainers/parallel": 545,
    "trainers/refresh": 672,
}

# Library -> the only folders and files that may import it.
ONLY_IN = {
    "transformers": (
        "inference/targets/",
        "inference/images/",  # processors are its classes
        "heads/target_ends.py",  # where a target keeps them is in its class
        "heads/kinds/mtp.py",  # the layer is of the target's class
        "heads/layers.py",  # the formulas of scaled rotary embeddings
        "inference/core/cache.py",  # the cache is a transformers Cache
        "inference/core/side_by_side.py",  # so is a row's part of it
        "inference/kernels/compiled.py",  # it compiles layers of transformers
        "headstart/target_description.py",  # the model types that transformers registers
        "headstart/trl.py",  # a callback of its trainers
        "trainers/refresh/",  # a policy in memory is its model
    ),
    "tokenizers": ("data_pipelines/", "inference/targets/gguf_settings.py"),
    "accelerate": (
        *("trainers/", "data_pipelines/harvest", "data_pipelines/on_ray.py", "data_pipelines/together.py"),
        *("data_pipelines/stages/", "data_pipelines/prompts/candidates.py"),
    ),
    "deepspeed": ("trainers/",),
    "ray": ("data_pipelines/on_ray.py",),
    "fsspec": ("common/remote.py",),
    "PIL": ("inference/images/pictures.py",),
    "peft": ("trainers/objectives/medusa2.py", "inference/targets/loading.py"),
    "wandb": ("trainers/",),
    **dict.fromkeys(("starlette", "uvicorn", "prometheus_client"), ("inference/serve/",)),
    "torch": ("heads/", "inference/", "data_pipelines/", "trainers/", "headstart/"),
}

# These may be missing here, but torch, transformers or accelerate import them on machines that have them.
OPTIONAL_LIBRARIES = {
    *("datasets", "deepspeed", "evaluate", "kernels", "onnx", "optimum", "pandas", "peft", "scipy", "tensorboard"),
    *("timm", "triton", "trl"),
}


# To parse the files takes a second. A line of a docstring that reads like an import counts as one.
IMPORT = re.compile(r"^[ \t]*(?:from +([\w.]+) +import +(\([^)]*\)|[^\n(#]+)|import +([^\n#]+))", re.MULTILINE)


@cache
def imports_in(source: str) -> set[str]:
    """The modules, and names that may be modules, that a source imports, also inside functions."""
    found = set()
    for module, names, modules in IMPORT.findall(source):
        found |= {name.split()[0] for name in modules.split(",") if name}
        if module:
            found |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", re.sub(r"#.*| as \w+", "", names)))}
    return found


def room_of(file: str) -> str:
    return max((room for room in ROOMS if file.startswith(room)), key=len, default="")


def violations(file: str, source: str) -> list[str]:
    """One line for each import that a file in one of the folders must not have."""
    names = sorted({name.partition(".")[0] for name in imports_in(source)})
    upward = [
        f"{file} imports {other}, which comes after {room_of(file)}"
        for other in sorted(imported_modules(source))
        if ROOMS.index(room_of(other)) > ROOMS.index(room_of(file))
    ]
    without_prefix = [f"{file} imports {name} without the prefix {OURS}" for name in names if name in FOLDERS]
    out_of_place = [
        f"{file} imports {name}, which belongs to {', '.join(ONLY_IN[name])}"
        for name in names
        if name in ONLY_IN and not file.startswith(ONLY_IN[name])
    ]
    return upward + without_prefix + out_of_place


def imported_modules(source: str) -> set[str]:
    """Our own files that a source imports, also inside functions, relative to the repository."""
    found = set()
    for module in imports_in(source):
        if module.startswith(OURS):
            name = module.removeprefix(OURS).replace(".", "/")
            path = f"{name}.py" if name.partition("/")[0] in FOLDERS else f"headstart/{name}.py"
            found |= {path} if is_ours(path) else set()
    return found


@cache
def is_ours(path: str) -> bool:
    return (ROOT / path).is_file()


def circle_in(imports: dict[Path, set[Path]]) -> list[Path]:
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


text_of = cache(Path.read_text)


@cache
def our_files() -> list[Path]:
    linked = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted([*linked, *(ROOT / "headstart").glob("*.py")])


@cache
def shadowed() -> set[str]:
    """The libraries and packages of ours that a script of their name would hide: its folder is first on sys.path."""
    return {*FOLDERS, *sys.stdlib_module_names, *importlib.metadata.packages_distributions(), *OPTIONAL_LIBRARIES}


def test_imports_follow_the_data_flow() -> None:
    files = our_files()
    assert len(files) > len(FOLDERS)
    found = [line for path in files for line in violations(path.relative_to(ROOT).as_posix(), text_of(path))]
    assert not found, "\n".join(found)


def test_no_files_and_no_folders_import_each_other_in_a_circle() -> None:
    a, b, c, d = map(Path, "abcd")
    assert circle_in({a: {b}, b: {c}, c: {b}, d: set()}) == [b, c, b]
    assert circle_in({a: {b, c}, b: {c}, c: set(), d: {a}}) == []
    files = {file: {ROOT / path for path in imported_modules(text_of(file))} for file in our_files()}
    assert sum(map(len, files.values())) > len(files)
    folders: dict[Path, set[Path]] = {}
    for file, others in files.items():
        folder = folder_of(file)
        folders.setdefault(folder, set()).update({folder_of(other) for other in others} - {folder})
    assert len(folders) > len(FOLDERS)
    for imports in (files, folders):
        assert not circle_in(imports), " -> ".join(str(path.relative_to(ROOT)) for path in circle_in(imports))


def folder_of(file: Path) -> Path:
    return file.parent.parent if file.parent in JOINED_TO_PARENT else file.parent


def test_a_class_name_has_one_meaning() -> None:
    names = Counter(name for file in our_files() for name in re.findall(r"^class (\w+)", text_of(file), re.MULTILINE))
    assert len(names) > 200
    assert not [name for name, count in names.items() if count > 1]


def test_kernels_are_behind_one_door() -> None:
    inside = re.compile(r"headstart\.inference\.kernels\.\w")
    others = [file for file in our_files() if ROOT / "inference/kernels" not in file.parents]
    assert inside.search("from headstart.inference.kernels.compiled import Compiler")
    assert not [str(file) for file in others if inside.search(text_of(file))]


def test_scripts_import_our_folders_with_the_prefix() -> None:
    """`recipes.schema` and `headstart.recipes.schema` would be two modules, whose classes differ."""
    folders = "tests", "benchmarks", "examples", "assets"
    scripts = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(scripts) > 100
    unprefixed = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(FOLDERS)})\b", re.MULTILINE)  # to parse them takes long
    assert unprefixed.search("def late():\n    from heads.base import DraftHead\n")
    assert not [path for path in scripts if unprefixed.search(path.read_text())]


def test_folders_stay_small() -> None:
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.parent != ROOT / "tests"]
    for kind, files in {"source": our_files(), "tests": tests}.items():
        folders = (path.parent.relative_to(ROOT).as_posix() for path in files if path.name != "__init__.py")
        sizes = Counter(folders)
        assert max(sizes.values()) > 5
        assert not {folder: size for folder, size in sizes.items() if size > FILES_MAX[kind]}


def test_no_file_is_long_and_no_folder_exceeds_its_budget() -> None:
    lines = {path.relative_to(ROOT): len(text_of(path).splitlines()) for path in our_files()}
    assert not {path.as_posix(): count for path, count in lines.items() if count > FILE_LINES_MAX}
    folders: Counter[str] = Counter()
    for path, count in lines.items():
        folders[path.parent.as_posix()] += count
    assert folders.keys() == BUDGETS.keys()
    assert not {folder: count for folder, count in folders.items() if count > BUDGETS[folder]}


@pytest.mark.slow
def test_training_loads_neither_the_report_nor_the_doctor() -> None:
    program = "import headstart.trainers.stages, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "headstart.inference.engine.loop" in loaded.stdout
    assert not re.search(r"headstart\.inference\.(report|doctor)", loaded.stdout)


@pytest.mark.parametrize("folder", ["trainers", "benchmarks"])
def test_no_script_shadows_a_library(folder: str) -> None:
    assert {"evaluate", "datasets", "profile", "torch", "heads"} < shadowed()
    names = {path.stem for path in (ROOT / folder).iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not (names - {"__init__", "__pycache__"}) & shadowed()


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("heads/kinds/eagle3.py", "from headstart.inference.core.tree import Tree"),
        ("heads/kinds/eagle3.py", "def late():\n    import headstart.trainers.loop"),
        ("inference/core/tree.py", "from headstart.inference.engine import loop"),
        ("data_pipelines/prompts/rows.py", "from headstart.data_pipelines.features.shards import ShardStore"),
        ("trainers/stages.py", "from headstart.cli import main"),
        ("trainers/stages.py", "import recipes.schema"),
        ("inference/engine/loop.py", "from transformers import AutoModel"),
        ("inference/engine/loop.py", "import wandb"),
        ("recipes/schema.py", "from torch import nn"),
        ("data_pipelines/features/shards.py", "import accelerate"),
    ],
)
def test_a_forbidden_import_is_found(file: str, source: str) -> None:
    assert len(violations(file, source)) == 1
