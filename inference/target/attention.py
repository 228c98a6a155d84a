"""Attention of a target with fewer key heads than query heads, without copies of the keys and values.

With a mask, transformers' own sdpa repeats every layer's keys and values once per query head: on a CPU half of a long
step, and on a GPU more memory traffic than the weights. Here the query heads that share a key head become further
queries of that head, which is the same arithmetic on a tensor of another shape. Registered through transformers'
AttentionInterface, so no model is patched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

SDPA = "sdpa"  # transformers' own
GROUPED = "headstart_grouped"


def grouped_attention(
    module: nn.Module,
    query: Float[Tensor, "batch num_heads seq head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; returns [batch, seq, num_heads, value_dim].

    Passes without a mask, or with a mask per head, go to transformers' own sdpa.
    """
    batch, num_heads, seq, _ = query.shape
    kv_heads = key.shape[1]
    group = num_heads // kv_heads
    if attention_mask is None or attention_mask.shape[1] != 1 or group == 1 or options.get("position_bias") is not None:
        attend = AttentionInterface()[SDPA]
        found: tuple[Tensor, None] = attend(module, query, key, value, attention_mask, scaling=scaling, **options)
        return found
    mask = attention_mask[..., : key.shape[2]].unsqueeze(2)  # [batch or 1, 1, 1, seq, keys]
    mask = mask.expand(-1, -1, group, -1, -1).flatten(2, 3)  # [batch or 1, 1, group * seq, keys]
    folded = query.reshape(batch, kv_heads, group * seq, -1)
    states = scaled_dot_product_attention(folded, key, value, mask, scale=scaling)
    return states.view(batch, num_heads, seq, -1).transpose(1, 2), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, AttentionMaskInterface()[SDPA])


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Let a model that runs on sdpa use `grouped_attention`; others keep what they have."""
    if model.config._attn_implementation == SDPA:
        model.set_attn_implementation(GROUPED)


@contextmanager
def own_attention_of(model: PreTrainedModel) -> Iterator[None]:
    """Within this context the model runs as transformers loaded it, as a baseline must."""
    is_grouped = model.config._attn_implementation == GROUPED
    if is_grouped:
        model.set_attn_implementation(SDPA)
    try:
        yield
    finally:
        if is_grouped:
            model.set_attn_implementation(GROUPED)
