"""Laws of a step: micro-batches and number formats only change rounding; learning rates depend on the step alone."""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from matrix import slow
from tiny_run import make_dense
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from headstart.data_pipelines.features.batches import TrainingBatch
from headstart.data_pipelines.features.shards import FeatureStore, stored_taps
from headstart.data_pipelines.harvest import harvest
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import head_taps
from headstart.heads.target_config import locate_target
from headstart.recipes import Recipe
from headstart.recipes.schema_train import TrainSection
from headstart.trainers import step as step_module
from headstart.trainers import train as run
from headstart.trainers.loop import SampleOrder
from headstart.trainers.new_head import build_head, start_of_run
from headstart.trainers.parallel import muon
from headstart.trainers.parallel.head_on_ranks import ReplicatedHead, build_optimizers, set_learning_rates
from headstart.trainers.parallel.launch import start_accelerator


def one_step(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> tuple[step_module.StepResult, dict[str, Tensor]]:
    found: dict[str, Tensor] = {}

    def watching(head_on_ranks: ReplicatedHead) -> float:
        for name, parameter in head_on_ranks.unrolled.head.named_parameters():
            assert parameter.grad is not None
            found[name] = parameter.grad.clone()
        return 1.0

    monkeypatch.setattr(ReplicatedHead, "update", watching)
    training, numbers = start_training(recipe), SampleOrder([5, 5, 2], recipe.seed).of_step(0, recipe.train.batch_size)
    return step_module.train_step(training, 0, numbers), found


def start_training(recipe: Recipe) -> step_module.Training:
    features = harvest(recipe)
    frozen = FrozenTarget.from_folder(locate_target(recipe.target.path), torch.float32)
    taps = stored_taps(head_taps(recipe.head, frozen.config), frozen.config.num_layers)
    stores = [FeatureStore(features.folder, split, taps) for split in ("train", "heldout")]
    head = build_head(recipe, frozen, start_of_run(recipe, features, frozen, stores[0]))
    make_dense(head, 0.1)
    inputs = step_module.TrainingInputs(frozen, stores[0], stores[1], None)
    return step_module.Training.start(recipe, head, inputs, start_accelerator(recipe), None)


@pytest.mark.parametrize(
    "head", ["{kind: eagle3, draft_vocab_size: 80}", "{kind: eagle1}", "{kind: block, block_size: 4, taps: [2, 3, 4]}"]
)
def test_micro_batches_give_the_loss_and_gradient_of_the_whole_batch(make_recipe, monkeypatch, head):
    """The samples differ in length, in supervised tokens and, for EAGLE-1, in input noise."""
    options = f"head={head}", "train.batch_size=7", f"train.unroll={4 if 'block' in head else 3}"
    whole, gradient = one_step(make_recipe("run", *options), monkeypatch)
    for count in (3, 7) if "eagle3" in head else (3,):
        result, split = one_step(make_recipe("run", *options, f"train.accumulate={count}"), monkeypatch)
        assert_close(result.sums, whole.sums, rtol=1e-5, atol=1e-5)
        assert result.num_tokens == whole.num_tokens
        largest = {key: float(value.abs().max()) for key, value in gradient.items()}
        for key, value in split.items():
            assert_close(value, gradient[key], rtol=1e-5, atol=1e-5 * largest[key])


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("head", "trained_on"),
    [
        ("{kind: eagle3}", [1]),  # its feature would be that of the token before the first
        ("{kind: medusa, medusa_heads: 3}", [0, 1]),
        (
            "{kind: block, block_size: 3, taps: [2, 3, 4]}",
            [1, 3, 5],
        ),  # an anchor and the token after it must be trained on
        ("{kind: eagle3, draft_vocab_size: 80}", []),
    ],
)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_run_without_a_token_to_learn_stops_before_its_first_step(make_recipe, head, trained_on, split):
    training = start_training(make_recipe("run", f"head={head}"))
    step_module.refuse_nothing_to_learn(training)
    samples = []
    for number in range(3):
        sample = vars(training.inputs)[split][number]
        places = torch.isin(torch.arange(len(sample.tokens)), torch.tensor(trained_on))
        samples.append(replace(sample, loss_mask=places if trained_on else sample.loss_mask))
    if not trained_on:
        training.head.unrolled.teacher.column.fill_(-1)  # a draft vocabulary without any choice of the target
    spoiled: dict[str, Any] = {split: samples}
    with pytest.raises(ValueError, match="samples hold no token to learn"):
        step_module.refuse_nothing_to_learn(replace(training, inputs=replace(training.inputs, **spoiled)))


def test_one_micro_batch_of_features_is_in_memory_at_a_time(make_recipe, monkeypatch):
    alive: list[weakref.ref[TrainingBatch]] = []
    most, on_device = [0], TrainingBatch.to

    def watching(stored: TrainingBatch, device: torch.device, dtype: torch.dtype | None = None) -> TrainingBatch:
        batch = on_device(stored, device, dtype)
        if dtype is not None:
            alive.append(weakref.ref(batch))
            most[0] = max(most[0], sum(each() is not None for each in alive))
        return batch

    monkeypatch.setattr(TrainingBatch, "to", watching)
    recipe = make_recipe("run", "train.batch_size=8", "train.accumulate=4")
    one_step(recipe, monkeypatch)
    assert len(alive) == 4 + 3  # counted, then trained on; the last one is not read again
    assert most[0] <= 2  # the next one is read before the variable drops the one before
    *earlier, last = step_module.count_micro_batches(start_training(recipe), 0, list(range(8)))
    assert len(earlier) == 3
    assert not any(each.supervision.last_hidden.untyped_storage().nbytes() for each in earlier)
    assert [each.features for each in earlier] == [None] * 3
    assert last.features is not None  # with one micro-batch nothing is read twice


