"""Laws of training: the loss is the paper's, a killed run ends in the same weights, nothing goes wrong in silence."""

import itertools
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import build_run, contents, quiet_environment, tiny_recipe
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from data_pipelines.batches import Batch, SampleOrder
from data_pipelines.harvest import harvest
from data_pipelines.shards import FeatureStore, Sample, write_manifest, write_shard
from heads.base import DraftHead
from heads.build import load_head, new_head, save_head
from heads.eagle1 import Eagle1Head, Eagle1Layer
from heads.eagle3 import Eagle3Head
from heads.frozen import FrozenTarget
from heads.layers import RMSNorm
from heads.losses import OBJECTIVES
from heads.vocab import DraftVocab
from recipes import Recipe
from recipes.schema import Eagle1Section, Eagle3Section, TrainSection
from trainers import loop
from trainers.checkpoint import Checkpoints
from trainers.eagle import run
from trainers.objective import Objective, Teacher, UnrolledHead, input_noise
from trainers.optimizers import build_optimizers, set_learning_rates
from trainers.tracking import Tracker

ROOT = Path(__file__).resolve().parents[1]
UNROLL, DECAY = 4, 0.8
VARIANTS: dict[str, dict[str, Any]] = {"whole vocabulary": {}, "draft vocabulary": {"draft_vocab_size": 90}}
DECAYED = tuple(DECAY**k for k in range(UNROLL))
EAGLE_3 = Objective("soft_cross_entropy", 1.0, 0.0, 0.0, DECAYED)
EAGLE_1 = Objective("soft_cross_entropy", 0.1, 1.0, 0.2, DECAYED)
EAGLE_31 = {"draft_vocab_size": 90, "fc_norm": True, "norm_output": True}


