"""How much acceptance length drafting with the target's Gumbel noise gains, by temperature and size of the tree.

    python benchmarks/gumbel.py recipes/tiny_full.yaml decode.head=assets/demo_head report.num_prompts=169
    python benchmarks/gumbel.py recipes/tiny_full.yaml decode.head=assets/demo_head 'report.temperatures=[1]' --seeds 5

For any recipe whose head can be drafted with as a tree; prompts are those of its report, of chats the first turn. The
trees are the recipe's and two in use elsewhere, as deep as the head allows. The recipe's tree is measured at each of
report.temperatures above 0, the others at the highest of them.

Columns of the table, where the acceptance length (tau) is the mean number of tokens per target step:
  tree     depth x width, draft tokens
  T        temperature
  nats     the target's entropy per token
  T = 0    acceptance length at temperature 0
  Gumbel   acceptance length at T when children are ranked with the target's Gumbel noise, as headstart does
  share    that over the one at temperature 0
  from     the low end of the share's 95 % interval over prompts
  top-k    acceptance length at T with EAGLE's children: the head's likeliest tokens, without Gumbel noise
  share    that over the one at temperature 0
  gain     Gumbel over top-k
  from     the low end of the gain's 95 % interval over prompts

Each prompt is continued --seeds times at each temperature above 0. In both columns the target samples with the same
noise, so both write the same texts; in bfloat16, up to near-ties.

Nothing is timed, so other work on the machine does no harm.
"""

import argparse
from dataclasses import dataclass
from itertools import cycle

import torch
from rich.table import Table
from torch import Tensor
from torch.distributions import Categorical

from headstart.common.errors import errors_as_messages
from headstart.common.process import keep_freed_memory
from headstart.common.progress import Progress
from headstart.heads.base import DraftHead, LevelHead
from headstart.inference.core.request import DecodeStats, Generation, Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.drafters.build import load_drafting_head
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import Frontier, HeadDrafter
from headstart.inference.engine.loop import generate_batch
from headstart.inference.generate.loading import taps_to_read
from headstart.inference.report.command import report_prompts
from headstart.inference.report.compare import Interval, speedup
from headstart.inference.report.questions import Chat
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.recipes.command_line import recipe_from_command_line
from headstart.recipes.schema import DecodeSection

USED_ELSEWHERE = ((5, 8, 31), (7, 10, 59))  # depth, width, nodes of SGLang's documentation and the EAGLE-3 paper
SPACING = 1000  # difference between the seeds of a prompt
COLUMNS = ("tree", "T", "nats", "T = 0", "Gumbel", "share", "from", "top-k", "share", "gain", "from")


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
    decode: DecodeSection
    seed: int
    progress: Progress

    def texts(
        self, tree: Dynamic, temperature: float, seeds: int = 1, drafter: type[HeadDrafter] = HeadDrafter
    ) -> list[Generation]:
        """The texts of all prompts with their first seed, then with their second, and so on."""
        found: list[Generation] = []
        for turn in range(seeds):
            first = self.seed + SPACING * turn
            requests = [
                Request(prompt, self.decode.max_new_tokens, Sampling(temperature, seed=first + number))
                for number, prompt in enumerate(self.prompts)
            ]
            assert isinstance(self.head, LevelHead)
            found += generate_batch(self.target, requests, drafter(self.head, tree), self.decode.max_batch)
            self.progress.advance(len(requests), f"{name_of(tree)}, temperature {temperature:g}")
        return found

    def entropy(self, texts: list[Generation], temperature: float) -> float:
        """The entropy of the target's distributions over texts it wrote at this temperature, in nats per token."""
        total, count = 0.0, 0
        for prompt, text in zip(cycle(self.prompts), texts, strict=False):
            tokens = torch.tensor([prompt + text.tokens], device=self.target.device)
            logits = self.target.passes.forward(tokens).logits[0, len(prompt) - 1 : -1]
            total += Categorical(logits=logits.float() / temperature).entropy().sum().item()
            count += len(text.tokens)
        return total / count


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seeds", type=int, default=1)
    given, arguments = parser.parse_known_args()
    with errors_as_messages():
        recipe = recipe_from_command_line(__doc__, arguments)
        keep_freed_memory()
        with errors_as_messages(settings=recipe):
            run(recipe, given.seeds)


