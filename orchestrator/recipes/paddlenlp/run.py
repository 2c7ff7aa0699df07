"""PaddleNLP arguments of number formats, data loading and kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.recipes.base import Draft, Setting, Settings, custom, lacking
from orchestrator.recipes.gaps import memory_savers, offloads_inputs, refuse_fp8, two_batches_ahead
from trials.spec import LossScale

FLASH = "use_flash_attention"
WORKERS = "dataloader_num_workers"
OPERATORS = {"linear": "matmul_v2", "softmax": "softmax"}
"""Paddle's names of the operators that autocast's lists on both sides can name."""


def _write_precision(draft: Draft) -> None:
    refuse_fp8(draft)
    precision, layout = draft.candidate.precision, draft.candidate.layout
    reduces_fp32 = layout.zero_stage >= 2 or layout.replicate_with == "fsdp2"
    draft.settings |= {
        "bf16": precision.dtype == "bfloat16",
        "fp16": precision.dtype == "float16",
        "fp16_opt_level": precision.level,
        "amp_master_grad": precision.level == "O2" and reduces_fp32,
    }
    for name in ("white", "black"):
        _write_operators(draft, name, getattr(precision, name))
    if precision.loss_scale is not None:
        _write_loss_scale(draft, precision.loss_scale)


def _write_operators(draft: Draft, name: str, operators: tuple[str, ...]) -> None:
    unknown = [operator for operator in operators if operator not in OPERATORS]
    if unknown:
        draft.refuse(f"precision.{name}", f"no operators of Paddle are known for {', '.join(unknown)}")
    draft.settings[f"amp_custom_{name}_list"] = [OPERATORS[known] for known in operators if known in OPERATORS]


def _write_loss_scale(draft: Draft, scale: LossScale) -> None:
    draft.settings["scale_loss"] = scale.initial
    if not scale.dynamic:
        draft.refuse("precision.loss_scale.dynamic", "the scale always changes")
    for name in ("growth_factor", "backoff_factor"):
        if getattr(scale, name) != getattr(LossScale(), name):
            draft.refuse(f"precision.loss_scale.{name}", f"always {getattr(LossScale(), name)}")
    for name in ("growth_interval", "backoff_interval"):
        draft.warn(f"precision.loss_scale.{name}", "the default of your version of Paddle counts")


def _read_precision(settings: Settings) -> dict[str, Any]:
    dtype = "bfloat16" if settings["bf16"] else "float16" if settings["fp16"] else "float32"
    names = {theirs: ours for ours, theirs in OPERATORS.items()}
    values: dict[str, Any] = {"precision.dtype": dtype, "precision.level": settings["fp16_opt_level"]}
    for name in ("white", "black"):
        values[f"precision.{name}"] = tuple(names[theirs] for theirs in settings[f"amp_custom_{name}_list"])
    if dtype == "float16":
        scale = dataclasses.asdict(LossScale(initial=settings["scale_loss"]))
        values |= {f"precision.loss_scale.{name}": value for name, value in scale.items()}
    return values


def _write_workers(draft: Draft) -> None:
    if draft.candidate.loader.tuning is None:
        draft.settings[WORKERS] = draft.candidate.loader.num_workers


def _read_workers(settings: Settings) -> dict[str, Any]:
    return {"loader.num_workers": settings.get(WORKERS, 0)}


def _write_attention(draft: Draft) -> None:
    wanted = draft.candidate.kernels.attention
    draft.settings[FLASH] = wanted != "math"
    if wanted not in ("flash", "math"):
        draft.warn("kernels.attention", "flash attention, for the number formats that it takes")


def _read_attention(settings: Settings) -> dict[str, Any]:
    return {"kernels.attention": "flash" if settings[FLASH] else "math"}


_AMP = ("bf16", "fp16", "fp16_opt_level", "amp_master_grad", "amp_custom_white_list", "amp_custom_black_list")

SETTINGS: tuple[Setting, ...] = (
    custom(
        ("precision.level", "precision.dtype", "precision.white", "precision.black", "precision.loss_scale"),
        (*_AMP, "scale_loss"),
        _write_precision,
        _read_precision,
    ),
    custom(("loader.num_workers",), (WORKERS,), _write_workers, _read_workers),
    two_batches_ahead(lambda settings: settings.get(WORKERS)),
    lacking("loader.tuning", f"nothing finds the number of workers; set {WORKERS} to what was found"),
    lacking("loader.pin_memory", "Paddle manages host memory itself"),
    lacking("loader.persistent_workers", "workers are started again for every epoch"),
    lacking("loader.full_batch", "every rank reads its own rows only"),
    custom(("kernels.attention",), (FLASH,), _write_attention, _read_attention),
    lacking("kernels.compile", "dynamic graph; to_static needs Paddle's automatic parallelism"),
    lacking("kernels.backend", "Paddle does not use torch.compile"),
    lacking("kernels.compile_mode", "Paddle does not use torch.compile"),
    lacking("kernels.matmul_precision", "export NVIDIA_TF32_OVERRIDE before starting"),
    lacking("kernels.cudnn_tuning_range", "there are no convolutions"),
    lacking("kernels.memory_format", "there are no convolutions"),
    *memory_savers(
        activations=offloads_inputs("offload_recompute_inputs"),
        optimizer="offload_optim keeps states on the host, but brings them to the device to update there",
    ),
    lacking("layout.gradient_reduction", "there is no setting for when gradients are reduced"),
)
