"""Laws of decoding and training on GPUs, tried on pretended ones: nothing waits in a CUDA graph, no devices are mixed,
and the numbers are those of the CPU."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from drafting import a_sample
from matrix import slow_unless
from pretended_cuda import CUDA, SECOND, Replayed, Seen, WrongDevice, on_two_cards, pretended_cuda
from scripted import SetCosts, answered, finish
from shared_fixtures import HeadFactory, ModelFactory
from torch import Tensor
from torch.testing import assert_close

from headstart.data_pipelines.features.batches import Sample, SampleStore
from headstart.data_pipelines.features.features import tap
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block_attention import Reach
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.drafter import PLAIN, Drafter
from headstart.inference.core.request import Generation, Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import VerifiedOnHost, VerifiedRow
from headstart.inference.drafters.costs import CostAware
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic, Fixed, Growth, GrowthPolicy
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.drafters.repeats import Repeats
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.targets.cuda_graph import StaticStep
from headstart.inference.targets.model import TargetModel
from headstart.recipes import load_recipe
from headstart.trainers.evaluation import held_out_metrics
from headstart.trainers.step import StepResult, Training, TrainingInputs, train_step

LIMITED = DraftVocab(torch.arange(0, 97, 4), 97)
HEADS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle1"},
    "eagle3": {"kind": "eagle3"},
    "eagle3, 25 tokens": {"kind": "eagle3", "vocab": LIMITED},
    "peagle": {"kind": "peagle"},
    "medusa": {"kind": "medusa"},
    "dspark": {"kind": "block", "markov_rank": 8},
    "dflash": {"kind": "block", "sample_from_anchor": False},
}
GROWTHS: dict[str, GrowthPolicy] = {
    "chain": Dynamic.chain(3),
    "dynamic": Dynamic(3, 4, 9),
    "fixed": Fixed(((0,), (1,), (0, 0), (0, 1))),
}
MIXES = {  # the sampling of neighbouring rows, in turn
    "greedy": [Sampling()],
    "T=1": [Sampling(1.0)],
    "top-p": [Sampling(0.7, top_k=20, top_p=0.9, min_p=0.05)],
    "bias": [Sampling(0.7, logit_bias=((3, 1.0), (5, -9.0)))],
    "mixed": [Sampling(), Sampling(1.0), Sampling(0.7, top_p=0.9)],
    "penalties": [Sampling(0.8, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.1)],
}
CAPTURED = ["greedy", "T=1", "top-p", "bias", "mixed"]  # those that a captured step serves, whatever the rows
TINY = Path(__file__).parents[3] / "recipes/tiny.yaml"


@pytest.fixture
def cuda() -> Iterator[Seen]:
    with pretended_cuda() as seen:
        yield seen


def rows_of(mix: str, count: int) -> list[Sampling]:
    return [replace(MIXES[mix][row % len(MIXES[mix])], seed=row) for row in range(count)]


Work = Callable[[Tensor], object]
READ: list[Work] = [lambda x: x[0].item(), lambda x: 1 if (x > 0).any() else 2, lambda x: x[: x[0]], Tensor.cpu]
READ += [lambda x: x[x > 0], lambda x: torch.zeros(3).copy_(x)]
CROSSED: list[Work] = [lambda x: torch.tensor([1, 2, 3], device=x.device), lambda x: torch.arange(3).to(x.device)]
CROSSED += [lambda x: x[torch.tensor([1])], lambda x: x.clone().copy_(torch.arange(3))]
FREE: list[Work] = [
    lambda x: torch.where(x > 0, x, x.new_zeros(()))[x.argmax().view(1)],
    lambda x: (x + 1).masked_fill(x > 1, 0)[..., -1],  # numbers of Python
    lambda x: x * torch.tensor(2),  # a number of the host
]
WRONG: list[Work] = [lambda x: x + torch.arange(3), lambda x: x + x.to(SECOND)]
WRONG += [lambda x: x[torch.zeros(1, dtype=torch.long, device=SECOND)], lambda x: torch.cat([x, torch.arange(3)])]


def test_what_the_host_reads_and_what_is_copied_from_it_is_counted_and_devices_do_not_mix() -> None:
    for works, reads, crossings in ((READ, 1, 0), (CROSSED, 0, 1), (FREE, 0, 0)):
        for number, work in enumerate(works):
            with pretended_cuda() as seen, torch.inference_mode():
                work(torch.arange(3, device=CUDA))
            assert (sum(seen.reads.values()), sum(seen.crossings.values())) == (reads, crossings), number
    for work in WRONG:
        with pretended_cuda(), pytest.raises(WrongDevice):
            work(torch.arange(3, device=CUDA))


@pytest.mark.parametrize(
    ("name", "growth", "mix", "rows"),
    slow_unless(
        [("eagle3, 25 tokens", "fixed", "top-p", 3), ("medusa", "chain", "bias", 2), ("dspark", "dynamic", "T=1", 64)],
        [
            (name, growth, mix, rows)
            for name, growth in [(None, "chain"), *product(HEADS, GROWTHS)]
            for mix in CAPTURED
            for rows in (1, 2, 3, 64)
        ],
    ),
)
def test_no_captured_step_waits_for_anything(make_model, make_head, cuda, name, growth, mix, rows) -> None:
    """It runs twice, as texts go on: the second time, nothing that CUDA would replay meets the host."""
    head = None if name is None else copy.deepcopy(make_head(**HEADS[name])).to(CUDA)
    drafter: Drafter = PLAIN if head is None else head_drafter(head, GROWTHS[growth])
    target = TargetModel(make_model(num_hidden_layers=max((3, *drafter.taps))).to(CUDA), drafter.taps)
    sampling = BatchSampling(rows_of(mix, rows), CUDA)
    step = StaticStep(target, drafter, target.passes.new_cache(100, drafter.cache_shape, rows, static=True))
    for turn in range(2):
        counts = [1 + (row + turn) % min(drafter.depth + 1, 3) for row in range(rows)]
        held = [20 + row % 7 + 3 * turn for row in range(rows)]
        step.cache.target.set_lengths(held)
        taps = torch.randn(rows, max(counts), len(drafter.taps) * target.config.hidden_size, device=CUDA)
        tokens, roots = (torch.randint(97, (rows, count), device=CUDA) for count in (max(counts), 1))
        verified = [VerifiedRow([], held[row] - count, count, 9 - row % 3) for row, count in enumerate(counts)]
        if head is None:
            step.verify(Tree.root_only(roots), sampling)
        else:
            step(VerifiedOnHost(taps, tokens, roots, sampling, None, verified))
    assert cuda.replays == 1
    assert not cuda.in_graphs


def test_too_little_memory_for_a_graph_is_named_with_the_step_and_what_it_needed(make_model, cuda, monkeypatch) -> None:
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.2 GiB free"
    target = TargetModel(make_model().to(CUDA), ())

    def captured(self: Replayed, *inputs: Tensor) -> tuple[Tensor, ...]:
        raise torch.OutOfMemoryError(said)

    with monkeypatch.context() as patch:
        patch.setattr(Replayed, "__call__", captured)
        with pytest.raises(ValueError, match=r"decode\.max_batch: 4 given, .* of 1 nodes and 256 slots") as named:
            answered(DecodeLoop(target, PLAIN, 4), Request([5, 6], 3))
    assert said in str(named.value)
    assert "lower it or decode.nodes" in str(named.value)
    assert answered(DecodeLoop(target, PLAIN, 4), Request([5, 6], 3)).tokens  # later loops decode


Build = Callable[[TargetModel, ModelFactory, HeadFactory], Drafter]


def with_head(growth: GrowthPolicy, repeats: int = 0, **kind: Any) -> Build:
    def build(target: TargetModel, make_model: ModelFactory, make_head: HeadFactory) -> Drafter:
        head = copy.deepcopy(make_head(**kind)).to(target.device)
        return head_drafter(head, growth, Repeats(repeats) if repeats else None)

    return build


def with_draft_model(target: TargetModel, make_model: ModelFactory, make_head: HeadFactory) -> Drafter:
    device: Any = target.device  # transformers' own `to` is mistyped
    return ModelDrafter(TargetModel(make_model(num_hidden_layers=2).to(device), ()), TREE, target)


TREE = Dynamic(3, 3, 8)
DRAFTERS: dict[str, Build] = {
    "plain": lambda *_: PLAIN,
    **{name: with_head(TREE, **kind) for name, kind in HEADS.items()},
    "chain": with_head(Dynamic.chain(3), kind="eagle3"),
    "fixed tree": with_head(GROWTHS["fixed"], kind="eagle3"),
    "head and repeats": with_head(TREE, 6, kind="eagle3"),
    "cost-aware": with_head(CostAware(4, 3, 12, SetCosts()), kind="eagle3"),
    "prompt lookup": lambda *_: Lookup(Growth(4, 2, 8)),
    "draft model": with_draft_model,
}
LAST_OF_SEVEN = ("eagle1", "medusa")  # heads that read the last layer's output
PROMPTS = ([5, 6, 7, 11], [3], [9, 9, 1] * 6, [40, 41])
# What may wait for a device: the outcome of a step, a new row, what a request asks for, trials of each target, and
# transformers at a prompt without a mask. `elsewhere` are the suite's own checks.
MAY_WAIT = {"accept", "refuse_nan", "Prefill._start", "token_scores", "relative_difference", "elsewhere"}
MAY_WAIT |= {"find_packed_sequence_indices"}
ON_THE_HOST = {  # drafters that look for repetitions there, and for the noise of the tokens that they find
    "head and repeats": {"GumbelRow.at", "Tree.to"},
    "prompt lookup": {"GumbelRow.at"},
}
LEVEL_BY_LEVEL = {"CostAware.look_at"}  # where no step is captured


def decoded(target: TargetModel, drafter: Drafter, mix: str, static: bool | None = None) -> list[Generation]:
    loop = DecodeLoop(target, drafter, 3, static, prefill_chunk=32, prefix_memory=2**20)
    samplings = rows_of(mix, 4)
    for prompt, count, sampling in zip(PROMPTS, (7, 2, 4, 2), samplings, strict=True):
        loop.submit(Request(prompt, count, sampling, logprobs=len(prompt) == 2, alternatives=2))
    finish(loop)
    longest = PROMPTS[2] + loop.generations[2].tokens
    assert answered(loop, Request([*longest, 7], 3, samplings[2])).cached_tokens == 16
    loop.close()
    return [*loop.generations.values()]


MIXES_OF_DRAFTERS = [
    *((name, mix) for name in DRAFTERS for mix in ("greedy", "mixed")),
    *(("eagle3", mix) for mix in MIXES if mix not in ("greedy", "mixed")),
]


@pytest.mark.parametrize(
    ("name", "mix", "cards", "static"),
    slow_unless(
        [("eagle3", "mixed", 2, None)],
        [(*pair, *kind) for pair in MIXES_OF_DRAFTERS for kind in ((1, None), (1, False), (2, None))],
    ),
)
def test_all_drafters_write_on_pretended_cards_as_on_the_cpu(make_model, make_head, name, mix, cards, static) -> None:
    taps = (0, 1, 2, 7 if name in LAST_OF_SEVEN else 3)  # a target may give more than a head reads
    target = TargetModel(make_model(num_hidden_layers=taps[-1]), taps)
    wanted = decoded(target, DRAFTERS[name](target, make_model, make_head), mix)
    with pretended_cuda() as cuda:
        model = make_model(num_hidden_layers=taps[-1])
        target = TargetModel(on_two_cards(model) if cards == 2 else model.to(CUDA), taps)
        found = decoded(target, DRAFTERS[name](target, make_model, make_head), mix, static)
    assert [text.tokens for text in found] == [text.tokens for text in wanted]
    assert not cuda.in_graphs
    is_captured = cards == 1 and static is not False
    assert cuda.readers - (set() if is_captured else LEVEL_BY_LEVEL) <= MAY_WAIT | ON_THE_HOST.get(name, set())
    if not is_captured:
        assert not cuda.replays
    elif name in HEADS or name in ("head and repeats", "cost-aware"):
        assert bool(cuda.replays) == (mix in CAPTURED)


def test_a_target_on_two_cards_gives_the_states_that_the_cpu_gives(make_model: ModelFactory, cuda: Seen) -> None:
    texts = [[1, 2, 3], [4] * 9, [5, 6]]
    here, spread = make_model(), on_two_cards(make_model())
    wanted, found = (tap(TargetModel(model, (0, 1, 2)), texts) for model in (here, spread))
    assert found.taps.device == found.last_hidden.device == CUDA
    states = (found.taps.cpu(), found.last_hidden.cpu()), (wanted.taps, wanted.last_hidden)
    assert_close(*states, rtol=1e-3, atol=1e-3)  # on a GPU the texts are padded to a multiple of 64 tokens


class Samples(SampleStore):
    def __init__(self, taps: tuple[int, ...], hidden_size: int, num_layers: int) -> None:
        size = hidden_size * len([each for each in taps if each < num_layers])
        lengths = [9, 30, 17, 24, 12]
        self.shard_sizes, self.num_tokens = [len(lengths)], sum(lengths)
        samples = (a_sample(length, range(5, length), seed=length) for length in lengths)
        self.samples = [replace(each, taps=each.taps[:, :size]) for each in samples]

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def place_of(self, index: int) -> str:
        return f"sample {index}"

    def token_counts(self, vocab_size: int) -> Tensor:
        raise NotImplementedError


WINDOW = Reach(6, causal=True), Reach(causal=True)
PACKED, EAGLE3, BLOCK = "train.pack_tokens=40", "head={kind: eagle3}", "block, block_size: 4, mask_token_id: 96"
TRAINED: dict[str, tuple[dict[str, Any], list[str]]] = {  # the head, and what its recipe says
    "eagle1": (HEADS["eagle1"], ["head={kind: eagle1}", "train.unroll=2"]),
    "eagle3": (HEADS["eagle3"], [EAGLE3, "train.optimizer=adamw"]),
    "eagle3, packed": (HEADS["eagle3, 25 tokens"], [EAGLE3, PACKED]),
    "eagle3, checkpointed": (HEADS["eagle3, 25 tokens"], [EAGLE3, "train.activation_checkpointing=true"]),
    "eagle3, micro-batches": (HEADS["eagle3, 25 tokens"], [EAGLE3, "train.accumulate=2"]),
    "peagle, packed": (HEADS["peagle"], ["head={kind: peagle, num_layers: 2, depths: 4}", "train.unroll=4", PACKED]),
    "medusa": (HEADS["medusa"], ["head={kind: medusa, medusa_heads: 3}", "train.unroll=3"]),
    "dspark, packed": (HEADS["dspark"], [f"head={{kind: {BLOCK}, markov_rank: 8}}", "train.unroll=4", PACKED]),
    "dflash": ({**HEADS["dflash"], "block_size": 5}, [f"head={{kind: {BLOCK}}}", "train.unroll=4"]),
    "window": ({"kind": "block", "reaches": WINDOW}, [f"head={{kind: {BLOCK}, causal: true}}", "train.unroll=4"]),
}


def trained(make_head: Any, frozen: FrozenTarget, name: str, device: Any) -> tuple[StepResult, dict[str, float]]:
    """Two training steps, the second of which shows what the first one changed, and the held-out metrics after them."""
    kind, overrides = TRAINED[name]
    recipe = load_recipe(TINY, overrides)
    head = copy.deepcopy(make_head(**kind)).to(device).train()
    for parameter in head.parameters():
        parameter.requires_grad_()
    tensors: dict[str, Any] = {name: each.to(device) for name, each in vars(frozen).items() if isinstance(each, Tensor)}
    there = replace(frozen, **tensors)
    store = Samples(head.taps, frozen.config.hidden_size, frozen.config.num_layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "device", device)
        training = Training.start(recipe, head, TrainingInputs(there, store, store, None), Accelerator(cpu=True), None)
        training.head.set_learning_rates(recipe.train, 0)
        train_step(training, 0, [0, 1, 2, 3])
        result = train_step(training, 1, [4, 0, 2])
        whole: Any = training.head.whole()
        return result, held_out_metrics(whole, store, 2)


# The positions to learn and the blocks of a batch, the sums of a step and the size of its gradient, and measurements.
MAY_WAIT_IN_TRAINING = {"Teacher.supervise", "Teacher.with_drafted", "TrainedBlocks.supervision_of", "texts_of"}
MAY_WAIT_IN_TRAINING |= {"TrainedChains.supervision_of", "ChainSupervision.counts"}
MAY_WAIT_IN_TRAINING |= {"train_step", "clip_and_step", "held_out_metrics"}


@pytest.mark.parametrize("name", slow_unless(["eagle3, packed"], TRAINED))
def test_every_head_trains_on_a_pretended_card_as_on_the_cpu(make_head, frozen, name) -> None:
    wanted, metrics = trained(make_head, frozen, name, torch.device("cpu"))
    with pretended_cuda() as cuda:
        result, measured = trained(make_head, frozen, name, CUDA)
    assert cuda.readers <= MAY_WAIT_IN_TRAINING
    assert_close(result.sums, wanted.sums, rtol=1e-4, atol=1e-4)
    assert result.gradient_norm == pytest.approx(wanted.gradient_norm, rel=1e-3)
    assert measured == pytest.approx(metrics, rel=1e-3, abs=1e-4)
