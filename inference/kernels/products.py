"""Products of hidden states with weights in 32, 16 and 8 bits, by our own kernels, compiled once for this processor.

For up to a dozen tokens they take little longer than reading the weights from memory (docs/lab/LOG.md). A token's
product has the same bits in every pass. The kernels are in products.cpp.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy
import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor, nn
from torch.nn import functional

from headstart.common.process import user_cache

SOURCES = [Path(__file__).with_name(name) for name in ("products.cpp", "attention.cpp", "matmul.cpp", "vectors.h")]
TILE_SIZE = 32  # inputs, and outputs, of a block of bfloat16 weights
SCALE_INPUTS = 16  # inputs whose 8-bit weights share a factor; 32 in most number formats
ARCH_PRCTL, REQUEST_STATE, TILE_DATA = 158, 0x1023, 18  # the system call for the registers of tiles
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++20", "-fopenmp", "-shared", "-fPIC")


def cpp_compiler() -> str | None:
    """This machine's C++ compiler, which Inductor uses too."""
    return shutil.which(os.environ.get("CXX", "g++"))


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None without a compiler, and where it fails, which is printed once."""
    if sys.platform != "linux":
        return None
    compiler = cpp_compiler()
    if compiler is None:
        print(
            "using torch's products, which are slower and round by the number of tokens; for our own install g++",
            file=sys.stderr,
        )
        return None
    home, capability = Path(torch.__file__).parent, torch.backends.cpu.get_cpu_capability().replace(" ", "_")
    openmp = [*home.glob("lib/libgomp*"), *home.parent.glob("torch.libs/libgomp*")]  # torch's own, to share its threads
    names = [each.name for each in SOURCES[:3]]  # not paths, so that each clone finds what another compiled
    command = [compiler, *FLAGS, f"-DCPU_CAPABILITY_{capability}", "-I", str(home / "include"), *names]
    command += ["-Wl,--as-needed", *map(str, openmp[:1]), str(home / "lib" / "libtorch_cpu.so")]  # for its exp and tanh
    try:
        processor = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].partition("flags")[2]
        inputs = shlex.join(command), [each.read_text() for each in SOURCES], torch.__version__, processor
        path = user_cache("products") / f"{hashlib.sha256(repr(inputs).encode()).hexdigest()[:24]}.so"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial, folder = path.with_suffix(f".{os.getpid()}.partial"), SOURCES[0].parent
            print("compiling headstart's kernels, once", file=sys.stderr, flush=True)
            subprocess.run([*command, "-o", str(partial)], check=True, capture_output=True, text=True, cwd=folder)
            partial.replace(path)
        loaded = ctypes.CDLL(str(path))
        arguments = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3
        scales = [ctypes.c_void_p] * 2 + [ctypes.c_int64, ctypes.c_bool]
        for name in ("float32", "float16", "bfloat16", "all_float16", "all_bfloat16", "tiles", "int8"):
            if (kernel := getattr(loaded, name, None)) is not None:
                kernel.argtypes, kernel.restype = arguments + (scales if name == "int8" else []), None
        pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        attend = [*[pointer] * 5, ctypes.c_bool, *[pointer] * 2, *[real] * 2]
        kinds = {"attend": attend, "matmul": [pointer] * 4, "normalize": [*[pointer] * 3, *[size] * 2, real]}
        for name, types in kinds.items():
            for number in ("float32", "float16", "bfloat16"):
                kernel = getattr(loaded, f"{name}_{number}")
                kernel.argtypes, kernel.restype = types, None
        return loaded
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr[-200:])
        print(
            f"decoding with torch's products, as {compiler} does not compile headstart's: {reason}",
            file=sys.stderr,
        )
    except (OSError, RuntimeError) as error:  # no home folder is a RuntimeError
        print(f"using torch's products, as headstart's cannot be used: {error}", file=sys.stderr)
    return None


@cache
def has_tiles() -> bool:
    """Whether this processor has tiles for products in bfloat16, and Linux allows them."""
    loaded = library()
    return hasattr(loaded, "tiles") and ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_STATE, TILE_DATA) == 0


def has_kernels() -> bool:
    """Whether our kernels are there."""
    return library() is not None


def kernel_name() -> str:
    """The identity of the compiled kernels, which decide the costs of a step."""
    loaded = library()
    return "torch" if loaded is None else Path(loaded._name).stem


@dataclass(frozen=True)
class EightBits:
    """A weight in one of GGUF's formats of 8 to 4 bits: numbers * factors + offsets, in float32.

    A block of inputs shares a factor and, in some formats, an offset.
    """

    numbers: Int8[Tensor, "out in"]
    factors: Float[Tensor, "out blocks"]  # float16, or float32 where float16 would round
    offsets: Float[Tensor, "out blocks"] | None

    @classmethod
    def of(
        cls, weight: Float32[Tensor, "out in"], factors: Float32[Tensor, "out few"], offsets: Float32[Tensor, "out few"]
    ) -> "EightBits | None":
        """The weight in this form, if it is exact; each factor and offset belongs to `SCALE_INPUTS` inputs."""
        blocks = weight.unflatten(1, (-1, SCALE_INPUTS)) - offsets.unsqueeze(-1)
        numbers = (blocks / factors.masked_fill(factors == 0, 1).unsqueeze(-1)).round().clamp(-128, 127).to(torch.int8)
        scales = [factors, offsets]
        if all(torch.equal(each[:, ::2], each[:, 1::2]) for each in scales):
            scales = [each[:, ::2] for each in scales]
        if all(torch.equal(each.half().float(), each) for each in scales):
            scales = [each.half() for each in scales]
        factors, offsets = (each.contiguous() for each in scales)
        form = cls(numbers.flatten(1), factors, offsets if offsets.any() else None)
        return form if torch.equal(form.weight(), weight) else None

    @classmethod
    def joined(cls, parts: Sequence["EightBits | None"]) -> "EightBits | None":
        """One weight with the outputs of all these; None unless they have the same form."""
        present = [part for part in parts if part is not None]
        if len(present) < len(parts) or len({part.form for part in present}) > 1:
            return None
        offsets = [part.offsets for part in present if part.offsets is not None]
        numbers, factors = (torch.cat([getattr(part, name) for part in present]) for name in ("numbers", "factors"))
        return cls(numbers, factors, torch.cat(offsets) if offsets else None)

    @property
    def form(self) -> str:
        """The types of the numbers and their scales, and how many inputs share a scale."""
        scales = "factors" if self.offsets is None else "factors and offsets"
        return f"{self.numbers.dtype}, {self.factors.dtype} {scales} of {self.shared}"

    @property
    def shared(self) -> int:
        """How many inputs share a factor."""
        return self.numbers.shape[1] // self.factors.shape[1]

    def weight(self) -> Float32[Tensor, "out in"]:
        weight = self.numbers.unflatten(1, (-1, self.shared)) * self.factors.float().unsqueeze(-1)
        return (weight if self.offsets is None else weight + self.offsets.float().unsqueeze(-1)).flatten(1)


class Product:
    """The product with one layer's weights."""

    def __init__(self, weight: Tensor | EightBits, bias: Tensor | None, is_half: bool = False) -> None:
        """`weight` [out, in] is in 32, 16 or 8 bits, `bias` [out] in float32.

        Inputs and products are float32 or, if `is_half`, in the weight's dtype.
        """
        loaded = library()
        assert loaded is not None
        form = weight if isinstance(weight, EightBits) else None
        numbers = weight.numbers if isinstance(weight, EightBits) else weight
        self.outputs, self.size = numbers.shape
        self.form = str(numbers.dtype) if form is None else form.form
        tiled = is_half and numbers.dtype == torch.bfloat16 and self.size % TILE_SIZE == 0 and has_tiles()
        width, together = (TILE_SIZE, 2) if tiled else (loaded.width(), 1)
        parts = [numbers] if form is None else [numbers, form.factors, form.offsets]
        self.panels = [None if part is None else in_panels(part, width, together) for part in parts]
        self.bias = bias
        first, *scales, last = (None if part is None else part.data_ptr() for part in [*self.panels, bias])
        self.addresses = first, last
        self.scales = [] if form is None else [*scales, form.shared, form.factors.dtype == torch.float32]
        name = str(numbers.dtype).removeprefix("torch.")
        self.kernel = getattr(loaded, "tiles" if tiled else f"all_{name}" if is_half else name)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Inputs [..., in] times the weights: [..., out], in the inputs' dtype."""
        inputs = inputs.contiguous()
        products = inputs.new_empty((*inputs.shape[:-1], self.outputs))
        sizes = inputs.numel() // self.size, self.size, self.outputs
        self.kernel(inputs.data_ptr(), *self.addresses, products.data_ptr(), *sizes, *self.scales)
        return products


