"""Laws of rejection sampling: the output follows the target's distribution, and acceptance is as frequent as possible.

The target is a Markov chain over five symbols; the draft model is another one that knows only four of them. Every draw
is a row of the batch with its own seed, so one batch counts all texts of three tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from matrix import slow_unless
from torch import Tensor

from headstart.inference.core import verify
from headstart.inference.core.history import History
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.core.tree import Proposals, Tree
from headstart.inference.core.verify import accept, propose, rejection_choices

DRAWS, SYMBOLS, LENGTH, DEPTH = 60_000, 5, 3, 2
IDS = torch.tensor([4, 0, 2, 1])  # the draft vocabulary: symbol 3 is never drafted
generator = torch.Generator().manual_seed(5)
TARGET = torch.randn(SYMBOLS, SYMBOLS, generator=generator) * 0.8  # logits of the next symbol, given the last
DRAFT = TARGET[:, IDS] + torch.randn(SYMBOLS, len(IDS), generator=generator)
Proposer = Callable[[Tensor, Tensor, BatchSampling, Tensor, int], tuple[Tensor, Tensor]]
Chooser = Callable[[Tensor, Tensor, Proposals, BatchSampling], Tensor]

SAMPLINGS = {
    "plain": Sampling(1.0),
    "warped": Sampling(0.7, top_k=4, top_p=0.9),
    "min_p": Sampling(1.3, min_p=0.15),
    "top two": Sampling(1.0, top_k=2),  # with three children, nothing is left for q'
}


def batch_of(sampling: Sampling, seeds: Tensor) -> BatchSampling:
    """A batch with one row per seed, built without a Sampling for each."""
    batch = BatchSampling([sampling], "cpu")
    batch.seeds, batch.settings = seeds, batch.settings.expand(len(seeds), -1)
    batch.groups = [replace(batch.groups[0], seeds=seeds, settings=batch.settings)]
    return batch


def warped(sampling: BatchSampling, logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """Log-probabilities after each symbol [symbols, vocab], computed once as all draws differ only in their seed."""
    return BatchSampling(sampling.samplings, "cpu").warp(logits.unsqueeze(0), None, ids)[0]


@dataclass(frozen=True)
class Scheme:
    """A way to draft trees of depth two with `children` children per node, and to verify them."""

    children: int
    propose: Proposer = propose
    choose: Chooser = rejection_choices

    def draft(self, roots: Tensor, start: Tensor, sampling: BatchSampling) -> Tree:
        """0 -> (1 .. k), and each of these has k children in turn; `start` is the position after the root."""
        tokens, parents, proposed, log_qs = [roots.unsqueeze(1)], [torch.full_like(roots, -1).unsqueeze(1)], [], []
        first = 0
        for depth in range(DEPTH):
            frontier = tokens[-1]
            log_q = warped(sampling, DRAFT, IDS)[frontier]
            positions = (start + depth).unsqueeze(1).expand_as(frontier)
            columns, rest = self.propose(log_q, positions, sampling, IDS, self.children)
            over_target = torch.full((*frontier.shape, SYMBOLS), -torch.inf)
            over_target[..., IDS] = rest
            log_qs.append(over_target)
            proposed.append(torch.where(columns[..., -1] < 0, -1, IDS[columns[..., -1]]))
            numbers = torch.arange(first, first + frontier.shape[1]).repeat_interleave(self.children)
            # A pruned child has no parent.
            parents.append(torch.where(columns.flatten(1) < 0, -1, numbers))
            tokens.append(IDS[columns].flatten(1))
            first += frontier.shape[1]
        log_qs.append(torch.full((*tokens[-1].shape, SYMBOLS), torch.nan))  # leaves have no q', so nothing may read it
        proposals = Proposals(torch.cat([*proposed, torch.full_like(tokens[-1], -1)], 1), torch.cat(log_qs, 1))
        return Tree(torch.cat(tokens, 1), torch.cat(parents, 1), proposals)

    def choices(self, tree: Tree, start: Tensor, sampling: BatchSampling) -> Tensor:
        """The target's choice at each node."""
        assert tree.proposals is not None
        depths = [depth for depth in range(DEPTH + 1) for _ in range(self.children**depth)]
        positions = start.unsqueeze(1) + torch.tensor(depths)
        return self.choose(warped(sampling, TARGET)[tree.tokens], positions, tree.proposals, sampling)


def walk(tree: Tree, choices: Tensor) -> tuple[Tensor, Tensor]:
    """`verify.accept` for all rows at once: tokens [rows, DEPTH + 1], and how many of them each row has accepted."""
    node, count = torch.zeros(len(choices), 1).long(), torch.ones(len(choices)).long()
    alive, tokens = torch.ones(len(choices)).bool(), [choices[:, :1]]
    for _ in range(DEPTH):
        is_child = (tree.parents == node) & (tree.tokens == choices.gather(1, node))
        alive = alive & is_child.any(1)
        node = torch.where(alive, is_child.int().argmax(1), node[:, 0]).unsqueeze(1)
        tokens.append(choices.gather(1, node))
        count += alive
    return torch.cat(tokens, 1), count


