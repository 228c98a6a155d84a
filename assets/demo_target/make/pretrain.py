"""Train the bundled demo target: a small Llama that writes Python, trained on the standard library's source code.

    python assets/demo_target/make/pretrain.py base

The committed target took two such runs, then post_train.py; its card has the commands. Users need not
run this; it is here so that anyone can check, change or improve the target. It trains on a GPU if there is one, and an
interrupted run continues from its last checkpoint.

A model this small falls into loops when it decodes greedily. `--repeated_share` adds windows in which a piece of text
repeats, and trains each repetition to make the next one less likely (DITTO, Xu et al., arXiv 2206.02369).
"""

import argparse
import json
import math
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file
from standard_library import SourceFile, source_files
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.common.errors import CONTINUES, errors_as_messages
from headstart.common.files import whole_file, write_text
from headstart.heads.files import give_umask_mode
from headstart.inference.targets.loading import pick_device

END_OF_TEXT = "<|endoftext|>"
QUICK_LOOK = 40_000  # held-out tokens scored during training; all are scored at the end


@dataclass(frozen=True)
class Settings:
    """Everything that the result depends on, except the version of the standard library."""

    seed: int = 0
    vocab_size: int = 1024
    num_layers: int = 16
    hidden_size: int = 128
    intermediate_size: int = 352
    num_heads: int = 4
    max_positions: int = 512
    steps: int = 6000
    batch_tokens: int = 2048
    short_length: int = 256  # window length of the first steps, in tokens
    long_share: float = 0.2  # share of steps, at the end, with windows of max_positions
    warmup_steps: int = 100
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.02
    repeated_share: float = 0.0  # share of windows that end in repetitions, see repetition_loss
    repetition_decay: float = 0.5  # wanted probability of a repeated token, relative to its previous occurrence
    num_prompts: int = 200


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: every byte string round-trips, no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def token_stream(tokenizer: Tokenizer, files: list[SourceFile]) -> Tensor:
    """All files as one token sequence, each file followed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream = [token for encoded in tokenizer.encode_batch([f.text for f in files]) for token in [*encoded.ids, end]]
    return torch.tensor(stream)  # [tokens]


def build_model(settings: Settings) -> LlamaForCausalLM:
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        max_position_embeddings=settings.max_positions,
        rms_norm_eps=1e-6,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # residual branches start at zero: a deep thin stack trains from the first step
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def learning_rate_factor(step: int, settings: Settings) -> float:
    """Warm-up, then linear to zero."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    return warm * (settings.steps - step) / settings.steps


def window_length(step: int, settings: Settings) -> int:
    long = step >= settings.steps * (1 - settings.long_share)
    return settings.max_positions if long else settings.short_length


def sample_batch(stream: Tensor, step: int, windows: int, length: int, settings: Settings) -> Tensor:
    """Windows at random offsets, a function of (seed, step) alone, so a resumed run sees the same windows."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    starts = torch.randint(len(stream) - length - 1, (windows,), generator=generator)
    return torch.stack([stream[start : start + length + 1] for start in starts.tolist()])  # [batch, seq + 1]


@dataclass(frozen=True)
class Repetitions:
    """Windows in which, after a lead, one piece of text repeats to the end."""

    tokens: Tensor  # [windows, length + 1]
    repeated: Tensor  # [windows, length + 1], true from the second occurrence on
    earlier: Tensor  # [windows, length + 1], position of the same token in the previous occurrence

    def to(self, device: torch.device) -> "Repetitions":
        return Repetitions(self.tokens.to(device), self.repeated.to(device), self.earlier.to(device))


def sample_repetitions(stream: Tensor, step: int, windows: int, length: int, settings: Settings) -> Repetitions:
    """Leads of up to 64 tokens, then a repeated piece of 4 to 48 tokens; a function of (seed, step) alone."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step + 500_000)
    starts = torch.randint(len(stream) - length - 1, (windows, 1), generator=generator)
    periods = torch.randint(4, 49, (windows, 1), generator=generator)
    leads = torch.randint(65, (windows, 1), generator=generator)
    index = torch.arange(length + 1).expand(windows, -1)
    source = torch.where(index < leads, index, leads + (index - leads) % periods)
    return Repetitions(stream[starts + source], index >= leads + periods, (index - periods).clamp(min=1))


