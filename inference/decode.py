"""The decode loop: draft trees, let the target verify all of them in one pass, and keep the paths that it accepts.

Rows of a batch advance at their own pace. When one ends, the next waiting request takes its place (continuous
batching).
"""

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.inference.cache import PAGE, KVCache
from headstart.inference.cuda_graph import StaticStep, StepOutput, size_bucket
from headstart.inference.drafter import PLAIN, Drafter, VerifiedOnHost
from headstart.inference.request import GREEDY, Generation, Request, Row
from headstart.inference.sampling import BatchSampling, History, Sampling, check_bias
from headstart.inference.step_memory import refuse_more_than_memory
from headstart.inference.target.model import TargetModel, TargetOutput
from headstart.inference.tree import Block, take
from headstart.inference.verify import Accepted, accept, verify

READ_TOGETHER = 512  # tokens of prompts in one prefill pass; of more, every token would look at too many of the others


def generate(
    target: TargetModel,
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    drafter: Drafter | None = None,
    static: bool | None = None,
) -> Generation:
    """Continue a prompt as the target alone would. A drafter changes the speed, never the text.

    Raises ValueError when the prompt and the new tokens exceed the target's positions.
    """
    return generate_batch(target, [Request(prompt, max_new_tokens, sampling or GREEDY)], drafter, 1, static)[0]


def generate_batch(
    target: TargetModel,
    requests: Sequence[Request],
    drafter: Drafter | None = None,
    max_batch: int = 16,
    static: bool | None = None,
) -> list[Generation]:
    """Continue many prompts, at most `max_batch` at a time. Each gets the text that it would get alone.

    `static` gives every tensor the shape of the full capacity, as CUDA graphs need it. None means True on CUDA, unless
    several ranks hold the target.
    """
    loop = DecodeLoop(target, requests, drafter, max_batch, static)
    for _ in loop.run():
        pass
    return loop.generations


def generate_each(
    target: TargetModel, requests: Sequence[Request], drafter: Drafter | None = None, max_batch: int = 16
) -> Iterator[tuple[int, Generation]]:
    """`generate_batch` that yields (number of the request, its output) as each text ends."""
    loop = DecodeLoop(target, requests, drafter, max_batch)
    for _ in loop.run():
        yield from loop.take_ended()
    yield from loop.take_ended()


