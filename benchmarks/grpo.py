"""Measure GRPO on a CPU with a draft head: rollouts without drafts, with a frozen head, and with a refreshed one.

    python benchmarks/grpo.py FOLDER --updates 100 --rows 4
    python benchmarks/grpo.py FOLDER --show

Each method trains the demo's target with TRL, from the same weights and seed, in a process of its own with one thread;
texts, rewards and so all weights must be equal, update by update. A method whose rows are complete is not run again,
and one that was killed starts over. FOLDER/METHOD.jsonl has a row for each update.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from headstart.recipes.schema_train import TrainSection
from headstart.trl import Drafting, RefreshCallback

ROOT = Path(__file__).resolve().parents[1]
TARGET, HEAD = ROOT / "assets/demo_target", ROOT / "assets/demo_head"
METHODS = ("plain", "frozen", "refreshed")
RATES = TrainSection(steps=1, learning_rate=1e-3, batch_size=8, unroll=5)


class Rows(TrainerCallback):
    """Times each generation, and writes a row for each update."""

    def __init__(self, path: Path) -> None:
        self.file, self.row = path.open("w"), dict[str, Any]()

    def reward(self, completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float | None]:
        """The share of an answer's lines that are comments."""
        lines = [[line.strip() for line in text.splitlines() if line.strip()] for text in completions]
        rewards = [sum(line.startswith("#") for line in each) / max(len(each), 1) for each in lines]
        digest = crc32(json.dumps([completion_ids, rewards]).encode())
        self.row |= {"tokens": sum(map(len, completion_ids)), "texts": digest, "reward": sum(rewards) / len(rewards)}
        return [*rewards]

    def timed(self, drafting: Drafting) -> Any:
        def generate(*given: Any, **fields: Any) -> torch.Tensor:
            began = time.process_time()
            texts = drafting.generate(*given, **fields)
            self.row["seconds"] = time.process_time() - began
            self.row["acceptance_length"] = drafting.stats.acceptance_length
            return texts

        return generate

    def on_log(self, args: Any, state: Any, control: Any, **fields: Any) -> None:
        logs = fields["logs"]
        if "entropy" in logs:
            print(
                json.dumps({"step": state.global_step, **self.row, "entropy": logs["entropy"]}),
                file=self.file,
                flush=True,
            )


def run(folder: Path, method: str, updates: int, texts: int) -> None:
    torch.set_num_threads(1)
    rows = Rows(folder / f"{method}.jsonl")
    lines = (TARGET / "heldout_prompts.jsonl").read_text().splitlines()
    prompts = Dataset.from_list([{"prompt": json.loads(line)["prompt"][:120]} for line in lines])
    config = GRPOConfig(
        str(folder / method), max_steps=updates, per_device_train_batch_size=texts, num_generations=4, report_to="none",
        max_completion_length=64, learning_rate=3e-4, lr_scheduler_type="constant", use_cpu=True, bf16=False,
        logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    policy = AutoModelForCausalLM.from_pretrained(TARGET, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(TARGET, pad_token="<|endoftext|>")
    trainer = GRPOTrainer(policy, rows.reward, config, prompts, processing_class=tokenizer)
    trainer.add_callback(rows)
    every = 10 if method == "refreshed" else updates + 1
    heads = folder / method / "heads"
    callback = RefreshCallback(trainer, HEAD, heads, every=every, tokens=20_000, steps=60, train=RATES)
    drafting = callback.drafting if method != "plain" else Drafting(callback.policy, lambda: None, None)
    callback.generate = rows.timed(drafting)  # type: ignore[method-assign]
    trainer.add_callback(callback)
    trainer.train()


def read(folder: Path, method: str) -> list[dict[str, Any]]:
    path = folder / f"{method}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def show(folder: Path) -> None:
    """A line for each tenth of the updates that all methods have: tokens per CPU second, over plain decoding."""
    each = {method: read(folder, method) for method in METHODS}
    updates = min(map(len, each.values()))
    same = sum(len({rows[place]["texts"] for rows in each.values()}) == 1 for place in range(updates))
    print(f"{updates} updates; texts and rewards are equal in {same}")
    print("updates  entropy  reward  frozen: length  x plain  refreshed: length  x plain")
    size = max(updates // 10, 1)
    for start in range(0, updates - size + 1, size):
        part = {method: rows[start : start + size] for method, rows in each.items()}

        def mean(method: str, name: str, part: dict[str, list[dict[str, Any]]] = part) -> float:
            return sum(row[name] for row in part[method]) / len(part[method])

        speeds = {method: mean(method, "tokens") / mean(method, "seconds") for method in METHODS}
        figures = [mean("plain", "entropy"), mean("plain", "reward")]
        for method in METHODS[1:]:
            figures += [mean(method, "acceptance_length"), speeds[method] / speeds["plain"]]
        print(f"{start + 1:3}-{start + size:<4}", *(f"{figure:8.3f}" for figure in figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--rows", type=int, default=16, help="texts in a rollout, four for each prompt")
    parser.add_argument("--method", choices=METHODS, help="run this one alone, in this process")
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.method:
        return run(given.folder, given.method, given.updates, given.rows)
    for method in () if given.show else METHODS:
        if len(read(given.folder, method)) < given.updates:
            subprocess.run([sys.executable, *sys.argv, "--method", method], check=True)
    show(given.folder)


if __name__ == "__main__":
    main()
