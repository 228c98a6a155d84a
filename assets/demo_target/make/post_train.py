"""Post-train the demo target on its own text, so that its distributions are sharper and it loops less.

    python assets/demo_target/make/post_train.py base post_trained

The base is a model made by pretrain.py. The committed target had two rounds of this post-training; its
card has the commands. Large chat models are far more confident in their text than a small model of source code, and a
draft head's acceptance at temperature 1 depends on that. A small model also falls into loops when it decodes greedily,
and loops are easy to draft. The post-training of large models changes both, and so do these two steps on a small scale:

1. Rejection sampling: the base writes several continuations of prompts from its training files. Continuations that loop
   or turn valid Python into invalid Python are rejected. The rest are good, and those that the base itself finds most
   likely are preferred (best of N by the model's own likelihood; Huang et al., "Self-Improvement in Language Models:
   The Sharpening Mechanism", arXiv 2412.01951).
2. Fine-tuning on pairs of a good and a rejected continuation of the same prompt by direct preference optimization
   (Rafailov et al., arXiv 2305.18290), plus the next-token loss of the good one (as for Llama 3, arXiv 2407.21783).

The result can be the base of another round. Samples are saved next to the result in parts, each drawn by its own
process; an interrupted run draws only the missing parts.
"""

import argparse
import codeop
import json
import multiprocessing
import random
import shutil
import textwrap
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pretrain import add_options, held_out_loss, optimizers_of, token_stream
from rich.progress import track
from standard_library import source_files
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.common.errors import CONTINUES, errors_as_messages
from headstart.common.files import read_jsonl, write_text
from headstart.common.process import keep_freed_memory
from headstart.heads.files import give_umask_mode

PROMPT_LENGTHS = (32, 40, 48, 56, 64)
QUALITY_PROMPTS = 64
Item = TypeVar("Item")


@dataclass(frozen=True)
class Settings:
    """Everything that the result depends on, except the base and the version of the standard library."""

    seed: int = 0
    parts: int = 2
    prompts: int = 1536  # per part
    samples: int = 4  # continuations per prompt
    temperature: float = 0.35
    response_tokens: int = 128
    keep: int = 2  # most pairs per prompt
    epochs: int = 1
    batch_size: int = 6  # pairs
    warmup_steps: int = 30
    muon_lr: float = 1e-3
    adam_lr: float = 2e-4
    beta: float = 0.1  # beta of direct preference optimization
    own_loss: float = 1.0  # weight of the good continuations' next-token loss
    sharpness: float = 2.5  # initial factor on the final norm's weight, close to where training would take it


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    response: list[int]


def is_python_so_far(text: str) -> bool:
    """Whether the whole lines of a text could be the start of valid Python."""
    lines = textwrap.dedent(text[: text.rfind("\n") + 1])
    if not lines.strip():
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            codeop.compile_command(lines, symbol="exec")  # returns None if the code is incomplete
    except (SyntaxError, ValueError, OverflowError):
        return False
    return True


def loops(tokens: list[int], longest: int = 40, times: int = 3, at_least: int = 24) -> bool:
    """Whether a sequence of up to `longest` tokens repeats `times` in a row, covering `at_least` tokens or more."""
    for period in range(1, longest + 1):
        run = period
        for now, before in zip(tokens[period:], tokens, strict=False):
            run = run + 1 if now == before else period
            if run >= max(times * period, at_least):
                return True
    return False


def draw_prompts(tokenizer: Any, seed: int, settings: Settings) -> list[list[int]]:
    """Draw prompts that start at a line of a training file, in proportion to file length; the shortest come first."""
    rng = random.Random(seed)
    texts = [file.text for file in source_files() if not file.held_out]
    weights = [len(text) for text in texts]
    prompts: list[list[int]] = []
    while len(prompts) < settings.prompts:
        for text in rng.choices(texts, weights, k=settings.prompts):
            start = text.rfind("\n", 0, rng.randrange(len(text))) + 1
            length = rng.choice(PROMPT_LENGTHS)
            tokens = tokenizer(text[start : start + 1000], verbose=False)["input_ids"]
            if len(tokens) >= length:
                prompts.append(tokens[:length])
    return sorted(prompts[: settings.prompts], key=len)


