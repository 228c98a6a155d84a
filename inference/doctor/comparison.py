"""An export compared with its head: one part is changed at a time, and the accuracy is measured again."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from statistics import fmean as mean

from torch import Tensor

from headstart.heads.kinds.checkpoint import KINDS
from headstart.inference.doctor.findings import Finding
from headstart.inference.doctor.interpretation import Interpretation, Measure

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
TINY = 1e-30  # the size of weights that are all zero
MAX_ROUNDING = 0.3  # relative difference of weights that a coarse number format can explain
MIN_DTYPE_LOSS = 0.02  # loss of mean accuracy that is reported; less is the normal price of a narrower format


def compare_parts(head: Interpretation, export: Interpretation, measure: Measure) -> Iterator[Finding]:
    """Yield a finding for each part that differs; its cost is measured with every other part as it was trained."""
    right = measure(head)
    norm_keys = (*KINDS[head.kind].norm_flags, "rms_norm_eps")
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
            replace(head, config=head.config | {key: export.config.get(key) for key in norm_keys}),
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
            found, right_value = f"EXPORT has {value(export)}", f"HEAD was trained with {value(head)}"
            yield Finding(category, found, right_value, advice, cost_of(changed, right, measure)[0])
    yield from compare_weights(head, export, measure, right)


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
