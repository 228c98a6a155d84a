"""Feature stores: verify one, show its statistics, or merge several into one.

    python -m data_pipelines.store verify runs/tiny/features
    python -m data_pipelines.store stats  runs/tiny/features
    python -m data_pipelines.store merge  runs/all/features runs/tiny/features runs/more/features

A recipe trains on a merged store with data.store=runs/all/features.
"""

import argparse
import json
import shutil
from pathlib import Path

from headstart.data_pipelines.shards import MANIFEST, FeatureStore, read_manifest, shard_damage, shard_name
from headstart.data_pipelines.stage import CHECKSUM, Json, Stage, differences, file_digest, target_identity, write_text
from headstart.heads.target_config import locate_target
from headstart.recipes import Recipe
from headstart.recipes.command_line import command_name
from headstart.recipes.os_errors import errors_as_messages
from headstart.recipes.whole_files import removed_on_failure

SPLITS = ("train", "heldout")
MERGE_KEYS = ("taps", "dtype", "target")  # manifest keys that must be equal in stores to merge


def verify(folder: Path) -> list[str]:
    """One message per damaged or unlisted shard of a store; empty if the store is sound."""
    listed = read_manifest(folder)["shards"]
    foreign = sorted({path.name for path in folder.glob("*.safetensors")} - {shard["file"] for shard in listed})
    found = [shard_damage(folder, shard) for shard in listed]
    return [problem for problem in found if problem] + [f"{folder / name} is not in the manifest" for name in foreign]


def stats(folder: Path) -> Json:
    """The sizes of a store and the origin that its manifest records."""
    about = read_manifest(folder)
    found = origin(about)
    for split in SPLITS:
        store = FeatureStore(folder, split)
        num_bytes = sum(shard["bytes"] for shard in store.shards)
        found[split] = {
            "shards": len(store.shards),
            "samples": len(store),
            "tokens": store.num_tokens,
            "trained_on": store.num_trained_on(),
            "bytes_per_token": round(num_bytes / max(store.num_tokens, 1), 1),
        }
    return found


def merge(into: Path, sources: list[Path]) -> Stage:
    """Copy the shards of several stores, in order, into one new store, which appears only when complete.

    A shard that several stores share is copied once. Raises ValueError if the stores differ in taps, dtype or target,
    or if one is damaged.
    """
    abouts = [read_manifest(source) for source in sources]
    for source, about in zip(sources[1:], abouts[1:], strict=True):
        mine, its = ({key: found.get(key) for key in MERGE_KEYS} for found in (abouts[0], about))
        if different := differences(mine, its, f"{{}} in {sources[0]}, {{}} in {source}"):
            raise ValueError("these stores cannot be merged:\n  " + "\n  ".join(different))
    if problems := [problem for source in sources for problem in verify(source)]:
        raise ValueError("\n  ".join(["stores to merge are damaged:", *problems]))
    if into.exists():
        raise ValueError(f"{into} exists already; give another folder, or remove it")
    partial = into.with_name(into.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with removed_on_failure(partial):
        partial.mkdir(parents=True)
        shards = copy_shards(partial, list(zip(sources, abouts, strict=True)))
        merged_from = [file_digest(source / MANIFEST) for source in sources]
        about = {**{key: abouts[0].get(key) for key in MERGE_KEYS}, "merged_from": [origin(found) for found in abouts]}
        write_text(partial / MANIFEST, json.dumps({**about, "shards": shards}, indent=1))
        stage = Stage("features", partial, {"taps": abouts[0]["taps"], "merged_from": merged_from})
        stage.begin()
        stage.finish({"manifest": file_digest(partial / MANIFEST)})
        partial.rename(into)
    return Stage("features", into, stage.inputs)


def copy_shards(into: Path, stores: list[tuple[Path, Json]]) -> list[Json]:
    """Copy the shards of stores, given with their manifests, under new names; returns their manifest entries."""
    shards: list[Json] = []
    for split in SPLITS:
        pairs = [(source, shard) for source, about in stores for shard in about["shards"]]
        own = {shard[CHECKSUM]: (source, shard) for source, shard in pairs if shard["file"].startswith(f"{split}-")}
        for index, (source, shard) in enumerate(own.values()):
            shutil.copy(source / shard["file"], into / shard_name(split, index))
            shards.append({**shard, "file": shard_name(split, index)})
    return shards


def origin(about: Json) -> Json:
    """A manifest without its list of shards."""
    return {key: value for key, value in about.items() if key != "shards"}


def existing_store(recipe: Recipe, folder: Path, taps: tuple[int, ...]) -> Stage:
    """An existing store as the features stage of a recipe; raises ValueError for another target or a missing tap."""
    about = read_manifest(folder)
    identity = target_identity(locate_target(recipe.target.path, recipe.target.revision))
    if about["target"]["sha256"] != identity:
        raise ValueError(
            f"data.store: {folder} was made with the target {about['target']}, which is not target.path; choose another"
        )
    if not set(taps) <= set(about["taps"]):
        raise ValueError(
            f"data.store: {folder} holds taps {about['taps']}, but the head reads {list(taps)}; choose another"
        )
    inputs = Stage("features", folder, {}).claimed_for()
    assert inputs is not None
    return Stage("features", folder, inputs)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["verify", "stats", "merge"])
    parser.add_argument("folder", type=Path, help="the store; for merge, the folder of the new store")
    parser.add_argument("sources", type=Path, nargs="*", help="for merge: the stores to merge")
    arguments = parser.parse_args()
    with errors_as_messages():
        if arguments.command == "merge":
            print(merge(arguments.folder, arguments.sources).folder, stats(arguments.folder))
        elif arguments.command == "stats":
            print(json.dumps(stats(arguments.folder), indent=1))
        elif problems := verify(arguments.folder):
            raise ValueError("\n  ".join([f"{len(problems)} shards are damaged or not listed:", *problems]))
        else:
            print(f"{arguments.folder}: every shard matches the manifest")


if __name__ == "__main__":
    main()
