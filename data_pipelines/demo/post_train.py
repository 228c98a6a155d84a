"""Post-train the demo target on its own text: sure of what it writes, as large models are, and with fewer loops.

    python -m data_pipelines.demo.post_train base post_trained

The base is what data_pipelines.demo.target made; the committed target is two such rounds behind one, as its card
says. Large chat models are far surer of their text than a small model of source code is, and a draft head's figures at
temperature 1 follow that; and a small model that decodes greedily falls into loops, which are easy to draft. Both are
changed as they are in large models, in small:

1. Rejection sampling: the base writes several continuations of prompts from its training files. Those that loop are
   rejected, and those in which valid Python becomes invalid. The others are good, most of all the ones that the base is
   surest of (best of N by the model's own likelihood; Huang et al., "Self-Improvement in Language Models: The
   Sharpening Mechanism", arXiv 2412.01951).
2. Fine-tuning on pairs of a good and a rejected continuation of the same prompt by direct preference optimization
   (Rafailov et al., arXiv 2305.18290), with the good one's own loss beside it (as for Llama 3, arXiv 2407.21783).

Both may be done again with the result as base. Samples are kept beside the result in parts, each drawn by a process of
its own; an interrupted run draws those that are missing.
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
from rich.progress import track
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_pipelines.demo.python_stdlib import source_files
from data_pipelines.demo.target import add_options, held_out_loss, optimizers_of, token_stream
from recipes.allocator import keep_freed_memory
from recipes.jsonl import read_jsonl

PROMPT_LENGTHS = (32, 40, 48, 56, 64)
JUDGED_PROMPTS = 64
Item = TypeVar("Item")


@dataclass(frozen=True)
class Settings:
    """Everything that the result depends on, besides the base and the standard library's version."""

    seed: int = 0
    parts: int = 2
    prompts: int = 1536  # of each part
    samples: int = 4  # continuations of a prompt
    temperature: float = 0.35
    response_tokens: int = 128
    keep: int = 2  # pairs of a prompt, at most
    epochs: int = 1
    batch_size: int = 6  # pairs
    warmup_steps: int = 30
    muon_lr: float = 1e-3
    adam_lr: float = 2e-4
    beta: float = 0.1  # of direct preference optimization
    own_loss: float = 1.0  # weight of the good continuations' own loss, per token
    sharpness: float = 2.5  # the last norm's weight is multiplied by it at the start, about where training would lead


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    response: list[int]


def is_python_so_far(text: str) -> bool:
    """Whether whole lines of Python begin so: more may be missing at their end, but nothing is wrong."""
    lines = textwrap.dedent(text[: text.rfind("\n") + 1])
    if not lines.strip():
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            codeop.compile_command(lines, symbol="exec")  # None where more is needed
    except (SyntaxError, ValueError, OverflowError):
        return False
    return True


def loops(tokens: list[int], longest: int = 40, times: int = 3, at_least: int = 24) -> bool:
    """Whether a piece of up to `longest` tokens comes `times` in a row, over `at_least` tokens."""
    for period in range(1, longest + 1):
        run = period
        for now, before in zip(tokens[period:], tokens, strict=False):
            run = run + 1 if now == before else period
            if run >= max(times * period, at_least):
                return True
    return False


def draw_prompts(tokenizer: Any, seed: int, settings: Settings) -> list[list[int]]:
    """Prompts that begin with a line of a training file, longer files giving more of them; the shortest first."""
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
    """Write one part's samples, a line each: {prompt, response}."""
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
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    partial.replace(path)


def draw(base: Path, folder: Path, settings: Settings) -> list[Answer]:
    """All samples; parts that are there already are read."""
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
        raise SystemExit(f"{', '.join(failed)}: not written, see above; run the same command again")
    return [Answer(**row) for path in paths for row in read_jsonl(path)]


def is_good(answer: Answer, tokenizer: Any) -> bool:
    """Without a loop and an end, and Python that is valid so far stays so."""
    if tokenizer.eos_token_id in answer.response or loops(answer.response):
        return False
    prompt = str(tokenizer.decode(answer.prompt))
    return not is_python_so_far(prompt) or is_python_so_far(prompt + str(tokenizer.decode(answer.response)))


