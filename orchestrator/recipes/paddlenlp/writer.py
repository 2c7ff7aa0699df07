"""Lays a candidate over the arguments of a PaddleNLP command of the user's own, and knows what PaddleNLP refuses."""

from __future__ import annotations

from typing import Any

from orchestrator.recipes import arguments
from orchestrator.recipes.arguments import either_dash
from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.overlays.lay import Laying, OverlayPart, written
from orchestrator.recipes.paddlenlp import layout as exported_layout
from orchestrator.recipes.paddlenlp import recompute as exported_recompute
from orchestrator.recipes.paddlenlp.given import PaddleArguments, is_launched, script_at
from orchestrator.recipes.paddlenlp.layout import ACCUMULATED, BATCH, CHUNKS, PP, RING, SHARDING, SHARDS, TP, ULYSSES
from orchestrator.recipes.paddlenlp.reader import read_edit
from orchestrator.recipes.paddlenlp.recompute import GRANULARITY, KEPT, RECOMPUTE
from orchestrator.recipes.paddlenlp.run import FLASH, WORKERS
from orchestrator.recipes.training import OverlayRequest

DEVICES = (either_dash("--gpus"), either_dash("--devices", aliases=("--xpus", "--npus")))
PROCESSES, NODES = either_dash("--nproc_per_node"), either_dash("--nnodes")


def _write_degrees(edit: Edit, request: OverlayRequest) -> None:
    given, layout = PaddleArguments(edit), request.candidate.layout
    if request.changes("layout.tp", layout.tp):
        given.put({TP: layout.tp})
    if request.changes("layout.cp", layout.cp) or request.changes("layout.cp_method", layout.cp_method):
        given.drop(RING, ULYSSES)
        if layout.cp > 1:
            given.put({ULYSSES if layout.cp_method == "ulysses" else RING: layout.cp})
    if layout.tp > 1 and request.changes("layout.sequence_parallel", layout.sequence_parallel):
        given.put({"sequence_parallel": layout.sequence_parallel})


def _write_data_parallel(edit: Edit, request: OverlayRequest) -> None:
    """Write what data-parallel ranks share; with a single one it means nothing and stays as it is."""
    given, layout = PaddleArguments(edit), request.candidate.layout
    if layout.dp == 1:
        return
    if layout.zero_stage == 0:
        given.drop(SHARDING, SHARDS)
        return
    if request.changes("layout.zero_stage", layout.zero_stage):
        given.put({SHARDING: f"stage{layout.zero_stage}"})
    if layout.dp_replicate > 1 or given.get(SHARDS) not in (None, -1, "-1"):
        given.put({SHARDS: layout.dp_shard})


def _write_pipeline(edit: Edit, request: OverlayRequest) -> None:
    given, layout = PaddleArguments(edit), request.candidate.layout
    given.put({PP: layout.pp})
    settings = [setting for setting in exported_layout.SETTINGS if "layout.schedule" in setting.paths]
    said = written(edit, request, settings)
    if layout.num_virtual_stages > 1 or given.get(CHUNKS) is not None:
        given.put({CHUNKS: said.get(CHUNKS, 1)})
    if layout.schedule == "gpipe":
        edit.refuse("layout.schedule", "Paddle has 1f1b and interleaved only")


def _write_recompute(edit: Edit, request: OverlayRequest) -> None:
    given = PaddleArguments(edit)
    said = written(edit, request, exported_recompute.SETTINGS)
    if not said:
        given.put({RECOMPUTE: False})
        return
    given.put({RECOMPUTE: True, GRANULARITY: said[GRANULARITY]})
    if said[KEPT]:
        given.put({KEPT: said[KEPT]})
    else:
        given.drop(KEPT)


