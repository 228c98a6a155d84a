"""One decode step of all rows: draft a tree for each, run the target on it, verify, compact the cache, record."""

import sys
import time

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.inference.core.constraint import GuardedState, masked_tree
from headstart.inference.core.gumbel import GumbelTable
from headstart.inference.core.history import History
from headstart.inference.core.request import EmittedTokens, Request, Sequence, TokenScores
from headstart.inference.core.sampling import BatchSampling
from headstart.inference.core.side_by_side import Part
from headstart.inference.core.tree import Tree, first_path, padded_rows, take
from headstart.inference.core.verify import Accepted, VerifiedOnHost, VerifiedRow, accepted_of, stacked, verify
from headstart.inference.drafters.costs import CostAware, Ran
from headstart.inference.drafters.head import TreeDrafter
from headstart.inference.engine.batch import CATCH_UP_POSITIONS, Batch
from headstart.inference.engine.speculation import SpeculationByLoad
from headstart.inference.targets.cuda_graph import StaticStep, StepOutput
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.passes import TargetOutput

READ_WITH_DRAFT_MAX = 8  # missed positions that the drafter reads with its next draft, for all rows at once


class InFlight:
    """A captured step that the host has not read yet. The next one may be launched before."""

    def __init__(self, output: StepOutput, ran: Ran | None) -> None:
        self.output, self.ran = output.copied(), ran
        # One transfer for everything: the only host sync of a decode step.
        self.on_host = stacked(output.tree, output.choices).to("cpu", non_blocking=True)
        self.copied = torch.cuda.Event() if torch.cuda.is_available() else None
        if self.copied is not None:
            self.copied.record()

    def read(self) -> list[Accepted]:
        """Wait for the step, but not for a later one."""
        if self.copied is not None:
            self.copied.synchronize()
        return accepted_of(self.on_host.tolist())


