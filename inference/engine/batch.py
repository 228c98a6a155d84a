"""The rows that decode together: their cache, the prompt that is read beside them, and one step for all of them."""

import sys
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.inference.core.cache import PAGE, KVCache, takes_memory_lazily
from headstart.inference.core.constraint import ConstraintState, masked_roots, masked_tree
from headstart.inference.core.drafter import Drafter, VerifiedOnHost
from headstart.inference.core.request import Block, Generation, Request, Row, TokenScores
from headstart.inference.core.sampling import BatchSampling, GumbelTable, History
from headstart.inference.core.tree import Tree, take
from headstart.inference.core.verify import Accepted, accept, verify
from headstart.inference.drafters.costs.costs import CostTable, Situation
from headstart.inference.drafters.head import TreeDrafter
from headstart.inference.engine.budget import CacheBudget
from headstart.inference.engine.prefill import Read, piece_part, read_piece
from headstart.inference.engine.prefixes import BLOCK, Cached, Prefix, PrefixIndex, known_tokens
from headstart.inference.engine.reading import read_prompts, refuse_nan
from headstart.inference.engine.speculation import SpeculationByLoad
from headstart.inference.targets.cuda_graph import StaticStep, StepOutput, size_bucket
from headstart.inference.targets.model import TargetModel, TargetOutput
from headstart.inference.targets.side_by_side import Part
from headstart.inference.targets.slices import Pause, PausingSlots, SlicedWork

FEW = 8  # positions that the drafter missed and reads with its next draft, for all rows at once
GIVEN_BACK = 12  # parts of places that rows have left, before each step, so that rows wait for them at most 0.5 ms
CATCH_UP = 256  # positions that a drafter reads before a step, of those that it missed while drafts did not pay


@dataclass(frozen=True)
class Piece:
    """Tokens of a prompt that are read next."""

    row: Row
    place: int  # of the row in the cache
    before: int  # tokens of the prompt that the place holds already
    count: int

    @property
    def tokens(self) -> list[int]:
        return self.row.text[self.before : self.before + self.count]


class ReadInSlices(NamedTuple):
    """A pass over a piece of a prompt that was done in slices."""

    piece: Piece
    seconds_per_layer: float
    blocks: list[Block]  # the first new tokens, if the prompt has ended


