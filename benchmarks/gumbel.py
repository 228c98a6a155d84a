"""How much acceptance length drafting with the target's Gumbel noise gains, by temperature and size of the tree.

    python benchmarks/gumbel.py recipes/tiny_full.yaml report.head=assets/demo_head report.num_prompts=169

Columns of the table, where the acceptance length (tau) is the mean number of tokens per target step:
  tree     depth x width, draft tokens; the recipe's tree and two in use elsewhere
  T        temperature
  seeds    sampled texts per prompt, each with its own seed; there is one greedy text per prompt
  nats     the target's entropy per token
  T = 0    acceptance length at temperature 0
  Gumbel   acceptance length at T when children are ranked with the target's Gumbel noise, as headstart does
  share    that over the one at temperature 0
  from     the low end of the share's 95 % interval over prompts
  top-k    acceptance length at T with EAGLE's children: the head's likeliest tokens, without Gumbel noise
  share    that over the one at temperature 0

Nothing is timed, so other work on the machine does no harm. About 40 minutes on one core for 169 prompts: all of the
demo's held-out prompts but the 31 that its head was calibrated on.
"""

from dataclasses import dataclass
from itertools import cycle

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.distributions import Categorical

from headstart.heads.base import DraftHead
from headstart.heads.checkpoint import load_head
from headstart.inference.decode import generate_batch
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import Frontier, HeadDrafter
from headstart.inference.inputs import head_folder, held_out_prompts, taps_to_read
from headstart.inference.report.statistics import Interval, speedup
from headstart.inference.request import DecodeStats, Generation, Request
from headstart.inference.sampling import BatchSampling, Sampling
from headstart.inference.target.model import TargetModel
from headstart.recipes import Recipe, run_command

USED_ELSEWHERE = (Dynamic(5, 8, 31), Dynamic(7, 10, 59))  # SGLang's documentation, the EAGLE-3 paper; without the root
CASES = ((0, 0.3, 1), (0, 0.6, 1), (0, 1.0, 10), (1, 1.0, 5), (2, 1.0, 5))  # tree, temperature, seeds per prompt
SPACING = 1000  # difference between the seeds of a prompt
COLUMNS = ("tree", "T", "seeds", "nats", "T = 0", "Gumbel", "share", "from", "top-k", "share")  # fit 80 characters


class WithoutGumbel(HeadDrafter):
    """Ranks children by the head's own probability, as EAGLE-2 and EAGLE-3 do, and ignores the Gumbel noise."""

    def chances(self, level: int, logits: Tensor, roots: Tensor, sampling: BatchSampling, frontier: Frontier) -> Tensor:
        return sampling.warp(logits, frontier.history, self.ids)


@dataclass(frozen=True)
class Writer:
    """Lets the target continue the same prompts under different trees, temperatures and drafters."""

    target: TargetModel
    head: DraftHead
    prompts: list[list[int]]
    new_tokens: int
    seed: int

    def texts(
        self, tree: Dynamic, temperature: float, seeds: int = 1, drafter: type[HeadDrafter] = HeadDrafter
    ) -> list[Generation]:
        """The texts of all prompts with their first seed, then with their second, and so on."""
        requests = [
            Request(prompt, self.new_tokens, Sampling(temperature, seed=self.seed + SPACING * turn + number))
            for turn in range(seeds)
            for number, prompt in enumerate(self.prompts)
        ]
        return generate_batch(self.target, requests, drafter(self.head, tree))

    def entropy(self, texts: list[Generation], temperature: float) -> float:
        """The entropy of the target's distributions over texts it wrote at this temperature, in nats per token."""
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
    trees = [Dynamic(decode.depth, decode.width, decode.nodes), *USED_ELSEWHERE]

    greedy = [writer.texts(tree, 0.0) for tree in track(trees, description="greedy", transient=True)]
    table = Table(title=f"acceptance length with Gumbel noise in the drafts, {len(prompts)} prompts", pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "tree" else "right")
    for number, temperature, seeds in track(CASES, description="sampled", transient=True):
        base, tree = greedy[number], trees[number]
        gumbel, top = (writer.texts(tree, temperature, seeds, drafter) for drafter in (HeadDrafter, WithoutGumbel))
        share = over_greedy(gumbel, base)
        table.add_row(
            f"{tree.depth}x{tree.width}, {tree.nodes}",
            f"{temperature:g}",
            f"{seeds}",
            f"{writer.entropy(gumbel, temperature):.2f}",
            f"{acceptance_length(base):.2f}",
            f"{acceptance_length(gumbel):.2f}",
            f"{share.value:.3f}",
            f"{share.low:.2f}",
            f"{acceptance_length(top):.2f}",
            f"{over_greedy(top, base).value:.3f}",
        )
    Console().print(table)


def acceptance_length(texts: list[Generation]) -> float:
    total = DecodeStats()
    for text in texts:
        total.add(text.stats)
    return total.acceptance_length


def over_greedy(texts: list[Generation], greedy: list[Generation]) -> Interval:
    """Acceptance length over that at temperature 0, with an interval over prompts: a speed-up in tokens per step."""
    steps, tokens, greedy_steps, greedy_tokens = (
        [sum(getattr(text.stats, name) for text in each[number :: len(greedy)]) for number in range(len(greedy))]
        for each in (texts, greedy)
        for name in ("steps", "tokens")
    )
    return speedup(steps, tokens, greedy_steps, greedy_tokens, seed=0)


if __name__ == "__main__":
    main()