@pytest.fixture(scope="module")
def harvested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose run went as far as the features."""
    folder = tmp_path_factory.mktemp("harvested")
    build_run(folder)
    harvest(tiny_recipe(folder))
    return folder


@pytest.fixture
def make_recipe(harvested: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """make_recipe(name, *overrides): a run of its own that has its features and no checkpoint yet."""

    def make(name: str, *overrides: str) -> Recipe:
        if not (tmp_path / name).exists():
            shutil.copytree(harvested / "run", tmp_path / name)
        return tiny_recipe(harvested, f"run_dir={tmp_path / name}", *overrides)

    return make


# The objective


@pytest.fixture(scope="module")
def frozen(harvested: Path) -> FrozenTarget:
    return FrozenTarget.from_folder(harvested / "target", torch.float32)


@pytest.fixture(scope="module")
def samples(harvested: Path) -> list[Sample]:
    """Four training samples of different lengths."""
    store = FeatureStore(tiny_recipe(harvested).features_dir, "train")
    found = sorted((store[number] for number in range(len(store))), key=lambda sample: len(sample.tokens))[::3]
    assert len({len(sample.tokens) for sample in found}) == len(found) == 4
    return found


def random_head(harvested: Path, frozen: FrozenTarget, **section: Any) -> Eagle3Head:
    """A head none of whose weights is zero, so that every path through it counts."""
    size = section.get("draft_vocab_size")
    counts = FeatureStore(tiny_recipe(harvested).features_dir, "train").token_counts(frozen.config.vocab_size)
    vocab = DraftVocab.full(len(counts)) if size is None else DraftVocab.most_frequent(counts, size)
    head = new_head(Eagle3Section(kind="eagle3", **section), frozen, vocab, seed=0)
    assert isinstance(head, Eagle3Head)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return head


def unrolled_loss(
    head: DraftHead,
    batch: Batch,
    frozen: FrozenTarget,
    counts: Tensor | None = None,
    objective: Objective = EAGLE_3,
    checkpointing: bool = False,
) -> Tensor:
    """The loss as the training loop takes it; `counts` are those of a larger batch that this one is a part of."""
    unrolled = UnrolledHead(head, Teacher(frozen, head.vocab), objective, checkpointing)
    supervision = unrolled.teacher.supervise(batch)
    return unrolled(batch, supervision, supervision.counts(UNROLL) if counts is None else counts).loss


def gradients(head: DraftHead, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*head.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def normed(states: Tensor, norm: nn.Module) -> Tensor:
    assert isinstance(norm, RMSNorm)
    return states * (states.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight


def rotated(states: Tensor, first_position: int, theta: float) -> Tensor:
    """states [heads, seq, head_dim]: entries i and i + head_dim / 2 are a point, turned by position * theta^(-2i/d)."""
    half = states.shape[-1] // 2
    turns = torch.arange(first_position, first_position + states.shape[1]).double()
    turned = torch.polar(torch.tensor(1.0).double(), turns[:, None] * theta ** -(torch.arange(half).double() / half))
    points = torch.complex(states[..., :half].double(), states[..., half:].double()) * turned
    return torch.cat([points.real, points.imag], dim=-1).to(states.dtype)


def reference_loss(head: Eagle3Head, samples: list[Sample], target_logits: list[Tensor]) -> tuple[Tensor, int]:
    """EAGLE-3's training-time test as the reference states it: every sample alone, every mask in full, every shift
    by position. Also counts the positions whose target argmax the head cannot draft."""
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
        keys, values = [], []
        for k in range(UNROLL):
            tokens = torch.tensor([int(sample.tokens[t + 1 + k]) if t + 1 + k < length else 0 for t in range(length)])
            embedded = normed(head.embedding[tokens], layer.input_layernorm)
            inputs = torch.cat([embedded, normed(features, layer.hidden_norm)], dim=-1)  # [T, 2 hidden]
            query, key, value = (
                (inputs @ weight.T).view(length, -1, shape.head_dim).transpose(0, 1)
                for weight in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
            )
            groups = shape.num_heads // shape.num_kv_heads
            keys.append(rotated(key, k, head.target.rope.theta).repeat_interleave(groups, dim=0))
            values.append(value.repeat_interleave(groups, dim=0))
            # k = 2, T = 3:   1 . .  1 . .  1 . .   causal over step 0, then the own index of each later step
            #                 1 1 .  . 1 .  . 1 .
            #                 1 1 1  . . 1  . . 1
            mask = torch.cat([torch.ones(length, length).tril(), *[torch.eye(length)] * k], dim=-1).bool()
            scores = rotated(query, k, head.target.rope.theta) @ torch.cat(keys, dim=1).mT / math.sqrt(shape.head_dim)
            weights = scores.masked_fill(~mask, -math.inf).softmax(-1)  # [heads, T, (k + 1) T]
            mixed = (weights @ torch.cat(values, dim=1)).transpose(0, 1).reshape(length, -1)
            hidden = features + mixed @ attention.o_proj.weight.T
            hidden = hidden + layer.mlp(normed(hidden, layer.post_attention_layernorm))
            guesses = (normed(hidden, head.norm) @ head.lm_head.weight.T).log_softmax(-1)
            for t in range(length):
                last = t + 1 + k  # the token fed last; what comes behind it is guessed
                if last + 1 < length and supervised[last + 1] and inside[last]:
                    sums[k] = sums[k] - (target[last, ids].softmax(-1) * guesses[t]).sum()
                    counts[k] += 1
            features = normed(hidden, head.norm) if shape.norm_output else hidden
    return torch.stack([DECAY**k * sums[k] / counts[k] for k in range(UNROLL)]).sum(), outside


@pytest.mark.parametrize(
    "section", [*VARIANTS.values(), EAGLE_31], ids=["whole vocabulary", "draft vocabulary", "EAGLE-3.1"]
)
def test_the_loss_is_the_reference_written_densely(
    harvested: Path, frozen: FrozenTarget, samples: list[Sample], section: dict[str, Any]
) -> None:
    head = random_head(harvested, frozen, **section)
    model = AutoModelForCausalLM.from_pretrained(harvested / "target", dtype=torch.float32)
    with torch.no_grad():
        target_logits = [model(sample.tokens.unsqueeze(0)).logits[0] for sample in samples]
    expected, outside = reference_loss(head, samples, target_logits)
    batch = Batch.collate(samples, torch.float32)
    loss = unrolled_loss(head, batch, frozen)
    assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert Teacher(frozen, head.vocab).supervise(batch).outside == outside
    assert (outside > 0) == (not head.vocab.is_full)
    expected_gradients = gradients(head, expected)
    assert not [name for name, gradient in expected_gradients.items() if gradient.abs().max() < 1e-4]  # all take part
    assert_close(gradients(head, loss), expected_gradients, rtol=1e-5, atol=1e-5)


def reference_eagle1_loss(head: Eagle1Head, samples: list[Sample], outputs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """EAGLE-1's loss, unrolled: every sample alone, every mask in full. `outputs` are the target's logits and its last
    hidden states behind the final norm."""
    [layer], shape = head.layers, head.shape
    assert isinstance(layer, Eagle1Layer)
    assert head.input_scale is not None
    attention, fc = layer.self_attn, head.fc.weight * head.input_scale
    sums, counts = [torch.zeros(()) for _ in range(UNROLL)], [0] * UNROLL
    for sample, (target, wanted) in zip(samples, outputs, strict=True):
        length, supervised, features = len(sample.tokens), sample.loss_mask.tolist(), wanted
        keys, values = [], []
        for k in range(UNROLL):
            tokens = torch.tensor([int(sample.tokens[t + 1 + k]) if t + 1 + k < length else 0 for t in range(length)])
            inputs = torch.cat([head.embedding[tokens], features], dim=-1) @ fc.T
            query, key, value = (
                (inputs @ weight.T).view(length, -1, shape.head_dim).transpose(0, 1)
                for weight in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
            )
            groups = shape.num_heads // shape.num_kv_heads
            keys.append(rotated(key, k, head.target.rope.theta).repeat_interleave(groups, dim=0))
            values.append(value.repeat_interleave(groups, dim=0))
            mask = torch.cat([torch.ones(length, length).tril(), *[torch.eye(length)] * k], dim=-1).bool()
            scores = rotated(query, k, head.target.rope.theta) @ torch.cat(keys, dim=1).mT / math.sqrt(shape.head_dim)
            weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
            mixed = (weights @ torch.cat(values, dim=1)).transpose(0, 1).reshape(length, -1)
            hidden = inputs + mixed @ attention.o_proj.weight.T
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


def random_eagle1_head(frozen: FrozenTarget) -> Eagle1Head:
    head = new_head(Eagle1Section(kind="eagle1"), frozen, DraftVocab.full(frozen.config.vocab_size), seed=0)
    assert isinstance(head, Eagle1Head)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            # Little, as un-normed features grow from step to step.
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return head


def test_the_loss_of_eagle_1_is_the_paper_written_densely(harvested: Path, samples: list[Sample]) -> None:
    """In float64, as un-normed features grow from step to step."""
    frozen = FrozenTarget.from_folder(harvested / "target", torch.float64)
    head = random_eagle1_head(frozen).double()
    model = AutoModelForCausalLM.from_pretrained(harvested / "target", dtype=torch.float64)
    with torch.no_grad():
        features = [model.model.norm(sample.last_hidden.double()) for sample in samples]
        outputs = [(model.lm_head(feature), feature) for feature in features]
    expected = reference_eagle1_loss(head, samples, outputs)
    loss = unrolled_loss(head, batch_for(head, samples), frozen, objective=EAGLE_1)
    assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    expected_gradients = gradients(head, expected)
    assert not [name for name, gradient in expected_gradients.items() if gradient.abs().max() < 1e-4]
    assert_close(gradients(head, loss), expected_gradients, rtol=1e-5, atol=1e-5)


def batch_for(head: DraftHead, samples: list[Sample]) -> Batch:
    """The samples as harvested for the head: of EAGLE-1's only tap, the last hidden state, there is no second copy."""
    kept = slice(0, 0) if head.kind == "eagle1" else slice(None)
    return Batch.collate([replace(sample, taps=sample.taps[:, kept]) for sample in samples], head.embedding.dtype)


