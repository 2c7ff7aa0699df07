"""Least work of an operator call in a trace: FLOPs, and bytes of its operands. Standard library only.

A call needs at least its FLOPs over the device's peak, and at least its bytes over its bandwidth (Williams et al.,
Roofline, 2009). Traces have the shapes of inputs, not of outputs, so the bytes are a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class LeastWork(NamedTuple):
    """FLOPs and bytes that a call cannot do without."""

    flops: float
    num_bytes: float


_BYTES = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "int": 4, "bool": 1,
    "unsigned char": 1, "signed char": 1, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
}  # fmt: skip
"""Bytes of an element by the type's name in traces."""

_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}
"""Matrix products, and the position of the left matrix among their inputs."""
_ATTENTION = "aten::_scaled_dot_product_"
_STREAMS = (
    "add", "sub", "mul", "div", "neg", "exp", "pow", "rsqrt", "sqrt", "where", "masked_fill", "addcmul", "copy",
    "clone", "fill", "zero", "silu", "silu_backward", "gelu", "gelu_backward", "relu", "threshold_backward", "sigmoid",
    "sigmoid_backward", "tanh", "tanh_backward", "_softmax", "_softmax_backward_data", "_log_softmax",
    "_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm",
    "_fused_rms_norm_backward", "native_dropout", "mean", "sum",
)  # fmt: skip
"""Operators that read and write each element about once, in place or not: only their bytes count."""


def work_of(name: str, arguments: Mapping[str, Any]) -> LeastWork | None:
    """Return the least work of a call with these arguments of its event; None if unknown."""
    shapes, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(shapes, Sequence) or not isinstance(types, Sequence) or len(shapes) != len(types):
        return None
    sizes = [
        math.prod(shape) * _BYTES[type_]
        for shape, type_ in zip(shapes, types, strict=True)
        if type_ in _BYTES and all(isinstance(length, int) for length in shape)
    ]
    flops = 0.0
    if name in _PRODUCTS:
        left, right = shapes[_PRODUCTS[name] :][:2]
        flops = 2.0 * math.prod(left) * right[-1]
    elif name.startswith(_ATTENTION):
        flops = _attention_flops(name, shapes)
    elif name.removeprefix("aten::").removesuffix("_") not in _STREAMS:
        return None
    return LeastWork(flops, float(sum(sizes))) if sizes else None


def _attention_flops(name: str, shapes: Sequence[Sequence[int]]) -> float:
    """Count two products forward, and five backward, which computes the scores again; the full square."""
    is_backward = "backward" in name
    query, key = shapes[1 if is_backward else 0 :][:2]
    return (10.0 if is_backward else 4.0) * math.prod(query) * key[-2]
