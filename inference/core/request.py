"""A request from prompt to finished text: what it asks for, where its text ends, and what was generated so far."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import count, zip_longest
from typing import Literal

import torch
import xxhash
from jaxtyping import Float
from torch import Tensor

from headstart.inference.core.constraint import Constraint, GuardedState, NoWayOnError
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.verify import Accepted

GREEDY = Sampling()
TRACE_COPY_STEPS = 64  # steps whose hidden states are copied to host memory together
# Arguments of a model's forward, [1, prompt] each.
BY_TOKEN = ("input_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids")
ALL_OF_IT = "give all that the target's processor returns, as in generate(**processor(...)), or leave them out"
Detokenize = Callable[[list[int]], str]
Alternatives = list[tuple[int, float]]  # tokens with their log-probabilities


@dataclass(frozen=True)
class StopStrings:
    """Strings that end a text. One may begin in one token and end in another; `detokenize` turns tokens into text."""

    strings: tuple[str, ...]
    detokenize: Detokenize

    def __post_init__(self) -> None:
        if not self.strings or not all(self.strings):
            raise ValueError(f"stop strings: {list(self.strings)} given, one or more that are not empty are allowed")

    def kept(self, tokens: list[int], fresh: int) -> int | None:
        """How many of the last `fresh` tokens to keep if one of them completes a stop string; None if none does."""
        before = len(tokens) - fresh
        first = self._reach(tokens[:before])
        if not self._contained(tokens[first:]):
            return None
        return next(count for count in range(1, fresh + 1) if self._contained(tokens[first : before + count]))

    def _reach(self, tokens: list[int]) -> int:
        """The index of the first token that may begin a stop string that is still incomplete."""
        # A string of n bytes begins within the last n bytes: n tokens, or more where some tokens have no text.
        num_bytes = max(len(string.encode()) for string in self.strings)
        count = num_bytes
        while count < len(tokens) and len(self.detokenize(tokens[-count:])) < num_bytes:
            count *= 2
        return max(len(tokens) - count, 0)

    def _contained(self, tokens: list[int]) -> bool:
        return self.first_in(self.detokenize(tokens)) is not None

    def first_in(self, text: str) -> tuple[int, str] | None:
        """Where a text's first stop string begins, and that string; the longest of several at one position."""
        matches = [(start, -len(each), each) for each in self.strings if (start := text.find(each)) >= 0]
        return (min(matches)[0], min(matches)[2]) if matches else None


def cut_at_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """The tokens up to the first end token, which is included."""
    for i, token in enumerate(tokens):
        if token in ends:
            return tokens[: i + 1]
    return tokens


@dataclass
class DecodeStats:
    """Statistics summed over one or more generations."""

    steps: int = 0  # target steps after prefill
    tokens: int = 0  # new tokens from these steps, bonus tokens included
    drafted: int = 0  # draft tokens that the target verified; roots are not draft tokens
    drafting_steps: int = 0  # steps that verified any
    resting_steps: int = 0  # steps of a text that may be drafted, in which drafts were off: one token each
    seconds: float = 0.0  # wall time of the whole generation, prefill included
    accepted_at_depth: list[int] = field(default_factory=list)  # steps in which at least 1, 2, ... drafts became text

    @property
    def acceptance_length(self) -> float:
        """The mean number of tokens per target step, the bonus token included (tau in the EAGLE papers).

        Steps count in which drafts were on, or all steps if they never were.
        """
        resting = self.resting_steps % max(self.steps, 1)
        return (self.tokens - resting) / max(self.steps - resting, 1)

    @property
    def acceptance(self) -> list[float]:
        """Acceptance rate by depth: the share of steps that accepted at least 1, 2, ... draft tokens."""
        return [count / (self.steps - self.resting_steps) for count in self.accepted_at_depth]

    def count_step(self, accepted: int, kept: int, drafted: int, rests: bool = False) -> None:
        """Add a target step in which `kept` tokens became text, `accepted` of them draft tokens."""
        self.steps += 1
        self.tokens += kept
        self.drafted += drafted
        self.drafting_steps += drafted > 0
        self.resting_steps += rests
        self.accepted_at_depth.extend([0] * (accepted - len(self.accepted_at_depth)))
        for depth in range(accepted):
            self.accepted_at_depth[depth] += 1

    @classmethod
    def sum_of(cls, parts: Iterable["DecodeStats"]) -> "DecodeStats":
        """The statistics of several generations, summed."""
        values = [vars(part) for part in parts]
        by_depth = zip_longest(*(part["accepted_at_depth"] for part in values), fillvalue=0)
        names = (each.name for each in fields(cls) if each.name != "accepted_at_depth")
        totals = {name: sum(part[name] for part in values) for name in names}
        return cls(**totals, accepted_at_depth=[sum(steps) for steps in by_depth])


