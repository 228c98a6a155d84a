"""Loads the shared fixtures where tests run: to import torch takes seconds, and the process that starts the workers of
pytest-xdist runs none.
"""

import os
import sys

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Tests and checked modules are compiled once, and not by each worker and each command that a test starts.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("shared_fixtures")
