"""How the next token is chosen from logits: the argmax when greedy, argmax(log p + Gumbel noise) when sampling.

If g is Gumbel noise, argmax(log p + g) is an exact sample from p. Our Gumbel noise is a pure function of three keys:
the row's seed, the absolute position of the token to be chosen, and the token id. It does not depend on the batch, the
drafter or the device. So plain decoding and the verification of any drafter's tree choose the same token at the same
position, and their outputs are token-identical. A drafter that sees the same Gumbel noise predicts the target's choice
better (the coupling of Daliri et al., arXiv 2408.07978).

Two methods of BatchSampling build on each other; rows are sequences of a batch, nodes are those of a draft tree:

    scores    log p after bias, penalties, temperature and truncation, up to a constant per node, plus the Gumbel noise
              of the node's position; greedy: the logits after bias and penalties
    choose    the argmax of the scores, which is the chosen token
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.inference.core.gumbel import GumbelTable, gumbel_noise
from headstart.inference.core.history import History, apply_penalties
from headstart.recipes.sampling import SamplingFields

TEMPERATURE_MIN = 1e-8  # below, logits / temperature would overflow: the likeliest token is chosen, as for 0
SCORES_AT_ONCE = 2**25  # 128 MiB in float32, and a few times as much for intermediate results
TOP_K_OFF = 2.0**24  # as a setting; float32 represents integers exactly up to this


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of one request.

    They apply in float32 and in Hugging Face's order: bias, penalties, temperature, top-k, top-p, min-p.
    Raises ValueError for a value outside the bounds of `SamplingFields`.
    """

    temperature: float = 0.0  # 0 is greedy: the argmax after bias and penalties
    top_k: int | None = None  # keep the k likeliest tokens, and any that tie with the k-th; None, 0 and -1: all tokens
    top_p: float = 1.0  # keep the smallest set of likeliest tokens whose total probability reaches this
    min_p: float = 0.0  # drop tokens less likely than this fraction of the likeliest one
    repetition_penalty: float = 1.0  # for prompt and output tokens: divides positive logits, multiplies negative ones
    presence_penalty: float = 0.0  # subtracted once from the logit of a token that occurs in the output
    frequency_penalty: float = 0.0  # subtracted once per occurrence of the token in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, value added to its logit); -inf forbids the token
    seed: int = 0  # keys the Gumbel noise

    def __post_init__(self) -> None:
        SamplingFields.checked({name: getattr(self, name) for name in SamplingFields.model_fields})
        if 0 < self.temperature < TEMPERATURE_MIN:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_k is not None and self.top_k < 1:
            object.__setattr__(self, "top_k", None)
        if any(token < 0 or not bias < math.inf for token, bias in self.logit_bias):  # NaN fails every comparison
            raise ValueError(
                f"logit_bias: {self.logit_bias} given, a token id of at least 0 with a bias below infinity is allowed; "
                f"leave it out for ()"
            )

    @property
    def needs_history(self) -> bool:
        """Do penalties make the choice depend on earlier tokens?"""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @cached_property  # a batch of hundreds is rebuilt whenever one of its texts ends
    def form(self) -> "Form":
        """The parts of choosing a token that are computed for this request."""
        biased = max((token + 1 for token, _ in self.logit_bias), default=0)
        if self.temperature == 0:
            return Form(True, False, penalised=self.needs_history, biased=biased)
        sorts, min_p = self.top_p < 1, self.min_p > 0
        top_k = None if sorts else self.top_k
        return Form(False, True, self.temperature != 1, top_k, sorts, min_p, self.needs_history, biased)

    @cached_property
    def settings(self) -> tuple[float, ...]:
        """The row of a batch's settings; truncation is off for greedy rows, as it keeps the likeliest token."""
        cuts = self.temperature > 0
        return (
            self.temperature,
            float(self.top_k) if cuts and self.top_k else TOP_K_OFF,
            1 - self.top_p if cuts and self.top_p < 1 else -1.0,
            math.log(self.min_p) if cuts and self.min_p > 0 else -math.inf,
            self.repetition_penalty,
            self.frequency_penalty,
            self.presence_penalty,
        )


