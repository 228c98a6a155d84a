"""Compare an export with its head part by part (taps, norms, vocabulary map, RoPE, weights) and measure each alone."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from statistics import fmean as mean
from typing import Any

import torch
from torch import Tensor

from headstart.heads.target_config import Rope
from headstart.inference.doctor.findings import Finding, largest_loss
from headstart.inference.doctor.interpretation import NORM_FLAGS, Interpretation, Measure

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
TINY = 1e-30  # the size of weights that are all zero
MAX_ROUNDING = 0.3  # relative difference of weights that a coarse number format can explain
MIN_DTYPE_LOSS = 0.02  # loss of mean accuracy that is reported; less is the normal price of a narrower format


@dataclass(frozen=True)
class ComparedPart:
    """One part of a head in which its export may differ."""

    category: str
    same: Callable[[Interpretation, Interpretation], bool]  # do head and export agree?
    show: Callable[[Interpretation], str]
    take: Callable[[Interpretation, Interpretation], Interpretation]  # the head with this part of the export
    advice: str


def norm_settings(head: Interpretation) -> dict[str, Any]:
    """The keys of config.json that concern norms; an absent flag is off."""
    flags = {flag: bool(head.config.get(flag)) for flag in NORM_FLAGS}
    return {**flags, "rms_norm_eps": head.config.get("rms_norm_eps")}


def tensors_of(head: Interpretation, norms: bool) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in head.tensors.items() if ("norm" in name) == norms}


def take_norms(head: Interpretation, export: Interpretation) -> Interpretation:
    tensors = tensors_of(head, norms=False) | tensors_of(export, norms=True)
    return replace(head.with_config(**norm_settings(export)), tensors=tensors)


def take_rope(head: Interpretation, export: Interpretation) -> Interpretation:
    kept = {key: value for key, value in head.config.items() if key not in ROPE_KEYS}
    return replace(head, config=kept).with_config(**Rope.from_config(export.config).to_config())


def same_norms(head: Interpretation, export: Interpretation) -> bool:
    """Are norms equal up to rounding, which is reported as a fault of the number format?"""
    mine, its = tensors_of(head, norms=True), tensors_of(export, norms=True)
    shapes = [{name: tensor.shape for name, tensor in norms.items()} for norms in (mine, its)]
    if norm_settings(head) != norm_settings(export) or shapes[0] != shapes[1]:
        return False
    difference, size = distance(mine, its)
    return difference <= MAX_ROUNDING * size


def show_norms(head: Interpretation) -> str:
    on = [flag for flag in NORM_FLAGS if head.config.get(flag)]
    weights = tensors_of(head, norms=True)
    size = distance(weights, {})[1]
    return f"{', '.join(on) or 'no flag'}, {len(weights)} norm weights (size {size:.3g})"


def show_ids(head: Interpretation) -> str:
    digest = hashlib.sha256(str(head.ids.tolist()).encode()).hexdigest()[:8]
    return f"{len(head.ids)} tokens {head.ids[:4].tolist()}... (hash {digest})"


PARTS = (
    ComparedPart(
        "taps",
        lambda head, export: head.taps == export.taps,
        lambda head: str(list(head.taps)),
        lambda head, export: replace(head, taps=export.taps),
        "write the trained taps in the engine's own numbering",
    ),
    ComparedPart(
        "norm", same_norms, show_norms, take_norms, "export again with the flags and all weights of the norms"
    ),
    ComparedPart(
        "vocabulary map",
        lambda head, export: torch.equal(head.ids, export.ids),
        show_ids,
        lambda head, export: replace(head, ids=export.ids),
        "d2t must hold target id minus draft id, in the order of lm_head's rows",
    ),
    ComparedPart(
        "RoPE base",
        lambda head, export: head.rope == export.rope,
        lambda head: str(asdict(head.rope)),
        take_rope,
        "write the trained RoPE, both as rope_theta and in rope_parameters",
    ),
)


def compare_parts(head: Interpretation, export: Interpretation, measure: Measure) -> Iterator[Finding]:
    """Yield a finding for each part that differs; its cost is measured with every other part as it was trained."""
    right = measure(head)
    for part in PARTS:
        if part.same(head, export):
            continue
        try:
            cost = largest_loss(right, measure(part.take(head, export)))
        except ValueError as error:
            cost = f"everything, because the head cannot be computed ({error})"
        its, mine = f"EXPORT has {part.show(export)}", f"HEAD was trained with {part.show(head)}"
        yield Finding(part.category, its, mine, cost, part.advice)
    yield from compare_weights(head, export, measure, right)


def compare_weights(
    head: Interpretation, export: Interpretation, measure: Measure, right: list[float]
) -> Iterator[Finding]:
    """Compare weights and number format together, because a format shows in the weights, as rounding or overflow."""
    mine, its = tensors_of(head, norms=False), tensors_of(export, norms=False)
    formats = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in its.values()}))
    norms = tensors_of(export if same_norms(head, export) else head, norms=True)
    changed = replace(head, tensors=norms | its, dtype=export.stored_dtype)
    try:
        wrong = measure(changed)
    except ValueError as error:
        cost = f"everything, because the head cannot be computed ({error})"
        yield Finding("files", "EXPORT's weights do not fit", "HEAD's own weights", cost, "export again")
        return
    cost = largest_loss(right, wrong)
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
