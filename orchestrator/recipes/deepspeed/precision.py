"""DeepSpeed's JSON: number formats and loss scaling."""

from __future__ import annotations

import math
from typing import Any

from orchestrator.recipes.base import Draft, Setting, Settings, custom
from orchestrator.recipes.deepspeed.layout import FILE
from orchestrator.recipes.gaps import TORCH_SCALER, refuse_fp8, takes_torch_scaler, unable
from trials.legality.rules import holds_plain
from trials.spec import LossScale

_AUTOCAST, _AUTOCAST_DTYPE = f"{FILE}:torch_autocast.enabled", f"{FILE}:torch_autocast.dtype"
_SAFE = f"{FILE}:torch_autocast.lower_precision_safe_modules"
"""Modules whose weights and gradients travel in 16 bits under autocast; by default the matrix products."""
_BF16, _BF16_OVERFLOW = f"{FILE}:bf16.enabled", f"{FILE}:bf16.check_grad_overflow"
_FP16 = f"{FILE}:fp16.enabled"
_STATIC_SCALE, _POWER = f"{FILE}:fp16.loss_scale", f"{FILE}:fp16.initial_scale_power"
_WINDOW, _HYSTERESIS = f"{FILE}:fp16.loss_scale_window", f"{FILE}:fp16.hysteresis"
_CONSECUTIVE = f"{FILE}:fp16.consecutive_hysteresis"
_COMMUNICATION, _ACCUMULATED = f"{FILE}:communication_data_type", f"{FILE}:data_types.grad_accum_dtype"
_SHORT = {"bfloat16": "bf16", "float16": "fp16"}


def _write_precision(draft: Draft) -> None:
    refuse_fp8(draft)
    precision, layout = draft.candidate.precision, draft.candidate.layout
    is_half = precision.level == "O2"
    draft.settings |= {
        _AUTOCAST: precision.level in ("O1", "O1-fp8"),
        _BF16: is_half and precision.dtype == "bfloat16",
        _FP16: is_half and precision.dtype == "float16",
    }
    if draft.settings[_AUTOCAST]:
        _write_autocast(draft, precision.dtype)
    if is_half:
        reduced = _SHORT[precision.dtype] if holds_plain(layout) or layout.world_size == 1 else "fp32"
        draft.settings |= {_COMMUNICATION: reduced, _ACCUMULATED: reduced}
    if draft.settings[_BF16]:
        draft.settings[_BF16_OVERFLOW] = False
    if precision.loss_scale is not None:
        _write_loss_scale(draft, precision.loss_scale)


def _write_autocast(draft: Draft, dtype: str) -> None:
    """Write autocast. Nothing travels in 16 bits, as in the runner; but DeepSpeed scales losses only for what does."""
    draft.settings[_AUTOCAST_DTYPE] = dtype
    if dtype == "bfloat16":
        draft.settings[_SAFE] = []
    else:
        draft.refuse("precision.level", "gradients of matrix products are reduced in float16, where fp32 was measured")


def _write_loss_scale(draft: Draft, scale: LossScale) -> None:
    if not draft.settings[_FP16]:
        if not takes_torch_scaler(draft):
            draft.warn("precision.loss_scale", "under autocast DeepSpeed takes torch's GradScaler as it is")
        return
    power = round(math.log2(scale.initial))
    draft.settings |= {
        _STATIC_SCALE: 0 if scale.dynamic else scale.initial,
        _POWER: power,
        _WINDOW: scale.growth_interval,
        _HYSTERESIS: scale.backoff_interval,
        _CONSECUTIVE: True,
    }
    if scale.dynamic and scale.initial != 2.0**power:
        draft.warn("precision.loss_scale.initial", f"DeepSpeed starts from a power of two: 2^{power}")
    for factor in ("growth_factor", "backoff_factor"):
        path = f"precision.loss_scale.{factor}"
        if draft.values[path] != TORCH_SCALER[path]:
            draft.refuse(path, f"DeepSpeed doubles and halves; asked for {draft.values[path]}")


def _read_precision(settings: Settings) -> dict[str, Any]:
    level, dtype = "O0", "float32"
    if settings[_AUTOCAST]:
        level, dtype = "O1", settings[_AUTOCAST_DTYPE]
    elif settings[_BF16] or settings[_FP16]:
        level, dtype = "O2", "bfloat16" if settings[_BF16] else "float16"
    scale = _read_loss_scale(settings) if dtype == "float16" else {}
    return {"precision.level": level, "precision.dtype": dtype, **scale}


def _read_loss_scale(settings: Settings) -> dict[str, Any]:
    """Read the loss scale, which DeepSpeed doubles and halves, like torch."""
    if _POWER not in settings:
        return TORCH_SCALER
    static = settings[_STATIC_SCALE]
    return TORCH_SCALER | {
        "precision.loss_scale.initial": static or 2.0 ** settings[_POWER],
        "precision.loss_scale.growth_interval": settings[_WINDOW],
        "precision.loss_scale.backoff_interval": settings[_HYSTERESIS],
        "precision.loss_scale.dynamic": not static,
    }


SETTINGS: tuple[Setting, ...] = (
    custom(
        ("precision.level", "precision.dtype", "precision.loss_scale"),
        (
            _AUTOCAST,
            _AUTOCAST_DTYPE,
            _SAFE,
            _BF16,
            _BF16_OVERFLOW,
            _FP16,
            _STATIC_SCALE,
            _POWER,
            _WINDOW,
            _HYSTERESIS,
            _CONSECUTIVE,
            _COMMUNICATION,
            _ACCUMULATED,
        ),
        _write_precision,
        _read_precision,
    ),
    unable("precision.white", "precision.black", message="autocast's own lists of operators cannot be changed"),
)
