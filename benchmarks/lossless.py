"""Is the output exactly the target's own? Checked on every held-out prompt, greedy and sampled.

    python benchmarks/lossless.py recipes/tiny_full.yaml report.head=assets/demo_head

Prints how many texts equal the reference for plain decoding, a chain, the recipe's tree, a wide tree and a head with
random weights. The reference is transformers' `generate` when greedy and plain decoding when sampling. Exit code 1 if a
text differs.
"""

import sys
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from headstart.heads.checkpoint import load_head
from headstart.inference.drafters.cost_aware import growth_from_recipe
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.inputs import head_folder, held_out_prompts, taps_to_read
from headstart.inference.report.runs import Method, run_method
from headstart.inference.sampling import sampling_from_recipe
from headstart.inference.target.model import TargetModel
from headstart.recipes import Recipe, run_command


def main() -> None:
    run_command(__doc__, check)


def check(recipe: Recipe) -> None:
    torch.set_num_threads(recipe.report.threads or torch.get_num_threads())
    prompts, folder = held_out_prompts(recipe), head_folder(recipe)
    taps = taps_to_read(recipe)
    target = TargetModel.load(recipe.target, taps)
    head, random_head = (load_head(folder, target.frozen) for _ in range(2))
    generator = torch.Generator().manual_seed(recipe.seed)
    for parameter in random_head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    depth = recipe.decode.depth
    methods = [
        Method("plain"),
        Method("chain", HeadDrafter(head, Dynamic.chain(depth))),
        Method("tree", HeadDrafter(head, growth_from_recipe(recipe.decode, target, head))),
        Method("wide tree", HeadDrafter(head, Dynamic(depth=3, width=10, nodes=60))),
        Method("random head", HeadDrafter(random_head, Dynamic(depth=3, width=4, nodes=16))),
    ]
    table = Table(title=f"{len(prompts)} prompts x {recipe.decode.max_new_tokens} tokens, {recipe.target.dtype}")
    for column in ("temperature", "reference", *(method.name for method in methods)):
        table.add_column(column, justify="right")
    all_same = True
    for temperature in recipe.report.temperatures:
        sampling = replace(sampling_from_recipe(recipe.decode, temperature), rule="seeded")
        # transformers samples with other random numbers, so its sampled texts differ from ours.
        reference = Method("generate", transformers=True) if temperature == 0 else Method("plain")
        same = dict.fromkeys((method.name for method in methods), 0)
        for prompt in track(prompts, description=f"temperature {temperature:g}"):
            expected, _ = run_method(reference, target, prompt, recipe.decode.max_new_tokens, sampling)
            for method in methods:
                tokens, _ = run_method(method, target, prompt, recipe.decode.max_new_tokens, sampling)
                same[method.name] += tokens == expected
        table.add_row(f"{temperature:g}", reference.name, *(f"{count}/{len(prompts)}" for count in same.values()))
        all_same &= all(count == len(prompts) for count in same.values())
    Console().print(table)
    sys.exit(0 if all_same else 1)


if __name__ == "__main__":
    main()
