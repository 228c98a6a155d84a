"""Loads the shared fixtures where tests run: to import torch takes seconds, and the process that starts the workers of
pytest-xdist runs none.
"""

import gc
import os
import sys

import pytest
from matrix import keep_each_value


def pytest_configure(config: pytest.Config) -> None:
    # Tests and checked modules are compiled once, and not by each worker and each command that a test starts.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if not config.getoption("numprocesses", None):
        gc.disable()  # imports and collection make objects that stay, half a million of them
        config.pluginmanager.import_plugin("shared_fixtures")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    keep_each_value(items)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
