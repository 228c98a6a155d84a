"""A GGUF file as a target: its weights are unpacked once into safetensors, which every command then reads.

They are bfloat16 numbers, to which those of the file are rounded. Weights that the file holds in 8 or 4 bits are kept
beside them as they are (`EIGHT_BITS`), for targets in float32, whose layers read them in that form on a CPU.

`locate_target` runs this module in a process of its own, so that the memory for unpacking is free again afterwards.
"""

import argparse
import struct
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.filesize import decimal
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headstart.common.errors import errors_as_messages
from headstart.common.files import removed_on_failure
from headstart.heads.files import give_umask_mode
from headstart.heads.frozen import open_safetensors
from headstart.inference.core.cache_memory import free_memory
from headstart.inference.passes.products import EightBits
from headstart.inference.targets.loading import no_bars_of_transformers
from headstart.recipes.command_line import command_name

MAGIC = b"GGUF"
OLDEST = (5, 18)  # the transformers that reads GGUF files as they are meant
EIGHT_BITS = Path("eight_bits") / "model.safetensors"  # in an unpacked folder
FACTORS = ".factors"


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
            dtype = torch.float32 if keeps_few_bits(file) else torch.bfloat16
            model: Any = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=dtype, quantization_config=dense
            )
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        except (ValueError, KeyError, NotImplementedError, struct.error, IndexError) as error:
            raise ValueError(
                f"{file}: transformers cannot read this GGUF file ({' '.join(str(error).split())[:300]}); a whole file "
                "of an architecture that it reads is needed, such as Llama, Qwen2 or Mistral: download it again, or "
                "give the model as a folder of safetensors"
            ) from error
        if found := eight_bits_of(model):
            (partial / EIGHT_BITS).parent.mkdir(exist_ok=True)
            save_file(found, partial / EIGHT_BITS)
        model.to(torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for weights in partial.rglob("*.safetensors"):
            give_umask_mode(weights)
        partial.replace(folder)


def keeps_few_bits(file: Path) -> bool:
    """Whether a GGUF file holds weights in blocks of 8 or 4 bits, and this machine has memory for them in float32.

    Without the memory that is said, as the only output.
    """
    from gguf import GGMLQuantizationType, GGUFReader

    tensors = GGUFReader(file).tensors
    kinds = {GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0}
    if not any(tensor.tensor_type in kinds for tensor in tensors):
        return False
    needed = sum(int(tensor.n_elements) for tensor in tensors) * (4 + 1 + 2)  # and in 8 bits, and in bfloat16
    if needed > (free := free_memory(torch.device("cpu"))):
        print(
            f"{file}: its weights are rounded to bfloat16; to keep them as they are takes {decimal(needed)} of memory "
            f"once, and {decimal(free)} is free"
        )
    return needed <= free


def eight_bits_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights in float32 that have an exact form in 8 bits, by name, and their factors."""
    found: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if weight.dtype == torch.float32 and weight.ndim == 2 and (exact := EightBits.of(weight.detach())) is not None:
            found |= {name: exact.numbers, name + FACTORS: exact.factors}
    return found


@torch.no_grad()
def with_eight_bits(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model of a folder; if that is an unpacked GGUF file, its float32 weights get the numbers of the file."""
    if not (folder / EIGHT_BITS).is_file():
        return model
    with open_safetensors(folder / EIGHT_BITS) as file:
        for name, weight in model.named_parameters():
            if weight.dtype == torch.float32 and weight.device.type != "meta" and name in file.keys():  # noqa: SIM118
                exact = EightBits(file.get_tensor(name), file.get_tensor(name + FACTORS))
                weight.copy_(exact.weight())
    return model


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
