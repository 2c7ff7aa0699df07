"""torchtitan: a module with a configuration function, as its releases from 0.3 on take it.

Names and defaults are those of torchtitan 0.3 (``config/configs.py``, ``trainer.py``, ``distributed/fsdp.py``,
``distributed/pipeline_parallel.py``). It always works on FSDP2, trains language models with FlexAttention, and computes
in bfloat16 or fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.recipes.base import Draft, Recipe, Setting, Settings, comments, custom, fixed, lacking, option
from orchestrator.recipes.gaps import betas, left_to_script, memory_savers, own_data, refuse_fp8, unable
from orchestrator.recipes.torchtitan import layout, text
from orchestrator.recipes.torchtitan.text import FILE, FUNCTION
from trials.spec import LlamaModel

_DTYPE, _PARAM_DTYPE, _REDUCE_DTYPE = (
    "training.dtype",
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
)
_COMPILE, _COMPONENTS, _COMPILER = "compile.enable", "compile.components", "compile.backend"
_VOCAB = "model_spec.vocab_size"
COMPILERS = ("inductor", "aot_eager")
"""Backends that compile FlexAttention there (``distributed/compile.py``)."""


# ---- precision, kernels ----


def _write_precision(draft: Draft) -> None:
    refuse_fp8(draft, "the float8 converter goes with weights gathered in 16 bits, as level O2 has")
    precision = draft.candidate.precision
    param_dtype = "float32" if precision.level == "O0" else "bfloat16"
    draft.settings |= {_DTYPE: "float32", _PARAM_DTYPE: param_dtype, _REDUCE_DTYPE: "float32"}
    if precision.dtype == "float16":
        draft.refuse(
            "precision", "torchtitan computes in bfloat16 or fp32, without loss scaling; this file says bfloat16"
        )
    elif precision.level == "O1":
        draft.refuse(
            "precision.level", "torchtitan has no autocast; this file says O2: weights are gathered in 16 bits"
        )


def _read_precision(settings: Settings) -> dict[str, Any]:
    is_half = settings[_PARAM_DTYPE] == "bfloat16"
    return {"precision.level": "O2" if is_half else "O0", "precision.dtype": "bfloat16" if is_half else "float32"}


def _write_compile(draft: Draft) -> None:
    kernels = draft.candidate.kernels
    draft.settings |= {_COMPILE: kernels.compile != "off", _COMPONENTS: ["model"], _COMPILER: "inductor"}
    if kernels.compile == "model":
        draft.warn("kernels.compile", "each block is compiled by itself, not the model as a whole")
    if kernels.backend in COMPILERS:
        draft.settings[_COMPILER] = kernels.backend
    else:
        draft.refuse(
            "kernels.backend", f"FlexAttention compiles with {' or '.join(COMPILERS)} only; this file says inductor"
        )


def _read_compile(settings: Settings) -> dict[str, Any]:
    return {"kernels.compile": "block" if settings[_COMPILE] else "off", "kernels.backend": settings[_COMPILER]}


# ---- model ----

_LLAMA, _OPTIMIZER = "workload.model.llama", "workload.optimizer"


def _write_kind(draft: Draft) -> None:
    model = draft.workload.model
    draft.settings["training.seq_len"] = draft.workload.seq_length
    if not isinstance(model, LlamaModel):
        draft.refuse("workload.model", f"torchtitan has no model like this {model.kind}")
        return
    draft.settings |= {"model_spec.max_seq_len": draft.workload.seq_length, "loss.global_vocab_size": model.vocab_size}


def _read_kind(settings: Settings) -> dict[str, Any]:
    kind = {"workload.model.kind": "llama"} if _VOCAB in settings else {}
    return {"workload.seq_length": settings["training.seq_len"], **kind}


_RUN: tuple[Setting, ...] = (
    custom(
        (
            "workload.model.kind",
            "workload.seq_length",
            "workload.model.resnet",
            "workload.model.linear",
        ),
        ("training.seq_len", "model_spec.max_seq_len", "loss.global_vocab_size"),
        _write_kind,
        _read_kind,
    ),
    option(f"{_LLAMA}.hidden_size", "model_spec.dim"),
    option(f"{_LLAMA}.num_layers", "model_spec.n_layers"),
    option(f"{_LLAMA}.num_heads", "model_spec.n_heads"),
    option(f"{_LLAMA}.num_kv_heads", "model_spec.n_kv_heads"),
    option(f"{_LLAMA}.ffn_hidden_size", "model_spec.hidden_dim"),
    option(f"{_LLAMA}.vocab_size", _VOCAB),
    option(f"{_LLAMA}.rope_theta", "model_spec.rope_theta"),
    option(f"{_LLAMA}.norm_eps", "model_spec.norm_eps"),
    custom(
        ("precision.level", "precision.dtype", "precision.loss_scale"),
        (_DTYPE, _PARAM_DTYPE, _REDUCE_DTYPE),
        _write_precision,
        _read_precision,
    ),
    unable("precision.white", "precision.black", message="there is no autocast, hence no lists"),
    fixed("training.max_norm", 1e30),
    fixed("training.disable_cuda_graphs", True),
    custom(("kernels.compile", "kernels.backend"), (_COMPILE, _COMPONENTS, _COMPILER), _write_compile, _read_compile),
    lacking("kernels.compile_mode", "blocks compile in the default mode; training.disable_cuda_graphs: False captures"),
    lacking("kernels.attention", "attention is FlexAttention"),
    lacking("kernels.matmul_precision", "fp32 matrix products stay fp32"),
    lacking("kernels.cudnn_tuning_range", "cuDNN is not tuned; Llama has no convolutions"),
    lacking("kernels.memory_format", "there is no memory format; Llama has no convolutions"),
    *memory_savers(
        loss_chunks=option("kernels.loss_chunks", "loss.num_chunks"),
        optimizer="training.enable_cpu_offload moves weights and gradients too, and gathers weights from the host",
    ),
    fixed("dataloader.dataset", "c4"),
    option("loader.num_workers", "dataloader.num_workers"),
    option(
        "loader.prefetch_factor",
        "dataloader.prefetch_factor",
        to=lambda batches: batches or None,
        of=lambda batches: batches or 0,
    ),
    option("loader.pin_memory", "dataloader.pin_memory"),
    option("loader.persistent_workers", "dataloader.persistent_workers"),
    lacking("loader.full_batch", "every rank reads only its own rows"),
    left_to_script("loader.tuning", "nothing tunes the loader: set the numbers that the report says were found"),
    option(f"{_OPTIMIZER}.lr", "optimizer.lr"),
    betas("optimizer.betas", tuple),
    option(f"{_OPTIMIZER}.eps", "optimizer.eps"),
    option(f"{_OPTIMIZER}.weight_decay", "optimizer.weight_decay"),
    fixed("lr_scheduler.warmup_steps", 0),
    fixed("lr_scheduler.decay_ratio", 0.0),
    option("workload.seed", "debug.seed"),
    own_data("packed documents of C4, with attention inside each, until you name your own dataset and tokenizer"),
)


def _command(draft: Draft) -> str:
    world_size, module = draft.candidate.layout.world_size, FILE.removesuffix(".py")
    return f"torchrun --nproc-per-node {world_size} -m torchtitan.train --module {module} --config {FUNCTION}"


def _render(draft: Draft) -> Mapping[str, str]:
    return {FILE: text.write(draft.settings, comments(draft.notes), _command(draft))}


RECIPE = Recipe(
    name="torchtitan",
    title="torchtitan",
    settings=(*_RUN, *layout.SETTINGS),
    render=_render,
    load=lambda files: text.read(files[FILE]),
    command=_command,
)
