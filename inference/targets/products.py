"""Products with 16-bit weights by a kernel of our own, compiled once for this processor (products.cpp).

A pass over a few tokens reads each weight once, so it takes as long as they come from memory: with one to eight tokens
0.6 to 0.8 of what FBGEMM and oneDNN take (docs/LOG.md). In float32 the weights may be float16 or bfloat16 numbers.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from headstart.common.process import user_cache

SOURCE = Path(__file__).with_name("products.cpp")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++20", "-fopenmp", "-shared", "-fPIC")
MOST_TOKENS = {torch.float32: 256, torch.bfloat16: 24}  # in a pass; with more, torch's own products are faster
WEIGHTS = {torch.float32: (torch.float16, torch.bfloat16), torch.bfloat16: (torch.bfloat16,)}  # by dtype of the states


def compiler() -> str | None:
    """The C++ compiler of this machine."""
    return shutil.which(os.environ.get("CXX", "g++"))


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None without a compiler, and where it fails, which is said once."""
    found = compiler()
    if found is None or sys.platform != "linux":
        return None
    includes = str(Path(torch.__file__).parent / "include")
    command = [found, *FLAGS, f"-DCPU_CAPABILITY_{torch.backends.cpu.get_cpu_capability()}", "-I", includes]
    processor = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].partition("flags")[2]
    made_of = shlex.join(command), SOURCE.read_text(), torch.__version__, processor
    path = user_cache("products") / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]}.so"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            subprocess.run([*command, str(SOURCE), "-o", str(partial)], check=True, capture_output=True, text=True)
            partial.replace(path)
        return ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        said = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr[-200:])
        print(f"decoding with torch's products, as {found} does not compile {SOURCE.name}: {said}", file=sys.stderr)
    except OSError as error:
        print(f"decoding with torch's products, as those of headstart cannot be used: {error}", file=sys.stderr)
    return None


class Product:
    """The product with one layer's weights, for states of a dtype."""

    def __init__(self, dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [out, in] is a 16-bit one of `WEIGHTS`."""
        loaded = library()
        assert loaded is not None
        self.weight, self.bias = weight.contiguous(), bias
        self.wide_bias = None if bias is None else bias.float().contiguous()
        self.kernel = loaded[f"{dtype}_{weight.dtype}".replace("torch.", "")]
        self.kernel.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3
        self.kernel.restype = None
        self.addresses = self.weight.data_ptr(), None if self.wide_bias is None else self.wide_bias.data_ptr()
        self.most = MOST_TOKENS[dtype]

    def __call__(self, inputs: Tensor) -> Tensor:
        """The states times the weights, [..., out]."""
        outputs, size = self.weight.shape
        tokens = inputs.numel() // size
        if tokens > self.most:
            return functional.linear(inputs, self.weight.to(inputs.dtype), self.bias)
        inputs = inputs.contiguous()
        found = inputs.new_empty((*inputs.shape[:-1], outputs))
        self.kernel(inputs.data_ptr(), *self.addresses, found.data_ptr(), tokens, size, outputs)
        return found


def exact_weight(weight: Tensor) -> Tensor | None:
    """The weight in a 16-bit dtype in which none of its numbers changes, that states of its own dtype are timed by."""
    for dtype in WEIGHTS.get(weight.dtype, ()):
        found = weight.to(dtype)
        if torch.equal(found.to(weight.dtype), weight):
            return found
    return None
