"""What may cost a head its acceptance, each tried alone: parts of an export, and other readings of the head's files."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import torch
from torch import Tensor

from heads.formats import config_rules, tensor_rules
from heads.formats.contracts import findings
from heads.formats.files import HeadFiles
from heads.formats.subject import MEDUSA, Subject, layout_of
from heads.formats.subject import Finding as Breach
from heads.frozen import FrozenTarget
from heads.target_config import Rope
from inference.reading import Reading
from inference.tokenizer import load_tokenizer

Measure = Callable[[Reading], list[float]]  # accuracy per depth; ValueError where a reading cannot be computed

FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
COMMON_BASES = (1e4, 5e5, 1e6)
GAIN, RELATIVE_GAIN = 0.05, 0.1  # of the mean accuracy, from which on another reading is the better one
ROUNDED = 0.3  # of the weights' size: a difference below is the rounding of a coarse format
DTYPE_COST = 0.02  # of the mean accuracy: less is the price of a shorter format
CATEGORIES = (  # what the place or text of a breach holds -> its category
    ("max_position_embeddings", "context length"),
    ("finite numbers", "dtype"),
    ("aux_hidden_state", "taps"),
    ("rope", "RoPE base"),
    ("norm", "norm"),
    ("d2t", "vocabulary map"),
    ("t2d", "vocabulary map"),
    ("token_map", "vocabulary map"),
    ("vocab_size", "vocabulary map"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    category: str
    found: str
    right: str
    cost: str
    advice: str

    def __str__(self) -> str:
        return f"{self.category}: {self.found}; right: {self.right}; cost: {self.cost}; to do: {self.advice}"


def drop(right: list[float], wrong: list[float]) -> str:
    """The depth that loses most."""
    level = max(range(len(right)), key=lambda level: right[level] - wrong[level])
    return f"accuracy at depth {level + 1} {right[level]:.2f} -> {wrong[level]:.2f}"


def category_of(breach: Breach) -> str:
    text = f"{breach.where} {breach.allowed}" if "finite numbers" in breach.allowed else breach.where
    return next((category for word, category in CATEGORIES if word in text), "files")


def as_finding(breach: Breach, folder: Path) -> Finding:
    found = f"{folder.name}: {breach.where} is {str(breach.value)[:60]}"
    return Finding(category_of(breach), found, breach.allowed, "not measured, named by the files", f"mend {folder}")


def head_breaches(files: HeadFiles, frozen: FrozenTarget) -> list[Finding]:
    """What keeps a head from drafting as it should wherever it runs, by its files alone."""
    subject = Subject(files, layout_of(files), frozen)
    rules: list[Callable[[Subject, str], Iterator[Breach]]] = [tensor_rules.finite]
    if subject.layout not in MEDUSA:
        rules += [config_rules.fits_the_target, tensor_rules.names_and_shapes]
    if subject.kind == "eagle3":
        rules.append(tensor_rules.vocabulary_map)
    return [as_finding(breach, files.folder) for rule in rules for breach in rule(subject, "any engine")]


def export_breaches(files: HeadFiles, frozen: FrozenTarget, engine: str) -> list[Finding]:
    """What the engine's contract has against an export."""
    breaches = findings(files, frozen, [engine])
    return [as_finding(breach, files.folder) for breach in breaches if breach.severity == "error"]


def named_once(measured: list[Finding], by_files: list[Finding]) -> list[Finding]:
    """What was measured, and of the files what no measurement has named; one line for each category."""
    kept, seen = list(measured), {finding.category for finding in measured}
    for finding in by_files:
        if finding.category not in seen or finding.category == "files":
            kept.append(finding)
            seen.add(finding.category)
    return kept


@dataclass(frozen=True)
class Part:
    """A part of a reading: is it the same in both, how is it shown, and the first one with that of the second."""

    category: str
    same: Callable[[Reading, Reading], bool]
    shown: Callable[[Reading], str]
    taken: Callable[[Reading, Reading], Reading]
    advice: str


def norm_settings(reading: Reading) -> dict[str, Any]:
    """What counts of config.json; an absent flag is off."""
    flags = {flag: bool(reading.config.get(flag)) for flag in FLAGS}
    return {**flags, "rms_norm_eps": reading.config.get("rms_norm_eps")}


def tensors_of(reading: Reading, norms: bool) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in reading.tensors.items() if ("norm" in name) == norms}


def take_norms(head: Reading, export: Reading) -> Reading:
    tensors = tensors_of(head, norms=False) | tensors_of(export, norms=True)
    return replace(head.with_config(**norm_settings(export)), tensors=tensors)


def take_rope(head: Reading, export: Reading) -> Reading:
    kept = {key: value for key, value in head.config.items() if key not in ROPE_KEYS}
    return replace(head, config=kept).with_config(**Rope.from_config(export.config).to_config())