def draw_part(base: Path, part: int, path: Path, settings: Settings) -> None:
    """Write the samples of one part, one {prompt, response} per line."""
    torch.set_num_threads(1)
    keep_freed_memory()
    seed = settings.seed * settings.parts + part
    torch.manual_seed(seed)
    tokenizer, model = load(base)
    prompts = draw_prompts(tokenizer, 1000 + seed, settings)
    rows: list[Answer] = []
    for length in track(PROMPT_LENGTHS, f"part {part}"):
        for batch in chunks([prompt for prompt in prompts if len(prompt) == length], 256 // settings.samples):
            tokens = torch.tensor(batch).repeat_interleave(settings.samples, 0)
            written = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                temperature=settings.temperature,
                top_k=0,
                max_new_tokens=settings.response_tokens,
                pad_token_id=tokenizer.eos_token_id,
            )
            rows += [Answer(row[:length].tolist(), row[length:].tolist()) for row in written]
    write_text(path, "".join(json.dumps(asdict(row)) + "\n" for row in rows))


def draw(base: Path, folder: Path, settings: Settings) -> list[Answer]:
    """Return all samples; missing parts are drawn first, each in its own process."""
    paths = [folder / f"samples-{part}.jsonl" for part in range(settings.parts)]
    context = multiprocessing.get_context("spawn")
    missing = [(part, path) for part, path in enumerate(paths) if not path.exists()]
    processes = [context.Process(target=draw_part, args=(base, part, path, settings)) for part, path in missing]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    failed = [str(path) for _, path in missing if not path.exists()]
    if failed:
        raise SystemExit(f"{', '.join(failed)} not written, see the error above; run the same command again")
    return [Answer(**row) for path in paths for row in read_jsonl(path)]


def is_good(answer: Answer, tokenizer: Any) -> bool:
    """Whether a response has no loop and no end of text, and does not turn valid Python into invalid Python."""
    if tokenizer.eos_token_id in answer.response or loops(answer.response):
        return False
    prompt = str(tokenizer.decode(answer.prompt))
    return not is_python_so_far(prompt) or is_python_so_far(prompt + str(tokenizer.decode(answer.response)))


