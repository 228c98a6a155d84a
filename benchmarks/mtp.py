"""A target's own multi-token-prediction layer as a draft head: untuned, as transformers drafts with it, and tuned.

    python benchmarks/mtp.py             # RUN_DIR of each target: runs/mtp/NAME
    python benchmarks/mtp.py dense

It trains tiny targets together with an MTP layer on Python source: one of Qwen3.5's hybrid architecture (recurrent and
full attention layers), one of its full attention layers alone, and one of DeepSeek-V3's (latent attention, experts).
The layer is transformers' own, and its tensors get the names of published files. Then `headstart train` tunes it on
harvested states, and `headstart export` writes the whole target with the tuned layer.

*tokens per pass* is over all target passes. *by transformers* is the number of passes of `generate(use_mtp=True)`,
which drafts one token with one layer (for the hybrid, which `generate` refuses, by a replay of transformers' layer over
the text); *ours* is that of a chain of depth 1. Exit code 1 if a text differs from plain
decoding, if the passes differ, or if tuning yields less than 1.15 times the tokens per pass.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from hybrid_heads import DEMO, SIZES, TRAINING
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from train_quality import ROOT, call
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for, new_head, save_head
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.request import DecodeStats, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.states import WINDOW
from headstart.inference.doctor.command import held_out, load_target
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate_batch
from headstart.inference.report.command import machine
from headstart.inference.targets.loading import no_bars_of_transformers
from headstart.recipes.other_commands import Options
from headstart.recipes.schema_heads import MtpSection

sys.path.insert(0, str(ROOT / "assets" / "demo_target" / "make"))
from pretrain import learning_rate_factor, sample_batch, token_stream
from standard_library import source_files

QWEN = {**SIZES, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
QWEN |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "mtp_layer_types": ["full_attention"]}
LATENT = {**SIZES, "num_key_value_heads": 4, "kv_lora_rank": 48, "q_lora_rank": 64, "first_k_dense_replace": 1}
LATENT |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "n_group": 1, "topk_group": 1}
LATENT |= {"moe_intermediate_size": 128, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
LATENT |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # in published files; vLLM does not load it without
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": ("qwen3_5_text", QWEN),
    "dense": ("qwen3_5_text", {**QWEN, "layer_types": ["full_attention"] * SIZES["num_hidden_layers"]}),
    "latent": ("deepseek_v3", LATENT),
}
QWEN_NAMES = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
RECIPE = [
    "head={kind: mtp}",
    "data.num_prompts=160",
    "data.response_tokens=64",
    "train.steps=150",
    "train.unroll=4",
    "train.optimizer=adamw",
    "train.learning_rate=1e-3",
    "train.checkpoint_every=150",
    "train.eval_prompts=0",
    "decode.max_new_tokens=64",
    "log.wandb=disabled",
    "export.format=vllm",
]
DEPTH, WIDTH, NODES, NEW_TOKENS, PROMPTS = 4, 4, 16, 64, 12
BAR = 1.15


def make_target(name: str, folder: Path) -> None:
    """Train a target and its MTP layer a little; a folder with weights is left as it is."""
    if (folder / "model.safetensors").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    kind, sizes = TARGETS[name]
    torch.manual_seed(TRAINING.seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, num_mtp_layers=1, **sizes))
    mtp = MtpModel(model, 1)
    for weight in mtp.layers.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.02)  # transformers leaves experts as they were allocated
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    stream = token_stream(tokenizer, [file for file in source_files() if not file.held_out])
    weights = [*model.parameters(), *mtp.layers.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=TRAINING.adam_lr, betas=(0.9, 0.95))
    for step in range(TRAINING.steps):
        optimizer.param_groups[0]["lr"] = TRAINING.adam_lr * learning_rate_factor(step, TRAINING)
        windows = TRAINING.batch_tokens // TRAINING.short_length
        tokens = sample_batch(stream, step, windows, TRAINING.short_length, TRAINING)
        losses = joint_losses(model, mtp, tokens)
        (losses[0] + losses[1]).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            shown = " and ".join(f"{loss.item():.2f}" for loss in losses)
            print(f"{name}: step {step + 1} of {TRAINING.steps}, loss {shown} nats per token", flush=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "heldout_prompts.jsonl"):
        shutil.copy(DEMO / file, folder)
    with no_bars_of_transformers():
        model.eval().save_pretrained(folder)
    weights_file = folder / "model.safetensors"
    save_file(load_file(weights_file) | published_names(name, mtp), weights_file, {"format": "pt"})


def joint_losses(model: PreTrainedModel, mtp: MtpModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of the target and of its MTP layer, in nats per token."""
    out = model(tokens, output_hidden_states=True)
    places = torch.arange(1, tokens.shape[1]).expand(len(tokens), -1)
    given: dict[str, Any] = {
        "position_ids": places,
        "mtp_cache": MtpCache(config=mtp.config),
        "input_ids": tokens[:, 1:],
    }
    further = mtp._project_to_logits(mtp.forward_layer(0, out.hidden_states[-1][:, :-1], **given))
    pairs = (out.logits[:, :-1], tokens[:, 1:]), (further[:, :-1], tokens[:, 2:])
    one, other = (functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()) for logits, wanted in pairs)
    return one, other


