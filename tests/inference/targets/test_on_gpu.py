"""Laws of decoding on a GPU: captured steps, changing shapes and the CPU write the same texts (pytest -m gpu)."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shared_fixtures import ModelFactory

from headstart.heads.kinds.block_attention import Reach
from headstart.inference.core.cache import Slots
from headstart.inference.core.drafter import PLAIN, Drafter
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.tree import block_mask, causal_block, keys_of
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic, Fixed
from headstart.inference.engine.loop import generate_batch
from headstart.inference.kernels import kernels_on_gpu, own_layers_of
from headstart.inference.kernels.fast_layers import FusedForward
from headstart.inference.targets.attention import folded_attention
from headstart.inference.targets.cuda_graph import Graphed, SpareSteps
from headstart.inference.targets.model import TargetModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PROMPTS = [[5, 6, 7, 11], [3], [*range(30)], [9, 9, 1], [40, 41]]
NEW_TOKENS = [4, 24, 9, 24, 16]  # short texts end first: rows move, and waiting requests take their places
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eagle1": {"kind": "eagle1"},
    "eagle3": {"kind": "eagle3"},
    "medusa": {"kind": "medusa"},
    "dflash": {"kind": "block"},
    "windowed": {"kind": "block", "reaches": (Reach(6, causal=True), Reach(None, causal=True))},
}
SHAPES = {"chain": Dynamic.chain(3), "tree": Dynamic(3, 4, 12), "fixed": Fixed(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))}
SAMPLINGS = {
    "greedy": [Sampling()] * 5,
    "sampled": [Sampling(1.0, seed=seed) for seed in range(5)],
    "unlike": [Sampling(), Sampling(1.0, seed=1), Sampling(0.7, top_p=0.9, seed=2), Sampling(), Sampling(1.0, seed=3)],
}


@pytest.fixture(scope="module")
def on_cpu(make_model: ModelFactory) -> TargetModel:
    return TargetModel(make_model(num_hidden_layers=7), (0, 1, 2, 7))


@pytest.fixture(scope="module")
def on_gpu(make_model: ModelFactory) -> TargetModel:
    model: Any = make_model(num_hidden_layers=7)
    return fused(TargetModel(model.cuda(), (0, 1, 2, 7)))


def fused(target: TargetModel) -> TargetModel:
    target.speed_up(lambda: target)
    return target


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="no CUDA graph")
        yield


@pytest.mark.parametrize("samplings", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("growth", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", HEADS)
def test_captured_steps_changing_shapes_and_the_cpu_write_the_same_texts(
    kind, growth, samplings, on_cpu, on_gpu, make_head
) -> None:
    if kind == "plain" and growth is not SHAPES["chain"]:
        pytest.skip("plain decoding has no tree")

    def texts(target: TargetModel, static: bool) -> list[list[int]]:
        drafter: Drafter = PLAIN
        if kind != "plain":
            drafter = head_drafter(copy.deepcopy(make_head(**HEADS[kind])).to(target.device), growth)
        rows = zip(PROMPTS, NEW_TOKENS, samplings, strict=True)
        requests = [Request(prompt, count, sampling) for prompt, count, sampling in rows]
        return [found.tokens for found in generate_batch(target, requests, drafter, 3, static)]

    wanted = texts(on_cpu, False)
    assert texts(on_gpu, False) == wanted
    on_gpu.singleton(SpareSteps).clear()
    assert texts(on_gpu, True) == wanted
    graphs = [graphed.graph for step in on_gpu.singleton(SpareSteps) for _, graphed in step.captured.values()]
    assert graphs
    assert all(graph is not None for graph in graphs)


@pytest.mark.parametrize("keys", [2304, 8192])
@pytest.mark.parametrize("nodes", [1, 60])
def test_attention_to_parts_of_the_keys_equals_attention_under_a_mask(nodes: int, keys: int) -> None:
    slots = Slots([torch.randn(1, 2, 1, 8, keys, 128, device="cuda", dtype=torch.bfloat16)], static=True)
    slots.set_lengths([keys - 700])
    query, block = torch.randn(1, 32, nodes, 128, device="cuda").bfloat16(), causal_block(nodes, slots.device)
    mask, carrier = (block_mask(slots, block, query.dtype, carries_keys=carries) for carries in (False, True))
    key, value = slots.layers[0]
    visible: Any = keys_of(carrier)
    found = kernels_on_gpu("attention").attention(query, key, value, visible).float()
    wanted = folded_attention(query.float(), key.float(), value.float(), mask.float(), None).transpose(1, 2)
    assert (found - wanted).norm() < 0.01 * wanted.norm()


def test_fused_layers_compute_what_those_of_transformers_do(make_model: ModelFactory) -> None:
    made: Any = make_model(hidden_size=512, num_hidden_layers=2)
    model = made.cuda().bfloat16()
    target = fused(TargetModel(model, ()))
    layer = model.model.layers[0]
    assert all(
        isinstance(vars(each).get("forward"), FusedForward) for each in (model.model.norm, layer.self_attn.k_proj)
    )
    tokens = torch.arange(90, device="cuda").unsqueeze(0)
    found = target.passes.forward(tokens).logits.float()
    with own_layers_of(model):
        own = target.passes.forward(tokens).logits.float()
    assert (found - own).norm() < 0.01 * own.norm()


def test_a_step_that_needs_the_host_goes_on_without_a_graph_and_leaves_no_trace() -> None:
    here = torch.cuda.current_stream()
    reads = Graphed(lambda x: (x * x.sum().item(),))
    given = torch.arange(4.0, device="cuda")
    with pytest.warns(UserWarning, match="no CUDA graph"):
        assert reads(given)[0].tolist() == [0, 6, 12, 18]
    assert torch.cuda.current_stream() == here
    assert reads(given)[0].tolist() == [0, 6, 12, 18]
    after = Graphed(lambda x: (x + 1,))
    assert after(given)[0].tolist() == [1, 2, 3, 4]
    assert after.graph is not None
    torch.empty(2**28, device="cuda")  # the allocator does not believe that a capture is under way
    torch.cuda.empty_cache()
