"""What the head of a base target still accepts when the target gets a LoRA adapter, by the adapter's training steps.

    python benchmarks/adapters.py runs/adapters --text docs/*.md

A LoRA of every linear layer learns the given texts. After each of --steps it is saved as RUN_DIR/STEPS, and every head
drafts greedily for the target with it: on prompts of the target's own domain, and on passages of the texts that were
left out of training. Give more heads, such as one that was refreshed for the adapter in RUN_DIR/STEPS, with --heads.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart import DecodeSection, SpeculativeModel
from headstart.inference.core.request import DecodeStats
from headstart.inference.engine.loop import generate

PASSAGE = 128  # tokens
EVERY = 8  # one passage in so many is left out of training
BATCH = 8
PROMPT = 32  # tokens


def passages_of(files: list[Path], tokenizer: Any) -> list[list[int]]:
    tokens = [token for file in files for token in tokenizer(file.read_text(encoding="utf-8"))["input_ids"]]
    return [tokens[start : start + PASSAGE] for start in range(0, len(tokens) - PASSAGE, PASSAGE)]


def train(target: Path, passages: list[list[int]], steps: list[int], rate: float, folder: Path) -> dict[int, float]:
    """Save the adapter after each number of steps; returns the mean loss of the 20 steps before, in nats."""
    torch.manual_seed(0)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), config)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=rate)
    draw, losses, found = random.Random(0), list[float](), dict[int, float]()
    for step in range(max(steps) + 1):
        if step in steps:
            model.save_pretrained(str(folder / str(step)))
            found[step] = sum(losses[-20:]) / max(len(losses[-20:]), 1)
        tokens = torch.tensor(draw.sample(passages, BATCH))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return found


def accepted(target: Path, head: Path, adapter: Path, prompts: list[list[int]], new_tokens: int) -> float:
    """The acceptance length of a head's chains of 4 tokens, on all prompts together."""
    decode = DecodeSection(growth="chain", depth=4)
    model = SpeculativeModel.from_folders(target, head, decode, adapter=adapter, dtype="float32", compile=False)
    return DecodeStats.sum_of(
        generate(model.target, prompt, new_tokens, drafter=model.drafter).stats for prompt in prompts
    ).acceptance_length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="where the adapters are written")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="files that the adapter learns")
    parser.add_argument("--target", type=Path, default=Path("assets/demo_target"))
    parser.add_argument("--heads", type=Path, nargs="+", default=[Path("assets/demo_head")])
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 25, 100, 400], help="0 is the bare target")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--prompts", type=int, default=16, help="of either kind")
    parser.add_argument("--new-tokens", type=int, default=64)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.target)
    passages = passages_of(given.text, tokenizer)
    rows = [json.loads(row)["prompt"] for row in (given.target / "heldout_prompts.jsonl").read_text().splitlines()]
    prompts = {
        "own domain": [tokenizer(row)["input_ids"] for row in rows[: given.prompts]],
        "the texts": [passage[:PROMPT] for passage in passages[::EVERY][: given.prompts]],
    }
    learned = [passage for number, passage in enumerate(passages) if number % EVERY]
    losses = train(given.target, learned, given.steps, given.rate, given.run_dir)
    table = Table("steps", "loss", *(f"{head.name}: {kind}" for head in given.heads for kind in prompts))
    for step, loss in losses.items():
        lengths = [
            accepted(given.target, head, given.run_dir / str(step), texts, given.new_tokens)
            for head in given.heads
            for texts in prompts.values()
        ]
        table.add_row(str(step), f"{loss:.2f}", *(f"{length:.2f}" for length in lengths))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