class DecodeLoop:
    """Decodes requests and yields their tokens in blocks. `generations` holds the output of each request so far."""

    def __init__(
        self,
        target: TargetModel,
        requests: Sequence[Request],
        drafter: Drafter | None = None,
        max_batch: int = 16,
        static: bool | None = None,
    ) -> None:
        """Raise ValueError for a request that does not fit the target or the other requests."""
        self.target, self.drafter = target, drafter or PLAIN
        for request in requests:
            check_length(target, request.prompt, request.max_new_tokens)
            check_vocabulary(target, request.prompt)
            highest = max((token for token, _ in request.sampling.logit_bias), default=0)
            check_bias(highest, target.config.vocab_size)
        self.tap_columns = target.tap_columns(self.drafter.taps)
        if len({request.sampling.rule for request in requests}) > 1:
            raise ValueError("the requests of a batch must agree on decode.acceptance; decode them in separate calls")
        if max_batch < 1:
            raise ValueError(f"max_batch: {max_batch} given, 1 or more is allowed")
        self.waiting = deque(enumerate(requests))
        self.generations = [Generation() for _ in requests]
        self.ended: list[int] = []  # requests whose text has ended since `take_ended` was last called
        self.rows: list[Row] = []
        self.max_batch = min(max_batch, len(requests))
        self.is_static = target.device.type == "cuda" and target.ranks.may_capture if static is None else static
        self.nodes = size_bucket(self.drafter.max_nodes) if self.is_static else self.drafter.max_nodes
        self.limit = max((len(r.prompt) + r.max_new_tokens for r in requests), default=0) + self.nodes
        refuse_more_than_memory(target, self.max_batch, self.nodes, self.limit - self.nodes)
        self.static: StaticStep | None = None
        self.last_step: tuple[float, float] | None = None  # time.perf_counter() before and after it

    @torch.inference_mode()
    def run(self) -> Generator[tuple[int, list[int]], None, None]:
        """Yield (number of the request, new tokens) as tokens become certain. Runs once."""
        self._make_cache()
        try:
            while self.waiting or self.rows:
                while self.waiting and len(self.rows) < self.max_batch:
                    for row in self.prefill(self.next_prompts()):
                        yield row.number, row.text[len(row.request.prompt) :]
                        if row.ended:
                            self.end(row)
                if self.rows:
                    yield from self.step()
        finally:
            if self.static is not None:
                self.static.give_back()

    def step(self) -> list[tuple[int, list[int]]]:
        """One cycle for all rows: draft a tree, run the target on it, verify, compact the cache, record."""
        started = time.perf_counter()
        self.cache.make_room(max(self.cache.target.lengths) + self.nodes, self.limit)
        verified = self.verified()
        output: StepOutput | TargetOutput
        if self.static is not None and self.static.serves(self.sampling):
            output = self.static(verified)  # drafts, runs the target and lets it choose, as one captured graph
            accepted = accept(output.tree, output.choices)
        else:
            tree = self.drafter.draft(verified, self.cache)
            output = self.target.forward_tree(tree, self.cache)
            accepted = verify(tree, output.logits, self.cache.target.starts, verified.sampling, self.history)
        bytes_moved = self.cache.target.keep([found.path for found in accepted])
        blocks = self.record(accepted, output, bytes_moved)
        self.last_step = started, time.perf_counter()
        for row in [row for row in self.rows if row.ended]:
            self.end(row)
        return blocks

    def next_prompts(self) -> list[tuple[int, Request]]:
        """The waiting requests to read next: as many as there are free rows, unless their prompts are long."""
        taken, tokens = [self.waiting.popleft()], 0
        while self.waiting and len(self.rows) + len(taken) < self.max_batch:
            tokens += len(taken[-1][1].prompt)
            if tokens + len(self.waiting[0][1].prompt) > READ_TOGETHER:
                break
            taken.append(self.waiting.popleft())
        return taken

    def prefill(self, requests: list[tuple[int, Request]]) -> list[Row]:
        """Read prompts in one pass, each into a row of its own; their last logits give the first new tokens."""
        started, device = time.perf_counter(), self.target.device
        prompts = [request.prompt for _, request in requests]
        row_caches = [self.cache.row(len(self.rows) + place) for place in range(len(prompts))]
        output = read_prompts(self.target, prompts, row_caches)
        refuse_nan(output.logits, self.target)
        taps = self.drafter_taps(output.taps)[0].split([len(prompt) for prompt in prompts])
        logits = output.logits.transpose(0, 1)  # [prompts, 1, vocab]
        sampling = BatchSampling([request.sampling for _, request in requests], device)
        history = start_history([request for _, request in requests], [[]] * len(requests), self.target)
        positions = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
        choices = sampling.choose(logits, positions, history)
        rows = []
        for place, (number, request) in enumerate(requests):
            text = torch.cat([torch.tensor(request.prompt, device=device), choices[place]])
            self.drafter.prefill(taps[place].unsqueeze(0), text.unsqueeze(0), row_caches[place])
            rows.append(self.start_row(number, request, taps[place], started))
            logprobs = log_probabilities(logits[place], choices[place]) if request.logprobs else None
            rows[-1].add_tokens(choices[place].tolist(), logprobs)
        self.rows += rows
        for slots in self.cache.slots:
            slots.set_lengths([*slots.lengths, *map(len, prompts)])
        self._rows_changed()
        return rows

    def start_row(self, number: int, request: Request, taps: Float[Tensor, "count tapped"], started: float) -> Row:
        """A row whose prompt was read; `taps` are those of the prompt."""
        ends = tuple(self.target.end_tokens) if request.end_tokens is None else request.end_tokens
        generation, prompt = self.generations[number], request.prompt
        generation.stats.cache_bytes = self.cache.num_bytes
        return Row(number, request, generation, ends, list(prompt), taps[-1:], len(prompt) - 1, started)

    def verified(self) -> VerifiedOnHost:
        """The tokens and hidden states that the last step made certain in each row, as a batch."""
        rows, device = self.rows, self.target.device
        counts = [len(row.taps) for row in rows]
        longest = max(counts)
        # The token after the last newly verified position is the root.
        tokens = [row.text[row.start + 1 :] + [0] * (longest - len(row.taps)) for row in rows]
        taps = [row.taps if len(row.taps) == longest else pad_right(row.taps, longest) for row in rows]
        next_tokens = torch.tensor(tokens).to(device, non_blocking=True)
        if len(rows) == 1:
            roots = next_tokens[:, -1:]
        else:
            roots = torch.tensor([[row.text[-1]] for row in rows]).to(device, non_blocking=True)
        return VerifiedOnHost(
            taps=taps[0].unsqueeze(0) if len(rows) == 1 else torch.stack(taps),
            next_tokens=next_tokens,
            roots=roots,
            sampling=self.sampling if self.static is not None else self.with_gumbel(),
            history=self.history,
            starts=[row.start for row in rows],
            counts=counts,
            drafted=[row.drafted for row in rows],
            remaining=[row.left - 1 for row in rows],  # one token is left for the bonus token
            texts=[row.text for row in rows],
            choices=[row.choices for row in rows],
            last_step=self.last_step,
        )

    def record(
        self, accepted: list[Accepted], output: StepOutput | TargetOutput, bytes_moved: int
    ) -> list[tuple[int, list[int]]]:
        """Add what was accepted to each row; returns (number of the request, its new tokens)."""
        device = self.target.device
        longest = max(len(found.path) for found in accepted)
        paths = torch.tensor([found.path + [0] * (longest - len(found.path)) for found in accepted])
        paths = paths.to(device, non_blocking=True)
        path_taps = self.drafter_taps(take(output.taps, paths))  # [batch, longest, tapped]
        blocks = []
        for index, (row, found) in enumerate(zip(self.rows, accepted, strict=True)):
            count = len(found.path)
            if self.history is not None:
                self.history.count(index, [row.text[-1], *found.tokens[:-1]])
            logprobs = None
            if row.request.logprobs:
                chosen = torch.tensor(found.tokens, device=device)
                logprobs = log_probabilities(output.logits[index, paths[index, :count]], chosen)
            blocks.append((row.number, row.record_step(found, path_taps[index, :count], logprobs)))
            row.generation.stats.bytes_moved += bytes_moved // len(self.rows)
            row.generation.stats.cache_bytes = max(row.generation.stats.cache_bytes, self.cache.num_bytes)
        return blocks

    def take_ended(self) -> list[tuple[int, Generation]]:
        """The requests whose text has ended since the last call, with their output."""
        numbers, self.ended = self.ended, []
        return [(number, self.generations[number]) for number in numbers]

    def end(self, row: Row) -> None:
        """Take a row out of the batch; others move into its place."""
        self.ended.append(row.number)
        for source, goal in self.cache.end_row(self.rows.index(row)):
            self.rows[goal] = self.rows[source]
        self.rows.pop()
        self._rows_changed()

    def drafter_taps(self, taps: Float[Tensor, "batch count given"]) -> Float[Tensor, "batch count tapped"]:
        """The hidden states that this drafter reads; the target may give more, for other heads."""
        return taps if self.tap_columns is None else taps.index_select(-1, self.tap_columns)

    def with_gumbel(self) -> BatchSampling:
        """How rows sample, with the Gumbel noise of every position that this step may reach."""
        positions, count = self.cache.target.starts + 1, self.drafter.depth + 1
        return self.sampling.with_gumbel(positions, count, self.target.config.vocab_size)

    def _make_cache(self) -> None:
        if self.is_static:
            self.static = StaticStep.borrow(self.target, self.drafter, self.max_batch, self.limit)
            self.cache = self.static.cache
        else:
            longest = max((len(request.prompt) for _, request in self.waiting), default=0)
            capacity = min(longest + self.nodes + PAGE, self.limit)
            self.cache = self.target.new_cache(capacity, self.drafter.cache_shape, self.max_batch)
        self.cache.set_lengths([])

    def _rows_changed(self) -> None:
        """Rebuild what depends on which rows are in the batch."""
        if self.rows:
            requests = [row.request for row in self.rows]
            self.sampling = BatchSampling([request.sampling for request in requests], self.target.device)
            self.history = start_history(requests, [row.generation.tokens[:-1] for row in self.rows], self.target)