@dataclass(frozen=True)
class Form:
    """The parts of choosing a token that are computed; rows of one form are computed together."""

    greedy: bool  # whether rows may be greedy
    sampled: bool  # whether rows may be sampled
    tempered: bool = False  # a temperature other than 0 and 1
    top_k: int | None = None  # the same for all rows
    sorts: bool = False  # for top_p, or for different top_k
    min_p: bool = False
    penalised: bool = False
    biased: int = 0  # token ids that a bias covers


TEMPERATURE, TOP_K, TAIL, LEAST, REPETITION, FREQUENCY, PRESENCE = range(7)  # the columns of a batch's settings


@dataclass(frozen=True)
class SamplingGroup:
    """The rows of a batch with one form; they are computed in one tensor operation."""

    form: Form
    rows: Int[Tensor, " rows"] | None  # None: all rows of the batch, in order
    seeds: Int[Tensor, " rows"]
    settings: Float[Tensor, "rows settings"]
    bias: Float[Tensor, "rows biased"] | None  # by token id

    def column(self, number: int) -> Float[Tensor, "rows 1 1"]:
        return self.settings[:, number, None, None]

    def warp(self, logits: Tensor, history: History | None, tokens: Tensor | None) -> Tensor:
        """`scores` without noise."""
        form = self.form
        if self.bias is not None:
            logits = add_bias(logits.float(), self.bias, tokens)
        if form.penalised:
            assert history is not None, "penalties need the history"
            if tokens is not None:
                history = History(history.prompt[:, tokens], history.counts[..., tokens])
            logits = apply_penalties(logits.float(), history, *map(self.column, (REPETITION, FREQUENCY, PRESENCE)))
        if form.tempered:
            temperatures = self.column(TEMPERATURE)
            logits = logits.float() / (temperatures.masked_fill(temperatures == 0, 1) if form.greedy else temperatures)
        if form.sorts:
            logits = cut_sorted(logits.float(), self.column(TOP_K), self.column(TAIL))
        elif form.top_k is not None and form.top_k < logits.shape[-1]:
            smallest = logits.float().topk(form.top_k, dim=-1).values[..., -1:]
            logits = logits.float().masked_fill(logits < smallest, -torch.inf)
        if form.min_p:
            logits = logits.float()
            logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + self.column(LEAST), -torch.inf)
        return logits

    def scores(
        self,
        logits: Tensor,
        history: History | None,
        tokens: Tensor | None,
        positions: Tensor | None,
        table: GumbelTable | None,
        gumbel_weight: float,
    ) -> Tensor:
        """BatchSampling.scores for the group's rows; `table` is the whole batch's."""
        warped = self.warp(logits, history, tokens)
        if positions is None or not self.form.sampled:
            return warped
        if table is not None:
            noise = table.at(positions, self.rows, tokens)  # a copy
        else:
            columns = torch.arange(logits.shape[-1], device=logits.device) if tokens is None else tokens
            noise = gumbel_noise(self.seeds, positions, columns)
        if gumbel_weight != 1:
            noise = noise.mul_(gumbel_weight)
        if self.form.greedy:
            noise = noise.masked_fill_(self.column(TEMPERATURE) == 0, 0)
        return noise.add_(warped) if noise.shape == warped.shape else noise + warped  # one position may serve all nodes


