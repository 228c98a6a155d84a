"""Whether a token gets the same bits in every pass of a target: which passes differ, and by which operation.

Plain decoding, token by token after a prompt read in one pass, is compared with every other way in which the engine
computes the same logits: drafts, other rows, other chunks of the prompt, kept prefixes, compiled layers.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from headstart.inference.core.cache import KVCache
from headstart.inference.core.side_by_side import Part
from headstart.inference.core.tree import Tree
from headstart.inference.engine.prefill import chunk_part
from headstart.inference.kernels import Difference, Trace
from headstart.inference.targets.model import TargetModel

WIDTHS = (2, 3, 5, 8, 16, 33, 64)  # nodes of a tree, tokens of a chunk
ROWS = (2, 17, 5)  # of batches; the last one drafts too
Logits = Float[Tensor, "positions vocab"]


@dataclass(frozen=True)
class SameBits:
    """How one way of computing a text's logits compares with plain decoding."""

    situation: str
    equal: int  # positions whose logits are equal, bit for bit
    positions: int
    largest: float  # difference of two logits
    differences: list[Difference]  # the operations that differ, given equal inputs; in the order of execution


@dataclass(frozen=True)
class TracedText:
    """Tokens that a target reads, the first `prompt` of them as a prompt."""

    target: TargetModel
    tokens: list[int]
    prompt: int

    @classmethod
    def random(cls, target: TargetModel, prompt: int, count: int) -> "TracedText":
        """A prompt, and `count` tokens after it; none is 0, which pads."""
        vocab, generator = target.config.vocab_size, torch.Generator().manual_seed(0)
        return cls(target, torch.randint(1, vocab, (prompt + count,), generator=generator).tolist(), prompt)

    def other(self, number: int) -> "TracedText":
        """A text with another token at each position, and with a shorter prompt."""
        shorter, vocab = number % 7, self.target.config.vocab_size
        tokens = [(token + number) % vocab for token in self.tokens[: len(self.tokens) - shorter]]
        return TracedText(self.target, tokens, self.prompt - shorter)

    def new_cache(self, rows: int = 1) -> KVCache:
        return self.target.passes.new_cache(len(self.tokens) + max(WIDTHS), batch=rows)

    def read_prompt(self, row: KVCache, chunk: int | None = None, start: int = 0) -> Logits:
        """Read the prompt from `start` on, in chunks of this many tokens; returns the last logits."""
        size, logits = chunk or self.prompt, torch.empty(0)
        for before in range(start, self.prompt, size):
            tokens = torch.tensor([self.tokens[before : min(before + size, self.prompt)]], device=self.target.device)
            logits = self.target.passes.prefill(tokens, row, before, [tokens.shape[1] - 1]).logits[0]
        return logits

    def tree(self, first: int, nodes: int, has_siblings: bool) -> tuple[list[int], list[int], list[int]]:
        """The tokens and parents of a tree whose root is token `first`, and the path of its right tokens.

        Each right draft comes after a wrong sibling, or the last token of a chain is wrong.
        """
        right, vocab = self.tokens[first:], self.target.config.vocab_size
        wrong = [(token + vocab // 2) % vocab for token in right]
        if not has_siblings:
            nodes = min(nodes, len(right))
            path = [*range(max(nodes - 1, 1))]
            return [*right[: len(path)], *wrong[len(path) : nodes]], [*range(-1, nodes - 1)], path
        tokens, parents, path = right[:1], [-1], [0]
        for depth in range(1, min(nodes // 2 + 1, len(right))):
            tokens += [wrong[depth], right[depth]]
            parents += [path[-1]] * 2
            path.append(len(tokens) - 1)
        return tokens, parents, path


def decode(
    texts: Sequence[TracedText],
    cache: KVCache,
    place: int = 0,
    nodes: int = 1,
    has_siblings: bool = False,
    done: int = 0,
    count: int | None = None,
) -> Logits:
    """Read `count` tokens after the texts' prompts and `done` more, in trees; the logits are one row's."""
    passes, found, text = texts[0].target.passes, list[Tensor](), texts[place]
    cache.set_lengths([each.prompt + done for each in texts])
    end = len(text.tokens) - text.prompt if count is None else done + count
    while done < end:
        size = nodes if passes.prepare_step(cache, nodes > 1) else 1
        trees = [each.tree(each.prompt + done, size, has_siblings and size > 1) for each in texts]
        tree = Tree.of_rows([tokens for tokens, *_ in trees], [parents for _, parents, _ in trees], passes.device)
        path = trees[place][2]
        found.append(passes.tree(tree, cache).logits[place, path])
        cache.keep([path] * len(texts), tree.tokens.tolist())
        done += len(path)
    return torch.cat(found)


def plain(text: TracedText, chunk: int | None = None) -> Logits:
    return with_drafts(text, 1, False, chunk)


def with_drafts(text: TracedText, nodes: int, has_siblings: bool, chunk: int | None = None) -> Logits:
    cache = text.new_cache()
    first = text.read_prompt(cache.row(0), chunk)
    return torch.cat([first, decode([text], cache, nodes=nodes, has_siblings=has_siblings)])


def in_rows(text: TracedText, rows: int, nodes: int = 1) -> Logits:
    """Next to other rows, whose texts are of other lengths."""
    cache, place = text.new_cache(rows), rows // 2
    texts = [text if row == place else text.other(row + 1) for row in range(rows)]
    first = [each.read_prompt(cache.row(row)) for row, each in enumerate(texts)][place]
    siblings = text.target.passes.verifies_trees
    return torch.cat([first, decode(texts, cache, place, nodes, siblings)])


def from_kept_prefix(text: TracedText) -> Logits:
    """The first half of the prompt is copied from another row, and the row moves after half of the text."""
    cache, half = text.new_cache(2), text.prompt // 2
    TracedText(text.target, text.tokens, half).read_prompt(cache.row(1))
    cache.move(1, 0, half)
    first = text.read_prompt(cache.row(0), start=half)
    count = (len(text.tokens) - text.prompt) // 2
    one = decode([text, text.other(1)], cache, count=count)  # the second row's tokens do not matter
    cache.move(0, 1, text.prompt + count)
    return torch.cat([first, one, decode([text.other(1), text], cache, place=1, done=count)])


def side_by_side(text: TracedText) -> Logits:
    """Each step's pass also reads a chunk of another prompt."""
    cache, target, other = text.new_cache(2), text.target, text.other(1)
    found, chunk = [text.read_prompt(cache.row(0))], max(other.prompt // (len(text.tokens) - text.prompt), 1)
    for done, token in enumerate(text.tokens[text.prompt :]):
        row = cache.row(0)
        row.set_lengths([text.prompt + done])
        part = Part.of_tree(row.target, Tree.root_only(torch.tensor([[token]], device=target.device)))
        before = done * chunk
        beside = chunk_part(target, other.tokens[before : before + chunk], cache.row(1), before, last_only=True)
        found.append(target.passes.side_by_side([part, beside])[0].logits[0])
    return torch.cat(found)


def situations(
    text: TracedText, widths: Sequence[int], batches: Sequence[int]
) -> Iterator[tuple[str, Callable[[TracedText], Logits]]]:
    """The ways in which the engine may compute a text's logits, each with its name."""
    passes = text.target.passes
    for size in (1, *widths):
        if size < text.prompt:
            yield f"prompt in chunks of {size}", partial(plain, chunk=size)
    for nodes in widths if passes.verifies_drafts else ():
        yield f"chain of {nodes}", partial(with_drafts, nodes=nodes, has_siblings=False)
    for nodes in sorted({nodes // 2 * 2 + 1 for nodes in widths}) if passes.verifies_trees else ():
        yield f"tree of {nodes}", partial(with_drafts, nodes=nodes, has_siblings=True)
    for rows in batches:
        yield f"{rows} rows", partial(in_rows, rows=rows)
    if passes.verifies_drafts:
        yield f"{batches[-1]} rows with drafts", partial(in_rows, rows=batches[-1], nodes=5)
    yield "kept prefix, moved row", from_kept_prefix
    if passes.allows_side_by_side:
        yield "next to a prompt's chunk", side_by_side
    if (compiler := text.target.fast_form.compiler) is not None:
        compiler.after_calls = 1
        for name, compute in (("one token", plain), ("tree of 5", partial(with_drafts, nodes=5, has_siblings=True))):
            for _ in range(2):  # the first run asks for the kernels, the second checks them
                compute(text)
                compiler.finish()
            yield f"compiled layers, {name}", compute


@torch.inference_mode()
def compare(text: TracedText, widths: Sequence[int] = WIDTHS, batches: Sequence[int] = ROWS) -> Iterator[SameBits]:
    """Compare every situation with plain decoding by layers that are not compiled."""
    if text.target.fast_form.compiler is not None:
        text.target.fast_form.compiler.after_calls = sys.maxsize
    with Trace(text.target.model, text.tokens).running() as trace:
        wanted = plain(text)
    for name, compute in situations(text, widths, batches):
        logits, differences = compute(text), list[Difference]()
        is_equal = (logits == wanted).all(-1)
        if not is_equal.all():
            with Trace(text.target.model, text.tokens, trace).running() as found:
                compute(text)
            differences = found.differences
        largest = float((logits.double() - wanted.double()).abs().max())
        yield SameBits(name, int(is_equal.sum()), len(is_equal), largest, differences)


def in_lines(found: Sequence[SameBits]) -> Iterator[str]:
    """Each operation that differs: at how many tokens a pass, and by how much."""
    by_operation: dict[str, list[Difference]] = {}
    for each in found:
        for difference in each.differences:
            by_operation.setdefault(difference.operation, []).append(difference)
    for operation, differences in by_operation.items():
        tokens = ", ".join(map(str, sorted({each.tokens for each in differences})))
        largest = max(each.largest for each in differences)
        yield f"{operation} ({differences[0].path}): in passes over {tokens} tokens, by up to {largest:.2g}"


def rows_of(found: Sequence[SameBits]) -> list[list[str]]:
    """The table of all situations."""
    rows = [["pass", "equal logits", "by up to", "first operation that differs", "by up to"]]
    for each in found:
        first = each.differences[0] if each.differences else None
        operation = ["", ""] if first is None else [f"{first.operation} ({first.path})", f"{first.largest:.2g}"]
        rows.append([each.situation, f"{each.equal} of {each.positions}", f"{each.largest:.2g}", *operation])
    return rows
