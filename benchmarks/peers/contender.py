"""One contender of benchmarks/train_step.py: a process with its own Python that runs a training step on request.

It imports torch only, so that it runs in a peer's environment. It reads /proc, so it needs Linux.
"""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MIB = 2**20
NUM_TAPS = 3
OUTSIDE = 0.1  # scale of the lm_head's rows outside the draft vocabulary

Step = Callable[[], Tensor]  # forward and backward; returns the loss


@dataclass(frozen=True)
class Case:
    """Shapes of one training step; the second half of each sequence is supervised."""

    batch: int
    seq: int
    vocab: int
    draft_vocab: int
    hidden: int = 256
    num_heads: int = 8
    num_kv_heads: int = 4
    mlp: int = 688
    unroll: int = 7
    num_layers: int = 16  # of the target, which never runs: only its embedding, norm and lm_head are used
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    norms: bool = False  # EAGLE-3.1 has them
    optimizer: str | None = None  # whose update ends the step; None: forward and backward alone

    @property
    def num_tokens(self) -> int:
        return self.batch * self.seq

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.dtype]


@dataclass(frozen=True)
class Inputs:
    """A target's embedding, norm and lm_head, and a batch: the same for every contender. Draft id i is token i."""

    embedding: Tensor  # [vocab, hidden]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]
    tokens: Tensor  # [batch, seq]
    loss_mask: Tensor  # [batch, seq], bool
    taps: Tensor  # [batch, seq, 3 * hidden]
    last_hidden: Tensor  # [batch, seq, hidden], before the norm

    @classmethod
    def random(cls, case: Case) -> "Inputs":
        generator = torch.Generator(case.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=case.device, dtype=case.torch_dtype)

        lm_head = normal(case.vocab, case.hidden) / math.sqrt(case.hidden)
        # The target's choices fall into the draft vocabulary, as most do in practice: some contenders skip the other
        # positions and would look faster for that alone.
        lm_head[case.draft_vocab :] *= OUTSIDE
        mask = torch.zeros(case.batch, case.seq, dtype=torch.bool, device=case.device)
        mask[:, case.seq // 2 :] = True
        return cls(
            embedding=normal(case.vocab, case.hidden),
            norm=torch.ones(case.hidden, device=case.device, dtype=case.torch_dtype),
            lm_head=lm_head,
            tokens=torch.randint(case.vocab, (case.batch, case.seq), generator=generator, device=case.device),
            loss_mask=mask,
            taps=normal(case.batch, case.seq, NUM_TAPS * case.hidden),
            last_hidden=normal(case.batch, case.seq, case.hidden),
        )


def serve(make_step: Callable[[Case, Inputs], Step], packages: tuple[str, ...]) -> None:
    """Run a step for each line on stdin and answer with its cost in JSON; the case is in argv, versions come first.

    Raises ValueError if a loss is not finite.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # what libraries print must not mix with the answers
    case = Case(**json.loads(sys.argv[1]))
    torch.manual_seed(0)
    torch.set_num_threads(case.threads)
    step = make_step(case, Inputs.random(case))
    versions = {name: version(name) for name in ("torch", *packages)}
    say(answers, {"python": platform.python_version(), **versions})
    start = memory_in_use(case.device)
    for _ in sys.stdin:
        forget_peak(case.device)  # the peak of imports, or of compilation in the first step
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step()
        if case.device != "cpu":
            torch.cuda.synchronize()
        cost = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        if not math.isfinite(float(loss)):
            raise ValueError(f"the loss of a step is {float(loss)}")
        say(answers, {**cost, "start": start, "peak": peak_memory(case.device)})


def say(answers: Any, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def memory_in_use(device: str) -> float:
    """Memory in MiB: the process's resident memory on a CPU, the allocated tensors on CUDA."""
    return resident("VmRSS") if device == "cpu" else torch.cuda.memory_allocated() / MIB


def forget_peak(device: str) -> None:
    """Reset `peak_memory`."""
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
    else:
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: str) -> float:
    """The peak of `memory_in_use` since `forget_peak`, in MiB."""
    return resident("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated() / MIB


def resident(field: str) -> float:
    """A memory field of /proc/self/status, in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024
