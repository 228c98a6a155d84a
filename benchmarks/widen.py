"""Embed a small Llama and its EAGLE-3 head in a larger model's shape: the same function, at the larger one's cost.

    python benchmarks/widen.py models/SmolLM2-135M-Instruct models/SmolLM2-1.2B --size 1.2B --head assets/smollm2_head

The small model's states are the first columns of the large one's, and the other columns stay zero. Whatever cannot
reach the output (more heads, neurons and layers) is random, so no kernel and no power limit meets zeros. In float32 the
logits are the small model's up to rounding: its texts and acceptance lengths come with the time, memory and disk space
of the large one. It is a target for benchmarks, never a model to use. The head goes to LARGE/head.

- RMSNorm takes the mean square over all columns, so its weight shrinks by sqrt(small / large) and eps by small / large.
- Rotary embeddings turn the pair (i, i + head_dim / 2) by base ** (-2 i / head_dim), so pair i of a small head becomes
  pair i * (large head_dim / small head_dim). Scores are scaled by head_dim ** -0.5, which q makes up for.
- The query heads of a key head stay with it; the further ones have no way out, as their columns of o_proj are zero.
"""

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from headstart.heads.frozen import SafetensorsFolder
from headstart.heads.kinds.eagle3 import TAPS

COUNTS = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
NAMES = ("hidden_size", "intermediate_size", "head_dim", *COUNTS)  # in config.json
SIZES = {  # the last has the layers of Llama-3.1-8B
    "1.2B": dict(zip(NAMES, (1536, 6144, 64, 24, 8, 30), strict=True)),
    "8B": dict(zip(NAMES, (4096, 14336, 128, 32, 8, 32), strict=True)),
}


