"""A whole decode step as one function of tensors with fixed shapes, and that function as a CUDA graph.

On a GPU, a small step's kernels finish before the next ones are launched. A captured graph launches all of them at
once, and the host waits only once, for what was accepted. On other devices the same function runs as it is, and tests
hold it equal to the step with changing shapes.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from headstart.inference.core.cache import PAGE, KVCache
from headstart.inference.core.drafter import Drafter
from headstart.inference.core.sampling import BatchSampling
from headstart.inference.core.tree import Tree, size_bucket
from headstart.inference.core.verify import VerifiedOnDevice, VerifiedOnHost
from headstart.inference.targets.model import TargetModel

SPARE_STEPS = 6  # kept for later runs, each with its cache and graphs
CAPTURES = 16  # graphs of one step, by shapes and sampling settings
SHAPES = 16  # trees, batches and capacities that a layer may be compiled for; beyond these it runs uncompiled
WARMUP = 3  # runs before a capture, in which libraries allocate memory and choose their kernels
Result = TypeVar("Result")


class SpareSteps(list["StaticStep"]):
    """A target's captured steps that no run uses at the moment."""


@dataclass(frozen=True)
class StepOutput:
    """The tensors that a captured step leaves for the host to read."""

    tree: Tree
    choices: Int[Tensor, "batch nodes"]
    taps: Float[Tensor, "batch nodes tapped"]
    logits: Float[Tensor, "batch nodes vocab"]

    @classmethod
    def from_tensors(cls, outputs: tuple[Tensor, ...]) -> "StepOutput":
        tokens, parents, choices, taps, logits = outputs
        return cls(Tree(tokens, parents), choices, taps, logits)


