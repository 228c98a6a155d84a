"""Laws of a head: its forward is the same for a text at once, for blocks of it and for draft tokens; how it starts."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headstart.heads.base import DraftHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import new_head
from headstart.heads.kinds.linear_start import RIDGE, LeastSquares
from headstart.heads.layers import rotary_table
from headstart.heads.target_config import Rope
from headstart.heads.unroll_attention import UnrollCache
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.cache import Slots
from headstart.recipes.schema_heads import Eagle1Section, Eagle3Section
from headstart.trainers import train as run

BATCH, SEQ = 2, 11
SHAPES: list[dict[str, Any]] = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"num_kv_heads": 1},
    {"taps": (0, 2, 4, 5, 7)},
    {"taps": (3,), "fc_norm": True},
    {"hidden_size": 24, "own_embedding": True},  # narrower than its target
    {"kind": "eagle1"},
    {"kind": "eagle1", "num_kv_heads": 1, "fc_bias": True},
    {"kind": "medusa"},
    {"kind": "medusa", "num_layers": 2, "num_heads": 5, "bias": False},
    {"kind": "peagle"},
    {"kind": "peagle", "num_layers": 3, "fc_norm": True},
]
BLOCK_SHAPES: list[dict[str, Any]] = [
    {"kind": "block"},
    {"kind": "block", "sample_from_anchor": False, "markov_rank": 5},
    {"kind": "block", "markov_rank": 5, "markov_gate": True},
]
MakeHead = Callable[..., Any]
all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def random_taps(head: DraftHead) -> Tensor:
    return torch.randn(BATCH, SEQ, len(head.taps) * head.target.hidden_size, dtype=head.embedding.dtype)


def random_tokens(head: DraftHead) -> Tensor:
    return torch.randint(head.target.vocab_size, (BATCH, SEQ))


def empty_slots(head: DraftHead, capacity: int, rows: int = BATCH) -> Slots:
    """Slots full of NaN, so reading one that was never written shows up in the result."""
    layers, kv_heads, head_dim = head.cache_shape or (1, 1, 1)  # a head without a cache ignores it
    shape = layers, 2, rows, kv_heads, capacity, head_dim
    return Slots([torch.full(shape, float("nan"), dtype=head.embedding.dtype)], rows)


@all_shapes
def test_parallel_equals_incremental(make_head: MakeHead, shape: dict[str, Any]) -> None:
    """t: 0 1 2 3 | 4 | 5 6 7 | 8 9 | 10    each block sees all blocks before it and, causally, itself"""
    head = make_head(**shape).double()  # so that the tolerance covers only a different order of sums
    features, tokens, positions = head.project(random_taps(head)), random_tokens(head), torch.arange(SEQ)
    at_once = head(features, tokens, positions)

    slots, parts = empty_slots(head, SEQ), []
    for count in (4, 1, 3, 2, 1):
        start = slots.lengths[0]
        block = slice(start, start + count)
        mask = torch.full((count, start + count), -1e300, dtype=torch.float64).triu(start + 1)  # causal
        parts.append(head(features[:, block], tokens[:, block], positions[block], mask, slots))
        slots.advance([count] * BATCH)

    in_blocks = torch.cat(parts, dim=1)
    assert_close(in_blocks, at_once, atol=1e-9, rtol=1e-9)
    assert_close(head.logits(in_blocks), head.logits(at_once), atol=1e-9, rtol=1e-9)
    fed_back = [head.feedback(hidden, features) for hidden in (in_blocks, at_once)]
    assert_close(*fed_back, atol=1e-9, rtol=1e-9)


@all_shapes
def test_an_unroll_equals_drafting_after_every_prefix(make_head: MakeHead, shape: dict[str, Any]) -> None:
    """At index t of step k, training sees what drafting sees k tokens after the verified prefix 0..t:

    step 0   0 - 1 - 2 - 3 - 4      index 2 at step 2 sees 0 1 2 of step 0, its own key of step 1, itself
    step 1            2'
    step 2            2''           = a chain of two draft tokens after 0 1 2
    """
    head = make_head(**shape).double()
    unroll = head.max_levels or 5
    taps, tokens, positions = random_taps(head), random_tokens(head), torch.arange(SEQ)
    cache, features, unrolled = UnrollCache(), head.project(taps), []
    for k in range(unroll):
        # The last indices wrap around to tokens from the front, as in training; they are not compared.
        fed = tokens.roll(-k, dims=1)
        hidden = head(features, fed, positions + k, cache=cache, level=k)
        unrolled.append(hidden)
        features = head.feedback(hidden, features)

    for t in range(SEQ):
        slots = empty_slots(head, SEQ)
        prefix = slice(0, t + 1)
        features, last = head.project(taps[:, prefix]), slice(t, t + 1)
        hidden = head(features, tokens[:, prefix], positions[prefix], cache=slots)[:, last]
        features = features[:, last]
        slots.advance([t + 1] * BATCH)
        for k in range(min(unroll, SEQ - t)):
            if k > 0:
                at = slice(t + k, t + k + 1)
                features = head.feedback(hidden, features)
                hidden = head(features, tokens[:, at], positions[at], cache=slots, level=k)
                slots.advance([1] * BATCH)
            assert_close(unrolled[k][:, t], hidden[:, 0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("width", [24, 48])
def test_a_head_of_another_width_starts_with_a_projection_of_the_targets_embedding(frozen, width):
    """A random projection roughly preserves angles, so tokens that are similar to the target stay similar."""
    head = new_head(Eagle3Section(kind="eagle3", hidden_size=width), frozen, DraftVocab.full(97), seed=3)
    own = dict(head.named_parameters())["embed_tokens.weight"]
    assert own.shape == (97, width)
    angles = [functional.cosine_similarity(table[:-1], table[1:]) for table in (own, frozen.embedding)]
    assert torch.corrcoef(torch.stack(angles))[0, 1] > 0.5


def test_new_heads_scale_their_inputs_to_about_1(frozen: FrozenTarget) -> None:
    """Taps of any size give features as large as before; an embedding 100 times smaller than the feature counts."""
    head: Any = new_head(Eagle3Section(kind="eagle3"), frozen, DraftVocab.full(97), seed=3)
    sizes = [11.0, 0.3, 27.0]
    plain, taps = head.project(random_taps(head)), random_taps(head) * torch.tensor(sizes).repeat_interleave(32)
    head.scale_taps(sizes)
    assert 0.7 < head.project(taps).std() / plain.std() < 1.4
    small = replace(frozen, embedding=frozen.embedding / 100)
    eagle1: Any = new_head(Eagle1Section(kind="eagle1"), small, DraftVocab.full(97), seed=3)
    features, tokens = eagle1.project(random_taps(eagle1)), random_tokens(eagle1)
    hidden, others = (eagle1(features, each, torch.arange(SEQ)) for each in (tokens, tokens.roll(1, dims=1)))
    assert (hidden - others).std() > 0.3 * hidden.std()


@pytest.mark.parametrize("shape", SHAPES + BLOCK_SHAPES, ids=str)
def test_logits_parameters_are_exactly_those_that_the_logits_depend_on(make_head: MakeHead, shape: Any) -> None:
    head = make_head(**shape).requires_grad_(True)
    hidden = torch.randn(3, head.feature_size, requires_grad=True)
    seconds = [torch.randint(97, (3,))] if head.kind == "block" else range(head.max_levels or 1)  # tokens, or levels
    logits = torch.stack([head.logits(hidden, second) for second in seconds])
    found = torch.autograd.grad(logits.sum(), [*head.parameters()], allow_unused=True)
    used = [parameter for parameter, gradient in zip(head.parameters(), found, strict=True) if gradient is not None]
    assert {*map(id, used)} == {*map(id, head.logits_parameters)}
    head.requires_grad_(False)


@pytest.mark.parametrize("size", [None, 20])
def test_a_new_head_reads_its_features_through_the_targets_norm_and_lm_head(frozen, size):
    """An untrained layer passes its features through, so the logits are the target's own for the projected taps."""
    vocab = DraftVocab.full(97) if size is None else DraftVocab.most_frequent(torch.randint(50, (97,)), size)
    head: Any = new_head(Eagle3Section(kind="eagle3"), frozen, vocab, seed=3)
    taps, tokens = random_taps(head), random_tokens(head)
    features = head.project(taps)
    hidden = head(features, tokens, torch.arange(SEQ))
    assert_close(head.logits(hidden), frozen.logits(features)[..., vocab.ids], atol=1e-4, rtol=1e-4)


