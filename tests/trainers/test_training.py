"""Laws of the training loss: it is the paper's, and how it is computed changes neither the loss nor its gradient."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import slow
from tiny_run import make_dense, tiny_recipe, write_shard
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from headstart.data_pipelines.features.batches import Sample, TrainingBatch
from headstart.data_pipelines.features.shards import FeatureStore, write_manifest
from headstart.heads.base import DraftHead, LevelHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import new_head
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.heads.vocab import DraftVocab
from headstart.recipes import Recipe, load_recipe
from headstart.recipes.schema_heads import Eagle1Section, Eagle3Section
from headstart.recipes.schema_train import TrainSection
from headstart.trainers.objectives.objective import Objective
from headstart.trainers.objectives.unrolled import Teacher, UnrolledHead, input_noise

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "assets" / "demo_target"
UNROLL, DECAY = 4, 0.8
DECAYED = tuple(DECAY**k for k in range(UNROLL))
EAGLE_3 = Objective("soft_cross_entropy", unroll_weights=DECAYED)
EAGLE_1 = Objective("soft_cross_entropy", 0.1, 1.0, 0.2, unroll_weights=DECAYED)
EAGLE_31: dict[str, Any] = {"draft_vocab_size": 90, "norms": True}
VARIANTS: dict[str, dict[str, Any]] = {"whole vocabulary": {}, "90 tokens": {"draft_vocab_size": 90}, "3.1": EAGLE_31}


@pytest.fixture(scope="module")
def frozen(harvested: Path) -> FrozenTarget:
    return FrozenTarget.from_folder(harvested / "target", torch.float32)


@pytest.fixture(scope="module")
def samples(harvested: Path) -> list[Sample]:
    store = FeatureStore(tiny_recipe(harvested).features_dir, "train")
    found = sorted((store[number] for number in range(len(store))), key=lambda sample: len(sample.tokens))[::3]
    assert len({len(sample.tokens) for sample in found}) == len(found) == 4
    return found


def random_head(harvested: Path, frozen: FrozenTarget, **section: Any) -> Any:
    size = section.get("draft_vocab_size")
    counts = FeatureStore(tiny_recipe(harvested).features_dir, "train").token_counts(frozen.config.vocab_size)
    vocab = DraftVocab.full(len(counts)) if size is None else DraftVocab.most_frequent(counts, size)
    head = new_head(Eagle3Section(kind="eagle3", **section), frozen, vocab, seed=0)
    make_dense(head)
    return head


def unrolled_loss(head, batch, frozen, counts=None, objective=EAGLE_3, checkpointing=False, noise=None):
    """The loss as the training loop computes it; `counts` are those of a larger batch that contains this one."""
    section = TrainSection(steps=1, activation_checkpointing=checkpointing)
    unrolled = UnrolledHead(head, Teacher(frozen, head.vocab), objective, section)
    supervision = unrolled.teacher.supervise(batch)
    return unrolled(batch, supervision, supervision.counts(UNROLL) if counts is None else counts, noise).loss


def gradients(head: DraftHead, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*head.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def normed(states: Tensor, norm: Any) -> Tensor:
    return states * (states.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight


def rotated(states: Tensor, first_position: int, theta: float) -> Tensor:
    """states [heads, seq, head_dim]: entries i and i + head_dim / 2 are a point, turned by position * theta^(-2i/d)."""
    half = states.shape[-1] // 2
    turns = torch.arange(first_position, first_position + states.shape[1]).double()
    turned = torch.polar(torch.tensor(1.0).double(), turns[:, None] * theta ** -(torch.arange(half).double() / half))
    points = torch.complex(states[..., :half].double(), states[..., half:].double()) * turned
    return torch.cat([points.real, points.imag], dim=-1).to(states.dtype)


def attended(head, attention, inputs, keys, values):
    """The attention of unroll step k to the `keys` and `values` of steps 0 to k - 1 and its own, which it appends."""
    shape, theta, k, length = head.shape, head.target.rope.theta, len(keys), len(inputs)
    query, key, value = (
        (inputs @ weight.T).view(length, -1, shape.head_dim).transpose(0, 1)
        for weight in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
    )
    groups = shape.num_heads // shape.num_kv_heads
    keys.append(rotated(key, k, theta).repeat_interleave(groups, dim=0))
    values.append(value.repeat_interleave(groups, dim=0))
    # k = 2, T = 3:   1 . .  1 . .  1 . .   causal over step 0, then only its own index of each later step
    #                 1 1 .  . 1 .  . 1 .
    #                 1 1 1  . . 1  . . 1
    mask = torch.cat([torch.ones(length, length).tril(), *[torch.eye(length)] * k], dim=-1).bool()
    scores = rotated(query, k, theta) @ torch.cat(keys, dim=1).mT / math.sqrt(shape.head_dim)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)  # [heads, T, (k + 1) T]
    return (weights @ torch.cat(values, dim=1)).transpose(0, 1).reshape(length, -1) @ attention.o_proj.weight.T


def reference_loss(head: Eagle3Head, samples: list[Sample], target_logits: list[Tensor]) -> tuple[Tensor, int]:
    """EAGLE-3's training-time test written out: each sample alone, masks in full, shifts by position. Also the number
    of positions whose target argmax the head cannot draft."""
    layer, attention, shape, ids = head.midlayer, head.midlayer.self_attn, head.shape, head.vocab.ids
    sums, counts, outside = [torch.zeros(()) for _ in range(UNROLL)], [0] * UNROLL, 0
    for sample, target in zip(samples, target_logits, strict=True):
        length, supervised = len(sample.tokens), sample.loss_mask.tolist()
        inside = [choice in ids.tolist() for choice in target.argmax(-1).tolist()]
        outside += sum(supervised[j + 1] and not inside[j] for j in range(length - 1))
        taps = list(sample.taps.split(head.target.hidden_size, dim=-1))
        if shape.fc_norm:
            taps = [normed(tap, norm) for tap, norm in zip(taps, head.fc_norm, strict=True)]
        features = torch.cat(taps, dim=-1) @ head.fc.weight.T  # [T, hidden]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for k in range(UNROLL):
            tokens = torch.tensor([int(sample.tokens[t + 1 + k]) if t + 1 + k < length else 0 for t in range(length)])
            embedded = normed(head.embedding[tokens], layer.input_layernorm)
            inputs = torch.cat([embedded, normed(features, layer.hidden_norm)], dim=-1)  # [T, 2 hidden]
            hidden = features + attended(head, attention, inputs, keys, values)
            hidden = hidden + layer.mlp(normed(hidden, layer.post_attention_layernorm))
            guesses = (normed(hidden, head.norm) @ head.lm_head.weight.T).log_softmax(-1)
            for t in range(length):
                last = t + 1 + k  # the last token fed; the head predicts the one after it
                if last + 1 < length and supervised[last + 1] and inside[last]:
                    sums[k] = sums[k] - (target[last, ids].softmax(-1) * guesses[t]).sum()
                    counts[k] += 1
            features = normed(hidden, head.norm) if shape.norm_output else hidden
    return torch.stack([DECAY**k * sums[k] / counts[k] for k in range(UNROLL)]).sum(), outside


@pytest.mark.parametrize("section", VARIANTS.values(), ids=VARIANTS)
def test_the_loss_of_eagle_3_is_that_of_the_paper_written_out(harvested, frozen, samples, section):
    head = random_head(harvested, frozen, **section)
    model = AutoModelForCausalLM.from_pretrained(harvested / "target", dtype=torch.float32)
    with torch.no_grad():
        target_logits = [model(sample.tokens.unsqueeze(0)).logits[0] for sample in samples]
    expected, outside = reference_loss(head, samples, target_logits)
    batch = TrainingBatch.collate(samples, torch.float32)
    loss = unrolled_loss(head, batch, frozen)
    assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert Teacher(frozen, head.vocab).supervise(batch).outside == outside
    assert (outside > 0) == (not head.vocab.is_full)
    expected_gradients = gradients(head, expected)
    assert not [name for name, gradient in expected_gradients.items() if gradient.abs().max() < 1e-4]  # none is unused
    assert_close(gradients(head, loss), expected_gradients, rtol=1e-5, atol=1e-5)


def reference_eagle1_loss(head, samples, outputs, noise):
    """EAGLE-1's unrolled loss written out: each sample alone, masks in full. `outputs` are the target's logits and its
    normed last hidden states. The noise is added to the states that the head reads, not to those that it predicts."""
    [layer] = head.layers
    attention, fc = layer.self_attn, head.fc.weight * head.input_scale
    sums, counts = [torch.zeros(()) for _ in range(UNROLL)], [0] * UNROLL
    for sample, (target, wanted), added in zip(samples, outputs, noise, strict=True):
        length, supervised = len(sample.tokens), sample.loss_mask.tolist()
        features = wanted + added[:length]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for k in range(UNROLL):
            tokens = torch.tensor([int(sample.tokens[t + 1 + k]) if t + 1 + k < length else 0 for t in range(length)])
            inputs = torch.cat([head.embedding[tokens], features], dim=-1) @ fc.T
            hidden = inputs + attended(head, attention, inputs, keys, values)
            features = hidden + layer.mlp(normed(hidden, layer.post_attention_layernorm))
            guesses = (features @ head.lm_head.T).log_softmax(-1)
            for t in range(length):
                last = t + 1 + k
                if last + 1 < length and supervised[last + 1]:
                    cross_entropy = -(target[last].softmax(-1) * guesses[t]).sum()
                    distance = functional.smooth_l1_loss(features[t], wanted[last])
                    sums[k] = sums[k] + 0.1 * cross_entropy + 1.0 * distance
                    counts[k] += 1
    return torch.stack([DECAY**k * sums[k] / counts[k] for k in range(UNROLL)]).sum()


def random_eagle1_head(frozen: FrozenTarget) -> Any:
    head = new_head(Eagle1Section(kind="eagle1"), frozen, DraftVocab.full(frozen.config.vocab_size), seed=0)
    make_dense(head, 0.05)  # small changes, because features without a norm grow from step to step
    return head


def test_the_loss_of_eagle_1_is_that_of_the_paper_written_out(harvested: Path, samples: list[Sample]) -> None:
    """In float64, because features without a norm grow from step to step."""
    frozen = FrozenTarget.from_folder(harvested / "target", torch.float64)
    head = random_eagle1_head(frozen).double()
    model = AutoModelForCausalLM.from_pretrained(harvested / "target", dtype=torch.float64)
    with torch.no_grad():
        features = [model.model.norm(sample.last_hidden.double()) for sample in samples]
        outputs = [(model.lm_head(feature), feature) for feature in features]
    batch = batch_for(head, samples)
    noise = torch.randn(*batch.tokens.shape, 32, dtype=torch.float64)
    expected = reference_eagle1_loss(head, samples, outputs, noise)
    loss = unrolled_loss(head, batch, frozen, objective=EAGLE_1, noise=noise)
    assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    expected_gradients = gradients(head, expected)
    assert not [name for name, gradient in expected_gradients.items() if gradient.abs().max() < 1e-4]
    assert_close(gradients(head, loss), expected_gradients, rtol=1e-5, atol=1e-5)


def batch_for(head: DraftHead, samples: list[Sample]) -> TrainingBatch:
    """The samples as harvested for the head: EAGLE-1 taps only the last hidden state, which is not stored twice."""
    kept = slice(0, 0) if head.kind == "eagle1" else slice(None)
    stored = [replace(sample, taps=sample.taps[:, kept]) for sample in samples]
    return TrainingBatch.collate(stored, head.embedding.dtype)


def each_head(harvested: Path, frozen: FrozenTarget) -> list[tuple[LevelHead, Objective]]:
    """Heads and objectives that chunks and activation checkpoints could each get wrong."""
    limited = random_head(harvested, frozen, **EAGLE_31)
    return [
        (random_head(harvested, frozen), EAGLE_3),
        (random_head(harvested, frozen, hidden_size=24), EAGLE_3),
        (random_eagle1_head(frozen), EAGLE_1),
        *[(limited, objective) for objective in (EAGLE_3, replace(EAGLE_3, name="blended_acceptance"))],
    ]


@pytest.mark.parametrize("positions", [slow(1), 7])
def test_chunks_and_checkpoints_change_neither_loss_nor_gradient(harvested, frozen, samples, monkeypatch, positions):
    """A step that is computed again must see exactly the keys that it saw the first time."""
    for head, objective in each_head(harvested, frozen):
        batch = batch_for(head, samples)
        loss = partial(unrolled_loss, head, batch, frozen, objective=objective)
        whole, saving = loss(), loss(checkpointing=True)
        wanted = gradients(head, whole)
        assert torch.equal(saving, whole)
        assert_close(gradients(head, saving), wanted, rtol=0, atol=0)
        with monkeypatch.context() as patch:
            most = positions * UNROLL * len(head.vocab.ids)
            patch.setattr("headstart.trainers.objectives.unrolled.CHUNK_LOGITS", most)
            chunked = loss()
        assert_close(chunked, whole, rtol=1e-5, atol=1e-5)
        assert_close(gradients(head, chunked), wanted, rtol=1e-5, atol=1e-5)


def test_no_tensor_holds_the_logits_of_all_positions(harvested, frozen, samples, monkeypatch):
    """Neither the head's logits nor the target's, forward or backward."""
    head, batch = random_head(harvested, frozen, draft_vocab_size=90), TrainingBatch.collate(samples * 2, torch.float32)
    largest = {90: 0, 300: 0}  # positions of a tensor over the draft vocabulary, and over the target's

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, tuple | list) else [made]:
                if isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[-1] in largest:
                    size = tensor.shape[-1]
                    largest[size] = max(largest[size], tensor.numel() // size)
            return made

    monkeypatch.setattr("headstart.trainers.objectives.unrolled.CHUNK_LOGITS", 6 * 300)
    with Watch():
        gradients(head, unrolled_loss(head, batch, frozen))
    num_positions = int(batch.loss_mask.sum())
    assert num_positions > 32
    assert largest[300] <= 32  # the transposed embedding and lm_head have one row per hidden unit
    assert largest[90] <= max(32, 6 * 300 // 90)


def test_a_batch_without_a_supervised_position_has_no_loss_and_no_gradient(harvested, frozen, samples):
    """Such a batch may be all that a rank gets."""
    head, batch = random_head(harvested, frozen, draft_vocab_size=90), TrainingBatch.collate(samples, torch.float32)
    batch.loss_mask.zero_()
    loss = unrolled_loss(head, batch, frozen, counts=torch.full((UNROLL,), 5.0))
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients(head, loss).values())


def test_input_noise_depends_on_its_sample_and_step_alone() -> None:
    noise = input_noise(0.2, [3, 64, 512], ["0 5 11", "0 5 12", "0 5 13"], 400, "cpu")
    assert noise.shape == (3, 512, 400)
    for row, length in enumerate([3, 64, 512]):
        edge = 0.1 * 512 / length
        assert 0.99 * edge < noise[row].abs().max() <= edge
        assert abs(noise[row, :length].mean()) < 0.1 * edge
        assert not noise[row, length:].any()
    assert torch.equal(input_noise(0.2, [64], ["0 5 12"], 400, "cpu")[0], noise[1, :64])  # in any batch
    assert not torch.equal(input_noise(0.2, [64], ["0 6 12"], 400, "cpu")[0], noise[1, :64])


def test_an_objective_is_that_of_the_paper_unless_the_recipe_says_otherwise(make_recipe: Callable[..., Recipe]) -> None:
    assert Objective.from_recipe(make_recipe("a", "train.unroll=4")) == EAGLE_3
    eagle1 = "head={kind: eagle1}", "train.unroll=4"
    assert Objective.from_recipe(make_recipe("b", *eagle1)) == EAGLE_1
    own = "train.objective=log_acceptance", "train.objective_weight=2"
    found = Objective.from_recipe(make_recipe("b", *eagle1, *own, "train.unroll_decay=0.5"))
    assert found == Objective("log_acceptance", 2.0, 1.0, 0.2, unroll_weights=(1.0, 0.5, 0.25, 0.125))


@pytest.mark.parametrize(("recipe", "depths"), [("tiny", 5), ("tiny_medusa", 4), ("tiny_block", 7)])
def test_medusa_and_block_heads_train_all_levels_that_they_draft(recipe: str, depths: int) -> None:
    """Their number of depths follows from the head; only EAGLE heads choose train.unroll."""
    files = f"target.path={TARGET}", f"data.heldout_prompts={TARGET}/heldout_prompts.jsonl"
    loaded = load_recipe(ROOT / "recipes" / f"{recipe}.yaml", files)
    assert loaded.unroll == Objective.from_recipe(loaded).unroll == depths


def test_tap_sizes_are_medians_that_one_huge_token_does_not_move(tmp_path: Path) -> None:
    taps, last_hidden = torch.randn(50, 2, 16) * torch.tensor([3.0, 20.0])[:, None], torch.randn(50, 16) * 7
    taps[0] *= 1000  # as the first token of a text often is
    sample = Sample(torch.arange(50), torch.ones(50, dtype=torch.bool), taps.flatten(1), last_hidden)
    write_shard(tmp_path / "train-00000.safetensors", [sample], (1, 2), "x", "float32")
    write_shard(tmp_path / "train-00001.safetensors", [replace(sample, taps=sample.taps * 9)], (1, 2), "x", "float32")
    write_manifest(tmp_path, ["train-00000.safetensors", "train-00001.safetensors"], {"taps": [1, 2]})
    store = FeatureStore(tmp_path, "train")
    assert_close(store.tap_sizes((1, 2), 5), [3.0, 20.0], rtol=0.1, atol=0)
    assert_close(store.tap_sizes((1, 2, 5), 5), [3.0, 20.0, 7.0], rtol=0.1, atol=0)
