"""Lays a candidate over the YAML of a MindFormers command of the user's own, and knows what MindFormers refuses."""

from __future__ import annotations

from typing import Any

from orchestrator.recipes import arguments
from orchestrator.recipes.arguments import either_dash
from orchestrator.recipes.mindformers import recompute as exported_recompute
from orchestrator.recipes.mindformers.given import BATCH_SIZE, document, is_on, name_of
from orchestrator.recipes.mindformers.layout import (
    ACCUMULATED,
    BATCH,
    CHUNKS,
    COPIES,
    CP,
    CP_METHOD,
    CP_METHODS,
    DP,
    INTERLEAVE,
    LEVEL,
    MICRO_BATCHES,
    OFFSET,
    PP,
    SCHEDULER,
    SCHEDULERS,
    SHARD_SIZE,
    SHARDS,
    TP,
)
from orchestrator.recipes.mindformers.reader import read_edit
from orchestrator.recipes.mindformers.run import COMPUTE, FLASH, PREFETCH, RESIDUAL, SCALE, STRATEGY, WORKERS
from orchestrator.recipes.overlays.edit import Edit, EditedFile
from orchestrator.recipes.overlays.lay import Laying, OverlayPart, layers_in, written
from orchestrator.recipes.training import OverlayRequest
from orchestrator.space.knobs.layer_choices import layers_of

_TASK = "train_dataset_task.dataset_config."
"""Where the section of the data set often stands a second time, by an alias."""
WORKER_NUM, LOCAL_WORKER_NUM = either_dash("--worker_num"), either_dash("--local_worker_num")


def _write_world_size(edit: Edit, request: OverlayRequest) -> None:
    """Write msrun's number of workers; on one node that is also the number there."""
    total = arguments.read_text(edit.argv, WORKER_NUM)
    local = arguments.read_text(edit.argv, LOCAL_WORKER_NUM)
    if total is None or "{" in total or total == str(request.world_size):
        return
    edit.argv = arguments.write(edit.argv, WORKER_NUM, str(request.world_size))
    if local == total:
        edit.argv = arguments.write(edit.argv, LOCAL_WORKER_NUM, str(request.world_size))


# ---- parts ----


def _write_degrees(edit: Edit, request: OverlayRequest) -> None:
    config, layout = document(edit), request.candidate.layout
    before = config.get(DP, 1)
    changes: dict[str, Any] = {
        key: degree
        for key, degree in ((DP, layout.dp), (TP, layout.tp), (CP, layout.cp))
        if config.get(key, 1) != degree
    }
    if layout.tp > 1 and request.changes("layout.sequence_parallel", layout.sequence_parallel):
        changes["parallel_config.use_seq_parallel"] = layout.sequence_parallel
    if layout.cp > 1 and request.changes("layout.cp_method", layout.cp_method):
        changes[CP_METHOD] = CP_METHODS[layout.cp_method]
    if request.changes("layout.zero_stage", layout.zero_stage) and layout.dp > 1:
        changes[SHARDS] = layout.zero_stage > 0
        if layout.zero_stage:
            changes[LEVEL] = f"level{layout.zero_stage}"
    if layout.zero_stage and (config.has(SHARD_SIZE) or layout.dp_replicate > 1):
        changes[SHARD_SIZE] = layout.dp_shard * layout.cp
    rows = config.get(STRATEGY)
    if layout.dp != before and isinstance(rows, list):
        changes[STRATEGY] = [_split(row, before, layout.dp) for row in rows]
    config.put(changes)


def _split(row: Any, before: int, now: int) -> Any:
    """How one input of the data set is split: along the batch over the data-parallel ranks."""
    return [now, *row[1:]] if isinstance(row, list) and row and row[0] == before else row


def _write_pipeline(edit: Edit, request: OverlayRequest) -> None:
    config, layout = document(edit), request.candidate.layout
    config.put({PP: layout.pp})
    if layout.pp == 1:
        config.drop(CHUNKS, OFFSET, INTERLEAVE, SCHEDULER)
        return
    layers = request.reading.num_layers or 0
    share = layers // (layout.pp * layout.num_virtual_stages)
    rows = [[count - share for count in row] for row in layout.stage_layers]
    chunks = layout.num_virtual_stages
    changes: dict[str, Any] = {OFFSET: rows[0] if len(rows) == 1 else rows}
    if not any(map(any, rows)):
        changes[OFFSET] = 0
    if chunks > 1 or config.has(CHUNKS):
        changes |= {CHUNKS: chunks, INTERLEAVE: chunks > 1}
    if layout.schedule not in ("1f1b", "interleaved") or config.has(SCHEDULER):
        changes[SCHEDULER] = SCHEDULERS[layout.schedule]
    config.put(changes)


def _write_micro_batch(edit: Edit, request: OverlayRequest) -> None:
    config, candidate = document(edit), request.candidate
    copies = candidate.layout.num_copies
    size = candidate.micro_batch_size // copies
    if request.changes("layout.num_copies", copies):
        config.put({COPIES: copies})
    if arguments.is_given(edit.argv, BATCH_SIZE):
        edit.argv = arguments.write(edit.argv, BATCH_SIZE, str(size))
    else:
        config.put({BATCH: size})