OF = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        ("default", {}),
        ("linear", {"factor": 4.0}),
        ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, OF: 64}),
        ("yarn", {"factor": 4.0, OF: 64}),
        ("yarn", {"factor": 32.0, OF: 8, "beta_fast": 16.0, "truncate": False}),
        ("yarn", {"factor": 4.0, OF: 64, "mscale": 1.0, "mscale_all_dim": 0.5}),
        ("yarn", {"factor": 4.0, OF: 64, "attention_factor": 0.7}),
    ],
)
def test_rotary_angles_are_the_targets_own(kind: str, scaling: dict[str, float]) -> None:
    parameters = {"rope_type": kind, "rope_theta": 5000.0, **scaling}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=256, rope_parameters=parameters)
    cosines, sines = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(256).unsqueeze(0))
    table = rotary_table(Rope(5000.0, kind, dict(scaling)), head_dim=32, max_positions=256)
    assert_close(table, torch.cat([cosines[0], sines[0]], dim=-1), atol=1e-4, rtol=0)


def test_a_scaled_rope_turns_every_dimension_whatever_share_the_target_turns_and_an_unknown_one_is_refused() -> None:
    scaling = {"factor": 4.0}
    partial = rotary_table(Rope(5000.0, "linear", {**scaling, "partial_rotary_factor": 0.5}), 32, 16)
    assert torch.equal(partial, rotary_table(Rope(5000.0, "linear", scaling), 32, 16))
    with pytest.raises(ValueError, match=r"rope_type 'longrope'.*only default, linear, llama3, yarn are allowed"):
        rotary_table(Rope(kind="longrope"), 8, 16)


