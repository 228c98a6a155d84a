"""Prefill: full prompts in one pass, or a long one chunk by chunk while other rows decode."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.inference.core.cache import KVCache
from headstart.inference.core.constraint import masked_roots
from headstart.inference.core.request import EmittedTokens, Images, Request, Sequence, TokenScores
from headstart.inference.core.sampling import BatchSampling
from headstart.inference.core.side_by_side import Part
from headstart.inference.core.tree import causal_block
from headstart.inference.engine.batch import CATCH_UP_POSITIONS, Batch, PartialPrompt
from headstart.inference.engine.prefixes import BLOCK
from headstart.inference.engine.step import constraints_of, drafter_taps, start_history, token_scores
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.passes import TargetOutput

# In batch jobs, a batch waits for one free slot per this many running rows before it reads prompts.
ROWS_PER_FREE_SLOT = 16


@dataclass(frozen=True)
class PromptChunk:
    """Tokens of a prompt that are prefilled in the next pass."""

    row: Sequence
    place: int  # the row's, in the cache
    before: int  # tokens of the prompt that are cached already
    count: int

    @property
    def tokens(self) -> list[int]:
        return self.row.text[self.before : self.before + self.count]

    @property
    def images(self) -> Images | None:
        """The prompt's images, if they are in these tokens."""
        images = self.row.request.images
        return images if images is not None and self.before < images.end else None

    @property
    def is_scored(self) -> bool:
        """Whether logits are needed after each of its tokens, and not only after the last one."""
        return self.row.request.prompt_logprobs

    def score(self, logits: Float[Tensor, "count vocab"]) -> None:
        """Add the log-probabilities of the tokens that follow."""
        following = self.row.text[self.before + 1 : self.before + 1 + self.count]
        tokens = torch.tensor(following, dtype=torch.long, device=logits.device)
        scores = token_scores(self.row.request, logits[: len(following)], tokens)
        before = self.row.generation.prompt_scores or TokenScores([], [])
        assert scores is not None
        self.row.generation.prompt_scores = TokenScores(
            before.chosen + scores.chosen, before.alternatives + scores.alternatives
        )