def repetition_loss(logits: Tensor, batch: Repetitions, decay: float) -> Tensor:
    """Train a repeated token to `decay` times the probability of its previous occurrence (DITTO, equation 4)."""
    chance = logits.softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)  # [windows, length]
    wanted = decay * chance.detach().gather(1, batch.earlier[:, 1:] - 1)
    repeated = batch.repeated[:, 1:]
    miss = (chance - wanted).abs().clamp(max=1 - 1e-4)
    return -(torch.log1p(-miss) * repeated).sum() / repeated.sum()


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1], use_cache=False).logits  # [batch, seq, vocab]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def training_loss(model: nn.Module, texts: Tensor, repetitions: Repetitions, decay: float) -> Tensor:
    """Next-token loss of the texts plus the repetition loss, weighted by its number of windows."""
    loss = next_token_loss(model, texts)
    if len(repetitions.tokens):
        logits = model(repetitions.tokens[:, :-1], use_cache=False).logits
        loss = loss + len(repetitions.tokens) / len(texts) * repetition_loss(logits, repetitions, decay)
    return loss


@torch.no_grad()
def held_out_loss(model: nn.Module, stream: Tensor, length: int) -> float:
    """Nats per token over the whole held-out stream, in windows of `length`."""
    usable = (len(stream) - 1) // length * length
    windows = stream[: usable + 1].unfold(0, length + 1, length)  # [windows, length + 1]
    device = next(model.parameters()).device
    losses = [next_token_loss(model, batch.to(device)) * len(batch) for batch in windows.split(8)]
    return float(torch.stack(losses).sum() / len(windows))


def optimizers_of(
    model: nn.Module, muon_lr: float, adam_lr: float, weight_decay: float
) -> tuple[list[torch.optim.Optimizer], list[nn.Parameter]]:
    """Muon for the layers' matrices and AdamW for the other parameters; also returns those other parameters."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    rest = [p for name, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in name)]
    muon = torch.optim.Muon(matrices, lr=muon_lr, weight_decay=weight_decay)
    return [muon, torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)], rest


def train(model: LlamaForCausalLM, stream: Tensor, held_out: Tensor, settings: Settings, checkpoint: Path) -> None:
    optimizers, rest = optimizers_of(model, settings.muon_lr, settings.adam_lr, settings.weight_decay)
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=model.device, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        first = saved["step"]
    compiled = torch.compile(training_loss)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("training", total=settings.steps, completed=first)
        for step in range(first, settings.steps):
            factor = learning_rate_factor(step, settings)
            for optimizer, peak in zip(optimizers, (settings.muon_lr, settings.adam_lr), strict=True):
                optimizer.param_groups[0]["lr"] = peak * factor
            length = window_length(step, settings)
            windows = settings.batch_tokens // length
            repeating = round(windows * settings.repeated_share)
            texts = sample_batch(stream, step, windows - repeating, length, settings).to(model.device)
            repetitions = sample_repetitions(stream, step, repeating, length, settings).to(model.device)
            loss = compiled(model, texts, repetitions, settings.repetition_decay)
            loss.backward()
            nn.utils.clip_grad_norm_(rest, 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if (step + 1) % 50 == 0:
                if not math.isfinite(loss.item()):
                    raise SystemExit(f"step {step}: the loss is {loss.item()}; lower muon_lr or adam_lr")
                progress.update(task, completed=step + 1, description=f"training loss {loss.item():.3f}")
            if (step + 1) % 500 == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizers": [o.state_dict() for o in optimizers],
                    "step": step + 1,
                }
                with whole_file(checkpoint) as partial:
                    torch.save(state, partial)
                nats = held_out_loss(model, held_out[:QUICK_LOOK], settings.short_length)
                print(f"step {step + 1}: held-out loss {nats:.4f} nats per token", flush=True)


def held_out_prompts(tokenizer: Tokenizer, files: list[SourceFile], settings: Settings) -> list[dict[str, object]]:
    """Draw prompts of 32 to 64 tokens that start at a line of a held-out file, in proportion to file length."""
    rng = random.Random(settings.seed)
    weights = [len(f.text) for f in files]
    prompts: list[dict[str, object]] = []
    while len(prompts) < settings.num_prompts:
        file = rng.choices(files, weights)[0]
        starts = [0] + [i + 1 for i, character in enumerate(file.text) if character == "\n"]
        start = rng.choice(starts)
        encoded = tokenizer.encode(file.text[start : start + 1024])
        length = rng.randint(32, 64)
        if len(encoded.ids) > length:
            end = encoded.offsets[length - 1][1]
            prompts.append({"id": len(prompts), "source": file.name, "prompt": file.text[start : start + end]})
    return prompts


def write_card(folder: Path, settings: Settings, facts: dict[str, object]) -> None:
    card = f"""---
