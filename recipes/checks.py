"""Checks of fields in different sections, and of a recipe's sizes against its target's.

Each mistake is a pair of section.key and "WHAT IS ALLOWED; what to do".
"""

import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

from headstart.recipes.fields import head_kinds
from headstart.recipes.schema import (
    HUB_PREFIX,
    RANKED_GROWTHS,
    SELF,
    DataSection,
    DecodeSection,
    Recipe,
    ReportSection,
    TargetSection,
)
from headstart.recipes.schema_heads import HeadSection, LayerSection
from headstart.recipes.schema_train import JointSection, TrainSection
from headstart.recipes.target_sizes import HEADS, LAYERS, POSITIONS, VOCABULARY, first, text_section

Mistake = tuple[str, str]
Values = dict[str, Any]
Sizes = dict[str, int]  # of the target, as far as its config.json gives them
OFF = {  # a field of training that only some kinds of heads have, and the values of it that mean that it is not used
    "train.fitted_start": "only false",
    "train.anchors": "no value",
    "joint.mode": "only null",
}
ROWS = (  # of the report, each with the field of decode that its drafter needs, and what that allows
    ("draft_model", "draft_model", "a path"),
    ("generate_assisted", "draft_model", "a path"),
    ("repeats", "repeats", "1 to 64"),
)
RELATIVE_PATHS = "relative paths start from the current directory"


def recipe_mistakes(sections: Mapping[str, Any]) -> Iterator[Mistake]:
    """Yield every contradiction between the sections that are valid, and every size that does not fit the target."""
    checks = (file_mistakes, kind_mistakes, level_mistakes, joint_mistakes, split_mistakes, row_mistakes)
    yield from mistakes_of(checks, sections)
    if "target" in sections:
        try:
            config = local_config(sections["target"].path)
        except ValueError as error:
            yield "target.path", str(error)
        else:
            yield from size_mistakes(config, sections)


def size_mistakes(config: Values, sections: Mapping[str, Any]) -> Iterator[Mistake]:
    """Yield every size that does not fit a target with this config.json."""
    names = {"layers": LAYERS, "vocab_size": VOCABULARY, "positions": POSITIONS, "heads": HEADS}
    numbers = {name: first(text_section(config), *keys) for name, keys in names.items()}
    sizes = {name: number for name, number in numbers.items() if isinstance(number, int)}
    yield from mistakes_of((head_mistakes, width_mistakes, length_mistakes), {**sections, "sizes": sizes})


def mistakes_of(checks: Iterable[Callable[..., Iterator[Mistake]]], values: Mapping[str, Any]) -> Iterator[Mistake]:
    """Run the checks whose arguments, named like the sections of a recipe, are all among these values."""
    for check in checks:
        names = inspect.signature(check).parameters
        if names.keys() <= values.keys():
            yield from check(**{name: values[name] for name in names})


def file_mistakes(data: DataSection) -> Iterator[Mistake]:
    """Files of prompts that are missing."""
    if data.prompts != SELF and not data.prompts.startswith(HUB_PREFIX) and not os.path.exists(data.prompts):
        allowed = f"an existing file or dataset folder, {HUB_PREFIX}org/name:split or {SELF} is allowed"
        yield "data.prompts", f"{allowed}; put the prompts there ({RELATIVE_PATHS})"
    if not data.holds_out_own_prompts and not data.heldout_prompts.is_file():
        allowed = f"an existing file, or {SELF} with data.prompts {SELF}, is allowed"
        yield "data.heldout_prompts", f"{allowed}; put the prompts there ({RELATIVE_PATHS})"


def kind_mistakes(head: HeadSection, train: TrainSection, joint: JointSection) -> Iterator[Mistake]:
    """Given fields of training that the kind of head does not have."""
    for path, off in OFF.items():
        section, field = (train if path.startswith("train") else joint), path.partition(".")[2]
        if field in section.model_fields_set and getattr(section, field) and path not in head.own_fields:
            others = " or ".join(kind for kind, other in head_kinds().items() if path in other.own_fields)
            yield path, f"{off} is allowed with head.kind {head.kind}; remove it, or choose head.kind {others}"


def level_mistakes(head: HeadSection, train: TrainSection, decode: DecodeSection) -> Iterator[Mistake]:
    """Training scores all levels that a head of fixed depth drafts, and decoding can draft no deeper."""
    levels, field = head.levels, f"head.{head.levels_field}"
    if levels is None:
        return
    why = f"the levels that {field} gives"
    if "unroll" in train.model_fields_set and train.unroll != levels:
        yield "train.unroll", f"{levels} is allowed, {why}; leave it out, or write train.unroll: {levels}"
    if decode.drafter == "head" and "depth" in decode.model_fields_set and decode.depth > levels:
        yield "decode.depth", f"1 to {levels} is allowed, {why}; lower it, or raise {field} and train again"


def joint_mistakes(
    head: HeadSection, train: TrainSection, target: TargetSection, joint: JointSection
) -> Iterator[Mistake]:
    """Fields that cannot be combined with training the target together with its heads."""
    fields = {
        "head.draft_vocab_size": getattr(head, "draft_vocab_size", None),
        "train.pack_tokens": train.pack_tokens,
        "target.split": target.split,
    }
    for path, value in fields.items() if joint.mode is not None else ():
        if value is not None:
            yield path, f"only null is allowed with joint.mode; remove {path.partition('.')[2]}"


