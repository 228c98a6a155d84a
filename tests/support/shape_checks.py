"""Checks of tensor shapes in the tests: the first calls of each function in each file, as checking all costs as much
time as the tests themselves; in each test where the slow ones run too. Functions without shapes are left to mypy.

shared_fixtures.py imports this before any of our modules, whose functions jaxtyping's import hook decorates.
"""

import dataclasses
import functools
from collections.abc import Callable
from inspect import isclass
from typing import Any, get_args

import jaxtyping

jaxtyped = jaxtyping.jaxtyped
period, checked_calls = 0, 0  # the number of the file or test that runs, and how many calls of a function are checked


def check_first(calls: int) -> None:
    """Check so many calls of each function from here on."""
    global period, checked_calls
    period, checked_calls = period + 1, calls


def first_calls(checked: Callable[[], Callable[..., Any]], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is checked in its first calls of each period; `checked` makes its checked form when needed."""
    last, calls = 0, 0

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal last, calls
        if last != period:
            last, calls = period, 0
        if calls == checked_calls:
            return plain(*args, **kwargs)
        calls += 1
        return checked()(*args, **kwargs)

    return call


def has_shapes(annotation: Any) -> bool:
    """Whether a part of a type is a tensor's dtype and shape."""
    if isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(has_shapes, get_args(annotation)))


def jaxtyped_at_first(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """`jaxtyping.jaxtyped` for functions and for the construction of dataclasses."""
    decorate = jaxtyped(*args, **kwargs)

    def decorated(found: Any) -> Any:
        fields = dataclasses.fields(found) if dataclasses.is_dataclass(found) else ()
        types = [field.type for field in fields] if isclass(found) else found.__annotations__.values()
        if not any(map(has_shapes, types)):
            return found
        if not isclass(found):
            return first_calls(functools.cache(lambda: decorate(found)), found)
        plain = found.__init__
        checked = decorate(found)
        if (own := checked.__init__) is not plain:
            checked.__init__ = first_calls(lambda: own, plain)
        return checked

    return decorated


jaxtyping.jaxtyped = jaxtyped_at_first  # type: ignore[assignment]