def each_head(harvested: Path, frozen: FrozenTarget) -> list[tuple[DraftHead, Objective]]:
    """Every way in which a head is trained that chunks and checkpoints could get wrong."""
    limited = random_head(harvested, frozen, **EAGLE_31)
    others = [replace(EAGLE_3, name=name) for name in OBJECTIVES if name != EAGLE_3.name]
    return [
        (random_head(harvested, frozen), EAGLE_3),
        (random_head(harvested, frozen, hidden_size=24), EAGLE_3),
        (random_eagle1_head(frozen), EAGLE_1),
        *[(limited, objective) for objective in (EAGLE_3, *others)],
    ]


@pytest.mark.parametrize("positions", [1, 7])
def test_chunks_change_neither_loss_nor_gradient(
    harvested: Path, frozen: FrozenTarget, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, positions: int
) -> None:
    for head, objective in each_head(harvested, frozen):
        batch = batch_for(head, samples)
        whole = unrolled_loss(head, batch, frozen, objective=objective)
        with monkeypatch.context() as patch:
            patch.setattr("trainers.objective.CHUNK_LOGITS", positions * UNROLL * len(head.vocab.ids))
            chunked = unrolled_loss(head, batch, frozen, objective=objective)
        assert_close(chunked, whole, rtol=1e-5, atol=1e-5)
        assert_close(gradients(head, chunked), gradients(head, whole), rtol=1e-5, atol=1e-5)


