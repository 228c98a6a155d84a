"""Other readings of a head's own files, each tried alone: one that guesses clearly better is what it was trained as."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import fmean as mean

import torch

from heads.frozen import FrozenTarget
from heads.target_config import Rope
from inference.doctor.export_parts import DTYPE_COST
from inference.doctor.findings import Finding, drop
from inference.doctor.reading import NORM_FLAGS, Measure, Reading

COMMON_BASES = (1e4, 5e5, 1e6)
GAIN, RELATIVE_GAIN = 0.05, 0.1  # of the mean accuracy, from which on another reading is the better one


@dataclass(frozen=True)
class Otherwise:
    """Another reading of the head's own files, and what it would mean if it were the better one."""

    category: str
    found: str
    right: str
    reading: Reading
    advice: str
    likely: bool = False  # of readings that do as well this one is meant


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
    for flag in NORM_FLAGS:
        on = bool(reading.config.get(flag))
        found, right = f"{flag} is {str(on).lower()}", f"the head guesses best with {str(not on).lower()}"
        advice = f"set {flag} to {str(not on).lower()} in config.json"
        yield Otherwise("norm", found, right, reading.with_config(**{flag: not on}), advice)


def other_ropes(reading: Reading, frozen: FrozenTarget) -> Iterator[Otherwise]:
    own = reading.rope
    ropes = [frozen.config.rope, *(Rope(theta=base) for base in COMMON_BASES)]
    for number, other in enumerate(ropes):
        if other != own and other not in ropes[:number]:
            found, right = f"base {own.theta:g} ({own.kind})", f"it guesses best with {other.theta:g} ({other.kind})"
            advice = "write that rope_theta into config.json"
            likely = other == frozen.config.rope
            yield Otherwise("RoPE base", found, right, reading.with_config(**other.to_config()), advice, likely)


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
        as_well = [(score, one) for score, one in scored if mean(score) >= mean(best) - chance]
        alike = [pair for pair in as_well if pair[1].category == other.category and pair[1].likely]
        best, other = next(iter(alike), (best, other))
        if mean(best) < mean(now) + max(GAIN, RELATIVE_GAIN * mean(now), chance):
            return
        yield Finding(other.category, other.found, other.right, drop(best, now), other.advice)
        named.add(other.category)
        reading, now = other.reading, best


def number_format(reading: Reading, measure: Measure) -> Iterator[Finding]:
    """Does the head lose in the number format that it is stored in?"""
    dtype = reading.stored_dtype
    if dtype in (None, torch.float32):
        return
    wide, stored = measure(replace(reading, dtype=torch.float32)), measure(replace(reading, dtype=dtype))
    if mean(wide) - mean(stored) >= DTYPE_COST:
        name = str(dtype).removeprefix("torch.")
        yield Finding("dtype", f"computed in {name}", "float32", drop(wide, stored), "serve it in a wider format")