class Prefill:
    """Prefills prompts in the places after a batch's rows, and lets their rows join."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.target = batch, batch.target

    def may_join(self, requests: list[Request], most: int) -> bool:
        """Whether the last request fits into one pass of at most `most` tokens together with the others.

        It has to wait if the others would cache more of its prefix, if memory is short, or if the target cannot read
        parts side by side. A prompt with images is read alone.
        """
        if any(request.images is not None for request in requests) or not self.target.passes.allows_side_by_side:
            return False
        index = self.batch.prefixes
        reused = [
            0 if index is None or request.prompt_logprobs else index.known_tokens(request.prompt)
            for request in requests
        ]
        if sum(len(request.prompt) for request in requests) - sum(reused) > most:
            return False
        *others, last = requests
        end = reused[-1] + BLOCK
        may_reuse = index is not None and not last.prompt_logprobs and len(last.prompt) > end
        waits = may_reuse and any(other.prompt[:end] == last.prompt[:end] for other in others)
        return not waits and self.batch.fits(requests)

    def next_chunks(self, rows: list[Sequence], most: int) -> list[PromptChunk]:
        """The next chunks, of at most `most` tokens: the prompts of these rows, or more of the partial prompt."""
        batch, index = self.batch, self.batch.prefixes
        if rows:
            chunks = self._seat(rows)
            images = rows[0].request.images
            stop = 0 if index is None or len(rows) > 1 else index.copies_at(rows[0].text, images)
            if sum(chunk.count for chunk in chunks) <= most and not stop and images is None:
                return chunks
            (chunk,) = chunks
            batch.partial = PartialPrompt(chunk.row, chunk.place, chunk.before, stop)
        partial = batch.partial
        assert partial is not None
        end = partial.states_at if partial.cached < partial.states_at else len(partial.row.text)
        count = min(most, end - partial.cached)
        if (images := partial.row.request.images) is not None and partial.cached < images.end:
            count = images.end
        return [PromptChunk(partial.row, partial.place, partial.cached, count)]

    def _seat(self, rows: list[Sequence]) -> list[PromptChunk]:
        """Give rows the places after the running rows; returns what is not cached of their prompts."""
        batch, chunks = self.batch, []
        batch.make_room(max(len(row.text) for row in rows) + batch.nodes)
        for place, row in enumerate(rows, len(batch.rows)):
            before = batch.take_place(row, place)
            chunks.append(PromptChunk(row, place, before, len(row.text) - before))
        return chunks

    def parts(self, chunks: list[PromptChunk]) -> list[Part]:
        """The chunks as parts of a pass."""
        row = self.batch.cache.row
        return [
            chunk_part(self.target, each.tokens, row(each.place), each.before, not each.is_scored) for each in chunks
        ]

    def run(self, chunks: list[PromptChunk]) -> list[TargetOutput]:
        """Prefill chunks in a pass of their own; returns the target's output for each."""
        passes = self.target.passes
        if len(chunks) > 1:
            return passes.side_by_side(self.parts(chunks))
        (chunk,) = chunks
        row, inputs = self.batch.cache.row(chunk.place), torch.tensor([chunk.tokens], device=self.target.device)
        wanted = None if chunk.is_scored else [chunk.count - 1]
        if chunk.images is None:
            return [passes.prefill(inputs, row, chunk.before, wanted)]
        output = passes.read_images(inputs, chunk.images, row, wanted)
        refuse_nan(output.logits[:, -1:], self.target)  # here, where it ends this text alone
        chunk.row.offset = passes.offset
        return [output]

    def finish(self, chunks: list[PromptChunk], outputs: list[TargetOutput], feeds: bool) -> list[EmittedTokens]:
        """Record a pass over chunks; returns the first new tokens of the prompts that are complete.

        `feeds`: the drafter reads the chunks at once, as drafts pay at present.
        """
        batch = self.batch
        for chunk, output in zip(chunks, outputs, strict=True):
            taps = drafter_taps(output.taps, batch.tap_columns)[0]
            chunk.row.unread.parts.append(taps)
            if batch.prefixes is not None:
                chunk.row.kept.append(taps)
            if chunk.row.trace is not None:
                chunk.row.trace.add(output.taps[0])
            if chunk.is_scored:
                chunk.score(output.logits[0])
        partial = batch.partial
        if partial is not None:
            (chunk,) = chunks
            partial.cached += chunk.count
            if partial.cached < len(partial.row.text):
                if feeds:
                    batch.feed(partial.row, partial.place, CATCH_UP_POSITIONS + chunk.count)
                # Chunk by chunk: copying a full prompt at once would stall the rows.
                at = partial.cached if partial.cached == partial.states_at else 0
                batch.remember(partial.row, partial.place, partial.cached, at)
                return []
            batch.partial = None
            if partial.place != len(batch.rows):  # another row has ended meanwhile
                batch.cache.move(partial.place, len(batch.rows), partial.cached)
        return self._start([chunk.row for chunk in chunks], torch.stack([output.logits[0, -1:] for output in outputs]))

    def _start(self, rows: list[Sequence], logits: Float[Tensor, "rows 1 vocab"]) -> list[EmittedTokens]:
        """Let rows decode after their prefill; the logits give their first tokens.

        The drafter reads the prompts with the next step, so that the first token does not wait for it.
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
            try:
                scores = token_scores(row.request, logits[number], choices[number])
                added = row.add_tokens(choices[number].tolist(), scores)
            except Exception as error:  # it ends this row alone
                row.fail(error)
            else:
                blocks.append(EmittedTokens(row.number, added, [None] * len(added)))
        self.batch.join(rows)
        return [block for block in blocks if block.tokens]


def chunk_part(target: TargetModel, tokens: list[int], row: KVCache, before: int, last_only: bool) -> Part:
    """A chunk of a prompt as part of a pass."""
    row.set_lengths([before])
    inputs = torch.tensor([tokens], device=target.device)
    return Part(row.target, inputs, causal_block(len(tokens), target.device), last_only)


def refuse_nan(logits: Float[Tensor, "rows 1 vocab"], target: TargetModel) -> None:
    """Raise ValueError if the logits are NaN or infinite: a token would be chosen from them all the same."""
    if not bool((logits < torch.inf).all()):  # NaN fails every comparison; -infinity only forbids a token
        raise ValueError(
            f"the target's logits are NaN or infinite in {str(target.dtype).removeprefix('torch.')}, only finite ones "
            f"are allowed; set target.dtype to float32, and if that does not help, download its weights again"
        )


class PrefillSchedule:
    """Decides when prompts are read next, and how many tokens of them one pass reads."""

    def __init__(self, chunk: int, chunk_with_rows: int, prompts_first: bool, shares_steps: bool = False) -> None:
        """A pass reads at most `chunk` tokens of prompts, or `chunk_with_rows` while rows run and so wait for it.

        With `prompts_first`, rows wait for all prompts that have a slot, whatever their length. With `shares_steps`,
        prompts are read in the passes of running rows, never in passes of their own. Such steps draft nothing: with
        drafts and a chunk they would take longer than a row should wait.
        """
        if chunk < 1:
            raise ValueError(f"prefill_chunk: {chunk} given, 1 or more is allowed; leave it out for 512")
        self.chunk, self.chunk_with_rows = chunk, min(chunk, chunk_with_rows)
        self.prompts_first, self.shares_steps = prompts_first, shares_steps
        self.read_last = False  # whether the last pass read prompts alone

    def reads_next(self, running: int, free: int = 1, waiting: int = 1) -> bool:
        """Whether prompts are read next, if any wait. A pass of their own takes turns with the running rows.

        In batch jobs, freed slots are refilled in groups: in a batch of hundreds a text ends with nearly every step,
        and a pass over its successor's prompt takes as long as the step.
        """
        if not running or self.shares_steps:
            return True
        if self.prompts_first:
            return self.read_last or free >= min(running // ROWS_PER_FREE_SLOT, waiting)
        return not self.read_last

    def tokens(self, has_rows: bool) -> int:
        """How many tokens the next pass reads at most."""
        return self.chunk_with_rows if has_rows and not self.prompts_first else self.chunk
