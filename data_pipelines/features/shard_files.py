"""The file of one shard: samples of variable length in safetensors, their states in a float format or in 8 bits.

In 8 bits each tap of each token has its own scale, because their sizes differ by orders of magnitude.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from headstart.common.files import naming, remove, write_text
from headstart.common.remote import PARTIAL, cache_limit, fetch, is_there, publish, read_range, url_of
from headstart.data_pipelines.stages.stage import CHECKSUM, Json, checksum

SCALE = torch.bfloat16  # states are divided by the rounded scale, so its rounding adds no error
LARGEST_VALUE = {"int8": 127.0, "float8": torch.finfo(torch.float8_e4m3fn).max}
HEADER_SIZE = 8  # bytes at the start of a safetensors file that hold its header's size, a multiple of as many
STORED_DTYPE = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


def compute_dtype(storage: str) -> torch.dtype:
    """The dtype that `encode` stores, or that it expects for the 8-bit formats."""
    return torch.float32 if storage in LARGEST_VALUE else getattr(torch, storage)


def bytes_per_token(hidden_size: int, num_taps: int, storage: str) -> int:
    """The bytes that one stored token takes: taps, last hidden state, id and loss mask."""
    state = hidden_size * STORED_DTYPE.get(storage, compute_dtype(storage)).itemsize
    scale = SCALE.itemsize if storage in LARGEST_VALUE else 0
    return (num_taps + 1) * (state + scale) + torch.int32.itemsize + torch.uint8.itemsize


def encode(name: str, states: Float[Tensor, "tokens hidden"], storage: str) -> dict[str, Tensor]:
    """The tensors to store for these states: `name`, and `name.scale` in an 8-bit format."""
    if storage not in LARGEST_VALUE:
        return {name: states.to(compute_dtype(storage))}
    largest = LARGEST_VALUE[storage]
    peaks = states.float().abs().amax(dim=-1, keepdim=True)
    scale = (peaks / largest).clamp(min=torch.finfo(SCALE).tiny).to(SCALE)  # [tokens, 1]
    scaled = (states.float() / scale.float()).clamp(-largest, largest)
    return {name: (scaled.round() if storage == "int8" else scaled).to(STORED_DTYPE[storage]), f"{name}.scale": scale}


def decode(opened: Any, name: str, start: int, end: int) -> Float[Tensor, "tokens hidden"]:
    """Read tokens `start` to `end` of encoded states from an opened safetensors file."""
    states = opened.get_slice(name)[start:end]
    if states.dtype not in STORED_DTYPE.values():
        return states
    return states.float() * opened.get_slice(f"{name}.scale")[start:end].float()


class ShardFile:
    """The file of a shard whose samples come in any order: each is written at its place, so memory holds no shard.

    Each tap is a separate tensor, so a head can read its own taps only. The file gets its name when it is whole.
    """

    def __init__(self, path: Path, lengths: Sequence[int], made_from: str) -> None:
        """`lengths` is the number of tokens of each sample; `made_from` identifies the shard's inputs."""
        self.path, self.partial, self.made_from = path, path.with_name(path.name + PARTIAL), made_from
        self.offsets = torch.tensor([0, *lengths]).cumsum(0)
        self._starts: dict[str, int] = {}  # of each tensor in the file, once its header is written

    def put(self, numbers: Sequence[int], tensors: dict[str, Tensor]) -> None:
        """Write the per-token tensors of these samples, concatenated in the order of `numbers`: [tokens, ...] each."""
        if not self._starts:
            self._begin(tensors)
        spans = [self.offsets[number : number + 2].tolist() for number in numbers]
        sizes = [end - start for start, end in spans]
        with naming(self.path), self.partial.open("r+b") as file:
            for name, tensor in tensors.items():
                for (start, _), rows in zip(spans, token_bytes(tensor).split(sizes), strict=True):
                    file.seek(self._starts[name] + start * rows.shape[1])
                    file.write(rows.numpy().data)

    def finish(self) -> None:
        """Give the file its name and write its manifest entry next to it; a full cache keeps no copy."""
        with naming(self.path):
            publish(self.partial, self.path)
        write_text(note_path(self.path), json.dumps(shard_entry(self.path)))
        if url_of(self.path) is not None:
            cached = sum(path.stat().st_size for path in self.path.parent.glob(f"*{self.path.suffix}"))
            if cached > cache_limit():
                self.path.unlink()

    def _begin(self, tensors: dict[str, Tensor]) -> None:
        """Write the header and the offsets of all samples; `tensors` are those of some of them."""
        tokens = int(self.offsets[-1])
        shapes = {name: each.new_empty(tokens, *each.shape[1:], device="meta") for name, each in tensors.items()}
        header, self._starts = file_header({**shapes, "offsets": self.offsets}, {"made_from": self.made_from})
        remove(self.partial)  # left by a killed run
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        with naming(self.path), self.partial.open("wb") as file:
            file.write(header)
            file.seek(self._starts["offsets"])
            file.write(token_bytes(self.offsets).numpy().data)