@dataclass(frozen=True)
class Images:
    """What the target's forward takes of a prompt with images, as the target's processor gives it.

    The prompt has one placeholder token for each feature of an image. It is read in one pass up to the end of its last
    image; after that it is text like any other.
    """

    # Arguments of the model's forward, such as pixel_values and image_grid_thw. Its input_ids, if any, replace the
    # request's prompt, which has other tokens for placeholders outside the vocabulary.
    inputs: Mapping[str, Tensor]
    end: int  # tokens of the prompt up to the end of the last image
    placeholders: tuple[int, ...] = ()  # token ids that stand for images

    @cached_property
    def digest(self) -> int:
        """A digest of the pixels, as prompts of the same tokens may show other images."""
        found = xxhash.xxh3_128()
        for name, tensor in sorted(self.inputs.items()):
            if name not in BY_TOKEN:
                found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return found.intdigest()

    @classmethod
    def of(cls, encoded: Mapping[str, Tensor], placeholders: tuple[int, ...]) -> "Images":
        """From the output of a processor for one prompt; `placeholders` are the token ids that stand for images.

        The token after the last one is read with it: it ends the image, and in some families has a place in its grid.
        """
        (ids,) = encoded["input_ids"].tolist()
        (end,) = [place for place, token in enumerate(ids, start=1) if token in placeholders][-1:] or [len(ids)]
        inputs = {name: each for name, each in encoded.items() if name != "attention_mask"}
        return cls(inputs, min(end + 1, len(ids)), placeholders)

    def prompt(self, vocab_size: int) -> list[int]:
        """The prompt's tokens for a request and for heads: 0 in place of a placeholder outside the vocabulary."""
        ids: list[int] = self.inputs["input_ids"][0].tolist()
        return [token if token < vocab_size else 0 for token in ids]

    def over_text(self, text: list[int]) -> "Images":
        """For one pass over the prompt and tokens after it, together the `text`. Token 0 replaces placeholders that the
        target wrote, which have no image."""
        inputs = dict(self.inputs)
        for name in {*BY_TOKEN} & {*inputs}:
            after = [0 if token in self.placeholders else token for token in text[inputs[name].shape[1] :]]
            rest = torch.tensor([after], dtype=torch.long).to(inputs[name])
            inputs[name] = torch.cat([inputs[name], rest if name == "input_ids" else torch.zeros_like(rest)], dim=1)
        return Images(inputs, len(text))

    def arguments(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The arguments for a pass over the first `end` tokens of the prompt."""
        cut = {name: self.inputs[name][:, : self.end] for name in BY_TOKEN if name in self.inputs}
        moved = {name: tensor.to(device) for name, tensor in {**self.inputs, **cut}.items()}
        return {name: each.to(dtype) if each.is_floating_point() else each for name, each in moved.items()}


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop: StopStrings | None = None
    logprobs: bool = False
    end_tokens: tuple[int, ...] | None = None  # None: the target's own
    priority: int = 0  # requests of a higher one are decoded first
    alternatives: int = 0  # how many of the likeliest tokens to report with each logprob
    show_trees: bool = False  # hand out each step's draft tree with its block
    speculative: bool = True  # False: no draft tokens for this text, whatever the rest of its batch does
    constraint: Constraint | None = None  # the form of the output
    keep_logits: bool = False  # with logprobs: keep the target's logits as well
    prompt_logprobs: bool = False  # of the prompt's tokens too; then no prefix is reused
    images: Images | None = None  # of the prompt

    @property
    def length(self) -> int:
        """Tokens of the longest possible text, prompt included."""
        return len(self.prompt) + self.max_new_tokens


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of new tokens under the target alone at temperature 1, in nats."""

    chosen: list[float]
    alternatives: list[Alternatives]  # empty if the request asks for none
    logits: Float[Tensor, "new vocab"] | None = None  # if the request keeps them


@dataclass
class Generation:
    """The output of a request so far."""

    tokens: list[int] = field(default_factory=list)  # the new ones, an end token included
    stats: DecodeStats = field(default_factory=DecodeStats)
    logprobs: list[float] | None = None  # one per new token, under the target alone at temperature 1, in nats
    alternatives: list[Alternatives] = field(default_factory=list)  # to each new token, the likeliest first
    prompt_scores: TokenScores | None = None  # of the prompt's tokens but the first, if the request asks for them
    logits: list[Float[Tensor, "_ vocab"]] = field(default_factory=list)  # for all new tokens, if kept
    finish: Literal["length", "end", "stop", "cancelled", "error"] = "length"
    error: Exception | None = None  # the reason, if `finish` is "error"
    cached_tokens: int = 0  # tokens of the prompt that were cached


@dataclass(frozen=True)
class EmittedTokens:
    """New tokens of a request from one pass."""

    number: int  # the request's
    tokens: list[int]
    depths: list[int | None]  # the draft depth of each; BONUS for a bonus token, None if nothing was drafted
    drafted: int | None = None  # draft tokens that the step verified; None: these tokens come from prefill
    accepted: int = 0  # draft tokens that became text, all but one of the tokens
    tree: Accepted | None = None  # its path ends with the text; if asked for, and something was drafted


@dataclass
class Unread:
    """Hidden states of a row that its drafter has not read."""

    parts: list[Float[Tensor, "_ tapped"]]  # at consecutive positions
    start: int  # the first of these positions
    newest: int = 0  # positions that the drafter reads with its next draft; 0 until it has read the prompt

    @property
    def taps(self) -> Float[Tensor, "count tapped"]:
        """All of them together."""
        if len(self.parts) > 1:
            self.parts = [torch.cat(self.parts)]
        return self.parts[0]

    @property
    def count(self) -> int:
        """The number of positions."""
        return sum(map(len, self.parts))

    @property
    def is_behind(self) -> bool:
        """Whether the drafter lacks more than it reads with its next draft."""
        return self.count > self.newest

    def has_read(self, count: int) -> None:
        """Drop the first `count` positions, which the drafter has read."""
        self.start, self.parts = self.start + count, [self.taps[count:]]
        self.newest = max(self.newest, 1)


@dataclass
class StateTrace:
    """The target's hidden states of a row for training, without those of a reused prefix."""

    start: int = 0  # the first position that the target read for this row
    recent: list[Float[Tensor, "count tapped"]] = field(default_factory=list)  # on the target's device
    before: list[Float[Tensor, "count tapped"]] = field(default_factory=list)  # in host memory

    def add(self, taps: Float[Tensor, "count tapped"]) -> None:
        """Add the states at the next positions."""
        self.recent.append(taps)
        if len(self.recent) == TRACE_COPY_STEPS:
            self._move()

    def whole(self) -> Float[Tensor, "count tapped"]:
        """All states, in host memory."""
        self._move()
        return torch.cat(self.before)

    def _move(self) -> None:
        if self.recent:
            self.before.append(torch.cat(self.recent).cpu())
            self.recent = []


@dataclass(eq=False)
class Sequence:
    """A request that is being decoded: its text, and how far target and drafter have read it."""

    number: int  # of the request, in the order of submission
    request: Request
    generation: Generation
    end_tokens: tuple[int, ...]
    text: list[int]  # prompt and output; the last token is the root, which the target has not read yet
    unread: Unread
    started: float  # time.perf_counter() before prefill
    kept_from: int = 0  # positions whose states are known without this row
    kept: list[Tensor] = field(default_factory=list)  # the taps from there on, if prefixes are kept
    trace: StateTrace | None = None  # if finished texts are kept for training
    constraint: GuardedState | None = None
    is_remembered: bool = False  # whether the prompt was kept for others that share its prefix
    accepted: Accepted | None = None  # the path of the last tree; None after prefill
    ended: bool = False
    offset: int = 0  # of the positions after its images, as in `Slots.offsets`
    key: int = field(default_factory=count().__next__)  # unlike the number, unique among all loops

    @property
    def left(self) -> int:
        """How many new tokens the request still allows."""
        return self.request.max_new_tokens - len(self.generation.tokens)

    @property
    def usable_drafts(self) -> int:
        """How many draft tokens the next step can use, besides the bonus token."""
        return self.left - 1 if self.request.speculative else 0

    def fail(self, error: Exception) -> None:
        """End the text here, with an error of its own."""
        self.generation.finish, self.generation.error, self.ended = "error", error, True

    def record_step(
        self,
        accepted: Accepted,
        taps: Float[Tensor, "count tapped"],
        scores: TokenScores | None,
        is_read: bool = True,
        rests: bool = False,
    ) -> EmittedTokens:
        """Record the accepted path of a target step; returns the tokens that became text.

        `is_read`: the drafter has read all positions before these, or never will. `rests`: drafts were off.
        """
        if is_read:
            self.unread = Unread([taps], len(self.text) - 1, newest=len(taps))
        else:
            self.unread.parts.append(taps)
        self.accepted = accepted
        added = self.add_tokens(accepted.tokens, scores)
        path = accepted.path[: len(added) + 1]  # without nodes accepted after the end of the text
        # A text that ends inside its drafts has no bonus token: its last token counts as the step's own.
        drafts = max(len(added) - 1, 0)
        self.generation.stats.count_step(drafts, len(added), accepted.drafted, rests)
        tree = replace(accepted, path=path) if self.request.show_trees and accepted.drafted else None
        return EmittedTokens(self.number, added, accepted.depths[: len(added)], accepted.drafted, drafts, tree)

    def add_tokens(self, tokens: list[int], scores: TokenScores | None) -> list[int]:
        """Add tokens until the text ends; returns those that were added."""
        added = cut_at_end(tokens[: self.left], self.end_tokens)
        stop = self.request.stop
        before_stop = None if stop is None else stop.kept(self.generation.tokens + added, len(added))
        added = added[:before_stop]
        allowed = len(added) if self.constraint is None else self.constraint.advance(added)
        is_allowed, added = allowed == len(added), added[:allowed]
        self.text += added
        self.generation.tokens += added
        if scores is not None:
            self.generation.logprobs = (self.generation.logprobs or []) + scores.chosen[: len(added)]
            self.generation.alternatives += scores.alternatives[: len(added)]
            if scores.logits is not None:
                self.generation.logits.append(scores.logits[: len(added)])
        if self.constraint is not None and not is_allowed:  # some token is chosen even if none may follow
            self.fail(self.constraint.error or no_token_error(self.generation.tokens))
        elif before_stop is not None:
            self.generation.finish = "stop"
        elif added[-1] in self.end_tokens:
            self.generation.finish = "end"
        self.ended = self.left == 0 or self.generation.finish != "length"
        self.generation.stats.seconds = time.perf_counter() - self.started
        return added


def no_token_error(tokens: list[int]) -> NoWayOnError:
    return NoWayOnError(
        f"the format allows no token after the {len(tokens)} written ones, one or more are required: it has become too "
        f"complex to compute, or a bias forbids all tokens that it allows; simplify it, or leave the bias out"
    )
