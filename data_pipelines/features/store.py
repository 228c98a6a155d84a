"""Feature stores: verify one, or merge several into one.

    headstart store verify runs/tiny/features
    headstart store merge  runs/all/features runs/tiny/features runs/more/features

A recipe trains on a merged store with data.store=runs/all/features.
"""

import json
import shlex
import shutil
from argparse import Namespace
from pathlib import Path

from rich.filesize import decimal

from headstart.common.files import whole_folder, write_text
from headstart.data_pipelines.features.shard_files import non_finite, open_shard
from headstart.data_pipelines.features.shards import (
    MANIFEST,
    foreign_shards,
    read_manifest,
    repair,
    shard_damage,
    shard_name,
)
from headstart.data_pipelines.stages.stage import CHECKSUM, CONTENT, Json, Stage, differences, file_digest
from headstart.heads.target_config import TargetOrigin, folder_of
from headstart.recipes import Recipe

SPLITS = ("train", "heldout")
MERGE_KEYS = ("taps", "dtype", "target")  # manifest keys that stores must share to be merged


def verify(folder: Path) -> dict[Path, str]:
    """The shards of a store that are damaged, missing or not in its manifest, and what is wrong with each."""
    damage = {folder / shard["file"]: shard_damage(folder, shard) for shard in read_manifest(folder)["shards"]}
    damaged = {path: problem for path, problem in damage.items() if problem}
    return damaged | {path: f"{path} is not in the manifest" for path in foreign_shards(folder)}


def refuse_damage(folder: Path) -> None:
    """Raise ValueError, with what to do, if a store is damaged or holds numbers that are not finite."""
    if problems := verify(folder):
        foreign = foreign_shards(folder)
        count = "1 shard is" if len(problems) == 1 else f"{len(problems)} shards are"
        lines = [f"{count} damaged, lost or not in the manifest:", *problems.values()]
        only_foreign = len(foreign) == len(problems)
        remedy = f"remove: {shlex.join(['rm', *map(str, foreign)])}" if only_foreign else repair(folder, problems)
        raise ValueError("\n  ".join(lines) + f"\n{remedy}")
    about = read_manifest(folder)
    for path in (folder / shard["file"] for shard in about["shards"]):
        opened = open_shard(path)
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            if non_finite({name: opened.get_tensor(name)}):
                problem = f"{path}: its {name} holds numbers that are not finite, in data.dtype {about.get('dtype')}"
                raise ValueError(
                    f"{problem}; harvest again in another run_dir with another data.dtype, such as bfloat16"
                )


def merge(into: Path, sources: list[Path]) -> Stage:
    """Copy the shards of several stores, in order, into one new store, which gets its name when complete.

    A shard that several stores share is copied once. Raises ValueError if no store is given, if one is damaged, or if
    they differ in taps, dtype or target.
    """
    if not sources:
        example = f"headstart store merge {shlex.quote(str(into))} runs/tiny/features runs/more/features"
        raise ValueError(f"store merge: only {into} given, one or more stores must follow it, as in {example}")
    if into.exists():
        needed = "a new folder is needed for the merged store; give another one first, or remove it"
        raise ValueError(f"{into} exists already, {needed}")
    abouts = [read_manifest(source) for source in sources]
    values = [merge_values(about) for about in abouts]
    for source, its in zip(sources, values, strict=True):
        if different := differences(values[0], its, f"{{}} in {sources[0]}, {{}} in {source}"):
            lines = "\n  ".join(["these stores cannot be merged:", *different])
            raise ValueError(f"{lines}\nstores with equal taps, dtype and target can be; harvest one of them again")
    for source in sources:
        refuse_damage(source)
    with whole_folder(into) as partial:
        shards = copy_shards(partial, list(zip(sources, abouts, strict=True)))
        merged_from = [file_digest(source / MANIFEST) for source in sources]
        about = {
            **{key: abouts[0].get(key) for key in MERGE_KEYS},
            "merged_from": [origin(about) for about in abouts],
        }
        write_text(partial / MANIFEST, json.dumps({**about, "shards": shards}, indent=1))
        stage = Stage("features", partial, {"taps": abouts[0]["taps"], "merged_from": merged_from})
        stage.claim()
        stage.finish({"manifest": file_digest(partial / MANIFEST)})
    return Stage("features", into, stage.inputs)


