"""Prefill: read prompts into the cache, several in one pass or a long one in pieces."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.inference.cache import KVCache
from headstart.inference.target.model import TargetModel, TargetOutput
from headstart.inference.tree import Block


def read_prompts(target: TargetModel, prompts: list[list[int]], rows: list[KVCache]) -> TargetOutput:
    """Read each prompt into the cache of its own row, all in one pass.

    The logits are those after each prompt's last token, [1, prompts, vocab]; the taps are those of all prompts in turn,
    [1, tokens, tapped]. The prompts lie side by side without padding, and a mask hides them from each other.
    """
    if len(prompts) == 1:
        return read_piece(target, prompts[0], rows[0], 0)
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
    return output


def read_piece(target: TargetModel, tokens: list[int], row: KVCache, before: int) -> TargetOutput:
    """Read the next tokens of a prompt after those `before` that its row holds; the logits are those after the last."""
    row.set_lengths([before])
    inputs, device = torch.tensor([tokens], device=target.device), target.device
    if not before:
        return target.forward(inputs, cache=row, last_only=True)
    offsets = torch.arange(len(tokens), device=device)
    masks = target.masks(row.target, Block((offsets <= offsets[:, None]).unsqueeze(0), offsets.unsqueeze(0)))
    return target.forward(inputs, before + offsets.unsqueeze(0), masks, row, last_only=True)


def read_rests(target: TargetModel, rests: list[list[int]], rows: KVCache, before: list[int]) -> TargetOutput:
    """Read the rests of several prompts, each after those tokens `before` that its row holds, in one pass.

    The logits are those after each prompt's last token, [prompts, 1, vocab]; the taps are padded, [prompts, longest,
    tapped]. The rests lie below each other; what is read beyond the end of a short one is overwritten later.
    """
    rows.set_lengths(before)
    longest, device = max(map(len, rests)), target.device
    tokens = torch.tensor([rest + [0] * (longest - len(rest)) for rest in rests], device=device)
    offsets = torch.arange(longest, device=device)
    masks = target.masks(rows.target, Block((offsets <= offsets[:, None]).unsqueeze(0), offsets.unsqueeze(0)))
    ends = [len(rest) - 1 for rest in rests]
    kept = sorted(set(ends))
    positions = rows.target.starts.unsqueeze(1) + offsets
    output = target.forward(tokens, positions, masks, rows, logits_at=torch.tensor(kept, device=device))
    own = torch.tensor([kept.index(end) for end in ends], device=device)
    logits = output.logits[torch.arange(len(rests), device=device), own].unsqueeze(1)
    return replace(output, logits=logits)


def refuse_nan(logits: Float[Tensor, "rows 1 vocab"], target: TargetModel) -> None:
    """Raise ValueError if the target computes NaN or infinity, from which some token would be chosen all the same."""
    if not bool((logits < torch.inf).all()):  # NaN fails every comparison; -infinity only forbids a token
        raise ValueError(
            f"the target's logits are NaN or infinite in {str(target.dtype).removeprefix('torch.')}, only finite ones "
            f"are allowed; set target.dtype to float32, and if that does not help, download its weights again"
        )
