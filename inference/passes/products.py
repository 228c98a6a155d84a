"""Products of states with 16-bit and 8-bit weights, by kernels of our own that are compiled once for this processor.

For up to a dozen tokens they take little longer than the weights take to come from memory, 0.6 of the time of FBGEMM's
and oneDNN's (docs/LOG.md), and a token's have the same bits in every pass. The kernels are in products.cpp.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float16, Float32, Int8
from torch import Tensor
from torch.nn import functional

from headstart.common.process import user_cache

SOURCE = Path(__file__).with_name("products.cpp")
TILED = 32  # inputs, and outputs, of a block of bfloat16 weights
SCALED = 32  # inputs whose 8-bit weights share a factor
SMALLEST = 2.0**-24  # the smallest positive number of float16
ARCH_PRCTL, REQUEST_STATE, TILE_DATA = 158, 0x1023, 18  # how a program asks Linux for the registers of tiles
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++20", "-fopenmp", "-shared", "-fPIC")


def cpp_compiler() -> str | None:
    """This machine's C++ compiler, which Inductor takes, too."""
    return shutil.which(os.environ.get("CXX", "g++"))


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None without a compiler, and where it fails, which is said once."""
    found = cpp_compiler()
    if found is None or sys.platform != "linux":
        return None
    home, capability = Path(torch.__file__).parent, torch.backends.cpu.get_cpu_capability().replace(" ", "_")
    openmp = [*home.glob("lib/libgomp*"), *home.parent.glob("torch.libs/libgomp*")]  # torch's own, to share its threads
    command = [found, *FLAGS, f"-DCPU_CAPABILITY_{capability}", "-I", str(home / "include"), str(SOURCE)]
    command += ["-Wl,--as-needed", *map(str, openmp[:1])]
    try:
        processor = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].partition("flags")[2]
        made_of = shlex.join(command), SOURCE.read_text(), torch.__version__, processor
        path = user_cache("products") / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]}.so"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            subprocess.run([*command, "-o", str(partial)], check=True, capture_output=True, text=True)
            partial.replace(path)
        loaded = ctypes.CDLL(str(path))
        for name in ("float16", "bfloat16", "int8", "tiles"):
            if (kernel := getattr(loaded, name, None)) is not None:
                kernel.argtypes, kernel.restype = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3, None
        return loaded
    except subprocess.CalledProcessError as error:
        said = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr[-200:])
        print(f"decoding with torch's products, as {found} does not compile {SOURCE.name}: {said}", file=sys.stderr)
    except (OSError, RuntimeError) as error:  # no home folder is a RuntimeError
        print(f"decoding with torch's products, as those of headstart cannot be used: {error}", file=sys.stderr)
    return None


@cache
def has_tiles() -> bool:
    """Whether products of bfloat16 states with bfloat16 weights can be computed here."""
    loaded = library()
    return hasattr(loaded, "tiles") and ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_STATE, TILE_DATA) == 0


def kernel_name() -> str:
    """The kernel that is used here; another one has other costs."""
    loaded = library()
    return "torch" if loaded is None else Path(loaded._name).stem


@dataclass(frozen=True)
class EightBits:
    """A weight as whole numbers and a factor for `SCALED` inputs each, as GGUF's Q8_0 holds it; their product is it."""

    numbers: Int8[Tensor, "out in"]
    factors: Float16[Tensor, "out scaled"]

    @classmethod
    def of(cls, weight: Float32[Tensor, "out in"]) -> "EightBits | None":
        """The weight in this form, if it is exact with 127 (Q8_0) or 8 (Q4_0) as the largest number of each block."""
        if weight.shape[1] % SCALED:
            return None
        for most in (127, 8):
            few = cls._with_largest(weight[:1], most)  # most weights have no such form
            if few is not None and (found := cls._with_largest(weight, most)) is not None:
                return found
        return None

    @classmethod
    def _with_largest(cls, weight: Tensor, most: int) -> "EightBits | None":
        blocks = weight.unflatten(1, (-1, SCALED))
        factors = (blocks.abs().amax(-1) / most).half()
        numbers = (blocks / factors.float().clamp(min=SMALLEST).unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
        found = cls(numbers.flatten(1), factors)
        return found if torch.equal(found.weight(), weight) else None

    def weight(self) -> Float32[Tensor, "out in"]:
        """The numbers themselves: a factor has 11 bits, so no product is rounded."""
        blocks = self.numbers.unflatten(1, (-1, SCALED)).float()
        return (blocks * self.factors.float().unsqueeze(-1)).flatten(1)


class Product:
    """The product with one layer's weights."""

    def __init__(self, weight: Tensor | EightBits, bias: Tensor | None, tiled: bool = False) -> None:
        """`weight` [out, in] is of float16, bfloat16 or 8 bits, `bias` [out] of float32.

        States are float32; with `tiled` they are bfloat16, as the weight is, and `in` is a multiple of `TILED`.
        """
        loaded = library()
        assert loaded is not None
        numbers = weight.numbers if isinstance(weight, EightBits) else weight
        self.outputs, self.size = numbers.shape
        width, together = (TILED, 2) if tiled else (loaded.width(), 1)
        self.panels = in_panels(numbers, width, together)
        if isinstance(weight, EightBits):
            factors = in_panels(weight.factors, width, together)
            self.panels = torch.cat([self.panels.flatten(), factors.flatten().view(torch.int8)])
        self.bias = bias
        self.addresses = self.panels.data_ptr(), None if bias is None else bias.data_ptr()
        self.kernel = getattr(loaded, "tiles" if tiled else str(numbers.dtype).removeprefix("torch."))

    def __call__(self, inputs: Tensor) -> Tensor:
        """States [..., in] times the weights: [..., out], in their dtype."""
        inputs = inputs.contiguous()
        found = inputs.new_empty((*inputs.shape[:-1], self.outputs))
        tokens = inputs.numel() // self.size
        self.kernel(inputs.data_ptr(), *self.addresses, found.data_ptr(), tokens, self.size, self.outputs)
        return found


def in_panels(rows: Tensor, width: int, together: int) -> Tensor:
    """Rows of numbers, [out, size], in the order in which a kernel reads them: panels of `width` rows, `together`
    columns at a time."""
    panels = functional.pad(rows, (0, 0, 0, -len(rows) % width)).unflatten(0, (-1, width))
    return panels.unflatten(-1, (-1, together)).transpose(1, 2).contiguous()


def exact_weight(weight: Tensor) -> Tensor | EightBits | None:
    """A float32 weight in 8 bits, or in a 16-bit dtype, in which none of its numbers changes, if there is one."""
    if library() is not None and (found := EightBits.of(weight)) is not None:
        return found
    halved = (weight.to(dtype) for dtype in (torch.float16, torch.bfloat16))
    return next((found for found in halved if torch.equal(found.float(), weight)), None)