def test_the_most_frequent_tokens_are_kept_ties_go_to_the_smaller_id_and_impossible_sizes_are_refused() -> None:
    counts = torch.tensor([0, 3, 7, 3, 0, 3, 9])
    assert DraftVocab.most_frequent(counts, 3).ids.tolist() == [1, 2, 6]
    assert DraftVocab.most_frequent(counts, 6).ids.tolist() == [0, 1, 2, 3, 5, 6]
    assert DraftVocab.most_frequent(counts, 3).coverage(counts) == pytest.approx(19 / 25)
    many = torch.randint(5, (5000,))
    ranked = sorted(range(5000), key=lambda token: (-int(many[token]), token))
    assert DraftVocab.most_frequent(many, 1234).ids.tolist() == sorted(ranked[:1234])
    none = torch.zeros(7, dtype=torch.long)
    assert DraftVocab.most_frequent(none, 2).coverage(none) == 0
    for size in (0, -1, 8):
        with pytest.raises(ValueError, match=rf"head\.draft_vocab_size: {size} given, 1 to .* 7"):
            DraftVocab.most_frequent(counts, size)


@pytest.mark.parametrize("d2t", [[0, 5, 95], [5, 4, 4], [9, 0, 0], [-1, 0, 0]], ids=str)
def test_offsets_that_give_no_vocabulary_are_refused(d2t: list[int]) -> None:
    """The ids are 0 6 97, beyond the vocabulary; 5 5 6, one repeated; 9 1 2, not ascending; -1 1 2, one negative."""
    with pytest.raises(ValueError, match=r"d2t gives ids .* ascending target ids below 97"):
        DraftVocab.from_offsets(torch.tensor(d2t), 97)


def test_sums_over_batches_give_the_ridge_regression_of_all_pairs() -> None:
    """At the optimum the gradient vanishes: X^T (X W - Y) + n ridge W = 0."""
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = (torch.randn(50, size, generator=generator) for size in (6, 4))
    fit = LeastSquares()
    for part in (slice(0, 20), slice(20, 50)):
        fit.add(inputs[part], outputs[part])
    weight = fit.solve().float()
    gradient = inputs.T @ (inputs @ weight - outputs) + 50 * RIDGE * weight
    assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-4)
    assert math.isclose(fit.size(fit.solve()), float((inputs @ weight).square().mean().sqrt()), rel_tol=1e-4)


def test_a_head_starts_as_the_fitted_map(frozen: FrozenTarget) -> None:
    """With one token in sight attention is on it alone, so the normed state is exactly what the map predicts."""
    config = frozen.config
    num_heads = -(-config.hidden_size // config.head_dim)  # so many key heads that nothing is lost to a low rank
    section = Eagle3Section(kind="eagle3", norms=True, num_heads=num_heads, num_kv_heads=num_heads)
    head: Any = new_head(section, frozen, DraftVocab.full(config.vocab_size), 0)
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(500, head.fc.in_features, generator=generator)
    tokens = torch.randint(config.vocab_size, (500,), generator=generator)
    with torch.no_grad():
        inputs = head.linear_inputs(taps, tokens)
        fit = LeastSquares()
        fit.add(inputs, inputs @ torch.randn(inputs.shape[1], config.hidden_size, generator=generator))
        head.start_with_fit(fit, generator)
        hidden = head(head.project(taps).unsqueeze(1), tokens.unsqueeze(1), torch.zeros(500, 1, dtype=torch.long))
        found = head.norm(hidden)[:, 0]
    predicted = inputs @ fit.solve().float()
    wanted = fit.size(fit.solve()) * predicted / predicted.square().mean(-1, keepdim=True).sqrt()
    assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_the_first_loss_of_an_eagle_3_head_is_below_that_of_the_uniform_distribution(harvested, make_recipe):
    recipe = make_recipe("run", "train.fitted_start=true", "train.steps=1", "train.warmup_steps=0")
    run(recipe)
    first = json.loads(recipe.metrics_path.read_text().splitlines()[0])
    vocab_size = json.loads((harvested / "target" / "config.json").read_text())["vocab_size"]
    assert first["train/loss_0"] < math.log(vocab_size)
