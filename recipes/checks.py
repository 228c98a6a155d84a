"""Checks of fields in different sections, and of a recipe's sizes against its target's.

Each mistake is a pair of section.key and "WHAT IS ALLOWED; what to do".
"""

import json
import os
import re
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

from headstart.recipes.fields import head_kinds, recipe_fields
from headstart.recipes.schema import HUB_PREFIX, RANKED_GROWTHS, SELF, DataSection, Recipe
from headstart.recipes.target_sizes import HEADS, LAYERS, POSITIONS, VOCABULARY, first, text_section

Mistake = tuple[str, str]
EXCLUDED = {  # a field -> fields, or values of them, with which it must have its default
    "data.responses": ("data.prompts=self",),  # which has no conversations
    "data.self_pictures": ("data.server", "data.states"),  # the target that sees them is that of this process
    "data.online": ("data.store",),
    "data.states": ("data.online", "data.store"),  # they are for features that are harvested
    "data.draft_head": ("data.server", "data.states", "data.responses=given"),
    "head.draft_vocab_size": ("joint.mode",),
    "train.pack_tokens": ("joint.mode",),
    "train.fitted_start": ("train.start_from",),
    "target.split": ("joint.mode",),
}
ROWS = (  # of the report, each with the field of decode that its drafter needs, and what that allows
    ("draft_model", "draft_model", "a path"),
    ("generate_assisted", "draft_model", "a path"),
    ("repeats", "repeats", "1 to 64"),
)
HEAD_ROWS = ("chain", "tree", "cost_aware", "repeats")
HUB_NAME = re.compile(rf"{HUB_PREFIX}[\w.-]+(/[\w.-]+)?(:\w+)?")
RELATIVE_PATHS = "relative paths start from the current directory"


def recipe_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """Yield every file that is missing, every contradiction between sections, and every size that the target lacks."""
    yield from excluded_fields(recipe)
    yield from data_mistakes(recipe.data)
    yield from training_mistakes(recipe)
    yield from decoding_mistakes(recipe)
    try:
        yield from size_mistakes(local_config(recipe.target.path), recipe)
    except ValueError as error:
        yield "target.path", str(error)


def excluded_fields(recipe: Recipe) -> Iterator[Mistake]:
    """Fields of EXCLUDED that are given together."""
    for path, others in EXCLUDED.items():
        default = recipe_fields()[path].default
        for other in others if value_at(recipe, path) not in (None, False, default) else ():
            name, equals, value = other.partition("=")
            if value_at(recipe, name) == value if equals else value_at(recipe, name) is not None:
                yield path, f"only {default} is allowed with {other.replace('=', ' ')}; remove one of them"


def value_at(recipe: Recipe, path: str) -> Any:
    """The value of section.key; None for a key that other kinds have."""
    section, _, key = path.partition(".")
    return getattr(getattr(recipe, section), key, None)


def data_mistakes(data: DataSection) -> Iterator[Mistake]:
    """Files of prompts that are missing, and fields that go with other prompts or responses."""
    if data.prompts != SELF and not HUB_NAME.fullmatch(data.prompts) and not os.path.exists(data.prompts):
        allowed = f"an existing file or dataset folder, {HUB_PREFIX}org/name:split or {SELF} is allowed"
        yield "data.prompts", f"{allowed}; correct the name, or put the prompts there ({RELATIVE_PATHS})"
    if not data.holds_out_own_prompts and not data.heldout_prompts.is_file():
        allowed = f"an existing file, or {SELF} with data.prompts {SELF}, is allowed"
        yield "data.heldout_prompts", f"{allowed}; put the prompts there ({RELATIVE_PATHS})"
    own = ["heldout_prompts"] * data.holds_out_own_prompts
    own += [key for key in ("self_system_prompts", "self_pictures") if getattr(data, key)]
    for key in own if data.prompts != SELF else ():
        yield f"data.{key}", f"it is for data.prompts {SELF}; remove it, or choose data.prompts {SELF}"
    if data.server is not None and data.states is None and data.responses == "given":
        yield "data.server", "only null is allowed with data.responses given; remove one of them"
    if data.online is not None and "auto" in data.online and len(data.online) > 1:
        yield "data.online", "auto is allowed alone; remove it, or remove the other devices"


def training_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """Given fields that the kind of head does not have, and levels that it does not draft."""
    head, train = recipe.head, recipe.train
    for path in sorted({path for other in head_kinds().values() for path in other.own_fields - head.own_fields}):
        section, _, key = path.partition(".")
        if key in getattr(recipe, section).model_fields_set and value_at(recipe, path):
            others = " or ".join(kind for kind, other in head_kinds().items() if path in other.own_fields)
            default = "only the default is allowed"
            yield path, f"{default} with head.kind {head.kind}; remove it, or choose head.kind {others}"
    if head.levels is not None and "unroll" in train.model_fields_set and train.unroll != head.levels:
        why = f"the levels that head.{head.levels_field} gives"
        yield "train.unroll", f"{head.levels} is allowed, {why}; leave it out, or write train.unroll: {head.levels}"


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
    if recipe.report.other_heads and not {*HEAD_ROWS} & {*recipe.report.baselines}:
        yield "report.baselines", f"one of {', '.join(HEAD_ROWS)} is needed with report.other_heads; add it"


def size_mistakes(config: dict[str, Any], recipe: Recipe) -> Iterator[Mistake]:
    """Yield every size that does not fit a target with this config.json; one that it does not give allows any."""
    sizes, data, decode = text_section(config), recipe.data, recipe.decode
    numbers = (first(sizes, *names) for names in (LAYERS, VOCABULARY, POSITIONS))
    layers, tokens, positions = (number if isinstance(number, int) else inf for number in numbers)
    yield from head_mistakes(recipe, layers, tokens, first(sizes, *HEADS))
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
    heads, groups = getattr(head, "num_heads", None) or heads, getattr(head, "num_kv_heads", None)
    if isinstance(heads, int) and groups and heads % groups:
        allowed = f"a divisor of the number of attention heads, {heads}, is allowed"
        yield "head.num_kv_heads", f"{allowed}; change it, or head.num_heads"
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


def local_config(target: str) -> dict[str, Any]:
    """The config.json of a target on this disk, {} of another; ValueError says what is allowed if there is no model."""
    folder = Path(target)
    if target.endswith(".gguf") and not folder.is_file():
        raise ValueError(f"an existing GGUF file is allowed; put the file there ({RELATIVE_PATHS})")
    if folder.suffix == ".gguf" or (any(folder.glob("*.gguf")) and not (folder / "config.json").is_file()):
        return {}  # not unpacked yet
    if not target.startswith((".", "/")) and not Path(folder.parts[0]).is_dir():
        return {}  # a name on the hub
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except OSError:
        allowed = "a folder with a model's config.json or GGUF file, or a hub name, is allowed"
        raise ValueError(f"{allowed}; put the model there ({RELATIVE_PATHS})") from None
    except ValueError as error:
        raise ValueError(f"a folder with a readable config.json is allowed; fix the file ({error})") from None
    return config


def refuse_original_target(recipe: Recipe) -> None:
    """Raise ValueError if the run's own head would be used with the target from before joint training."""
    if recipe.joint.mode is None or recipe.head_in_use.resolve() != recipe.head_dir.resolve():
        return
    if Path(recipe.target.path).resolve() != recipe.tuned_target_dir.resolve():
        why = f"a head trained with joint.mode {recipe.joint.mode} is for the tuned target"
        advice = f"give target.path={recipe.tuned_target_dir}"
        raise ValueError(f"target.path: {recipe.target.path} given, but {why}; {advice}")
