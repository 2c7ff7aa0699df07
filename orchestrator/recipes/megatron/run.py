"""Megatron-LM arguments of number formats, data loading and kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.recipes.base import Draft, Setting, Settings, custom, lacking
from orchestrator.recipes.gaps import REDUCES_EACH, memory_savers, refuse_fp8, two_batches_ahead
from trials.legality.rules import FP32_TINY
from trials.spec import LossScale

_ATTENTION = {"auto": "auto", "flash": "flash", "cudnn": "fused", "math": "unfused"}


def _write_precision(draft: Draft) -> None:
    refuse_fp8(draft, "--fp8-format hybrid --fp8-recipe tensorwise goes with 16-bit weights, as level O2 has")
    precision, layout = draft.candidate.precision, draft.candidate.layout
    if precision.level == "O1":
        draft.refuse("precision.level", "Megatron-LM has no autocast; its 16-bit formats are those of level O2")
    reduces_fp32 = layout.zero_stage >= 2 or layout.replicate_with == "fsdp2"
    if precision.dtype == "bfloat16":
        draft.settings |= {"--bf16": True} if reduces_fp32 else {"--bf16": True, "--grad-reduce-in-bf16": True}
    elif precision.dtype == "float16":
        draft.settings |= {"--fp16": True}
        draft.settings |= {"--accumulate-allreduce-grads-in-fp32": True} if reduces_fp32 else {}
        _write_loss_scale(draft, precision.loss_scale or LossScale())


def _write_loss_scale(draft: Draft, scale: LossScale) -> None:
    default = LossScale()
    if not scale.dynamic:
        draft.settings["--loss-scale"] = scale.initial
        return
    draft.settings |= {
        "--initial-loss-scale": scale.initial,
        "--min-loss-scale": FP32_TINY,
        "--loss-scale-window": scale.growth_interval,
        "--hysteresis": scale.backoff_interval,
    }
    for name in ("growth_factor", "backoff_factor"):
        if getattr(scale, name) != getattr(default, name):
            draft.refuse(f"precision.loss_scale.{name}", f"always {getattr(default, name)}")
    if scale.backoff_interval > 1:
        draft.warn("precision.loss_scale.backoff_interval", "overflows need not be in a row to shrink the scale")


def _read_precision(settings: Settings) -> dict[str, Any]:
    dtype = "bfloat16" if "--bf16" in settings else "float16" if "--fp16" in settings else "float32"
    values = {"precision.dtype": dtype, "precision.level": "O0" if dtype == "float32" else "O2"}
    return values | _read_loss_scale(settings) if dtype == "float16" else values


def _read_loss_scale(settings: Settings) -> dict[str, Any]:
    if "--loss-scale" in settings:
        scale = LossScale(dynamic=False, initial=float(settings["--loss-scale"]))
    else:
        scale = LossScale(
            initial=float(settings["--initial-loss-scale"]),
            growth_interval=int(settings["--loss-scale-window"]),
            backoff_interval=int(settings["--hysteresis"]),
        )
    return {f"precision.loss_scale.{name}": value for name, value in dataclasses.asdict(scale).items()}


def _write_workers(draft: Draft) -> None:
    if draft.candidate.loader.tuning is None:
        draft.settings["--num-workers"] = draft.candidate.loader.num_workers


def _num_workers(settings: Settings) -> int:
    return int(settings.get("--num-workers", 0))


def _note_persistent(draft: Draft) -> None:
    loader = draft.candidate.loader
    if not loader.persistent_workers and (loader.num_workers or loader.tuning):
        draft.warn("loader.persistent_workers", "workers always stay from one epoch to the next")
    elif loader.persistent_workers and loader.tuning:
        draft.warn("loader.persistent_workers", "workers stay once --num-workers is set")


def _write_attention(draft: Draft) -> None:
    wanted = draft.candidate.kernels.attention
    if wanted in _ATTENTION:
        draft.settings["--attention-backend"] = _ATTENTION[wanted]
    else:
        draft.warn("kernels.attention", f"there is no {wanted} attention; Transformer Engine chooses")


def _read_attention(settings: Settings) -> dict[str, Any]:
    ours = {theirs: name for name, theirs in _ATTENTION.items()}
    return {"kernels.attention": ours[settings.get("--attention-backend", "auto")]}


_LOSS_SCALE = ("--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis", "--loss-scale")
SETTINGS: tuple[Setting, ...] = (
    custom(
        ("precision.level", "precision.dtype", "precision.loss_scale"),
        ("--bf16", "--fp16", "--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32", *_LOSS_SCALE),
        _write_precision,
        _read_precision,
    ),
    lacking("precision.white", "Megatron-LM has no lists of operators", severity="error"),
    lacking("precision.black", "Megatron-LM has no lists of operators", severity="error"),
    custom(
        ("loader.num_workers",),
        ("--num-workers",),
        _write_workers,
        lambda settings: {"loader.num_workers": _num_workers(settings)},
    ),
    two_batches_ahead(_num_workers),
    custom(
        ("loader.persistent_workers",),
        (),
        _note_persistent,
        lambda settings: {"loader.persistent_workers": _num_workers(settings) > 0},
    ),
    lacking("loader.pin_memory", "host memory is always page-locked", means=True),
    lacking("loader.tuning", "nothing finds the number of workers; set --num-workers to what was found"),
    lacking("loader.full_batch", "every rank reads its own rows only"),
    custom(("kernels.attention",), ("--attention-backend",), _write_attention, _read_attention),
    lacking("kernels.compile", "Megatron-LM does not use torch.compile; its own fused kernels stand in"),
    lacking("kernels.backend", "Megatron-LM does not use torch.compile"),
    lacking("kernels.compile_mode", "Megatron-LM does not use torch.compile"),
    lacking("kernels.matmul_precision", "call torch.set_float32_matmul_precision before training"),
    lacking("kernels.cudnn_tuning_range", "there are no convolutions"),
    lacking("kernels.memory_format", "there are no convolutions"),
    *memory_savers(
        activations="--cpu-offloading-num-layers moves what Transformer Engine's operators keep, which is not all that "
        "a layer keeps, and not in pipelines or with recompute",
        optimizer="--optimizer-cpu-offload comes with another optimiser, --use-precision-aware-optimizer, which nobody "
        "has compared with the one that was measured",
    ),
    REDUCES_EACH,
)
