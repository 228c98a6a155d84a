"""Which members of a matrix of tests are fast: enough for each kind to be tried; `make test-all` runs the rest too."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def slow_unless(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """The values of a parameter, or tuples of several's, with all but the fast ones marked slow."""
    return [value if value in fast else slow(value) for value in values]


def slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)


def keep_each_value(items: list[pytest.Item]) -> None:
    """Of each test marked `each_value`, leave members fast until every value of a parameter is in one of them."""
    matrices: dict[str, list[pytest.Function]] = {}
    for item in items:
        is_slow = item.get_closest_marker("slow") is not None
        if isinstance(item, pytest.Function) and item.get_closest_marker("each_value") and not is_slow:
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for members in matrices.values():
        kept = covering([member.callspec.params for member in members])
        for place, member in enumerate(members):
            if place not in kept:
                member.add_marker(pytest.mark.slow)


def covering(members: list[Mapping[str, Any]]) -> set[int]:
    """Places of few members that show each value of each parameter; equal values are one object."""
    shown: Counter[tuple[str, int]] = Counter()
    left = {place: {(name, id(value)) for name, value in each.items()} for place, each in enumerate(members)}
    while left:
        # The one with the most new values; of these, the one whose other values were shown least.
        best = max(left, key=lambda place: (len(left[place] - shown.keys()), -sum(shown[at] for at in left[place])))
        if left[best] <= shown.keys():
            break
        shown.update(left.pop(best))
    return {*range(len(members))} - {*left}
