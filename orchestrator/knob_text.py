"""Knob values as short text: for parameters, tables and messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trials.codec import digest
from trials.spec import FullRecompute, LossScale, NoRecompute, Precision

DTYPE_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def plain(value: Any) -> str | int | float | bool:
    """A knob value as a scalar, different for different values: ``full:4``, ``O1-bf16``."""
    if isinstance(value, Precision):
        return precision_text(value)
    if isinstance(value, NoRecompute):
        return "none"
    if isinstance(value, FullRecompute):
        return f"full:{value.num_layers}"
    if isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"not a knob value: {value!r}")


def precision_text(precision: Precision) -> str:
    """``O0``, ``O1-bf16``; a loss scale other than the default adds a tag derived from its numbers."""
    if precision.level == "O0":
        return "O0"
    text = f"{precision.level}-{DTYPE_SHORT[precision.dtype]}"
    custom = precision.loss_scale not in (None, LossScale())
    return f"{text}~{digest(precision.loss_scale)[:6]}" if custom else text


def show_pattern(pattern: Mapping[str, tuple[Any, ...]]) -> str:
    """``tp 2, precision O1-bf16|O2-bf16``."""
    return ", ".join(f"{name} {'|'.join(str(plain(v)) for v in values)}" for name, values in pattern.items())
