"""Fixtures for the tests of heads' files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exported import exported

from headstart.heads.base import DraftHead


@pytest.fixture
def export_as(target_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """export_as(head, name, run="", **fields): the folder of an export for the deep target, from tmp_path / run."""

    def make(head: DraftHead, name: str, run: str = "", **fields: Any) -> Path:
        return exported(head, tmp_path / run, target_folder, name, **fields)

    return make
