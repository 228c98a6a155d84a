"""Follow one text step by step: each step's draft tree, the path accepted in it, and the tokens it added."""

from dataclasses import dataclass

from torch import Tensor

from headstart.inference.core.cache import KVCache
from headstart.inference.core.drafter import Drafter, Verified, VerifiedOnHost
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.tree import Tree
from headstart.inference.engine.loop import generate
from headstart.inference.targets.model import TargetModel


@dataclass(frozen=True)
class TracedStep:
    """One draft tree and what the target accepted of it."""

    tokens: list[int]  # of each node, the root token first
    parents: list[int]  # of each node; -1 for the root
    path: list[int]  # accepted nodes, the root first
    added: list[int]  # tokens that the step added to the text, the bonus token last


@dataclass(frozen=True)
class Trace:
    """A text and the steps that wrote it."""

    method: str
    prompt: list[int]
    first: int  # the token that the prefill yields
    steps: list[TracedStep]


class RecordingDrafter:
    """Drafts as another drafter does and keeps its trees."""

    static_shapes = False

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.taps, self.cache_shape = drafter.taps, drafter.cache_shape
        self.compilable_layers = drafter.compilable_layers
        self.max_nodes, self.depth = drafter.max_nodes, drafter.depth
        self.trees: list[tuple[int, Tree]] = []  # (tokens of the text so far, tree)

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        self.drafter.prefill(taps, text, row)

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        tree = self.drafter.draft(verified, cache)
        self.trees.append((len(verified.texts[0]), tree))
        return tree


def trace(
    method: str, drafter: Drafter, target: TargetModel, prompt: list[int], max_new_tokens: int, sampling: Sampling
) -> Trace:
    """Decode a prompt and record every step."""
    recorder = RecordingDrafter(drafter)
    text = prompt + generate(target, prompt, max_new_tokens, sampling, recorder, static=False).tokens
    ends = [length for length, _ in recorder.trees[1:]] + [len(text)]
    steps = [traced_step(tree, text[length:end]) for (length, tree), end in zip(recorder.trees, ends, strict=True)]
    return Trace(method, prompt, text[len(prompt)], steps)


def traced_step(tree: Tree, added: list[int]) -> TracedStep:
    """Find the path of the added tokens in the tree; padding nodes, which have no parent, are left out."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    kept = [0, *(node for node, parent in enumerate(parents) if parent >= 0)]
    number = {node: place for place, node in enumerate(kept)}
    tokens, parents = [tokens[node] for node in kept], [number.get(parents[node], -1) for node in kept]
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path = [0]
    for token in added:
        if (path[-1], token) not in child:
            break
        path.append(child[path[-1], token])
    return TracedStep(tokens, parents, path, added)
