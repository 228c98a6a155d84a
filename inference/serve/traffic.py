"""Finished requests in the server's memory, from which a head may learn, and the head that is served.

Nothing of it is written to disk here. The oldest requests go first when the memory is full, and all go after a while.
"""

import json
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any
from uuid import uuid4
from zlib import crc32

import torch
from jaxtyping import Float, Int
from safetensors.torch import save
from torch import Tensor

from headstart.inference.core.request import Sequence
from headstart.inference.engine.loop import DecodeLoop

JUDGES_ONE_IN = 8  # one prompt in eight judges heads and is never trained on
PAGE = 32 * 2**20  # bytes of an answer, or one request


def is_held_out(prompt: list[int]) -> bool:
    """Whether texts after this prompt judge heads; the same prompt is always on one side."""
    return crc32(array("q", prompt).tobytes()) % JUDGES_ONE_IN == 0


@dataclass(frozen=True)
class Finished:
    """The tokens of a finished request whose hidden states are known."""

    number: int
    at: float  # time.monotonic()
    tokens: Int[Tensor, " seq"]  # int32
    response: int  # index of the first token that the target wrote
    heldout: bool
    states: Float[Tensor, "seq tapped"]  # all that the target gives, the last one before the final norm

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + self.states.nbytes


class Traffic:
    """Finished requests within a budget of bytes and of seconds. The worker adds; other threads may read."""

    def __init__(self, memory: int, keep: float, taps: tuple[int, ...]) -> None:
        """`keep` is how many seconds a request is kept, `taps` are the target's."""
        self.memory, self.keep, self.taps = memory, keep, taps
        self.run = uuid4().hex  # numbers begin anew with each server
        self.finished: deque[Finished] = deque()
        self.number = self.num_bytes = self.tokens = 0  # the newest; held now; written by the target so far
        self._lock = Lock()

    def add(self, row: Sequence) -> None:
        """Take in a row whose text has ended; one without two known tokens of a response teaches nothing."""
        if row.trace is None or row.generation.error is not None or not row.generation.tokens:
            return
        states, start = row.trace.whole(), row.trace.start
        tokens = row.text[start:][: len(states)]  # a text may end within a step, and its last token was never read
        prompt = row.request.prompt
        heldout = is_held_out(prompt)
        response = len(prompt) - start
        if len(tokens) < response + 2:
            return
        copies = torch.tensor(tokens, dtype=torch.int32), states[: len(tokens)].clone()
        with self._lock:
            self.number += 1
            self.tokens += len(tokens) - response
            made = Finished(self.number, time.monotonic(), copies[0], response, heldout, copies[1])
            self.finished.append(made)
            self.num_bytes += made.num_bytes
        self.drop_old()

    def drop_old(self) -> None:
        """Drop what is too old, and the oldest until the rest fits."""
        with self._lock:
            oldest = time.monotonic() - self.keep
            while self.finished and (self.num_bytes > self.memory or self.finished[0].at < oldest):
                self.num_bytes -= self.finished.popleft().num_bytes

    def page(self, since: int) -> bytes:
        """The oldest requests after number `since`, as safetensors; their metadata says what is in them."""
        self.drop_old()
        with self._lock:
            newer = [each for each in self.finished if each.number > since]
        shown: list[Finished] = []
        size = 0
        for each in newer:
            size += each.num_bytes
            if shown and size > PAGE:
                break
            shown.append(each)
        about = [{"number": each.number, "response": each.response, "heldout": each.heldout} for each in shown]
        tensors = {f"{each.number}.tokens": each.tokens for each in shown}
        tensors |= {f"{each.number}.states": each.states for each in shown}
        return save(tensors, {"requests": json.dumps(about), "taps": json.dumps(self.taps), "run": self.run})


@dataclass
class Adaptation:
    """What a server with --adapt-memory keeps for a learner, and the head that it serves."""

    traffic: Traffic
    head: Path
    load: Callable[[Path], Callable[[], DecodeLoop]]  # in the worker's thread; ValueError if the head does not fit
    swaps: int = field(default=0)

    @property
    def version(self) -> int:
        """The number of the served head among the learner's; 0 for any other head."""
        return int(self.head.name) if self.head.name.isdecimal() else 0

    def facts(self) -> dict[str, Any]:
        traffic = self.traffic
        traffic.drop_old()
        return {
            "run": traffic.run,
            "head": str(self.head),
            "swaps": self.swaps,
            "requests": len(traffic.finished),
            "bytes": traffic.num_bytes,
            "tokens": traffic.tokens,
        }
