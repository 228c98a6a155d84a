"""Drafters that need no training, compared with transformers' assisted generation and with each other, greedily.

    python benchmarks/drafters.py recipes/tiny_full.yaml report.threads=1

The draft model is the first quarter of the target's layers with its embedding, norm and lm_head, so both sides draft
with the same model. Target calls are counted by a hook on the target. The acceptance length (tau) leaves out the
prefill on both sides, its call and its tokens, because transformers already verifies draft tokens there while we take
one token; tokens per call counts every call and every token. Prompt lookup is measured with transformers' rule (the
first occurrence of the longest n-gram) and with ours (the latest occurrences, continued around a loop).

Exit code 1 if our acceptance length is more than 2 % below that of transformers with the same drafts.
"""

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from headstart.inference.core.drafter import Drafter
from headstart.inference.core.verify import VerifiedOnHost
from headstart.inference.drafters.growth import Dynamic, Growth
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.drafters.repeats import Trie
from headstart.inference.engine.loop import generate
from headstart.inference.generate.loading import held_out_prompts
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, run_command

TRANSFORMERS_NGRAM = 2  # default of its max_matching_ngram_size
MIN_RATIO = 0.98  # of our acceptance length over that of transformers


@dataclass
class Row:
    """One drafter, with its sums over prompts."""

    name: str
    run: Callable[[list[int]], tuple[list[int], int]]  # new tokens, and how many of them the prefill gave
    calls: int = 0
    tokens: int = 0
    prompts: int = 0  # also the number of prefill calls
    first: int = 0  # tokens that prefills gave
    same: int = 0  # texts equal to plain decoding's
    seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        return (self.tokens - self.first) / (self.calls - self.prompts)


class FirstMatch(Lookup):
    """Drafts the tokens after the first occurrence of the longest n-gram, as transformers does."""

    def __init__(self, depth: int, ngram: int) -> None:
        super().__init__(Growth(depth, 1, depth), ngram=ngram)

    def grow(self, trie: Trie, verified: VerifiedOnHost, row: int) -> None:
        text = verified.texts[row]
        for length in range(min(self.ngram, len(text) - 1), 0, -1):
            for end in range(length, len(text)):
                if text[end - length : end] == text[-length:]:
                    node = 0
                    for token in text[end : end + self.depth]:
                        if (child := trie.add(node, token)) is None:
                            break
                        node = child
                    return


class BlockSizes:
    """A streamer for transformers' `generate` that records how many tokens arrive together; the prompt comes first."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.sizes.append(value.numel())

    def end(self) -> None:
        """Do nothing: the last tokens came with the last `put`."""


def first_layers_alone(target: TargetModel, count: int) -> TargetModel:
    """A model of the target's first `count` layers, with copies of its weights."""
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = count
    model = type(target.model)(config)
    missing = model.load_state_dict(target.model.state_dict(), strict=False).missing_keys
    assert not missing
    return TargetModel(model.to(target.device, target.dtype), ())


def measure(rows: list[Row], target: TargetModel, prompts: list[list[int]]) -> None:
    """Run every row on every prompt in alternation; the first row's text is the reference."""
    calls: list[int] = []
    hook = target.model.register_forward_pre_hook(lambda *_: calls.append(1))
    for number, prompt in enumerate(track(prompts, transient=True)):
        texts: dict[int, list[int]] = {}
        for turn in range(len(rows)):
            i = (number + turn) % len(rows)
            row = rows[i]
            calls.clear()
            started = time.perf_counter()
            texts[i], first = row.run(prompt)
            row.seconds += time.perf_counter() - started
            row.calls += len(calls)
            row.tokens += len(texts[i])
            row.prompts += 1
            row.first += first
        for i, row in enumerate(rows):
            row.same += texts[i] == texts[0]
    hook.remove()


def main() -> None:
    run_command(__doc__, run)


def run(recipe: Recipe) -> None:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    prompts, new_tokens, depth = held_out_prompts(recipe), recipe.decode.max_new_tokens, recipe.decode.depth
    target = TargetModel.load(recipe.target, (), packed=False)
    draft = first_layers_alone(target, max(target.config.num_layers // 4, 1))
    tree, limits = Dynamic(depth, recipe.decode.width, recipe.decode.nodes), Growth(depth, 1, depth)

    def ours(drafter: Drafter | None) -> Callable[[list[int]], tuple[list[int], int]]:
        return lambda prompt: (generate(target, prompt, new_tokens, drafter=drafter).tokens, 1)

    def assisted(prompt: list[int]) -> tuple[list[int], int]:
        blocks = BlockSizes()
        text = target.generate([prompt], new_tokens, assistant=(draft, depth), streamer=blocks)[0]
        return text, blocks.sizes[1]

    def lookup(prompt: list[int]) -> tuple[list[int], int]:
        blocks = BlockSizes()
        text = target.generate([prompt], new_tokens, prompt_lookup=depth, streamer=blocks)[0]
        return text, blocks.sizes[1]

    rows = [
        Row("plain", ours(None)),
        Row("transformers, draft model", assisted),
        Row("draft model", ours(ModelDrafter(draft, Dynamic.chain(depth), target))),
        Row("transformers, prompt lookup", lookup),
        Row("prompt lookup, first match", ours(FirstMatch(depth, TRANSFORMERS_NGRAM))),
        Row("prompt lookup", ours(Lookup(limits, ngram=TRANSFORMERS_NGRAM))),
        Row("draft model, tree", ours(ModelDrafter(draft, tree, target))),
        Row("prompt lookup, tree", ours(Lookup(Growth(depth, tree.width, tree.nodes)))),
    ]
    measure(rows, target, prompts)
    table = Table(title=f"{len(prompts)} prompts x {new_tokens} tokens, depth {depth}")
    for column in ("drafter", "target\ncalls", "tokens\nper call", "acceptance\nlength", "same\ntext", "tokens/s"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for row in rows:
        rates = f"{row.tokens / row.calls:.3f}", f"{row.acceptance_length:.3f}"
        table.add_row(row.name, str(row.calls), *rates, f"{row.same}/{len(prompts)}", f"{row.tokens / row.seconds:.1f}")
    Console().print(table)
    pairs = [(rows[1], rows[2]), (rows[3], rows[4]), (rows[3], rows[5])]
    for theirs, our in pairs:
        print(
            f"{our.name}: acceptance length {our.acceptance_length:.3f}, "
            f"{our.acceptance_length / theirs.acceptance_length - 1:+.2%} against {theirs.name} "
            f"({theirs.acceptance_length:.3f})"
        )
    sys.exit(0 if all(our.acceptance_length >= MIN_RATIO * theirs.acceptance_length for theirs, our in pairs) else 1)


if __name__ == "__main__":
    main()
