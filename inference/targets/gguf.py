"""A GGUF file as a target: its weights are unpacked once into safetensors, which every command then reads.

They are rounded to bfloat16. Weights in 8 to 4 bits are also stored exactly (`EIGHT_BITS`), for targets in float32,
whose layers read them in that form on a CPU.

`locate_target` runs this module in a process of its own, so that the memory for unpacking is free again afterwards.
"""

import os
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from rich.filesize import decimal
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from headstart.common.errors import errors_as_messages
from headstart.common.files import removed_on_failure
from headstart.heads.files import give_umask_mode
from headstart.heads.frozen import open_safetensors
from headstart.inference.core.cache_memory import free_memory
from headstart.inference.kernels import SCALE_INPUTS, EightBits, remember_eight_bits
from headstart.inference.targets.gguf_settings import (
    LostSetting,
    refuse_lost_tensors,
    restore,
    restore_tokenizer,
    sampling_of,
)
from headstart.inference.targets.loading import no_bars_of_transformers

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

MAGIC = b"GGUF"
HEADER_BYTES = 24  # the magic, the version, and the numbers of tensors and keys
TEXT, LIST = 8, 9  # types of a key's value; of numbers, as struct names them:
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TRANSFORMERS_MIN = (5, 18)  # earlier versions take the start token for the end token
EIGHT_BITS = Path("eight_bits") / "model.safetensors"  # in an unpacked folder
EIGHT_BITS_SHARE = 0.45  # of the bytes in bfloat16; 0.53 to 0.63 if all weights have 8 bits
FACTORS, OFFSETS = ".factors", ".offsets"  # after a weight's name


class BlockFormat(NamedTuple):
    """The layout of a block of a GGUF file: the spans of bytes with numbers, and their bytes for a 0 and for a 1."""

    numbers: tuple[tuple[int, int, int, int], ...]  # first, end, byte of zeros, byte of ones
    offset: tuple[int, int] = (0, 0)  # bytes of the unit of offsets, if the format has offsets


# The formats of llama.cpp (ggml-common.h) in which a weight is number * factor + offset.
FORMATS = {
    "Q8_0": BlockFormat(((2, 34, 0x00, 0x01),)),
    "Q4_0": BlockFormat(((2, 18, 0x88, 0x99),)),
    "Q4_1": BlockFormat(((4, 20, 0x00, 0x11),), (2, 4)),
    "Q5_0": BlockFormat(((2, 6, 0xFF, 0xFF), (6, 22, 0x00, 0x11))),
    "Q5_1": BlockFormat(((4, 8, 0x00, 0x00), (8, 24, 0x00, 0x11)), (2, 4)),
    "Q4_K": BlockFormat(((16, 144, 0x00, 0x11),), (2, 4)),
    "Q5_K": BlockFormat(((16, 48, 0x00, 0x00), (48, 176, 0x00, 0x11)), (2, 4)),
    "Q6_K": BlockFormat(((0, 128, 0x00, 0x11), (128, 192, 0xAA, 0xAA))),
}


