"""Lays a candidate over a torchtitan command of the user's own, and knows what torchtitan 0.3 refuses."""

from __future__ import annotations

from orchestrator.recipes.overlays.edit import Edit
from orchestrator.recipes.overlays.lay import Laying, OverlayPart, draft_of, layers_in
from orchestrator.recipes.torchtitan.given import PARTS, TitanArguments
from orchestrator.recipes.torchtitan.layout import LOOPED_GPIPE, SCHEDULES, module_names
from orchestrator.recipes.torchtitan.reader import read_edit
from orchestrator.recipes.training import OverlayRequest
from orchestrator.space.knobs.layer_choices import layers_of

_BATCH, _MICRO = "training.local_batch_size", "parallelism.pipeline_parallel_microbatch_size"
_GLOBAL = "training.global_batch_size"


def _write_degrees(edit: Edit, request: OverlayRequest) -> None:
    given, layout = TitanArguments(edit), request.candidate.layout
    for knob, name, degree in (("tp", "tensor", layout.tp), ("cp", "context", layout.cp)):
        if request.changes(f"layout.{knob}", degree):
            given.put(f"parallelism.{name}_parallel_degree", degree)
    if layout.tp > 1 and request.changes("layout.sequence_parallel", layout.sequence_parallel):
        given.put("parallelism.enable_sequence_parallel", layout.sequence_parallel)


def _write_data_parallel(edit: Edit, request: OverlayRequest) -> None:
    given, layout = TitanArguments(edit), request.candidate.layout
    if request.changes("layout.dp_replicate", layout.dp_replicate):
        given.put("parallelism.data_parallel_replicate_degree", layout.dp_replicate)
    if request.changes("layout.dp_shard", layout.dp_shard) or layout.zero_stage == 0:
        given.put("parallelism.data_parallel_shard_degree", layout.dp_shard)
    if layout.zero_stage == 1:
        edit.refuse("layout.zero_stage", "FSDP2 has no stage 1")
    elif layout.zero_stage and request.changes("layout.zero_stage", layout.zero_stage):
        given.put("parallelism.fsdp_reshard_after_forward", "always" if layout.zero_stage == 3 else "never")


def _write_pipeline(edit: Edit, request: OverlayRequest) -> None:
    given, layout = TitanArguments(edit), request.candidate.layout
    given.put("parallelism.pipeline_parallel_degree", layout.pp)
    if layout.pp == 1:
        return
    if request.reading.num_layers is None:
        edit.refuse("layout.pp", "stages of a model whose number of layers is not known cannot be named")
        return
    is_looped = layout.schedule == "gpipe" and layout.num_virtual_stages > 1
    given.put("parallelism.pipeline_parallel_schedule", LOOPED_GPIPE if is_looped else SCHEDULES[layout.schedule])
    parts = module_names(draft_of(request))
    if not all(parts):
        edit.refuse("layout.stage_layers", "torchtitan cannot run a stage without a layer, between first and last")
    given.put(PARTS, [",".join(part) for part in parts])


def _write_recompute(edit: Edit, request: OverlayRequest) -> None:
    given, recompute = TitanArguments(edit), request.candidate.recompute
    held = layers_of(request.candidate.layout, layers_in(request))
    if recompute.selective or recompute.full not in ((), held):
        edit.refuse("recompute", "torchtitan recomputes all layers or none; selective has a list of its own")
    else:
        given.put_policy("full" if recompute.full else "none")


def _write_precision(edit: Edit, request: OverlayRequest) -> None:
    precision = request.candidate.precision
    if precision.level == "O1":
        edit.refuse("precision.level", "torchtitan has no level O1; its 16-bit format is that of level O2")
    if precision.dtype == "float16":
        edit.refuse("precision.dtype", "torchtitan computes in bfloat16 or float32")
    else:
        TitanArguments(edit).put("training.mixed_precision_param", precision.dtype)