@dataclass(frozen=True)
class Widening:
    """Embed the weights of a Llama layer in the sizes of a larger layer."""

    small: dict[str, Any]  # config.json
    large: dict[str, Any]
    generator: torch.Generator

    def __post_init__(self) -> None:
        small, large = ([config[name] for name in NAMES] for config in (self.small, self.large))
        fits = all(mine <= its for mine, its in zip(small[:-1], large[:-1], strict=True))
        if not fits or large[2] % small[2] or large[3] // large[4] < small[3] // small[4]:
            allowed = "none may be smaller, head_dim must be a multiple, and a key head needs as many query heads"
            raise ValueError(f"sizes {large} given for a model of {small} ({', '.join(NAMES)}): {allowed}")

    def noise(self, *shape: int) -> Tensor:
        return torch.empty(*shape).normal_(0, 0.02, generator=self.generator)

    def of(self, name: str, weight: Tensor) -> Tensor:
        """The wide form of a weight, by the last part of its name."""
        small, large, part = self.small, self.large, name.removesuffix(".weight").rpartition(".")[2]
        new = large["hidden_size"] - small["hidden_size"]
        if weight.ndim == 1:
            return torch.cat([weight * math.sqrt(small["hidden_size"] / large["hidden_size"]), torch.ones(new)])
        if part in ("embed_tokens", "lm_head"):
            return pad(weight, (0, new))  # a head in training starts from it, so it gets no noise
        if part == "down_proj":
            return pad(weight, (0, large["intermediate_size"] - small["intermediate_size"], 0, new))
        if part == "o_proj":
            columns = torch.zeros(large["hidden_size"], large[COUNTS[0]], large["head_dim"])
            parts = weight.unflatten(1, (-1, small["head_dim"]))
            columns[: len(weight), self.query_heads(), : small["head_dim"]] = parts
            return columns.flatten(1)
        # The rest reads one or several states next to each other.
        states = weight.split(small["hidden_size"], 1)
        wide = torch.cat([torch.cat([each, self.noise(len(each), new)], 1) for each in states], 1)
        if part == "fc":
            return pad(wide, (0, 0, 0, new))
        if part in ("gate_proj", "up_proj"):
            return torch.cat([wide, self.noise(large["intermediate_size"] - len(wide), wide.shape[1])])
        if part in ("q_proj", "k_proj", "v_proj"):
            return self.to_heads(part, wide)
        raise ValueError(f"{name}: a tensor of a Llama or of its EAGLE-3 head is allowed; widen another model")

    def to_heads(self, part: str, wide: Tensor) -> Tensor:
        """The rows of queries, keys or values at their large heads' places."""
        small, large = (config["head_dim"] for config in (self.small, self.large))
        is_query, where = part == "q_proj", torch.arange(small)
        if part != "v_proj":
            where = (torch.tensor([[0], [large // 2]]) + torch.arange(small // 2) * (large // small)).flatten()
        heads, scale = torch.arange(self.small[COUNTS[1]]), 1.0
        if is_query:
            heads, scale = self.query_heads(), math.sqrt(large / small)
        rows = self.noise(self.large[COUNTS[not is_query]], large, wide.shape[1])
        rows[heads] = 0
        rows[heads[:, None], where] = scale * wide.view(len(heads), small, -1)
        return rows.flatten(0, 1)

    def query_heads(self) -> Tensor:
        """The large query head of each small one."""
        (few, keys), (many, more) = ([config[name] for name in COUNTS[:2]] for config in (self.small, self.large))
        return (torch.arange(keys)[:, None] * (many // more) + torch.arange(few // keys)).flatten()


def spread(small: dict[str, Any], large: dict[str, Any]) -> list[int]:
    """The large model's layer for each of the small one's, evenly."""
    few, many = small["num_hidden_layers"], large["num_hidden_layers"]
    return [round(number * (many - 1) / max(few - 1, 1)) for number in range(few)]


def tensors(folder: Path, widening: Widening) -> Iterator[tuple[str, Tensor]]:
    """The target's weights, wide, a layer at a time."""
    stored = SafetensorsFolder(folder)
    ends = {name: name for name in stored.files if ".layers." not in name}
    ends.setdefault("lm_head.weight", "model.embed_tokens.weight")
    yield from ((name, widening.of(name, stored.read(source).float())) for name, source in ends.items())
    places = {place: number for number, place in enumerate(spread(widening.small, widening.large))}
    for place in range(widening.large["num_hidden_layers"]):
        prefix = f"model.layers.{places.get(place, 0)}."
        for name in (each.removeprefix(prefix) for each in stored.files if each.startswith(prefix)):
            wide = widening.of(name, stored.read(prefix + name).float())
            if place not in places:  # a further layer, which adds nothing to the states
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                wide = torch.zeros_like(wide) if adds else widening.noise(*wide.shape) + (wide.ndim == 1)
            yield f"model.layers.{place}.{name}", wide


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return {"head_dim": config["hidden_size"] // config["num_attention_heads"], **config}


def wide_config(small: dict[str, Any], sizes: dict[str, int], **changes: Any) -> dict[str, Any]:
    eps = small["rms_norm_eps"] * small["hidden_size"] / sizes["hidden_size"]
    return {**small, **sizes, "rms_norm_eps": eps, "tie_word_embeddings": False, **changes}


def widen(small: Path, large: Path, sizes: dict[str, int], dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the target, with the small one's tokenizer; raises ValueError for sizes or tensors that do not fit."""
    config = read_config(small)
    wide = wide_config(config, sizes, dtype=str(dtype)[6:])
    widening = Widening(config, wide, torch.Generator().manual_seed(0))
    large.mkdir(parents=True, exist_ok=True)
    written = {name: tensor.to(dtype).contiguous() for name, tensor in tensors(small, widening)}
    save_file(written, large / "model.safetensors", metadata={"format": "pt"})
    (large / "config.json").write_text(json.dumps(wide, indent=2))
    for path in small.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model") and not path.name.startswith(("config", "model.")):
            shutil.copy(path, large / path.name)


def widen_head(head: Path, small: Path, large: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the head for the target that `widen` wrote to `large`, in its folder `head`."""
    config, target = read_config(head), read_config(large)
    sizes = {name: target[name] for name in NAMES} | {"num_hidden_layers": 1}
    places, own = [0, *(place + 1 for place in spread(read_config(small), target))], config["headstart"]
    taps = [places[tap] for tap in own["taps"]]
    # Whatever was measured on the small target is left out, except the chances of draft tokens.
    own = {name: own[name] for name in ("kind", "calibration") if name in own}
    own |= {"taps": taps, "target_num_layers": target["num_hidden_layers"]}
    more = {"target_hidden_size": target["hidden_size"], "torch_dtype": str(dtype)[6:]}
    more |= {TAPS: taps, "eagle_config": {TAPS: [tap - 1 for tap in taps]}, "headstart": own}
    wide = wide_config(config, sizes, **more)
    widening, stored = Widening(config, wide, torch.Generator().manual_seed(1)), SafetensorsFolder(head)
    written = {}
    for name in stored.files:
        tensor = stored.read(name)
        written[name] = widening.of(name, tensor.float()).to(dtype) if tensor.is_floating_point() else tensor
    (large / "head").mkdir(exist_ok=True)
    save_file(written, large / "head/model.safetensors", metadata={"format": "pt"})
    (large / "head/config.json").write_text(json.dumps(wide, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small", type=Path)
    parser.add_argument("large", type=Path)
    parser.add_argument("--size", choices=SIZES, default="1.2B")
    parser.add_argument("--head", type=Path)
    options = parser.parse_args()
    widen(options.small, options.large, SIZES[options.size])
    if options.head is not None:
        widen_head(options.head, options.small, options.large)


if __name__ == "__main__":
    main()