def unpack(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as config.json, tokenizer and bfloat16 safetensors; the folder appears complete.

    Raises ValueError for a file that is not GGUF, is damaged, has an architecture that transformers does not read, or
    says something that the model would lack. Prints what it does.
    """
    from gguf import GGUFReader

    refuse_other_file(file)
    refuse_old_transformers(file)
    partial = folder.with_name(folder.name + ".partial")
    with removed_on_failure(partial), no_bars_of_transformers(), one_table_of_names():
        partial.mkdir(parents=True, exist_ok=True)
        short = partial / "short.gguf"
        with named_errors(file):
            metadata = write_short(file, short)
            architecture = metadata["general.architecture"]
            config = AutoConfig.from_pretrained(partial, gguf_file=short.name)
            reader = GGUFReader(short, "r+")
            config = restore(config, metadata, reader.tensors, architecture)
            few = keeps_few_bits(file, reader.tensors)
            print("unpacking its weights", flush=True)
            model, info = load(short, config, torch.float32 if few else torch.bfloat16)
            refuse_lost_tensors(model, config, reader.tensors, sorted(info["missing_keys"]), architecture)
            scales = scales_of(reader, config, short) if few else {}
            print("unpacking its tokenizer", flush=True)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
            restore_tokenizer(tokenizer, metadata)
        short.unlink()
        if exact := eight_bits_of_all(model, scales):
            (partial / EIGHT_BITS).parent.mkdir(exist_ok=True)
            save_file(exact, partial / EIGHT_BITS)
        model.generation_config.update(**sampling_of(metadata))
        model.to(torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for weights in partial.rglob("*.safetensors"):
            give_umask_mode(weights)
        partial.replace(folder)


def model_type(file: Path) -> str:
    """The model type of a GGUF file, whose weights are not read; raises ValueError for a file as `unpack` does."""
    refuse_other_file(file)
    with TemporaryDirectory() as folder, named_errors(file):
        write_short(file, short := Path(folder) / "short.gguf", weights=False)
        os.truncate(short, file.stat().st_size)  # zeros that take no space on a disk
        return str(AutoConfig.from_pretrained(folder, gguf_file=short.name).model_type)


@contextmanager
def named_errors(file: Path) -> Iterator[None]:
    """Within this context an error in a GGUF file becomes a ValueError that names the file and what to do."""
    try:
        yield
    except LostSetting as error:
        advice = "convert the model again with a newer llama.cpp, or give it as a folder of safetensors"
        raise ValueError(f"{file}: {error}; {advice}") from error
    except (ValueError, KeyError, NotImplementedError, struct.error, IndexError, RuntimeError) as error:
        raise ValueError(
            f"{file}: transformers cannot read this GGUF file ({' '.join(str(error).split())[:300]}); a complete file "
            "is needed, of an architecture that it reads, such as Llama, Qwen2 or Mistral: download it again, or give "
            "the model as a folder of safetensors"
        ) from error


@contextmanager
def one_table_of_names() -> Iterator[None]:
    """Within this context gguf makes its table of names once; transformers asks for it for every module."""
    import gguf

    make = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = cache(make)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = make


def write_short(file: Path, copy: Path, weights: bool = True) -> dict[str, Any]:
    """Write a copy whose lists of the tokenizer have one entry, and return all metadata but those lists.

    Readers in Python take minutes for the lists of a large vocabulary. Without `weights` it ends before them.
    """
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as content, copy.open("wb") as written:
        _, tensors, keys = struct.unpack_from("<IQQ", content, len(MAGIC))
        metadata, end = dict[str, Any](), HEADER_BYTES
        written.write(content[:end])
        for _ in range(keys):
            start = end
            key, end = text_at(content, start)
            (kind,) = struct.unpack_from("<I", content, end)
            end += 4
            if kind != LIST:
                metadata[key], end = value_at(content, end, kind)
                written.write(content[start:end])
                continue
            kind, count = struct.unpack_from("<IQ", content, end)
            is_cut = key.startswith("tokenizer.") and count > 0
            written.write(content[start : end + 4] + struct.pack("<Q", 1 if is_cut else count))
            first = end = end + 12
            values, only = [], None
            for _ in range(count):
                value, end = value_at(content, end, kind)
                only = only or end
                if not is_cut:
                    values.append(value)
            written.write(content[first : only if is_cut else end])
            if not is_cut:
                metadata[key] = values
        start = end
        for _ in range(tensors):
            (dimensions,) = struct.unpack_from("<I", content, end := text_at(content, end)[1])
            end += 4 + 8 * dimensions + 12  # sizes, number format, place
        written.write(content[start:end])
        alignment = metadata.get("general.alignment", 32)
        written.write(bytes(-written.tell() % alignment))
        opened.seek(end + -end % alignment)
        if weights:
            shutil.copyfileobj(opened, written)
    return metadata


def text_at(content: mmap, start: int) -> tuple[str, int]:
    """The text at a place of a GGUF file, and the place after it."""
    (length,) = struct.unpack_from("<Q", content, start)
    return content[start + 8 : start + 8 + length].decode(errors="replace"), start + 8 + length


def value_at(content: mmap, start: int, kind: int) -> tuple[Any, int]:
    """The text or number at a place of a GGUF file, and the place after it."""
    if kind == TEXT:
        return text_at(content, start)
    (value,) = struct.unpack_from("<" + NUMBERS[kind], content, start)
    return value, start + struct.calcsize("<" + NUMBERS[kind])


def load(file: Path, config: PreTrainedConfig, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The model of a GGUF file, and which tensors it misses."""
    dense = transformers.GgufConfig(dequantize=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        config=config,
        dtype=dtype,
        quantization_config=dense,
        output_loading_info=True,
    )
    model, info = loaded
    return model, info


def keeps_few_bits(file: Path, tensors: Sequence["ReaderTensor"]) -> bool:
    """Whether a GGUF file has weights in blocks of 8 to 4 bits, and this machine has memory for them in float32.

    Prints a line if memory is missing.
    """
    if not any(tensor.tensor_type.name in FORMATS for tensor in tensors):
        return False
    needed = sum(int(tensor.n_elements) for tensor in tensors) * (4 + 2 + 2)  # with scales, and in bfloat16
    if needed > (free := free_memory(torch.device("cpu"))):
        print(
            f"{file}: its weights are rounded to bfloat16; to keep them exact takes {decimal(needed)} of memory once, "
            f"and {decimal(free)} is free"
        )
    return needed <= free


def scales_of(reader: "GGUFReader", config: PreTrainedConfig, file: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors and offsets of each weight by its name in the model, one for `SCALE_INPUTS` inputs. [out, in / 16]

    With 0 for all numbers a file yields its offsets; with 1, and no offsets, its factors. transformers reads such
    versions of the file, which this overwrites, so that each scale gets into the row of its weight.
    """
    scales = []
    for ones in (False, True):
        print(f"unpacking the scales of its weights: {'factors' if ones else 'offsets'}", flush=True)
        overwrite_numbers(reader, ones)
        weights = load(file, config, torch.float32)[0].named_parameters()
        scales.append({name: each.detach()[:, ::SCALE_INPUTS].clone() for name, each in weights if has_blocks(each)})
    offsets, factors = scales
    return {name: (factors[name], offsets[name]) for name in factors}


def overwrite_numbers(reader: "GGUFReader", ones: bool) -> None:
    """Write 1, without offsets, or 0 for all numbers of a file that is open for writing."""
    from gguf import GGML_QUANT_SIZES

    for tensor in reader.tensors:
        if (form := FORMATS.get(tensor.tensor_type.name)) is not None:
            blocks = tensor.data.reshape(-1, GGML_QUANT_SIZES[tensor.tensor_type][1])
            for first, end, zero, one in form.numbers:
                blocks[:, first:end] = one if ones else zero
            if ones:
                blocks[:, slice(*form.offset)] = 0
    reader.data.flush()


def has_blocks(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.ndim == 2 and weight.shape[1] % SCALE_INPUTS == 0


def eight_bits_of_all(model: nn.Module, scales: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The weights in float32 that have an exact form in 8 bits, by name, with their factors and offsets."""
    tensors: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if name in scales and (exact := EightBits.of(weight.detach(), *scales[name])) is not None:
            tensors |= {name: exact.numbers, name + FACTORS: exact.factors}
            tensors |= {} if exact.offsets is None else {name + OFFSETS: exact.offsets}
    return tensors


@torch.no_grad()
def with_eight_bits(model: PreTrainedModel, folder: Path, remember: bool) -> PreTrainedModel:
    """The model of a folder; if the folder is an unpacked GGUF file, its float32 weights get the exact numbers.

    With `remember`, `pack_weights` finds the form that they came from.
    """
    if not (folder / EIGHT_BITS).is_file():
        return model
    with open_safetensors(folder / EIGHT_BITS) as file:
        names = set(file.keys())
        for name, weight in model.named_parameters():
            if weight.dtype == torch.float32 and weight.device.type != "meta" and name in names:
                offsets = file.get_tensor(name + OFFSETS) if name + OFFSETS in names else None
                exact = EightBits(file.get_tensor(name), file.get_tensor(name + FACTORS), offsets)
                weight.copy_(exact.weight())
                remember_eight_bits(weight, exact if remember else None)
    return model


def is_mostly_in_eight_bits(folder: Path) -> bool:
    """Whether a model's folder has most of its weights in 8 bits; experts, for example, are in bfloat16."""
    exact, rounded = folder / EIGHT_BITS, sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return exact.is_file() and exact.stat().st_size > EIGHT_BITS_SHARE * rounded


def refuse_other_file(file: Path) -> None:
    with file.open("rb") as opened:
        start = opened.read(len(MAGIC))
    if start != MAGIC:
        raise ValueError(f"{file}: begins with {start!r}, {MAGIC!r} is needed: it is not a GGUF file; give another one")


def refuse_old_transformers(file: Path) -> None:
    if tuple(map(int, transformers.__version__.split(".")[:2])) < TRANSFORMERS_MIN:
        raise ValueError(
            f"{file}: transformers {transformers.__version__} takes the start token of a GGUF file for its end token, "
            "5.18 or newer is needed: run pip install -e '.[gguf]', or give the model as a folder of safetensors"
        )


if __name__ == "__main__":
    with errors_as_messages():
        unpack(*map(Path, sys.argv[1:]))