def same_norms(head: Reading, export: Reading) -> bool:
    """But for rounding, which is the number format's affair."""
    mine, its = tensors_of(head, norms=True), tensors_of(export, norms=True)
    if norm_settings(head) != norm_settings(export) or {n: t.shape for n, t in mine.items()} != {
        n: t.shape for n, t in its.items()
    }:
        return False
    difference, size = distance(mine, its)
    return difference <= ROUNDED * size


def show_norms(reading: Reading) -> str:
    on = [flag for flag in FLAGS if reading.config.get(flag)]
    weights = tensors_of(reading, norms=True)
    size = distance(weights, {})[1]
    return f"{', '.join(on) or 'no flag'}, {len(weights)} weights of norms (size {size:.3g})"


def show_ids(reading: Reading) -> str:
    digest = hashlib.sha256(str(reading.ids.tolist()).encode()).hexdigest()[:8]
    return f"{len(reading.ids)} tokens {reading.ids[:4].tolist()}... (hash {digest})"


def rope_of(reading: Reading) -> Rope:
    return Rope.from_config(reading.config)


PARTS = (
    Part(
        "taps",
        lambda head, export: head.taps == export.taps,
        lambda reading: str(list(reading.taps)),
        lambda head, export: replace(head, taps=export.taps),
        "write the trained ones in the engine's own counting",
    ),
    Part("norm", same_norms, show_norms, take_norms, "export again with the flags and all weights of the norms"),
    Part(
        "vocabulary map",
        lambda head, export: torch.equal(head.ids, export.ids),
        show_ids,
        lambda head, export: replace(head, ids=export.ids),
        "d2t must hold target id minus draft id, in the order of lm_head's rows",
    ),
    Part(
        "RoPE base",
        lambda head, export: rope_of(head) == rope_of(export),
        lambda reading: str(asdict(rope_of(reading))),
        take_rope,
        "write the trained one, both as rope_theta and in rope_parameters",
    ),
)


def compare_parts(head: Reading, export: Reading, measure: Measure) -> Iterator[Finding]:
    """Each part in which the export differs from the head, measured with all else as it was trained."""
    right = measure(head)
    for part in PARTS:
        if part.same(head, export):
            continue
        try:
            cost = drop(right, measure(part.taken(head, export)))
        except ValueError as error:
            cost = f"all of it, the head cannot be computed so ({error})"
        its, mine = f"EXPORT has {part.shown(export)}", f"HEAD was trained with {part.shown(head)}"
        yield Finding(part.category, its, mine, cost, part.advice)
    yield from compare_weights(head, export, measure, right)


def compare_weights(head: Reading, export: Reading, measure: Measure, right: list[float]) -> Iterator[Finding]:
    """Weights and number format together, as a format shows in its rounding and in its overflows."""
    mine, its = tensors_of(head, norms=False), tensors_of(export, norms=False)
    formats = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in its.values()}))
    norms = tensors_of(export if same_norms(head, export) else head, norms=True)
    changed = replace(head, tensors=norms | its, dtype=stored_dtype(export))
    try:
        wrong = measure(changed)
    except ValueError as error:
        yield Finding("files", "EXPORT's weights do not fit", "HEAD's own", f"all of it ({error})", "export again")
        return
    if mean(right) - mean(wrong) < DTYPE_COST:
        return
    difference, size = distance(mine, its)
    share = f"weights as {formats}, {difference / size:.1%} of their size away from HEAD's"
    if difference <= ROUNDED * size:
        yield Finding("dtype", f"EXPORT has {share}", "HEAD's own", drop(right, wrong), "export in a wider format")
    else:
        yield Finding("files", f"EXPORT has other {share}", "HEAD's own", drop(right, wrong), "export HEAD again")


def distance(mine: dict[str, Tensor], its: dict[str, Tensor]) -> tuple[float, float]:
    """How far the second are from the first, and the size of the first; what is not finite is left out."""
    pairs = [(mine[name].double(), its[name].double()) for name in mine.keys() & its.keys()]
    away = sum(float((one - other).nan_to_num(0, 0, 0).square().sum()) for one, other in pairs)
    return away**0.5, sum(float(one.double().square().sum()) for one in mine.values()) ** 0.5


def stored_dtype(reading: Reading) -> torch.dtype | None:
    """The number format that an engine takes from config.json; None where it says nothing."""
    name = reading.config.get("torch_dtype") or reading.config.get("dtype")
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return known.get(str(name))


@dataclass(frozen=True)
class Otherwise:
    """Another reading of the head's own files, and what it would mean if it were the better one."""

    category: str
    found: str
    right: str
    reading: Reading
    advice: str


def other_readings(reading: Reading, frozen: FrozenTarget) -> Iterator[Otherwise]:
    """All that are worth a try."""
    if reading.kind != "medusa":  # which reads no token
        for shift in {-1, 0, 1} - {reading.shift}:
            beside = f"token t{1 + shift:+d}".replace("+0", "")
            yield Otherwise(
                "token shift",
                "drafting hands the head feature t with token t+1",
                f"it guesses best with {beside} beside feature t",
                replace(reading, shift=shift),
                "train again with the tokens one place ahead of the features"
                + (" (it was trained with the token to guess in sight)" if shift == 1 else ""),
            )
        yield from other_ropes(reading, frozen)
    if reading.kind == "eagle3":
        yield from other_taps(reading, frozen)
        yield from other_norms(reading)
        yield from other_maps(reading)


