"""Findings from trials: one thing is changed at a time, and the accuracy is measured again.

An export is compared with its head part by part (taps, norms, vocabulary map, RoPE, weights). A head alone is tried
with variants of how its files are interpreted: one that guesses clearly better is most likely what it was trained with.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from statistics import fmean as mean
from typing import Any

import torch
from torch import Tensor

from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import KINDS
from headstart.heads.target_config import Rope
from headstart.inference.doctor.findings import Finding, largest_loss
from headstart.inference.doctor.interpretation import Interpretation, Measure

COMMON_BASES = (1e4, 5e5, 1e6)
MIN_GAIN, MIN_RELATIVE_GAIN = 0.05, 0.1  # mean accuracy that a variant must gain to be reported
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
TINY = 1e-30  # the size of weights that are all zero
MAX_ROUNDING = 0.3  # relative difference of weights that a coarse number format can explain
MIN_DTYPE_LOSS = 0.02  # loss of mean accuracy that is reported; less is the normal price of a narrower format


def norm_settings(head: Interpretation) -> dict[str, Any]:
    """The keys of config.json that concern norms; an absent flag is off."""
    flags = {flag: bool(head.config.get(flag)) for flag in norm_flags(head)}
    return {**flags, "rms_norm_eps": head.config.get("rms_norm_eps")}


def norm_flags(head: Interpretation) -> tuple[str, ...]:
    return KINDS[head.kind].flags.get("norm", ())


def tensors_of(head: Interpretation, norms: bool) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in head.tensors.items() if ("norm" in name) == norms}


def same_norms(head: Interpretation, export: Interpretation) -> bool:
    """Are norms equal up to rounding, which is reported as a fault of the number format?"""
    mine, its = tensors_of(head, norms=True), tensors_of(export, norms=True)
    shapes = [{name: tensor.shape for name, tensor in norms.items()} for norms in (mine, its)]
    if norm_settings(head) != norm_settings(export) or shapes[0] != shapes[1]:
        return False
    difference, size = distance(mine, its)
    return difference <= MAX_ROUNDING * size


def show_norms(head: Interpretation) -> str:
    on = [flag for flag in norm_flags(head) if head.config.get(flag)]
    weights = tensors_of(head, norms=True)
    size = distance(weights, {})[1]
    return f"{', '.join(on) or 'no flag'}, {len(weights)} norm weights (size {size:.3g})"


def show_ids(head: Interpretation) -> str:
    digest = hashlib.sha256(str(head.ids.tolist()).encode()).hexdigest()[:8]
    return f"{len(head.ids)} tokens {head.ids[:4].tolist()}... (hash {digest})"


def compare_parts(head: Interpretation, export: Interpretation, measure: Measure) -> Iterator[Finding]:
    """Yield a finding for each part that differs; its cost is measured with every other part as it was trained."""
    right = measure(head)
    for part in parts_of(head, export):
        cost, _ = cost_of(part.interpretation, right, measure)
        yield Finding(part.category, part.found, part.right, cost, part.advice)
    yield from compare_weights(head, export, measure, right)


def parts_of(head: Interpretation, export: Interpretation) -> Iterator["Variant"]:
    """The head with each part of the export in which the two differ, one at a time; weights apart."""

    def part(category: str, show: Callable[[Interpretation], object], taken: Interpretation, advice: str) -> "Variant":
        return Variant(category, f"EXPORT has {show(export)}", f"HEAD was trained with {show(head)}", taken, advice)

    if head.taps != export.taps:
        advice = "write the trained taps in the engine's own numbering"
        yield part("taps", lambda one: list(one.taps), replace(head, taps=export.taps), advice)
    if not same_norms(head, export):
        tensors = tensors_of(head, norms=False) | tensors_of(export, norms=True)
        taken = replace(head.with_config(**norm_settings(export)), tensors=tensors)
        yield part("norm", show_norms, taken, "export again with all flags and weights of the norms")
    if not torch.equal(head.ids, export.ids):
        advice = "d2t must hold target id minus draft id, in the order of lm_head's rows"
        yield part("vocabulary map", show_ids, replace(head, ids=export.ids), advice)
    if head.rope != export.rope:
        kept = {key: value for key, value in head.config.items() if key not in ROPE_KEYS}
        taken = replace(head, config=kept).with_config(**export.rope.to_config())
        advice = "write the trained RoPE, both as rope_theta and in rope_parameters"
        yield part("RoPE base", lambda one: asdict(one.rope), taken, advice)


def cost_of(changed: Interpretation, right: list[float], measure: Measure) -> tuple[str, list[float] | None]:
    """The cost of the change in words, and the accuracies with it: None if the head cannot be computed."""
    try:
        wrong = measure(changed)
    except ValueError as error:
        return f"everything, because the head cannot be computed ({error})", None
    return largest_loss(right, wrong), wrong


def compare_weights(
    head: Interpretation, export: Interpretation, measure: Measure, right: list[float]
) -> Iterator[Finding]:
    """Compare weights and number format together, because a format shows in the weights, as rounding or overflow."""
    mine, its = tensors_of(head, norms=False), tensors_of(export, norms=False)
    formats = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in its.values()}))
    norms = tensors_of(export if same_norms(head, export) else head, norms=True)
    cost, wrong = cost_of(replace(head, tensors=norms | its, dtype=export.stored_dtype), right, measure)
    if wrong is None:
        yield Finding("files", "EXPORT's weights do not fit", "HEAD's own weights", cost, "export again")
        return
    if broken := sorted(not_finite(export) - not_finite(head)):
        found = f"EXPORT's {broken[0]} holds NaN or infinity ({formats})"
        yield Finding("dtype", found, "finite numbers, as HEAD has", cost, "export HEAD again, in a wider format")
        return
    difference, size = distance(mine, its)
    is_rounding = difference <= MAX_ROUNDING * size
    if is_rounding and mean(right) - mean(wrong) < MIN_DTYPE_LOSS:
        return
    found = f"EXPORT's weights are {formats} and differ from HEAD's by {difference / max(size, TINY):.1%}"
    advice = "export in a wider format" if is_rounding else "export HEAD again, or name the head that EXPORT is made of"
    yield Finding("dtype" if is_rounding else "files", found, "HEAD's own weights", cost, advice)


def not_finite(head: Interpretation) -> set[str]:
    """The tensors that hold NaN or infinity."""
    return {name for name, tensor in head.tensors.items() if not bool(tensor.double().isfinite().all())}


def distance(mine: dict[str, Tensor], its: dict[str, Tensor]) -> tuple[float, float]:
    """The Euclidean norm of the difference, without values that are not finite, and that of the first tensors."""
    pairs = [(mine[name].double(), its[name].double()) for name in mine.keys() & its.keys()]
    away = sum(float((one - other).nan_to_num(0, 0, 0).square().sum()) for one, other in pairs)
    return away**0.5, sum(float(one.double().square().sum()) for one in mine.values()) ** 0.5


@dataclass(frozen=True)
class Variant:
    """The head with one thing changed, and the finding to report if that matters."""

    category: str
    found: str
    right: str
    interpretation: Interpretation
    advice: str
    preferred: bool = False  # report this one if others do equally well


def variants_of(head: Interpretation, frozen: FrozenTarget) -> Iterator[Variant]:
    """Every variant worth trying; each differs from `head` in one thing."""
    kind = KINDS[head.kind]
    if kind.reads_tokens:
        yield from shift_variants(head)
    if kind.has_rope:
        yield from rope_variants(head, frozen)
    if kind.chooses_taps:
        yield from tap_variants(head, frozen)
        yield from map_variants(head)
    for category, flags in kind.flags.items():
        yield from flag_variants(head, category, flags)


def shift_variants(head: Interpretation) -> Iterator[Variant]:
    for shift in {-1, 0, 1} - {head.shift}:
        token = f"token t{1 + shift:+d}".replace("+0", "")
        found = "drafting pairs feature t with token t+1"
        right = f"the head guesses best with {token} beside feature t"
        advice = "train again with the tokens one place ahead of the features"
        if shift == 1:
            advice += " (in training the head saw the token it had to guess)"
        yield Variant("token shift", found, right, replace(head, shift=shift), advice)


def tap_variants(head: Interpretation, frozen: FrozenTarget) -> Iterator[Variant]:
    taps, last = head.taps, frozen.config.num_layers
    orders = set(permutations(taps)) if len(taps) <= 3 else {taps[::-1]}
    moved = {tuple(tap + by for tap in taps) for by in (-1, 1)}
    for other in sorted((orders | moved) - {taps}):
        if min(other) >= 0 and max(other) <= last:
            found, right = f"the head reads hidden_states {list(taps)}", f"it guesses best with {list(other)}"
            advice = "write these into config.json, or train again with taps in ascending order"
            yield Variant("taps", found, right, replace(head, taps=other), advice)


def flag_variants(head: Interpretation, category: str, flags: Sequence[str]) -> Iterator[Variant]:
    for flag in flags:
        on = bool(head.config.get(flag))
        found, right = f"{flag} is {str(on).lower()}", f"the head guesses best with {str(not on).lower()}"
        advice = f"set {flag} to {str(not on).lower()} in config.json"
        yield Variant(category, found, right, head.with_config(**{flag: not on}), advice)


def rope_variants(head: Interpretation, frozen: FrozenTarget) -> Iterator[Variant]:
    own = head.rope
    ropes = [frozen.config.rope, *(Rope(theta=base) for base in COMMON_BASES)]
    for number, other in enumerate(ropes):
        if other != own and other not in ropes[:number]:
            found, right = f"base {own.theta:g} ({own.kind})", f"it guesses best with {other.theta:g} ({other.kind})"
            advice = "write that rope_theta into config.json"
            preferred = other == frozen.config.rope
            yield Variant("RoPE base", found, right, head.with_config(**other.to_config()), advice, preferred)


def map_variants(head: Interpretation) -> Iterator[Variant]:
    columns = torch.arange(len(head.ids))
    if torch.equal(head.ids, columns):
        return
    ids = head.ids - columns
    found = f"d2t read as offsets gives token ids {head.ids[:4].tolist()}..."
    right = f"read as token ids it gives {ids[:4].tolist()}..., and the head guesses best with those"
    advice = "write target id minus draft id into d2t"
    yield Variant("vocabulary map", found, right, replace(head, ids=ids), advice)


def find_better_variants(
    head: Interpretation, frozen: FrozenTarget, measure: Measure, tokens: int
) -> Iterator[Finding]:
    """The variants that are clearly better on this many tokens, best first; each is tried on top of those before it."""
    now, reported = measure(head), set[str]()
    chance = 2 * (0.25 / tokens) ** 0.5  # two standard errors of an accuracy near one half
    while True:
        tried = [variant for variant in variants_of(head, frozen) if variant.category not in reported]
        scored = [(measure(variant.interpretation), variant) for variant in tried]
        if not scored:
            return
        best, variant = max(scored, key=lambda pair: mean(pair[0]))
        equally_good = [(score, other) for score, other in scored if mean(score) >= mean(best) - chance]
        alike = [pair for pair in equally_good if pair[1].category == variant.category and pair[1].preferred]
        best, variant = next(iter(alike), (best, variant))
        if mean(best) < mean(now) + max(MIN_GAIN, MIN_RELATIVE_GAIN * mean(now), chance):
            return
        yield Finding(variant.category, variant.found, variant.right, largest_loss(best, now), variant.advice)
        reported.add(variant.category)
        head, now = variant.interpretation, best


def check_number_format(head: Interpretation, measure: Measure) -> Iterator[Finding]:
    """Yield a finding if the head guesses worse in the number format it is stored in than in float32."""
    dtype = head.stored_dtype
    if dtype in (None, torch.float32):
        return
    wide, stored = measure(replace(head, dtype=torch.float32)), measure(replace(head, dtype=dtype))
    if mean(wide) - mean(stored) >= MIN_DTYPE_LOSS:
        found = f"computed in {str(dtype).removeprefix('torch.')}"
        yield Finding("dtype", found, "float32", largest_loss(wide, stored), "serve it in a wider format")
