"""EAGLE-3 heads for llama.cpp: GGUF files written by its own converter, in an environment of its own."""

import shutil
import subprocess
from pathlib import Path

CONVERTER = "convert_hf_to_gguf.py"  # in the root of llama.cpp's sources
FILE = "head.gguf"
OUTTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
SHOWN = 400  # last characters of what the converter printed


def find_converter() -> str:
    """The converter's command; raises ValueError, saying how to get it, if it is not on the PATH."""
    found = shutil.which(CONVERTER)
    if found is None:
        raise ValueError(
            f"export.format: 'gguf' given, but llama.cpp's converter, {CONVERTER}, is not on the PATH, where it is "
            f"required; make check-llamacpp fetches it: "
            f'export PATH="$PWD/.venv-llamacpp/bin:$PWD/.venv-llamacpp/llama.cpp:$PATH"'
        )
    return found


def write_gguf(converter: str, head: Path, target: Path, dtype: str) -> None:
    """Write the head of a folder, with the tokenizer of its target's folder, as `head.gguf` into that folder.

    Raises ValueError with the end of the converter's own messages if it fails.
    """
    command = [converter, str(head), "--target-model-dir", str(target), "--outtype", OUTTYPES[dtype]]
    done = subprocess.run([*command, "--outfile", str(head / FILE)], capture_output=True, text=True, check=False)
    if done.returncode or not (head / FILE).is_file():
        said = " ".join((done.stdout + done.stderr).split())[-SHOWN:]
        raise ValueError(
            f"export.format: 'gguf' given, but {CONVERTER} ended with: ...{said}; a target and a tokenizer that "
            "llama.cpp knows are required: choose another format"
        )
