"""Attention of a target with fewer key heads than query heads, without copies of the keys and values.

With a mask, transformers' own sdpa repeats every layer's keys and values once per query head: on a CPU half of a long
step, and on a GPU more memory traffic than the weights. Here the query heads that share a key head become further
queries of that head, which is the same arithmetic on a tensor of another shape. Registered through transformers'
AttentionInterface, so no model is patched.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from headstart.heads.layers import Attention, Projections, attention, fold_heads, fold_mask, rotate
from headstart.inference.core.cache import KVCache, SlotLayer, Slots
from headstart.inference.core.side_by_side import PackedMask
from headstart.inference.core.tree import keys_of
from headstart.inference.kernels import (
    FusedForward,
    attention_outside_graph,
    can_attend,
    epsilon,
    gated_on_gpu,
    has_kernels,
    is_tracing,
    kernels_on_gpu,
    norms_on_gpu,
    offset_of,
    ordered_attention,
    residuals_on_gpu,
    whole_of,
)

SDPA = "sdpa"  # transformers' own
GROUPED = "headstart_grouped"
OWN_ATTENTION = "own_attention"  # an attribute of a model that runs on ours
BY_BLOCK = "attends_by_block"  # an attribute of a head whose attention needs no masks over all keys
# What our kernels compute: kinds of small operations, and attention.
NORMS, SUMS, GATES, ROTARY, ATTENTION = "norms", "sums before norms", "gates of MLPs", "rotary embeddings", "attention"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
# What the forward of an attention of the usual form reads of itself; the window is part of the mask.
READ_BY_USUAL = {*PROJECTIONS, "q_norm", "k_norm", "attention_dropout", "config", "head_dim", "layer_idx", "scaling"}
READ_BY_USUAL |= {"sliding_window", "training"}


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

    On a CPU `ordered_attention` computes it. Elsewhere passes without a mask, or with a mask per head, go to
    transformers' own sdpa. Parts that lie side by side attend to their own keys.
    """
    if is_tracing():
        attend = partial(grouped_attention, scaling=scaling, **options)
        return attention_outside_graph(attend, module, query, key, value), None
    if isinstance(attention_mask, PackedMask) and attention_mask.cache is not None:
        cache, masks = attention_mask.cache, attention_mask.masks
        parts = zip(cache.split(query), cache.take_held(), masks, strict=True)
        attended = [
            grouped_attention(module, queries, keys, values, mask.to(queries.device), scaling, **options)[0].flatten(
                0, 1
            )
            for queries, (keys, values), mask in parts
        ]
        return torch.cat(attended).unsqueeze(0), None
    is_plain, more = options.get("position_bias") is None, (options.get("softcap"), options.get("s_aux"))
    if is_plain and more == (None, None) and (keys := keys_of(attention_mask)) is not None:
        return kernels_on_gpu("attention").attention(query, key, value, keys, scaling), None
    if is_plain and can_attend(query, key, value, attention_mask):
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        return ordered_attention(query, key, value, attention_mask, scaling, is_causal, *more), None
    if more != (None, None):  # with gradients
        return attention_with_caps(query, key, value, attention_mask, scaling, *more), None
    if attention_mask is None or attention_mask.shape[1] != 1 or not is_plain:
        return AttentionInterface()[SDPA](module, query, key, value, attention_mask, scaling=scaling, **options)
    # Contiguous, as in transformers: some models take a view of it.
    return folded_attention(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def attention_with_caps(
    query: Float[Tensor, "batch num_heads seq head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    mask: Tensor | None,
    scaling: float | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Float[Tensor, "batch seq num_heads value_dim"]:
    """`ordered_attention` in torch's operations, which have gradients."""
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, dim=1).mT * (scaling or query.shape[-1] ** -0.5)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    sink = scores[..., :0] if sinks is None else sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1, dtype=torch.float32).to(value.dtype)
    return (weights[..., : key.shape[2]] @ value.repeat_interleave(group, dim=1)).transpose(1, 2).contiguous()


def folded_attention(
    query: Float[Tensor, "batch num_heads seq head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    mask: Tensor,
    scaling: float | None,
) -> Float[Tensor, "batch num_heads seq value_dim"]:
    """Attention in which the query heads of one key head become further queries; mask [batch or 1, 1, seq, keys]."""
    batch, num_heads, seq, _ = query.shape
    if num_heads == key.shape[1]:
        mask = mask[..., : key.shape[2]]
        return scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    mask = fold_once(mask, num_heads // key.shape[1], key.shape[2])
    mixed = scaled_dot_product_attention(fold_heads(query, key.shape[1]), key, value, mask, scale=scaling)
    return mixed.reshape(batch, num_heads, seq, -1)  # a view, except after kernels with another order of memory


def fold_once(mask: Tensor, group: int, keys: int) -> Tensor:
    """The mask of folded queries over the first keys; the first layer of a pass makes it for all layers."""
    made: dict[tuple[int, int], Tensor] = vars(mask).setdefault("folded", {})
    if (group, keys) not in made:
        made[group, keys] = fold_mask(mask[..., :keys], group)
    return made[group, keys]


def attention_with_norms(
    module: Any,
    norms: tuple[Tensor, Tensor, float | None, float | None] | None,
    hidden_states: Float[Tensor, "rows block hidden"],
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[Float[Tensor, "rows block hidden"], None]:
    """The forward of an attention in decoding: the norms of queries and keys, the rotary embedding and the write to the
    cache are one kernel. `norms` as in `rotate_and_store`."""
    slots = slots_in(past_key_values, module.layer_idx, hidden_states.device)
    if slots is None:
        own, cache = type(module).forward, past_key_values
        return own(module, hidden_states, position_embeddings, attention_mask, past_key_values=cache, **options)
    query, keys, values = with_stored(module, hidden_states, position_embeddings, norms, slots, module.layer_idx)
    mixed, _ = grouped_attention(module, query, keys, values, attention_mask, module.scaling, **options)
    return module.o_proj(mixed.flatten(2)), None


def head_attention(
    module: Any,
    inputs: Float[Tensor, "rows block input"],
    rotary: Float[Tensor, "*rows block double"],
    mask: Tensor | None,
    cache: Any,
    layer: int = 0,
) -> Float[Tensor, "rows block hidden"]:
    """`attention_with_norms` for the attention of a head, which has no norms."""
    if not isinstance(cache, Slots):
        return type(module).forward(module, inputs, rotary, mask, cache, layer)
    cosines, sines = (rotary if rotary.ndim == 3 else rotary.unsqueeze(0)).chunk(2, dim=-1)
    query, keys, values = with_stored(module, inputs, (cosines, sines), None, cache, layer)
    if (visible := keys_of(mask)) is not None:
        mixed = kernels_on_gpu("attention").attention(query, keys, values, visible)
    else:
        mixed = attention(query, keys, values, mask).transpose(1, 2)
    return module.o_proj(mixed.flatten(2))


def with_stored(
    module: Any, inputs: Tensor, rotary: tuple[Tensor, Tensor], norms: Any, slots: Slots, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The queries of a block, whose keys and values this writes; and the layer's keys and values up to the block."""
    whole = whole_of(module.q_proj)
    assert whole is not None
    keys, values = slots.with_block(slots.layers[layer], inputs.shape[1])
    store = kernels_on_gpu("fused").rotate_and_store
    return store(whole(inputs), rotary, norms, (keys, values), slots.starts, slots.pending), keys, values


def fuse_head(head: nn.Module, kinds: set[str]) -> None:
    """Let our kernels compute, in a head whose linear layers are joined, the kinds that they compute in its target."""
    if GATES in kinds:
        gated_on_gpu(head)
    own = [each for each in head.modules() if isinstance(each, Projections)]
    for each in own if ROTARY in kinds else ():
        if type(each) is Attention and whole_of(each.q_proj) is not None:
            vars(each)["forward"] = FusedForward(each, partial(head_attention, each))
    vars(head)[BY_BLOCK] = ATTENTION in kinds and bool(own) and all("forward" in vars(each) for each in own)


def slots_in(cache: Any, layer: int, device: torch.device) -> Slots | None:
    """The slots of a cache whose layer on this device holds a key and a value for each token, and no more."""
    is_usual = isinstance(cache, KVCache) and type(cache.layers[layer]) is SlotLayer
    return cache.target if is_usual and device == cache.target.device else None


def attention_on_gpu(model: PreTrainedModel) -> list[nn.Module]:
    """Let our kernels compute the small operations of the attention of the usual form; returns its modules."""
    if model.config._attn_implementation != GROUPED:
        return []
    usual = [each for each in model.modules() if is_usual_attention(each)]
    for each in usual:
        vars(each)["forward"] = FusedForward(each, partial(attention_with_norms, each, norms_of(each)))
    return usual


def norms_of(module: Any) -> tuple[Tensor, Tensor, float | None, float | None] | None:
    """The norms of an attention's queries and keys, for `rotate_and_store`; None if it has none."""
    if not hasattr(module, "q_norm"):
        return None
    return module.q_norm.weight, module.k_norm.weight, epsilon(module.q_norm), offset_of(module.q_norm)


def attend_by_block(passes: Any) -> bool:
    """Let our kernel compute the attention of steps, unless scores have caps or sinks, or layers are on two devices."""
    model = passes.model
    on_one = all(parameter.device == passes.device for parameter in model.parameters())
    passes.by_block = model.config._attn_implementation == GROUPED and on_one and not has_caps_or_sinks(model)
    return bool(passes.by_block)


# A function of a target's passes for each kind, which says whether our kernels compute anything now.
FUSED: dict[str, Callable[[Any], bool]] = {
    NORMS: lambda passes: bool(norms_on_gpu(passes.model)),
    SUMS: lambda passes: bool(residuals_on_gpu(passes.model)),
    GATES: lambda passes: bool(gated_on_gpu(passes.model)),
    ROTARY: lambda passes: bool(attention_on_gpu(passes.model)),
    ATTENTION: attend_by_block,
}


def is_usual_attention(module: Any) -> bool:
    """Whether an attention reads what Llama's does, with norms of each head of queries and keys or without."""
    names, kind = {name for name, _ in module.named_children()}, type(module)
    norms = names & {"q_norm", "k_norm"}
    if names - norms != set(PROJECTIONS) or len(norms) == 1 or whole_of(module.q_proj) is None:
        return False
    reads = {*re.findall(r"self\.(\w+)", inspect.getsource(kind.forward))}
    forms = {(offset_of(norm), epsilon(norm), len(norm.weight)) for norm in (getattr(module, name) for name in norms)}
    is_normed = not forms or (len(forms) == 1 and next(iter(forms))[0] is not None)
    fits = all(size == module.head_dim for *_, size in forms)
    return reads <= READ_BY_USUAL and is_normed and fits and rotates_halves(kind)


def rotates_halves(kind: type) -> bool:
    """Whether the rotary embedding of an attention's file turns the first half of a head's numbers with the second."""
    apply: Any = getattr(sys.modules[kind.__module__], "apply_rotary_pos_emb", None)
    states, angles = torch.arange(16.0).view(1, 2, 1, 8), torch.arange(8.0).view(1, 1, 8)
    try:
        turned, _ = apply(states, states, angles.cos(), angles.sin())
    except (TypeError, RuntimeError):  # there is none, or it takes other arguments
        return False
    return turned.shape == states.shape and torch.allclose(turned, rotate(states, angles.cos(), angles.sin()))


@contextmanager
def cudnn_attention(allowed: bool) -> Iterator[None]:
    """Let torch choose cuDNN's attention on a GPU, or not.

    It is the fastest one that takes a mask, but it makes a plan for every new shape, which takes 71 ms on an H100. So
    only captured steps use it.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, AttentionMaskInterface()[SDPA])


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Let a model that runs on sdpa use `grouped_attention`, and on a CPU one whose scores have caps or sinks.

    Others keep their attention.
    """
    own = model.config._attn_implementation
    if own == GROUPED:  # loaded before, or made with the configuration of a model that uses ours
        own = vars(model).get(OWN_ATTENTION, "eager" if has_caps_or_sinks(model) else SDPA)
    if own == SDPA or (own == "eager" and model.device.type == "cpu" and has_kernels() and has_caps_or_sinks(model)):
        vars(model)[OWN_ATTENTION] = own
        model.set_attn_implementation(GROUPED)


def has_caps_or_sinks(model: PreTrainedModel) -> bool:
    """Whether sdpa does not suffice: soft caps of scores (Gemma 2), or scores that are added to a softmax (gpt-oss)."""
    is_capped = model.config.get_text_config().to_dict().get("attn_logit_softcapping")
    return bool(is_capped) or any(isinstance(getattr(each, "sinks", None), Tensor) for each in model.modules())


def keep_own_attention(model: PreTrainedModel) -> None:
    """Undo `use_grouped_attention`."""
    if model.config._attn_implementation == GROUPED:
        model.set_attn_implementation(vars(model)[OWN_ATTENTION])


@contextmanager
def own_attention_of(model: PreTrainedModel) -> Iterator[None]:
    """Within this context the model runs as transformers loaded it, as a baseline must."""
    is_grouped = model.config._attn_implementation == GROUPED
    keep_own_attention(model)
    try:
        yield
    finally:
        if is_grouped:
            use_grouped_attention(model)
