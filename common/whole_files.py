"""Write files whole or not at all: readers never see half a file, and a failed write leaves nothing."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headstart.common.os_errors import PARTIAL, naming


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`: it is renamed to `path` at the end, or removed if anything fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    with removed_on_failure(partial), naming(path):
        yield partial
        partial.replace(path)


def check_folder(folder: Path) -> None:
    """Make a folder, and raise OSError if no file can be written there: before the work that is to be written."""
    probe = folder / "probe"
    with whole_file(probe) as partial:
        partial.touch()
    probe.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """Remove a file or folder if the work on it fails or is interrupted."""
    try:
        yield
    except BaseException:
        with suppress(OSError):  # the first error says more
            remove(path)
        raise


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