def check_length(
    target: TargetModel, prompt: list[int], max_new_tokens: int, field: str = "decode.max_new_tokens"
) -> None:
    """Raise ValueError, before any work is done, for a request that does not fit the target's positions.

    `field` is where the user said how many new tokens to write.
    """
    limit = target.max_positions
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"{field}: {max_new_tokens} given, 1 or more is allowed; raise it")
    if len(prompt) + max_new_tokens > limit:
        raise ValueError(
            f"{field}: a prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed the target's "
            f"{limit} positions; up to {max(limit - len(prompt), 0)} new tokens are allowed after this prompt: lower "
            f"{field}, or shorten the prompt to {max(limit - max_new_tokens, 0)} tokens"
        )


def check_vocabulary(target: TargetModel, prompt: list[int]) -> None:
    """Raise ValueError for a prompt in tokens that the target does not have."""
    size = target.config.vocab_size
    if outside := [token for token in (min(prompt), max(prompt)) if not 0 <= token < size]:
        raise ValueError(
            f"a prompt holds token id {outside[0]}, 0 to {size - 1} of the target is allowed; encode it with the "
            f"target's own tokenizer (the one in the target's folder may be another model's)"
        )


def read_prompts(target: TargetModel, prompts: list[list[int]], rows: list[KVCache]) -> TargetOutput:
    """Read each prompt into the cache of its own row, all in one pass.

    The logits are those after each prompt's last token, [1, prompts, vocab]; the taps are those of all prompts in turn,
    [1, tokens, tapped]. The prompts lie side by side without padding, and a mask hides them from each other.
    """
    device = target.device
    if len(prompts) == 1:
        return target.forward(torch.tensor(prompts, device=device), cache=rows[0], last_only=True)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    owner = torch.repeat_interleave(torch.arange(len(prompts)), lengths)  # [tokens]: the prompt of each
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    visible = (owner[:, None] == owner) & (positions <= positions[:, None])
    tokens = torch.tensor([[token for prompt in prompts for token in prompt]], device=device)
    together = target.new_cache(tokens.shape[1])
    together.set_lengths([0])
    positions = positions.unsqueeze(0).to(device)
    mask = target.masks(together.target, Block(visible.unsqueeze(0).to(device), positions))
    output = target.forward(tokens, positions, mask, together, logits_at=(lengths.cumsum(0) - 1).to(device))
    for row, read in zip(rows, together.target.storage.split(lengths.tolist(), dim=4), strict=True):
        row.target.storage[..., : read.shape[4], :] = read
    return output