@pytest.mark.parametrize(
    "head",
    [
        "{kind: eagle3, draft_vocab_size: 80}",
        slow("{kind: eagle1}"),
        slow("{kind: medusa, medusa_heads: 3}"),
        "{kind: medusa, medusa_heads: 3, lm_head_rank: 4}",
        slow("{kind: block, block_size: 3, taps: [2, 3, 4]}"),
        slow("{kind: block, block_size: 4, markov_rank: 0, taps: [2, 3, 4]}"),
    ],
)
def test_training_in_bfloat16_follows_training_in_float32(make_recipe: Callable[..., Recipe], head: str) -> None:
    losses = {}
    for precision in ("float32", "bfloat16"):
        training = start_training(make_recipe("run", f"head={head}", f"train.precision={precision}"))
        order = SampleOrder(training.inputs.train.shard_sizes, seed=3)
        results = [step_module.train_step(training, step, order.of_step(0, 3)) for step in range(6)]
        losses[precision] = torch.stack([result.sums[1] / result.sums[0] for result in results])  # [steps, levels]
        state = training.head.optimizer_state().values()
        assert {tensor.dtype for tensor in (*training.head.unrolled.head.parameters(), *state)} == {torch.float32}
    assert not torch.equal(losses["bfloat16"], losses["float32"])  # it is in effect
    assert losses["float32"][-1].sum() < losses["float32"][0].sum()
    assert_close(losses["bfloat16"], losses["float32"], rtol=0.03, atol=0)


def test_training_on_a_gpu_allows_tf32_and_leaves_it_off_for_everything_else() -> None:
    """Float32 recipes trained at a sixth of a GPU's speed. Decoding keeps exact products, which lossless texts need."""
    matmul = torch.backends.cuda.matmul
    for device, allowed in (("cuda", True), ("cpu", False)):
        with step_module.tf32_allowed(torch.device(device)):
            assert matmul.allow_tf32 is allowed
        assert not matmul.allow_tf32
    with pytest.raises(ZeroDivisionError), step_module.tf32_allowed(torch.device("cuda")):
        raise ZeroDivisionError
    assert not matmul.allow_tf32


def test_a_launch_that_contradicts_the_recipe_is_refused(make_recipe, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match=r"train\.precision: bfloat16 .* contradicts --mixed_precision fp16"):
        run(make_recipe("run", "train.precision=bfloat16"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(ValueError, match=r"train\.accumulate: 1 .* contradicts --gradient_accumulation_steps 4"):
        run(make_recipe("run"))


def test_the_learning_rates_of_both_optimizers_are_a_function_of_the_step_alone() -> None:
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
    assert_close(adamw[30], 1e-3 * 0.5)  # halfway down the cosine
    assert 0 < adamw[49] < 1e-3 * 0.01
    assert_close([rate * 20 for rate in adamw], list(muon))


@pytest.mark.parametrize("shape", [(6, 16), (16, 6)])
def test_muon_without_bfloat16_instructions_iterates_in_float32(shape, monkeypatch):
    def trained(optimizer_class: type[torch.optim.Muon]) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(shape, generator=generator))
        optimizer = optimizer_class([weight], lr=0.1, weight_decay=0.0)
        for _ in range(3):
            weight.grad = torch.randn(shape, generator=generator)
            optimizer.step()
        return weight.detach()

    monkeypatch.setattr(muon, "has_bfloat16", lambda device: True)
    assert trained(muon.Muon).equal(trained(torch.optim.Muon))  # torch's iterates in bfloat16
    monkeypatch.setattr(muon, "has_bfloat16", lambda device: False)
    in_float32 = trained(muon.Muon)
    assert not in_float32.equal(trained(torch.optim.Muon))
    assert_close(in_float32, trained(torch.optim.Muon), atol=0.02, rtol=0)


@pytest.mark.parametrize("rows", [64, 257, 576])
def test_half_of_muon_s_symmetric_product_was_computed_twice(rows: int) -> None:
    matrix = torch.randn(rows, 600)
    with FlopCounterMode(display=False) as counted:
        gram = muon.gram_of(matrix)
    assert_close(gram, matrix @ matrix.T, rtol=1e-5, atol=1e-3)
    assert counted.get_total_flops() <= (0.76 if rows > 2 * muon.SYMMETRIC_ROWS else 1) * 2 * rows * rows * 600


def test_a_long_prompt_was_computed_in_every_step_of_the_unroll(make_recipe: Callable[..., Recipe]) -> None:
    training = start_training(make_recipe("run", "train.unroll=5"))
    heads, flops = training.head.unrolled, []
    sample = training.inputs.train[0]
    tokens = len(sample.tokens)
    for trained_on in (2, tokens - 4):  # from the second token on, or the last ones alone
        mask = torch.arange(tokens) >= trained_on
        batch = TrainingBatch.collate([replace(sample, loss_mask=mask)])
        with FlopCounterMode(display=False) as counted:
            supervision = heads.supervise(batch, "0")
            heads.unroll(batch, supervision, None)
        flops.append(counted.get_total_flops())
    assert flops[1] < flops[0] * (1 + 4 * 9 / tokens) / 5 * 1.2  # step 0 reads all, the others 4 + 5 indices
