"""Is the output exactly the target's own? Checked on the prompts of a report, greedy and sampled.

    python benchmarks/lossless.py recipes/tiny_full.yaml decode.head=assets/demo_head
    python benchmarks/lossless.py recipes/tiny_full.yaml decode.head=assets/demo_head target.dtype=bfloat16

Prints how many texts equal the reference for plain decoding, a chain, the recipe's tree, a cost-aware tree, a wide tree
and a head with random weights. The reference is transformers' `generate` when greedy and plain decoding when sampling.

In bfloat16 and float16 a pass over a tree rounds differently than a pass over one token, so near-ties may be resolved
differently. So plain passes read each text: a token that they would not choose at its place is a near-tie if its score
is within rounding of the best one, and otherwise outside. The exit code is 1 if a token is outside, and in float32 also
if a text differs.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from headstart.common.progress import Progress
from headstart.heads.base import DraftHead
from headstart.heads.kinds.checkpoint import load_head_for
from headstart.inference.core.sampling import sampling_from_recipe
from headstart.inference.drafters.build import load_drafting_head
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.generate.loading import OWN_HEAD, taps_to_read
from headstart.inference.report.command import report_prompts
from headstart.inference.report.forcing import Forced, Forcing
from headstart.inference.report.methods import Method, growth_of
from headstart.inference.report.questions import Chat
from headstart.inference.report.rounds import Round, Run, run_rounds, texts_of
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, run_command
from headstart.recipes.values import Baseline

OF_RECIPE: tuple[Baseline, ...] = ("chain", "tree", "cost_aware")


@dataclass(frozen=True)
class Checked:
    """One method's texts at one temperature against the reference's."""

    method: str
    reference: str
    temperature: float
    texts: int
    same: int
    forced: Forced

    @property
    def row(self) -> tuple[str, ...]:
        same, forced = f"{self.same}/{self.texts}", self.forced
        judged = f"{forced.near_ties} of {forced.positions}", str(forced.outside), f"{forced.widest:.2g}"
        return f"{self.temperature:g}", self.reference, self.method, same, *judged


def main() -> None:
    run_command(__doc__, check)


def check(recipe: Recipe) -> None:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    template, taps = ChatTemplate.of(recipe.target), taps_to_read(recipe)
    prompts = report_prompts(recipe, template)
    target = TargetModel.load(recipe.target, taps)
    chat = Chat(template, target.max_positions - recipe.decode.max_new_tokens)
    prompts = [*map(chat.shortened, prompts)]
    console, found = Console(), list[Checked]()
    num_texts = sum(1 + len(prompt.later) for prompt in prompts)
    for temperature in recipe.report.temperatures:
        sampling = replace(sampling_from_recipe(recipe, temperature), rule="seeded")
        methods = methods_at(recipe, target, temperature)
        with Progress(f"temperature {temperature:g}", num_texts * len(methods), "texts") as progress:
            rounds = run_rounds(
                methods,
                target,
                prompts,
                recipe.decode.max_new_tokens,
                sampling,
                warmup=0,
                next_turn=chat.next_turn,
                after_run=partial(count_texts, progress),
            )
        forcing = Forcing.measured(
            target, [prompt.tokens for prompt in prompts], recipe.decode.max_new_tokens, sampling
        )
        checked = compared([method.name for method in methods], rounds, forcing)
        table = Table("temperature", "reference", "method", "same text", "near-ties", "outside", "widest gap")
        table.caption = f"rounding moves the gap between two scores by up to {forcing.rounding:.2g} here"
        table.title = f"{num_texts} prompts, up to {recipe.decode.max_new_tokens} new tokens, {recipe.target.dtype}"
        for each in checked:
            table.add_row(*each.row)
        console.print(table)  # at once: the next temperature may take long
        found += checked
    differ = target.dtype == torch.float32 and any(each.same < each.texts for each in found)
    sys.exit(1 if differ or any(each.forced.outside for each in found) else 0)


def count_texts(progress: Progress, run: Run) -> None:
    progress.advance(len(run.texts))


def methods_at(recipe: Recipe, target: TargetModel, temperature: float) -> list[Method]:
    """The reference first. transformers samples with other random numbers, so it is the reference when greedy only."""
    own = [Method("generate", transformers=True)] if temperature == 0 else []
    return [*own, Method("plain"), *drafting(recipe, target)]


def drafting(recipe: Recipe, target: TargetModel) -> Iterator[Method]:
    folder = recipe.head_in_use
    head, random_head = load_drafting_head(folder, target), load_head_for(folder, target.frozen)
    generator = torch.Generator().manual_seed(recipe.seed)
    for parameter in random_head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    for baseline in OF_RECIPE:
        yield Method(baseline, head_drafter(head, growth_of(baseline, OWN_HEAD, recipe, target, head)))
    yield Method("wide tree", head_drafter(head, Dynamic(depth=levels(head), width=10, nodes=60)))
    yield Method("random head", head_drafter(random_head, Dynamic(depth=levels(head), width=4, nodes=16)))


def levels(head: DraftHead) -> int:
    """Three, or as many as the head can draft."""
    return 3 if head.max_levels is None else min(head.max_levels, 3)


def compared(names: list[str], rounds: list[Round], forcing: Forcing) -> list[Checked]:
    """Every method after the first against the first."""
    prompts, expected = [prompt.tokens for each in rounds for prompt in each.prompts], texts_of(rounds, 0)
    found = []
    for place, name in enumerate(names[1:], start=1):
        texts = texts_of(rounds, place)
        same = sum(text == other for text, other in zip(texts, expected, strict=True))
        forced = Forced.sum_of(forcing.judge(prompt, text) for prompt, text in zip(prompts, texts, strict=True))
        found.append(Checked(name, names[0], forcing.sampling.temperature, len(prompts), same, forced))
    return found


if __name__ == "__main__":
    main()
