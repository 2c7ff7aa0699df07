"""Accelerate's launcher and the Trainer's arguments: number formats, kernels, data loading, optimiser."""

from __future__ import annotations

from typing import Any

from orchestrator.recipes.accelerate.layout import ARGUMENTS, FILE, TYPE
from orchestrator.recipes.base import Draft, Setting, Settings, custom, fixed, lacking, option
from orchestrator.recipes.gaps import (
    KERNELS_OF_SCRIPT,
    TORCH_SCALER,
    left_to_script,
    memory_savers,
    offloads_inputs,
    own_data,
    refuse_fp8,
    takes_torch_scaler,
    unable,
)

_MIXED_PRECISION = f"{FILE}:mixed_precision"
_OFFLOAD = f"{FILE}:fsdp_config.fsdp_activation_checkpointing_offload"
_DYNAMO = f"{FILE}:dynamo_config.dynamo_"
_BACKEND, _MODE, _REGIONAL = f"{_DYNAMO}backend", f"{_DYNAMO}mode", f"{_DYNAMO}use_regional_compilation"
_COMPILE = f"{ARGUMENTS}:torch_compile"
_TF32, _DECAY = f"{ARGUMENTS}:tf32", f"{ARGUMENTS}:weight_decay"
DYNAMO_BACKENDS = ("inductor", "eager", "aot_eager", "cudagraphs", "tvm", "tensorrt")
"""Values of ``DynamoBackend`` that torch.compile knows by the same name."""
_POLICY = "FSDP gathers weights and reduces gradients in 16 bits unless your script sets plugin.mixed_precision_policy"
_SHORT = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


# ---- precision ----


def _write_precision(draft: Draft) -> None:
    refuse_fp8(draft, "mixed_precision fp8 with backend AO leaves out the first linear module, or has other recipes")
    precision, is_fsdp = draft.candidate.precision, draft.settings[TYPE] == "FSDP"
    draft.settings |= {
        _MIXED_PRECISION: _SHORT[precision.dtype],
        f"{ARGUMENTS}:bf16": precision.dtype == "bfloat16",
        f"{ARGUMENTS}:fp16": precision.dtype == "float16",
    }
    if is_fsdp and precision.level == "O1":
        draft.warn("precision.level", f"{_POLICY}; pass MixedPrecisionPolicy() for autocast alone")
    elif is_fsdp and precision.level == "O2":
        draft.warn("precision.level", f"{_POLICY}; pass MixedPrecisionPolicy(..., reduce_dtype=torch.float32)")
    elif precision.level == "O2":
        draft.refuse("precision.level", "without FSDP there is autocast (O1), but no 16-bit weights with fp32 masters")
    if precision.loss_scale is not None and not takes_torch_scaler(draft):
        draft.warn(
            "precision.loss_scale",
            "the Trainer takes torch's GradScaler as it is (2^16, doubled after 2000 steps, halved at the first"
            " overflow); in your own script pass GradScalerKwargs(init_scale=..., growth_interval=...)",
        )


def _read_precision(settings: Settings) -> dict[str, Any]:
    dtype = next(dtype for dtype, short in _SHORT.items() if short == settings[_MIXED_PRECISION])
    level = "O0" if dtype == "float32" else "O2" if settings[TYPE] == "FSDP" else "O1"
    return {"precision.level": level, "precision.dtype": dtype, **(TORCH_SCALER if dtype == "float16" else {})}


# ---- kernels ----


def _write_compile(draft: Draft) -> None:
    kernels = draft.candidate.kernels
    if kernels.compile == "off":
        draft.settings[_BACKEND] = "NO"
        draft.settings[_COMPILE] = False
        return
    backend = kernels.backend
    if backend not in DYNAMO_BACKENDS:
        draft.refuse("kernels.backend", f"Accelerate knows no backend {backend}; these files say inductor")
        backend = "inductor"
    draft.settings |= {
        _BACKEND: backend.upper(),
        _MODE: kernels.compile_mode,
        _REGIONAL: kernels.compile == "block",
        _COMPILE: True,
        f"{_COMPILE}_backend": backend,
        f"{_COMPILE}_mode": kernels.compile_mode,
    }


def _read_compile(settings: Settings) -> dict[str, Any]:
    if settings[_BACKEND] == "NO":
        return {"kernels.compile": "off"}
    return {
        "kernels.compile": "block" if settings[_REGIONAL] else "model",
        "kernels.backend": settings[_BACKEND].lower(),
        "kernels.compile_mode": settings[_MODE],
    }