def _write_compile(edit: Edit, request: OverlayRequest) -> None:
    given, kernels = TitanArguments(edit), request.candidate.kernels
    given.put("compile.enable", kernels.compile != "off")
    if kernels.compile == "model":
        edit.refuse("kernels.compile", "each block is compiled by itself, not the model as a whole")
    if kernels.compile != "off" and request.changes("kernels.backend", kernels.backend):
        given.put("compile.backend", kernels.backend)


def _write_loader(edit: Edit, request: OverlayRequest) -> None:
    given, loader = TitanArguments(edit), request.candidate.loader
    for name in ("num_workers", "pin_memory", "persistent_workers"):
        if request.changes(f"loader.{name}", getattr(loader, name)):
            given.put(f"dataloader.{name}", getattr(loader, name))
    if loader.num_workers and request.changes("loader.prefetch_factor", loader.prefetch_factor):
        given.put("dataloader.prefetch_factor", loader.prefetch_factor)
    elif not loader.num_workers:
        given.put("dataloader.prefetch_factor", None)


def _write_batch(edit: Edit, request: OverlayRequest) -> None:
    """Write the batch: a rank's is one micro-batch, in a pipeline all those of a step."""
    given, layout = TitanArguments(edit), request.candidate.layout
    micro = request.candidate.micro_batch_size
    if "layout.pp" not in request.reading.values:
        given.put("parallelism.pipeline_parallel_degree", layout.pp)
    given.put(_BATCH, micro if layout.pp == 1 else micro * request.num_microbatches)
    if layout.pp > 1:
        given.put(_MICRO, micro)
    if layout.pp == 1 and request.num_microbatches == 1 and given.get(_GLOBAL) == -1:
        return
    given.put(_GLOBAL, request.global_batch_size)


def _write_seed(edit: Edit, seed: int) -> None:
    TitanArguments(edit).put("debug.seed", seed)


# ---- what torchtitan refuses ----


def _check(edit: Edit, request: OverlayRequest) -> None:
    layout, shape, length = request.candidate.layout, request.reading.shape, request.reading.seq_length
    given = TitanArguments(edit)
    if layout.pp > 1 and given.get("training.disable_cuda_graphs") is not True:
        given.put("training.disable_cuda_graphs", value=True)
        edit.warn("layout.pp", "CUDA graphs, which torchtitan captures by default, are off: it has none for pipelines")
    divisor = (layout.tp if layout.sequence_parallel else 1) * (2 * layout.cp if layout.cp > 1 else 1)
    if length and length % divisor:
        edit.refuse("layout.tp" if layout.tp > 1 else "layout.cp", f"{length} tokens are no multiple of {divisor}")
    if layout.pp > 1 and request.num_microbatches < layout.pp:
        edit.warn("layout.pp", f"{request.num_microbatches} micro-batches leave stages idle")
    if shape is not None and (shape.num_heads % layout.tp or shape.num_kv_heads % layout.tp):
        edit.refuse("layout.tp", f"{shape.num_heads} heads, {shape.num_kv_heads} groups: no multiples of {layout.tp}")


_PARTS = (
    OverlayPart(
        paths=("layout.pp", "layout.schedule", "layout.num_virtual_stages", "layout.stage_layers"),
        write=_write_pipeline,
    ),
    OverlayPart(paths=("layout.tp", "layout.cp", "layout.sequence_parallel"), write=_write_degrees),
    OverlayPart(paths=("layout.dp_replicate", "layout.dp_shard", "layout.zero_stage"), write=_write_data_parallel),
    OverlayPart(paths=("recompute.full", "recompute.selective"), write=_write_recompute),
    OverlayPart(paths=("precision.level", "precision.dtype"), write=_write_precision),
    OverlayPart(paths=("kernels.compile", "kernels.backend"), write=_write_compile),
    OverlayPart(
        paths=tuple(
            f"loader.{name}" for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
        ),
        write=_write_loader,
    ),
    OverlayPart(paths=("micro_batch_size",), write=_write_batch),
)
LAYING = Laying(parts=_PARTS, read=read_edit, batch=_write_batch, seed=_write_seed, check=_check, copies_files=False)
