"""Where the weights of a GGUF file lie once they are unpacked: a folder per content, shared by all runs of a user."""

import hashlib
import subprocess
import sys
from pathlib import Path

from headstart.common.process import user_cache
from headstart.common.run_lock import only_run_in
from headstart.heads.model_files import both_ends


def unpacked_folder(file: Path, field: str) -> Path:
    """The folder with the file's model as safetensors; unpacks it first if need be, which takes a minute.

    Raises ValueError, naming the `field` in which the user gave the file, if there is none or it cannot be unpacked.
    """
    if not file.is_file():
        raise ValueError(f"{field}: {file} given, an existing GGUF file is allowed; check the path")
    folder = user_cache("gguf") / identity(file)
    if (folder / "config.json").is_file():
        return folder
    with only_run_in(folder.with_name(folder.name + ".lock"), f"unpacking {file.name}", wait=True):
        if not (folder / "config.json").is_file():
            print(f"unpacking {file} into {folder}, once", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "headstart.inference.targets.gguf", str(file.absolute()), str(folder)]
            ended = subprocess.run(command, stderr=subprocess.PIPE, text=True)
            if ended.returncode:
                said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
                raise ValueError(f"{field}: {said[-1].removeprefix('error: ')}")
    return folder


def identity(file: Path) -> str:
    """A digest of size and both ends of a file, cheap for one of hundreds of gigabytes."""
    digest = hashlib.sha256(str(file.stat().st_size).encode() + both_ends(file))
    return f"{file.stem}-{digest.hexdigest()[:16]}"
