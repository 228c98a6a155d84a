"""A decode step as one function of tensors with fixed shapes, and that function as a CUDA graph.

On a GPU, a small step's kernels finish before the next ones are launched. A captured graph launches all of them at
once, and the host waits only once, for the accepted tokens. On other devices the same function runs as it is, and tests
compare it with the step with changing shapes.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from headstart.common.errors import wrong_value
from headstart.inference.core.cache import PAGE_TOKENS, KVCache
from headstart.inference.core.drafter import CapturedDrafter, Drafter
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.core.tree import Tree, size_bucket, take
from headstart.inference.core.verify import Followed, VerifiedOnDevice, VerifiedOnHost, follow
from headstart.inference.targets.attention import cudnn_attention
from headstart.inference.targets.model import TargetModel

SPARE_STEPS_MAX = 6  # for later runs, each with its cache and graphs
GRAPHS_MAX = 192  # of one step, by shapes and form of sampling; the least recently used are dropped
REACH_MIN = 512  # slots that a captured step attends to


class SpareSteps(list["StaticStep"]):
    """A target's captured steps that are not in use."""


class GraphMemory:
    """The memory that all graphs of a target share: they run one after another, and the host has read the outputs of
    one before the next begins."""

    def __init__(self) -> None:
        self.users: WeakSet[Graphed] = WeakSet()

    @property
    def pool(self) -> Any:
        """The memory pool of a live graph; None once the last graph is gone."""
        return next((user.graph.pool() for user in self.users if user.graph is not None), None)


@dataclass(frozen=True)
class StepOutput:
    """The tensors that a captured step leaves for the host to read, and for the next step."""

    tree: Tree
    choices: Int[Tensor, "batch nodes"]
    taps: Float[Tensor, "batch longest tapped"]  # at the nodes of each row's accepted path, then at any nodes
    followed: Followed
    logits: Float[Tensor, "batch nodes vocab"]  # empty unless requested: they are most of a graph's memory
    remaining: Int[Tensor, " batch"] | None = None  # draft tokens that each row could use; None without a draft

    @classmethod
    def from_tensors(cls, outputs: tuple[Tensor, ...], rows: int, levels: int | None = None) -> "StepOutput":
        """The real rows of a padded batch."""
        tokens, parents, choices, taps, logits, *followed = (output[:rows] for output in outputs)
        return cls(Tree(tokens, parents, levels=levels), choices, taps, Followed(*followed), logits)

    @property
    def longest(self) -> int:
        """The most tokens that a row may have accepted."""
        return self.followed.tokens.shape[1]

    def copied(self) -> "StepOutput":
        """The same, with what the host and the next step read in memory that no later step overwrites."""
        followed = Followed(*(each.clone() for each in self.followed))
        return replace(self, taps=self.taps.clone(), followed=followed)


