"""Which members of a matrix of tests are fast: enough for each kind to be tried; `make test-all` runs the rest too."""

from collections import Counter
from collections.abc import Collection, Iterable
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
        if isinstance(item, pytest.Function) and item.get_closest_marker("each_value") and not is_slow(item):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for members in matrices.values():
        shown: Counter[tuple[str, int]] = Counter()
        left = {member: {(name, id(value)) for name, value in member.callspec.params.items()} for member in members}
        while left:
            # The one with the most new values; of these, the one whose other values were shown least.
            best = max(left, key=lambda each: (len(left[each] - shown.keys()), -sum(shown[at] for at in left[each])))
            if left[best] <= shown.keys():
                break
            shown.update(left.pop(best))
        for member in left:
            member.add_marker(pytest.mark.slow)


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None