def other_taps(reading: Reading, frozen: FrozenTarget) -> Iterator[Otherwise]:
    taps, last = reading.taps, frozen.config.num_layers
    orders = set(permutations(taps)) if len(taps) <= 3 else {taps[::-1]}
    moved = {tuple(tap + by for tap in taps) for by in (-1, 1)}
    for other in sorted((orders | moved) - {taps}):
        if min(other) >= 0 and max(other) <= last:
            found, right = f"the head is handed hidden_states {list(taps)}", f"it guesses best with {list(other)}"
            advice = "write these into config.json, or train again with taps in ascending order"
            yield Otherwise("taps", found, right, replace(reading, taps=other), advice)


def other_norms(reading: Reading) -> Iterator[Otherwise]:
    for flag in FLAGS:
        on = bool(reading.config.get(flag))
        found, right = f"{flag} is {str(on).lower()}", f"the head guesses best with {str(not on).lower()}"
        advice = f"set {flag} to {str(not on).lower()} in config.json"
        yield Otherwise("norm", found, right, reading.with_config(**{flag: not on}), advice)


def other_ropes(reading: Reading, frozen: FrozenTarget) -> Iterator[Otherwise]:
    own = rope_of(reading)
    ropes = [frozen.config.rope, *(Rope(theta=base) for base in COMMON_BASES)]
    for number, other in enumerate(ropes):
        if other != own and other not in ropes[:number]:
            found, right = f"base {own.theta:g} ({own.kind})", f"it guesses best with {other.theta:g} ({other.kind})"
            advice = "write that rope_theta into config.json"
            yield Otherwise("RoPE base", found, right, reading.with_config(**other.to_config()), advice)


def other_maps(reading: Reading) -> Iterator[Otherwise]:
    columns = torch.arange(len(reading.ids))
    if torch.equal(reading.ids, columns):
        return
    ids = reading.ids - columns
    found, right = f"d2t as offsets gives {reading.ids[:4].tolist()}...", f"as ids it gives {ids[:4].tolist()}..."
    advice = "write target id minus draft id into d2t"
    yield Otherwise("vocabulary map", found, right, replace(reading, ids=ids), advice)


def better_readings(reading: Reading, frozen: FrozenTarget, measure: Measure, tokens: int) -> Iterator[Finding]:
    """The readings that are clearly better on so many tokens, the best first, each on top of those before it."""
    now, named = measure(reading), set[str]()
    chance = 2 * (0.25 / tokens) ** 0.5  # two standard errors of an accuracy around a half
    while True:
        tried = [other for other in other_readings(reading, frozen) if other.category not in named]
        scored = [(measure(other.reading), other) for other in tried]
        if not scored:
            return
        best, other = max(scored, key=lambda pair: mean(pair[0]))
        if mean(best) < mean(now) + max(GAIN, RELATIVE_GAIN * mean(now), chance):
            return
        yield Finding(other.category, other.found, other.right, drop(best, now), other.advice)
        named.add(other.category)
        reading, now = other.reading, best


def number_format(reading: Reading, measure: Measure) -> Iterator[Finding]:
    """Does the head lose in the number format that it is stored in?"""
    dtype = stored_dtype(reading)
    if dtype in (None, torch.float32):
        return
    wide, stored = measure(replace(reading, dtype=torch.float32)), measure(replace(reading, dtype=dtype))
    if mean(wide) - mean(stored) >= DTYPE_COST:
        name = str(dtype).removeprefix("torch.")
        yield Finding("dtype", f"computed in {name}", "float32", drop(wide, stored), "serve it in a wider format")


def other_template(manifest: Path, target: Path) -> Iterator[Finding]:
    """Was the head trained on conversations in another template than the target's tokenizer has now?"""
    trained = json.loads(manifest.read_text()).get("chat_template_sha256")
    now = hashlib.sha256(str(load_tokenizer(target).chat_template).encode()).hexdigest()
    if trained is not None and trained != now:
        advice = "give TARGET its template back, or harvest and train again"
        found = f"TARGET's chat template has the hash {now[:12]}"
        cost = "not measured: every conversation begins otherwise than those trained on"
        yield Finding("template", found, f"{trained[:12]}, as {manifest} says", cost, advice)


def beyond(reading: Reading, lengths: Sequence[int]) -> str | None:
    """Share of the replayed tokens that lie behind the positions that config.json gives the head."""
    limit = reading.config.get("max_position_embeddings")
    if not isinstance(limit, int) or max(lengths) <= limit:
        return None
    share = sum(max(length - limit, 0) for length in lengths) / sum(lengths)
    return f"{share:.0%} of the replayed tokens stand behind position {limit}"
