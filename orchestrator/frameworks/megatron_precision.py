"""Number formats as arguments of Megatron-LM: 16-bit weights, fp8 matmuls, and the loss scale of fp16."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.frameworks.spelling import Found, SettingsBuilder, row
from trials.legality import FP32_TINY
from trials.spec import LossScale

_FP8 = {"--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"}
"""8-bit matmuls as in level O2-fp8: e4m3 forward, e5m2 for gradients, scaled by the tensor's present maximum."""
_DTYPES = {"--bf16": "bfloat16", "--fp16": "float16"}
_SCALE = ("--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis", "--loss-scale")


def _write_precision(builder: SettingsBuilder) -> None:
    precision, layout = builder.candidate.precision, builder.candidate.layout
    if precision.base == "O1":
        builder.refuse("precision.level", "Megatron-LM has no autocast; its 16-bit formats correspond to level O2")
    if precision.level == "O2-fp8":
        builder.settings |= _FP8
    else:
        builder.drop(*_FP8)
    builder.drop(*(name for name, dtype in _DTYPES.items() if dtype != precision.dtype))
    builder.settings |= {name: True for name, dtype in _DTYPES.items() if dtype == precision.dtype}
    reduces_fp32 = layout.zero_stage >= 2 or layout.replicate_with == "fsdp2"
    if precision.dtype != "bfloat16":
        builder.drop("--grad-reduce-in-bf16")
    elif builder.is_export and not reduces_fp32:
        builder.settings["--grad-reduce-in-bf16"] = True
    if precision.dtype == "float16" and builder.is_export and reduces_fp32:
        builder.settings["--accumulate-allreduce-grads-in-fp32"] = True
    if precision.dtype == "float16":
        _write_loss_scale(builder, precision.loss_scale or LossScale())


def _write_loss_scale(builder: SettingsBuilder, scale: LossScale) -> None:
    builder.drop("--loss-scale", "--initial-loss-scale", "--loss-scale-window", "--hysteresis")
    if not scale.dynamic:
        builder.settings["--loss-scale"] = scale.initial
        return
    builder.settings["--initial-loss-scale"] = scale.initial
    if builder.is_export:
        builder.settings["--min-loss-scale"] = FP32_TINY
    builder.settings |= {"--loss-scale-window": scale.growth_interval, "--hysteresis": scale.backoff_interval}
    if not builder.is_export:
        return
    default = LossScale()
    for name in ("growth_factor", "backoff_factor"):
        if getattr(scale, name) != getattr(default, name):
            builder.refuse(f"precision.loss_scale.{name}", f"always {getattr(default, name)}")
    if scale.backoff_interval > 1:
        builder.warn(
            "precision.loss_scale.backoff_interval", "overflows do not need to be consecutive to shrink the scale"
        )


def _read_precision(found: Found) -> dict[str, Any]:
    dtype = next((dtype for name, dtype in _DTYPES.items() if found.is_on(name)), "float32")
    level = "O0" if dtype == "float32" else "O2"
    is_fp8 = dtype == "bfloat16" and all(found.get(name) == value for name, value in _FP8.items())
    for name in ("--fp8-format", "--fp4-format"):
        if (text := found.get(name)) and not (is_fp8 and name in _FP8):
            found.unread("precision", f"{name} {text}; everything else is in {dtype}")
    values: dict[str, Any] = {"precision.dtype": dtype, "precision.level": "O2-fp8" if is_fp8 else level}
    if dtype != "float16":
        return values
    if fixed := found.get("--loss-scale"):
        scale = LossScale(dynamic=False, initial=float(fixed))
    else:
        scale = LossScale(
            initial=float(found.get("--initial-loss-scale") or 2.0**32),
            growth_interval=int(float(found.get("--loss-scale-window") or 1000)),
            backoff_interval=int(found.get("--hysteresis") or 2),
        )
    return values | {f"precision.loss_scale.{name}": value for name, value in dataclasses.asdict(scale).items()}


ROW = row(
    ("precision.level", "precision.dtype", "precision.loss_scale"),
    (*_DTYPES, *_FP8, "--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32", *_SCALE),
    _write_precision,
    _read_precision,
)
