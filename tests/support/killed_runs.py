"""Training that dies in one of its steps, as a killed process does."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headstart.trainers import loop


class Killed(BaseException):
    """Derives from BaseException, so that no code of ours catches it."""


@contextmanager
def killed_in(step: int) -> Iterator[None]:
    """Training inside dies in its step of this number, counted from 1."""
    steps, train_step = itertools.count(1), loop.train_step

    def dying(*arguments: Any) -> Any:
        if next(steps) == step:
            raise Killed
        return train_step(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", dying)
        with pytest.raises(Killed):
            yield
