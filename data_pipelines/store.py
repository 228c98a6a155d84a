"""Stores of features: check one, look at one, or make one of several.

    python -m data_pipelines.store verify runs/tiny/features
    python -m data_pipelines.store stats  runs/tiny/features
    python -m data_pipelines.store merge  runs/all/features runs/tiny/features runs/more/features

A recipe trains on a merged store with data.store=runs/all/features.
"""

import argparse
import json
import shutil
from pathlib import Path

from data_pipelines.shards import MANIFEST, FeatureStore, damage, read_manifest, shard_name
from data_pipelines.stage import CHECKSUM, Json, Stage, differences, file_digest, target_identity, write_text
from heads.target_config import locate_target
from recipes import Recipe
from recipes.command_line import command_name

SPLITS = ("train", "heldout")
SAME = ("taps", "dtype", "target")  # of a manifest: what stores must share to be one


def verify(folder: Path) -> list[str]:
    """What is wrong with each shard of a store; an empty list for a sound one."""
    listed = read_manifest(folder)["shards"]
    foreign = sorted({path.name for path in folder.glob("*.safetensors")} - {shard["file"] for shard in listed})
    found = [damage(folder, shard) for shard in listed] + [
        f"{folder / name} is not in the manifest" for name in foreign
    ]
    return [what for what in found if what]


def stats(folder: Path) -> Json:
    """The sizes of a store, and what it was made from."""
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
    """Copy the shards of several stores into one, in their order; whole or not at all.

    A shard that several of them hold comes once.

    Raises ValueError where they hold other states, or one is damaged.
    """
    abouts = [read_manifest(source) for source in sources]
    for source, about in zip(sources[1:], abouts[1:], strict=True):
        mine, its = ({key: found.get(key) for key in SAME} for found in (abouts[0], about))
        if different := differences(mine, its, f"{{}} in {sources[0]}, {{}} in {source}"):
            raise ValueError("stores of other states cannot be one:\n  " + "\n  ".join(different))
    if wrong := [what for source in sources for what in verify(source)]:
        raise ValueError("\n  ".join(["damaged:", *wrong]))
    if into.exists():
        raise ValueError(f"{into} is there; give a folder that is not, or remove it")
    partial = into.with_name(into.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shards: list[Json] = []
    for split in SPLITS:
        pairs = [(source, shard) for source, about in zip(sources, abouts, strict=True) for shard in about["shards"]]
        own = {shard[CHECKSUM]: (source, shard) for source, shard in pairs if shard["file"].startswith(f"{split}-")}
        for index, (source, shard) in enumerate(own.values()):
            shutil.copy(source / shard["file"], partial / shard_name(split, index))
            shards.append({**shard, "file": shard_name(split, index)})
    merged_from = [file_digest(source / MANIFEST) for source in sources]
    about = {**{key: abouts[0].get(key) for key in SAME}, "merged_from": [origin(found) for found in abouts]}
    write_text(partial / MANIFEST, json.dumps({**about, "shards": shards}, indent=1))
    stage = Stage("features", partial, {"taps": abouts[0]["taps"], "merged_from": merged_from})
    stage.begin()
    stage.finish({"manifest": file_digest(partial / MANIFEST)})
    partial.rename(into)
    return Stage("features", into, stage.inputs)


def origin(about: Json) -> Json:
    """What a manifest says besides its shards."""
    return {key: value for key, value in about.items() if key != "shards"}


def adopt(recipe: Recipe, folder: Path, taps: tuple[int, ...]) -> Stage:
    """A store as the features of a recipe; raises ValueError where it is of another target or lacks a tap."""
    about = read_manifest(folder)
    identity = target_identity(locate_target(recipe.target.path, recipe.target.revision))
    if about["target"]["sha256"] != identity:
        raise ValueError(f"data.store: {folder} was made with the target {about['target']}, which is not target.path")
    if not set(taps) <= set(about["taps"]):
        raise ValueError(
            f"data.store: {folder} holds taps {about['taps']}, the head reads {list(taps)}; choose another"
        )
    inputs = Stage("features", folder, {}).claimed_for()
    assert inputs is not None
    return Stage("features", folder, inputs)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["verify", "stats", "merge"])
    parser.add_argument("folder", type=Path, help="the store; for merge, where the new one goes")
    parser.add_argument("sources", type=Path, nargs="*", help="for merge: the stores to copy from")
    arguments = parser.parse_args()
    try:
        if arguments.what == "merge":
            print(merge(arguments.folder, arguments.sources).folder, stats(arguments.folder))
        elif arguments.what == "stats":
            print(json.dumps(stats(arguments.folder), indent=1))
        elif wrong := verify(arguments.folder):
            raise ValueError("\n  ".join([f"{len(wrong)} shards are damaged:", *wrong]))
        else:
            print(f"{arguments.folder}: every shard is what the manifest says")
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
