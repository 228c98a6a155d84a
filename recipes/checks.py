"""Checks that need more than one field's type: files that must exist, sections that must agree, the target's own sizes.

They read the untyped values, so they still run when other fields of the recipe are wrong.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headstart.recipes.checks import RecipeMistake, dict_or_empty, size_mistakes
from headstart.recipes.schema import (
    HUB_PREFIX,
    PYTHON_STDLIB,
    SELF,
    BlockSection,
    DecodeSection,
    MedusaSection,
)

TIMED_GROWTHS = ("adaptive", "cost_aware", "searched_cost_aware")  # these depend on measured step times
RELATIVE_PATHS = "relative paths start from the current directory"


def check_against_disk(values: dict[str, Any]) -> Iterator[RecipeMistake]:
    """Yield every missing file, every contradiction between sections, and every size that does not fit the target."""
    data, target, head = (dict_or_empty(values.get(section)) for section in ("data", "target", "head"))
    prompts, heldout_prompts, path = data.get("prompts"), data.get("heldout_prompts"), target.get("path")
    built_in = isinstance(prompts, str) and (prompts in (PYTHON_STDLIB, SELF) or prompts.startswith(HUB_PREFIX))
    if isinstance(prompts, str) and not built_in and not os.path.exists(os.path.expanduser(prompts)):
        names = f"{HUB_PREFIX}org/name:split, {PYTHON_STDLIB} or {SELF}"
        allowed = f"an existing file or dataset folder, {names} is allowed"
        yield "data.prompts", f"{allowed}; put the prompts there ({RELATIVE_PATHS})"
    named = isinstance(heldout_prompts, str) and heldout_prompts != SELF
    if named and not os.path.isfile(os.path.expanduser(str(heldout_prompts))):
        allowed = f"an existing file, or {SELF} with data.prompts {SELF}, is allowed"
        yield "data.heldout_prompts", f"{allowed}; put the prompts there ({RELATIVE_PATHS})"
    train, kind = dict_or_empty(values.get("train")), head.get("kind")
    if train.get("regression_weight") and kind != "eagle1":
        yield (
            "train.regression_weight",
            f"only 0 or null is allowed, as {kind} predicts no features; remove it, or choose head.kind eagle1",
        )
    if kind == "medusa":
        yield from check_medusa_depth(head, train, dict_or_empty(values.get("decode")))
    if kind == "block":
        yield from check_block(head, train, dict_or_empty(values.get("decode")))
    elif isinstance(kind, str) and "anchors" in train:
        yield "train.anchors", "only block heads have it; remove it, or choose head.kind block"
    if dict_or_empty(values.get("joint")).get("mode") is not None:
        yield from check_joint(head, train, target)
    yield from check_shared_target(target, data, dict_or_empty(values.get("decode")))
    if isinstance(path, str) and path.endswith(".gguf"):
        if not Path(os.path.expanduser(path)).is_file():
            yield "target.path", f"an existing GGUF file is allowed; put the file there ({RELATIVE_PATHS})"
    elif isinstance(path, str) and path and is_local(path):
        yield from check_target(Path(os.path.expanduser(path)), values)
    yield from check_baselines(dict_or_empty(values.get("report")), dict_or_empty(values.get("decode")))
    yield from check_folders(values)
    yield from check_magnitudes(values)


def check_baselines(report: dict[str, Any], decode: dict[str, Any]) -> Iterator[RecipeMistake]:
    """Rows of the report need what they draft with."""
    baselines, needs = report.get("baselines"), {"draft_model": "draft_model", "suffix": "corpus"}
    for baseline, field in (needs | {"generate_assisted": "draft_model"}).items():
        if isinstance(baselines, list) and baseline in baselines and decode.get(field) is None:
            allowed = f"a path is allowed, because report.baselines has {baseline}"
            yield f"decode.{field}", f"{allowed}; add it, or remove {baseline} there"
    if isinstance(baselines, list) and "repeats" in baselines and decode.get("repeats") in (None, 0):
        yield (
            "decode.repeats",
            "1 to 64 is allowed, because report.baselines has repeats; add it, or remove repeats there",
        )
    if isinstance(baselines, list) and "cost_aware" in baselines and decode.get("acceptance") == "rejection":
        allowed = "only rows other than cost_aware are allowed with decode.acceptance rejection, as it prunes by score"
        yield "report.baselines", f"{allowed}; remove cost_aware"


def check_folders(values: dict[str, Any]) -> Iterator[RecipeMistake]:
    """A folder to write to must not be a file, nor lie below one."""
    places = {"run_dir": values.get("run_dir")}
    places |= {f"{name}.folder": dict_or_empty(values.get(name)).get("folder") for name in ("data", "export")}
    for field, folder in places.items():
        if not isinstance(folder, str) or not folder:
            continue
        path = Path(os.path.expanduser(folder)).absolute()
        if taken := [each for each in (path, *path.parents) if os.path.isfile(each)]:
            yield field, f"a folder that exists or can be made is allowed, and {taken[0]} is a file; choose another"


def check_magnitudes(values: dict[str, Any]) -> Iterator[RecipeMistake]:
    """No whole number may exceed 64 bits, which no library below takes."""
    for name, section in values.items():
        fields = {f"{name}.{key}": value for key, value in section.items()} if isinstance(section, dict) else {}
        for path, value in fields.items():
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(number, int) and abs(number) >= 2**63 for number in numbers):
                yield path, "a number of fewer than 64 bits is allowed; lower it"


def check_medusa_depth(head: dict[str, Any], train: dict[str, Any], decode: dict[str, Any]) -> Iterator[RecipeMistake]:
    """Medusa has one head per draft level: training unrolls all of them, and decoding can draft no deeper."""
    heads = head.get("medusa_heads", MedusaSection.model_fields["medusa_heads"].default)
    depth = decode.get("depth", DecodeSection.model_fields["depth"].default)
    if train.get("unroll", heads) != heads:
        why = "one step per Medusa head (head.medusa_heads)"
        yield "train.unroll", f"{heads} is allowed, {why}; leave it out, or write train.unroll: {heads}"
    if isinstance(heads, int) and isinstance(depth, int) and depth > heads:
        yield (
            "decode.depth",
            f"1 to {heads} is allowed, one level per Medusa head; lower it, or raise head.medusa_heads",
        )


def check_block(head: dict[str, Any], train: dict[str, Any], decode: dict[str, Any]) -> Iterator[RecipeMistake]:
    """A pass drafts as many levels as a block predicts: training scores all of them, decoding uses no more."""
    fields, size = BlockSection.model_fields, head.get("block_size")
    size = fields["block_size"].default if size is None else size
    if not isinstance(size, int):
        return
    from_anchor = head.get("sample_from_anchor", fields["sample_from_anchor"].default)
    levels, why = size if from_anchor else size - 1, f"the levels that a block of {size} drafts (head.block_size)"
    depth = decode.get("depth", DecodeSection.model_fields["depth"].default)
    if train.get("unroll", levels) != levels:
        yield "train.unroll", f"{levels} is allowed, {why}; leave it out, or write train.unroll: {levels}"
    if isinstance(depth, int) and depth > levels and decode.get("drafter", "head") == "head":
        yield "decode.depth", f"1 to {levels} is allowed, {why}; lower it, or raise head.block_size and train again"
    if train.get("input_noise"):
        yield "train.input_noise", "only 0 or null is allowed with head.kind block; remove it"


def check_joint(head: dict[str, Any], train: dict[str, Any], target: dict[str, Any]) -> Iterator[RecipeMistake]:
    """Reject fields that cannot be combined with training the target together with its heads (joint.mode)."""
    if head.get("kind") != "medusa":
        allowed = f"only null is allowed with head.kind {head.get('kind')}"
        yield "joint.mode", f"{allowed}; remove it, or choose head.kind medusa"
    places = {"head": head, "train": train, "target": target}
    for section, field in (
        ("head", "draft_vocab_size"),
        ("train", "pack_tokens"),
        ("target", "device_map"),
        ("target", "tp_plan"),
        ("target", "zero_stage"),
    ):
        if places[section].get(field) is not None:
            yield f"{section}.{field}", f"only null is allowed with joint.mode; remove {field}"


def check_shared_target(
    target: dict[str, Any], data: dict[str, Any], decode: dict[str, Any]
) -> Iterator[RecipeMistake]:
    """Reject fields that cannot be combined with a target spread over several ranks or devices."""
    online = data.get("online")
    if online is not None:  # training ranks read different samples at a time; a shared target needs them in step
        for field in ("tp_plan", "zero_stage"):
            if target.get(field) is not None:
                yield f"target.{field}", f"only null is allowed with data.online; remove {field}"
    if online not in (None, ["auto"]) and target.get("device_map") is not None:
        yield (
            "target.device_map",
            "only null is allowed with devices in data.online, which place the target already; remove one of them",
        )
    if (
        target.get("tp_plan") is not None
        and data.get("draft_head") is not None
        and decode.get("growth") in TIMED_GROWTHS
    ):
        allowed = "a growth that measures no times is allowed with target.tp_plan and data.draft_head"
        yield "decode.growth", f"{allowed}, because all ranks must draft the same tree; choose dynamic"


def is_local(path: str) -> bool:
    """Whether a target path is clearly a local folder and not a hub name."""
    return path.startswith((".", "/", "~")) or Path(Path(path).parts[0]).is_dir()


def check_target(folder: Path, values: dict[str, Any]) -> Iterator[RecipeMistake]:
    """Check that the folder holds a model and that the recipe's sizes fit it."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        allowed = "a folder with a model's config.json, or a hub name, is allowed"
        yield "target.path", f"{allowed}; put the model there ({RELATIVE_PATHS})"
        return
    except ValueError as error:
        yield "target.path", f"a folder with a readable config.json is allowed; fix the file ({error})"
        return
    if not isinstance(config, dict):
        yield "target.path", "a folder whose config.json is a JSON object is allowed; give the folder of a model"
        return
    yield from size_mistakes(config, values)
