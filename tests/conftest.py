"""Loads the shared fixtures where tests run: to import torch takes seconds, and the process that starts the workers of
pytest-xdist runs none.
"""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("shared_fixtures")
