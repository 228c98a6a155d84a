"""The process keeps freed memory for later allocations."""

import platform
import subprocess
import sys

import pytest

from headstart.common import process

PAGES = 62_000  # pages of all blocks together
COUNT = """
import resource, runpy, sys

if sys.argv[2] == "kept":
    assert runpy.run_path(sys.argv[1])["keep_freed_memory"]()
sizes = [2**20 * number for number in range(8, 24)]  # bytes; 62 thousand pages of 4 KiB
def use():
    blocks = [bytearray(b"1") * size for size in sizes]
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def fresh_pages(mode: str) -> int:
    command = [sys.executable, "-c", COUNT, process.__file__, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be configured")
def test_freed_memory_is_reused_and_not_returned_to_the_system() -> None:
    """Allocate the same blocks ten times: by default, their pages come from the system each time."""
    assert fresh_pages("kept") < PAGES / 2 < 5 * PAGES < fresh_pages("default")
