"""Does an EAGLE-3 head work on a hybrid and on a latent-attention target as well as its training says?

    python benchmarks/hybrid_heads.py            # RUN_DIR of each target: runs/hybrid_heads/NAME
    python benchmarks/hybrid_heads.py hybrid

Two tiny targets with the demo target's tokenizer are trained a little on its corpus: one in the manner of Qwen3.5, with
three layers of linear attention to one of full attention, and one in the manner of DeepSeek-V3, with latent attention
and experts. For each, trainers/eagle.py trains a head by the demo's recipe with fewer prompts and steps. The head is
calibrated, exported, and decodes held-out prompts greedily: as a chain, as a tree where the target verifies trees,
alone and in batches. Each text must equal plain decoding's and that of transformers' `generate`, in float32.

The acceptance length of the chain is compared with what the doctor's teacher-forced guesses promise: a walk over its
replayed texts that accepts the right guesses after each root and continues after the first wrong one. They differ if
decoding gives the head other hidden states than training, or takes steps without drafts; *drafting steps* is the ratio
over the steps that drafted. Exit code 1 if a text differs or a ratio is off by more than 5 %.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import nn
from train_quality import ROOT, call
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headstart.heads.files import HeadFiles
from headstart.heads.frozen import FrozenTarget
from headstart.inference.core.request import DecodeStats, Request
from headstart.inference.doctor.command import held_out, load_target, replay
from headstart.inference.doctor.interpretation import Interpretation, ReplayedText, right_guesses
from headstart.inference.drafters.build import load_drafting_head
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate_batch
from headstart.inference.report.command import machine
from headstart.inference.targets.loading import no_bars_of_transformers
from headstart.inference.targets.model import TargetModel
from headstart.recipes.other_commands import Options

sys.path.insert(0, str(ROOT / "assets" / "demo_target" / "make"))
from pretrain import Settings, held_out_loss, learning_rate_factor, next_token_loss, sample_batch, token_stream
from standard_library import source_files

DEMO = ROOT / "assets" / "demo_target"
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": (
        "qwen3_5_text",
        {**SIZES, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
        | {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    ),
    "latent": (
        "deepseek_v3",
        {**SIZES, "num_key_value_heads": 4, "kv_lora_rank": 48, "q_lora_rank": 64, "first_k_dense_replace": 1}
        | {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "n_group": 1, "topk_group": 1}
        | {"moe_intermediate_size": 128, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    ),
}
TRAINING = Settings(steps=300, batch_tokens=1024, short_length=128, warmup_steps=30, adam_lr=4e-3)
HELD_OUT = 8_000  # tokens
RECIPE = [
    "data.num_prompts=160",
    "data.response_tokens=64",
    "train.steps=100",
    "train.checkpoint_every=100",
    "train.eval_prompts=0",
    "decode.max_new_tokens=64",
    "log.wandb=disabled",
]
DEPTH, WIDTH, NODES, NEW_TOKENS, PROMPTS, ROWS = 5, 4, 16, 64, 16, 8
BAR = 0.05


def make_target(name: str, folder: Path) -> None:
    """Train a target a little; a folder with its weights is left as it is."""
    if (folder / "model.safetensors").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    kind, sizes = TARGETS[name]
    torch.manual_seed(TRAINING.seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    stream, held = (
        token_stream(tokenizer, [f for f in source_files() if f.held_out is part]) for part in (False, True)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=TRAINING.adam_lr, betas=(0.9, 0.95))
    for step in range(TRAINING.steps):
        optimizer.param_groups[0]["lr"] = TRAINING.adam_lr * learning_rate_factor(step, TRAINING)
        windows = TRAINING.batch_tokens // TRAINING.short_length
        loss = next_token_loss(model, sample_batch(stream, step, windows, TRAINING.short_length, TRAINING))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"{name}: step {step + 1} of {TRAINING.steps}, loss {loss.item():.2f} nats per token", flush=True)
    nats = held_out_loss(model, held[:HELD_OUT], TRAINING.short_length)
    print(f"{name}: {model.num_parameters():,} weights, held-out loss {nats:.2f} nats per token", flush=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "heldout_prompts.jsonl"):
        shutil.copy(DEMO / file, folder)
    with no_bars_of_transformers():
        model.eval().save_pretrained(folder)


def train_head(run: Path, target: Path, threads: int) -> Path:
    """Harvest, training, calibration and export with the commands of a user; returns the head's folder."""
    recipe = [str(ROOT / "recipes" / "tiny.yaml"), f"run_dir={run}", f"target.path={target}", *RECIPE]
    recipe.append(f"data.heldout_prompts={target / 'heldout_prompts.jsonl'}")
    if not (run / "export").is_dir():
        launch = ["accelerate.commands.launch", "--quiet", "--num_processes", "1", "--num_machines", "1"]
        launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", str(threads)]
        call([sys.executable, "-m", *launch, str(ROOT / "trainers" / "eagle.py"), *recipe], run)
        for command in ("calibrate", "export"):
            call([sys.executable, "-m", "headstart.cli", command, *recipe], run)
    return run / "head"


