"""How many threads decode on a CPU: no more than the cores that other processes leave.

The threads of a product wait for each other. One thread on a busy core delays every product, so fewer threads can be
faster.
"""

import os
import time

import psutil
import torch

CHECK_SECONDS = 0.5  # the system counts in hundredths of a second


class Threads:
    """Adapts the number of torch threads to the load of other processes."""

    def __init__(self) -> None:
        self.most = self.count = torch.get_num_threads()
        self.before = core_seconds() if self.most > 1 else (0.0, 0.0, 0.0)

    def follow(self) -> None:
        """Set the number, if it is time to check the load again."""
        if torch.get_num_threads() != self.count:  # set by the user
            self.most = self.count = torch.get_num_threads()
        if self.most == 1 or time.monotonic() < self.before[0] + CHECK_SECONDS:
            return
        now = core_seconds()
        seconds, busy, own = (after - before for after, before in zip(now, self.before, strict=True))
        self.before = now
        free = round(len(cores()) - (busy - own) / seconds)
        self.set(max(1, min(self.most, free)))

    def restore(self) -> None:
        self.set(self.most)

    def set(self, count: int) -> None:
        if count != self.count:
            torch.set_num_threads(count)
            self.count = count


def cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(psutil.cpu_count() or 1)]


def core_seconds() -> tuple[float, float, float]:
    """The time, and the busy seconds of these cores so far, for all processes and for this one.

    Niced processes are not counted.
    """
    each = psutil.cpu_times(percpu=True)
    busy = sum(each[core].user + each[core].system for core in cores() if core < len(each))
    return time.monotonic(), busy, time.process_time()
