"""From prompts to features: the target answers each prompt, then one pass over its text taps its hidden states.

    accelerate launch -m data_pipelines.harvest recipes/tiny.yaml

Both stages write whole shards by sample id, so a killed run resumes and the number of ranks may change in between.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from data_pipelines.prompts import make_prompts
from data_pipelines.shards import MANIFEST, Sample, shard_is_whole, shard_name, stored_taps, write_manifest, write_shard
from data_pipelines.stage import Json, Stage, file_digest, read_jsonl, target_identity, write_jsonl
from heads.build import head_taps
from heads.frozen import FrozenTarget
from heads.target_config import TargetConfig, locate_target
from inference.sampling import Sampling
from inference.target import TargetModel
from recipes import Recipe, run_command

STORE_FORMAT = 2  # of the shards: one tensor per tap
LOGITS_TOLERANCE = 0.05  # of the largest logit; bfloat16 rounding stays well below


def responses_stage(recipe: Recipe, prompts: Stage) -> Stage:
    data = recipe.data
    inputs = {
        "prompts": prompts.digest(),
        "target": target_identity(locate_target(recipe.target.path, recipe.target.revision)),
        "target.dtype": recipe.target.dtype,
        "data.response_tokens": data.response_tokens,
        "data.temperatures": data.temperatures,
        "data.generate_batch": data.generate_batch,
        "data.heldout_samples": data.heldout_samples,
        "data.shard_samples": data.shard_samples,
        "seed": recipe.seed,
    }
    return Stage("responses", recipe.responses_dir, inputs)


def features_stage(recipe: Recipe, responses: Stage, taps: tuple[int, ...]) -> Stage:
    """A store of more taps than the head needs serves it too, and is taken as it is."""
    inputs = {"responses": responses.digest(), "taps": taps, "data.dtype": recipe.data.dtype, "format": STORE_FORMAT}
    stage = Stage("features", recipe.features_dir, inputs)
    found = stage.claimed_for()
    if found is not None and set(taps) <= set(found["taps"]):
        return Stage("features", recipe.features_dir, {**inputs, "taps": found["taps"]})
    return stage


@dataclass(frozen=True)
class Piece:
    """The prompts of one shard: the unit of work, of sharing between ranks and of resuming."""

    split: str
    index: int
    rows: list[Json]


def pieces(recipe: Recipe) -> list[Piece]:
    """All shards of both splits, by sample id alone, so that any number of ranks makes the same files."""
    found, size = [], recipe.data.shard_samples
    for split, limit in (("train", None), ("heldout", recipe.data.heldout_samples)):
        rows = list(read_jsonl(recipe.prompts_dir / f"{split}.jsonl"))[:limit]
        found += [Piece(split, i // size, rows[i : i + size]) for i in range(0, len(rows), size)]
    return found


def harvest(recipe: Recipe, target: TargetModel | None = None) -> Stage:
    """Run whatever is missing of prompts, responses and features, on all ranks together; returns the last stage.

    Raises ValueError where a stage on disk was made from other inputs.
    """
    state = PartialState()
    with state.main_process_first():
        prompts = make_prompts(recipe)
    config = TargetConfig.from_folder(locate_target(recipe.target.path, recipe.target.revision))
    check_lengths(recipe, config)
    taps = stored_taps(head_taps(recipe.head, config), config.num_layers)

    responses = responses_stage(recipe, prompts)
    if not responses.is_complete():
        target = target or TargetModel.load(recipe.target, taps)
        begin(responses, state)
        for piece in mine(pieces(recipe), state, "responses of the target"):
            write_responses(recipe, target, piece)
        state.wait_for_everyone()
        if state.is_main_process:
            finish_responses(recipe, responses)
        state.wait_for_everyone()

    features = features_stage(recipe, responses, taps)
    if not features.is_complete():
        taps = tuple(features.inputs["taps"])
        target = target if target and target.taps == taps else TargetModel.load(recipe.target, taps)
        begin(features, state)
        check_teacher(recipe, target)
        made_from = hashlib.sha256(json.dumps(features.inputs, sort_keys=True).encode()).hexdigest()
        for piece in mine(pieces(recipe), state, "features"):
            write_features(recipe, target, piece, made_from)
        state.wait_for_everyone()
        if state.is_main_process:
            names = [shard_name(piece.split, piece.index) for piece in pieces(recipe)]
            write_manifest(features.folder, names, {"taps": taps, "made_from": features.inputs})
            features.finish({"manifest": file_digest(features.folder / MANIFEST)})
        state.wait_for_everyone()
    return features


def check_lengths(recipe: Recipe, config: TargetConfig) -> None:
    longest = recipe.data.prompt_tokens + recipe.data.response_tokens
    if longest > config.max_positions:
        raise ValueError(
            f"data.prompt_tokens {recipe.data.prompt_tokens} and data.response_tokens {recipe.data.response_tokens} "
            f"make samples of {longest} tokens, the target has {config.max_positions} positions; lower one of them"
        )


def begin(stage: Stage, state: PartialState) -> None:
    """Claim a stage's folder, once for all ranks."""
    if state.is_main_process:
        stage.begin()
    state.wait_for_everyone()