def _write_matmul(draft: Draft) -> None:
    """Write TF32 in any case: the Trainer turns it on by itself when it compiles."""
    asked = draft.candidate.kernels.matmul_precision
    draft.settings[_TF32] = asked != "highest"
    if asked == "medium":
        draft.warn("kernels.matmul_precision", "bfloat16 inside fp32 matrix products cannot be set; _TF32 is (high)")


def _read_matmul(settings: Settings) -> dict[str, Any]:
    return {"kernels.matmul_precision": "high" if settings[_TF32] else "highest"}


# ---- optimiser ----


def _write_seed(draft: Draft) -> None:
    draft.settings |= {f"{ARGUMENTS}:seed": draft.workload.seed, f"{ARGUMENTS}:data_seed": draft.workload.seed}


def _write_decay(draft: Draft) -> None:
    draft.settings[_DECAY] = draft.workload.optimizer.weight_decay
    if draft.settings[_DECAY]:
        draft.warn("workload.optimizer.weight_decay", "the Trainer spares norms, which the runner decays too")


_OPTIMIZER = "workload.optimizer"
SETTINGS: tuple[Setting, ...] = (
    custom(
        ("precision.level", "precision.dtype", "precision.loss_scale"),
        (_MIXED_PRECISION, f"{ARGUMENTS}:bf16", f"{ARGUMENTS}:fp16"),
        _write_precision,
        _read_precision,
    ),
    unable("precision.white", "precision.black", message="autocast's own lists of operators cannot be changed"),
    option("loader.num_workers", f"{ARGUMENTS}:dataloader_num_workers"),
    option(
        "loader.prefetch_factor",
        f"{ARGUMENTS}:dataloader_prefetch_factor",
        to=lambda batches: batches or None,
        of=lambda batches: batches or 0,
    ),
    option("loader.pin_memory", f"{ARGUMENTS}:dataloader_pin_memory"),
    option("loader.persistent_workers", f"{ARGUMENTS}:dataloader_persistent_workers"),
    lacking("loader.full_batch", "every rank reads only its own rows"),
    left_to_script("loader.tuning", "nothing tunes the loader: set the numbers that the report says were found"),
    custom(
        ("kernels.compile", "kernels.backend", "kernels.compile_mode"),
        (_BACKEND, _MODE, _REGIONAL, _COMPILE, f"{_COMPILE}_backend", f"{_COMPILE}_mode"),
        _write_compile,
        _read_compile,
    ),
    custom(("kernels.matmul_precision",), (_TF32,), _write_matmul, _read_matmul),
    *KERNELS_OF_SCRIPT,
    *memory_savers(
        activations=offloads_inputs(_OFFLOAD, applies=lambda settings: settings[TYPE] == "FSDP"),
        optimizer="fsdp_offload_params moves weights and gradients too, and gathers weights from the host",
    ),
    option(f"{_OPTIMIZER}.lr", f"{ARGUMENTS}:learning_rate"),
    option(f"{_OPTIMIZER}.beta1", f"{ARGUMENTS}:adam_beta1"),
    option(f"{_OPTIMIZER}.beta2", f"{ARGUMENTS}:adam_beta2"),
    option(f"{_OPTIMIZER}.eps", f"{ARGUMENTS}:adam_epsilon"),
    custom(
        (f"{_OPTIMIZER}.weight_decay",),
        (_DECAY,),
        _write_decay,
        lambda settings: {f"{_OPTIMIZER}.weight_decay": settings[_DECAY]},
    ),
    custom(
        ("workload.seed",),
        (f"{ARGUMENTS}:seed", f"{ARGUMENTS}:data_seed"),
        _write_seed,
        lambda settings: {"workload.seed": settings[f"{ARGUMENTS}:seed"]},
    ),
    fixed(f"{ARGUMENTS}:optim", "adamw_torch"),
    fixed(f"{ARGUMENTS}:lr_scheduler_type", "constant"),
    fixed(f"{ARGUMENTS}:max_grad_norm", 0.0),
    fixed(f"{ARGUMENTS}:dataloader_drop_last", True),
    fixed(f"{ARGUMENTS}:output_dir", "output"),
    own_data("your script reads the data"),
)
