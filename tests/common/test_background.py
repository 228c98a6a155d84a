"""Laws of the background thread: tasks run in order, and no error is lost."""

import threading
import time
from functools import partial

import pytest

from headstart.data_pipelines.features.features import BackgroundThread


def test_without_pending_tasks_the_caller_does_the_work() -> None:
    threads: list[int] = []
    with BackgroundThread(max_pending=0) as background:
        background.add(lambda: threads.append(threading.get_ident()))
        assert threads == [threading.get_ident()]


def test_all_tasks_are_done_in_order_when_the_block_ends() -> None:
    done: list[int] = []

    def work(number: int) -> None:
        time.sleep(0.001)
        done.append(number)

    with BackgroundThread(max_pending=3) as background:
        for number in range(10):
            background.add(partial(work, number))
    assert done == list(range(10))


@pytest.mark.parametrize("more", [0, 1, 5])
def test_an_error_is_raised_at_the_next_task_or_at_the_end(more: int) -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("the disk is full")

    def add_all() -> None:
        with BackgroundThread(max_pending=1) as background:
            background.add(fail)
            for number in range(more):
                background.add(partial(done.append, number))

    with pytest.raises(ValueError, match="the disk is full"):
        add_all()
    assert done == []