def _write_batch(edit: Edit, request: OverlayRequest) -> None:
    key = MICRO_BATCHES if request.candidate.layout.pp > 1 else ACCUMULATED
    document(edit).put({key: request.num_microbatches})


def _write_seed(edit: Edit, seed: int) -> None:
    document(edit).put({"seed": seed})


def _write_recompute(edit: Edit, request: OverlayRequest) -> None:
    """Write recompute as the exports do; all layers and none as true and false, as people write them."""
    config = document(edit)
    settings = written(edit, request, exported_recompute.SETTINGS)
    if request.candidate.recompute.full == layers_of(request.candidate.layout, layers_in(request)):
        settings[exported_recompute.FULL] = True
    config.put({key: value for key, value in settings.items() if config.get(key, False) != value})


def _write_precision(edit: Edit, request: OverlayRequest) -> None:
    config, precision = document(edit), request.candidate.precision
    changes: dict[str, Any] = {COMPUTE: precision.dtype}
    changes[RESIDUAL] = "float32" if precision.level == "O1" else precision.dtype
    scale = precision.loss_scale
    if scale is None:
        changes[SCALE] = 1.0
    elif scale.dynamic:
        changes[SCALE] = {
            "type": "DynamicLossScaleUpdateCell",
            "loss_scale_value": scale.initial,
            "scale_factor": int(scale.growth_factor),
            "scale_window": scale.growth_interval,
        }
    else:
        changes[SCALE] = scale.initial
    config.put(changes)


def _write_run(edit: Edit, request: OverlayRequest) -> None:
    config, loader, attention = document(edit), request.candidate.loader, request.candidate.kernels.attention
    changes: dict[str, Any] = {}
    if request.changes("loader.num_workers", loader.num_workers):
        changes[WORKERS] = loader.num_workers
    if loader.num_workers and request.changes("loader.prefetch_factor", loader.prefetch_factor):
        changes[PREFETCH] = loader.prefetch_factor
    for key in tuple(changes):
        if config.has(key.replace("train_dataset.", _TASK)):
            changes[key.replace("train_dataset.", _TASK)] = changes[key]
    if not loader.num_workers:
        edit.refuse("loader.num_workers", "MindSpore always reads beside the training process")
    if request.changes("kernels.attention", attention):
        changes[FLASH] = attention != "math"
        if attention not in ("flash", "math"):
            edit.refuse("kernels.attention", "flash and math only")
    config.put(changes)


_PARTS = (
    OverlayPart(
        paths=tuple(
            f"layout.{name}"
            for name in ("tp", "cp", "sequence_parallel", "cp_method", "zero_stage", "dp_replicate", "dp_shard")
        ),
        write=_write_degrees,
    ),
    OverlayPart(
        paths=("layout.pp", "layout.schedule", "layout.num_virtual_stages", "layout.stage_layers"),
        write=_write_pipeline,
    ),
    OverlayPart(paths=("recompute.full", "recompute.selective", "recompute.communication"), write=_write_recompute),
    OverlayPart(
        paths=(
            "precision.level",
            "precision.dtype",
            *(f"precision.loss_scale.{name}" for name in ("initial", "growth_factor", "growth_interval", "dynamic")),
        ),
        write=_write_precision,
    ),
    OverlayPart(paths=("loader.num_workers", "loader.prefetch_factor", "kernels.attention"), write=_write_run),
    OverlayPart(paths=("micro_batch_size", "layout.num_copies"), write=_write_micro_batch),
)


# ---- what MindFormers refuses ----


def _check(edit: Edit, request: OverlayRequest) -> None:
    config = document(edit)
    if config.exists:
        _check_dimensions(edit, config, request)
    _write_world_size(edit, request)


def _check_dimensions(edit: Edit, config: EditedFile, request: OverlayRequest) -> None:
    candidate, layout, shape = request.candidate, request.candidate.layout, request.reading.shape
    if layout.pp > 1 and request.num_microbatches < layout.pp:
        edit.refuse("layout.pp", f"{request.num_microbatches} micro-batches: MindFormers needs one per stage")
    if candidate.micro_batch_size % layout.num_copies:
        edit.refuse("layout.num_copies", "the micro-batch does not divide into copies")
    if 0 in [count for row in layout.stage_layers for count in row][1:-1]:
        edit.refuse("layout.stage_layers", "only the first and the last stage may be without layers")
    if shape is None:
        return
    for what, number in (("heads", shape.num_heads), ("the feed-forward part's width", shape.ffn_hidden_size)):
        if number % layout.tp:
            edit.refuse("layout.tp", f"{what} {number} is no multiple of model_parallel {layout.tp}")
    if shape.num_kv_heads % layout.tp and layout.tp % shape.num_kv_heads:
        edit.refuse("layout.tp", f"{name_of(config, 'num_kv_heads')} {shape.num_kv_heads} over {layout.tp}")
    if shape.vocab_size % layout.tp and not is_on(config, "parallel_config.vocab_emb_dp", default=True):
        edit.refuse("layout.tp", f"vocab_size {shape.vocab_size} is no multiple of model_parallel {layout.tp}")


LAYING = Laying(parts=_PARTS, read=read_edit, batch=_write_batch, seed=_write_seed, check=_check)
