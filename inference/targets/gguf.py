"""A GGUF file as a target: its weights are unpacked once into safetensors, which every command then reads.

`locate_target` runs this module in a process of its own, so that the memory for unpacking is free again afterwards.
"""

import argparse
import struct
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.common.errors import errors_as_messages
from headstart.common.files import removed_on_failure
from headstart.heads.files import give_umask_mode
from headstart.inference.targets.loading import no_bars_of_transformers
from headstart.recipes.command_line import command_name

MAGIC = b"GGUF"
OLDEST = (5, 18)  # the transformers that reads GGUF files as they are meant


def main() -> None:
    parser = argparse.ArgumentParser(prog=command_name(), description="Unpack a GGUF file into a model's folder.")
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path, help="the new folder")
    arguments = parser.parse_args()
    with errors_as_messages():
        unpack(arguments.file, arguments.folder)


def unpack(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as config.json, tokenizer and safetensors in bfloat16; the folder appears whole.

    Raises ValueError for a file that is no GGUF, is damaged, or holds an architecture that transformers does not read.
    """
    refuse_other_file(file)
    refuse_old_transformers(file)
    partial = folder.with_name(folder.name + ".partial")
    with removed_on_failure(partial), no_bars_of_transformers():
        partial.mkdir(parents=True, exist_ok=True)
        try:
            dense = transformers.GgufConfig(dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=dense
            )
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        except (ValueError, KeyError, NotImplementedError, struct.error, IndexError) as error:
            raise ValueError(
                f"{file}: transformers cannot read this GGUF file ({' '.join(str(error).split())[:300]}); a whole file "
                "of an architecture that it reads is needed, such as Llama, Qwen2 or Mistral: download it again, or "
                "give the model as a folder of safetensors"
            ) from error
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for weights in partial.glob("*.safetensors"):
            give_umask_mode(weights)
        partial.replace(folder)


def refuse_other_file(file: Path) -> None:
    with file.open("rb") as opened:
        start = opened.read(len(MAGIC))
    if start != MAGIC:
        raise ValueError(f"{file}: begins with {start!r}, {MAGIC!r} is needed: this is no GGUF file; give another one")


def refuse_old_transformers(file: Path) -> None:
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        raise ValueError(
            f"{file}: transformers {transformers.__version__} takes the start token of a GGUF file for its end token, "
            "5.18 or newer is needed: run pip install -e '.[gguf]', or give the model as a folder of safetensors"
        )


if __name__ == "__main__":
    main()