def split_mistakes(target: TargetSection, data: DataSection) -> Iterator[Mistake]:
    """Fields that cannot be combined with a target that is split over several ranks or devices."""
    if data.online is not None and target.split == "tensor":  # training ranks read different samples
        yield "target.split", "only layers or null is allowed with data.online; remove split"
    if data.online not in (None, ("auto",)) and target.split == "layers":
        yield "target.split", "only null is allowed with devices in data.online, which place the target; remove one"


def row_mistakes(report: ReportSection, decode: DecodeSection) -> Iterator[Mistake]:
    """Rows of the report whose drafter lacks what it needs."""
    for row, field, allowed in ROWS:
        if row in report.baselines and not getattr(decode, field):
            why = f"because report.baselines has {row}"
            yield f"decode.{field}", f"{allowed} is allowed, {why}; add it, or remove {row} there"


def head_mistakes(sizes: Sizes, head: HeadSection) -> Iterator[Mistake]:
    """A head reads, copies and drafts what the target has."""
    layers, heads, tokens = sizes.get("layers", inf), sizes.get("heads", 0), sizes.get("vocab_size", inf)
    if beyond := [tap for tap in getattr(head, "taps", None) or () if tap > layers]:
        allowed = f"hidden states 0 to {layers} of a target with {layers} layers are allowed"
        yield "head.taps", f"{allowed}; replace {', '.join(map(str, beyond))}"
    if isinstance(head, LayerSection) and head.num_heads is None and head.num_kv_heads and heads % head.num_kv_heads:
        allowed = f"a divisor of the target's {heads} attention heads is allowed"
        yield "head.num_kv_heads", f"{allowed}; change it, or set head.num_heads"
    if (getattr(head, "draft_vocab_size", None) or 0) > tokens:
        yield "head.draft_vocab_size", f"1 to the target's {tokens} tokens are allowed; lower it, or null for all"
    if (getattr(head, "mask_token_id", None) or 0) >= tokens:
        allowed = f"0 to {tokens - 1} of the target's tokens is allowed"
        yield "head.mask_token_id", f"{allowed}; choose one that it never writes, or null for its last"


def width_mistakes(sizes: Sizes, head: HeadSection, decode: DecodeSection) -> Iterator[Mistake]:
    """A node cannot have more children than there are draft tokens."""
    drafted, whose = sizes.get("vocab_size", inf), "the target has tokens"
    if (size := getattr(head, "draft_vocab_size", None)) and decode.drafter == "head":
        drafted, whose = min(size, drafted), "the head drafts tokens (head.draft_vocab_size)"
    if decode.growth in RANKED_GROWTHS and decode.width > drafted:
        yield "decode.width", f"1 to {drafted} is allowed, as many as {whose}; lower it"


def length_mistakes(sizes: Sizes, data: DataSection, decode: DecodeSection) -> Iterator[Mistake]:
    """No text is longer than the target's positions."""
    positions = sizes.get("positions", inf)
    if data.longest_sample > positions:
        allowed = f"at most {max(positions - data.prompt_tokens, 0)} is allowed, with data.prompt_tokens"
        why = f"{data.prompt_tokens} in the target's {positions} positions"
        yield "data.response_tokens", f"{allowed} {why}; lower one of them"
    if decode.max_new_tokens >= positions:
        allowed = f"1 to {positions - 1} is allowed, fewer than the target's {positions} positions"
        yield "decode.max_new_tokens", f"{allowed}; lower it"


def local_config(target: str) -> Values:
    """The config.json of a target on this disk, {} of another; ValueError says what is allowed if there is no model."""
    folder = Path(target)
    if target.endswith(".gguf") and not folder.is_file():
        raise ValueError(f"an existing GGUF file is allowed; put the file there ({RELATIVE_PATHS})")
    if folder.suffix == ".gguf" or (any(folder.glob("*.gguf")) and not (folder / "config.json").is_file()):
        return {}  # not unpacked yet
    if not target.startswith((".", "/")) and not Path(folder.parts[0]).is_dir():
        return {}  # a name on the hub
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        allowed = "a folder with a model's config.json or GGUF file, or a hub name, is allowed"
        raise ValueError(f"{allowed}; put the model there ({RELATIVE_PATHS})") from None
    except ValueError as error:
        raise ValueError(f"a folder with a readable config.json is allowed; fix the file ({error})") from None
    if not isinstance(config, dict):
        raise ValueError("a folder whose config.json is a JSON object is allowed; give the folder of a model")
    return config


def refuse_original_target(recipe: Recipe) -> None:
    """Raise ValueError if the run's own head would be used with the target from before joint training."""
    if recipe.joint.mode is None or recipe.head_in_use.resolve() != recipe.head_dir.resolve():
        return
    if Path(recipe.target.path).resolve() != recipe.tuned_target_dir.resolve():
        why = f"a head trained with joint.mode {recipe.joint.mode} is for the tuned target"
        advice = f"give target.path={recipe.tuned_target_dir}"
        raise ValueError(f"target.path: {recipe.target.path} given, but {why}; {advice}")
