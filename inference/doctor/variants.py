"""Variants of how a head's own files are interpreted, each tried alone.

A variant that guesses clearly better is most likely what the head was trained with.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import fmean as mean

import torch

from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import Rope
from headstart.inference.doctor.export_parts import MIN_DTYPE_LOSS
from headstart.inference.doctor.findings import Finding, largest_loss
from headstart.inference.doctor.interpretation import NORM_FLAGS, Interpretation, Measure

COMMON_BASES = (1e4, 5e5, 1e6)
MIN_GAIN, MIN_RELATIVE_GAIN = 0.05, 0.1  # mean accuracy that a variant must gain to be reported


@dataclass(frozen=True)
class Variant:
    """Another interpretation of the head's files, and the finding to report if it guesses better."""

    category: str
    found: str
    right: str
    interpretation: Interpretation
    advice: str
    preferred: bool = False  # report this one if others do equally well


def variants_of(head: Interpretation, frozen: FrozenTarget) -> Iterator[Variant]:
    """Every variant worth trying; each differs from `head` in one thing."""
    if head.kind != "medusa":  # Medusa heads read no tokens and have no positions
        yield from shift_variants(head)
        yield from rope_variants(head, frozen)
    if head.kind in ("eagle3", "block"):
        yield from tap_variants(head, frozen)
        yield from map_variants(head)
    if head.kind == "eagle3":
        yield from norm_variants(head)
    if head.kind == "block":
        yield from slot_variants(head)


def shift_variants(head: Interpretation) -> Iterator[Variant]:
    for shift in {-1, 0, 1} - {head.shift}:
        beside = f"token t{1 + shift:+d}".replace("+0", "")
        found, right = (
            "drafting pairs feature t with token t+1",
            f"the head guesses best with {beside} beside feature t",
        )
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


def norm_variants(head: Interpretation) -> Iterator[Variant]:
    for flag in NORM_FLAGS:
        on = bool(head.config.get(flag))
        found, right = f"{flag} is {str(on).lower()}", f"the head guesses best with {str(not on).lower()}"
        advice = f"set {flag} to {str(not on).lower()} in config.json"
        yield Variant("norm", found, right, head.with_config(**{flag: not on}), advice)


def slot_variants(head: Interpretation) -> Iterator[Variant]:
    """The other slot convention: off by one slot, a block head guesses nothing right."""
    now = bool(head.config.get("sample_from_anchor"))
    found, right = f"sample_from_anchor is {str(now).lower()}", f"the head guesses best with {str(not now).lower()}"
    advice = f"set sample_from_anchor to {str(not now).lower()} in config.json"
    yield Variant("slots", found, right, head.with_config(sample_from_anchor=not now), advice)


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
        name = str(dtype).removeprefix("torch.")
        yield Finding(
            "dtype", f"computed in {name}", "float32", largest_loss(wide, stored), "serve it in a wider format"
        )