def published_names(name: str, mtp: MtpModel) -> dict[str, Tensor]:
    """The MTP layer's tensors as the family's published files name them; written out here, as a check on the head."""
    found: dict[str, Tensor] = {}
    last = f"model.layers.{SIZES['num_hidden_layers']}"
    for own, tensor in mtp.layers[0].state_dict().items():
        part, _, rest = own.partition(".")
        if name != "latent":
            found[f"mtp.layers.0.{rest}" if part == "mtp_block" else f"mtp.{QWEN_NAMES[part]}.{rest}"] = tensor.clone()
        elif part != "mtp_block":
            found[f"{last}.{'shared_head.norm' if part == 'post_norm' else part}.{rest}"] = tensor.clone()
        elif ".experts." in own:
            columns = ("gate_proj", "up_proj") if "gate_up" in own else ("down_proj",)
            for number, expert in enumerate(tensor):
                for column, matrix in zip(columns, expert.chunk(len(columns)), strict=True):
                    found[f"{last}.mlp.experts.{number}.{column}.weight"] = matrix.clone()
        else:
            found[f"{last}.{rest}"] = tensor.clone()
    return found


def tuned_head(run: Path, target: Path) -> Path:
    """Harvest, training, calibration and export with the commands of a user; returns the head's folder."""
    recipe = [str(ROOT / "recipes" / "tiny.yaml"), f"run_dir={run}", f"target.path={target}", *RECIPE]
    recipe.append(f"data.heldout_prompts={target / 'heldout_prompts.jsonl'}")
    if not (run / "export").is_dir():
        for command in ("train", "calibrate", "export"):
            call([sys.executable, "-m", "headstart.cli", command, *recipe], run)
    return run / "head"


def untuned_head(run: Path, target: Path) -> Path:
    """The layer as the target's files hold it, saved as a head."""
    frozen = FrozenTarget.from_folder(target, torch.float32)
    head = new_head(MtpSection(kind="mtp"), frozen, DraftVocab.full(frozen.config.vocab_size), seed=0)
    save_head(head, run / "untuned")
    return run / "untuned"


def passes_of_transformers(folder: Path, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """The texts of greedy `generate(use_mtp=True)`, and the target's passes after each prompt's own."""
    with no_bars_of_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    last = model.config.num_hidden_layers
    if model.config.model_type == "deepseek_v3":  # the class names the layer of the published 671B model alone
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{last}\..*"]
    model._is_stateful = False  # `generate` refuses the whole family, whose layers here are all full attention
    passes: list[int] = []
    texts: list[list[int]] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0, "use_mtp": True}
        out = model.generate(tokens, max_new_tokens=NEW_TOKENS, **given)
        texts.append(out[0, len(prompt) :].tolist())
    return texts, len(passes) - len(prompts)


