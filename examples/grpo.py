"""GRPO with TRL on a CPU: the bundled head drafts the rollouts, and stays fresh while the policy learns.

    pip install -c constraints.txt -e '.[trl]'
    python examples/grpo.py --updates 40

The reward is the share of lines that are comments. Every log line has the policy's entropy, the reward and
the acceptance length, the mean number of tokens per pass of the policy; every 10 updates the head is refreshed, and the
new head drafts if it accepts more of the rollouts that were held out. Takes minutes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from headstart.recipes.schema_train import TrainSection
from headstart.trl import RefreshCallback

ROOT = Path(__file__).resolve().parents[1]
TARGET, HEAD = ROOT / "assets/demo_target", ROOT / "assets/demo_head"
RATES = TrainSection(steps=40, learning_rate=1e-3, batch_size=8, unroll=5)


def comments(completions: list[str], **_: object) -> list[float | None]:
    """The share of each answer's lines that begin with #."""
    lines = [[line.strip() for line in text.splitlines() if line.strip()] for text in completions]
    return [sum(line.startswith("#") for line in each) / max(len(each), 1) for each in lines]


class ShowFigures(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, **fields: Any) -> None:
        names = ("reward", "entropy", "acceptance_length")
        print(*(f"{name} {fields['logs'][name]:.3f}" for name in names if name in fields["logs"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"))
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(TARGET, pad_token="<|endoftext|>")
    policy = AutoModelForCausalLM.from_pretrained(TARGET, dtype="float32")
    lines = (TARGET / "heldout_prompts.jsonl").read_text().splitlines()
    prompts = Dataset.from_list([{"prompt": json.loads(line)["prompt"][:120]} for line in lines])
    config = GRPOConfig(
        str(given.out), max_steps=given.updates, per_device_train_batch_size=32, num_generations=8, report_to="none",
        max_completion_length=64, learning_rate=3e-4, lr_scheduler_type="constant", use_cpu=True, bf16=False,
        logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(policy, comments, config, prompts, processing_class=tokenizer)
    trainer.add_callback(ShowFigures())
    trainer.add_callback(RefreshCallback(trainer, HEAD, given.out / "heads", every=10, steps=40, train=RATES))
    trainer.train()


if __name__ == "__main__":
    main()