class Batch:
    """Rows in the first places of one cache. A prompt may be read piece by piece in a place after theirs."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        max_rows: int,
        static: bool | None,
        memory: int | None,
        prefix_memory: int | None,
        costs: CostTable | None,
    ) -> None:
        """The last four are those of the decode loop."""
        self.target, self.drafter, self.max_rows = target, drafter, max_rows
        self.tap_columns = target.tap_columns(drafter.taps)
        # Of trees in batches with sampled rows: repeats go deeper only where all rows are greedy.
        self.sampled_depth = drafter.growth.depth if isinstance(drafter, TreeDrafter) else drafter.depth
        self.is_static = target.device.type == "cuda" and target.ranks.may_capture if static is None else static
        self.nodes = size_bucket(drafter.max_nodes) if self.is_static else drafter.max_nodes
        self.is_lazy = takes_memory_lazily(target.device, self.is_static, max_rows)
        shapes = [shape for shape in (target.cached_shape, drafter.cache_shape) if shape is not None]
        self.budget = CacheBudget(memory, shapes, target.dtype, target.device, max_rows, self.is_lazy)
        self.prefixes = None if prefix_memory is None else PrefixIndex(prefix_memory, drafter.cache_shape is not None)
        self.speculation = None if costs is None else SpeculationByLoad(costs)
        self.catching_up = False  # whether the drafter has yet to read what was written while drafts did not pay
        self.rows: list[Row] = []
        self.gumbel_table: GumbelTable | None = None  # of the last step, for what the next one needs of it
        self.reading: Row | None = None  # its text is the prompt
        self.read, self.place = 0, 0  # tokens of this prompt that were read, and its place in the cache
        self.may_slice = target.device.type == "cpu" and not self.is_static
        self.slices: SlicedWork[list[Block]] | None = None  # a pass over `sliced` that was begun
        self.sliced: Piece
        self.limit = 0  # slots that the longest request so far may need
        self.cache: KVCache  # while the batch is open: from the first prompt until `close`
        self.is_open = False
        self.static: StaticStep | None = None
        self.drafts = False  # whether the step that comes, or came last, drafts for any row
        self.last_step: tuple[float, float] | None = None  # time.perf_counter() before and after it

    @property
    def members(self) -> list[Row]:
        """The rows, and the one whose prompt is being read."""
        return self.rows if self.reading is None else [*self.rows, self.reading]

    def new_row(self, number: int, request: Request, generation: Generation) -> Row:
        """A row for a request whose prompt is to be read next."""
        ends = tuple(self.target.end_tokens) if request.end_tokens is None else request.end_tokens
        taps = torch.zeros(0, 0, device=self.target.device)
        row = Row(number, request, generation, ends, list(request.prompt), taps, 0, time.perf_counter())
        row.constraint = None if request.constraint is None else request.constraint.start()
        return row

    def seat(self, rows: list[Row], prefixes: list[Prefix | None]) -> list[Piece]:
        """Give rows the places after those of the running ones; returns their prompts from where these are unknown."""
        held = max(self.cache.target.lengths, default=0) if self.is_open else 0
        self.make_room(max(held, *(len(row.text) for row in rows)) + self.nodes)
        pieces = []
        for place, (row, prefix) in enumerate(zip(rows, prefixes, strict=True), len(self.rows)):
            self._take_over(row, place, prefix)
            before = known_tokens(prefix)
            pieces.append(Piece(row, place, before, len(row.text) - before))
        return pieces

    def begin(self, row: Row, prefix: Prefix | None) -> None:
        """Read the prompt of this row from now on, piece by piece, after a prefix that is known already."""
        self.make_room(len(row.text) + self.nodes)
        self.reading, self.read, self.place = row, known_tokens(prefix), len(self.rows)
        self._take_over(row, self.place, prefix)

    def _take_over(self, row: Row, place: int, prefix: Prefix | None) -> None:
        """Let a row have its place, and copy there what is known of the beginning of its prompt."""
        self.cache.take(place)
        if prefix is None:
            return
        for number, block in enumerate(prefix.blocks):
            first = number * BLOCK
            self.cache.target.write(place, first, block.target)
            if self.cache.head is not None and block.head is not None:
                self.cache.head.write(place, max(first - 1, 0), block.head)
        row.start, row.taps = prefix.start, prefix.taps
        row.kept_from = row.generation.cached_tokens = prefix.tokens
        self.catching_up = self.catching_up or len(prefix.taps) > CATCH_UP  # it was written without the drafter

    def next_piece(self, most: int) -> Piece:
        """Up to so many tokens of the prompt that is being read."""
        assert self.reading is not None
        return Piece(self.reading, self.place, self.read, min(most, len(self.reading.text) - self.read))

    def read_pieces(self, pieces: list[Piece]) -> list[Block]:
        """Read pieces of prompts in a pass of their own; returns the first new tokens of those that end."""
        tokens, rows = [piece.tokens for piece in pieces], [self.cache.row(piece.place) for piece in pieces]
        if len(pieces) == 1:
            return self._have_read(pieces, [read_piece(self.target, tokens[0], rows[0], pieces[0].before)])
        if any(piece.before for piece in pieces):
            return self._have_read(pieces, as_read(self.target.forward_parts(self._parts(pieces))))
        return self._have_read(pieces, read_prompts(self.target, tokens, rows))

    def begin_slices(self, piece: Piece) -> None:
        """Begin a pass over a piece of the prompt that is being read, of which `read_slice` does a part at a time."""

        def read(pause: Pause) -> list[Block]:
            row = KVCache(PausingSlots(self.cache.target.row(piece.place), pause), None)
            found = read_piece(self.target, piece.tokens, row, piece.before)
            pause()  # the drafter reads the piece next
            return self._have_read([piece], [found])

        self.slices, self.sliced = self.target.in_slices(read), piece

    def read_slice(self, seconds: float) -> ReadInSlices | None:
        """Go on with the pass that was begun, for about so many seconds; what came of it once it is done."""
        slices = self.slices
        assert slices is not None
        try:
            blocks = slices.go_on(seconds)
        except BaseException:
            self.slices = None
            raise
        if blocks is None:
            return None
        self.slices = None
        return ReadInSlices(self.sliced, slices.seconds / slices.pauses, blocks)

    def give_up_slices(self) -> None:
        """Forget a pass that was begun. Its piece has to be read again."""
        if self.slices is not None:
            self.slices.give_up()
            self.slices = None

    def _parts(self, pieces: list[Piece]) -> list[Part]:
        """The pieces as parts of a pass."""
        return [piece_part(self.target, piece.tokens, self.cache.row(piece.place), piece.before) for piece in pieces]

    def _have_read(self, pieces: list[Piece], found: list[Read]) -> list[Block]:
        """Go on after a pass over prompts; returns the first new tokens of those that end."""
        for piece, read in zip(pieces, found, strict=True):
            self._keep_taps(piece.row, self.drafter_taps(read.taps.unsqueeze(0))[0])
        row = self.reading
        if row is not None:
            (piece,) = pieces
            self.read += piece.count
            if self.read < len(row.text):
                if self.speculation is None or self.speculation.is_on:
                    self.feed(row, self.place, CATCH_UP + piece.count)
                # Piece by piece, as copies of a whole prompt would stall the rows.
                self.remember(row, self.place, self.read)
                return []
            self.reading = None
            if self.place != len(self.rows):  # another row has ended meanwhile
                self.cache.take(len(self.rows))
                self.cache.move(self.place, len(self.rows), self.read)
                self.cache.leave(self.place)
        return self.start([piece.row for piece in pieces], torch.stack([read.logits for read in found]))

    def start(self, rows: list[Row], logits: Float[Tensor, "rows 1 vocab"]) -> list[Block]:
        """Let rows decode whose prompts were read. The logits after these give the first new tokens.

        The drafter reads the prompts with the next step, so that nobody waits for it to see the first token.
        """
        refuse_nan(logits, self.target)
        device, requests = self.target.device, [row.request for row in rows]
        sampling = BatchSampling([request.sampling for request in requests], device)
        history = start_history(requests, [[]] * len(requests), self.target)
        positions = torch.tensor([[len(request.prompt)] for request in requests], device=device)
        states = constraints_of(rows)
        choices = sampling.choose(masked_roots(states, logits) if states else logits, positions, history)
        blocks = []
        for number, row in enumerate(rows):
            scores = token_scores(row.request, logits[number], choices[number])
            added = row.add_tokens(choices[number].tolist(), scores)
            blocks.append(Block(row.number, added, [None] * len(added)))
            row.generation.stats.cache_bytes = self.cache.num_bytes
        self.rows += rows
        for slots in self.cache.slots:
            slots.set_lengths([*slots.lengths, *(len(request.prompt) for request in requests)])
        self._rows_changed()
        return [block for block in blocks if block.tokens]

    def feed(self, row: Row, place: int, most: int = sys.maxsize) -> int:
        """Let the drafter read what it has not read of a row, all but the last position, which comes with its draft.

        It reads at most so many positions; returns how many.
        """
        row.gather()
        count = min(len(row.taps) - 1, most)
        if row.request.speculative:
            cache, text = self.cache.row(place), row.text[row.start : row.start + count + 2]
            cache.set_lengths([row.start])
            taps = row.taps[: count + 1].unsqueeze(0)
            self.drafter.prefill(taps, torch.tensor([text], device=self.target.device), cache)
        row.has_read(count)
        return count

    def prepare(self, may_draft: bool = True) -> None:
        """Do what comes before a step: what is done once for a new row, and tells nothing about later steps' time."""
        self.make_room(max(self.cache.target.lengths) + self.nodes)
        self.cache.give_back(GIVEN_BACK)
        self.drafts = self.prepare_drafts(may_draft)
        for place, row in enumerate(self.rows):
            if not row.is_remembered:  # requests that begin alike need not wait until this text ends
                self.remember(row, place, self.cache.target.lengths[place])
                row.is_remembered = True

    def cycle(self, pieces: list[Piece]) -> list[Block]:
        """One step of all rows, after `prepare`: draft a tree, run the target on it, verify, compact the cache, record.

        In a step without drafts, the target may read pieces of prompts in the same pass.
        """
        started = time.perf_counter()
        read: list[Read] = []
        output: StepOutput | TargetOutput
        if self.drafts:
            assert not pieces
            output, accepted = self.draft_and_verify()
        else:
            output, accepted, read = self.verify_roots(pieces)
        bytes_moved = self.cache.target.keep([found.path for found in accepted])
        blocks = self.record(accepted, output, bytes_moved)
        self.last_step = started, time.perf_counter()
        return [*blocks, *self._have_read(pieces, read)] if pieces else blocks

    def prepare_drafts(self, may_draft: bool) -> bool:
        """Let the drafter read what it has not; returns whether this step drafts for any row.

        When drafts pay again after plain steps, the drafter reads what it missed over the next few steps. A row gets
        its drafts as soon as the drafter has caught up with it.
        """
        wanting = [row for row in self.rows if row.request.speculative]
        if not wanting:
            return False
        if not may_draft or (self.speculation is not None and not self.speculation.pays(self.situation())):
            self.catching_up = True
            return False
        left = CATCH_UP if self.catching_up else sys.maxsize
        for place, row in enumerate(self.rows):
            if self.static is None and row.lacks_at_most(FEW):
                row.read_with_draft()
            elif row.is_behind and left > 0:
                left -= self.feed(row, place, left)
        self.catching_up = self.catching_up and any(row.is_behind for row in self.rows)
        return not all(row.is_behind for row in wanting)

    def situation(self) -> Situation:
        """What the cost of the next step depends on."""
        return Situation(max(self.cache.target.lengths), len(self.rows), self.sampling.all_greedy)

    def draft_and_verify(self) -> tuple[StepOutput | TargetOutput, list[Accepted]]:
        verified = self.verified()
        output: StepOutput | TargetOutput
        if self.static is not None and self.is_captured:
            output = self.static(verified)  # drafts, runs the target and lets it choose, as one captured graph
            tree, accepted = output.tree, accept(output.tree, output.choices)
        else:
            tree = self.drafter.draft(verified, self.cache)
            output = self.target.forward_tree(tree, self.cache)
            accepted = self.verify(tree, output.logits, verified.sampling)
        if self.speculation is not None:
            levels = tree.deepest or self.drafter.depth if tree.levels is None else tree.levels
            self.speculation.observe(accepted, tree, levels)
        return output, accepted

    def verify_roots(self, pieces: list[Piece]) -> tuple[StepOutput | TargetOutput, list[Accepted], list[Read]]:
        """A step without draft tokens, and without any work of the drafter."""
        tree = Tree.root_only(self.roots())
        if self.static is not None and self.is_captured:
            captured = self.static.verify(tree, self.sampling)
            return captured, accept(captured.tree, captured.choices), []
        if pieces:
            parts = [self.target.tree_part(tree, self.cache), *self._parts(pieces)]
            output, *others = self.target.forward_parts(parts)
        else:
            output, others = self.target.forward_tree(tree, self.cache), []
        return output, self.verify(tree, output.logits, self.with_gumbel(1)), as_read(others)

    def verify(self, tree: Tree, logits: Float[Tensor, "rows nodes vocab"], sampling: BatchSampling) -> list[Accepted]:
        """Let the target choose at each node, of the tokens that the rows' constraints allow there."""
        states = constraints_of(self.rows)
        logits = masked_tree(states, tree, logits) if states else logits
        return verify(tree, logits, self.cache.target.starts, sampling, self.history)

    def roots(self) -> Int[Tensor, "rows 1"]:
        """The last token of each row, which the target has not read yet."""
        return torch.tensor([[row.text[-1]] for row in self.rows]).to(self.target.device, non_blocking=True)

    def verified(self) -> VerifiedOnHost:
        """The tokens and hidden states that the last step made certain in each row, as a batch."""
        rows, device = self.rows, self.target.device
        # A row that the drafter has not caught up with takes part for the shape alone, and gets no drafts.
        new_taps = [row.taps[:1] if row.is_behind else row.taps for row in rows]
        counts = [len(new) for new in new_taps]
        longest = max(counts)
        # The token after the last newly verified position is the root.
        ends = [row.start + 1 + count for row, count in zip(rows, counts, strict=True)]
        tokens = [row.text[row.start + 1 : end] for row, end in zip(rows, ends, strict=True)]
        tokens = [own + [0] * (longest - len(own)) for own in tokens]
        taps = [new if len(new) == longest else pad_right(new, longest) for new in new_taps]
        next_tokens = torch.tensor(tokens).to(device, non_blocking=True)
        return VerifiedOnHost(
            taps=taps[0].unsqueeze(0) if len(rows) == 1 else torch.stack(taps),
            next_tokens=next_tokens,
            roots=next_tokens[:, -1:] if len(rows) == 1 else self.roots(),
            sampling=self.sampling if self.static is not None else self.with_gumbel(self.sampled_depth + 1),
            history=self.history,
            starts=[row.start for row in rows],
            counts=counts,
            drafted=[row.drafted for row in rows],
            remaining=[0 if row.is_behind else row.usable_drafts for row in rows],
            texts=[row.text for row in rows],
            keys=[row.key for row in rows],
            choices=[row.choices for row in rows],
            last_step=self.last_step,
            constraints=constraints_of(rows),
        )

    def record(self, accepted: list[Accepted], output: StepOutput | TargetOutput, bytes_moved: int) -> list[Block]:
        """Add what was accepted to each row."""
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
            scores = None
            if row.request.logprobs:
                chosen = torch.tensor(found.tokens, device=device)
                scores = token_scores(row.request, output.logits[index, paths[index, :count]], chosen)
            if self.prefixes is not None:
                row.kept.append(path_taps[index, :count])
            # A drafter without slots reads only the newest positions, and a row that opted out needs none.
            skips = self.cache.head is None or not row.request.speculative
            is_read = skips or (self.drafts and not row.is_behind)  # a step with drafts has let the drafter read
            blocks.append(row.record_step(found, path_taps[index, :count], scores, is_read))
            row.generation.stats.bytes_moved += bytes_moved // len(self.rows)
            row.generation.stats.cache_bytes = max(row.generation.stats.cache_bytes, self.cache.num_bytes)
        return [block for block in blocks if block.tokens]

    def end(self, row: Row) -> None:
        """Take a row out, or stop reading its prompt; others move into its place."""
        if row is self.reading:
            self.give_up_slices()
            self.remember(row, self.place, self.read)
            self.reading = None
            self.cache.leave(self.place)
        else:
            place = self.rows.index(row)
            self.remember(row, place, self.cache.target.lengths[place])
            for source, goal in self.cache.end_row(place):
                self.rows[goal] = self.rows[source]
            self.rows.pop()
            self._rows_changed()
        if not self.members:  # nobody waits
            self.cache.give_back()

    def known_tokens(self, prompt: list[int]) -> int:
        """How much of the beginning of a prompt earlier texts have left."""
        return 0 if self.prefixes is None else self.prefixes.known_tokens(prompt)

    def use_prefix(self, prompt: list[int]) -> Prefix | None:
        """What earlier texts left of the beginning of a prompt that is read next."""
        return None if self.prefixes is None else self.prefixes.use(prompt)

    def may_join(self, requests: list[Request], most: int) -> bool:
        """Whether the last of these may be read in one pass with the others, of at most so many tokens.

        Not if it is to find more of its beginning in the cache once the others were read, if there is no memory for
        it, or if beginnings are known and the target reads no parts side by side.
        """
        prompts = [request.prompt for request in requests]
        known = [self.known_tokens(prompt) for prompt in prompts]
        rests = [len(prompt) - count for prompt, count in zip(prompts, known, strict=True)]
        if sum(rests) > most:
            return False
        *others, last = prompts
        end = known[-1] + BLOCK
        if self.prefixes is not None and len(last) > end and any(other[:end] == last[:end] for other in others):
            return False
        if any(known) and not self.target.packs:
            return False
        return self.fits(requests)

    def _keep_taps(self, row: Row, taps: Float[Tensor, "count tapped"]) -> None:
        """The target has read further tokens of a prompt."""
        if len(row.taps):
            row.later.append(taps)
        else:
            row.taps = taps
        if self.prefixes is not None:
            row.kept.append(taps)

    def remember(self, row: Row, place: int, held: int) -> None:
        """Keep what the cache holds of a row's text for prompts that begin like it."""
        if self.prefixes is None:
            return
        # The drafter of a row without drafts reads nothing.
        read = row.start if row.request.speculative else 0
        taps = torch.cat(row.kept)

        def head(first: int) -> Tensor | None:
            end, slots = first + BLOCK - 1, self.cache.head
            return slots.copied(place, max(first - 1, 0), end) if slots is not None and end <= read else None

        def states(first: int) -> Cached | None:
            if first < row.kept_from:
                return None
            end, of_head = first + BLOCK, head(first)
            is_read = of_head is not None or self.cache.head is None
            own = taps[(end - 1 if is_read else first) - row.kept_from : end - row.kept_from].clone()
            return Cached(self.cache.target.copied(place, first, end), of_head, own)

        held = min(held, len(row.text)) // BLOCK * BLOCK
        self.prefixes.add(row.text[:held], states, head)
        if held > row.kept_from:  # these taps are in the index now
            row.kept, row.kept_from = [taps[held - row.kept_from :].clone()], held

    def fits(self, requests: list[Request]) -> bool:
        """Whether the cache has memory for these requests beside those that it holds."""
        held = [row.request for row in self.members]
        return self.budget.fits([request.length + self.nodes for request in [*held, *requests]])

    @property
    def cache_usage(self) -> float:
        """The share of the cache's memory that the texts have reserved up to their longest possible ends."""
        slots = [row.request.length + self.nodes for row in self.members]
        return self.budget.used(slots, self.target.max_positions + self.nodes)

    def close(self) -> None:
        """Free the cache. The batch may be used again."""
        assert not self.members
        if self.static is not None:
            self.static.give_back()
            self.static = None
        if self.is_open:
            del self.cache
            self.is_open = False
        if self.prefixes is not None:
            self.prefixes.clear()

    def drafter_taps(self, taps: Float[Tensor, "batch count given"]) -> Float[Tensor, "batch count tapped"]:
        """The hidden states that this drafter reads; the target may give more, for other heads."""
        return taps if self.tap_columns is None else taps.index_select(-1, self.tap_columns)

    def with_gumbel(self, count: int) -> BatchSampling:
        """How rows sample, with the Gumbel noise of the next `count` positions."""
        starts, vocab_size = self.cache.target.starts, self.target.config.vocab_size
        sampling = self.sampling.with_gumbel(starts + 1, count, vocab_size, self.gumbel_table)
        if self.target.device.type == "cpu":  # elsewhere drawing again takes less time than waiting for the positions
            self.gumbel_table = sampling.gumbel_table
        return sampling

    def make_room(self, capacity: int) -> None:
        """Make sure that each row can hold `capacity` tokens, a tree included."""
        if not self.is_open:
            self._open(capacity)
        elif self.cache.target.capacity < (self.limit if self.is_static or self.is_lazy else capacity):
            lengths = [list(slots.lengths) for slots in self.cache.slots]
            if self.reading is not None:  # growing copies the rows in use
                unused = [0] * (self.place - len(self.rows))
                self.cache.set_lengths([*self.cache.target.lengths, *unused, self.read])
            self._grow(capacity)
            for slots, own in zip(self.cache.slots, lengths, strict=True):
                slots.set_lengths(own)

    def _open(self, capacity: int) -> None:
        """Allocate the cache, or borrow that of an earlier run with its captured step."""
        if self.is_static:
            self.static = StaticStep.borrow(self.target, self.drafter, self.max_rows, self.limit)
            self.cache = self.static.cache
        else:
            # Where unwritten slots cost nothing, no text of these lengths will ever have to be copied.
            capacity = self.limit if self.is_lazy else min(capacity + PAGE, self.limit)
            self.cache = self.target.new_cache(capacity, self.drafter.cache_shape, self.max_rows)
        self.cache.set_lengths([])
        self.is_open = True

    def _grow(self, capacity: int) -> None:
        self.give_up_slices()  # it writes to what is to be replaced
        wanted = max(self.limit, min(2 * self.cache.target.capacity, self.target.max_positions + self.nodes))
        if self.static is None:
            self.cache.make_room(*((self.limit, wanted) if self.is_lazy else (capacity, self.limit)))
            return
        # A captured step cannot grow its cache: take the rows to one with room for the longest request.
        larger = StaticStep.borrow(self.target, self.drafter, self.max_rows, wanted)
        for slots, source in zip(larger.cache.slots, self.cache.slots, strict=True):
            slots.take_over(source)
        self.static.give_back()
        self.static, self.cache = larger, larger.cache

    def _rows_changed(self) -> None:
        """Rebuild what depends on which rows are in the batch."""
        self.gumbel_table = None
        if self.rows:
            requests = [row.request for row in self.rows]
            self.sampling = BatchSampling([request.sampling for request in requests], self.target.device)
            self.history = start_history(requests, [row.generation.tokens[:-1] for row in self.rows], self.target)
            is_free = not constraints_of(self.rows)
            self.is_captured = is_free and self.static is not None and self.static.serves(self.sampling)