def copy_shards(into: Path, stores: list[tuple[Path, Json]]) -> list[Json]:
    """Copy the shards of stores, given with their manifests, under new names; returns their manifest entries."""
    shards: list[Json] = []
    for split in SPLITS:
        pairs = [(source, shard) for source, about in stores for shard in about["shards"]]
        by_checksum = {
            shard[CHECKSUM]: (source, shard) for source, shard in pairs if shard["file"].startswith(f"{split}-")
        }
        for index, (source, shard) in enumerate(by_checksum.values()):
            shutil.copy(source / shard["file"], into / shard_name(split, index))
            shards.append({**shard, "file": shard_name(split, index)})
    return shards


def merge_values(about: Json) -> Json:
    """The values that must be equal in manifests to merge."""
    target = TargetOrigin.from_record(about.get("target"))
    sha256, content = (None, None) if target is None else (target.sha256, target.content)
    return {**{key: about.get(key) for key in MERGE_KEYS}, "target": sha256, CONTENT: content}


def describe_store(folder: Path) -> str:
    """One line for the user: the size of a store."""
    about = read_manifest(folder)
    counts = {split: [s for s in about["shards"] if s["file"].startswith(f"{split}-")] for split in SPLITS}
    train, heldout = (sum(shard["samples"] for shard in counts[split]) for split in SPLITS)
    tokens, size = (sum(shard[name] for shard in about["shards"]) for name in ("tokens", "bytes"))
    return (
        f"features: {train:,} training and {heldout:,} held-out samples, {tokens:,} tokens, {decimal(size)} as "
        f"{about['dtype']}"
    )


def origin(about: Json) -> Json:
    """A manifest without its list of shards."""
    return {key: value for key, value in about.items() if key != "shards"}


def existing_store(recipe: Recipe, folder: Path, taps: tuple[int, ...]) -> Stage:
    """An existing store as the features stage of a recipe; raises ValueError for another target or a missing tap."""
    about = read_manifest(folder)
    made_with = TargetOrigin.from_record(about.get("target"))
    if made_with is None or made_with.is_another(TargetOrigin.of(folder_of(recipe.target))):
        problem = f"data.store: {folder} was made with other weights or another config ({about.get('target')})"
        advice = "give a store of this target, or remove data.store to harvest one"
        raise ValueError(f"{problem}, which is not target.path, {recipe.target.path}; {advice}")
    if not set(taps) <= set(about["taps"]):
        lacking, stored = sorted(set(taps) - set(about["taps"])), sum(shard["bytes"] for shard in about["shards"])
        needed = decimal(stored * (len(taps) + 1) // (len(about["taps"]) + 1))  # the last hidden state is in both
        raise ValueError(
            f"data.store: {folder} holds taps {about['taps']}, but the head reads {list(taps)}; it lacks {lacking}; "
            f"a new harvest of this text takes about {needed} on disk and one pass of the target over it: give another "
            "store, set head.taps to some of its taps, or remove data.store to harvest one"
        )
    inputs = Stage("features", folder, {}).claimed_for()
    if inputs is None:
        raise ValueError(
            f"data.store: {folder} has no stage.json, a complete folder of features is needed; copy all of its files"
        )
    return Stage("features", folder, inputs)


def main(arguments: Namespace) -> None:
    if arguments.command == "merge":
        merge(arguments.folder, arguments.sources)
        print(f"{describe_store(arguments.folder)}\nmerged; train on it with data.store={arguments.folder}")
    elif arguments.sources:
        problem = f"store verify: {len(arguments.sources) + 1} folders are given"
        raise ValueError(f"{problem}, one is allowed; start it once for each")
    else:
        refuse_damage(arguments.folder)
        sound = "every shard matches the manifest, and all numbers are finite"
        print(f"{describe_store(arguments.folder)}\n{arguments.folder}: {sound}")
