"""Drafters that know the true continuation, and draft it as correctly or wrongly as a test needs."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headstart.heads.kinds.eagle3 import Eagle3Head, Eagle3Shape
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.cache import KVCache
from headstart.inference.core.constraint import Path
from headstart.inference.core.drafter import Drafter
from headstart.inference.core.request import Generation, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import Verified, VerifiedOnHost
from headstart.inference.drafters.costs import CostAware, CostTable, MeasuredCosts, Ran, StepCosts
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic, Fixed, Growth, GrowthPolicy
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.drafters.repeats import Repeats
from headstart.inference.engine.loop import DecodeLoop, generate, loop_of
from headstart.inference.targets.model import TargetModel

VOCAB = 97
Nodes = tuple[list[int], list[int]]  # tokens and parents of one row


def batch_trees(rows: Sequence[Nodes]) -> Tree:
    """One tree per row; smaller trees are padded with nodes that have no parent.

    The padding repeats the row's own tokens, so code that mistakes it for children accepts some of it, and tests fail.
    """
    longest = max(len(tokens) for tokens, _ in rows)
    tokens = [(own * longest)[:longest] if len(own) < longest else own for own, _ in rows]
    parents = [own + [-1] * (longest - len(own)) for _, own in rows]
    return Tree(torch.tensor(tokens), torch.tensor(parents))


def random_parents(nodes: int) -> list[int]:
    return [-1] + [int(torch.randint(node, ())) for node in range(1, nodes)]


def paths(tree: Tree) -> list[set[tuple[int, ...]]]:
    """For each row, the paths from the root (exclusive) to every other node, as tokens."""
    rows = []
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found: dict[int, tuple[int, ...]] = {0: ()}
        for node, parent in enumerate(parents):
            if parent >= 0:
                found[node] = (*found[parent], tokens[node])
        assert len(set(found.values())) == len(found)
        rows.append({*found.values()} - {()})
    return rows


def blocks_of(target: TargetModel, request: Request, drafter: Drafter | None = None) -> Iterator[list[int]]:
    """The new tokens of one request, a block from prefill and one from each target step."""
    return (block.tokens for block in loop_of(target, [request], drafter).run())


def finish(loop: DecodeLoop) -> None:
    while not loop.idle:
        loop.step()


def answered(loop: DecodeLoop, request: Request) -> Generation:
    """What a loop writes for one more request, once nothing is left to do."""
    found = loop.generations[loop.submit(request)]
    finish(loop)
    return found


def second_wrong(decode: Callable[..., Any]) -> Callable[..., Any]:
    """`generate_batch` that writes a wrong token into the second of several texts."""

    def wrong(target: Any, requests: Any, drafter: Any = None) -> Any:
        written = decode(target, requests, drafter)
        if len(requests) > 1:
            written[1].tokens[7] ^= 1
        return written

    return wrong


class Scripted:
    """Base of the drafters here: `tree` turns the true continuation into a draft.

    Its random numbers depend only on the text, so it drafts the same in any batch.
    """

    taps: tuple[int, ...] = ()
    cache_shape: tuple[int, int, int] | None = None
    max_nodes = depth = 40
    static_shapes = False

    def __init__(self, *texts: list[int], ahead: int = 5, seed: int = 0) -> None:
        self.texts, self.ahead, self.seed = texts, ahead, seed

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """Do nothing: `draft` is given the whole text."""

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        assert verified.roots.flatten().tolist() == [row.text[-1] for row in verified.rows]
        assert cache.target.lengths == [len(row.text) - 1 for row in verified.rows]
        trees = []
        for row in verified.rows:
            self.random = torch.Generator().manual_seed(self.seed + 1000 * len(row.text) + row.text[-1])
            trees.append(self.tree(row.text[-1], self.continuation(row.text, row.remaining)))
        return batch_trees(trees)

    def continuation(self, prefix: list[int], remaining: int) -> list[int]:
        text = next(text for text in self.texts if text[: len(prefix)] == prefix)
        return text[len(prefix) :][: max(min(self.ahead, remaining), 0)]

    def tree(self, root: int, continuation: list[int]) -> Nodes:
        raise NotImplementedError

    def random_below(self, end: int) -> int:
        return int(torch.randint(end, (), generator=self.random))


class Oracle(Scripted):
    """Drafts the true continuation as a chain: 0 - 1 - 2 - ..."""

    def tree(self, root: int, continuation: list[int]) -> Nodes:
        return [root, *continuation], [*range(-1, len(continuation))]


class Moody(Oracle):
    """An oracle that drafts a random 0 to 5 tokens, so rows of a batch accept different numbers."""

    def tree(self, root: int, continuation: list[int]) -> Nodes:
        return super().tree(root, continuation[: self.random_below(6)])


class Careless(Oracle):
    """An oracle that ignores how many tokens remain: it drafts to the end of the text and further."""

    def continuation(self, prefix: list[int], remaining: int) -> list[int]:
        return (super().continuation(prefix, self.ahead) + [1] * 20)[: self.ahead]


class Hidden(Scripted):
    """The true continuation at random nodes of a random tree, so the accepted path's cache entries must be moved.

    0 - 1 - 4
     \\- 2 - 3 - 7     the true path may be 0 2 5 8
         \\- 5 - 8
         \\- 6
    """

    def tree(self, root: int, continuation: list[int]) -> Nodes:
        tokens, parents, last = [root], [-1], 0
        for token in continuation:
            for _ in range(self.random_below(4)):
                parents.append(self.random_below(len(tokens)))
                tokens.append(self.random_below(VOCAB))
            parents.append(last)
            last = len(tokens)
            tokens.append(token)
        return tokens, parents


class Duplicates(Scripted):
    """The true token twice on each level; both copies are children of one of the two copies above.

    0 - 1 - 3 - 5     1 and 2, 3 and 4, 5 and 6 hold equal tokens
     \\- 2   \\- 6
         \\- 4
    """

    def tree(self, root: int, continuation: list[int]) -> Nodes:
        tokens, parents = [root], [-1]
        for token in continuation:
            parent = 0 if len(tokens) == 1 else len(tokens) - 1 - self.random_below(2)
            tokens += [token, token]
            parents += [parent, parent]
        return tokens, parents


class Listener(Hidden):
    """Records what the decode loop passes to it."""

    def __init__(self, *texts: list[int]) -> None:
        super().__init__(*texts)
        self.told: list[VerifiedOnHost] = []

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        self.first_taps, self.first_text = taps, text

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        self.told.append(replace(verified, rows=[replace(row, text=[*row.text]) for row in verified.rows]))
        return super().draft(verified, cache)


class HalfRightHead(Eagle3Head):
    """A head that knows the true next token at two of every three positions and guesses at random elsewhere.

    A tree grown with it is therefore right to varying depths, on varying branches.
    """

    def __init__(self, target: TargetModel, *texts: list[int]) -> None:
        sizes: dict[str, Any] = {"intermediate_size": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
        super().__init__(Eagle3Shape(32, taps=target.taps, **sizes), target.frozen, DraftVocab.full(VOCAB))
        length = max(map(len, texts)) + 40
        self.table = torch.randn(length, VOCAB, generator=torch.Generator().manual_seed(0))  # [positions, vocab]
        self.next = torch.full((length, VOCAB), -1)
        for text in texts:
            for at in range(1, len(text)):
                if at % 3:
                    self.next[at, text[at - 1]] = text[at]

    def project(self, taps: Tensor) -> Tensor:
        return taps[..., :32]

    def forward(self, features: Tensor, tokens: Tensor, positions: Tensor, mask=None, cache=None, level=0) -> Tensor:
        hidden = torch.zeros_like(features)
        hidden[..., 0] = positions + 2  # index t predicts the token at position t + 2 ...
        hidden[..., 1] = tokens  # ... from the one at position t + 1
        block = torch.zeros(len(tokens), 1, tokens.shape[1], 8)
        if cache is not None:
            cache.attend(0, block, block, block, mask)
        return hidden

    def logits(self, hidden: Tensor, level: int = 0) -> Tensor:
        at, token = hidden[..., 0].long(), hidden[..., 1].long()
        known = self.next[at, token].unsqueeze(-1)
        return self.table[at] + 3 * (torch.arange(VOCAB) == known)

    def feedback(self, hidden: Tensor, features: Tensor) -> Tensor:
        return hidden


@dataclass(frozen=True)
class Texts:
    """Prompts with their continuations by plain decoding."""

    target: TargetModel
    whole: list[list[int]]
    make_head: Callable[..., Eagle3Head]


BANNED = ((3, -math.inf),)
PENALTIES = Sampling(0.8, top_p=0.95, repetition_penalty=1.3, frequency_penalty=1.0, logit_bias=BANNED, seed=7)
# Prompts and texts of different lengths, sampled differently; three requests differ only in the seed.
REQUESTS = [
    Request([5, 6, 7, 11], 12),
    Request([3], 6, Sampling(1.0, seed=1)),
    Request([*range(40)], 9, Sampling(0.7, top_p=0.9, seed=2)),
    Request([9, 9, 1], 1),
    Request([8, 8, 8, 8, 8, 8], 8, PENALTIES),
    Request([50, 51], 14, Sampling(1.0, seed=3)),
    Request([5, 6, 7, 11], 4, Sampling(repetition_penalty=1.5)),
    Request([70, 2, 33, 41, 5], 7, Sampling(1.0, seed=4)),
    Request([12] * 17, 2, Sampling(1.0, top_k=3, min_p=0.05, seed=5)),
]


def texts_of(target: TargetModel, requests: list[Request], make_head: Callable[..., Eagle3Head]) -> Texts:
    whole = [r.prompt + generate(target, r.prompt, r.max_new_tokens, r.sampling).tokens for r in requests]
    return Texts(target, whole, make_head)


def new_tokens(texts: Texts) -> list[list[int]]:
    """What plain decoding writes for each of REQUESTS; `texts` are those of the fixture of this name."""
    return [whole[len(request.prompt) :] for whole, request in zip(texts.whole, REQUESTS, strict=True)]


@dataclass(frozen=True)
class NoThirds:
    """A constraint: no prefix of the output adds up to a multiple of three.

    It gives up on drafts of more than `patience` tokens, and raises RuntimeError once `fails_at` tokens are written.
    """

    patience: int = 99
    fails_at: int = 99

    def start(self) -> "NoThirdsState":
        return NoThirdsState(self)


@dataclass
class NoThirdsState:
    form: NoThirds
    total: int = 0
    written: int = 0

    def allowed(self, path: Path) -> Tensor:
        if self.written >= self.form.fails_at:
            raise RuntimeError("a constraint failed")
        if len(path) > self.form.patience:
            return torch.zeros(VOCAB, dtype=torch.bool)
        return (self.total + sum(path) + torch.arange(VOCAB)) % 3 > 0

    def advance(self, token: int) -> bool:
        self.total, self.written = self.total + token, self.written + 1
        return True


class SetCosts(CostTable):
    """Costs that are given, not measured: verifying n nodes takes 1 + n / `nodes` seconds, drafting a level `level`."""

    def __init__(self, level: float = 0.05, nodes: float = 40) -> None:
        level = max(level, 1e-9)
        super().__init__(MeasuredCosts((1, 2), (1 + 1 / nodes, 1 + 2 / nodes), level, level), width=1, most=100)

    def observe(self, step: Ran, seconds: float) -> None:
        """Do nothing: the costs stay as they were given."""


class LoadCosts(SetCosts):
    """A plain step takes 1 s. Each draft token adds a hundredth of that for one row, and as much again per further one
    to the power of three: with one row drafts pay as soon as any is accepted, with three rows never.
    """

    def of(self, rows: int) -> StepCosts:
        each = 0.01 * rows**3 if rows < 3 else 5.0
        return StepCosts(1.0, [1 + count * each for count in range(1, 101)], 0.01, 0.01)


def noisy_copy(target: TargetModel, amount: float) -> TargetModel:
    """A draft model that often agrees with the target: its copy with perturbed weights, the same ones every time."""
    model = type(target.model)(target.model.config)
    model.load_state_dict(target.unpacked.model.state_dict())
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)
            parameter += amount * parameter.std(unbiased=False) * drawn
    return TargetModel(model.to(target.dtype), ())


LIMITED = DraftVocab(torch.arange(0, VOCAB, 4), VOCAB)
# 0 - 1 - 3 - 6        first children are the likeliest; 2 has a second child, 1 does not
# \- 2 - 4
#     \- 5 - 7 - 8
LOPSIDED = Fixed(((0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0), (1, 1, 0), (1, 1, 0, 0)))


def half_right(growth: GrowthPolicy, repeats: int = 0) -> Callable[[Texts], Drafter]:
    def make(texts: Texts) -> Drafter:
        return HeadDrafter(HalfRightHead(texts.target, *texts.whole), growth, Repeats(repeats) if repeats else None)

    return make


def eagle3(growth: GrowthPolicy, **fields: Any) -> Callable[[Texts], Drafter]:
    return lambda texts: HeadDrafter(texts.make_head(**fields), growth)


DRAFTERS: dict[str, Callable[[Texts], Drafter]] = {
    "head, chain": eagle3(Dynamic.chain(5)),
    "head, wide tree": eagle3(Dynamic(4, 6, 30)),
    "head, depth 1": eagle3(Dynamic(1, 8, 8)),
    "head, few nodes of many": eagle3(Dynamic(5, 4, 3), seed=2),
    "head, fixed tree": eagle3(LOPSIDED),
    "head of EAGLE-3.1": eagle3(Dynamic(4, 4, 12), fc_norm=True, norm_output=True),
    "head of 25 tokens": eagle3(Dynamic(4, 4, 12), vocab=LIMITED),
    "P-EAGLE head": lambda texts: head_drafter(texts.make_head("peagle"), Dynamic(4, 4, 12)),
    "half right head, tree": half_right(Dynamic(5, 4, 16)),
    "half right head, chain": half_right(Dynamic.chain(3)),
    "half right head, fixed tree": half_right(LOPSIDED),
    "half right head, cost-aware": half_right(CostAware(5, 4, 20, SetCosts())),
    "half right head and repeats": half_right(Dynamic(3, 3, 8), 6),
    "half right head, cost-aware, and repeats": half_right(CostAware(5, 4, 20, SetCosts()), 6),
    "half right head, cost-aware chain": half_right(CostAware(6, 1, 6, SetCosts())),
    "draft model, tree": lambda texts: ModelDrafter(noisy_copy(texts.target, 0.03), Dynamic(4, 3, 9), texts.target),
    "draft model, fixed tree": lambda texts: ModelDrafter(noisy_copy(texts.target, 0.03), LOPSIDED, texts.target),
    "prompt lookup": lambda texts: Lookup(Growth(depth=5, width=3, nodes=12)),
    "oracle": lambda texts: Oracle(*texts.whole),
    "moody oracle": lambda texts: Moody(*texts.whole),
    "careless oracle": lambda texts: Careless(*texts.whole, ahead=9),
    "truth hidden in a tree": lambda texts: Hidden(*texts.whole),
    "duplicate siblings": lambda texts: Duplicates(*texts.whole),
}
