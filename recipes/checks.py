"""Checks of fields in different sections, and of a recipe's sizes against its target's.

Each mistake is a pair of section.key and "WHAT IS ALLOWED; what to do".
"""

import json
import os
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

from headstart.recipes.fields import head_kinds
from headstart.recipes.schema import HUB_PREFIX, RANKED_GROWTHS, SELF, DataSection, Recipe
from headstart.recipes.target_sizes import HEADS, LAYERS, POSITIONS, VOCABULARY, first, text_section

Mistake = tuple[str, str]
Values = dict[str, Any]
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


def recipe_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """Yield every file that is missing, every contradiction between sections, and every size that the target lacks."""
    yield from missing_files(recipe.data)
    yield from training_mistakes(recipe)
    yield from decoding_mistakes(recipe)
    try:
        yield from size_mistakes(local_config(recipe.target.path), recipe)
    except ValueError as error:
        yield "target.path", str(error)


def missing_files(data: DataSection) -> Iterator[Mistake]:
    if data.prompts != SELF and not data.prompts.startswith(HUB_PREFIX) and not os.path.exists(data.prompts):
        allowed = f"an existing file or dataset folder, {HUB_PREFIX}org/name:split or {SELF} is allowed"
        yield "data.prompts", f"{allowed}; put the prompts there ({RELATIVE_PATHS})"
    if not data.holds_out_own_prompts and not data.heldout_prompts.is_file():
        allowed = f"an existing file, or {SELF} with data.prompts {SELF}, is allowed"
        yield "data.heldout_prompts", f"{allowed}; put the prompts there ({RELATIVE_PATHS})"


def training_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """Fields of training that the kind of head does not have, or that joint training cannot be combined with."""
    head, train, joint = recipe.head, recipe.train, recipe.joint
    for path, off in OFF.items():
        section, field = (train if path.startswith("train") else joint), path.partition(".")[2]
        if field in section.model_fields_set and getattr(section, field) and path not in head.own_fields:
            others = " or ".join(kind for kind, other in head_kinds().items() if path in other.own_fields)
            yield path, f"{off} is allowed with head.kind {head.kind}; remove it, or choose head.kind {others}"
    if head.levels is not None and "unroll" in train.model_fields_set and train.unroll != head.levels:
        why = f"the levels that head.{head.levels_field} gives"
        yield "train.unroll", f"{head.levels} is allowed, {why}; leave it out, or write train.unroll: {head.levels}"
    alone = {
        "head.draft_vocab_size": getattr(head, "draft_vocab_size", None),
        "train.pack_tokens": train.pack_tokens,
        "target.split": recipe.target.split,
    }
    for path, value in alone.items() if joint.mode is not None else ():
        if value is not None:
            yield path, f"only null is allowed with joint.mode; remove {path.partition('.')[2]}"


def decoding_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """Devices of a target that is split, and drafters that lack what they need."""
    online, split, head, decode = recipe.data.online, recipe.target.split, recipe.head, recipe.decode
    if online is not None and split == "tensor":  # training ranks read different samples
        yield "target.split", "only layers or null is allowed with data.online; remove split"
    if online not in (None, ("auto",)) and split == "layers":
        yield "target.split", "only null is allowed with devices in data.online, which place the target; remove one"
    if decode.drafter == "head" and "depth" in decode.model_fields_set and decode.depth > (head.levels or inf):
        field = f"head.{head.levels_field}"
        allowed = f"1 to {head.levels} is allowed, the levels that {field} gives"
        yield "decode.depth", f"{allowed}; lower it, or raise {field} and train again"
    for row, field, allowed in ROWS:
        if row in recipe.report.baselines and not getattr(decode, field):
            why = f"because report.baselines has {row}"
            yield f"decode.{field}", f"{allowed} is allowed, {why}; add it, or remove {row} there"


def size_mistakes(config: Values, recipe: Recipe) -> Iterator[Mistake]:
    """Yield every size that does not fit a target with this config.json; one that it does not give allows any."""
    names, data, decode = (LAYERS, VOCABULARY, POSITIONS), recipe.data, recipe.decode
    numbers = [first(text_section(config), *each) for each in names]
    layers, tokens, positions = (number if isinstance(number, int) else inf for number in numbers)
    yield from head_mistakes(recipe, layers, tokens, first(text_section(config), *HEADS))
    if data.longest_sample > positions:
        allowed = f"at most {max(positions - data.prompt_tokens, 0)} is allowed, with data.prompt_tokens"
        why = f"{data.prompt_tokens} in the target's {positions} positions"
        yield "data.response_tokens", f"{allowed} {why}; lower one of them"
    if decode.max_new_tokens >= positions:
        allowed = f"1 to {positions - 1} is allowed, fewer than the target's {positions} positions"
        yield "decode.max_new_tokens", f"{allowed}; lower it"


def head_mistakes(recipe: Recipe, layers: float, tokens: float, heads: object) -> Iterator[Mistake]:
    """A head reads, copies and drafts what the target has; no node has more children than there are draft tokens."""
    head, decode = recipe.head, recipe.decode
    if beyond := [tap for tap in getattr(head, "taps", None) or () if tap > layers]:
        allowed = f"hidden states 0 to {layers} of a target with {layers} layers are allowed"
        yield "head.taps", f"{allowed}; replace {', '.join(map(str, beyond))}"
    own, groups = getattr(head, "num_heads", None), getattr(head, "num_kv_heads", None)
    if isinstance(heads, int) and own is None and groups and heads % groups:
        allowed = f"a divisor of the target's {heads} attention heads is allowed"
        yield "head.num_kv_heads", f"{allowed}; change it, or set head.num_heads"
    size = getattr(head, "draft_vocab_size", None)
    if size and size > tokens:
        yield "head.draft_vocab_size", f"1 to the target's {tokens} tokens are allowed; lower it, or null for all"
    if (getattr(head, "mask_token_id", None) or 0) >= tokens:
        allowed = f"0 to {tokens - 1} of the target's tokens is allowed"
        yield "head.mask_token_id", f"{allowed}; choose one that it never writes, or null for its last"
    drafted, whose = tokens, "the target has tokens"
    if size and decode.drafter == "head":
        drafted, whose = min(size, tokens), "the head drafts tokens (head.draft_vocab_size)"
    if decode.growth in RANKED_GROWTHS and decode.width > drafted:
        yield "decode.width", f"1 to {drafted} is allowed, as many as {whose}; lower it"


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