def file_header(tensors: dict[str, Tensor], metadata: dict[str, str]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file of these tensors, of any device, and where each of them starts in the file.

    The library writes it for the same tensors without rows, in its own order, which aligns them.
    """
    empty = save({name: torch.empty(0, *each.shape[1:], dtype=each.dtype) for name, each in tensors.items()}, metadata)
    entries = json.loads(empty[HEADER_SIZE:])
    starts, end = {}, 0
    for name in (name for name in entries if name in tensors):
        starts[name], end = end, end + tensors[name].nbytes
        entries[name] |= {"shape": [*tensors[name].shape], "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_SIZE)
    header = len(text).to_bytes(HEADER_SIZE, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def token_bytes(tensor: Tensor) -> UInt8[Tensor, "tokens size"]:
    """The bytes of each token."""
    return tensor.contiguous().view(len(tensor), -1).view(torch.uint8)


def stored_tokens(tokens: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """The stored form of tokens and loss mask, both [tokens]."""
    return {"tokens": tokens.to(torch.int32), "loss_mask": loss_mask.to(torch.uint8)}


def stored_states(taps: tuple[int, ...], tapped: Tensor, last_hidden: Tensor, storage: str) -> dict[str, Tensor]:
    """The stored form of hidden states on any device, given as [tokens, taps * hidden] and [tokens, hidden]."""
    stored = encode("last_hidden", last_hidden, storage)
    states = tapped.unflatten(-1, (len(taps), last_hidden.shape[-1]))
    for number, tap in enumerate(taps):
        stored |= encode(f"tap.{tap}", states[:, number], storage)
    return stored


def non_finite(tensors: dict[str, Tensor]) -> list[str]:
    """The names of stored states that are not finite; those in 8 bits have a scale that is not."""
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.itemsize > 1}
    return [name for name, tensor in floats.items() if not tensor.isfinite().all()]


def shard_is_whole(path: Path, wanted: str) -> bool:
    """Whether an earlier run wrote this shard; raises ValueError if it is unreadable or not made from `wanted`."""
    if not is_there(path):
        return False
    if made_from(path) != wanted:
        other = f"{path} is a shard of another run (made from {made_from(path) or 'unknown inputs'!r}, not {wanted!r})"
        raise ValueError(f"{other}: remove it ({shlex.join(['rm', str(path)])}) or choose another run_dir")
    return True


def made_from(path: Path) -> str | None:
    """The identity of a shard's inputs, as its writer recorded it; raises ValueError if the shard is unreadable."""
    if not is_remote(path):
        metadata: dict[str, str] = open_shard(path).metadata() or {}
    else:
        metadata = stored_header(path)[0].get("__metadata__", {})
    return metadata.get("made_from")


def is_remote(path: Path) -> bool:
    """Whether a shard must be read from its store, as it is not in the cache."""
    return url_of(path) is not None and not path.is_file()


def stored_header(path: Path) -> tuple[Json, int]:
    """The header of a shard in a store, and where its tensors start."""
    end = HEADER_SIZE + int.from_bytes(read_range(path, 0, HEADER_SIZE), "little")
    header: Json = json.loads(read_range(path, HEADER_SIZE, end))
    return header, end


def read_tensors(path: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """These tensors of a shard; of one that is only in a store no others are read."""
    if not is_remote(path):
        opened = open_shard(path)
        return {name: opened.get_tensor(name) for name in names}
    header, start = stored_header(path)
    tensors: dict[str, Tensor] = {}
    for name in names:
        first, last = header[name]["data_offsets"]
        alone = json.dumps({name: {**header[name], "data_offsets": [0, last - first]}}).encode()
        data = read_range(path, start + first, start + last)
        tensors |= load(len(alone).to_bytes(HEADER_SIZE, "little") + alone + data)
    return tensors


def note_path(shard: Path) -> Path:
    """The file next to a shard that holds its manifest entry until the manifest is written."""
    return shard.with_name(shard.name + ".note")


def shard_entry(path: Path) -> Json:
    """The manifest entry of a shard."""
    fetch(path)
    offsets = open_shard(path).get_tensor("offsets")
    return {
        "file": path.name,
        "samples": len(offsets) - 1,
        "tokens": int(offsets[-1]),
        "bytes": path.stat().st_size,
        CHECKSUM: checksum(path),
    }


def open_shard(path: Path) -> Any:
    """An open shard of tensors; raises ValueError if it is unreadable."""
    try:
        return safe_open(path, "pt").__enter__()  # stays open and mapped while its store uses it
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as a shard ({error}); a whole safetensors file is needed: remove it "
            f"({shlex.join(['rm', str(path)])}) and run the same command again"
        ) from error
