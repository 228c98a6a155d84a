"""Continuing with more prompts: responses and features of unchanged prompts are reused.

A response is recognised by its prompt and a shard of features by its texts, so it does not matter which run wrote them
or where it was killed.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from headstart.common.files import read_jsonl, remove, resume_jsonl, write_jsonl, write_text
from headstart.common.remote import files_in, is_there
from headstart.data_pipelines.features.features import token_tensors
from headstart.data_pipelines.features.shard_files import made_from, note_path, read_tensors
from headstart.data_pipelines.features.shards import MANIFEST, read_manifest
from headstart.data_pipelines.prompts.responses import journal_of, read_texts, responses_path
from headstart.data_pipelines.stages.shard_work import ShardPrompts
from headstart.data_pipelines.stages.stage import Json, Stage
from headstart.recipes import Recipe


def take_over_responses(recipe: Recipe, stage: Stage, prompts: list[ShardPrompts]) -> None:
    """Keep the responses to existing prompts, if only the prompts of the stage changed.

    If the last shard has fewer responses than it now has prompts, they become its journal, as if the run had been
    killed within the shard. Raises ValueError for a response to another prompt.
    """
    if stage.changed_inputs() != {"prompts"}:
        return
    shards = {responses_path(recipe, shard): shard for shard in prompts}
    written = {path: list(read_jsonl(path)) for path in sorted(stage.folder.glob("*.jsonl"))}
    journals = {path: resume_jsonl(journal_of(path)) for path in shards}
    for path, rows in [*written.items(), *journals.items()]:
        if path not in shards or not belong_to(recipe, rows, shards[path]):
            stage.refuse(f"{path.name} answers other prompts, so the run cannot continue from these responses")
    stage.claim(stage.claimed_for())  # not complete from here on
    for path, rows in written.items():
        if len(rows) < len(shards[path].rows):
            if recipe.data.responses == "target":
                write_jsonl(journal_of(path), rows)
            remove(path)
    stage.claim()
    reused = sum(map(len, [*written.values(), *journals.values()]))
    total = sum(len(shard.rows) for shard in prompts)
    print(f"responses: {reused:,} of {total:,} are reused, {total - reused:,} are new")


def belong_to(recipe: Recipe, rows: list[Json], shard: ShardPrompts) -> bool:
    """Whether each of these responses, in any order, answers the prompt with the same id in the shard."""
    names = ["images", "spans"] + ["response"] * (recipe.data.responses == "given")
    prompts = {row["id"]: [row["tokens"], *map(row.get, names)] for row in shard.rows}
    return all(prompts.get(row["id"]) == [row["prompt"], *map(row.get, names)] for row in rows)


def take_over_features(recipe: Recipe, stage: Stage, prompts: list[ShardPrompts], identities: dict[str, str]) -> None:
    """Keep the shards of features whose texts are unchanged, if only the responses of the stage changed.

    A shard that holds only the first of its texts is removed, to be made again. Raises ValueError for a shard that was
    made from other texts.
    """
    if stage.changed_inputs() != {"responses"}:
        return
    shards = {shard.features_file: shard for shard in prompts}
    existing = files_in(stage.folder, ".safetensors")
    grown = [path for path in existing if path.name not in shards or made_from(path) != identities[path.name]]
    for path in grown:
        if path.name not in shards or not starts_with(path, responses_path(recipe, shards[path.name])):
            stage.refuse(f"{path.name} was made from other texts, so the run cannot continue from these features")
    stage.claim(stage.claimed_for())  # not complete from here on
    keep_manifest_entries(stage.folder, {path.name for path in existing} - {path.name for path in grown})
    for path in grown:
        remove(path)
        remove(note_path(path))
    stage.claim()
    reused = len(existing) - len(grown)
    if new := len(shards) - reused:  # parts leave none
        print(f"features: {reused:,} of {len(shards):,} shards are reused, {new:,} are new")


def claim_features(stage: Stage) -> None:
    """Claim the stage for processes that add shards, while some responses may be missing.

    Raises ValueError if the existing features were made from other inputs; their texts are checked by shard.
    """
    recorded = stage.claimed_for()
    if recorded == stage.inputs and stage.was_complete():
        return
    if recorded is not None:
        stage.inputs["responses"] = recorded["responses"]
    stage.refuse()
    stage.claim()
    keep_manifest_entries(stage.folder, {path.name for path in files_in(stage.folder, ".safetensors")})


def remove_grown_shards(recipe: Recipe, prompts: Sequence[ShardPrompts], identities: dict[str, str]) -> None:
    """Remove the features of shards that hold only the first of their texts, to be made again."""
    for shard in prompts:
        path = recipe.features_dir / shard.features_file
        if not is_there(path) or made_from(path) == identities[path.name]:
            continue
        is_shorter = len(read_tensors(path, ["offsets"])["offsets"]) - 1 < len(shard.rows)
        if is_shorter and starts_with(path, responses_path(recipe, shard)):
            remove(path)
            remove(note_path(path))


def starts_with(shard: Path, responses: Path) -> bool:
    """Whether the texts of a shard are the first texts of a responses file."""
    stored = read_tensors(shard, ["offsets", "tokens", "loss_mask"])
    texts = read_texts(responses)[: len(stored["offsets"]) - 1]
    wanted = token_tensors(texts)
    ends = stored["offsets"].diff().tolist() == [len(text.tokens) for text in texts]
    return ends and all(stored[name].equal(tensor) for name, tensor in wanted.items())


def keep_manifest_entries(folder: Path, names: set[str]) -> None:
    """Move the manifest entries of these shards back next to them, so that later damage is still noticed."""
    if not (folder / MANIFEST).is_file():
        return
    for entry in read_manifest(folder)["shards"]:
        if entry["file"] in names:
            write_text(note_path(folder / entry["file"]), json.dumps(entry))
    remove(folder / MANIFEST)
