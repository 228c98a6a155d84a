"""Settings of this process: how its allocator keeps memory, and where it caches what it can make again."""

import ctypes
import os
import platform
from pathlib import Path

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # mallopt parameters, from glibc's malloc.h
MIB = 2**20


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for later allocations; returns False with another C library or on failure.

    By default it returns large blocks at once, and a forward pass on a CPU spends a tenth of its time getting the same
    pages back and clearing them. Blocks above 32 MiB, glibc's limit, are still returned.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    kept = {TRIM_THRESHOLD: 1024 * MIB, TOP_PAD: 64 * MIB, MMAP_THRESHOLD: 32 * MIB}
    return [mallopt(option, size) for option, size in kept.items()] == [1] * len(kept)


def user_cache(kind: str) -> Path:
    """A cache folder shared by all runs of a user, in HEADSTART_CACHE or headstart/ of the system's cache folder."""
    usual = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "headstart"
    return Path(os.environ.get("HEADSTART_CACHE", usual)).expanduser() / kind