def as_read(outputs: list[TargetOutput]) -> list[Read]:
    """What a pass computed for parts that are a single row each."""
    return [Read(output.logits[0], output.taps[0]) for output in outputs]


def constraints_of(rows: list[Row]) -> list[ConstraintState | None]:
    """The state of each row's constraint; none at all if no row has one."""
    states = [row.constraint for row in rows]
    return states if any(state is not None for state in states) else []


def start_history(requests: list[Request], outputs: list[list[int]], target: TargetModel) -> History | None:
    """The tokens that penalties count: prompts and outputs so far. None if no request has a penalty."""
    if not any(request.sampling.needs_history for request in requests):
        return None
    history = History.start([request.prompt for request in requests], target.config.vocab_size, target.device)
    for row, output in enumerate(outputs):
        history.count(row, output)
    return history


def token_scores(
    request: Request, logits: Float[Tensor, "nodes vocab"], tokens: Int[Tensor, " nodes"]
) -> TokenScores | None:
    """The target's own log-probability of each token, and the likeliest tokens if asked for; None if not asked for."""
    if not request.logprobs:
        return None
    log_p = logits.float().log_softmax(-1)
    chosen = log_p.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    if not request.alternatives:
        return TokenScores(chosen, [])
    likeliest = log_p.topk(min(request.alternatives, log_p.shape[-1]), dim=-1)
    pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return TokenScores(chosen, [list(zip(ids, values, strict=True)) for ids, values in pairs])


def pad_right(taps: Float[Tensor, "count tapped"], count: int) -> Float[Tensor, "longest tapped"]:
    """Zeros after the taps, up to `count` positions."""
    return torch.cat([taps, taps.new_zeros(count - len(taps), taps.shape[1])])