def chunks(items: list[Item], size: int) -> list[list[Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def collate(answers: list[Answer], length: int) -> tuple[Tensor, Tensor]:
    """Padded tokens [answers, length + 1], and a mask of next tokens in the response [answers, length]."""
    tokens, wanted = torch.zeros(len(answers), length + 1, dtype=torch.long), torch.zeros(len(answers), length)
    for row, answer in enumerate(answers):
        text = answer.prompt + answer.response
        tokens[row, : len(text)] = torch.tensor(text)
        wanted[row, len(answer.prompt) - 1 : len(text) - 1] = 1
    return tokens, wanted


def log_likelihoods(model: nn.Module, tokens: Tensor, wanted: Tensor) -> Tensor:
    """The log-likelihood of each whole response. [answers]"""
    logits = model(tokens[:, :-1], use_cache=False).logits  # [answers, length, vocab]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return -(losses.view_as(wanted) * wanted).sum(1)


@dataclass(frozen=True)
class Pair:
    """A good and a bad continuation of one prompt; `margin` is their log-likelihood difference before training."""

    good: Answer
    bad: Answer
    margin: float  # nats


@torch.no_grad()
def by_likelihood(
    model: nn.Module, answers: list[Answer], length: int
) -> dict[tuple[int, ...], list[tuple[float, Answer]]]:
    """The distinct answers to each prompt with their log-likelihoods, likeliest first."""
    found: dict[tuple[int, ...], dict[tuple[int, ...], tuple[float, Answer]]] = {}
    for batch in track(chunks(answers, 64), "likelihoods"):
        for answer, chance in zip(batch, log_likelihoods(model, *collate(batch, length)).tolist(), strict=True):
            found.setdefault(tuple(answer.prompt), {})[tuple(answer.response)] = chance, answer
    return {prompt: sorted(each.values(), key=lambda one: -one[0]) for prompt, each in found.items()}


def pairs(model: nn.Module, good: list[Answer], bad: list[Answer], length: int, keep: int) -> list[Pair]:
    """For each prompt, up to `keep` pairs of its likeliest distinct good and bad answers."""
    better, worse = by_likelihood(model, good, length), by_likelihood(model, bad, length)
    return [
        Pair(one, other, chance - other_chance)
        for prompt in better
        for (chance, one), (other_chance, other) in list(zip(better[prompt], worse.get(prompt, []), strict=False))[
            :keep
        ]
    ]


def preference_loss(
    model: nn.Module, tokens: Tensor, wanted: Tensor, margins: Tensor, beta: float, own_loss: float
) -> Tensor:
    """DPO loss (equation 7) plus the next-token loss of the good answers, which are the first half of the batch."""
    chances = log_likelihoods(model, tokens, wanted)
    good, bad = chances.chunk(2)
    preferred = -nn.functional.logsigmoid(beta * (good - bad - margins)).mean()
    return preferred - own_loss * (good / wanted.chunk(2)[0].sum(1)).mean()


def fine_tune(model: Any, given: list[Pair], length: int, settings: Settings) -> None:
    optimizers, rest = optimizers_of(model, settings.muon_lr, settings.adam_lr, weight_decay=0.0)
    rng = random.Random(settings.seed)
    shuffled = [pair for _ in range(settings.epochs) for pair in rng.sample(given, len(given))]
    batches = chunks(shuffled, settings.batch_size)[: len(shuffled) // settings.batch_size]
    compiled = torch.compile(preference_loss)
    losses = []
    for step, batch in enumerate(track(batches, "fine-tuning")):
        factor = min(1.0, (step + 1) / settings.warmup_steps) * (len(batches) - step) / len(batches)
        for optimizer, peak in zip(optimizers, (settings.muon_lr, settings.adam_lr), strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
        tokens, wanted = collate([pair.good for pair in batch] + [pair.bad for pair in batch], length)
        margins = torch.tensor([pair.margin for pair in batch])
        loss = compiled(model, tokens, wanted, margins, settings.beta, settings.own_loss)
        loss.backward()
        nn.utils.clip_grad_norm_(rest, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 20 == 0:
            print(f"step {step + 1} of {len(batches)}: loss {sum(losses[-20:]) / 20:.4f}", flush=True)


@dataclass(frozen=True)
class TextQuality:
    """Measurements of a model's continuations of held-out prompts."""

    entropy: float  # of the next-token distributions, in nats per token
    distinct: float  # mean share of distinct tokens in a text
    looping: int  # texts that loop
    valid: int  # texts that stay valid Python after a valid prompt
    valid_prompts: int  # prompts that are valid Python so far


@torch.no_grad()
def measure_text(model: Any, tokenizer: Any, prompts: list[str], temperature: float, length: int) -> TextQuality:
    torch.manual_seed(0)
    encoded = [torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    tokens = nn.utils.rnn.pad_sequence(encoded, batch_first=True, padding_side="left")
    real = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in encoded], batch_first=True, padding_side="left")
    out = model.generate(
        tokens,
        attention_mask=real,
        max_new_tokens=length,
        pad_token_id=tokenizer.eos_token_id,
        output_logits=True,
        return_dict_in_generate=True,
        **({"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}),
    )
    texts = out.sequences[:, tokens.shape[1] :].tolist()
    log_p = torch.stack(out.logits, 1).log_softmax(-1)  # [prompts, length, vocab]
    continued = [(prompt, text) for prompt, text in zip(prompts, texts, strict=True) if is_python_so_far(prompt)]
    return TextQuality(
        entropy=float(-(log_p.exp() * log_p).sum(-1).mean()),
        distinct=sum(len(set(text)) / len(text) for text in texts) / len(texts),
        looping=sum(loops(text) for text in texts),
        valid=sum(is_python_so_far(prompt + str(tokenizer.decode(text))) for prompt, text in continued),
        valid_prompts=len(continued),
    )


def load(folder: Path) -> tuple[Any, Any]:
    """Load a tokenizer and a model in float32, without running code from the folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return tokenizer, model.eval()


def write_card(folder: Path, base: Path, rows: list[str], facts: dict[str, object], settings: Settings) -> None:
    """Write the base's card with a section on this post-training."""
    card = (base / "README.md").read_text()
    changed = " ".join(f"--{name} {v}" for name, v in asdict(settings).items() if v != asdict(Settings())[name])
    section = f"""
## Post-training, {base.name} to {folder.name}

    python assets/demo_target/make/post_train.py {base.name} {folder.name} {changed}

{base.name} wrote {facts["samples"]:,} continuations of prompts from its training files at temperature
{settings.temperature:g}. {facts["good"]:,} of them neither loop nor turn valid Python into invalid Python. Direct
preference optimization used up to {settings.keep} pairs of a good and a rejected continuation per prompt:
{facts["pairs"]:,} pairs in {facts["steps"]:,} steps. The held-out loss after it is {facts["nats"]:.3f} nats per token;
it is higher than before the post-training, because a model that is more confident in its own text predicts other text
less well. The table compares what both models write after {QUALITY_PROMPTS} held-out prompts,
{settings.response_tokens} tokens each:

| model | temperature | entropy, nats/token | distinct tokens | texts that loop | stay valid Python |
| --- | ---: | ---: | ---: | ---: | ---: |
{chr(10).join(rows)}
"""
    write_text(folder / "README.md", card.rstrip() + "\n" + section)


@errors_as_messages(CONTINUES)
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "base",
        type=Path,
        help="folder of the model to post-train, made by pretrain.py or by this command",
    )
    parser.add_argument("folder", type=Path, help="folder for the model, its card and, until it is done, the samples")
    add_options(parser, asdict(Settings()))
    arguments = vars(parser.parse_args())
    base: Path = arguments.pop("base")
    folder: Path = arguments.pop("folder")
    settings = Settings(**arguments)
    keep_freed_memory()
    folder.mkdir(parents=True, exist_ok=True)

    answers = draw(base, folder, settings)
    tokenizer, model = load(base)
    prompts = [row["prompt"] for row in read_jsonl(base / "heldout_prompts.jsonl")][:QUALITY_PROMPTS]
    rows = quality_rows(base.name, model, tokenizer, prompts, settings)
    length = max(PROMPT_LENGTHS) + settings.response_tokens
    with torch.no_grad():
        model.model.norm.weight.mul_(settings.sharpness)
    accepted = [is_good(answer, tokenizer) for answer in answers]
    good, bad = ([answer for answer, ok in zip(answers, accepted, strict=True) if ok is kind] for kind in (True, False))
    kept = pairs(model, good, bad, length, settings.keep)
    print(f"{len(answers):,} samples, {len(good):,} good, {len(kept):,} pairs", flush=True)
    fine_tune(model.train(), kept, length, settings)

    for file in base.iterdir():
        if file.suffix in {".json", ".jsonl"} and file.is_file():
            shutil.copyfile(file, folder / file.name)
    model.eval().bfloat16().save_pretrained(folder)
    give_umask_mode(folder / "model.safetensors")
    tokenizer, model = load(folder)
    rows += quality_rows(folder.name, model, tokenizer, prompts, settings)
    held_out = token_stream(tokenizer.backend_tokenizer, [file for file in source_files() if file.held_out])
    facts: dict[str, object] = {
        "samples": len(answers),
        "good": len(good),
        "pairs": len(kept),
        "steps": settings.epochs * (len(kept) // settings.batch_size),
        "nats": held_out_loss(model, held_out, 512),
    }
    write_card(folder, base, rows, facts, settings)
    for part in range(settings.parts):
        (folder / f"samples-{part}.jsonl").unlink()
    print("\n".join(rows), f"written to {folder}", sep="\n")


def quality_rows(name: str, model: Any, tokenizer: Any, prompts: list[str], settings: Settings) -> list[str]:
    rows = []
    for temperature in (0.0, 1.0):
        found = measure_text(model, tokenizer, prompts, temperature, settings.response_tokens)
        rows.append(
            f"| {name} | {temperature:g} | {found.entropy:.2f} | {found.distinct:.2f} | "
            f"{found.looping} of {len(prompts)} | {found.valid} of {found.valid_prompts} |"
        )
    return rows


if __name__ == "__main__":
    main()
