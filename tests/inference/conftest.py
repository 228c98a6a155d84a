"""Smaller targets for the tests of this folder: most of their time goes into a target's layers. Imports are inside, as
in tests/conftest.py.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

TAPS = (0, 1, 2)


@pytest.fixture(scope="session")
def make_model(make_model: Any) -> Any:
    """The shared factory, but with 2 layers where none are asked for."""
    return partial(make_model, num_hidden_layers=2)


@pytest.fixture(scope="session")
def target(make_model: Any) -> Any:
    """A target with 2 layers, grouped queries and no end token; shared between tests, so do not change it."""
    from headstart.inference.targets.model import TargetModel

    return TargetModel(make_model(), TAPS)


@pytest.fixture(scope="session")
def make_head(make_head: Any) -> Any:
    """The shared factory, but with the taps of `target`."""

    def make(kind: str = "eagle3", **shape: Any) -> Any:
        return make_head(kind, **shape if kind in ("eagle1", "medusa") else {"taps": TAPS, **shape})

    return make


@pytest.fixture(scope="session")
def head(make_head: Any) -> Any:
    return make_head()


@pytest.fixture(scope="session")
def seeing_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from seeing_target import build_seeing_target

    return build_seeing_target(tmp_path_factory.mktemp("seeing"), num_hidden_layers=3)


@pytest.fixture(scope="session")
def texts(target: Any, make_head: Any) -> Any:
    from scripted import REQUESTS, texts_of

    return texts_of(target, REQUESTS, make_head)
