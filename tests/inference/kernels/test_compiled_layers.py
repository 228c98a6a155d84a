"""Laws of layers that are compiled for a CPU: decoding finds what the layers' own code finds, or that code runs."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weakref import ref

import pytest
import torch
from families import make_family
from shared_fixtures import ModelFactory
from torch import Tensor
from torch.testing import assert_close

from headstart.data_pipelines.harvest_stages import OneTarget
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.tree import Tree
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate_batch
from headstart.inference.kernels.compiled import CompiledForward, Compiler
from headstart.inference.kernels.fast_layers import pack_weights
from headstart.inference.kernels.private import patch_only_tracing_thread
from headstart.inference.kernels.products import cpp_compiler, library
from headstart.inference.targets.model import TargetModel
from headstart.recipes import load_recipe

TINY = Path(__file__).parents[3] / "recipes/tiny.yaml"
REQUESTS = [Request([5, 6, 7, 8, 9], 6), Request([9, 4], 9, Sampling(1.0, seed=3)), Request([*range(30)], 4)]


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run their graphs as they are, which takes no C++ compiler and no time."""
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda graph, *_, **__: graph)


def compile_at_once(target: TargetModel) -> Compiler:
    compiler = Compiler(after_calls=1)
    compiler.use_for(target.layers)
    return compiler


def texts(target: TargetModel) -> list[list[int]]:
    alone = [generate_batch(target, [request])[0].tokens for request in REQUESTS[:1]]
    return [*alone, *(found.tokens for found in generate_batch(target, REQUESTS))]


def tree_logits(target: TargetModel) -> torch.Tensor:
    cache = target.passes.new_cache(64)
    with torch.inference_mode():
        target.passes.tree(Tree(torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[-1, 0, 1, 2, 3]])), cache)
        cache.target.keep([[0, 1, 2, 3, 4]])
        return target.passes.tree(Tree(torch.tensor([[3, 4, 5, 6]]), torch.tensor([[-1, 0, 0, 2]])), cache).logits


def check_compiled(target: TargetModel, compiler: Compiler, wanted: list[list[int]], logits: torch.Tensor) -> None:
    for _ in range(2):  # shapes are asked for, compiled, and used
        texts(target), tree_logits(target)
        compiler.finish()
    assert texts(target) == wanted
    assert torch.equal(tree_logits(target), logits)


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_packed_layers_write_the_same_text_compiled(make_model, traced_only, monkeypatch) -> None:
    model = make_model(num_hidden_layers=2).bfloat16().float()
    assert pack_weights(model, exact=True)
    target = TargetModel(model, (0,))
    wanted, logits = texts(target), tree_logits(target)
    compiler = compile_at_once(target)
    check_compiled(target, compiler, wanted, logits)
    forms = {form for (_, form), kernel in compiler.kernels.items() if kernel}
    assert len(forms) == 3  # several tokens of one row, one token of it, one token of several rows
    for layer in target.layers:
        assert all(kernel is not None and kernel.is_checked for kernel in vars(layer)["forward"].kernels.values())
    monkeypatch.setattr(CompiledForward, "own", lambda self, **values: pytest.fail("the layer's own code ran"))
    assert texts(target) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_moe"])
def test_families_write_the_same_text_compiled(family: str, traced_only: None) -> None:
    target = TargetModel(make_family(family), (0,))
    wanted, logits = texts(target), tree_logits(target)
    compiler = compile_at_once(target)
    check_compiled(target, compiler, wanted, logits)
    assert any(compiler.kernels.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_a_head_drafts_the_same_compiled(kind, target, make_head, traced_only) -> None:
    head = make_head(kind)
    drafter = head_drafter(head, Dynamic(3, 4, 12))
    wanted = [(found.tokens, found.stats.accepted_at_depth) for found in generate_batch(target, REQUESTS, drafter)]
    compiler = Compiler(after_calls=1)
    compiler.use_for(head.decoder_layers)
    for _ in range(3):
        found = [(found.tokens, found.stats.accepted_at_depth) for found in generate_batch(target, REQUESTS, drafter)]
        assert found == wanted
        compiler.finish()
    assert any(compiler.kernels.values())


@pytest.mark.slow
@pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler")
def test_a_compiled_layer_is_the_layer(make_model: ModelFactory) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        target = TargetModel(make_model(num_hidden_layers=2).to(dtype), (0,))
        wanted, logits = texts(target), tree_logits(target)
        compiler = compile_at_once(target)
        texts(target), tree_logits(target)
        compiler.finish()
        tree_logits(target), tree_logits(target)
        kernels = [kernel for layer in target.layers for kernel in vars(layer)["forward"].kernels.values()]
        assert kernels
        assert all(kernel is not None for kernel in kernels)
        assert texts(target) == wanted
        assert torch.equal(tree_logits(target), logits)


def test_a_freed_target_stayed_in_memory_and_was_compiled(make_model, monkeypatch, traced_only) -> None:
    is_idle, shared = threading.Event(), OneTarget(load_recipe(TINY))
    monkeypatch.setattr(Compiler, "wait_until_idle", lambda self: is_idle.wait())
    target = shared._target = TargetModel(make_model(), ())
    compiler, model = compile_at_once(target), ref(target.layers[0])
    tree_logits(target)
    del target
    shared.free()
    assert model() is None
    is_idle.set()
    compiler.finish()
    assert compiler.begun
    assert not compiler.kernels


def test_a_kernel_that_differs_is_not_used_and_training_runs_own_code(make_model, monkeypatch) -> None:
    factor = 1.0
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda graph, *_, **__: lambda *x: factor * graph(*x))
    target = TargetModel(make_model(num_hidden_layers=1), ())
    logits = tree_logits(target)
    compiler = compile_at_once(target)
    target.passes.hidden_states(torch.tensor([[5, 6, 7]]))
    assert not compiler.kernels
    tree_logits(target)
    compiler.finish()
    assert any(compiler.kernels.values())
    kernels = vars(target.layers[0])["forward"].kernels
    for factor in (1.0, 1.01):
        kernels.clear()  # the layer is compared with its own code again
        for _ in range(2):
            assert torch.equal(tree_logits(target), logits)
        assert {kernel is None for kernel in kernels.values()} == {factor != 1}


def test_a_pass_does_not_fail_while_another_thread_traces() -> None:
    """torch.fx replaces nn.Module.__call__ in all threads: a step ended in "module is not installed as a submodule"."""
    patch_only_tracing_thread()
    layer, given = torch.nn.Linear(4, 4), torch.ones(1, 4)
    wanted = layer(given)

    def beside(states: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as other:
            found.append(other.submit(layer, given).result())
        return states + 1

    found: list[Tensor] = []
    graph = torch.fx.symbolic_trace(beside)  # as Inductor calls it
    assert_close(found, [wanted])
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_function", "output"]


@pytest.mark.slow
def test_a_program_may_end_while_layers_are_compiled() -> None:
    program = """
from families import make_family
from headstart.inference.engine.loop import generate_batch
from headstart.inference.core.request import Request
from headstart.inference.kernels.compiled import Compiler
from headstart.inference.targets.model import TargetModel
target, compiler = TargetModel(make_family("llama"), ()), Compiler(after_calls=1)
compiler.use_for(target.layers)
generate_batch(target, [Request([5, 6], 4)])
assert compiler.begun > compiler.ended
"""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
