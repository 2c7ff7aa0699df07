"""Lays a candidate over a Megatron-LM command of the user's own, and knows what Megatron-LM refuses."""

from __future__ import annotations

import os

from orchestrator.recipes.megatron import layout as exported_layout
from orchestrator.recipes.megatron import recompute as exported_recompute
from orchestrator.recipes.megatron.decoder import padding_note
from orchestrator.recipes.megatron.given import options
from orchestrator.recipes.megatron.layout import CP_METHODS
from orchestrator.recipes.megatron.reader import ATTENTION, read_edit
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.overlays.lay import Laying, OverlayPart, written
from orchestrator.recipes.training import OverlayRequest

_VIRTUAL = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
_LAYOUT = "--pipeline-model-parallel-layout"
_SPLITS = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
_RECOMPUTE = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-modules")
_FSDP = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy")
_GATHER = ("--overlap-param-gather", "--overlap-param-gather-with-optimizer-step")
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_PIPELINE_PATHS = ("layout.pp", "layout.schedule", "layout.num_virtual_stages", "layout.stage_layers")


# ---- layout ----


def _write_degrees(edit: Edit, request: OverlayRequest) -> None:
    layout, given = request.candidate.layout, options(edit)
    for knob, name, degree in (("tp", "tensor-model", layout.tp), ("cp", "context", layout.cp)):
        if request.changes(f"layout.{knob}", degree):
            given.put(f"--{name}-parallel-size", degree)
    if layout.tp > 1 and request.changes("layout.sequence_parallel", layout.sequence_parallel):
        if layout.sequence_parallel:
            given.put("--sequence-parallel", value=True)
        else:
            given.drop("--sequence-parallel", "--tp-comm-overlap")
    if layout.cp > 1 and request.changes("layout.cp_method", layout.cp_method):
        given.put("--cp-comm-type", (CP_METHODS[layout.cp_method],))
    note = padding_note(given, layout.tp, request.reading.shape)
    if note:
        edit.warn("layout.tp", note)


def _write_data_parallel(edit: Edit, request: OverlayRequest) -> None:
    """Write what data-parallel ranks share; with a single one it means nothing and stays as it is."""
    layout, given = request.candidate.layout, options(edit)
    stage = layout.zero_stage
    if layout.dp * layout.cp == 1:
        return
    if request.changes("layout.zero_stage", stage):
        given.drop(*_FSDP)
        if stage == 0:
            given.drop("--use-distributed-optimizer", "--num-distributed-optimizer-instances", *_GATHER)
        else:
            given.put("--use-distributed-optimizer", value=True)
        if stage >= 2:
            given.put("--use-megatron-fsdp", value=True)
            given.put("--data-parallel-sharding-strategy", "optim_grads" if stage == 2 else "optim_grads_params")
            given.put("--no-gradient-accumulation-fusion", value=True)
            given.put("--ckpt-format", "fsdp_dtensor")
    said = given.text("--num-distributed-optimizer-instances") or "1"
    if stage and said != str(layout.dp_replicate):
        given.put("--num-distributed-optimizer-instances", layout.dp_replicate)


def _write_pipeline(edit: Edit, request: OverlayRequest) -> None:
    layout, given = request.candidate.layout, options(edit)
    if request.changes("layout.pp", layout.pp):
        given.put("--pipeline-model-parallel-size", layout.pp)
    given.drop(*_VIRTUAL, _LAYOUT, *_SPLITS)
    settings = [setting for setting in exported_layout.SETTINGS if "layout.schedule" in setting.paths]
    for name, value in written(edit, request, settings).items():
        given.put(name, value)
    if layout.schedule == "gpipe" and layout.pp > 1:
        edit.refuse("layout.schedule", "Megatron-LM has 1f1b and interleaved only")


def _write_recompute(edit: Edit, request: OverlayRequest) -> None:
    given = options(edit)
    given.drop(*_RECOMPUTE, "--recompute-activations")
    if not request.candidate.recompute.full:
        given.drop("--distribute-saved-activations")
    for name, value in written(edit, request, exported_recompute.SETTINGS).items():
        given.put(name, value)


# ---- number formats, batch, data ----


def _write_precision(edit: Edit, request: OverlayRequest) -> None:
    precision, given = request.candidate.precision, options(edit)
    if precision.level == "O1":
        edit.refuse("precision.level", "Megatron-LM has no autocast; its 16-bit formats are those of level O2")
    given.drop(*(name for name in ("--bf16", "--fp16") if precision.dtype != _DTYPES[name]))
    if precision.dtype != "bfloat16":
        given.drop("--grad-reduce-in-bf16")
    for name, dtype in _DTYPES.items():
        if precision.dtype == dtype:
            given.put(name, value=True)
    scale = precision.loss_scale
    if scale is None:
        return
    given.drop("--loss-scale", "--initial-loss-scale", "--loss-scale-window", "--hysteresis")
    if not scale.dynamic:
        given.put("--loss-scale", scale.initial)
        return
    given.put("--initial-loss-scale", scale.initial)
    given.put("--loss-scale-window", scale.growth_interval)
    given.put("--hysteresis", scale.backoff_interval)