def test_no_tensor_holds_the_logits_of_all_positions(
    harvested: Path, frozen: FrozenTarget, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the head's nor the target's, neither forward nor backward."""
    head, batch = random_head(harvested, frozen, draft_vocab_size=90), Batch.collate(samples, torch.float32)
    largest = {90: 0, 300: 0}  # positions of a tensor over the draft vocabulary, and over the target's

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, tuple | list) else [made]:
                if isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[-1] in largest:
                    size = tensor.shape[-1]
                    largest[size] = max(largest[size], tensor.numel() // size)
            return made

    monkeypatch.setattr("trainers.objective.CHUNK_LOGITS", 6 * 300)
    with Watch():
        gradients(head, unrolled_loss(head, batch, frozen))
    num_positions = int(batch.loss_mask.sum())
    assert num_positions > 32
    assert largest[300] <= 32  # the embedding and lm_head, transposed, have as many rows as the target is wide
    assert largest[90] <= max(32, 6 * 300 // 90)


def test_a_batch_without_a_supervised_position_has_no_loss_and_no_gradient(
    harvested: Path, frozen: FrozenTarget, samples: list[Sample]
) -> None:
    """As a rank may find in its share."""
    head, batch = random_head(harvested, frozen, draft_vocab_size=90), Batch.collate(samples, torch.float32)
    batch.loss_mask.zero_()
    loss = unrolled_loss(head, batch, frozen, counts=torch.full((UNROLL,), 5.0))
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients(head, loss).values())


def test_activation_checkpoints_leave_loss_and_gradient_as_they_are(
    harvested: Path, frozen: FrozenTarget, samples: list[Sample]
) -> None:
    """A step that is computed again must find the keys that it found the first time, and no more."""
    for head, objective in each_head(harvested, frozen)[:4]:
        batch = batch_for(head, samples)
        plain = unrolled_loss(head, batch, frozen, objective=objective)
        saving = unrolled_loss(head, batch, frozen, objective=objective, checkpointing=True)
        assert torch.equal(saving, plain)
        assert_close(gradients(head, saving), gradients(head, plain), rtol=0, atol=0)


def test_noise_belongs_to_its_sample_and_step() -> None:
    noise = input_noise(0.2, [3, 64, 512], ["0 5 11", "0 5 12", "0 5 13"], 400, "cpu")
    assert noise.shape == (3, 512, 400)
    for row, length in enumerate([3, 64, 512]):
        edge = 0.1 * 512 / length
        assert 0.99 * edge < noise[row].abs().max() <= edge
        assert abs(noise[row, :length].mean()) < 0.1 * edge
        assert not noise[row, length:].any()
    assert torch.equal(input_noise(0.2, [64], ["0 5 12"], 400, "cpu")[0], noise[1, :64])  # whoever is beside it
    assert not torch.equal(input_noise(0.2, [64], ["0 6 12"], 400, "cpu")[0], noise[1, :64])


def test_noise_is_laid_on_the_features_of_the_target_alone(
    harvested: Path, frozen: FrozenTarget, samples: list[Sample]
) -> None:
    """Adding it to the projected features is the same as reading a text whose features were so."""
    head = random_eagle1_head(frozen)
    batch = batch_for(head, samples)
    unrolled = UnrolledHead(head, Teacher(frozen, head.vocab), EAGLE_1)
    supervision, noise = unrolled.teacher.supervise(batch), torch.randn(*batch.tokens.shape, 32)
    noisy = unrolled(batch, supervision, supervision.counts(UNROLL), noise).loss
    assert noisy != unrolled(batch, supervision, supervision.counts(UNROLL)).loss
    project = head.project

    class Shifted(Eagle1Head):
        def project(self, taps: Tensor) -> Tensor:
            return project(taps) + noise if taps.ndim == 3 else project(taps)

    head.__class__ = Shifted
    assert_close(unrolled(batch, supervision, supervision.counts(UNROLL)).loss, noisy)


def test_an_objective_is_its_papers_unless_the_recipe_says_otherwise(make_recipe: Callable[..., Recipe]) -> None:
    assert Objective.from_recipe(make_recipe("a", "train.unroll=4")) == EAGLE_3
    eagle1 = "head={kind: eagle1}", "train.unroll=4"
    assert Objective.from_recipe(make_recipe("b", *eagle1)) == EAGLE_1
    own = "train.objective=log_acceptance", "train.regression_weight=0", "train.input_noise=0.5"
    assert Objective.from_recipe(make_recipe("b", *eagle1, *own, "train.unroll_weights=[0, 1, 1, 2]")) == Objective(
        "log_acceptance", 0.1, 0.0, 0.5, (0.0, 1.0, 1.0, 2.0)
    )
    with pytest.raises(ValueError, match=r"train\.regression_weight: 1\.0 given, 0 or null is allowed"):
        make_recipe("a", "train.regression_weight=1.0")
    with pytest.raises(ValueError, match=r"train\.unroll_weights: \[1\] given, a list of 3 weights"):
        make_recipe("a", "train.unroll_weights=[1]")


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


def padded(batch: Batch, count: int, garbage: bool) -> Batch:
    """The batch with `count` more places behind it; `garbage` also fills what lies behind each sample's end."""

    def widened(tensor: Tensor) -> Tensor:
        wider = tensor.new_zeros(tensor.shape[0], tensor.shape[1] + count, *tensor.shape[2:])
        wider[:, : tensor.shape[1]] = tensor
        return wider

    wide = Batch(widened(batch.tokens), widened(batch.loss_mask), widened(batch.taps), widened(batch.last_hidden))
    if garbage:
        behind = wide.loss_mask.flip(1).cumsum(1).flip(1) == 0  # a sample ends with its response
        assert behind[:, -count:].all()
        wide.tokens[behind] = torch.randint(1, 300, (int(behind.sum()),))
        for features in (wide.taps, wide.last_hidden):
            features[behind] = torch.randn(int(behind.sum()), features.shape[-1]) * 30
    return wide


@pytest.mark.parametrize("garbage", [False, True], ids=["padding", "garbage behind the end"])
@pytest.mark.parametrize("section", VARIANTS.values(), ids=VARIANTS.keys())
def test_what_lies_behind_a_samples_end_changes_neither_loss_nor_gradient(
    harvested: Path, frozen: FrozenTarget, samples: list[Sample], section: dict[str, Any], garbage: bool
) -> None:
    head = random_head(harvested, frozen, **section)
    batch = Batch.collate(samples, torch.float32)
    loss = unrolled_loss(head, batch, frozen)
    wider = unrolled_loss(head, padded(batch, 9, garbage), frozen)
    assert_close(wider, loss, rtol=1e-6, atol=1e-6)
    assert_close(gradients(head, wider), gradients(head, loss), rtol=1e-5, atol=1e-6)


def test_no_position_is_scored_on_what_the_sample_does_not_hold(
    harvested: Path, frozen: FrozenTarget, samples: list[Sample]
) -> None:
    """The last scored index is T - 3: it takes token T - 2 and guesses token T - 1, which the target's hidden state
    of T - 2 stands for. So the last token, the last hidden state and the last two taps are never used."""
    head = random_head(harvested, frozen)

    def loss_with(change: Callable[[Sample], None]) -> Tensor:
        [longest] = samples[-1:]
        copy = Sample(*(tensor.clone() for tensor in vars(longest).values()))
        change(copy)
        return unrolled_loss(head, Batch.collate([copy], torch.float32), frozen)

    def disturb(name: str, place: int) -> Callable[[Sample], None]:
        return lambda sample: getattr(sample, name)[place].add_(1)

    unchanged = loss_with(lambda sample: None)
    for name, place in (("tokens", -1), ("last_hidden", -1), ("taps", -1), ("taps", -2)):
        assert loss_with(disturb(name, place)) == unchanged, f"{name} at {place} is used"
    for name, place in (("tokens", -2), ("last_hidden", -2), ("taps", -3)):
        assert loss_with(disturb(name, place)) != unchanged, f"{name} at {place} is not used"


@pytest.mark.parametrize("section", VARIANTS.values(), ids=VARIANTS.keys())
def test_parts_of_a_batch_add_up_to_its_gradient(
    harvested: Path, frozen: FrozenTarget, samples: list[Sample], section: dict[str, Any]
) -> None:
    """Ranks hold samples of different lengths; dividing by the positions of all of them is what makes this true."""
    head = random_head(harvested, frozen, **section)
    whole = Batch.collate(samples, torch.float32)
    counts = Teacher(frozen, head.vocab).supervise(whole).counts(UNROLL)
    parts = [Batch.collate(samples[start::2], torch.float32) for start in (0, 1)]
    losses = [unrolled_loss(head, part, frozen, counts) for part in parts]
    loss = unrolled_loss(head, whole, frozen)
    assert_close(losses[0] + losses[1], loss, rtol=1e-6, atol=1e-6)
    assert_close(gradients(head, losses[0] + losses[1]), gradients(head, loss), rtol=1e-5, atol=1e-6)


def test_a_part_without_a_supervised_position_adds_nothing(
    harvested: Path, frozen: FrozenTarget, samples: list[Sample]
) -> None:
    head = random_head(harvested, frozen)
    silent = replace(samples[0], loss_mask=torch.zeros_like(samples[0].loss_mask))
    loss = unrolled_loss(head, Batch.collate([silent], torch.float32), frozen)
    assert loss == 0
    assert all(gradient.abs().max() == 0 for gradient in gradients(head, loss).values())


# The learning rate


def test_the_learning_rate_is_a_function_of_the_step_alone() -> None:
    section = TrainSection(steps=50, warmup_steps=10, learning_rate=1e-3, muon_learning_rate=2e-2, optimizer="muon")
    head = nn.ModuleDict({"fc": nn.Linear(4, 4, bias=False), "lm_head": nn.Linear(4, 4, bias=False)})

    def rates(steps: list[int]) -> dict[int, tuple[float, ...]]:
        optimizers = build_optimizers(head, section)
        found = {}
        for step in steps:
            set_learning_rates(optimizers, section, step)
            found[step] = tuple(group["lr"] for optimizer in optimizers for group in optimizer.param_groups)
        return found

    in_order = rates(list(range(50)))
    assert rates([49, 7, 0, 7, 30, *range(50)]) == in_order
    adamw, muon = zip(*in_order.values(), strict=True)
    assert_close(list(adamw[:10]), [1e-4 * (step + 1) for step in range(10)])  # linear, never zero
    assert max(adamw) == adamw[10] == 1e-3
    assert all(later < earlier for earlier, later in itertools.pairwise(adamw[10:]))
    assert_close(adamw[30], 1e-3 * 0.5)  # half way down the cosine
    assert 0 < adamw[49] < 1e-3 * 0.01
    assert_close([rate * 20 for rate in adamw], list(muon))


# Checkpoints


def small_head(optimizer: str = "muon") -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    head = nn.ModuleDict({"fc": nn.Linear(4, 3), "lm_head": nn.Linear(3, 5)})
    return head, build_optimizers(head, TrainSection.model_validate({"steps": 9, "optimizer": optimizer}))


def saved(folder: Path, *steps: int, keep: int = 2, **inputs: object) -> Checkpoints:
    checkpoints = Checkpoints(folder, inputs, keep)
    for step in steps:
        checkpoints.save(step, *small_head())
    return checkpoints


def test_no_checkpoint_is_step_0(tmp_path: Path) -> None:
    assert saved(tmp_path / "none").resume(*small_head()) == 0


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5, 10, 95, 100, keep=3)  # by number, not by name
    assert checkpoints.steps() == [10, 95, 100]
    assert checkpoints.resume(*small_head()) == 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-100", "step-95"]


