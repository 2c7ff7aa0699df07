"""MindFormers settings of number formats, data loading and kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.recipes.base import Draft, Setting, Settings, custom, lacking
from orchestrator.recipes.gaps import memory_savers, refuse_fp8
from orchestrator.recipes.mindformers.layout import CP, DP
from trials.spec import LossScale

_MODEL = "model.model_config"
COMPUTE = f"{_MODEL}.compute_dtype"
RESIDUAL = f"{_MODEL}.residual_dtype"
PARTS = tuple(f"{_MODEL}.{part}" for part in ("layernorm_compute_type", "softmax_compute_type", "rotary_dtype"))
WEIGHTS = f"{_MODEL}.param_init_type"
SCALE = "runner_wrapper.scale_sense"
WORKERS, PREFETCH = "train_dataset.num_parallel_workers", "train_dataset.prefetch_size"
FULL_BATCH, STRATEGY = "parallel.full_batch", "parallel.dataset_strategy"
_BY_MODULE = "formats are set for kinds of modules, not by lists of operators"
FLASH = f"{_MODEL}.use_flash_attention"


def _write_precision(draft: Draft) -> None:
    """Write number formats: weights stay fp32, as masters do; O1 keeps norms, softmax and residuals in fp32, too."""
    refuse_fp8(draft)
    precision = draft.candidate.precision
    parts = precision.dtype if precision.level == "O2" else "float32"
    draft.settings |= {COMPUTE: precision.dtype, WEIGHTS: "float32", RESIDUAL: parts}
    draft.settings |= dict.fromkeys(PARTS, parts)
    draft.settings[SCALE] = 1.0
    if precision.level == "O1":
        draft.warn("precision.level", _BY_MODULE)
    if precision.loss_scale is not None:
        _write_loss_scale(draft, precision.loss_scale)


def _write_loss_scale(draft: Draft, scale: LossScale) -> None:
    if not scale.dynamic:
        draft.settings[SCALE] = scale.initial
        return
    draft.settings |= {
        SCALE: {
            "type": "DynamicLossScaleUpdateCell",
            "loss_scale_value": scale.initial,
            "scale_factor": int(scale.growth_factor),
            "scale_window": scale.growth_interval,
        }
    }
    if scale.growth_factor != int(scale.growth_factor):
        draft.refuse("precision.loss_scale.growth_factor", "whole numbers only")
    if scale.backoff_factor * scale.growth_factor != 1.0:
        draft.refuse("precision.loss_scale.backoff_factor", "always the inverse of growth_factor")
    if scale.backoff_interval != 1:
        draft.warn("precision.loss_scale.backoff_interval", "the scale shrinks after every overflow")


def _read_precision(settings: Settings) -> dict[str, Any]:
    dtype, residual = settings[COMPUTE], settings[RESIDUAL]
    level = "O0" if dtype == "float32" else "O1" if residual == "float32" else "O2"
    values: dict[str, Any] = {"precision.dtype": dtype, "precision.level": level}
    if dtype == "float16":
        scale = dataclasses.asdict(read_loss_scale(settings[SCALE]))
        values |= {f"precision.loss_scale.{name}": value for name, value in scale.items()}
    return values


def read_loss_scale(theirs: Any) -> LossScale:
    if not isinstance(theirs, dict):
        return LossScale(dynamic=False, initial=float(theirs))
    return LossScale(
        initial=float(theirs["loss_scale_value"]),
        growth_factor=float(theirs["scale_factor"]),
        backoff_factor=1.0 / theirs["scale_factor"],
        growth_interval=theirs["scale_window"],
        backoff_interval=1,
    )


def _write_loader(draft: Draft) -> None:
    loader, settings = draft.candidate.loader, draft.settings
    if loader.tuning is not None:
        return
    settings |= {WORKERS: max(1, loader.num_workers), PREFETCH: max(1, loader.prefetch_factor)}
    if loader.num_workers == 0:
        draft.warn("loader.num_workers", "MindSpore always reads beside the training process")
        draft.warn("loader.prefetch_factor", "MindSpore always reads ahead")


def _read_loader(settings: Settings) -> dict[str, Any]:
    names = {"loader.num_workers": WORKERS, "loader.prefetch_factor": PREFETCH}
    return {path: settings[name] for path, name in names.items() if name in settings}


def _write_full_batch(draft: Draft) -> None:
    full = draft.candidate.loader.full_batch
    draft.settings |= {FULL_BATCH: full, STRATEGY: "full_batch" if full else [[draft.settings[DP], 1]]}


def _write_attention(draft: Draft) -> None:
    wanted = draft.candidate.kernels.attention
    flash = wanted != "math" or draft.settings[CP] > 1
    draft.settings[FLASH] = flash
    if wanted != ("flash" if flash else "math"):
        draft.warn("kernels.attention", "flash attention; context parallelism takes no other")


def _read_attention(settings: Settings) -> dict[str, Any]:
    return {"kernels.attention": "flash" if settings[FLASH] else "math"}


SETTINGS: tuple[Setting, ...] = (
    custom(
        ("precision.level", "precision.dtype", "precision.loss_scale"),
        (COMPUTE, WEIGHTS, RESIDUAL, *PARTS, SCALE),
        _write_precision,
        _read_precision,
    ),
    lacking("precision.white", _BY_MODULE, severity="error"),
    lacking("precision.black", _BY_MODULE, severity="error"),
    custom(("loader.num_workers", "loader.prefetch_factor"), (WORKERS, PREFETCH), _write_loader, _read_loader),
    lacking("loader.persistent_workers", "the data pipeline stays from one epoch to the next", means=True),
    lacking("loader.tuning", f"nothing is found beforehand; set {WORKERS} and {PREFETCH} to what was found"),
    custom(
        ("loader.full_batch",),
        (FULL_BATCH, STRATEGY),
        _write_full_batch,
        lambda settings: {"loader.full_batch": settings[FULL_BATCH]},
    ),
    lacking("loader.pin_memory", "MindSpore manages the host memory of its data pipeline"),
    custom(("kernels.attention",), (FLASH,), _write_attention, _read_attention),
    lacking("kernels.compile", "MindSpore always compiles the whole model", means="model"),
    lacking("kernels.backend", "MindSpore has its own compiler"),
    lacking("kernels.compile_mode", "MindSpore has its own compiler; its levels are context.jit_config.jit_level"),
    lacking("kernels.matmul_precision", "what is allowed inside fp32 multiplications is left to the device's default"),
    lacking("kernels.cudnn_tuning_range", "there are no convolutions"),
    lacking("kernels.memory_format", "there are no convolutions"),
    *memory_savers(),
)
