"""Laws of a block head: one pass in training, for every block of a text, is what drafting computes block by block."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_heads import empty_slots
from torch import Tensor
from torch.testing import assert_close

from headstart.heads import attention_kernels
from headstart.heads.attention_kernels import CausalKernel
from headstart.heads.kinds import block_attention
from headstart.heads.kinds.block import BlockHead, spread_taps
from headstart.heads.kinds.block_attention import BlockCache, Blocks, Reach
from headstart.heads.kinds.checkpoint import new_head
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema_heads import BlockSection

SEQ = 13
MakeHead = Callable[..., BlockHead]
SHAPES: list[dict[str, Any]] = [
    {},
    {"sample_from_anchor": False},
    {"reaches": (Reach(causal=True),) * 2},
    {"reaches": (Reach(window=3, causal=True), Reach()), "sample_from_anchor": False},
    {"reaches": (Reach(),), "block_size": 7, "markov_rank": 5},
    {"markov_rank": 5, "markov_gate": True, "num_kv_heads": 4},
    {"reaches": (Reach(),) * 3, "taps": (0, 3, 7)},
]
all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def a_text(head: BlockHead, seq: int = SEQ) -> tuple[Tensor, Tensor]:
    taps = torch.randn(1, seq, len(head.taps) * head.target.hidden_size, dtype=head.embedding.dtype)
    return taps, torch.randint(head.target.vocab_size, (1, seq))


def layer_masks(head: BlockHead, held: int) -> list[Tensor]:
    """What the slots of a block see after `held` verified positions, written out from the definition."""
    masks, size = [], head.shape.block_size
    for reach in head.shape.reaches:
        mask = torch.full((size, held + size), -torch.inf, dtype=head.embedding.dtype)
        for slot in range(size):
            mask[slot, max(held - reach.window, 0) if reach.window else 0 : held] = 0
            mask[slot, held : held + (slot + 1 if reach.causal else size)] = 0
        masks.append(mask)
    return masks


@all_shapes
def test_the_pass_of_training_is_that_of_drafting_with_a_cache(make_head: MakeHead, shape: dict[str, Any]) -> None:
    """anchor a: the cache holds 0..a-1, read in uneven portions; the block's own keys are dropped again

    context  0 1 2 | 3 | 4 5 6 7 | ...      block at a = 4:  x_4 M M M   sees 0..3 and itself
    """
    head = make_head("block", **shape).double()
    taps, tokens = a_text(head)
    blocks = Blocks.at_every_position(SEQ)
    at_once = head.text_states(head.project(taps), tokens, blocks)
    assert at_once.shape == (SEQ - 1, head.shape.levels, head.feature_size)

    slots = empty_slots(head, SEQ + 10, 1)
    for start, end in ((0, 1), (1, 4), (4, 5), (5, 9), (9, SEQ - 1)):
        head.read(head.project(taps[:, start:end]), torch.arange(start, end), slots)
        slots.advance([end - start])
        found = head(tokens[0, end : end + 1], torch.tensor([end]), slots, layer_masks(head, end))
        assert_close(found[0], at_once[end - 1], atol=1e-9, rtol=1e-9)
        before = tokens[0, end - 1 : end + head.shape.levels - 1].clone()
        assert_close(head.logits(found[0, : len(before)], before), head.logits(at_once[end - 1, : len(before)], before))


def plain_kernel() -> CausalKernel:
    kernels: Any = attention_kernels

    def banded(query: Tensor, window: int | None) -> Tensor:
        places = torch.arange(query.shape[2])
        ago = places.unsqueeze(1) - places
        seen = (ago >= 0) & (ago < (window or len(places)))
        return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)

    def with_window(window: int | None) -> CausalKernel:
        return attention_kernels.per_document(
            lambda query, *given: kernels.scored_forward(query, *given, banded(query, window)),
            lambda grad, query, *given: kernels.scored_backward(grad, query, *given, banded(query, window)),
        )

    return CausalKernel(
        lambda *given, documents, window=None: with_window(window).forward(*given, documents),
        lambda *given, documents, window=None: with_window(window).backward(*given, documents=documents),
    )


@pytest.fixture(params=["fused", "portable", "slot by slot"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to compute the attention of blocks, on a CPU; the portable one in groups of two blocks."""
    if request.param == "portable":
        monkeypatch.setattr(attention_kernels, "MASK_DEVICES", ())
        monkeypatch.setattr(block_attention, "GROUP_QUERIES", 8)
    if request.param == "slot by slot":
        monkeypatch.setattr(block_attention, "flash_attention_takes", lambda query: True)
        monkeypatch.setattr(block_attention, "CUDA_FUSED", plain_kernel())