def refuse_nan(logits: Float[Tensor, "1 rows vocab"], target: TargetModel) -> None:
    """Raise ValueError if the target computes NaN or infinity, from which some token would be chosen all the same."""
    if not bool((logits < torch.inf).all()):  # NaN fails every comparison; -infinity only forbids a token
        raise ValueError(
            f"the target's logits are NaN or infinite in {str(target.dtype).removeprefix('torch.')}, only finite ones "
            f"are allowed; set target.dtype to float32, and if that does not help, download its weights again"
        )


def start_history(requests: list[Request], outputs: list[list[int]], target: TargetModel) -> History | None:
    """The tokens that penalties count: prompts and outputs so far. None if no request has a penalty."""
    if not any(request.sampling.needs_history for request in requests):
        return None
    history = History.start([request.prompt for request in requests], target.config.vocab_size, target.device)
    for row, output in enumerate(outputs):
        history.count(row, output)
    return history


def log_probabilities(logits: Float[Tensor, "nodes vocab"], tokens: Int[Tensor, " nodes"]) -> list[float]:
    """The target's own log-probability of each token, in nats."""
    found: list[float] = logits.float().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    return found


def pad_right(taps: Float[Tensor, "count tapped"], count: int) -> Float[Tensor, "longest tapped"]:
    """Zeros after the taps, up to `count` positions."""
    return torch.cat([taps, taps.new_zeros(count - len(taps), taps.shape[1])])
