"""The private interfaces of torch, Python and Linux that compiling layers in a background thread needs."""

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from pathlib import Path
from typing import Any

from torch.fx._symbolic_trace import _Patcher

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


def use_huge_pages() -> None:
    """Move this process's memory to pages of 2 MB: products with packed weights take about a tenth less time.

    Linux moves about 0.6 GB/s, while other threads read and write.
    """
    regions = Path("/proc/self/maps")
    if sys.platform != "linux" or not regions.is_file():
        return
    advise = ctypes.CDLL(None).madvise
    for line in regions.read_text().splitlines():
        span, access, _, _, file, *name = line.split()
        start, end = (int(address, 16) for address in span.split("-"))
        start, end = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if access == "rw-p" and file == "0" and name in ([], ["[heap]"]) and start < end:
            advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)