class StaticStep:
    """Drafts, runs the target and chooses tokens, for a batch whose rows have equal sampling settings except seeds."""

    def __init__(self, target: TargetModel, drafter: Drafter, cache: KVCache) -> None:
        assert cache.target.static
        self.target, self.drafter, self.cache = target, drafter, cache
        self.batch = cache.target.batch
        self.captured: dict[object, tuple[BatchSampling, Graphed]] = {}
        layers = [*target.layers, *drafter.compilable_layers]
        self.compiled = CompiledLayers(layers if target.compiles else [])

    @classmethod
    def borrow(cls, target: TargetModel, drafter: Drafter, batch: int, capacity: int) -> "StaticStep":
        """A step that fits, with the graphs of earlier runs if there is one. `give_back` it after the run."""
        wanted = -(-capacity // PAGE) * PAGE
        spares = target.kept(SpareSteps)
        own = [spare for spare in spares if (spare.drafter, spare.batch) == (drafter, batch)]
        # Not one that is far too large: a captured step attends over its whole capacity.
        fits = [spare for spare in own if capacity <= spare.cache.target.capacity <= 2 * wanted]
        if fits:
            found = min(fits, key=lambda spare: spare.cache.target.capacity)
            spares.remove(found)
            return found
        return cls(target, drafter, target.new_cache(wanted, drafter.cache_shape, batch, static=True))

    def give_back(self) -> None:
        """Keep this step for the next run. It replaces others for the same drafter and batch size."""
        own, spares = (self.drafter, self.batch), self.target.kept(SpareSteps)
        others = [spare for spare in spares if (spare.drafter, spare.batch) != own]
        spares[:] = [self, *others][:SPARE_STEPS]

    def serves(self, sampling: BatchSampling) -> bool:
        """Whether shapes stay fixed: not with penalties, rejection sampling or rows that sample differently."""
        return sampling.rule == "seeded" and not sampling.needs_history and len(sampling.groups) == 1

    @torch.inference_mode()
    def __call__(self, verified: VerifiedOnHost) -> StepOutput:
        if self.drafter.static_shapes:
            if self.cache.head is not None:
                verified.rewind(self.cache.head)
            device, short = self.target.device, self.drafter.depth + 1 - verified.next_tokens.shape[1]
            output = StepOutput.from_tensors(
                self.replay(
                    self.draft_and_choose,
                    verified.sampling,
                    pad(verified.taps, (0, 0, 0, short)),
                    pad(verified.next_tokens, (0, short)),
                    verified.roots,
                    torch.tensor(verified.counts).to(device, non_blocking=True),
                    torch.tensor(verified.remaining).to(device, non_blocking=True),
                )
            )
            if self.cache.head is not None:  # inside the step, the lengths advanced on the device alone
                held = [start + count for start, count in zip(verified.starts, verified.counts, strict=True)]
                self.cache.head.set_lengths(held)
            return output
        return self.verify(self.drafter.draft(verified, self.cache), verified.sampling)

    @torch.inference_mode()
    def verify(self, tree: Tree, sampling: BatchSampling) -> StepOutput:
        """Run the target on a tree and let it choose; the drafter has no part in it."""
        missing = size_bucket(tree.tokens.shape[1]) - tree.tokens.shape[1]
        tokens, parents = pad(tree.tokens, (0, missing)), pad(tree.parents, (0, missing), value=-1)
        return StepOutput.from_tensors(self.replay(self.choose, sampling, tokens, parents))

    def replay(
        self, function: Callable[..., tuple[Tensor, ...]], sampling: BatchSampling, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """`function(sampling, *inputs)`, captured once for each set of shapes and each sampling setting."""
        key = tuple(tensor.shape for tensor in inputs), replace(sampling.samplings[0], seed=0)
        if key not in self.captured:
            if len(self.captured) == CAPTURES:
                self.captured.pop(next(iter(self.captured)))  # the oldest
            own = BatchSampling(sampling.samplings, self.target.device)
            self.captured[key] = own, Graphed(self.compiled.within(partial(function, own)))
        own, graphed = self.captured[key]
        own.seeds.copy_(sampling.seeds)
        return graphed(*inputs)

    # The next two methods are captured: no lists, no host syncs, and no shape depends on what was accepted before.

    def draft_and_choose(
        self, sampling: BatchSampling, taps: Tensor, next_tokens: Tensor, roots: Tensor, counts: Tensor, left: Tensor
    ) -> tuple[Tensor, ...]:
        """Draft a tree and let the target choose a token at each of its nodes."""
        self.cache.reset()
        sampling = sampling.with_gumbel(
            self.cache.target.starts + 1, self.drafter.depth + 1, self.target.config.vocab_size
        )
        verified = VerifiedOnDevice(taps, next_tokens, roots, sampling, None, counts, left)
        tree = self.drafter.draft(verified, self.cache)
        return self.choose(sampling, tree.tokens, tree.parents)

    def choose(self, sampling: BatchSampling, tokens: Tensor, parents: Tensor) -> tuple[Tensor, ...]:
        """Let the target choose a token at each node of a tree."""
        self.cache.target.reset()
        tree = Tree(tokens, parents, deepest=self.drafter.depth or None)
        output = self.target.forward_tree(tree, self.cache)
        positions = self.cache.target.starts.unsqueeze(1) + tree.depths + 1
        return tokens, parents, sampling.choose(output.logits, positions), output.taps, output.logits


class CompiledLayers:
    """Decoder layers, possibly none, that run compiled inside functions from `within` and uncompiled elsewhere.

    Only steps with fixed shapes gain: elsewhere every new shape would recompile. Layers are compiled one at a time, and
    the layers of a model share the compiler's result, so that it takes seconds and not minutes. The cache is left out,
    as every layer writes to a different place in it.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = list(dict.fromkeys(layers))  # an early exit shares its target's layers
        self.forwards = [torch.compile(layer.forward, dynamic=False) for layer in self.layers]
        # The default is 8, and a layer's number, its only difference from the others, counts as a shape.
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, SHAPES * len(self.layers))
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, SHAPES * len(self.layers))

    def within(self, function: Callable[..., Result]) -> Callable[..., Result]:
        if not self.layers:
            return function

        def with_compiled_layers(*inputs: Any) -> Result:
            own = [vars(layer).get("forward") for layer in self.layers]  # accelerate may have replaced it
            for layer, forward in zip(self.layers, self.forwards, strict=True):
                layer.forward = forward
            try:
                return function(*inputs)
            finally:
                for layer, before in zip(self.layers, own, strict=True):
                    del layer.forward
                    if before is not None:
                        layer.forward = before

        return with_compiled_layers


class Graphed:
    """A function of tensors, captured as a CUDA graph on its first call on CUDA. Its shapes must not change."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: tuple[Tensor, ...] = ()
        self.capturable = True

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the function. On CUDA the next call overwrites the tensors that it returns."""
        if inputs[0].device.type != "cuda" or not self.capturable:
            return self.function(*inputs)
        if self.graph is None and not self.capture(inputs):
            return self.function(*inputs)
        assert self.graph is not None
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        with torch.cuda.device(inputs[0].device):
            self.graph.replay()
        return self.outputs

    def capture(self, inputs: tuple[Tensor, ...]) -> bool:
        """Capture the graph; returns False, after a warning, for a model that needs the host while it runs."""
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        with torch.cuda.device(inputs[0].device):  # the current device's stream is what is recorded
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARMUP):
                    self.function(*self.inputs)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    self.outputs = self.function(*self.inputs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                warnings.warn(f"no CUDA graph for this model ({error}); decoding continues without one", stacklevel=2)
                self.capturable = False
                return False
        self.graph = graph
        return True