def run(recipe: Recipe, seeds: int) -> None:
    temperatures = sorted(temperature for temperature in recipe.report.temperatures if temperature > 0)
    if not temperatures or seeds < 1:
        raise ValueError(
            f"report.temperatures: {[*recipe.report.temperatures]} given, with --seeds {seeds}; a temperature above 0 "
            "and one seed or more are allowed; add a temperature or raise --seeds"
        )
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    folder, taps, decode = recipe.head_in_use, taps_to_read(recipe), recipe.decode
    template = ChatTemplate.of(recipe.target)
    prompts = report_prompts(recipe, template)
    target = TargetModel.load(recipe.target, taps)
    chat = Chat(template, target.max_positions - decode.max_new_tokens)
    tokens = [chat.shortened(prompt).tokens for prompt in prompts]
    head = load_drafting_head(folder, target)
    own, *others = trees(decode, head)
    cases = [*((own, temperature) for temperature in temperatures), *((tree, temperatures[-1]) for tree in others)]
    num_sets = 1 + len(others) + 2 * seeds * len(cases)
    table = Table(
        title=f"acceptance length, {len(tokens)} prompts, seeds above temperature 0: {seeds}", box=None, pad_edge=False
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "tree" else "right")
    with Progress("texts", num_sets * len(tokens), "texts") as progress:
        writer = Writer(target, head, tokens, decode, recipe.seed, progress)
        greedy = {name_of(tree): writer.texts(tree, 0.0) for tree in (own, *others)}
        for tree, temperature in cases:
            table.add_row(name_of(tree), *figures(writer, tree, temperature, seeds, greedy[name_of(tree)]))
    progress.console.print(table)


def trees(decode: DecodeSection, head: DraftHead) -> list[Dynamic]:
    """The recipe's tree and those in use elsewhere, no deeper than the head drafts; each once."""
    sizes = (decode.depth, decode.width, decode.nodes), *USED_ELSEWHERE
    drawn = [(min(depth, head.max_levels or depth), width, nodes) for depth, width, nodes in sizes]
    return [Dynamic(*size) for size in dict.fromkeys(drawn)]


def name_of(tree: Dynamic) -> str:
    return f"{tree.depth}x{tree.width}, {tree.nodes}"


def figures(writer: Writer, tree: Dynamic, temperature: float, seeds: int, greedy: list[Generation]) -> list[str]:
    """The row of a tree at one temperature, after its name."""
    gumbel, top = (writer.texts(tree, temperature, seeds, drafter) for drafter in (HeadDrafter, WithoutGumbel))
    share, gain = over(gumbel, greedy, len(greedy)), over(gumbel, top, len(greedy))
    return [
        f"{temperature:g}",
        f"{writer.entropy(gumbel, temperature):.2f}",
        f"{acceptance_length(greedy):.2f}",
        f"{acceptance_length(gumbel):.2f}",
        f"{share.value:.3f}",
        f"{share.low:.2f}",
        f"{acceptance_length(top):.2f}",
        f"{over(top, greedy, len(greedy)).value:.3f}",
        f"{gain.value:.3f}",
        f"{gain.low:.2f}",
    ]


def acceptance_length(texts: list[Generation]) -> float:
    return DecodeStats.sum_of(text.stats for text in texts).acceptance_length


def over(texts: list[Generation], base: list[Generation], num_prompts: int) -> Interval:
    """Acceptance length over that of other texts, with an interval over prompts: a speed-up in tokens per step."""
    steps, tokens, base_steps, base_tokens = (
        [sum(getattr(text.stats, name) for text in each[number::num_prompts]) for number in range(num_prompts)]
        for each in (texts, base)
        for name in ("steps", "tokens")
    )
    return speedup(steps, tokens, base_steps, base_tokens, seed=0)


if __name__ == "__main__":
    main()