def chunks(items: list[Item], size: int) -> list[list[Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def collate(answers: list[Answer], length: int) -> tuple[Tensor, Tensor]:
    """Tokens [answers, length + 1], and which of the next tokens are a response's [answers, length]."""
    tokens, wanted = torch.zeros(len(answers), length + 1, dtype=torch.long), torch.zeros(len(answers), length)
    for row, answer in enumerate(answers):
        text = answer.prompt + answer.response
        tokens[row, : len(text)] = torch.tensor(text)
        wanted[row, len(answer.prompt) - 1 : len(text) - 1] = 1
    return tokens, wanted


def log_likelihoods(model: nn.Module, tokens: Tensor, wanted: Tensor) -> Tensor:
    """Log of the chance of each whole response. [answers]"""
    logits = model(tokens[:, :-1], use_cache=False).logits  # [answers, length, vocab]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return -(losses.view_as(wanted) * wanted).sum(1)


@dataclass(frozen=True)
class Pair:
    """Two continuations of one prompt, and by how much the model before was surer of the good one."""

    good: Answer
    bad: Answer
    margin: float  # nats


@torch.no_grad()
def surest(model: nn.Module, answers: list[Answer], length: int) -> dict[tuple[int, ...], list[tuple[float, Answer]]]:
    """By prompt, its different answers behind their log-likelihoods, the likeliest first."""
    found: dict[tuple[int, ...], dict[tuple[int, ...], tuple[float, Answer]]] = {}
    for batch in track(chunks(answers, 64), "likelihoods"):
        for answer, chance in zip(batch, log_likelihoods(model, *collate(batch, length)).tolist(), strict=True):
            found.setdefault(tuple(answer.prompt), {})[tuple(answer.response)] = chance, answer
    return {prompt: sorted(each.values(), key=lambda one: -one[0]) for prompt, each in found.items()}


def pairs(model: nn.Module, good: list[Answer], bad: list[Answer], length: int, keep: int) -> list[Pair]:
    """Of each prompt up to `keep` pairs of a good and a bad answer, no two alike, those that the model is surest of."""
    better, worse = surest(model, good, length), surest(model, bad, length)
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
    """Equation 7 of direct preference optimization, good ones in the first half, plus the own loss of these."""
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
class Judged:
    """What a model writes behind held-out prompts."""

    entropy: float  # nats per token, of its own distributions
    distinct: float  # mean share of different tokens in a text
    looping: int  # texts
    valid: int  # texts that stay valid Python ...
    could: int  # ... of those whose prompt is


@torch.no_grad()
def judge(model: Any, tokenizer: Any, prompts: list[str], temperature: float, length: int) -> Judged:
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
    could = [(prompt, text) for prompt, text in zip(prompts, texts, strict=True) if is_python_so_far(prompt)]
    return Judged(
        entropy=float(-(log_p.exp() * log_p).sum(-1).mean()),
        distinct=sum(len(set(text)) / len(text) for text in texts) / len(texts),
        looping=sum(loops(text) for text in texts),
        valid=sum(is_python_so_far(prompt + str(tokenizer.decode(text))) for prompt, text in could),
        could=len(could),
    )


def load(folder: Path) -> tuple[Any, Any]:
    """In float32; the demo's own file, so nothing of the folder is executed."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return tokenizer, model.eval()


def write_card(folder: Path, base: Path, rows: list[str], facts: dict[str, object], settings: Settings) -> None:
    """The base's card with a section on what was done since."""
    card = (base / "README.md").read_text()
    changed = " ".join(f"--{name} {v}" for name, v in asdict(settings).items() if v != asdict(Settings())[name])
    section = f"""
## Post-training, {base.name} to {folder.name}

    python -m data_pipelines.demo.post_train {base.name} {folder.name} {changed}

{base.name} wrote {facts["samples"]:,} continuations of prompts from its training files at temperature
{settings.temperature:g}. {facts["good"]:,} of them neither loop nor turn valid Python into invalid. Direct preference
optimization learned from up to {settings.keep} pairs of a prompt, a good one and another:
{facts["pairs"]:,} pairs in {facts["steps"]:,} steps. Held-out loss is then {facts["nats"]:.3f} nats per token: who is
sure of his own text is a worse judge of others'. What both write behind {JUDGED_PROMPTS} of the held-out prompts,
{settings.response_tokens} tokens each:

| model | temperature | entropy, nats/token | distinct tokens | texts that loop | stay valid Python |
| --- | ---: | ---: | ---: | ---: | ---: |
{chr(10).join(rows)}
"""
    (folder / "README.md").write_text(card.rstrip() + "\n" + section)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="folder of the model that data_pipelines.demo.target made")
    parser.add_argument("folder", type=Path, help="where the model and its card go, and the samples meanwhile")
    add_options(parser, asdict(Settings()))
    arguments = vars(parser.parse_args())
    base: Path = arguments.pop("base")
    folder: Path = arguments.pop("folder")
    settings = Settings(**arguments)
    keep_freed_memory()
    folder.mkdir(parents=True, exist_ok=True)

    answers = draw(base, folder, settings)
    tokenizer, model = load(base)
    prompts = [row["prompt"] for row in read_jsonl(base / "heldout_prompts.jsonl")][:JUDGED_PROMPTS]
    rows = judged_rows(base.name, model, tokenizer, prompts, settings)
    length = max(PROMPT_LENGTHS) + settings.response_tokens
    with torch.no_grad():
        model.model.norm.weight.mul_(settings.sharpness)
    judged = [is_good(answer, tokenizer) for answer in answers]
    good, bad = ([answer for answer, ok in zip(answers, judged, strict=True) if ok is kind] for kind in (True, False))
    kept = pairs(model, good, bad, length, settings.keep)
    print(f"{len(answers):,} samples, {len(good):,} good, {len(kept):,} pairs", flush=True)
    fine_tune(model.train(), kept, length, settings)

    for file in base.iterdir():
        if file.suffix in {".json", ".jsonl"} and file.is_file():
            shutil.copyfile(file, folder / file.name)
    model.eval().bfloat16().save_pretrained(folder)
    tokenizer, model = load(folder)
    rows += judged_rows(folder.name, model, tokenizer, prompts, settings)
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


def judged_rows(name: str, model: Any, tokenizer: Any, prompts: list[str], settings: Settings) -> list[str]:
    rows = []
    for temperature in (0.0, 1.0):
        found = judge(model, tokenizer, prompts, temperature, settings.response_tokens)
        rows.append(
            f"| {name} | {temperature:g} | {found.entropy:.2f} | {found.distinct:.2f} | "
            f"{found.looping} of {len(prompts)} | {found.valid} of {found.could} |"
        )
    return rows


if __name__ == "__main__":
    main()
