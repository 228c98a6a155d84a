"""Memory of the process."""

import ctypes
import platform

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # glibc's names for mallopt, see malloc.h
MIB = 2**20


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory for the next allocation; whether it can (glibc alone is asked).

    By default it gives large blocks back to the system at once. A pass of a model on a CPU then spends a tenth of its
    time on having the same pages given and cleared again. Blocks above 32 MiB, glibc's limit, are still given back.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    kept = {TRIM_THRESHOLD: 1024 * MIB, TOP_PAD: 64 * MIB, MMAP_THRESHOLD: 32 * MIB}
    return [mallopt(option, size) for option, size in kept.items()] == [1] * len(kept)
