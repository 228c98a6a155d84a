"""The private interfaces of torch, Python and Linux that packing layers, and compiling them in the background, need."""

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, wraps
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx._symbolic_trace import _Patcher

REGIONS = Path("/proc/self/maps")  # Linux only
HUGE_PAGE_BYTES = 2**21
MADV_COLLAPSE = 25  # named so by Linux 6.1 and later; earlier ones refuse it


@cache
def patch_only_tracing_thread() -> None:
    """Let torch.fx, while it traces, change `nn.Module` only for the thread that traces.

    A tracer replaces `nn.Module.__call__` in the whole process, and a pass in another thread would fail in it.
    """
    patch_method: Any = _Patcher.patch_method

    def patch(patcher: _Patcher, kind: type, name: str, new: Callable[..., Any], deduplicate: bool = True) -> None:
        original, tracing_thread = getattr(kind, name), threading.get_ident()

        @wraps(new)
        def by_thread(*args: Any, **kwargs: Any) -> Any:
            return (new if threading.get_ident() == tracing_thread else original)(*args, **kwargs)

        patch_method(patcher, kind, name, by_thread, deduplicate)

    setattr(_Patcher, "patch_method", patch)  # noqa: B010 - mypy refuses to assign to a method


@contextmanager
def no_untraceable_warnings() -> Iterator[None]:
    """Within this context torch does not log a layer that cannot be traced, which is not an error here."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def lower_priority() -> None:
    """Let the other threads of this process go before the calling one, where a thread has its own priority."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def end_thread(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread and wait for its end: a daemon thread that Python ends inside compiled code would
    end the process with an error."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    thread.join()


def mapped_regions() -> Iterator[tuple[int, int, str, bool, str]]:
    """This process's memory on Linux: its first address, the one after its last, access, whether it is a file, name."""
    for line in REGIONS.read_text().splitlines() if REGIONS.is_file() else ():
        span, access, _, _, file, *name = line.split()
        start, end = (int(address, 16) for address in span.split("-"))
        yield start, end, access, file != "0", "".join(name)


def advise(start: int, end: int, grain: int, advice: int) -> None:
    """Advise Linux about the whole pages, of `grain` bytes, between two addresses."""
    start, end = -(-start // grain) * grain, end // grain * grain
    if start < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


def use_huge_pages() -> None:
    """Move this process's memory to pages of 2 MB: products with packed weights take about a tenth less time.

    Linux moves about 0.6 GB/s, while other threads read and write.
    """
    for start, end, access, is_file, name in mapped_regions():
        if access == "rw-p" and not is_file and name in ("", "[heap]"):
            advise(start, end, HUGE_PAGE_BYTES, MADV_COLLAPSE)


def mapped_files() -> list[tuple[int, int]]:
    """Where files are mapped in this process's memory on Linux: first address, and the one after the last."""
    return [(start, end) for start, end, _, is_file, _ in mapped_regions() if is_file]


def forget_file_pages(weights: Sequence[Tensor], files: Sequence[tuple[int, int]]) -> None:
    """Let weights that lie in mapped `files` take up no memory until they are read again."""
    for start, size in ((weight.data_ptr(), weight.nbytes) for weight in weights):
        if any(first <= start and start + size <= last for first, last in files):
            advise(start, start + size, mmap.PAGESIZE, mmap.MADV_DONTNEED)
