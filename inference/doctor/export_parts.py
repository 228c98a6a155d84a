"""Where an export differs from its head: taps, norms, vocabulary map, RoPE, weights, each measured alone."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from statistics import fmean as mean
from typing import Any

import torch
from torch import Tensor

from heads.target_config import Rope
from inference.doctor.findings import Finding, drop
from inference.doctor.reading import NORM_FLAGS, Measure, Reading

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
ROUNDED = 0.3  # of the weights' size: a difference below is the rounding of a coarse format
DTYPE_COST = 0.02  # of the mean accuracy: less is the price of a shorter format


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
    flags = {flag: bool(reading.config.get(flag)) for flag in NORM_FLAGS}
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
    on = [flag for flag in NORM_FLAGS if reading.config.get(flag)]
    weights = tensors_of(reading, norms=True)
    size = distance(weights, {})[1]
    return f"{', '.join(on) or 'no flag'}, {len(weights)} weights of norms (size {size:.3g})"


def show_ids(reading: Reading) -> str:
    digest = hashlib.sha256(str(reading.ids.tolist()).encode()).hexdigest()[:8]
    return f"{len(reading.ids)} tokens {reading.ids[:4].tolist()}... (hash {digest})"


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
        lambda head, export: head.rope == export.rope,
        lambda reading: str(asdict(reading.rope)),
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
    changed = replace(head, tensors=norms | its, dtype=export.stored_dtype)
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
