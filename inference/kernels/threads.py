"""How many threads decode on a CPU: no more than the cores that other processes leave.

The threads of a product wait for each other. One thread on a busy core delays every product, so fewer threads can be
faster.
"""

import os
import time

import psutil
import torch

LOOK_SECONDS = 0.5  # between looks; the system counts in hundredths of a second


class Threads:
    """Sets the number of torch threads by the load from other processes."""

    def __init__(self) -> None:
        self.most = self.count = torch.get_num_threads()
        self.before = look() if self.most > 1 else (0.0, 0.0, 0.0)

    def follow(self) -> None:
        """Set the number, if it is time to look again."""
        if torch.get_num_threads() != self.count:  # set by the user
            self.most = self.count = torch.get_num_threads()
        if self.most == 1 or time.monotonic() < self.before[0] + LOOK_SECONDS:
            return
        now = look()
        seconds, busy, own = (after - before for after, before in zip(now, self.before, strict=True))
        self.before = now
        left = round(len(cores()) - (busy - own) / seconds)
        self.set(max(1, min(self.most, left)))

    def restore(self) -> None:
        self.set(self.most)

    def set(self, count: int) -> None:
        if count != self.count:
            torch.set_num_threads(count)
            self.count = count


def cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(psutil.cpu_count() or 1)]


def look() -> tuple[float, float, float]:
    """The time, and the seconds that these cores have worked for all processes and for this one.

    Niced processes are not counted.
    """
    each = psutil.cpu_times(percpu=True)
    busy = sum(each[core].user + each[core].system for core in cores() if core < len(each))
    return time.monotonic(), busy, time.process_time()