def own_texts(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The text of transformers' greedy `generate`."""
    with no_bars_of_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0}
        texts.append(model.generate(tokens, max_new_tokens=NEW_TOKENS, **given)[0, len(prompt) :].tolist())
    return texts


def promised(trained: Interpretation, replays: list[ReplayedText], target: TargetModel) -> DecodeStats:
    """The steps that a chain takes through the replayed texts if the teacher-forced guesses are its drafts."""
    stats = DecodeStats()
    for one, levels in zip(replays, right_guesses(trained, replays, target.frozen, DEPTH), strict=True):
        root, last = one.prompt, one.text.shape[1] - 1
        while root < last:
            drafts = [right[root - 1] for right, _ in levels if root < len(right)]  # the last token is no draft
            accepted = next((depth for depth, right in enumerate(drafts) if not right), len(drafts))
            stats.count_step(accepted, accepted + 1, len(drafts))
            root += accepted + 1
    return stats


def over_drafting_steps(stats: DecodeStats) -> float:
    """The acceptance length without the steps that had no drafts, each of which yields one token."""
    return (stats.tokens - (stats.steps - stats.drafting_steps)) / stats.drafting_steps


def measure(name: str, folder: Path, head_folder: Path, table: Table) -> bool:
    """Add the rows of a target; returns whether all texts are equal and the ratios within the bar."""
    trained = Interpretation.trained(HeadFiles.read(head_folder), FrozenTarget.from_folder(folder, torch.float32))
    target = load_target(folder, trained.taps)
    prompts = held_out(head_folder, folder, Options(count=PROMPTS))
    wanted, replays = own_texts(folder, prompts), replay(target, prompts, NEW_TOKENS)
    head, doctor = load_drafting_head(head_folder, target), promised(trained, replays, target)
    good = True
    growths = {"chain": Dynamic.chain(DEPTH)} | ({"tree": Dynamic(DEPTH, WIDTH, NODES)} if target.grows_trees else {})
    for growth, rows in [("plain", 1), *((growth, rows) for growth in growths for rows in (1, ROWS))]:
        drafter = head_drafter(head, growths[growth]) if growth in growths else None
        found = generate_batch(target, [Request(prompt, NEW_TOKENS) for prompt in prompts], drafter, rows)
        same = sum(text.tokens == other for text, other in zip(found, wanted, strict=True))
        stats = DecodeStats.sum_of(text.stats for text in found)
        row = [name, growth, str(rows), f"{same} of {len(prompts)}", f"{stats.acceptance_length:.3f}"]
        if growth == "chain":
            ratio = stats.acceptance_length / doctor.acceptance_length
            row += [f"{doctor.acceptance_length:.3f}", f"{ratio:.3f}"]
            row.append(f"{over_drafting_steps(stats) / over_drafting_steps(doctor):.3f}")
            good = good and abs(ratio - 1) <= BAR
        table.add_row(*row)
        good = good and same == len(prompts)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{' or '.join(TARGETS)}; default: both")
    parser.add_argument("--folder", type=Path, default=Path("runs/hybrid_heads"), help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: all cores")
    given = parser.parse_args()
    if unknown := set(given.names) - set(TARGETS):
        parser.error(f"NAME: {', '.join(sorted(unknown))} given, {' or '.join(TARGETS)} is allowed")
    torch.set_num_threads(given.threads)
    console, good = Console(highlight=False, width=None if sys.stdout.isatty() else 120), True
    table = Table("target", "drafts", "rows", "same text", "acceptance", "by the doctor", "ratio", "drafting steps")
    for name in given.names or TARGETS:
        folder = given.folder / name
        make_target(name, folder / "target")
        good = measure(name, folder / "target", train_head(folder, folder / "target", given.threads), table) and good
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    console.print(table)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