def _write_precision(edit: Edit, request: OverlayRequest) -> None:
    given, precision = PaddleArguments(edit), request.candidate.precision
    changes: dict[str, Any] = {
        "bf16": precision.dtype == "bfloat16",
        "fp16": precision.dtype == "float16",
        "fp16_opt_level": precision.level,
    }
    if precision.loss_scale is not None:
        changes["scale_loss"] = precision.loss_scale.initial
    given.put({key: value for key, value in changes.items() if value is not False or given.get(key) is not None})


def _write_run(edit: Edit, request: OverlayRequest) -> None:
    given, candidate = PaddleArguments(edit), request.candidate
    if request.changes("micro_batch_size", candidate.micro_batch_size):
        given.put({BATCH: candidate.micro_batch_size})
    if request.changes("loader.num_workers", candidate.loader.num_workers):
        given.put({WORKERS: candidate.loader.num_workers})
    if request.changes("kernels.attention", candidate.kernels.attention):
        given.put({FLASH: candidate.kernels.attention == "flash"})
        if candidate.kernels.attention not in ("flash", "math"):
            edit.refuse("kernels.attention", "flash and math only")


_PARTS = (
    OverlayPart(paths=("layout.tp", "layout.cp", "layout.cp_method", "layout.sequence_parallel"), write=_write_degrees),
    OverlayPart(paths=("layout.zero_stage", "layout.dp_replicate", "layout.dp_shard"), write=_write_data_parallel),
    OverlayPart(
        paths=("layout.pp", "layout.schedule", "layout.num_virtual_stages", "layout.stage_layers"),
        write=_write_pipeline,
    ),
    OverlayPart(paths=("recompute.full", "recompute.selective"), write=_write_recompute),
    OverlayPart(paths=("precision.level", "precision.dtype", "precision.loss_scale.initial"), write=_write_precision),
    OverlayPart(paths=("micro_batch_size", "loader.num_workers", "kernels.attention"), write=_write_run),
)


# ---- what PaddleNLP and its launcher need ----


def _check(edit: Edit, request: OverlayRequest) -> None:
    layout, shape = request.candidate.layout, request.reading.shape
    if layout.zero_stage > 1 and layout.pp > 1:
        edit.refuse("layout.zero_stage", "PaddleNLP takes stage1 only beside pipeline stages")
    if layout.num_virtual_stages > 1 and request.num_microbatches % layout.pp:
        edit.refuse("layout.num_virtual_stages", f"{request.num_microbatches} micro-batches do not come in rounds")
    if layout.sequence_parallel and layout.tp == 1:
        edit.refuse("layout.sequence_parallel", "sequence_parallel needs tensor_parallel_degree above 1")
    if shape is not None:
        for what, number in (("heads", shape.num_heads), ("key-value heads", shape.num_kv_heads)):
            if number % layout.tp:
                edit.refuse("layout.tp", f"{what} {number} are no multiple of tensor_parallel_degree {layout.tp}")
    _write_devices(edit, request.world_size)


def _write_devices(edit: Edit, world_size: int) -> None:
    """Write the launcher's devices on one node: as many as the candidate takes of those that are visible."""
    at = script_at(edit.argv)
    if at is None or not is_launched(edit.argv):
        return
    head, rest = edit.argv[:at], edit.argv[at:]
    if arguments.read_text(head, NODES) not in (None, "1"):
        return
    for argument in DEVICES:
        said = arguments.read_text(head, argument)
        if said is not None and "{" not in said and len(said.split(",")) != world_size:
            head = arguments.write(head, argument, ",".join(map(str, range(world_size))))
    said = arguments.read_text(head, PROCESSES)
    if said is not None and "{" not in said and said != str(world_size):
        head = arguments.write(head, PROCESSES, str(world_size))
    edit.argv = (*head, *rest)


def _write_batch(edit: Edit, request: OverlayRequest) -> None:
    PaddleArguments(edit).put({ACCUMULATED: request.num_microbatches})


def _write_seed(edit: Edit, seed: int) -> None:
    PaddleArguments(edit).put({"seed": seed})


LAYING = Laying(parts=_PARTS, read=read_edit, batch=_write_batch, seed=_write_seed, check=_check)
