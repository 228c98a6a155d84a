"""Drafters without training against assisted generation of transformers, and against each other, greedily.

    python benchmarks/drafters.py recipes/tiny_full.yaml report.threads=1

The draft model is derived from the target: its first quarter of layers, saved with its embedding, norm and lm_head as a
model of its own, so that both sides draft with the very same one. Calls are those of the target, counted by a hook; tau
is new tokens for each call that judges drafts (transformers drafts in the prompt's pass already, we do not). Two
comparisons are paired: the draft model and prompt lookup, each with the same number of drafted tokens on both sides.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from inference.decode import generate
from inference.drafters import Drafter
from inference.drafters.growth import Dynamic
from inference.drafters.lookahead import Lookahead
from inference.drafters.lookup import PromptLookup
from inference.drafters.model import EarlyExit, ModelDrafter
from inference.drafters.trie import Shape
from inference.report import held_out_prompts
from inference.target import TargetModel
from recipes import Recipe, run_command

TRANSFORMERS_NGRAM = 2  # its max_matching_ngram_size, by default


@dataclass
class Row:
    name: str
    run: Callable[[list[int]], list[int]]
    prompt_drafts: bool = False  # does the prompt's pass judge drafts already?
    calls: int = 0
    tokens: int = 0
    judged: int = 0  # calls that judge drafts
    same: int = 0
    seconds: float = 0.0

    @property
    def tau(self) -> float:
        return self.tokens / self.judged


def first_layers_alone(target: TargetModel, count: int) -> TargetModel:
    """A model of its own, with copies of the target's weights."""
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = count
    model = type(target.model)(config)
    missing = model.load_state_dict(target.model.state_dict(), strict=False).missing_keys
    assert not missing
    return TargetModel(model.to(target.device, target.dtype), ())


def measure(rows: list[Row], target: TargetModel, prompts: list[list[int]]) -> None:
    """Every row on every prompt, in turns; the first row's text is the reference."""
    calls: list[int] = []
    hook = target.model.register_forward_pre_hook(lambda *_: calls.append(1))
    for number, prompt in enumerate(track(prompts, transient=True)):
        texts: dict[int, list[int]] = {}
        for turn in range(len(rows)):
            i = (number + turn) % len(rows)
            calls.clear()
            started = time.perf_counter()
            texts[i] = rows[i].run(prompt)
            rows[i].seconds += time.perf_counter() - started
            rows[i].calls += len(calls)
            rows[i].judged += len(calls) - (not rows[i].prompt_drafts)
            rows[i].tokens += len(texts[i]) - (not rows[i].prompt_drafts)
        for i, row in enumerate(rows):
            row.same += texts[i] == texts[0]
    hook.remove()


def main() -> None:
    run_command(__doc__, run)


def run(recipe: Recipe) -> None:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    prompts, new_tokens, depth = held_out_prompts(recipe), recipe.decode.max_new_tokens, recipe.decode.depth
    target = TargetModel.load(recipe.target, ())
    layers = target.config.num_layers
    draft = first_layers_alone(target, max(layers // 4, 1))
    tree, shape = Dynamic(depth, recipe.decode.width, recipe.decode.nodes), Shape(depth, 1, depth)

    def ours(drafter: Drafter | None) -> Callable[[list[int]], list[int]]:
        return lambda prompt: generate(target, prompt, new_tokens, drafter=drafter).tokens

    def assisted(prompt: list[int]) -> list[int]:
        return target.generate([prompt], new_tokens, assistant=(draft, depth))[0]

    def lookup(prompt: list[int]) -> list[int]:
        return target.generate([prompt], new_tokens, prompt_lookup=depth)[0]

    rows = [
        Row("plain", ours(None)),
        Row("transformers, draft model", assisted, prompt_drafts=True),
        Row("draft model", ours(ModelDrafter(draft, Dynamic.chain(depth), target))),
        Row("transformers, prompt lookup", lookup, prompt_drafts=True),
        Row("prompt lookup", ours(PromptLookup(shape, TRANSFORMERS_NGRAM))),
        Row("draft model, tree", ours(ModelDrafter(draft, tree, target))),
        Row("prompt lookup, tree", ours(PromptLookup(Shape(depth, tree.width, tree.nodes), recipe.decode.ngram))),
        Row("lookahead", ours(Lookahead(recipe.decode.width, depth))),
        Row("early exit at 3/4", ours(EarlyExit(target, max(3 * layers // 4, 1), Dynamic.chain(depth)))),
    ]
    measure(rows, target, prompts)
    table = Table(title=f"{len(prompts)} prompts x {new_tokens} tokens, {depth} drafts")
    for column in ("drafter", "target calls", "tau", "same text", "tokens/s"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for row in rows:
        same, rate = f"{row.same}/{len(prompts)}", row.tokens / row.seconds
        table.add_row(row.name, str(row.calls), f"{row.tau:.3f}", same, f"{rate:.1f}")
    Console().print(table)
    for theirs, our in ((rows[1], rows[2]), (rows[3], rows[4])):
        gain = 100 * (our.tau / theirs.tau - 1)
        print(f"{our.name}: tau {our.tau:.3f}, {gain:+.1f} % of the {theirs.tau:.3f} of transformers")


if __name__ == "__main__":
    main()