class BatchSampling:
    """Chooses tokens for all rows of a batch, each by its own Sampling.

    Built when rows enter or leave the batch, then used in every step without a host synchronisation.
    """

    def __init__(self, samplings: Sequence[Sampling], device: torch.device | str, captured: Form | None = None) -> None:
        """With `captured`, all rows are computed in that form, and `take` may replace their settings."""
        self.samplings = tuple(samplings)
        self.seeds = torch.tensor([sampling.seed for sampling in samplings], device=device)
        self.settings = torch.tensor([sampling.settings for sampling in samplings], device=device)
        members: dict[Form, list[int]] = {}
        for row, sampling in enumerate(samplings):
            members.setdefault(captured or sampling.form, []).append(row)
        self.forms = tuple(members)
        self.all_greedy = not any(form.sampled for form in members)
        # If true, the scores are the logits themselves, so the fastest kind of step has no overhead.
        self.keeps_logits = self.all_greedy and not any(form.penalised or form.biased for form in members)
        self.gumbel_table: GumbelTable | None = None
        self.taken: BatchSampling | None = None
        self.groups = []
        for form, numbers in members.items():
            if len(members) == 1:
                rows, seeds, settings = None, self.seeds, self.settings
            else:
                rows = torch.tensor(numbers, device=device)
                seeds, settings = self.seeds[rows], self.settings[rows]
            bias = bias_of([samplings[row] for row in numbers], form.biased, device) if form.biased else None
            self.groups.append(SamplingGroup(form, rows, seeds, settings, bias))

    @property
    def is_only_tempered(self) -> bool:
        """Whether each score is the logit, over the temperature and with noise if the row is sampled."""
        return not any(each.top_k or each.sorts or each.min_p or each.penalised or each.biased for each in self.forms)

    @property
    def captured_form(self) -> Form:
        """The form in which a captured step computes these rows: one of few, so that few graphs serve all batches."""
        cuts = any(form.sorts or form.top_k is not None or form.min_p for form in self.forms)
        biased = max(form.biased for form in self.forms)
        return Form(True, not self.all_greedy, not self.all_greedy, None, cuts, cuts, biased=biased)

    def take(self, other: "BatchSampling") -> None:
        """Compute the first rows with the seeds and settings of another batch with the same captured form."""
        if self.taken is other:
            return
        self.taken, count = other, len(other.samplings)
        self.seeds[:count].copy_(other.seeds)
        self.settings[:count].copy_(other.settings)
        bias = self.groups[0].bias
        if bias is not None:
            bias[:count].copy_(bias_of(other.samplings, bias.shape[1], bias.device))

    @property
    def temperatures(self) -> Float[Tensor, " batch"]:
        """0 for a greedy row."""
        return self.settings[:, TEMPERATURE]

    def with_gumbel(
        self, first: Int[Tensor, " batch"], count: int, vocab_size: int, last: GumbelTable | None = None
    ) -> "BatchSampling":
        """A copy with the Gumbel noise of `count` positions from `first` on drawn once; it scores only these.

        Noise in `last`, the table of an earlier copy, is not drawn again.
        """
        if self.all_greedy:
            return self
        prepared = copy(self)
        if last is not None:
            prepared.gumbel_table = last.moved(first, count, self.seeds)
            return prepared
        positions = first.unsqueeze(1) + torch.arange(count, device=first.device)
        tokens = torch.arange(vocab_size, device=first.device)
        prepared.gumbel_table = GumbelTable(first, gumbel_noise(self.seeds, positions, tokens))
        return prepared

    def scores(
        self,
        logits: Float[Tensor, "batch nodes vocab"],
        positions: Int[Tensor, "batch nodes_or_1"] | None,
        history: History | None = None,
        tokens: Int[Tensor, " vocab"] | None = None,
        gumbel_weight: float = 1.0,
    ) -> Float[Tensor, "batch nodes vocab"]:
        """The score of each token at an absolute position; the highest one is chosen. -inf for excluded tokens.

        Give one position per node, or one for all nodes of a row; None for scores without Gumbel noise. With a
        `gumbel_weight` other than 1 the highest is not the chosen token, but a drafter may rank tokens by these scores.
        When the columns are a draft vocabulary, `tokens` holds the target's token id of each column.
        """
        if self.keeps_logits:
            return logits
        if len(self.groups) == 1:
            return self.groups[0].scores(logits, history, tokens, positions, self.gumbel_table, gumbel_weight)
        scores = torch.empty(logits.shape, device=logits.device)
        for group in self.groups:
            rows = group.rows
            assert rows is not None
            selected = history.select(rows) if history is not None and group.form.penalised else None
            at = None if positions is None else positions[rows]
            scores[rows] = group.scores(logits[rows], selected, tokens, at, self.gumbel_table, gumbel_weight).float()
        return scores

    def choose(
        self,
        logits: Float[Tensor, "batch nodes vocab"],
        positions: Int[Tensor, "batch nodes"],
        history: History | None = None,
    ) -> Int[Tensor, "batch nodes"]:
        """The token that each row's Sampling chooses at each absolute position."""
        at_once = max(SCORES_AT_ONCE // (logits.shape[0] * logits.shape[-1]), 1)
        if self.keeps_logits or history is not None or logits.shape[1] <= at_once:
            return self.scores(logits, positions, history).max(-1).indices  # as argmax, slow in bfloat16 on a CPU
        parts = zip(logits.split(at_once, 1), positions.split(at_once, 1), strict=True)
        return torch.cat([self.scores(part, at).max(-1).indices for part, at in parts], dim=1)


def check_bias(bias: Sequence[tuple[int, float]], vocab_size: int) -> None:
    """Raise ValueError for a token outside the target's vocabulary, and if no token may be chosen."""
    if (highest := max((token for token, _ in bias), default=0)) >= vocab_size:
        raise ValueError(f"logit_bias: token {highest} given, 0 to {vocab_size - 1} is allowed; leave it out")
    forbidden = {token for token, value in bias if value == -math.inf}
    if len(forbidden) == vocab_size:
        raise ValueError(
            f"logit_bias: -infinity given for {vocab_size} tokens, at least 1 of the target's {vocab_size} must stay "
            f"allowed; forbid fewer tokens"
        )


def add_bias(
    logits: Float[Tensor, "rows nodes vocab"], bias: Float[Tensor, "rows biased"], tokens: Tensor | None
) -> Tensor:
    """Logits plus the bias of each column's token."""
    biased, vocab = bias.shape[1], logits.shape[-1]
    if tokens is not None:
        padded = torch.nn.functional.pad(bias, (0, 1))  # ids past the last biased token all read this final 0
        return logits + padded[:, tokens.clamp(max=biased)].unsqueeze(1)
    assert biased <= vocab, "a bias of a token outside the vocabulary, which check_bias refuses"
    return logits + torch.nn.functional.pad(bias, (0, vocab - biased)).unsqueeze(1)


def bias_of(samplings: Sequence[Sampling], biased: int, device: torch.device | str) -> Float[Tensor, "rows biased"]:
    """The logit bias of each row by token id; a token given twice gets the sum."""
    bias = torch.zeros(len(samplings), biased)
    for row, sampling in zip(bias, samplings, strict=True):
        for token, value in sampling.logit_bias:
            row[token] += value
    return bias.to(device)


def cut_sorted(
    logits: Float[Tensor, "batch nodes vocab"], top_k: Float[Tensor, "batch 1 1"], tail: Float[Tensor, "batch 1 1"]
) -> Float[Tensor, "batch nodes vocab"]:
    """Set logits to -inf outside top-k, then outside top-p of the rest, as Hugging Face does; `tail` is 1 - top-p."""
    # One ascending sort serves both. It is stable: of equal logits at the cutoff, later ids are kept.
    ordered, order = logits.sort(dim=-1, stable=True)
    last = (logits.shape[-1] - top_k.long()).clamp(min=0).expand(-1, logits.shape[1], -1)
    too_low = ordered < ordered.gather(-1, last)
    outside = too_low | (ordered.masked_fill(too_low, -torch.inf).softmax(-1).cumsum(-1) <= tail)
    outside[..., -1] = False  # keep the likeliest token even if rounding would drop it
    return logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