license: other
license_name: PSF-2.0
language: code
---
# headstart demo target

A {facts["parameters"]:,}-parameter `LlamaForCausalLM` that writes Python. It lets headstart train and measure draft
heads without a download; it is not a useful code model.

- Data: the standard library of Python {facts["python"]} without tests, generated tables and vendored code:
  {facts["train_tokens"]:,} training tokens; {facts["held_out_files"]} files ({facts["held_out_tokens"]:,} tokens),
  chosen by a hash of their name, are held out. The text is under the PSF licence.
- Tokenizer: byte-level BPE, {settings.vocab_size} entries, trained on the same training files.
- Held-out loss: {facts["nats_per_token"]:.3f} nats per token, **{facts["bits_per_byte"]:.3f} bits per byte**.
- Command: `python assets/demo_target/make/pretrain.py assets/demo_target`, seed {settings.seed}, torch
  {torch.__version__}, Muon on the layers' matrices, AdamW on the rest, linear decay to zero. Weights are stored in
  bfloat16.
- `heldout_prompts.jsonl`: {settings.num_prompts} prompts of 32 to 64 tokens from held-out files.

Settings: `{json.dumps(asdict(settings))}`
"""
    write_text(folder / "README.md", card)


def add_options(parser: argparse.ArgumentParser, defaults: dict[str, Any]) -> None:
    """Add one option per setting."""
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default {value}")


@errors_as_messages(CONTINUES)
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="folder for the model, the tokenizer, the held-out prompts and the card"
    )
    parser.add_argument("--start_from", type=Path, help="folder of a model made by this command, to train it further")
    add_options(parser, asdict(Settings()))
    arguments = vars(parser.parse_args())
    folder: Path = arguments.pop("folder")
    start_from: Path | None = arguments.pop("start_from")
    settings = Settings(**arguments)
    folder.mkdir(parents=True, exist_ok=True)

    files = list(source_files())
    train_files, held_files = [f for f in files if not f.held_out], [f for f in files if f.held_out]
    tokenizer = train_tokenizer([f.text for f in train_files], settings.vocab_size)
    stream, held_out = token_stream(tokenizer, train_files), token_stream(tokenizer, held_files)
    print(
        f"{len(train_files)} files, {len(stream):,} tokens to train on; {len(held_out):,} tokens held out", flush=True
    )

    model = build_model(settings)
    if start_from is not None:
        model.load_state_dict(load_file(start_from / "model.safetensors"))
    device: Any = pick_device("auto")  # the type annotation of transformers' `to` is wrong
    model.to(device)  # the training windows do not depend on the device
    checkpoint = folder / "training.ckpt"
    train(model, stream, held_out, settings, checkpoint)

    model.cpu().bfloat16().save_pretrained(folder)
    give_umask_mode(folder / "model.safetensors")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=settings.max_positions,
    ).save_pretrained(folder)
    prompts = held_out_prompts(tokenizer, held_files, settings)
    write_text(folder / "heldout_prompts.jsonl", "".join(json.dumps(prompt) + "\n" for prompt in prompts))
    nats = held_out_loss(model.float(), held_out, settings.max_positions)
    held_out_bytes = sum(len(f.text.encode()) for f in held_files)
    facts: dict[str, object] = {
        "parameters": model.num_parameters(),
        "python": sys.version.split()[0],
        "train_tokens": len(stream),
        "held_out_files": len(held_files),
        "held_out_tokens": len(held_out),
        "nats_per_token": nats,
        "bits_per_byte": nats / math.log(2) * len(held_out) / held_out_bytes,
    }
    write_card(folder, settings, facts)
    checkpoint.unlink(missing_ok=True)
    print(f"held-out loss {nats:.3f} nats per token, {facts['bits_per_byte']:.3f} bits per byte; written to {folder}")


if __name__ == "__main__":
    main()
