"""Optional speed behind one door. On a CPU: packed weights, products in C++, compiled layers, the number of threads; on
a GPU: Triton kernels. And the search for operations whose bits differ.

Code elsewhere imports only the names below, from here.
"""

from headstart.inference.kernels.attention import can_attend, ordered_attention
from headstart.inference.kernels.fast_layers import (
    FusedForward,
    epsilon,
    gated_on_gpu,
    join_linears,
    norms_on_gpu,
    offset_of,
    own_layers_of,
    residuals_on_gpu,
    whole_of,
)
from headstart.inference.kernels.fast_model import (
    FastForm,
    fast_form,
    float32_is_as_fast,
    is_packed_linear,
)
from headstart.inference.kernels.matmul import kernels_on_gpu
from headstart.inference.kernels.outside_graph import attention_outside_graph, is_tracing
from headstart.inference.kernels.products import SCALE_INPUTS, EightBits, has_kernels, remember_eight_bits
from headstart.inference.kernels.threads import Threads
from headstart.inference.kernels.trace import Difference, Trace

__all__ = [
    "SCALE_INPUTS",
    "Difference",
    "EightBits",
    "FastForm",
    "FusedForward",
    "Threads",
    "Trace",
    "attention_outside_graph",
    "can_attend",
    "epsilon",
    "fast_form",
    "float32_is_as_fast",
    "gated_on_gpu",
    "has_kernels",
    "is_packed_linear",
    "is_tracing",
    "join_linears",
    "kernels_on_gpu",
    "norms_on_gpu",
    "offset_of",
    "ordered_attention",
    "own_layers_of",
    "remember_eight_bits",
    "residuals_on_gpu",
    "whole_of",
]
