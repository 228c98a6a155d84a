"""Which token a distribution chooses: argmax, with Gumbel noise keyed by (seed, position) when sampling.

argmax(log p + g) with Gumbel g is an exact sample from p. The noise of a position is a pure function of the seed, the
position and the token, so plain decoding and every drafter's tree make the same choice there, and a drafter that looks
at the same noise guesses that choice better (the coupling of Daliri et al., arXiv 2408.07978).
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from inference.gumbel import gumbel_noise, uniform_noise
from recipes.schema import DecodeSection

Rule = Literal["seeded", "rejection", "typical"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, in float32 and in this order: bias, penalties, temperature, top-k, top-p, min-p.

    That is the order of Hugging Face; ValueError for a value that is not allowed.
    """

    temperature: float = 0.0  # 0 is greedy: the argmax after bias and penalties
    top_k: int | None = None  # ties with the k-th are kept
    top_p: float = 1.0  # the smallest set of likeliest tokens whose mass reaches this
    min_p: float = 0.0  # of the likeliest token's probability
    repetition_penalty: float = 1.0  # prompt and output: positive logits are divided by it, negative ones multiplied
    presence_penalty: float = 0.0  # subtracted once for a token that occurs in the output
    frequency_penalty: float = 0.0  # subtracted for each time that a token occurs in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # token and what is added to its logit; -inf forbids it
    seed: int = 0
    rule: Rule = "seeded"  # how drafts are accepted; typical is lossy
    typical_epsilon: float = 0.09  # Medusa: x passes if p(x) > min(epsilon, delta * exp(-entropy of p))
    typical_delta: float = 0.3

    def __post_init__(self) -> None:
        biases = [bias for _, bias in self.logit_bias]
        allowed = {  # NaN fails every comparison
            # Colder still, logits / temperature would overflow.
            "temperature": (
                self.temperature == 0 or 1e-8 <= self.temperature < math.inf,
                "0 (greedy) or 1e-8 and more",
            ),
            "top_k": (self.top_k is None or self.top_k >= 1, "None or 1 and more"),
            "top_p": (0 < self.top_p <= 1, "more than 0, up to 1"),
            "min_p": (0 <= self.min_p <= 1, "0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "more than 0"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "-2 to 2"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "-2 to 2"),
            "logit_bias": (
                all(token >= 0 for token, _ in self.logit_bias) and all(bias < math.inf for bias in biases),
                "tokens from 0, biases below infinity",
            ),
            "seed": (-(2**63) <= self.seed < 2**63, "-2^63 to 2^63 - 1"),
            "rule": (self.rule in get_args(Rule), ", ".join(get_args(Rule))),
            "typical_epsilon": (0 < self.typical_epsilon <= 1, "more than 0, up to 1"),
            "typical_delta": (0 < self.typical_delta < math.inf, "more than 0"),
        }
        for name, (fine, range_) in allowed.items():
            if not fine:
                raise ValueError(f"{name}: {getattr(self, name)} given, {range_} is allowed")

    @property
    def needs_history(self) -> bool:
        """Does the choice depend on which tokens came before, beyond what the logits know?"""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def lossless(self) -> bool:
        """Does the output keep the target's distribution?"""
        return self.rule != "typical"


def sampling_from_recipe(section: DecodeSection, temperature: float) -> Sampling:
    """The recipe's way of sampling at one of the report's temperatures."""
    return Sampling(
        temperature=temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        min_p=section.min_p,
        repetition_penalty=section.repetition_penalty,
        presence_penalty=section.presence_penalty,
        frequency_penalty=section.frequency_penalty,
        seed=section.seed,
        rule=section.acceptance,
        typical_epsilon=section.typical_epsilon,
        typical_delta=section.typical_delta,
    )


@dataclass(frozen=True)
class History:
    """What penalties look at: the tokens of each row's prompt, and of its output before the choice at each node."""

    prompt: Bool[Tensor, "batch vocab"]
    counts: Float[Tensor, "batch nodes vocab"]  # 1 node stands for all

    @classmethod
    def start(cls, prompts: Sequence[list[int]], vocab_size: int, device: torch.device | str) -> "History":
        """Of rows without output yet."""
        seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
        for row, prompt in zip(seen, prompts, strict=True):
            row[prompt] = True
        return cls(seen.to(device), torch.zeros(len(prompts), 1, vocab_size, device=device))

    def count(self, row: int, tokens: list[int]) -> None:
        """Add tokens to a row's output, in place."""
        read = torch.tensor(tokens, dtype=torch.long, device=self.counts.device)
        self.counts[row, 0].index_add_(0, read, torch.ones(len(tokens), device=self.counts.device))

    def followed_by(
        self, tokens: Int[Tensor, "batch nodes"], ancestors: Bool[Tensor, "batch nodes nodes"]
    ) -> "History":
        """At each node of a tree: its own token and its ancestors' are counted in, the root's too."""
        batch, nodes = tokens.shape
        counts = self.counts.expand(-1, nodes, -1).scatter_add(
            -1, tokens.long().unsqueeze(1).expand(batch, nodes, nodes), ancestors.float()
        )
        return History(self.prompt, counts)

    def at(self, nodes: Int[Tensor, "batch chosen"]) -> "History":
        """Of some nodes of each row: with one per row, the last of the path that was taken, the next step's base."""
        index = nodes.long().unsqueeze(-1).expand(-1, -1, self.counts.shape[-1])
        return History(self.prompt, self.counts.gather(1, index))

    def extend(self, parents: Int[Tensor, "batch chosen"], tokens: Int[Tensor, "batch chosen"]) -> "History":
        """At new children of nodes: what their parents have, and the children's own tokens."""
        counts = self.at(parents).counts
        return History(
            self.prompt, counts.scatter_add(-1, tokens.long().unsqueeze(-1), torch.ones_like(counts[..., :1]))
        )

    def select(self, rows: Int[Tensor, " rows"]) -> "History":
        return History(self.prompt[rows], self.counts[rows])

    def of_columns(self, tokens: Int[Tensor, " columns"]) -> "History":
        """Of a draft vocabulary, given the target's token for each of its columns."""
        return History(self.prompt[:, tokens], self.counts[..., tokens])


@dataclass(frozen=True)
class Group:
    """Rows of a batch whose Sampling differs in nothing but the seed, so that they are computed together."""

    sampling: Sampling
    rows: Int[Tensor, " rows"] | None  # None: all of them, in order
    seeds: Int[Tensor, " rows"]
    bias: Float[Tensor, " biased"] | None  # by token, up to the last one that has a bias

    def warp(self, logits: Tensor, history: History | None, tokens: Tensor | None) -> Tensor:
        """Log-probabilities that are drawn from; when greedy, logits after bias and penalties."""
        sampling = self.sampling
        if self.bias is not None:
            logits = biased(logits.float(), self.bias, tokens)
        if sampling.needs_history:
            assert history is not None, "penalties need the history"
            logits = penalised(logits.float(), sampling, history if tokens is None else history.of_columns(tokens))
        if sampling.temperature == 0:
            return logits
        return torch.log_softmax(truncated(logits.float() / sampling.temperature, sampling), dim=-1)

    def scores(
        self,
        logits: Tensor,
        history: History | None,
        tokens: Tensor | None,
        positions: Tensor | None,
        table: "GumbelTable | None",
        gumbel_weight: float,
    ) -> Tensor:
        """The same, with noise where positions are given and the rows are not greedy."""
        warped = self.warp(logits, history, tokens)
        if positions is None or self.sampling.temperature == 0:
            return warped
        if table is not None:
            return torch.add(warped, table.at(positions, self.rows, tokens), alpha=gumbel_weight)
        if tokens is None:
            tokens = torch.arange(logits.shape[-1], device=logits.device)
        return torch.add(warped, gumbel_noise(self.seeds, positions, tokens), alpha=gumbel_weight)


@dataclass(frozen=True)
class GumbelTable:
    """The noise of a few consecutive positions, drawn once for a whole step: all nodes of a level share theirs."""

    first: Int[Tensor, " batch"]
    values: Float[Tensor, "batch count vocab"]

    def at(
        self,
        positions: Int[Tensor, "rows nodes"],
        rows: Int[Tensor, " rows"] | None,
        tokens: Int[Tensor, " columns"] | None,
    ) -> Float[Tensor, "rows nodes columns"]:
        """Of some rows (None: all) and tokens (None: all)."""
        first, values = (self.first, self.values) if rows is None else (self.first[rows], self.values[rows])
        index = (positions - first.unsqueeze(1)).unsqueeze(-1)
        found = values.gather(1, index.expand(-1, -1, values.shape[-1]))
        return found if tokens is None else found[..., tokens]


class BatchSampling:
    """How each row of a batch chooses; built when the composition changes, then used every step without a host sync.

    Raises ValueError for rows that accept drafts by different rules.
    """

    def __init__(self, samplings: Sequence[Sampling], device: torch.device | str) -> None:
        self.samplings = tuple(samplings)
        rules = sorted({sampling.rule for sampling in samplings})
        if len(rules) != 1:
            raise ValueError(f"rule: {', '.join(rules) or 'none'} given in one batch, one for all its rows is allowed")
        self.rule = rules[0]
        self.needs_history = any(sampling.needs_history for sampling in samplings)
        self.seeds = torch.tensor([sampling.seed for sampling in samplings], device=device)
        greedy = [sampling.temperature == 0 for sampling in samplings]
        self.all_greedy, self.greedy = all(greedy), torch.tensor(greedy, device=device)
        self.temperatures = torch.tensor([sampling.temperature for sampling in samplings], device=device)
        self.typical_epsilon = torch.tensor([[sampling.typical_epsilon] for sampling in samplings], device=device)
        self.typical_delta = torch.tensor([[sampling.typical_delta] for sampling in samplings], device=device)
        # Greedy rows without bias or penalties, the case where a step's own time shows most.
        self.as_they_are = self.all_greedy and not self.needs_history and not any(s.logit_bias for s in samplings)
        members: dict[Sampling, list[int]] = {}
        for row, sampling in enumerate(samplings):
            members.setdefault(replace(sampling, seed=0), []).append(row)
        self.table: GumbelTable | None = None
        self.groups = []
        for sampling, numbers in members.items():
            rows = torch.tensor(numbers, device=device) if len(members) > 1 else None
            seeds = self.seeds if rows is None else self.seeds[rows]
            self.groups.append(Group(sampling, rows, seeds, bias_by_token(sampling, device)))

    def with_gumbel(self, first: Int[Tensor, " batch"], count: int, vocab_size: int) -> "BatchSampling":
        """The same, with the noise of `count` positions from `first` on at hand; `scores` asks for no others then."""
        if self.all_greedy:
            return self
        prepared = copy(self)
        positions = first.unsqueeze(1) + torch.arange(count, device=first.device)
        tokens = torch.arange(vocab_size, device=first.device)
        prepared.table = GumbelTable(first, gumbel_noise(self.seeds, positions, tokens))
        return prepared

    def warp(
        self,
        logits: Float[Tensor, "batch nodes vocab"],
        history: History | None = None,
        tokens: Int[Tensor, " vocab"] | None = None,
    ) -> Float[Tensor, "batch nodes vocab"]:
        """float32 log-probabilities that sampling draws from, -inf for what is excluded; for a greedy row its logits
        after bias and penalties.

        `tokens` are the target's ids of the columns when these are a draft vocabulary.
        """
        return self._grouped(logits, history, tokens, None)

    def scores(
        self,
        logits: Float[Tensor, "batch nodes vocab"],
        positions: Int[Tensor, "batch places"],
        history: History | None = None,
        tokens: Int[Tensor, " vocab"] | None = None,
        gumbel_weight: float = 1.0,
    ) -> Float[Tensor, "batch nodes vocab"]:
        """Scores whose argmax is the token chosen for each absolute position.

        With another weight of the noise they choose nothing, but a drafter may rank by them.
        """
        return self._grouped(logits, history, tokens, positions, gumbel_weight)

    def choose(
        self,
        logits: Float[Tensor, "batch nodes vocab"],
        positions: Int[Tensor, "batch nodes"],
        history: History | None = None,
    ) -> Int[Tensor, "batch nodes"]:
        """The token chosen for each absolute position."""
        return self.scores(logits, positions, history).argmax(-1)

    def gumbel(
        self, positions: Int[Tensor, "batch nodes"], tokens: Int[Tensor, " vocab"], stream: int = 0
    ) -> Float[Tensor, "batch nodes vocab"]:
        """Gumbel noise of each row's seed, zero for a greedy one.

        Streams are independent of each other; stream 0 makes the choices.
        """
        if self.all_greedy:
            return torch.zeros(*positions.shape, len(tokens), device=positions.device)
        return gumbel_noise(self.seeds, positions, tokens, stream).masked_fill(self.greedy[:, None, None], 0)

    def uniform(self, positions: Int[Tensor, "batch nodes"], stream: int) -> Float[Tensor, "batch nodes"]:
        """One number in (0, 1) for each position, float64, keyed like the noise."""
        return uniform_noise(self.seeds, positions, positions.new_zeros(1), stream).squeeze(-1)

    def _grouped(
        self,
        logits: Tensor,
        history: History | None,
        tokens: Tensor | None,
        positions: Tensor | None,
        gumbel_weight: float = 1.0,
    ) -> Tensor:
        """Each group's scores, brought back to their rows; one group over all rows moves nothing."""
        if self.as_they_are:
            return logits
        if len(self.groups) == 1:
            return self.groups[0].scores(logits, history, tokens, positions, self.table, gumbel_weight)
        whole = torch.empty(logits.shape, device=logits.device)
        for group in self.groups:
            rows = group.rows
            assert rows is not None
            own_history = history.select(rows) if history is not None and group.sampling.needs_history else None
            own_positions = None if positions is None else positions[rows]
            found = group.scores(logits[rows], own_history, tokens, own_positions, self.table, gumbel_weight)
            whole[rows] = found.float()
        return whole


def check_bias(highest: int, vocab_size: int) -> None:
    """Refuse a bias for a token that the target does not have."""
    if highest >= vocab_size:
        raise ValueError(f"logit_bias: token {highest} given, 0 to {vocab_size - 1} is allowed")


def biased(logits: Float[Tensor, "batch nodes vocab"], bias: Tensor, tokens: Tensor | None) -> Tensor:
    """Logits plus what `bias` holds for the token of each column; ValueError for a bias beyond the vocabulary."""
    if tokens is not None:
        padded = torch.nn.functional.pad(bias, (0, 1))  # the last entry serves all tokens without a bias
        return logits + padded[tokens.clamp(max=len(bias))]
    vocab = logits.shape[-1]
    check_bias(len(bias) - 1, vocab)
    return logits + torch.nn.functional.pad(bias, (0, vocab - len(bias)))


def bias_by_token(sampling: Sampling, device: torch.device | str) -> Tensor | None:
    if not sampling.logit_bias:
        return None
    bias = torch.zeros(max(token for token, _ in sampling.logit_bias) + 1)
    for token, value in sampling.logit_bias:
        bias[token] += value
    return bias.to(device)


def penalised(logits: Float[Tensor, "batch nodes vocab"], sampling: Sampling, history: History) -> Tensor:
    """Logits after the repetition penalty (Keskar et al., arXiv 1909.05858), then OpenAI's frequency and presence."""
    in_output = history.counts > 0
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(history.prompt.unsqueeze(1) | in_output, repeated, logits)
    return logits - sampling.frequency_penalty * history.counts - sampling.presence_penalty * in_output


def truncated(logits: Float[Tensor, "batch nodes vocab"], sampling: Sampling) -> Float[Tensor, "batch nodes vocab"]:
    """-inf outside top-k, then top-p of what remains, then min-p: what Hugging Face's warpers keep, ties included."""
    top_k = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    if sampling.top_p < 1:
        # One ascending sort serves both. It is stable, so that of equal tokens at the border the later ones are kept.
        ordered, order = logits.sort(dim=-1, stable=True)
        ordered = ordered.masked_fill(ordered < ordered[..., -top_k, None], -torch.inf)
        outside = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        outside[..., -1] = False  # the likeliest token stays even when rounding says otherwise
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    elif top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.min_p > 0:
        limit = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < limit, -torch.inf)
    return logits