def mine(work: list[Piece], state: PartialState, what: str) -> Iterator[Piece]:
    """This rank's share of the pieces, with a progress bar on the main rank."""
    share = work[state.process_index :: state.num_processes]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), disable=not state.is_main_process) as progress:
        yield from progress.track(share, description=f"{what}, shards")


def responses_path(recipe: Recipe, piece: Piece) -> Path:
    return recipe.responses_dir / f"{piece.split}-{piece.index:05d}.jsonl"


def write_responses(recipe: Recipe, target: TargetModel, piece: Piece) -> None:
    """Let the target answer the prompts of a shard; sample i is written at the temperature i of the recipe, in turn."""
    path = responses_path(recipe, piece)
    if path.exists():
        return
    rows: list[Json] = []
    for turn, temperature in enumerate(recipe.data.temperatures):
        share = [row for row in piece.rows if row["id"] % len(recipe.data.temperatures) == turn]
        by_length = sorted(share, key=lambda row: len(row["tokens"]))
        for start in range(0, len(by_length), recipe.data.generate_batch):
            batch = by_length[start : start + recipe.data.generate_batch]
            # The noise of a batch is keyed by its first sample, so ranks and resumes do not matter.
            seed = zlib.crc32(f"{recipe.seed} {piece.split} {batch[0]['id']}".encode())
            sampling = Sampling(temperature, seed=seed)
            written = target.generate([row["tokens"] for row in batch], recipe.data.response_tokens, sampling)
            rows += [
                {"id": row["id"], "prompt": row["tokens"], "response": response, "temperature": temperature}
                for row, response in zip(batch, written, strict=True)
            ]
    write_jsonl(path, sorted(rows, key=lambda row: row["id"]))


def finish_responses(recipe: Recipe, stage: Stage) -> None:
    paths = [responses_path(recipe, piece) for piece in pieces(recipe)]
    rows = [row for path in paths for row in read_jsonl(path)]
    stage.finish(
        {
            "samples": len(rows),
            "prompt_tokens": sum(len(row["prompt"]) for row in rows),
            "response_tokens": sum(len(row["response"]) for row in rows),
            "files": {path.name: file_digest(path) for path in paths},
        }
    )


def write_features(recipe: Recipe, target: TargetModel, piece: Piece, made_from: str) -> None:
    """Tap the hidden states of every sample of a shard."""
    path = recipe.features_dir / shard_name(piece.split, piece.index)
    if shard_is_whole(path, made_from):
        return
    rows = list(read_jsonl(responses_path(recipe, piece)))
    by_length = sorted(rows, key=lambda row: len(row["prompt"]) + len(row["response"]))
    samples: dict[int, Sample] = {}
    for start in range(0, len(by_length), recipe.data.harvest_batch):
        batch = by_length[start : start + recipe.data.harvest_batch]
        tapped = tap(target, [row["prompt"] + row["response"] for row in batch], getattr(torch, recipe.data.dtype))
        for row, (tokens, taps, last_hidden) in zip(batch, tapped, strict=True):
            loss_mask = torch.arange(len(tokens)) >= len(row["prompt"])
            samples[row["id"]] = Sample(tokens, loss_mask, taps, last_hidden)
    write_shard(path, [samples[row["id"]] for row in rows], target.taps, made_from)


def check_teacher(recipe: Recipe, target: TargetModel) -> None:
    """Training reads the teacher's logits off the stored last hidden state; refuse a target where that is not so."""
    prompt = next(read_jsonl(recipe.prompts_dir / "train.jsonl"))["tokens"]
    output = target.forward(torch.tensor([prompt], device=target.device), last_only=True)
    folder = locate_target(recipe.target.path, recipe.target.revision)
    frozen = FrozenTarget.from_folder(folder, target.dtype, target.device)
    own, rebuilt = output.logits[0, -1].float(), frozen.logits(output.last_hidden[0, -1])
    error = float((own - rebuilt).abs().max() / own.abs().max())
    if error > LOGITS_TOLERANCE:
        raise ValueError(
            f"target.path: the logits of {recipe.target.path} are not its lm_head over its final norm (they differ by "
            f"{error:.1%}): a {target.config.model_type!r} model scales or shifts them in a way not known here"
        )


def tap(target: TargetModel, texts: list[list[int]], dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, tapped and last hidden states of each text, from one causal pass padded on the right."""
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=target.device)
    output = target.forward(tokens, last_only=True)
    taps, last_hidden = output.taps.to("cpu", dtype), output.last_hidden.to("cpu", dtype)
    return [
        (torch.tensor(text), taps[i, : len(text)].clone(), last_hidden[i, : len(text)].clone())
        for i, text in enumerate(texts)
    ]


def main() -> None:
    Accelerator()  # sets up the ranks as `accelerate launch` asked for them
    run_command(__doc__, lambda recipe: print(recipe.features_dir, harvest(recipe).facts()))


if __name__ == "__main__":
    main()
