"""The two naming schemes for the tensors of Medusa heads: vLLM's, which we use too, and the Medusa authors'.

vLLM       blocks.H.layers.L.weight   blocks.H.layers.L.bias   lm_heads.H.weight        token_map
reference  H.L.linear.weight          H.L.linear.bias          H.N.weight, N layers
"""

import re

from torch import Tensor

BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")
PREFIX = re.compile(r"(?:medusa_heads?\.)?(?=\d+\.\d+\.)")
REFERENCE_BLOCK = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
REFERENCE_LM_HEAD = re.compile(r"(?:medusa_heads?\.)?(\d+)\.\d+\.weight")


def from_any_layout(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under vLLM's names; a name that belongs to neither layout stays as it is."""
    return {vllm_name(name): tensor for name, tensor in tensors.items()}


def vllm_name(name: str) -> str:
    if block := REFERENCE_BLOCK.fullmatch(name):
        return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
    if lm_head := REFERENCE_LM_HEAD.fullmatch(name):
        return f"lm_heads.{lm_head[1]}.weight"
    return name


def to_reference_layout(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the Medusa authors' names; raises ValueError for heads that their layout cannot hold."""
    first = next(tensor for name, tensor in tensors.items() if name.startswith("blocks."))
    if first.shape[0] != first.shape[-1]:
        raise ValueError(
            "blocks.0.layers.0.weight reads more than one hidden state; the Medusa authors' layout has no such heads"
        )
    num_layers = 1 + max(int(found[2]) for found in map(BLOCK.fullmatch, tensors) if found)
    return {reference_name(name, num_layers): tensor for name, tensor in tensors.items()}


def reference_name(name: str, num_layers: int) -> str:
    if block := BLOCK.fullmatch(name):
        return f"{block[1]}.{block[2]}.linear.{block[3]}"
    if lm_head := LM_HEAD.fullmatch(name):
        return f"{lm_head[1]}.{num_layers}.weight"
    raise ValueError(
        f"{name}: the Medusa authors' layout has no such tensor; it supports no draft vocabulary, as vLLM's does"
    )
