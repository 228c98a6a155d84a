"""Drafters that know the texts to come, and are as right or as wrong about them as a test wants."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heads.eagle3 import Eagle3Head, Eagle3Shape
from heads.vocab import DraftVocab
from inference.cache import KVCache
from inference.decode import DecodeLoop
from inference.drafter import Drafter, Verified, VerifiedOnHost
from inference.drafters.cost_aware import CostAware, CostAwareShape
from inference.drafters.costs import NODES, CostTable, StepCosts
from inference.drafters.growth import Dynamic, Fixed
from inference.drafters.head import HeadDrafter
from inference.request import Request
from inference.sampling import History
from inference.target.model import TargetModel
from inference.tree import Tree

VOCAB = 97
Nodes = tuple[list[int], list[int]]  # tokens and parents of one row


def side_by_side(rows: Sequence[Nodes]) -> Tree:
    """Trees of several sizes as one; smaller ones are filled up with nodes that hang nowhere.

    These carry the row's own tokens, so that whoever took them for children would be right by chance.
    """
    longest = max(len(tokens) for tokens, _ in rows)
    tokens = [(own * longest)[:longest] if len(own) < longest else own for own, _ in rows]
    parents = [own + [-1] * (longest - len(own)) for _, own in rows]
    return Tree(torch.tensor(tokens), torch.tensor(parents))


def paths(tree: Tree) -> list[set[tuple[int, ...]]]:
    """Of each row, the tokens from below the root down to every node but the root."""
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
    return (block for _, block in DecodeLoop(target, [request], drafter).run())


class Scripted:
    """What it makes of the tokens to come, behind the root, is `tree`. The same in any batch: its random numbers
    depend on the text alone.
    """

    taps: tuple[int, ...] = ()
    cache_shape: tuple[int, int, int] | None = None
    max_nodes = depth = 40
    static_shapes = False
    compilable_layers = ()

    def __init__(self, *texts: list[int], ahead: int = 5, seed: int = 0) -> None:
        self.texts, self.ahead, self.seed = texts, ahead, seed

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """Nothing to read."""

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        assert verified.roots.flatten().tolist() == [text[-1] for text in verified.texts]
        assert cache.target.lengths == [len(text) - 1 for text in verified.texts]
        rows = []
        for certain, room in zip(verified.texts, verified.remaining, strict=True):
            self.random = torch.Generator().manual_seed(self.seed + 1000 * len(certain) + certain[-1])
            rows.append(self.tree(certain[-1], self.coming(certain, room)))
        return side_by_side(rows)

    def coming(self, certain: list[int], room: int) -> list[int]:
        text = next(text for text in self.texts if text[: len(certain)] == certain)
        return text[len(certain) :][: max(min(self.ahead, room), 0)]

    def tree(self, root: int, coming: list[int]) -> Nodes:
        raise NotImplementedError

    def below(self, end: int) -> int:
        """A random number from 0 to end - 1."""
        return int(torch.randint(end, (), generator=self.random))


class Oracle(Scripted):
    """Drafts the true continuation: 0 - 1 - 2 - ..."""

    def tree(self, root: int, coming: list[int]) -> Nodes:
        return [root, *coming], [*range(-1, len(coming))]


class Moody(Oracle):
    """An oracle that looks 0 to 5 tokens ahead, as many as it likes: ragged acceptance."""

    def tree(self, root: int, coming: list[int]) -> Nodes:
        return super().tree(root, coming[: self.below(6)])


class Careless(Oracle):
    """An oracle that drafts on when there is no room left, as far as it knows the text, and beyond."""

    def coming(self, certain: list[int], room: int) -> list[int]:
        return (super().coming(certain, self.ahead) + [1] * 20)[: self.ahead]


class Hidden(Scripted):
    """The true continuation at random places of a random tree, so that the accepted path must be moved together.

    0 - 1 - 4
     \\- 2 - 3 - 7     truth: 0 2 5 8, perhaps
         \\- 5 - 8
         \\- 6
    """

    def tree(self, root: int, coming: list[int]) -> Nodes:
        tokens, parents, last = [root], [-1], 0
        for token in coming:
            for _ in range(self.below(4)):
                parents.append(self.below(len(tokens)))
                tokens.append(self.below(VOCAB))
            parents.append(last)
            last = len(tokens)
            tokens.append(token)
        return tokens, parents


class Duplicates(Scripted):
    """Every level twice, the true token among its copies:  0 - 1 - 3 - 5     1 = 2, 3 = 4, 5 = 6

    and each pair hangs below one of the pair before.           \\- 2   \\- 6
                                                                    \\- 4
    """

    def tree(self, root: int, coming: list[int]) -> Nodes:
        tokens, parents = [root], [-1]
        for token in coming:
            above = 0 if len(tokens) == 1 else len(tokens) - 1 - self.below(2)
            tokens += [token, token]
            parents += [above, above]
        return tokens, parents


class NeverRight(Scripted):
    """A wrong token at every node of a binary tree of 15."""

    def tree(self, root: int, coming: list[int]) -> Nodes:
        if not coming:
            return [root], [-1]
        wrong = min({*range(VOCAB)} - {token for text in self.texts for token in text})
        return [root] + [wrong] * 14, [(node - 1) // 2 if node else -1 for node in range(15)]


class Listener(Hidden):
    """Writes down what it is told."""

    def __init__(self, *texts: list[int]) -> None:
        super().__init__(*texts)
        self.told: list[VerifiedOnHost] = []
        self.histories: list[History | None] = []  # as it was then

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        self.first_taps, self.first_text = taps, text

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        self.told.append(replace(verified, texts=[list(text) for text in verified.texts]))
        self.histories.append(copy.deepcopy(verified.history))
        return super().draft(verified, cache)


class HalfRightHead(Eagle3Head):
    """A head that knows which token follows another one at a position, for two of three positions of the texts.

    So a tree grown with it is right to varying depths, on varying branches.
    """

    def __init__(self, target: TargetModel, *texts: list[int]) -> None:
        sizes = Eagle3Shape(
            hidden_size=32, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8, taps=target.taps
        )
        super().__init__(sizes, target.config, DraftVocab.full(VOCAB), target.model.get_input_embeddings().weight)
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
        hidden[..., 0] = positions + 2  # index t predicts the token of position t + 2
        hidden[..., 1] = tokens  # from that of position t + 1
        block = torch.zeros(len(tokens), 1, tokens.shape[1], 8)
        if cache is not None:
            cache.attend(0, block, block, block, mask)
        return hidden

    def logits(self, hidden: Tensor, level: int = 0) -> Tensor:
        at, token = hidden[..., 0].long(), hidden[..., 1].long()
        known = self.next[at, token].unsqueeze(-1)
        return self.table[at] + 3 * (torch.arange(VOCAB) == known)

    def feedback(self, hidden: Tensor, features: Tensor, tokens: Tensor) -> Tensor:
        return hidden


@dataclass(frozen=True)
class Texts:
    """Prompts with what plain decoding makes of them."""

    target: TargetModel
    whole: list[list[int]]
    make_head: Callable[..., Eagle3Head]


class SetCosts(CostTable):
    """Costs that are said, not measured: a tree of n nodes takes 1 + n / `nodes` seconds, a level `level`."""

    def __init__(self, level: float = 0.05, nodes: float = 40) -> None:
        self.costs = StepCosts(tuple(1 + count / nodes for count in NODES), level, level)

    def now(self, verified: VerifiedOnHost, nodes: int) -> StepCosts:
        return self.costs


LIMITED = DraftVocab(torch.arange(0, VOCAB, 4), VOCAB)
# 0 - 1 - 3 - 6        the first child is the likeliest; 1 has no second child, which 2 has
# \- 2 - 4
#     \- 5 - 7 - 8
LOPSIDED = Fixed(((0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0), (1, 1, 0), (1, 1, 0, 0)))
DRAFTERS: dict[str, Callable[[Texts], Drafter]] = {
    "head, chain": lambda texts: HeadDrafter(texts.make_head(), Dynamic.chain(5)),
    "head, wide tree": lambda texts: HeadDrafter(texts.make_head(), Dynamic(4, 6, 30)),
    "head, depth 1": lambda texts: HeadDrafter(texts.make_head(), Dynamic(1, 8, 8)),
    "head, few nodes of many": lambda texts: HeadDrafter(texts.make_head(seed=2), Dynamic(5, 4, 3)),
    "head, fixed tree": lambda texts: HeadDrafter(texts.make_head(), LOPSIDED),
    "head of EAGLE-3.1": lambda texts: HeadDrafter(texts.make_head(fc_norm=True, norm_output=True), Dynamic(4, 4, 12)),
    "head of 25 tokens": lambda texts: HeadDrafter(texts.make_head(vocab=LIMITED), Dynamic(4, 4, 12)),
    "half right head, tree": lambda texts: HeadDrafter(HalfRightHead(texts.target, *texts.whole), Dynamic(5, 4, 16)),
    "half right head, chain": lambda texts: HeadDrafter(HalfRightHead(texts.target, *texts.whole), Dynamic.chain(3)),
    "half right head, fixed tree": lambda texts: HeadDrafter(HalfRightHead(texts.target, *texts.whole), LOPSIDED),
    "half right head, cost-aware": lambda texts: HeadDrafter(
        HalfRightHead(texts.target, *texts.whole), CostAware(5, 4, 20, SetCosts())
    ),
    "half right head, adaptive": lambda texts: HeadDrafter(
        HalfRightHead(texts.target, *texts.whole), CostAwareShape.chain(6, SetCosts())
    ),
    "oracle": lambda texts: Oracle(*texts.whole),
    "moody oracle": lambda texts: Moody(*texts.whole),
    "careless oracle": lambda texts: Careless(*texts.whole, ahead=9),
    "truth hidden in a tree": lambda texts: Hidden(*texts.whole),
    "duplicate siblings": lambda texts: Duplicates(*texts.whole),
    "never right": lambda texts: NeverRight(*texts.whole),
}
