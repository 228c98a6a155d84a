"""What the target's own noise in the drafts gains: accepted length by temperature and by size of the tree.

    python benchmarks/noise.py recipes/tiny_full.yaml report.head=assets/demo_head report.num_prompts=169

Beside it, as *top-k*, the same tree with EAGLE's children, which are the head's likeliest tokens and do not look at the
noise. Trees (depth x width, nodes) are the recipe's and two that are in use elsewhere, *share* is tau over the one at
temperature 0, *from* the low end of its 95 % interval over prompts, *nats* the target's entropy per token. There is one
greedy text behind a prompt, and one sampled text per seed. Nothing here is timed, so other work on the machine does no
harm. Some 40 minutes on one core for 169 prompts, which are all of the demo's but the 31 that served to calibrate its
head.
"""

from dataclasses import dataclass
from itertools import cycle

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.distributions import Categorical

from heads.base import DraftHead
from heads.checkpoint import load_head
from inference.decode import generate_batch
from inference.drafters.growth import Dynamic
from inference.drafters.head import Frontier, HeadDrafter
from inference.inputs import head_folder, held_out_prompts, taps_to_read
from inference.report.statistics import Interval, speedup
from inference.request import DecodeStats, Generation, Request
from inference.sampling import BatchSampling, Sampling
from inference.target.model import TargetModel
from recipes import Recipe, run_command

IN_USE = (Dynamic(5, 8, 31), Dynamic(7, 10, 59))  # SGLang's documentation and the paper on EAGLE-3, less the root
CASES = ((0, 0.3, 1), (0, 0.6, 1), (0, 1.0, 10), (1, 1.0, 5), (2, 1.0, 5))  # which tree, temperature, seeds per prompt
SPACING = 1000  # from a prompt's seed to its next one
COLUMNS = ("tree", "T", "seeds", "nats", "T = 0", "noise", "share", "from", "top-k", "share")  # fit 80 characters


class WithoutNoise(HeadDrafter):
    """Children by the head's own probability, as in EAGLE-2 and 3: the drafter does not look at the noise."""

    def chances(self, level: int, logits: Tensor, roots: Tensor, sampling: BatchSampling, frontier: Frontier) -> Tensor:
        return sampling.warp(logits, frontier.history, self.ids)


@dataclass(frozen=True)
class Writer:
    """Lets the target write behind the same prompts, each with seeds of its own."""

    target: TargetModel
    head: DraftHead
    prompts: list[list[int]]
    new_tokens: int
    seed: int

    def texts(
        self, tree: Dynamic, temperature: float, seeds: int = 1, drafter: type[HeadDrafter] = HeadDrafter
    ) -> list[Generation]:
        """All prompts with their first seed, then all with their second, ..."""
        requests = [
            Request(prompt, self.new_tokens, Sampling(temperature, seed=self.seed + SPACING * turn + number))
            for turn in range(seeds)
            for number, prompt in enumerate(self.prompts)
        ]
        return generate_batch(self.target, requests, drafter(self.head, tree))

    def entropy(self, texts: list[Generation], temperature: float) -> float:
        """Of what the target chose from, over the texts that it wrote at this temperature, nats per token."""
        total, count = 0.0, 0
        for prompt, text in zip(cycle(self.prompts), texts, strict=False):
            tokens = torch.tensor([prompt + text.tokens], device=self.target.device)
            logits = self.target.forward(tokens).logits[0, len(prompt) - 1 : -1]
            total += Categorical(logits=logits.float() / temperature).entropy().sum().item()
            count += len(text.tokens)
        return total / count


def main() -> None:
    run_command(__doc__, run)


def run(recipe: Recipe) -> None:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    prompts, folder, decode = held_out_prompts(recipe), head_folder(recipe), recipe.decode
    target = TargetModel.load(recipe.target, taps_to_read(recipe))
    head = load_head(folder, target.frozen)
    writer = Writer(target, head, prompts, decode.max_new_tokens, decode.seed)
    trees = [Dynamic(decode.depth, decode.width, decode.nodes), *IN_USE]

    greedy = [writer.texts(tree, 0.0) for tree in track(trees, description="greedy", transient=True)]
    table = Table(title=f"what the target's noise in the drafts gains, {len(prompts)} prompts", pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "tree" else "right")
    for number, temperature, seeds in track(CASES, description="sampled", transient=True):
        base, tree = greedy[number], trees[number]
        noise, top = (writer.texts(tree, temperature, seeds, way) for way in (HeadDrafter, WithoutNoise))
        share = of_greedy(noise, base)
        table.add_row(
            f"{tree.depth}x{tree.width}, {tree.nodes}",
            f"{temperature:g}",
            f"{seeds}",
            f"{writer.entropy(noise, temperature):.2f}",
            f"{tau_of(base):.2f}",
            f"{tau_of(noise):.2f}",
            f"{share.value:.3f}",
            f"{share.low:.2f}",
            f"{tau_of(top):.2f}",
            f"{of_greedy(top, base).value:.3f}",
        )
    Console().print(table)


def tau_of(texts: list[Generation]) -> float:
    total = DecodeStats()
    for text in texts:
        total.add(text.stats)
    return total.acceptance_length


def of_greedy(texts: list[Generation], greedy: list[Generation]) -> Interval:
    """tau over tau at temperature 0, the prompts being what varies; tokens per step compare as per second."""
    steps, tokens, greedy_steps, greedy_tokens = (
        [sum(getattr(text.stats, name) for text in way[number :: len(greedy)]) for number in range(len(greedy))]
        for way in (texts, greedy)
        for name in ("steps", "tokens")
    )
    return speedup(steps, tokens, greedy_steps, greedy_tokens, seed=0)


if __name__ == "__main__":
    main()
