"""How each token of a text came: drafted at a depth, a bonus, or out of the prompt's pass; with the trees behind it."""

from dataclasses import dataclass

from torch import Tensor

from inference.cache import KVCache
from inference.decode import generate
from inference.drafter import Drafter, Verified, VerifiedOnHost
from inference.sampling import Sampling
from inference.target.model import TargetModel
from inference.tree import Tree


@dataclass(frozen=True)
class Step:
    """One tree, and what was taken of it."""

    tokens: list[int]  # of its nodes, the root first
    parents: list[int]
    path: list[int]  # the nodes that were taken, the root first
    taken: list[int]  # the tokens that the step added, the bonus last


@dataclass(frozen=True)
class Trace:
    """A text, step by step."""

    way: str
    prompt: list[int]
    first: int  # the token out of the prompt's pass
    steps: list[Step]


class Recorder:
    """A drafter that writes down what another one drafts."""

    static_shapes = False

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.taps, self.cache_shape = drafter.taps, drafter.cache_shape
        self.compilable_layers = drafter.compilable_layers
        self.max_nodes, self.depth = drafter.max_nodes, drafter.depth
        self.trees: list[tuple[int, Tree]] = []  # with how long the text was

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        self.drafter.prefill(taps, text, row)

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        tree = self.drafter.draft(verified, cache)
        self.trees.append((len(verified.texts[0]), tree))
        return tree


def trace(
    way: str, drafter: Drafter, target: TargetModel, prompt: list[int], max_new_tokens: int, sampling: Sampling
) -> Trace:
    """Decode a prompt and tell how."""
    recorder = Recorder(drafter)
    text = prompt + generate(target, prompt, max_new_tokens, sampling, recorder, static=False).tokens
    ends = [length for length, _ in recorder.trees[1:]] + [len(text)]
    steps = [step(tree, text[length:end]) for (length, tree), end in zip(recorder.trees, ends, strict=True)]
    return Trace(way, prompt, text[len(prompt)], steps)


def step(tree: Tree, taken: list[int]) -> Step:
    """What a step took of its tree; nodes that hang nowhere are left out."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    kept = [0, *(node for node, parent in enumerate(parents) if parent >= 0)]
    number = {node: place for place, node in enumerate(kept)}
    tokens, parents = [tokens[node] for node in kept], [number.get(parents[node], -1) for node in kept]
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path = [0]
    for token in taken:
        if (path[-1], token) not in child:
            break
        path.append(child[path[-1], token])
    return Step(tokens, parents, path, taken)
