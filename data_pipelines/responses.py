"""The second stage: what is trained on, as tokens: the target's answer to each prompt, or conversations as they are."""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data_pipelines.completion_client import CompletionServer
from data_pipelines.shard_work import Meter, Piece, pieces
from data_pipelines.stage import Json, Stage, file_digest, target_identity, write_jsonl, write_text
from heads.checkpoint import load_head
from heads.target_config import locate_target
from inference.decode import generate_batch
from inference.drafter import Drafter
from inference.drafters.cost_aware import growth_from_recipe
from inference.drafters.head import HeadDrafter
from inference.request import Request
from inference.sampling import Sampling
from inference.target.model import TargetModel
from inference.target.ranks import Ranks
from inference.target.tokenizer import load_tokenizer
from recipes import Recipe
from recipes.jsonl import read_jsonl

# Prompts and how to continue them, to what was written after each.
Writer = Callable[[list[list[int]], list[Sampling]], list[list[int]]]


def responses_stage(recipe: Recipe, prompts: Stage) -> Stage:
    data = recipe.data
    inputs = {
        "prompts": prompts.digest(),
        "data.heldout_samples": data.heldout_samples,
        "data.shard_samples": data.shard_samples,
    }
    if data.responses == "target":
        inputs |= {
            "target": target_identity(locate_target(recipe.target.path, recipe.target.revision)),
            "target.dtype": recipe.target.dtype,
            "data.response_tokens": data.response_tokens,
            "data.temperatures": data.temperatures,
            "seed": recipe.seed,
        }
    if data.server is not None or data.draft_head is not None:
        inputs["written_by"] = written_by(recipe)
    return Stage("responses", recipe.responses_dir, inputs)


def written_by(recipe: Recipe) -> str:
    """How responses come about, for the record."""
    if recipe.data.responses == "given":
        return "whoever wrote data.prompts"
    if recipe.data.server is not None:
        return "the server of data.server"
    return "plain decoding" if recipe.data.draft_head is None else "speculative decoding"


def responses_path(recipe: Recipe, piece: Piece) -> Path:
    return recipe.responses_dir / f"{piece.split}-{piece.index:05d}.jsonl"


@dataclass(frozen=True)
class Text:
    """A sample before its features: all its tokens, and which of them are trained on."""

    tokens: list[int]
    loss_mask: list[bool]

    @classmethod
    def from_row(cls, row: Json) -> "Text":
        if "spans" not in row:
            mask = [False] * len(row["prompt"]) + [True] * len(row["response"])
            return cls(row["prompt"] + row["response"], mask)
        mask = [False] * len(row["tokens"])
        for start, end in row["spans"]:
            mask[start:end] = [True] * (end - start)
        return cls(row["tokens"], mask)


def count_written(texts: list[Text], vocab_size: int) -> Tensor:
    """How often each token is trained on. [vocab]"""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for text in texts:
        written = torch.tensor(text.tokens)[torch.tensor(text.loss_mask)]
        counts += torch.bincount(written, minlength=vocab_size)
    return counts


def write_given(recipe: Recipe, piece: Piece) -> None:
    """Conversations as they are; the prompts stage has found their tokens."""
    rows = [{"id": row["id"], "tokens": row["text"], "spans": row["spans"]} for row in piece.rows]
    write_jsonl(responses_path(recipe, piece), rows)


def write_responses(recipe: Recipe, writer: Writer, piece: Piece, meter: Meter) -> None:
    """Let the target answer the prompts of a shard; sample i is written at the temperature i of the recipe, in turn.

    Each batch goes to a journal as soon as it is written, so that a killed run resumes within a shard.
    """
    path = responses_path(recipe, piece)
    if path.exists():
        meter.skip(len(piece.rows))
        return
    journal = path.with_name(path.name + ".journal")
    done = {row["id"]: row for row in journal_rows(journal)}
    by_length = sorted(piece.rows, key=lambda row: len(row["tokens"]))
    for start in range(0, len(by_length), recipe.data.generate_batch):
        batch = by_length[start : start + recipe.data.generate_batch]
        missing = [row for row in batch if row["id"] not in done]
        if missing:
            samplings = [sampling_of(recipe, piece.split, row["id"]) for row in missing]
            written = writer([row["tokens"] for row in missing], samplings)
            rows = [
                {"id": row["id"], "prompt": row["tokens"], "response": text, "temperature": sampling.temperature}
                for row, text, sampling in zip(missing, written, samplings, strict=True)
            ]
            append_lines(journal, rows)
            done |= {row["id"]: row for row in rows}
        meter.add(len(batch), sum(len(done[row["id"]]["response"]) for row in batch))
    write_jsonl(path, [done[row["id"]] for row in piece.rows])
    journal.unlink(missing_ok=True)


def sampling_of(recipe: Recipe, split: str, number: int) -> Sampling:
    """How a sample is written, whatever shard, batch, rank or resume it comes up in."""
    temperatures = recipe.data.temperatures
    seed = zlib.crc32(f"{recipe.seed} {split} {number}".encode())
    return Sampling(temperatures[number % len(temperatures)], seed=seed)


def append_lines(journal: Path, rows: list[Json]) -> None:
    with journal.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def journal_rows(journal: Path) -> list[Json]:
    """What a killed run put down; the line at which it was killed is cut off, the samples on it are written again."""
    if not journal.exists():
        return []
    whole, newline, _ = journal.read_text().rpartition("\n")
    write_text(journal, whole + newline)
    return [json.loads(line) for line in whole.splitlines()]


def finish_responses(recipe: Recipe, stage: Stage) -> None:
    paths = [responses_path(recipe, piece) for piece in pieces(recipe)]
    texts = [Text.from_row(row) for path in paths for row in read_jsonl(path)]
    trained_on = sum(sum(text.loss_mask) for text in texts)
    stage.finish(
        {
            "samples": len(texts),
            "prompt_tokens": sum(len(text.tokens) for text in texts) - trained_on,
            "response_tokens": trained_on,
            "written_by": written_by(recipe),
            "files": {path.name: file_digest(path) for path in paths},
        }
    )


def target_writer(recipe: Recipe, target: TargetModel, drafter: Drafter | None = None) -> Writer:
    """Our own decoding, each sample with noise of its own; a drafter makes it sooner, never other text."""

    def write(prompts: list[list[int]], samplings: list[Sampling]) -> list[list[int]]:
        pairs = zip(prompts, samplings, strict=True)
        requests = [Request(prompt, recipe.data.response_tokens, sampling) for prompt, sampling in pairs]
        found = generate_batch(target, requests, drafter, recipe.data.generate_batch)
        return [generation.tokens for generation in found]

    return write


def speculative_writer(recipe: Recipe, folder: Path) -> tuple[Writer, Ranks]:
    """The same with a head of this target."""
    untapped = TargetModel.load(recipe.target, ())
    head = load_head(folder, untapped.frozen)
    target = TargetModel(untapped.model, head.taps, untapped.ranks)
    writer = target_writer(recipe, target, HeadDrafter(head, growth_from_recipe(recipe.decode, target, head)))
    return writer, target.ranks


def server_writer(recipe: Recipe, url: str) -> Writer:
    """An OpenAI-compatible server of the same target."""
    section = recipe.target
    tokenizer = load_tokenizer(locate_target(section.path, section.revision), section.trust_remote_code)
    server = CompletionServer(url, tokenizer, recipe.data.server_retries)

    def write(prompts: list[list[int]], samplings: list[Sampling]) -> list[list[int]]:
        return server.complete(prompts, samplings, recipe.data.response_tokens)

    return write
