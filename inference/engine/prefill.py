"""Prefill: read prompts into the cache, several in one pass or a long one in pieces."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.inference.core.cache import KVCache
from headstart.inference.core.tree import Block, causal_block
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.side_by_side import Part


class Read(NamedTuple):
    """What the target computed while it read tokens of a prompt."""

    logits: Float[Tensor, "1 vocab"]  # after the last of them
    taps: Float[Tensor, "count tapped"]


def read_prompts(target: TargetModel, prompts: list[list[int]], rows: list[KVCache]) -> list[Read]:
    """Read each prompt into the cache of its own row, all in one pass.

    The prompts lie one after another without padding, and a mask hides them from each other.
    """
    device = target.device
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    owner = torch.repeat_interleave(torch.arange(len(prompts)), lengths)  # [tokens]: the prompt of each
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    visible = (owner[:, None] == owner) & (positions <= positions[:, None])
    tokens = torch.tensor([[token for prompt in prompts for token in prompt]], device=device)
    together = target.new_cache(tokens.shape[1])
    together.set_lengths([0])
    positions = positions.unsqueeze(0).to(device)
    mask = target.masks(together.target, Block(visible.unsqueeze(0).to(device), positions))
    output = target.forward(tokens, positions, mask, together, logits_at=(lengths.cumsum(0) - 1).to(device))
    for row, read in zip(rows, together.target.storage.split(lengths.tolist(), dim=4), strict=True):
        row.target.storage[..., : read.shape[4], :] = read
    taps = output.taps[0].split(lengths.tolist())
    return [Read(*found) for found in zip(output.logits[0].split(1), taps, strict=True)]


def read_piece(target: TargetModel, tokens: list[int], row: KVCache, before: int) -> Read:
    """Read the next tokens of a prompt after those `before` that its row holds."""
    part = piece_part(target, tokens, row, before)
    if before:
        masks = target.masks(part.slots, part.block)
        output = target.forward(part.tokens, part.positions, masks, row, last_only=True)
    else:
        output = target.forward(part.tokens, cache=row, last_only=True)
    return Read(output.logits[0], output.taps[0])


def piece_part(target: TargetModel, tokens: list[int], row: KVCache, before: int) -> Part:
    """What `read_piece` reads, as a part of a pass with other parts."""
    row.set_lengths([before])
    inputs = torch.tensor([tokens], device=target.device)
    return Part(row.target, inputs, causal_block(len(tokens), target.device), last_only=True)


def refuse_nan(logits: Float[Tensor, "rows 1 vocab"], target: TargetModel) -> None:
    """Raise ValueError if the target computes NaN or infinity, from which some token would be chosen all the same."""
    if not bool((logits < torch.inf).all()):  # NaN fails every comparison; -infinity only forbids a token
        raise ValueError(
            f"the target's logits are NaN or infinite in {str(target.dtype).removeprefix('torch.')}, only finite ones "
            f"are allowed; set target.dtype to float32, and if that does not help, download its weights again"
        )
