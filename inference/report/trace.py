"""One text followed step by step: its tokens coloured by draft depth, with each step's draft tree."""

from dataclasses import dataclass
from html import escape

from rich.text import Text

from headstart.inference.core.drafter import Drafter
from headstart.inference.core.request import Detokenize, EmittedTokens, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.verify import BONUS, Accepted
from headstart.inference.engine.loop import loop_of
from headstart.inference.show import TextStream, shade, token_style
from headstart.inference.targets.model import TargetModel

LABEL = 8  # letters of a token in a draft tree


@dataclass(frozen=True)
class Trace:
    """A text and the steps that wrote it."""

    method: str
    prompt: list[int]
    first: int  # the token that the prefill yields
    steps: list[EmittedTokens]


def trace(
    method: str, drafter: Drafter, target: TargetModel, prompt: list[int], max_new_tokens: int, sampling: Sampling
) -> Trace:
    """Decode a prompt and record every step."""
    loop = loop_of(target, [Request(prompt, max_new_tokens, sampling, show_trees=True)], drafter)
    first, *steps = loop.run()
    return Trace(method, prompt, first.tokens[0], steps)


def pieces(trace: Trace, text: Detokenize) -> tuple[str, list[list[str]]]:
    """The text that the first token adds to the prompt, and that each token of each step adds (see TextStream)."""
    tokens = [trace.first, *(token for step in trace.steps for token in step.tokens)]
    stream = TextStream(text, trace.prompt)
    found = [stream.piece(token) for token in tokens]
    found[-1] += stream.rest()
    ends = iter(found[1:])
    return found[0], [[next(ends) for _ in step.tokens] for step in trace.steps]


def on_terminal(trace: Trace, text: Detokenize) -> Text:
    """The coloured text for a terminal."""
    first, by_step = pieces(trace, text)
    found = Text(text(trace.prompt), style="dim")
    found.append(first, style="not dim")
    for step, words in zip(trace.steps, by_step, strict=True):
        for depth, word in zip(step.depths, words, strict=True):
            found.append(word, style=f"not dim {token_style(depth)}")
    return found


def coloured(trace: Trace, text: Detokenize) -> str:
    """The coloured text as HTML: one span per step, which holds the step's draft tree to show on hover."""
    first, by_step = pieces(trace, text)
    parts = [f'<span class="prompt">{escape(text(trace.prompt))}</span>{escape(first)}']
    for step, words in zip(trace.steps, by_step, strict=True):
        if step.tree is None:
            parts += map(escape, words)
            continue
        tokens = "".join(
            f'<span class="{"bonus" if depth == BONUS else f"d{shade(depth or 1)}"}">{escape(word)}</span>'
            for depth, word in zip(step.depths, words, strict=True)
        )
        parts.append(f'<span class="step" tabindex="0">{tokens}{tree_as_text(step.tree, text)}</span>')
    return f"<pre>{''.join(parts)}</pre>"


def tree_as_text(tree: Accepted, text: Detokenize) -> str:
    """The tree from left to right, one line per leaf, the accepted path in bold; spaces are visible dots."""
    children: list[list[int]] = [[] for _ in tree.parents]
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            children[parent].append(node)
    parts, waiting = [], [(0, 0)]
    while waiting:
        node, depth = waiting.pop()
        is_first = node == 0 or children[tree.parents[node]][0] == node
        line = "" if is_first else "\n" + "<span></span>" * depth
        edge = "" if node == 0 else "─" if is_first else "└"
        label = repr(text([tree.nodes[node]]))[1:-1].replace(" ", "·")[:LABEL]
        tag = "b" if node in tree.path else "span"
        parts.append(f"{line}<{tag}>{edge}{escape(label)}</{tag}>")
        waiting += [(child, depth + 1) for child in reversed(children[node])]
    return f'<samp class="tree" role="img" aria-label="draft tree of this step">{"".join(parts)}</samp>'