class DecodeStep:
    """Runs the steps of a batch's rows; keeps the state that one step needs from the last."""

    def __init__(self, batch: Batch, speculation: SpeculationByLoad | None) -> None:
        self.batch, self.target, self.drafter = batch, batch.target, batch.drafter
        growth = batch.drafter.growth if isinstance(batch.drafter, TreeDrafter) else None
        # Trees in batches with sampled rows: repeats go deeper only where all rows are greedy.
        self.sampled_depth = batch.drafter.depth if growth is None else growth.depth
        self.speculation, self.costs = speculation, None if speculation is None else speculation.costs
        if isinstance(growth, CostAware):
            self.costs = growth.costs
        self.drafts = False  # whether the next step, or else the last one, drafts for any row
        self.gumbel_table: GumbelTable | None = None  # noise of the last step that the next one may use again
        self._changes = 0  # the batch's count of changes for which the following were made:
        self.sampling: BatchSampling
        self.history: History | None
        self.is_captured = False  # whether a captured step serves these rows
        self.with_logits = False  # whether the logits of a captured step are needed
        self.in_flight: InFlight | None = None

    def prepare(self, may_draft: bool = True) -> None:
        """Prepare a step; this work, most of it once per new row, is not counted in the step's time."""
        batch = self.batch
        self._follow_rows()
        batch.make_room(max(batch.cache.target.lengths) + batch.nodes)
        if batch.static is not None:
            self._prepare(batch.static)
        self.drafts = self.target.passes.prepare_step(batch.cache, self._prepare_drafts(may_draft))
        for place, row in enumerate(batch.rows):
            if not row.is_remembered:  # for requests that share its prefix and come before this text ends
                batch.remember_row(row, place)
                row.is_remembered = True

    def run(self, parts: list[Part], may_run_ahead: bool = False) -> tuple[list[EmittedTokens], list[TargetOutput]]:
        """One step of all rows, after `prepare`; returns the new tokens, and the target's output for each part.

        `parts` of prompts share the target's pass of a step without drafts. If it `may_run_ahead`, a captured step
        is read later.
        """
        started, others = time.perf_counter(), list[TargetOutput]()
        if self.is_captured:
            assert not parts
            self._launch()
            if may_run_ahead and self._runs_ahead():
                return [], []
            return self.catch_up(started), []
        passes, cache = self.target.passes, self.batch.cache
        if self.drafts:
            assert not parts
            verified = self._verified()
            tree, sampling = self.drafter.draft(verified, cache), verified.sampling
            if not passes.verifies_trees:
                tree = first_path(tree)
        else:
            tree, sampling = Tree.root_only(self._roots()), self._with_gumbel(1)
        if parts:
            output, *others = passes.side_by_side([Part.of_tree(cache.target, tree), *parts])
        else:
            output = passes.tree(tree, cache)
        accepted = self._verify(tree, output.logits, sampling)
        ran = self._ran(tree)
        cache.keep([each.path for each in accepted], [each.nodes for each in accepted])
        paths = padded_rows([each.path for each in accepted]).to(self.target.device, non_blocking=True)
        blocks = self._record(accepted, take(output.taps, paths), output.logits, paths)
        self._observe(accepted, ran, None if parts else started)
        return blocks, others

    def follow_flight(self, may_go_on: bool) -> list[EmittedTokens]:
        """Read the step in flight; returns its new tokens. If it `may_go_on`, the next step is launched before, for the
        same rows in the same slots, unless one of them may end."""
        started, last, batch, blocks = time.perf_counter(), self.in_flight, self.batch, list[EmittedTokens]()
        assert last is not None
        has_room = batch.cache.target.capacity >= batch.limit
        none_ends = all(row.left > last.output.longest for row in batch.rows)
        if may_go_on and has_room and none_ends and self._may_draft() == self.drafts:
            self._launch(last)
            blocks, batch.cache.target.lengths = self._read(last, started)  # which are on the device
            if not any(row.ended for row in batch.rows):
                return blocks
        return blocks + self.catch_up()

    def catch_up(self, started: float | None = None) -> list[EmittedTokens]:
        """Read the step in flight; rows that had ended before it take no tokens of it."""
        last, self.in_flight = self.in_flight, None
        assert last is not None
        blocks, lengths = self._read(last, started)
        self.batch.cache.target.set_lengths(lengths)
        return blocks

    def _launch(self, last: InFlight | None = None) -> None:
        """Launch a captured step: after one that the host has not read, or else from what the host knows."""
        static = self.batch.static
        assert static is not None
        if last is not None:
            self._prepare(static, last.output.longest)
            output = static.go_on(last.output, self.sampling)
        elif self.drafts:
            output = static(self._verified())
        else:
            output = static.verify(Tree.root_only(self._roots()), self.sampling)
        self.in_flight = InFlight(output, self._ran(output.tree))

    def _runs_ahead(self) -> bool:
        """Whether the step after one that was just launched may be launched before the host reads it."""
        static, rows = self.batch.static, self.batch.rows
        assert static is not None
        if self.drafts and (not static.drafts_alone or any(row.unread.is_behind for row in rows)):
            return False
        return not self.with_logits and all(row.request.speculative or not self.drafts for row in rows)

    def _read(self, step: InFlight, started: float | None) -> tuple[list[EmittedTokens], list[int]]:
        """Record a captured step; returns how many tokens the target's slots now hold of each row."""
        accepted, output = step.read(), step.output
        rows = zip(self.batch.rows, accepted, strict=True)
        lengths = [len(row.text) - 1 + (0 if row.ended else len(each.path)) for row, each in rows]
        blocks = self._record(accepted, output.taps, output.logits, output.followed.paths)
        self._observe(accepted, step.ran, started)
        return blocks, lengths

    def _ran(self, tree: Tree) -> Ran | None:
        """What a step did; None if it was to draft, and had no draft tokens."""
        if not self.drafts:
            return Ran(len(self.batch.rows))
        levels = tree.deepest or self.drafter.depth if tree.levels is None else tree.levels
        recurrent = self.batch.cache.recurrent
        nodes = tree.shape[1] if recurrent is None else max(recurrent.counts)
        return Ran(len(self.batch.rows), nodes, levels) if tree.shape[1] > 1 else None

    def _observe(self, accepted: list[Accepted], ran: Ran | None, started: float | None) -> None:
        """Learn from a step, and from its time unless it shared that with prompts or with another step."""
        if self.speculation is not None and ran is not None:
            self.speculation.observe(accepted, ran)
        if self.costs is not None and ran is not None and started is not None:
            self.costs.observe(ran, time.perf_counter() - started)

    def _prepare(self, static: StaticStep, unread: int = 0) -> None:
        """Let the next captured step attend to all tokens, up to `unread` of a step in flight included."""
        batch = self.batch
        held = batch.held_after_rows
        slots = max(batch.cache.target.lengths + held) + batch.nodes + unread
        static.prepare(slots, held, self.with_logits)

    def _follow_rows(self) -> None:
        """Rebuild the sampling parameters and the history after a change of the batch's rows."""
        if self._changes == self.batch.changes:
            return
        rows, self._changes, self.gumbel_table = self.batch.rows, self.batch.changes, None
        requests = [row.request for row in rows]
        self.sampling = BatchSampling([request.sampling for request in requests], self.target.device)
        self.history = start_history(requests, [row.generation.tokens[:-1] for row in rows], self.target)
        # Penalties and grammars need the host within a step.
        self.is_captured = self.batch.static is not None and not constraints_of(rows) and self.history is None
        self.with_logits = any(request.logprobs for request in requests)

    def _prepare_drafts(self, may_draft: bool) -> bool:
        """Let the drafter read the positions that it missed; returns whether this step drafts for any row.

        When drafts pay again after plain steps, the drafter catches up over a few steps. It drafts for a row as soon
        as it has caught up with it.
        """
        batch = self.batch
        wanting = [row for row in batch.rows if row.request.speculative]
        if not (may_draft and self._may_draft()):
            batch.catching_up = batch.catching_up or bool(wanting and self.drafter.depth)
            return False
        left = CATCH_UP_POSITIONS if batch.catching_up else sys.maxsize
        for place, row in enumerate(batch.rows):
            if batch.static is None and row.unread.newest and row.unread.count <= READ_WITH_DRAFT_MAX:
                row.unread.newest = row.unread.count
            elif row.unread.is_behind and left > 0:
                left -= batch.feed(row, place, left)
        batch.catching_up = batch.catching_up and any(row.unread.is_behind for row in batch.rows)
        return not all(row.unread.is_behind for row in wanting)

    def _may_draft(self) -> bool:
        """Whether a row takes drafts, and these pay at present."""
        if not self.drafter.depth or not any(row.request.speculative for row in self.batch.rows):
            return False
        return self.speculation is None or self.speculation.pays(len(self.batch.rows))

    def _verify(self, tree: Tree, logits: Float[Tensor, "rows nodes vocab"], sampling: BatchSampling) -> list[Accepted]:
        """Let the target choose at each node among the tokens that the row's constraint allows."""
        states = constraints_of(self.batch.rows)
        if states:
            tree, logits = masked_tree(states, tree, logits)
        return verify(tree, logits, self.batch.cache.target.starts, sampling, self.history)

    def _roots(self) -> Int[Tensor, "rows 1"]:
        """The last token of each row, which is not in the target's cache yet."""
        return torch.tensor([[row.text[-1]] for row in self.batch.rows]).to(self.target.device, non_blocking=True)

    def _verified(self) -> VerifiedOnHost:
        """The tokens and hidden states that the last step verified in each row, as a batch."""
        rows, device = self.batch.rows, self.target.device
        verified, new_taps = list[VerifiedRow](), list[Tensor]()
        for row in rows:
            # A row that the drafter lags behind only fills the batch's shape and gets no drafts.
            unread, lags = row.unread, row.unread.is_behind
            taps, drafts = (unread.parts[0][:1], 0) if lags else (unread.taps, row.usable_drafts)
            given = row.text, unread.start, len(taps), drafts, row.key, row.accepted, row.constraint
            verified.append(VerifiedRow(*given))
            new_taps.append(taps)
        # The token after the last newly verified position is the root.
        next_tokens = padded_rows([row.text[row.start + 1 : row.end + 1] for row in verified])
        next_tokens = next_tokens.to(device, non_blocking=True)
        is_static = self.batch.static is not None
        return VerifiedOnHost(
            taps=new_taps[0].unsqueeze(0) if len(rows) == 1 else pad_sequence(new_taps, batch_first=True),
            next_tokens=next_tokens,
            roots=next_tokens[:, -1:] if len(rows) == 1 else self._roots(),
            sampling=self.sampling if is_static else self._with_gumbel(self.sampled_depth + 1),
            history=self.history,
            rows=verified,
        )

    def _record(
        self,
        accepted: list[Accepted],
        taps: Float[Tensor, "batch longest tapped"],
        logits: Float[Tensor, "batch nodes vocab"],
        paths: Int[Tensor, "batch longest"],
    ) -> list[EmittedTokens]:
        """Add the accepted tokens to each row; `taps` are all that the target gives, along the paths."""
        device, batch = self.target.device, self.batch
        path_taps = drafter_taps(taps, batch.tap_columns).unbind()  # [longest, tapped] of each row
        blocks = []
        for index, (row, each) in enumerate(zip(batch.rows, accepted, strict=True)):
            if row.ended:
                continue
            count, row_taps = len(each.path), path_taps[index]
            if count < len(row_taps):
                row_taps = row_taps[:count]
            if self.history is not None:
                self.history.count(index, [row.text[-1], *each.tokens[:-1]])
            if batch.prefixes is not None:
                row.kept.append(row_taps)
            if row.trace is not None:
                row.trace.add(taps[index, :count])
            # A drafter without a cache reads only the newest positions, and a row that opted out needs none.
            skips = batch.cache.head is None or not row.request.speculative
            # In a step with drafts the drafter has read all earlier positions.
            is_read = skips or (self.drafts and not row.unread.is_behind)
            try:
                scores = None
                if row.request.logprobs:
                    chosen = torch.tensor(each.tokens, device=device)
                    scores = token_scores(row.request, logits[index, paths[index, :count]], chosen)
                rests = row.request.speculative and not self.drafts
                blocks.append(row.record_step(each, row_taps, scores, is_read, rests))
            except Exception as error:  # it ends this row alone
                row.fail(error)
        return [block for block in blocks if block.tokens]

    def _with_gumbel(self, count: int) -> BatchSampling:
        """How rows sample, with the Gumbel noise of the next `count` positions."""
        starts, vocab_size = self.batch.cache.target.starts, self.target.config.vocab_size
        sampling = self.sampling.with_gumbel(starts + 1, count, vocab_size, self.gumbel_table)
        if self.target.device.type == "cpu":  # elsewhere drawing again is faster than waiting for the positions
            self.gumbel_table = sampling.gumbel_table
        return sampling


def drafter_taps(
    taps: Float[Tensor, "batch count all_tapped"], columns: Int[Tensor, " tapped"] | None
) -> Float[Tensor, "batch count tapped"]:
    """The columns of the hidden states that the drafter reads; the target may return more, for other heads."""
    return taps if columns is None else taps.index_select(-1, columns)


def constraints_of(rows: list[Sequence]) -> list[GuardedState | None]:
    """The state of each row's constraint; empty if no row has one."""
    states: list[GuardedState | None] = [row.constraint for row in rows]
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
    """The target's log-probability of each token, and the likeliest tokens; None if the request asks for neither."""
    if not request.logprobs:
        return None
    log_p = logits.float().log_softmax(-1)
    chosen = log_p.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    kept = logits.float() if request.keep_logits else None
    if not request.alternatives:
        return TokenScores(chosen, [], kept)
    likeliest = log_p.topk(min(request.alternatives, log_p.shape[-1]), dim=-1)
    pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return TokenScores(chosen, [list(zip(ids, values, strict=True)) for ids, values in pairs], kept)