_DTYPES = {"--bf16": "bfloat16", "--fp16": "float16"}


def _write_run(edit: Edit, request: OverlayRequest) -> None:
    candidate, given = request.candidate, options(edit)
    if request.changes("micro_batch_size", candidate.micro_batch_size):
        given.put("--micro-batch-size", candidate.micro_batch_size)
    if request.changes("loader.num_workers", candidate.loader.num_workers):
        given.put("--num-workers", candidate.loader.num_workers)
    if request.changes("kernels.attention", candidate.kernels.attention):
        names = {ours: theirs for theirs, ours in ATTENTION.items()}
        if candidate.kernels.attention in names:
            given.put("--attention-backend", names[candidate.kernels.attention])
        else:
            edit.refuse("kernels.attention", f"there is no {candidate.kernels.attention} attention")


def _write_batch(edit: Edit, request: OverlayRequest) -> None:
    options(edit).put("--global-batch-size", request.global_batch_size)


def _write_seed(edit: Edit, seed: int) -> None:
    options(edit).put("--seed", seed)


# ---- what Megatron-LM refuses ----


def _check_dimensions(edit: Edit, request: OverlayRequest) -> None:
    layout, shape = request.candidate.layout, request.reading.shape
    seq_length = request.reading.seq_length
    if seq_length and layout.cp > 1 and seq_length % (2 * layout.cp):
        edit.refuse("layout.cp", f"a sequence of {seq_length} does not divide into {2 * layout.cp} parts, 2 per rank")
    rows = request.global_batch_size % (request.candidate.micro_batch_size * layout.dp)
    if rows:
        edit.refuse("micro_batch_size", "the global batch is no multiple of micro-batch x data-parallel ranks")
    if shape is None or layout.tp == 1:
        return
    for what, number in (("heads", shape.num_heads), ("width of the feed-forward part", _width(edit, shape))):
        if number % layout.tp:
            edit.refuse("layout.tp", f"{what} {number} is no multiple of tp {layout.tp}")
    groups = shape.num_kv_heads
    if groups % layout.tp and layout.tp % groups:
        edit.refuse("layout.tp", f"{groups} query groups do not divide over tp {layout.tp}")
    if layout.sequence_parallel and seq_length and seq_length % (layout.tp * layout.cp):
        edit.refuse("layout.sequence_parallel", f"a sequence of {seq_length} does not divide over tp x cp")


def _width(edit: Edit, shape: object) -> int:
    said = options(edit).text("--ffn-hidden-size")
    return int(said) if said and said.isdigit() else int(getattr(shape, "ffn_hidden_size", 0))


def _check(edit: Edit, request: OverlayRequest) -> None:
    _check_dimensions(edit, request)
    _check_environment(edit, request)


def _check_environment(edit: Edit, request: OverlayRequest) -> None:
    """One hardware queue keeps collectives of tp and cp ahead of what they overlap; FSDP needs several."""
    layout = request.candidate.layout
    said = edit.given_env.get(_QUEUES, os.environ.get(_QUEUES))
    shards = options(edit).is_on("--use-megatron-fsdp") or options(edit).is_on("--use-torch-fsdp2")
    if shards and said == "1":
        edit.refuse("layout.zero_stage", f"FSDP takes {_QUEUES} above 1 or unset, and env says 1")
    elif not shards and layout.tp * layout.cp > 1 and said is None:
        edit.env[_QUEUES] = "1"
    elif not shards and layout.tp * layout.cp > 1 and said != "1":
        edit.warn("layout.tp", f"{_QUEUES} is {said}: before Blackwell tp and cp need 1")
    wants_shards = request.candidate.layout.zero_stage >= 2
    if wants_shards and layout.tp * layout.cp > 1:
        edit.warn("layout.zero_stage", "FSDP beside tp or cp: Megatron-LM advises against it before Blackwell")


_PARTS = (
    OverlayPart(paths=("layout.tp", "layout.cp", "layout.sequence_parallel", "layout.cp_method"), write=_write_degrees),
    OverlayPart(paths=("layout.zero_stage", "layout.dp_replicate"), write=_write_data_parallel),
    OverlayPart(paths=_PIPELINE_PATHS, write=_write_pipeline),
    OverlayPart(paths=("recompute.full", "recompute.selective"), write=_write_recompute),
    OverlayPart(
        paths=(
            "precision.level",
            "precision.dtype",
            *(f"precision.loss_scale.{name}" for name in ("initial", "growth_interval", "backoff_interval", "dynamic")),
        ),
        write=_write_precision,
    ),
    OverlayPart(paths=("micro_batch_size", "loader.num_workers", "kernels.attention"), write=_write_run),
)

LAYING = Laying(parts=_PARTS, read=read_edit, batch=_write_batch, seed=_write_seed, check=_check)