class StaticStep:
    """Drafts, runs the target and chooses tokens. Batches are padded to powers of two, so that graphs are few."""

    def __init__(self, target: TargetModel, drafter: Drafter, cache: KVCache) -> None:
        assert cache.target.static
        self.target, self.drafter, self.cache = target, drafter, cache
        self.batch = cache.target.batch
        self.captured: dict[tuple[Any, ...], tuple[BatchSampling, Graphed]] = {}  # with the sampling that it reads
        self.held: Sequence[int] = ()  # as in `prepare`, and the next
        self.with_logits = False

    @classmethod
    def borrow(cls, target: TargetModel, drafter: Drafter, batch: int, capacity: int) -> "StaticStep":
        """A step that fits, with the graphs of earlier runs if there is one. `give_back` it after the run."""
        wanted = -(-capacity // PAGE_TOKENS) * PAGE_TOKENS
        spares = target.singleton(SpareSteps)
        alike = [spare for spare in spares if (spare.drafter, spare.batch) == (drafter, batch)]
        if fits := [spare for spare in alike if capacity <= spare.cache.target.capacity]:
            smallest = min(fits, key=lambda spare: spare.cache.target.capacity)
            spares.remove(smallest)
            return smallest
        return cls(target, drafter, target.passes.new_cache(wanted, drafter.cache_shape, batch, static=True))

    def give_back(self) -> None:
        """Keep this step for the next run, instead of others for the same drafter and batch size."""
        spares = self.target.singleton(SpareSteps)
        others = [spare for spare in spares if (spare.drafter, spare.batch) != (self.drafter, self.batch)]
        spares[:] = [self, *others][:SPARE_STEPS_MAX]

    def prepare(self, slots: int, held: Sequence[int] = (), with_logits: bool = False) -> None:
        """Let the next steps attend to at least this many slots of each row; few different numbers, so few graphs.

        `held` are the numbers of tokens in the cache's next rows, which padding rows must not overwrite. Unless
        `with_logits`, the steps leave no logits.
        """
        self.held, self.with_logits = held, with_logits
        for each in self.cache.slots:
            each.reach = min(reach_bucket(slots), each.capacity)

    @torch.inference_mode()
    def capture_ahead(self, slots: int) -> Iterator[int]:
        """Capture the steps of texts that need up to this many slots, however they sample; yields how many are left."""
        self.prepare(max(slots, size_bucket(self.drafter.max_nodes) + self.drafter.depth + 1))
        rows = sorted({min(1 << power, self.batch) for power in range(self.batch.bit_length() + 1)})
        drafters = [*self.captured_drafter.shapes()] if self.drafter.depth and self.drafter.static_shapes else []
        nodes = size_bucket(self.drafter.max_nodes).bit_length() if drafters != [self.drafter] else 1
        works: list[tuple[int, Callable[[], object]]] = []
        for count in rows:
            for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.9)):
                batch = BatchSampling([sampling] * count, self.target.device)
                nothing = self.nothing_verified(batch)
                works += [(count, partial(self.draft, each, nothing)) for each in drafters]
                for power in range(nodes):
                    tokens = torch.zeros(count, 1 << power, dtype=torch.long, device=self.target.device)
                    works.append((count, partial(self.verify, Tree(tokens, tokens - 1), batch)))
        for number, (count, work) in enumerate(works):
            self.cache.set_lengths([0] * count)
            work()
            yield len(works) - number - 1
        self.cache.set_lengths([])

    def nothing_verified(self, sampling: BatchSampling) -> VerifiedOnDevice:
        """Inputs of a draft, of the right shapes."""
        rows, count, device = len(sampling.samplings), self.drafter.depth + 1, self.target.device
        zeros = partial(torch.zeros, dtype=torch.long, device=device)
        tapped = len(self.drafter.taps) * self.target.config.hidden_size
        taps = torch.zeros(rows, count, tapped, dtype=self.target.dtype, device=device)
        return VerifiedOnDevice(taps, zeros(rows, count), zeros(rows, 1), sampling, None, zeros(rows) + 1, zeros(rows))

    @torch.inference_mode()
    def __call__(self, verified: VerifiedOnHost) -> StepOutput:
        """Draft, and let the target choose."""
        if not self.drafter.static_shapes:
            return self.verify(self.drafter.draft(verified, self.cache), verified.sampling)
        if self.cache.head is not None:
            verified.rewind(self.cache.head)
        return self.draft_and_verify(VerifiedOnDevice.of(verified), verified)

    @torch.inference_mode()
    def go_on(self, last: StepOutput, sampling: BatchSampling) -> StepOutput:
        """The step after one that the host has not read: the slots' `lengths` become bounds."""
        target, head, followed = self.cache.target, self.cache.head, last.followed
        if head is not None:  # it reads what the last step has verified
            head.set_lengths(target.lengths, target.starts)
        target.set_lengths([length + last.longest for length in target.lengths], target.starts + followed.counts)
        if last.remaining is None:
            return self.verify(Tree.root_only(followed.bonus), sampling)
        columns = self.target.tap_columns(self.drafter.taps)
        taps = last.taps if columns is None else last.taps.index_select(-1, columns)
        left = last.remaining - followed.counts
        given = VerifiedOnDevice(taps, followed.tokens, followed.bonus, sampling, None, followed.counts, left)
        return self.draft_and_verify(given, None)

    def draft_and_verify(self, given: VerifiedOnDevice, verified: VerifiedOnHost | None) -> StepOutput:
        drafter, count = self.captured_drafter.planned(len(given.roots))
        output = self.draft(drafter, given)
        if isinstance(output, Tree):
            self.captured_drafter.observe(output)
            tree = output if count is None else output.first(count)
            if verified is not None:
                tree = self.captured_drafter.extended(tree, verified)
            output = self.verify(tree, given.sampling)
            output = replace(output, tree=replace(output.tree, levels=drafter.depth))
        return replace(output, remaining=given.remaining)

    @property
    def captured_drafter(self) -> CapturedDrafter:
        return cast(CapturedDrafter, self.drafter)

    @property
    def drafts_alone(self) -> bool:
        """Whether the host adds nothing to what is drafted."""
        return self.drafter.static_shapes and not self.captured_drafter.needs_host

    def draft(self, drafter: CapturedDrafter, given: VerifiedOnDevice) -> StepOutput | Tree:
        """The output of a step by its own drafter, or else the tree that a drafter of one shape draws."""
        rows, short = len(given.roots), self.drafter.depth + 1 - given.next_tokens.shape[1]
        more, is_own = self.more_rows(rows), drafter is self.drafter
        function = partial(self.draft_and_choose, self.with_logits) if is_own else partial(self.draft_alone, drafter)
        with self.padded_rows(more):
            outputs = self.replay(
                function,
                ("draft", self.with_logits) if is_own else ("draft alone", drafter.depth),
                given.sampling,
                padded(given.taps, 0, 0, 0, short, 0, more),
                padded(given.next_tokens, 0, short, 0, more),
                padded(given.roots, 0, 0, 0, more),
                padded(given.counts, 0, more, value=1),
                padded(given.remaining, 0, more),
            )
        if self.cache.head is not None:  # inside the step, the lengths advanced on the device alone
            self.cache.head.reset()
        if is_own:
            return StepOutput.from_tensors(outputs, rows, drafter.depth)
        tokens, parents, chances = (output[:rows] for output in outputs)
        return Tree(tokens, parents, drafter.depth, drafter.depth, chances)

    @torch.inference_mode()
    def verify(self, tree: Tree, sampling: BatchSampling) -> StepOutput:
        """Run the target on a tree, without the drafter, and let it choose."""
        rows, nodes = tree.shape
        more, missing = self.more_rows(rows), size_bucket(nodes) - nodes
        tokens = padded(tree.tokens, 0, missing, 0, more)
        parents = padded(tree.parents, 0, missing, 0, more, value=-1)
        choose, name = partial(self.choose, self.with_logits), ("choose", self.with_logits)
        with self.padded_rows(more):
            outputs = self.replay(choose, name, sampling, tokens, parents)
        return StepOutput.from_tensors(outputs, rows)

    def more_rows(self, rows: int) -> int:
        """Padding rows up to a power of two, limited by the cache's rows."""
        return min(size_bucket(rows), self.batch) - rows

    @contextmanager
    def padded_rows(self, more: int) -> Iterator[None]:
        """Within this context further rows of the cache are in use; they write after their held tokens."""
        if not more:
            yield
            return
        before = [slots.lengths for slots in self.cache.slots]
        for slots, lengths in zip(self.cache.slots, before, strict=True):
            slots.set_rows([*lengths, *self.held[:more], *[0] * (more - len(self.held))], len(lengths))
        try:
            yield
        finally:
            for slots, lengths in zip(self.cache.slots, before, strict=True):
                slots.set_rows(lengths, len(lengths))

    def replay(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        name: object,
        sampling: BatchSampling,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        """`function(sampling, *inputs)`, captured once for each name, each set of shapes and each form of sampling."""
        key = name, tuple(tensor.shape for tensor in inputs), sampling.captured_form, self.cache.target.reach
        if key not in self.captured:
            while len(self.captured) >= GRAPHS_MAX:
                del self.captured[next(iter(self.captured))]
            own = BatchSampling([Sampling()] * len(inputs[0]), self.target.device, sampling.captured_form)
            self.captured[key] = own, Graphed(partial(function, own), self.memory)
        own, graphed = self.captured[key] = self.captured.pop(key)  # the last one used is last
        own.take(sampling)
        try:
            return graphed(*inputs)
        except torch.OutOfMemoryError as error:
            step = f"steps of {len(inputs[0])} rows of {self.drafter.max_nodes} nodes and {key[-1]} slots"
            remedy = f"lower it or decode.nodes, or take shorter texts ({error})"
            raise wrong_value(
                "decode.max_batch", self.batch, f"{step} do not fit on the GPU, fewer are", remedy
            ) from error

    @property
    def memory(self) -> GraphMemory | None:
        return self.target.singleton(GraphMemory) if self.target.device.type == "cuda" else None

    # The next three methods are captured: no lists, no host syncs, and no shape depends on accepted tokens.

    def draft_and_choose(self, with_logits: bool, sampling: BatchSampling, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Draft a tree and let the target choose a token at each of its nodes."""
        self.cache.reset()
        sampling = self.with_gumbel(sampling, self.drafter.depth + 1)
        tokens, parents, _ = self.draft_alone(self.captured_drafter, sampling, *inputs)
        return self.choose(with_logits, sampling, tokens, parents)

    def draft_alone(self, drafter: CapturedDrafter, sampling: BatchSampling, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Draft a tree; returns the tokens, parents and chances of its nodes."""
        taps, next_tokens, roots, counts, left = inputs
        self.cache.reset()
        if sampling.gumbel_table is None:
            sampling = self.with_gumbel(sampling, drafter.depth + 1)
        tree = drafter.draft(VerifiedOnDevice(taps, next_tokens, roots, sampling, None, counts, left), self.cache)
        assert tree.log_chances is not None
        return tree.tokens, tree.parents, tree.log_chances

    def choose(self, with_logits: bool, sampling: BatchSampling, tokens: Tensor, parents: Tensor) -> tuple[Tensor, ...]:
        """Let the target choose a token at each node of a tree, and keep the path that it accepts."""
        self.cache.target.reset()
        nodes, depth = tokens.shape[1], self.drafter.depth
        longest = min(depth + 1, nodes)
        if sampling.gumbel_table is None:  # nodes of one depth share their noise
            sampling = self.with_gumbel(sampling, longest)
        tree = Tree(tokens, parents, deepest=depth or None)
        run, lm_head = partial(self.target.passes.tree, tree, self.cache), self.target.fast_form.lm_head
        positions = self.cache.target.starts.unsqueeze(1) + tree.depths + 1
        if lm_head is not None and not with_logits and lm_head.serves(sampling, tokens.numel()):
            output, choices = lm_head.choose(run, sampling, positions)
        else:
            output = run()
            choices = sampling.choose(output.logits, positions)
        followed, taps = follow(tree, choices, longest), output.taps
        if nodes > 1:
            self.cache.target.move_nodes(followed.paths)
            taps = take(taps, followed.paths)
        logits = output.logits if with_logits else output.logits.new_empty(*tree.shape, 0)
        return tokens, parents, choices, taps, logits, *followed

    def with_gumbel(self, sampling: BatchSampling, count: int) -> BatchSampling:
        return sampling.with_gumbel(self.cache.target.starts + 1, count, self.target.config.vocab_size)


def reach_bucket(slots: int) -> int:
    """The next power of two, or 1.5 times a power of two: few numbers of slots, so few graphs."""
    power = max(size_bucket(slots), REACH_MIN)
    return power * 3 // 4 if slots <= power * 3 // 4 and power > REACH_MIN else power


def padded(tensor: Tensor, *counts: int, value: int = 0) -> Tensor:
    """`torch.nn.functional.pad`, without a copy if there is nothing to add."""
    return pad(tensor, counts, value=value) if any(counts) else tensor


@contextmanager
def no_garbage_collected() -> Iterator[None]:
    """Within this context no unreachable graph is destroyed, which would end the capture of another."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Graphed:
    """A function of tensors, captured as a CUDA graph on its first call on CUDA. Its shapes must not change."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], memory: GraphMemory | None = None) -> None:
        self.function, self.memory = function, memory
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: tuple[Tensor, ...] = ()
        self.capturable = True

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the function. On CUDA the next call of any function with the same memory overwrites what it returns."""
        if inputs[0].device.type != "cuda" or not self.capturable:
            return self.function(*inputs)
        with torch.cuda.device(inputs[0].device):  # the current device's stream is what is recorded
            if self.graph is None and not self.capture(inputs):
                return self.function(*inputs)
            assert self.graph is not None
            for captured, value in zip(self.inputs, inputs, strict=True):
                captured.copy_(value)
            self.graph.replay()
        return self.outputs

    def capture(self, inputs: tuple[Tensor, ...]) -> bool:
        """Capture the graph; returns False, after a warning, for a model that needs the host while it runs."""
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        here, side, graph = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(here)
        try:
            with cudnn_attention(True), torch.cuda.stream(side):
                self.function(*self.inputs)  # libraries allocate memory and choose their kernels
                # A capture that fails leaves its stream and allocator behind, so this run finds failures before it.
                torch.cuda.set_sync_debug_mode("error")
                try:
                    self.function(*self.inputs)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                here.wait_stream(side)
                pool = None if self.memory is None else self.memory.pool
                with no_garbage_collected(), torch.cuda.graph(graph, pool):
                    self.outputs = self.function(*self.inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            warnings.warn(f"no CUDA graph for this model ({error}); decoding continues without one", stacklevel=2)
            self.capturable = False
            torch.cuda.set_stream(here)
            here.wait_stream(side)
            if self.memory is not None:
                self.memory.users.clear()  # torch may believe that the capture still fills their pool
            return False
        self.graph = graph
        if self.memory is not None:
            self.memory.users.add(self)
        return True