def in_panels(rows: Tensor, width: int, together: int) -> Tensor:
    """Rows of numbers [out, size] in a kernel's reading order: panels of `width` rows, `together` columns at a time."""
    if missing := -len(rows) % width:  # `pad` would copy whole panels, too
        rows = functional.pad(rows, (0, 0, 0, missing))
    return rows.unflatten(0, (-1, width)).unflatten(-1, (-1, together)).transpose(1, 2).contiguous()


def exact_weight(linear: nn.Linear) -> Tensor | EightBits:
    """A float32 layer's weight in the fewest bits, 8, 16 or 32, in which it is exact."""
    weight, known = linear.weight.detach().contiguous(), eight_bits_of(linear.weight)
    if known is not None and torch.equal(known.weight(), weight):
        return known
    if not numpy.bitwise_or.reduce(weight.view(torch.int32).numpy(), axis=None) & 0xFFFF:
        return weight.view(torch.bfloat16)[:, 1::2]  # the lower halves of all numbers are zero
    halved = (weight.to(dtype) for dtype in (torch.float16, torch.bfloat16))
    return next((half for half in halved if torch.equal(half.float(), weight)), weight)


def eight_bits_of(weight: Tensor) -> EightBits | None:
    """The 8-bit form of a weight, if `remember_eight_bits` noted one."""
    return getattr(weight, "eight_bits", None)


def remember_eight_bits(weight: Tensor, form: EightBits | None) -> None:
    vars(weight)["eight_bits"] = form