@torch.no_grad()
def passes_by_replay(folder: Path, prompts: list[list[int]], texts: list[list[int]]) -> int:
    """The passes that drafts of transformers' layer would take: `generate` refuses it for targets with a state.

    As in headstart, a step after WINDOW rejected drafts in a row drafts nothing, see inference/core/states.py.
    """
    with no_bars_of_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    mtp, passes = MtpModel.from_pretrained(model).eval(), 0
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = torch.tensor([prompt + text])
        last = model(tokens, output_hidden_states=True).hidden_states[-1][:, :-1]
        places = torch.arange(1, tokens.shape[1]).unsqueeze(0)
        hidden = mtp.forward_layer(0, last, places, MtpCache(config=mtp.config), input_ids=tokens[:, 1:])
        guesses, root = mtp._project_to_logits(hidden)[0].argmax(-1).tolist(), len(prompt)
        window = 0  # accepted tokens after the states, which a full window moves in a step without drafts
        while root < tokens.shape[1] - 1:
            drafts = window < WINDOW and root + 1 < tokens.shape[1] - 1  # the last token is no draft
            right = drafts and guesses[root - 1] == tokens[0, root + 1]
            window = 0 if right or not drafts else window + 1
            root += 2 if right else 1
            passes += 1
    return passes


def measure(name: str, run: Path, table: Table) -> bool:
    """Add the rows of a target; returns whether everything holds that the module says."""
    folder, good = run / "target", True
    target, heads = load_target(folder, (SIZES["num_hidden_layers"],)), {}
    prompts = held_out(tuned_head(run, folder), folder, Options(count=PROMPTS))
    heads["untuned"], heads["tuned"] = untuned_head(run, folder), run / "head"
    files = {"untuned": folder, "tuned": run / "export" / "vllm"}
    growths = {"chain of 1": Dynamic.chain(1), "chain": Dynamic.chain(DEPTH)}
    if target.grows_trees:
        growths["tree"] = Dynamic(DEPTH, WIDTH, NODES)
    lengths: dict[tuple[str, str, float], float] = {}
    for temperature in (0.0, 1.0):
        requests = [
            Request(prompt, NEW_TOKENS, sampling=Sampling(temperature=temperature, seed=number))
            for number, prompt in enumerate(prompts)
        ]
        plain = [text.tokens for text in generate_batch(target, requests, None, 1)]
        for which, head_folder in heads.items():
            head = load_head_for(head_folder, target.frozen)
            for growth, how in growths.items():
                found = generate_batch(target, requests, head_drafter(head, how), 1)
                same = sum(text.tokens == wanted for text, wanted in zip(found, plain, strict=True))
                stats = DecodeStats.sum_of(text.stats for text in found)
                lengths[which, growth, temperature] = stats.acceptance_length
                row = [name, which, growth, f"{temperature:g}", f"{same} of {len(prompts)}"]
                row += [f"{stats.acceptance_length:.3f}", ""]
                if which == "tuned":
                    ratio = stats.acceptance_length / lengths["untuned", growth, temperature]
                    row[-1] = f"{ratio:.3f}"
                    good = good and (growth == "chain of 1" or ratio >= BAR)
                if growth == "chain of 1" and temperature == 0:
                    if name == "hybrid":
                        texts, passes = plain, passes_by_replay(files[which], prompts, plain)
                    else:
                        texts, passes = passes_of_transformers(files[which], prompts)
                    row += [str(stats.steps), str(passes)]
                    good = good and passes == stats.steps and texts == plain
                table.add_row(*row)
                good = good and same == len(prompts)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--folder", type=Path, default=Path("runs/mtp"), help="default: %(default)s")
    given = parser.parse_args()
    if unknown := set(given.names) - set(TARGETS):
        parser.error(f"NAME: {', '.join(sorted(unknown))} given, {', '.join(TARGETS)} are allowed")
    console, good = Console(highlight=False, width=None if sys.stdout.isatty() else 130), True
    columns = ("target", "MTP layer", "drafts", "T", "same text", "tokens per pass", "by untuned")
    table = Table(*columns, "passes: ours", "by transformers")
    for name in given.names or TARGETS:
        make_target(name, given.folder / name / "target")
        good = measure(name, given.folder / name, table) and good
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    console.print(table)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
