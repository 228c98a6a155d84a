"""Findings from trials: one thing is changed at a time, and the accuracy is measured again.

An export is compared with its head part by part (taps, norms, vocabulary map, RoPE, weights). A head alone is tried
with variants of how its files are interpreted: a clearly better one is most likely the one it was trained with.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from statistics import fmean as mean

import torch
from torch import Tensor

from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import KINDS
from headstart.heads.target_config import Rope
from headstart.inference.doctor.findings import Finding
from headstart.inference.doctor.interpretation import Interpretation, Measure

COMMON_ROPE_BASES = (1e4, 5e5, 1e6)
MIN_GAIN, MIN_RELATIVE_GAIN = 0.05, 0.1  # mean accuracy that a variant must gain to be reported
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
TINY = 1e-30  # the size of weights that are all zero
MAX_ROUNDING = 0.3  # relative difference of weights that a coarse number format can explain
MIN_DTYPE_LOSS = 0.02  # loss of mean accuracy that is reported; less is the normal price of a narrower format


@dataclass(frozen=True)
class Trial:
    """The head with one thing changed, and the finding to report if that matters."""

    head: Interpretation
    finding: Finding
    preferred: bool = False  # report this one if others do equally well


def compare_parts(head: Interpretation, export: Interpretation, measure: Measure) -> Iterator[Finding]:
    """Yield a finding for each part that differs; its cost is measured with every other part as it was trained."""
    right = measure(head)
    for part in parts_of(head, export):
        cost, _ = cost_of(part.head, right, measure)
        yield replace(part.finding, cost=cost)
    yield from compare_weights(head, export, measure, right)


def parts_of(head: Interpretation, export: Interpretation) -> Iterator[Trial]:
    """The head with each part of the export in which the two differ, one at a time; not the weights."""
    norm_keys = (*KINDS[head.kind].flags.get("norm", ()), "rms_norm_eps")
    without_rope = {key: value for key, value in head.config.items() if key not in ROPE_KEYS}
    parts: tuple[tuple[str, Callable[[Interpretation], object], Interpretation, str], ...] = (
        (
            "taps",
            lambda one: [*one.taps],
            replace(head, taps=export.taps),
            "write the trained taps in the engine's own numbering",
        ),
        (
            "norm",
            lambda one: {key: one.config.get(key) or False for key in norm_keys},
            head.with_config(**{key: export.config.get(key) for key in norm_keys}),
            "export again with all flags of the norms",
        ),
        (
            "vocabulary map",
            lambda one: f"{len(one.ids)} tokens {one.ids[:4].tolist()}... (hash {digest_of(one.ids)})",
            replace(head, ids=export.ids),
            "d2t must hold target id minus draft id, in the order of lm_head's rows",
        ),
        (
            "RoPE base",
            lambda one: asdict(one.rope),
            replace(head, config=without_rope | export.rope.to_config()),
            "write the trained RoPE, both as rope_theta and in rope_parameters",
        ),
    )
    for category, value, changed, advice in parts:
        if value(head) != value(export):
            found, right = f"EXPORT has {value(export)}", f"HEAD was trained with {value(head)}"
            yield Trial(changed, Finding(category, found, right, advice))


def digest_of(ids: Tensor) -> str:
    return hashlib.sha256(str(ids.tolist()).encode()).hexdigest()[:8]


def compare_weights(
    head: Interpretation, export: Interpretation, measure: Measure, right: list[float]
) -> Iterator[Finding]:
    """Compare weights and number format together, because a format shows in the weights, as rounding."""
    changed = replace(head, tensors=head.tensors | export.tensors, dtype=export.stored_dtype)
    cost, wrong = cost_of(changed, right, measure)
    if wrong is None:
        yield Finding("files", "EXPORT's weights do not fit", "HEAD's own weights", "export again", cost)
        return
    if not all(bool(tensor.isfinite().all()) for tensor in export.tensors.values()):
        return  # lint names the tensor
    shared = head.tensors.keys() & export.tensors.keys()
    difference, name = max((relative_difference(head.tensors[each], export.tensors[each]), each) for each in shared)
    is_rounding = difference <= MAX_ROUNDING
    if is_rounding and mean(right) - mean(wrong) < MIN_DTYPE_LOSS:
        return
    category = "dtype" if is_rounding else "norm" if "norm" in name else "files"
    advice = "export in a wider format" if is_rounding else "export HEAD again, or name the head that EXPORT is made of"
    dtype = str(export.tensors[name].dtype).removeprefix("torch.")
    found = f"EXPORT's {name} is {dtype} and differs from HEAD's by {difference:.1%}"
    yield Finding(category, found, "HEAD's own weights", advice, cost)


def relative_difference(mine: Tensor, its: Tensor) -> float:
    """The Euclidean norm of the difference over the norm of the first."""
    return float((mine.double() - its.double()).norm() / mine.double().norm().clamp(min=TINY))


def cost_of(changed: Interpretation, right: list[float], measure: Measure) -> tuple[str, list[float] | None]:
    """The cost of the change in words, and the accuracies with it: None if the head cannot be computed."""
    try:
        wrong = measure(changed)
    except ValueError as error:
        return f"everything, because the head cannot be computed ({error})", None
    return largest_loss(right, wrong), wrong


def largest_loss(right: list[float], wrong: list[float]) -> str:
    """The accuracy at the depth that loses most, in words."""
    level = max(range(len(right)), key=lambda level: right[level] - wrong[level])
    return f"accuracy at depth {level + 1} is {wrong[level]:.2f} instead of {right[level]:.2f}"


def variants_of(head: Interpretation, frozen: FrozenTarget) -> Iterator[Trial]:
    """Every variant of a head alone worth trying; each differs from `head` in one thing."""
    kind = KINDS[head.kind]
    if kind.reads_tokens:
        yield from shift_variants(head)
    if kind.has_rope:
        yield from rope_variants(head, frozen)
    if kind.chooses_taps:
        yield from tap_variants(head, frozen)
        yield from map_variants(head)
    for category, flags in kind.flags.items():
        yield from (flag_variant(head, category, flag) for flag in flags)


def shift_variants(head: Interpretation) -> Iterator[Trial]:
    for shift, token in ((-1, "token t"), (1, "token t+2")):
        right = f"the head guesses best with {token} beside feature t"
        advice = "train again with the tokens one position ahead of the features"
        if shift == 1:
            advice += " (in training the head saw the token it had to guess)"
        finding = Finding("token shift", "drafting pairs feature t with token t+1", right, advice)
        yield Trial(replace(head, shift=shift), finding)


def tap_variants(head: Interpretation, frozen: FrozenTarget) -> Iterator[Trial]:
    taps, last = head.taps, frozen.config.num_layers
    orders = set(permutations(taps)) if len(taps) <= 3 else {taps[::-1]}
    moved = {tuple(tap + by for tap in taps) for by in (-1, 1)}
    for other in sorted((orders | moved) - {taps}):
        if min(other) >= 0 and max(other) <= last:
            found, right = f"the head reads hidden_states {list(taps)}", f"it guesses best with {list(other)}"
            advice = "write these into config.json, or train again with taps in ascending order"
            yield Trial(replace(head, taps=other), Finding("taps", found, right, advice))


def flag_variant(head: Interpretation, category: str, flag: str) -> Trial:
    now, other = ("true", "false") if head.config.get(flag) else ("false", "true")
    right, advice = f"the head guesses best with {other}", f"set {flag} to {other} in config.json"
    changed = head.with_config(**{flag: other == "true"})
    return Trial(changed, Finding(category, f"{flag} is {now}", right, advice))


def rope_variants(head: Interpretation, frozen: FrozenTarget) -> Iterator[Trial]:
    now, target = head.rope, frozen.config.rope
    ropes = [target, *(Rope(theta=base) for base in COMMON_ROPE_BASES)]
    for number, other in enumerate(ropes):
        if other != now and other not in ropes[:number]:
            found, right = f"base {now.theta:g} ({now.kind})", f"it guesses best with {other.theta:g} ({other.kind})"
            finding = Finding("RoPE base", found, right, "write that rope_theta into config.json")
            yield Trial(head.with_config(**other.to_config()), finding, preferred=other == target)


def map_variants(head: Interpretation) -> Iterator[Trial]:
    columns = torch.arange(len(head.ids))
    if torch.equal(head.ids, columns):
        return
    ids = head.ids - columns
    found = f"d2t read as offsets gives token ids {head.ids[:4].tolist()}..."
    right = f"read as token ids it gives {ids[:4].tolist()}..., and the head guesses best with those"
    finding = Finding("vocabulary map", found, right, "write target id minus draft id into d2t")
    yield Trial(replace(head, ids=ids), finding)


def find_better_variants(
    head: Interpretation, frozen: FrozenTarget, measure: Measure, tokens: int
) -> Iterator[Finding]:
    """The variants that are clearly better on this many tokens, best first; each is tried on top of those before it."""
    now, reported = measure(head), set[str]()
    chance = 2 * (0.25 / tokens) ** 0.5  # two standard errors of an accuracy near one half
    while True:
        trials = [trial for trial in variants_of(head, frozen) if trial.finding.category not in reported]
        scored = [(measure(trial.head), trial) for trial in trials]
        if not scored:
            return
        best, chosen = max(scored, key=lambda pair: mean(pair[0]))
        for score, other in scored:
            is_alike = other.finding.category == chosen.finding.category and mean(score) >= mean(best) - chance
            if is_alike and other.preferred:
                best, chosen = score, other
        if mean(best) < mean(now) + max(MIN_GAIN, MIN_RELATIVE_GAIN * mean(now), chance):
            return
        yield replace(chosen.finding, cost=largest_loss(best, now))
        reported.add(chosen.finding.category)
        head, now = chosen.head, best
