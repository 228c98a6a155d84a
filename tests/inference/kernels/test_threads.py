"""Laws of the number of threads: no more than the cores that other processes leave, and what a user sets stands."""

from collections.abc import Iterator

import pytest
import torch

from headstart.inference.kernels import threads
from headstart.inference.kernels.threads import Threads


@pytest.fixture(autouse=True)
def number() -> Iterator[None]:
    """Four threads, as on four cores; the tests' own number comes back."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("busy", "own", "count"), [(0.2, 0.1, 4), (4, 4, 4), (3, 2, 3), (4, 2.2, 2), (4, 0.1, 1)])
def test_threads_are_no_more_than_the_cores_that_others_leave(busy, own, count, monkeypatch) -> None:
    """`busy` are the cores at work in a second, `own` those of them that work for this process."""
    looks = iter([(0.0, 0.0, 0.0), (1.0, busy, own), (2.0, 2 * busy, 2 * own), (3.0, 2 * busy, 2 * own)])
    monkeypatch.setattr(threads, "core_seconds", lambda: next(looks))
    monkeypatch.setattr(threads, "cores", lambda: [0, 1, 2, 3])
    times = iter([0.3, 1.0, 2.0, 3.0])
    monkeypatch.setattr(threads.time, "monotonic", lambda: next(times))
    found = Threads()
    found.follow()  # too early to look
    assert torch.get_num_threads() == 4
    for _ in range(2):
        found.follow()
        assert torch.get_num_threads() == count
    found.follow()  # the others have ended
    assert torch.get_num_threads() == 4


def test_a_number_that_somebody_sets_stands_and_a_look_is_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Threads()
    found.set(2)
    found.restore()
    assert torch.get_num_threads() == 4
    torch.set_num_threads(1)
    found.follow()
    found.restore()
    assert torch.get_num_threads() == 1
    first, second = threads.core_seconds(), threads.core_seconds()
    assert all(after >= before for after, before in zip(second, first, strict=True))
    assert threads.cores()
