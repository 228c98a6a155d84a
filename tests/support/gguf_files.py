"""GGUF files of tiny models, as llama.cpp's converter writes them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy
from numpy.typing import NDArray
from tiny_run import build_tokenizer
from torch import Tensor

SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where a block's scales lie
NORMS_PLUS_ONE = ("gemma2", "gemma3", "nemotron")


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """llama.cpp rotates neighbouring pairs of a head, transformers its two halves."""
    return weight.view(num_heads, 2, len(weight) // num_heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def quantised(weight: NDArray[numpy.float32], kind: gguf.GGMLQuantizationType) -> NDArray[Any]:
    """A matrix in a number format; where gguf only reads that, random blocks of it."""
    if kind.name not in SCALES:
        return gguf.quants.quantize(weight, kind)
    size, bytes_of = gguf.GGML_QUANT_SIZES[kind]
    blocks = numpy.random.default_rng(weight.size).integers(0, 256, (weight.size // size, bytes_of), dtype=numpy.uint8)
    for place in SCALES[kind.name]:  # float16 numbers
        scales = numpy.linspace(1e-3, 4e-3, len(blocks), dtype=numpy.float16)
        blocks[:, place : place + 2] = scales.view(numpy.uint8).reshape(-1, 2)
    return blocks.reshape(len(weight), -1)


def keys_of(config: Any, architecture: str) -> dict[str, Any]:
    """What a converter writes about every decoder."""
    norm = "layer_norm" if architecture in ("starcoder2", "stablelm", "nemotron") else "layer_norm_rms"
    epsilons = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads or 1,
        f"attention.{norm}_epsilon": next(getattr(config, name) for name in epsilons if hasattr(config, name)),
    }


def write_gguf(
    model: Any, path: Path, architecture: str = "llama", kind: str = "F32", keys: Any = (), tensors: Any = ()
) -> Path:
    """Write a model and the tests' tokenizer as a GGUF file; `kind` is the number format of its matrices, or Q4_K_M.

    `keys` maps names to values; they follow the architecture if they begin with a dot, and with None for a value the
    key is left out. `tensors` maps the names of more tensors to their numbers.
    """
    config, tokenizer = model.config, build_tokenizer()
    writer = gguf.GGUFWriter(path, architecture)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    written = {
        **{f".{name}": value for name, value in keys_of(config, architecture).items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [1] * len(vocabulary),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": str(tokenizer.chat_template),
        **dict(keys),
    }
    for name, value in written.items():
        if value is not None:
            of = gguf.GGUFValueType.get_type(value)
            sub = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(f"{architecture}{name}" if name[0] == "." else name, value, of, sub)
    known = {name: which for which, name in gguf.MODEL_ARCH_NAMES.items()}.get(architecture, gguf.MODEL_ARCH.LLAMA)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or 1}
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    for name, tensor in state.items():
        its = names.get_name(name, try_suffixes=(".weight", ".bias")) or ""
        parts = {its: tensor}
        if name.endswith("mlp.experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            block = f"blk.{name.split('.')[2]}"
            parts = {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
        elif name.endswith("mlp.experts.down_proj"):
            parts = {f"blk.{name.split('.')[2]}.ffn_down_exps.weight": tensor}
        layer = its.split(".")[-2] if "." in its else ""
        if architecture == "llama" and layer in heads:
            parts = {its: interleaved(tensor, heads[layer])}
        if architecture in NORMS_PLUS_ONE and its.endswith("norm.weight"):
            parts = {its: tensor + 1}
        for written_name, part in parts.items():
            numbers = part.float().numpy()
            if part.ndim == 2:
                is_fine = written_name.split(".")[-2] in ("attn_v", "token_embd", "output")
                stored = gguf.GGMLQuantizationType[("Q6_K" if is_fine else "Q4_K") if kind == "Q4_K_M" else kind]
                writer.add_tensor(written_name, quantised(numbers, stored), raw_dtype=stored)
            else:
                writer.add_tensor(written_name, numbers)
    for name, numbers in dict(tensors).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