def decode(scheme: Scheme, sampling: Sampling) -> Tensor:
    """Texts of three tokens after symbol 0, one per seed; in parts that fit into the processor's cache."""
    return torch.cat([decode_part(scheme, sampling, seeds) for seeds in torch.arange(DRAWS).split(DRAWS // 10)])


def decode_part(scheme: Scheme, sampling: Sampling, seeds: Tensor) -> Tensor:
    """Draft and verify one tree per step until every text is long enough."""
    texts, lengths = torch.zeros(len(seeds), LENGTH + DEPTH + 1).long(), torch.zeros(len(seeds)).long()
    while len(rows := (lengths < LENGTH).nonzero().squeeze(1)):
        batch, start = batch_of(sampling, seeds[rows]), lengths[rows] + 1
        roots = torch.where(start > 1, texts[rows, start - 2], 0)
        tree = scheme.draft(roots, start, batch)
        tokens, count = walk(tree, scheme.choices(tree, start, batch))
        for offset in range(DEPTH + 1):
            texts[rows, lengths[rows] + offset] = tokens[:, offset]
        lengths[rows] += count
    return texts[:, :LENGTH]


def plain(sampling: Sampling) -> Tensor:
    """The same by plain decoding."""
    batch, texts = batch_of(sampling, torch.arange(DRAWS)), [torch.zeros(DRAWS, 1).long()]
    for position in range(1, LENGTH + 1):
        texts.append(batch.choose(TARGET[texts[-1]], torch.full((DRAWS, 1), position)))
    return torch.cat(texts[1:], 1)


def p_value(texts: Tensor, sampling: Sampling) -> float:
    """The p-value of a chi-square test against the exact chances of the 125 texts; 0 if an impossible one occurs."""
    p = warped(BatchSampling([sampling], "cpu"), TARGET).double().exp()
    chances = (p[0, :, None, None] * p[:, :, None] * p).flatten()
    chances = chances / chances.sum()
    counts = (texts @ torch.tensor([25, 5, 1])).bincount(minlength=125)
    possible = chances > 0
    if counts[~possible].any():
        return 0.0
    expected = chances[possible] * DRAWS
    assert expected.min() > 5, "too few draws for a chi-square test"
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc((possible.sum() - 1) / 2, statistic / 2))


@pytest.mark.parametrize("name", SAMPLINGS)
def test_plain_decoding_follows_the_target(name: str) -> None:
    assert p_value(plain(SAMPLINGS[name]), SAMPLINGS[name]) > 0.001


@pytest.mark.each_value
@pytest.mark.parametrize("children", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", slow_unless(("warped", "top two"), SAMPLINGS))
def test_rejection_sampling_keeps_the_distribution(name: str, children: int) -> None:
    sampling = replace(SAMPLINGS[name], rule="rejection")
    assert p_value(decode(Scheme(children), sampling), sampling) > 0.001


def from_p_instead(log_p: Tensor, positions: Tensor, proposals: Proposals, sampling: BatchSampling) -> Tensor:
    """Broken: after a rejection the choice is sampled from p instead of the residual."""
    chosen = rejection_choices(log_p, positions, proposals, sampling)
    accepted = chosen == proposals.tokens
    return torch.where(accepted, chosen, (log_p + sampling.gumbel(positions, torch.arange(SYMBOLS))).argmax(-1))


def of_the_likeliest(
    log_q: Tensor, positions: Tensor, sampling: BatchSampling, ids: Tensor, children: int
) -> tuple[Tensor, Tensor]:
    """Broken: no child is sampled, yet the last one is accepted by p / q as if it were."""
    return log_q.topk(children, dim=-1).indices, log_q


def of_all(
    log_q: Tensor, positions: Tensor, sampling: BatchSampling, ids: Tensor, children: int
) -> tuple[Tensor, Tensor]:
    """Broken: the last child is sampled from q', but accepted by p / q."""
    return propose(log_q, positions, sampling, ids, children)[0], log_q


def reranked(
    log_q: Tensor, positions: Tensor, sampling: BatchSampling, ids: Tensor, children: int
) -> tuple[Tensor, Tensor]:
    """Broken: a sampled child is pruned if it turns out to be unlikely."""
    columns, rest = propose(log_q, positions, sampling, ids, children)
    unlikely = rest.gather(-1, columns[..., -1:]) < -1.5
    return torch.cat([columns[..., :-1], columns[..., -1:].masked_fill(unlikely, -1)], -1), rest


BROKEN = {
    "p instead of the residual": Scheme(1, choose=from_p_instead),
    "the likeliest token accepted by p / q": Scheme(1, of_the_likeliest),
    "q' not renormalised": Scheme(2, of_all),
    "a tree pruned by its sampled tokens": Scheme(2, reranked),
}


@pytest.mark.parametrize(
    "name",
    slow_unless(("p instead of the residual", "a tree pruned by its sampled tokens"), BROKEN),
)
def test_a_broken_sampler_is_caught(name: str) -> None:
    sampling = Sampling(1.0, rule="rejection")
    assert p_value(decode(BROKEN[name], sampling), sampling) < 1e-6


@pytest.mark.parametrize(
    ("stream", "same_as"),
    slow_unless(
        [("DRAFT_STREAM", verify.ACCEPT_STREAM)],
        [("DRAFT_STREAM", 0), ("DRAFT_STREAM", verify.ACCEPT_STREAM), ("ACCEPT_STREAM", 0)],
    ),
)
def test_a_stream_of_random_numbers_that_is_used_twice_is_caught(
    stream: str, same_as: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling a child, accepting it and choosing another token instead each need their own stream."""
    monkeypatch.setattr(verify, stream, same_as)
    sampling = Sampling(1.0, rule="rejection")
    assert p_value(decode(Scheme(1), sampling), sampling) < 1e-6


def test_the_walk_of_these_tests_accepts_what_verification_accepts() -> None:
    batch, start = batch_of(Sampling(1.0, rule="rejection"), torch.arange(300)), torch.ones(300).long()
    scheme = Scheme(3)
    tree = scheme.draft(torch.zeros(300).long(), start, batch)
    assert tree.proposals is not None
    for row in zip(tree.tokens, tree.parents, tree.proposals.tokens, strict=True):
        check_proposals(*row)
    choices = scheme.choices(tree, start, batch)
    tokens, count = walk(tree, choices)
    wanted = [accepted.tokens for accepted in accept(tree, choices)]
    assert [row[:length] for row, length in zip(tokens.tolist(), count.tolist(), strict=True)] == wanted
    assert set(count.tolist()) == {1, 2, 3}


@pytest.mark.each_value
@pytest.mark.parametrize("children", [1, 3])
@pytest.mark.parametrize("symbol", [0, 3])
def test_acceptance_is_as_frequent_as_possible(symbol: int, children: int) -> None:
    """The optimum: the sum of p over the likeliest children plus the sum of min(p, q') over the other tokens."""
    batch, start = batch_of(Sampling(1.0, rule="rejection"), torch.arange(DRAWS)), torch.ones(DRAWS).long()
    p, q = TARGET[symbol].softmax(-1), torch.zeros(SYMBOLS)
    q[IDS] = DRAFT[symbol].softmax(-1)
    likeliest = q.topk(children - 1).indices
    optimum, rest = p[likeliest].sum(), q.index_fill(0, likeliest, 0)
    optimum = optimum + torch.minimum(p.index_fill(0, likeliest, 0), rest / rest.sum()).sum()

    log_q = DRAFT[symbol].log_softmax(-1).expand(DRAWS, 1, -1)
    columns, rest_q = propose(log_q, start.unsqueeze(1), batch, IDS, children)
    over_target = torch.full((DRAWS, 1, SYMBOLS), -torch.inf)
    over_target[..., IDS] = rest_q
    log_p = p.log().expand(DRAWS, 1, -1)
    choices = rejection_choices(log_p, start.unsqueeze(1), Proposals(IDS[columns[..., -1]], over_target), batch)
    passed = (IDS[columns] == choices.unsqueeze(-1)).any(-1).double().mean()
    assert float(passed) == pytest.approx(float(optimum), abs=3 * float(optimum * (1 - optimum) / DRAWS) ** 0.5)


def log(*rows: list[float]) -> Tensor:
    return torch.tensor([rows]).log()


@pytest.mark.parametrize(
    ("q", "passes"),
    [([0.5, 0.3, 0.2, 0.0], 1.0), ([0.0, 0.0, 0.0, 1.0], 0.0), ([1.0, 0.0, 0.0, 0.0], 0.5)],
    ids=["q equals p", "q is positive only where p is zero", "q is certain"],
)
def test_extreme_draft_distributions_stay_exact(q: list[float], passes: float) -> None:
    count = 20_000
    batch, positions = batch_of(Sampling(1.0, rule="rejection"), torch.arange(count)), torch.ones(count, 1).long()
    log_q, log_p = log(q).expand(count, 1, 4), log([0.5, 0.3, 0.2, 0.0]).expand(count, 1, 4)
    columns, rest = propose(log_q, positions, batch, torch.arange(4), 1)
    choices = rejection_choices(log_p, positions, Proposals(columns[..., 0], rest), batch).flatten()
    error = 3 * (0.25 / count) ** 0.5
    assert (choices == columns.flatten()).double().mean() == pytest.approx(passes, abs=error)
    shares = choices.bincount(minlength=4) / count
    assert shares.tolist() == pytest.approx([0.5, 0.3, 0.2, 0.0], abs=error)
    assert shares[3] == 0


def test_without_a_sampled_child_the_choice_is_the_seeded_one() -> None:
    batch = BatchSampling([Sampling(0.7, seed=3, rule="rejection")], "cpu")
    logits, positions = torch.randn(1, 6, 97), torch.arange(6).unsqueeze(0)
    nothing = Proposals(torch.full((1, 6), -1), torch.full((1, 6, 97), torch.nan))
    choices = rejection_choices(batch.warp(logits), positions, nothing, batch)
    assert torch.equal(choices, batch.choose(logits, positions))


def test_greedy_rows_get_the_likeliest_children_and_the_argmax() -> None:
    samplings = [Sampling(rule="rejection"), Sampling(1.0, seed=1, rule="rejection")]
    logits, positions = torch.randn(2, 6, 97) * 300, torch.arange(6).expand(2, 6)  # exp(logits) overflows
    ids = torch.arange(97)
    for batch, rows in ((BatchSampling(samplings, "cpu"), 2), (BatchSampling(samplings[:1], "cpu"), 1)):
        columns, rest = propose(batch.warp(logits[:rows]), positions[:rows], batch, ids, 3)
        assert torch.equal(columns[0], logits[0].topk(3).indices)
        other = Proposals(columns[..., -1], rest)
        choices = rejection_choices(batch.warp(logits[:rows]), positions[:rows], other, batch)
        assert torch.equal(choices[0], logits[0].argmax(-1))


def test_a_mixed_batch_drafts_and_verifies_each_row_as_if_alone() -> None:
    samplings = [Sampling(0.7, 20, seed=5), Sampling(), Sampling(1.0, seed=6), Sampling(1.0, top_p=0.5)]
    samplings = [replace(sampling, rule="rejection") for sampling in samplings]
    drafts, logits = torch.randn(4, 6, 97), torch.randn(4, 6, 97)
    positions, ids = torch.randint(50, (4, 6)), torch.arange(97)

    def run(batch: BatchSampling, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        columns, rest = propose(batch.warp(drafts[rows]), positions[rows], batch, ids, 2)
        proposals = Proposals(columns[..., -1], rest)
        return columns, rest, rejection_choices(batch.warp(logits[rows]), positions[rows], proposals, batch)

    together = run(BatchSampling(samplings, "cpu"), slice(None))
    for row, sampling in enumerate(samplings):
        own = run(BatchSampling([sampling], "cpu"), slice(row, row + 1))
        assert all(torch.equal(mine, whole[row : row + 1]) for mine, whole in zip(own, together, strict=True))


def check_proposals(tokens: Tensor, parents: Tensor, proposed: Tensor) -> None:
    """Assert that each sampled child of a row is in its tree, so the tree was not pruned by what was sampled.

    A finished tree cannot show whether a node was removed because of what was sampled below it.
    """
    children = set(zip(parents.tolist(), tokens.tolist(), strict=True))
    for node, token in enumerate(proposed.tolist()):
        assert token < 0 or (node, token) in children, (
            f"node {node}: its sampled child, token {token}, was pruned, which biases the output"
        )


def test_sampling_needs_no_host_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device no value can be read and no shape can depend on data, so a CUDA graph can hold all of it."""
    options: dict[str, Any] = {
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "logit_bias": ((3, 1.0),),
    }
    samplings = [
        Sampling(rule="rejection"),
        Sampling(0.7, rule="rejection", **options),
        Sampling(0.7, rule="rejection"),
    ]
    batch = BatchSampling(samplings, "meta")
    logits, positions = torch.zeros(3, 6, 97, device="meta"), torch.zeros(3, 6, dtype=torch.long, device="meta")
    history = History(torch.zeros(3, 97, dtype=torch.bool, device="meta"), torch.zeros(3, 1, 97, device="meta"))
    ids = torch.zeros(50, dtype=torch.long, device="meta")

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a constant was copied to the device")

    monkeypatch.setattr(torch, "tensor", refused)
    history = history.followed_by(positions, torch.zeros(3, 6, 6, dtype=torch.bool, device="meta"))
    history = history.extend(positions, positions)
    log_p, log_q = batch.warp(logits, history), batch.warp(logits[..., :50], history, ids)
    columns, _ = propose(log_q, positions, batch, ids, 3)
    proposals = Proposals(ids[columns[..., -1]], log_p)
    assert batch.choose(logits, positions, history).shape == (3, 6)
    assert rejection_choices(log_p, positions, proposals, batch).shape == (3, 6)