@pytest.mark.parametrize("reach", [Reach(), Reach(causal=True), Reach(window=4)], ids=str)
def test_the_gradient_is_that_of_plain_attention(reach: Reach, path: None) -> None:
    """Against a softmax over a dense mask of all blocks, with two query heads for each key head."""
    blocks, size = Blocks((0, 0, 0, 0, 1), (2, 5, 9, 11, 5), (0, 3, 3, 3, 0)), 3

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    query, key, value = draw(5, 4, size, 8), draw(5, 2, size, 8), draw(5, 2, size, 8)
    context_key, context_value = draw(2, 2, 12, 8), draw(2, 2, 12, 8)
    cache = BlockCache(blocks, (reach,))
    cache.append(0, context_key, context_value)
    found = cache.attend(0, query, key, value, None)
    wanted = []
    for number, (row, anchor, start) in enumerate(zip(blocks.rows, blocks.anchors, blocks.starts, strict=True)):
        first = max(start, anchor - reach.window) if reach.window else start
        keys, values = (
            torch.cat([context[row, :, first:anchor], own[number]], dim=1).repeat_interleave(2, dim=0)
            for context, own in ((context_key, key), (context_value, value))
        )
        mask = torch.zeros(size, keys.shape[1], dtype=torch.float64)
        mask[:, anchor - first :].masked_fill_(~reach.within(size), -torch.inf)
        wanted.append((query[number] @ keys.mT / 8**0.5 + mask).softmax(-1) @ values)
    assert_close(found, torch.stack(wanted), atol=1e-9, rtol=1e-9)
    inputs = query, key, value, context_key, context_value
    upstream = torch.randn_like(found)
    gradients = (torch.autograd.grad(out, inputs, upstream) for out in (found, torch.stack(wanted)))
    assert_close(*gradients, atol=1e-9, rtol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares two kernels of a GPU")
@pytest.mark.parametrize("reach", [Reach(), Reach(causal=True), Reach(window=50)], ids=str)
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_on_a_gpu_the_fused_attention_of_blocks_equals_the_portable_one(reach: Reach, num_kv_heads: int) -> None:
    """In bfloat16 slot by slot, in float32 group by group: two rows, one of two documents, blocks of 7 slots."""
    places = [(0, anchor, 0) for anchor in range(1, 130, 3)] + [(0, anchor, 130) for anchor in range(131, 290, 2)]
    blocks = Blocks(*zip(*places, *[((1, anchor, 0)) for anchor in range(40, 260)], strict=True))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda").requires_grad_()

    query, key, value = (draw(len(blocks), heads, 7, 64) for heads in (4, num_kv_heads, num_kv_heads))
    half = [query, key, value, *(draw(2, num_kv_heads, 300, 64) for _ in range(2))]
    exact, found = [each.detach().float().requires_grad_() for each in half], []
    upstream = torch.randn(query.shape, device="cuda")
    assert [attention_kernels.flash_attention_takes(states[0]) for states in (half, exact)] == [True, False]
    for states in (half, exact):
        cache = BlockCache(blocks, (reach,))
        cache.append(0, *states[3:])
        out = cache.attend(0, states[0], states[1], states[2], None)
        found.append([out, *torch.autograd.grad((out * upstream).sum(), states)])
    for mine, its in zip(*found, strict=True):
        assert mine.dtype == torch.bfloat16
        assert_close(mine.float(), its, atol=0.05, rtol=0.05)


def test_checkpointing_changes_no_gradient(make_head: MakeHead) -> None:
    head = make_head("block", markov_rank=5).requires_grad_(True)
    taps, tokens = a_text(head)
    blocks, positions, gradients = Blocks.at_every_position(SEQ), torch.arange(SEQ), []
    for checkpointing in (False, True):
        states = head.blocks_of(head.project(taps), positions, tokens, blocks, checkpointing)
        named = [(name, each) for name, each in head.named_parameters() if not name.startswith("markov")]
        gradients.append(torch.autograd.grad(states.square().sum(), [each for _, each in named]))
    head.requires_grad_(False)
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("gate", [False, True], ids=["vanilla", "gated"])
def test_without_a_word_from_its_markov_head_it_is_dflash(make_head: MakeHead, gate: bool) -> None:
    """DSpark's backbone is DFlash's; the slot conventions differ only in which slots predict."""
    head = make_head("block", markov_rank=5, markov_gate=gate)
    assert head.markov_head is not None
    plain = make_head("block")
    shared = {name: each for name, each in head.state_dict().items() if not name.startswith("markov")}
    plain.load_state_dict(shared)
    dflash = make_head("block", sample_from_anchor=False)
    dflash.load_state_dict(shared)
    taps, tokens = a_text(head)
    blocks, before = Blocks.at_every_position(SEQ), torch.randint(97, (SEQ - 1, 4))
    states = head.text_states(head.project(taps), tokens, blocks)
    assert torch.equal(plain.text_states(plain.project(taps), tokens, blocks), states)
    assert torch.equal(dflash.text_states(dflash.project(taps), tokens, blocks), states[:, 1:])
    assert not torch.allclose(head.logits(states, before), plain.logits(states, before))
    weight = head.markov_head.markov_w2.weight.clone()
    head.markov_head.markov_w2.weight.zero_()
    assert torch.equal(head.logits(states, before), plain.logits(states, before))
    head.markov_head.markov_w2.weight.copy_(weight)


def test_the_logits_are_those_of_the_files_by_the_definition(make_head: MakeHead) -> None:
    """One block, computed head by head and slot by slot from the names of the saved tensors alone."""
    head = make_head("block", reaches=(Reach(),), markov_rank=5, markov_gate=True).double()
    taps, tokens = a_text(head)
    anchor, weights, dim = 6, head.state_dict(), head.shape.head_dim
    layer = {name.removeprefix("layers.0."): each for name, each in weights.items()}

    def norm(states: Tensor, weight: Tensor) -> Tensor:
        return weight * states / (states.pow(2).mean(-1, keepdim=True) + head.target.norm_eps).sqrt()

    def heads_of(states: Tensor, name: str) -> Tensor:
        return (states @ layer[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, dim)).transpose(0, 1)

    def turned(states: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] * 10000.0 ** -(torch.arange(0, dim, 2) / dim)
        first, second = states.chunk(2, dim=-1)
        cosines, sines = angles.cos(), angles.sin()
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)

    context = norm(taps[0, :anchor] @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    hidden = head.embedding[torch.tensor([int(tokens[0, anchor]), 96, 96, 96])]
    inputs = norm(hidden, layer["input_layernorm.weight"])
    both, positions = torch.cat([context, inputs]), torch.arange(anchor + 4)
    key = turned(norm(heads_of(both, "k"), layer["self_attn.k_norm.weight"]), positions)
    query = turned(norm(heads_of(inputs, "q"), layer["self_attn.q_norm.weight"]), positions[anchor:])
    value = heads_of(both, "v")
    mixed = [(own @ key[n // 2].T / dim**0.5).softmax(-1) @ value[n // 2] for n, own in enumerate(query)]
    hidden = hidden + torch.cat(mixed, dim=-1) @ layer["self_attn.o_proj.weight"].T
    normed = norm(hidden, layer["post_attention_layernorm.weight"])
    gate, up = (normed @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    hidden = norm(hidden + (gate.sigmoid() * gate * up) @ layer["mlp.down_proj.weight"].T, weights["norm.weight"])
    before = tokens[0, anchor : anchor + 4]
    known = weights["markov_head.markov_w1.weight"][before]
    gates = torch.cat([hidden, known], dim=-1) @ weights["markov_head.gate_proj.weight"].T
    known = (gates + weights["markov_head.gate_proj.bias"]).sigmoid() * known
    wanted = hidden @ head.output_layer.T + known @ weights["markov_head.markov_w2.weight"].T

    states = head.text_states(head.project(taps), tokens, Blocks((0,), (anchor,), (0,)))
    assert_close(head.logits(states[0], before), wanted, atol=1e-4, rtol=1e-4)  # the rotary table is float32


@pytest.mark.parametrize("fields", [{}, {"markov_rank": 0}, {"causal": True}], ids=str)
def test_a_new_head_passes_the_block_through_and_depends_on_its_seed_alone(frozen, fields):
    section = BlockSection(kind="block", **fields)
    one, again, other = (new_head(section, frozen, DraftVocab.full(97), seed) for seed in (3, 3, 4))
    assert isinstance(one, BlockHead)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    taps, tokens = a_text(one)
    states = one.text_states(one.project(taps), tokens, Blocks((0,), (5,), (0,)))
    assert torch.equal(states[0, -1], one.norm(frozen.embedding[96]))
    before = torch.randint(97, states.shape[:2])
    assert torch.equal(one.logits(states, before), one.slot_logits(states))


def test_the_usual_taps_are_those_of_dflash() -> None:
    """In hidden_states, one more than the outputs of layers that its files count: 1, 9, 17, 25, 33 for Qwen3-8B."""
    assert spread_taps(36, 5) == (2, 10, 18, 26, 34)
    assert spread_taps(30, 5) == (2, 8, 15, 22, 28)
    assert spread_taps(7, 5) == (2, 3, 4, 5)
    assert [spread_taps(layers, 5) for layers in (1, 2, 3, 4)] == [(0,), (0,), (1,), (2,)]
