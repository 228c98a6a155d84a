"""Checks that need more than one field: files that must exist, sections that must agree, the target's own sizes.

They read the untyped values, so they still run when other fields of the recipe are wrong. Each mistake is a pair of
section.key and "WHAT IS ALLOWED; what to do".
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from headstart.recipes.fields import head_kinds, recipe_sections
from headstart.recipes.schema import HUB_PREFIX, RANKED_GROWTHS, SELF, Recipe
from headstart.recipes.schema_heads import HeadSection
from headstart.recipes.target_sizes import HEADS, LAYERS, POSITIONS, VOCABULARY, first, text_section

RecipeMistake = tuple[str, str]
Values = dict[str, Any]
OFF = {  # a field of training that only some kinds of heads have, and the values of it that mean that it is not used
    "train.regression_weight": "only 0 or null",
    "train.fitted_start": "only false",
    "train.input_noise": "only 0 or null",
    "train.anchors": "no value",
    "joint.mode": "only null",
}
RELATIVE_PATHS = "relative paths start from the current directory"


def recipe_mistakes(values: Values) -> Iterator[RecipeMistake]:
    """Yield every missing file, every contradiction between sections, and every size that does not fit the target."""
    recipe = with_defaults(values)
    yield from file_mistakes(recipe)
    given = {name: dict_or_empty(values.get(name)) for name in recipe}
    yield from kind_mistakes(recipe, given)
    if recipe["joint"]["mode"] is not None:
        yield from joint_mistakes(recipe)
    yield from split_mistakes(recipe)
    yield from target_mistakes(recipe)
    yield from baseline_mistakes(recipe["report"], recipe["decode"])
    yield from magnitude_mistakes(values)


def with_defaults(values: Values) -> dict[str, Values]:
    """Every section, with the defaults of fields that are not given; of a head only if its kind is known."""
    sections = {}
    for name, kinds in recipe_sections().items():
        given = dict_or_empty(values.get(name))
        model = kinds.get(str(given.get("kind", "")))
        fields = {} if model is None else model.model_fields
        sections[name] = {key: field.default for key, field in fields.items() if not field.is_required()} | given
    return sections


def file_mistakes(recipe: dict[str, Values]) -> Iterator[RecipeMistake]:
    prompts, heldout_prompts = (recipe["data"].get(key) for key in ("prompts", "heldout_prompts"))
    is_path = isinstance(prompts, str) and prompts != SELF and not prompts.startswith(HUB_PREFIX)
    if isinstance(prompts, str) and is_path and not os.path.exists(os.path.expanduser(prompts)):
        allowed = f"an existing file or dataset folder, {HUB_PREFIX}org/name:split or {SELF} is allowed"
        yield "data.prompts", f"{allowed}; put the prompts there ({RELATIVE_PATHS})"
    if not isinstance(heldout_prompts, str) or heldout_prompts == SELF:
        return
    if not os.path.isfile(os.path.expanduser(heldout_prompts)):
        allowed = f"an existing file, or {SELF} with data.prompts {SELF}, is allowed"
        yield "data.heldout_prompts", f"{allowed}; put the prompts there ({RELATIVE_PATHS})"


def kind_mistakes(recipe: dict[str, Values], given: dict[str, Values]) -> Iterator[RecipeMistake]:
    """Given fields of training that the kind of head does not have, and levels that it does not draft."""
    kinds, head = head_kinds(), recipe["head"]
    section = kinds.get(str(head.get("kind")))
    if section is None:
        return
    for path, off in OFF.items():
        name, field = path.split(".")
        if given[name].get(field) and path not in section.own_fields:
            others = " or ".join(kind for kind, other in kinds.items() if path in other.own_fields)
            yield path, f"{off} is allowed with head.kind {head['kind']}; remove it, or choose head.kind {others}"
    if section.levels_field is not None and is_count(head.get(section.levels_field)):
        decode = given["decode"] if recipe["decode"]["drafter"] == "head" else {}
        yield from level_mistakes(section.model_construct(**head), given["train"], decode)


def level_mistakes(head: HeadSection, train: Values, decode: Values) -> Iterator[RecipeMistake]:
    """Training scores all levels that a head of fixed depth drafts, and decoding can draft no deeper."""
    levels, depth, field = head.levels, decode.get("depth"), f"head.{head.levels_field}"
    assert levels is not None
    why = f"the levels that {field} gives"
    if train.get("unroll", levels) != levels:
        yield "train.unroll", f"{levels} is allowed, {why}; leave it out, or write train.unroll: {levels}"
    if is_count(depth) and depth > levels:
        yield "decode.depth", f"1 to {levels} is allowed, {why}; lower it, or raise {field} and train again"


def joint_mistakes(recipe: dict[str, Values]) -> Iterator[RecipeMistake]:
    """Fields that cannot be combined with training the target together with its heads."""
    places = ("head", "draft_vocab_size"), ("train", "pack_tokens"), ("target", "split")
    for section, field in places:
        if recipe[section].get(field) is not None:
            yield f"{section}.{field}", f"only null is allowed with joint.mode; remove {field}"


def split_mistakes(recipe: dict[str, Values]) -> Iterator[RecipeMistake]:
    """Fields that cannot be combined with a target that is split over several ranks or devices."""
    split, online = recipe["target"]["split"], recipe["data"]["online"]
    if online is not None and split == "tensor":  # training ranks read different samples; a shared target needs one
        yield "target.split", "only layers or null is allowed with data.online; remove split"
    if online not in (None, ["auto"]) and split == "layers":
        yield "target.split", "only null is allowed with devices in data.online, which place the target; remove one"


def baseline_mistakes(report: Values, decode: Values) -> Iterator[RecipeMistake]:
    """Rows of the report whose drafter lacks what it needs."""
    baselines = report["baselines"] if isinstance(report["baselines"], list) else []
    for baseline in ("draft_model", "generate_assisted"):
        if baseline in baselines and decode["draft_model"] is None:
            allowed = f"a path is allowed, because report.baselines has {baseline}"
            yield "decode.draft_model", f"{allowed}; add it, or remove {baseline} there"
    if "repeats" in baselines and not decode["repeats"]:
        yield "decode.repeats", "1 to 64 is allowed, because report.baselines has repeats; add it, or remove repeats"


def magnitude_mistakes(values: Values) -> Iterator[RecipeMistake]:
    """No whole number may exceed 64 bits, which no library below takes."""
    for name, section in values.items():
        for key, value in dict_or_empty(section).items():
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(number, int) and abs(number) >= 2**63 for number in numbers):
                yield f"{name}.{key}", "a number of fewer than 64 bits is allowed; lower it"


def target_mistakes(recipe: dict[str, Values]) -> Iterator[RecipeMistake]:
    """A local target must be a model whose sizes the recipe fits."""
    path = recipe["target"].get("path")
    if not isinstance(path, str) or not path:
        return
    folder = Path(os.path.expanduser(path))
    if path.endswith(".gguf"):
        if not folder.is_file():
            yield "target.path", f"an existing GGUF file is allowed; put the file there ({RELATIVE_PATHS})"
        return
    if not path.startswith((".", "/", "~")) and not Path(Path(path).parts[0]).is_dir():
        return  # a name on the hub
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        allowed = "a folder with a model's config.json, or a hub name, is allowed"
        yield "target.path", f"{allowed}; put the model there ({RELATIVE_PATHS})"
    except ValueError as error:
        yield "target.path", f"a folder with a readable config.json is allowed; fix the file ({error})"
    else:
        if isinstance(config, dict):
            yield from size_mistakes(config, recipe)
        else:
            yield "target.path", "a folder whose config.json is a JSON object is allowed; give the folder of a model"


def size_mistakes(config: Values, recipe: dict[str, Values]) -> Iterator[RecipeMistake]:
    """Yield every size that does not fit a target with this config.json."""
    sizes = text_section(config)
    head, data, decode = recipe["head"], recipe["data"], recipe["decode"]
    layers, taps = first(sizes, *LAYERS), head.get("taps")
    if is_count(layers) and isinstance(taps, list) and (beyond := [t for t in taps if is_count(t) and t > layers]):
        allowed = f"hidden states 0 to {layers} of a target with {layers} layers are allowed"
        yield "head.taps", f"{allowed}; replace {', '.join(map(str, beyond))}"
    if is_count(vocab_size := first(sizes, *VOCABULARY)):
        yield from vocabulary_mistakes(vocab_size, head, decode)
    if is_count(positions := first(sizes, *POSITIONS)):
        yield from length_mistakes(positions, data, decode)
    num_heads, num_kv_heads = first(sizes, *HEADS), head.get("num_kv_heads")
    own_heads = head.get("num_heads") is not None
    if not own_heads and is_count(num_heads) and is_count(num_kv_heads) and num_heads % num_kv_heads:
        allowed = f"a divisor of the target's {num_heads} attention heads is allowed"
        yield "head.num_kv_heads", f"{allowed}; change it, or set head.num_heads"


def vocabulary_mistakes(vocab_size: int, head: Values, decode: Values) -> Iterator[RecipeMistake]:
    """A head cannot draft more tokens than the target has, nor more children than it drafts tokens."""
    draft_vocab_size, width = head.get("draft_vocab_size"), decode["width"]
    if is_count(draft_vocab_size) and draft_vocab_size > vocab_size:
        yield "head.draft_vocab_size", f"1 to the target's {vocab_size} tokens are allowed; lower it, or null for all"
    if is_count(mask := head.get("mask_token_id")) and mask >= vocab_size:
        allowed = f"0 to {vocab_size - 1} of the target's tokens is allowed"
        yield "head.mask_token_id", f"{allowed}; choose one that it never writes, or null for its last"
    drafted, whose = vocab_size, "the target has tokens"
    if is_count(draft_vocab_size) and decode["drafter"] == "head":
        drafted, whose = min(draft_vocab_size, vocab_size), "the head drafts tokens (head.draft_vocab_size)"
    if decode["growth"] in RANKED_GROWTHS and is_count(width) and width > drafted:
        yield "decode.width", f"1 to {drafted} is allowed, as many as {whose}; lower it"


def length_mistakes(positions: int, data: Values, decode: Values) -> Iterator[RecipeMistake]:
    """Neither a sample nor a decoded text may be longer than the target's positions."""
    prompt, response, new_tokens = data["prompt_tokens"], data["response_tokens"], decode["max_new_tokens"]
    if is_count(prompt) and is_count(response) and prompt + response > positions:
        field, other = ("prompt_tokens", response) if prompt >= positions else ("response_tokens", prompt)
        most = f"up to {positions - other}" if other < positions else f"fewer than {positions}"
        why = f"because data.prompt_tokens {prompt} + data.response_tokens {response} exceed the target's {positions} "
        yield f"data.{field}", f"{most} is allowed, {why}positions; lower one of them"
    if is_count(new_tokens) and new_tokens >= positions:
        allowed = f"1 to {positions - 1} is allowed, fewer than the target's {positions} positions"
        yield "decode.max_new_tokens", f"{allowed}; lower it"


def refuse_original_target(recipe: Recipe) -> None:
    """Raise ValueError if the run's own head would be used with the target from before joint training."""
    if recipe.joint.mode is None or recipe.head_in_use.resolve() != recipe.head_dir.resolve():
        return
    if Path(recipe.target.path).resolve() != recipe.tuned_target_dir.resolve():
        why = f"a head trained with joint.mode {recipe.joint.mode} is for the tuned target"
        advice = f"give target.path={recipe.tuned_target_dir}"
        raise ValueError(f"target.path: {recipe.target.path} given, but {why}; {advice}")


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number above 0; the schema has reported it if it is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def dict_or_empty(value: object) -> Values:
    return value if isinstance(value, dict) else {}