def test_a_half_written_checkpoint_is_ignored(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5)
    (tmp_path / "step-10.partial").mkdir()
    (tmp_path / "step-10.partial/head.safetensors").write_bytes(b"half")
    assert checkpoints.steps() == [5]
    assert checkpoints.resume(*small_head()) == 5
    checkpoints.save(10, *small_head())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-5"]


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("file", ["head.safetensors", "optimizers.safetensors", "state.json"])
@pytest.mark.parametrize("damage", [cut_in_half, Path.unlink])
def test_an_unreadable_newest_checkpoint_stops_with_its_name(
    tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    """Going back to the one before is the user's decision."""
    checkpoints = saved(tmp_path, 5, 10)
    damage(tmp_path / "step-10" / file)
    head, optimizers = small_head()
    with pytest.raises(ValueError, match=r"step-10 cannot be read .* remove it to resume from the one before"):
        checkpoints.resume(head, optimizers)
    shutil.rmtree(tmp_path / "step-10")
    assert checkpoints.resume(head, optimizers) == 5


def test_a_checkpoint_of_other_inputs_is_refused_with_each_difference(tmp_path: Path) -> None:
    saved(tmp_path, 5, seed=1, betas=(0.9, 0.95), unroll=7)
    assert saved(tmp_path, seed=1, betas=(0.9, 0.95), unroll=7).resume(*small_head()) == 5
    with pytest.raises(ValueError, match="step-5 belongs to another recipe") as refusal:
        saved(tmp_path, seed=2, betas=(0.9, 0.95), decay=0.8).resume(*small_head())
    assert [line.strip() for line in str(refusal.value).splitlines()][1:-1] == [
        "decay: checkpoint None, recipe 0.8",
        "seed: checkpoint 1, recipe 2",
        "unroll: checkpoint 7, recipe None",
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_gives_back_weights_and_optimizers_exactly(tmp_path: Path, optimizer: str) -> None:
    def update(head: nn.Module, optimizers: list[torch.optim.Optimizer], number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in head.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for each in optimizers:
            each.step()

    head, optimizers = small_head(optimizer)
    for number in range(3):
        update(head, optimizers, number)
    Checkpoints(tmp_path, {}, 2).save(3, head, optimizers)
    update(head, optimizers, 3)
    again, optimizers_again = small_head(optimizer)
    Checkpoints(tmp_path, {}, 2).resume(again, optimizers_again)
    update(again, optimizers_again, 3)
    for name, tensor in head.state_dict().items():
        assert again.state_dict()[name].equal(tensor), name


# The loop


class Killed(BaseException):
    """What no code of ours may catch."""


@pytest.fixture
def kill_in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    """`with kill_in_step(n)`: training in there dies in its n-th step."""

    class Trap:
        def __init__(self, step: int) -> None:
            self.step = step

        def __enter__(self) -> None:
            left, train_step = iter(range(self.step - 1)), loop.train_step

            def dying(*arguments: Any) -> Any:
                if next(left, None) is None:
                    raise Killed
                return train_step(*arguments)

            monkeypatch.setattr(loop, "train_step", dying)

        def __exit__(self, kind: Any, *rest: object) -> bool:
            monkeypatch.undo()
            return bool(kind is Killed)

    return Trap


def rows(recipe: Recipe) -> list[tuple[int, str]]:
    """(step, what was measured) of every row of the metrics."""
    lines = [json.loads(line) for line in recipe.metrics_path.read_text().splitlines()]
    return [(line["step"], next(name.partition("/")[0] for name in line if "/" in name)) for line in lines]


def numbers(recipe: Recipe) -> list[dict[str, float]]:
    """All rows but for what the clock says."""
    lines = [json.loads(line) for line in recipe.metrics_path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if "per_second" not in name} for line in lines]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("killed_in", [2, 5, 7])
def test_a_resumed_run_ends_like_an_uninterrupted_one(
    make_recipe: Callable[..., Recipe], kill_in_step: Callable[[int], Any], optimizer: str, killed_in: int
) -> None:
    """steps        1 2 3 4 5 6 7 8, checkpoints behind 4 and 8
    killed in 7     1 2 3 4 5 6 x
    resumed                 5 6 7 8   the same weights, moments and numbers, bit for bit"""
    options = f"train.optimizer={optimizer}", "train.muon_learning_rate=0.02", "train.weight_decay=0.01"
    whole, cut = make_recipe("whole", *options), make_recipe("cut", *options)
    run(whole)
    with kill_in_step(killed_in):
        run(cut)
    done = 4 * (killed_in > 4)
    assert [path.name for path in cut.checkpoints_dir.glob("step-*")] == ([f"step-{done}"] if done else [])
    assert not cut.head_dir.exists()
    run(cut)
    assert contents(cut.checkpoints_dir) == contents(whole.checkpoints_dir)
    assert contents(cut.head_dir) == contents(whole.head_dir)
    assert numbers(cut) == numbers(whole)
    assert rows(cut) == [
        row for step in range(1, 9) for row in [(step, "train"), *[(step, "heldout")] * (step % 4 == 0)]
    ]


EAGLE_1_RUN = "head={kind: eagle1}", "train.activation_checkpointing=true", "train.objective=blended_acceptance"


def test_an_eagle_1_run_resumes_and_ends_in_a_head_that_can_be_loaded(
    make_recipe: Callable[..., Recipe], kill_in_step: Callable[[int], Any], frozen: FrozenTarget
) -> None:
    """Its input noise is drawn anew in every step, the same for the same step."""
    whole, cut = make_recipe("whole", *EAGLE_1_RUN), make_recipe("cut", *EAGLE_1_RUN)
    for recipe in (whole, cut):
        shutil.rmtree(recipe.features_dir)  # those of an EAGLE-3 head
    run(whole)
    with kill_in_step(6):
        run(cut)
    run(cut)
    assert contents(cut.head_dir) == contents(whole.head_dir)
    assert numbers(cut) == numbers(whole)
    losses = [line["heldout/loss_0"] for line in numbers(whole) if "heldout/loss_0" in line]
    assert losses[1] < losses[0]
    assert FeatureStore(whole.features_dir, "train")[0].taps.shape[1] == 0  # the last hidden state is stored once
    assert isinstance(load_head(whole.head_dir, frozen), Eagle1Head)


def test_a_plain_eagle_3_head_is_saved_with_the_scales_of_its_taps(
    make_recipe: Callable[..., Recipe], harvested: Path, frozen: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved head reads the target's hidden states as they are, and gives the features that were trained."""
    trained: list[Eagle3Head] = []

    def watching(head: Eagle3Head, folder: Path) -> None:
        trained.append(head)
        save_head(head, folder)

    monkeypatch.setattr("trainers.eagle.save_head", watching)
    recipe = make_recipe("run")
    run(recipe)
    [head], saved = trained, load_head(recipe.head_dir, frozen)
    assert head.tap_scale is not None
    assert head.tap_scale.max() < 1  # the hidden states of this target are large
    taps = FeatureStore(recipe.features_dir, "train")[0].taps
    assert torch.equal(saved.project(taps), head.project(taps))


def test_what_is_logged_does_not_change_the_weights(make_recipe: Callable[..., Recipe]) -> None:
    """Measuring, logging and saving more often, and decoding held-out prompts, leave the training alone."""
    seldom, often = make_recipe("seldom", "train.log_every=8"), make_recipe("often")
    run(seldom)
    run(often.model_copy(update={"train": often.train.model_copy(update={"eval_every": 2, "eval_prompts": 2})}))
    weights = [contents(recipe.head_dir)["model.safetensors"] for recipe in (seldom, often)]
    assert weights[0] == weights[1]
    taus = [line["heldout/tau"] for line in numbers(often) if "heldout/tau" in line]
    assert len(taus) == 4
    assert all(1 <= tau <= often.decode.depth + 1 for tau in taus)


def test_every_step_trains_on_its_samples_of_the_order(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, seen, train_step = make_recipe("run"), [], loop.train_step

    def watching(*arguments: Any) -> Any:
        seen.extend(next(argument for argument in arguments if isinstance(argument, list) and argument[0] in range(99)))
        return train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", watching)
    run(recipe)
    order = SampleOrder(recipe.data.num_prompts, recipe.seed)
    assert seen == [order[place] for place in range(recipe.train.steps * recipe.train.batch_size)]


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("train.learning_rate=2e-3", "train.learning_rate: checkpoint 0.001, recipe 0.002"),
        ("train.steps=9", "train.steps: checkpoint 8, recipe 9"),
        ("head.draft_vocab_size=81", "head.draft_vocab_size: checkpoint 80, recipe 81"),
    ],
)
def test_a_checkpoint_of_another_recipe_is_refused_by_field(
    make_recipe: Callable[..., Recipe], kill_in_step: Callable[[int], Any], override: str, difference: str
) -> None:
    with kill_in_step(6):
        run(make_recipe("run"))
    other = make_recipe("run", override)
    before = contents(other.run_dir)
    with pytest.raises(ValueError, match="step-4 belongs to another recipe") as refusal:
        run(other)
    assert [line.strip() for line in str(refusal.value).splitlines()][1:-1] == [difference]
    assert contents(other.run_dir) == before


def stopped_in(recipe: Recipe, step: int, what: str) -> None:
    """A run stops in this step, counted from 1, before the step has touched the weights."""
    spoiled = SampleOrder(recipe.data.num_prompts, recipe.seed).of_step(step - 1, recipe.train.batch_size)
    with pytest.raises(ValueError, match=f"the {what} of step {step} is not finite") as refusal:
        run(recipe)
    assert f"samples {spoiled}" in str(refusal.value)
    assert not recipe.head_dir.exists()
    assert max(recipe.checkpoints_dir.glob("step-*")).name == f"step-{step - 1}"
    newest = load_file(recipe.checkpoints_dir / f"step-{step - 1}/head.safetensors")
    assert all(tensor.isfinite().all() for tensor in newest.values())


def test_a_loss_that_is_not_finite_stops_at_once_with_its_step_and_samples(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the next metrics are due: by then the samples are others and the weights are gone."""
    steps, collate = iter(range(1, 9)), Batch.collate

    def spoil_the_third(samples: list[Sample], *rest: Any) -> Batch:
        batch = collate(samples, *rest)
        if next(steps) == 3:
            batch.taps[0, 1] = math.nan
        return batch

    monkeypatch.setattr(Batch, "collate", spoil_the_third)
    stopped_in(make_recipe("run", "train.log_every=8", "train.checkpoint_every=1"), step=3, what="loss")


def test_a_gradient_that_is_not_finite_stops_before_it_reaches_the_weights(make_recipe: Callable[..., Recipe]) -> None:
    """The loss of weights around 1e30 is a number, as they are normalised; its derivative is not."""
    options = "train.learning_rate=1e30", "train.warmup_steps=0", "train.log_every=8", "train.checkpoint_every=1"
    stopped_in(make_recipe("run", *options), step=2, what="gradient")


# The command


def start(recipe: Path, *overrides: str) -> subprocess.Popen[str]:
    """The documented command, in a process of its own and from another folder."""
    command = [sys.executable, str(ROOT / "trainers/eagle.py"), str(recipe), "log.wandb=auto", *overrides]
    return subprocess.Popen(
        command,
        cwd=recipe.parent,
        env=quiet_environment(ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


LONGER = "train.steps=60", "train.checkpoint_every=5", "train.eval_every=20"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the command ran from nothing to a head."""
    folder = tmp_path_factory.mktemp("finished")
    output = finish(start(build_run(folder), *LONGER, "train.eval_prompts=1"))
    assert "head written to" in output
    return folder


def test_one_command_makes_everything_and_the_same_again_changes_nothing(finished: Path) -> None:
    before = contents(finished / "run")
    folders = {name.partition("/")[0] for name in before}
    assert folders == {"prompts", "responses", "features", "checkpoints", "metrics.jsonl", "head"}
    assert "head/config.json" in before
    assert load_file(finished / "run/head/model.safetensors")["d2t"].shape == (80,)
    assert not [name for name in before if "partial" in name]
    output = finish(start(finished / "recipe.yaml", *LONGER, "train.eval_prompts=1"))
    assert contents(finished / "run") == before
    assert "shards" not in output  # no stage ran


def test_a_run_killed_at_any_moment_ends_in_the_same_head(finished: Path, tmp_path: Path) -> None:
    killed = tmp_path / "run"
    for stage in ("prompts", "responses", "features"):
        shutil.copytree(finished / "run" / stage, killed / stage)
    last, metrics = random.SystemRandom().randint(1, 45), killed / "metrics.jsonl"  # the law holds for every step
    process = start(finished / "recipe.yaml", *LONGER, f"run_dir={killed}")
    while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < last):
        time.sleep(0.001)
    time.sleep(random.SystemRandom().uniform(0, 0.01))
    process.kill()
    output, _ = process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0), output  # 0: a busy machine let it end before we looked
    left = sorted(path.name for path in killed.glob("*/step-*"))
    finish(start(finished / "recipe.yaml", *LONGER, f"run_dir={killed}"))
    expected = (finished / "run/head/model.safetensors").read_bytes()
    assert (killed / "head/model.safetensors").read_bytes() == expected, f"killed behind step {last} of 60, at {left}"
    assert not list(killed.glob("*/*.partial"))


@pytest.mark.slow
def test_two_ranks_write_the_same_files_and_all_but_the_same_head(finished: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, str(ROOT / "trainers/eagle.py"), str(finished / "recipe.yaml"), *LONGER]
    environment = {**quiet_environment(ROOT), "ACCELERATE_USE_CPU": "true"}
    subprocess.run([*command, f"run_dir={tmp_path / 'run'}"], env=environment, check=True, timeout=300)
    for stage in ("prompts", "responses", "features"):
        assert contents(tmp_path / "run" / stage) == contents(finished / "run" / stage)
    one, two = (load_file(folder / "run/head/model.safetensors") for folder in (finished, tmp_path))
    assert_close(two, one, rtol=1e-3, atol=1e-4)  # they add up in another order


def test_a_wandb_run_starts_offline_and_keeps_its_id_when_resumed(make_recipe: Callable[..., Recipe]):
    recipe = make_recipe("wandb", "log.wandb=offline")
    ids = []
    for first_step in (0, 2):
        with Tracker(recipe, first_step, active=True) as tracker:
            tracker.log(first_step + 1, {"train/loss_0": 1.0}, "training")
            ids.append(tracker.run.id)
    assert ids[0] == ids[1]
    assert list((recipe.run_dir / "wandb").glob(f"offline-run-*-{ids[0]}"))
