"""torchtitan's configuration: parallelism, batches and recompute."""

from __future__ import annotations

from typing import Any, Literal

from orchestrator.recipes.base import Draft, Setting, Settings, custom, fixed, lacking, option
from orchestrator.recipes.gaps import unable
from orchestrator.recipes.layers import present
from orchestrator.recipes.torchtitan.text import ACTIVATION_CHECKPOINT
from trials.spec import Counts, Layout
from trials.stages import all_chunks

_RESHARD, _REPLICAS, _SHARDS = (
    "parallelism.fsdp_reshard_after_forward",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
)
_TP, _SP, _BACKEND = (
    "parallelism.tensor_parallel_degree",
    "parallelism.enable_sequence_parallel",
    "parallelism.spmd_backend",
)
_CP, _BALANCER = "parallelism.context_parallel_degree", "parallelism.context_parallel_load_balancer"
_PP, _SCHEDULE, _PARTS, _MICRO = (
    "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_schedule",
    "parallelism.module_fqns_per_model_part",
    "parallelism.pipeline_parallel_microbatch_size",
)
_LOCAL_BATCH, _GLOBAL_BATCH = "training.local_batch_size", "training.global_batch_size"
SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble", "gpipe": "GPipe"}
LOOPED_GPIPE = "LoopedBFS"
_ENGINES = {"dtensor": "partial_dtensor", "local": "spmd_types"}


# ---- data parallelism ----


def _write_data_parallel(draft: Draft) -> None:
    layout = draft.candidate.layout
    draft.settings |= {
        _REPLICAS: layout.dp_replicate,
        _SHARDS: layout.dp_shard,
        _RESHARD: "always" if layout.zero_stage == 3 else "never",
    }
    if layout.zero_stage == 1:
        draft.warn("layout.zero_stage", "FSDP2 has no stage 1; this is stage 2, which computes the same")
    if layout.cp > 1 and layout.dp_shard == 1:
        draft.warn("layout.zero_stage", "weights are sharded over the cp ranks, where replicas were measured")
    if _chooses_engine(layout) and layout.replicate_with == "ddp":
        draft.warn("layout.replicate_with", "replicas are FSDP2's, not DDP's")
    if layout.dp_shard > 1 and not layout.shard_embedding:
        draft.warn("layout.shard_embedding", "embedding and head are FSDP units of their own, gathered for each use")
    elif layout.shard_embedding and (layout.dp_shard == 1 or layout.dp_replicate > 1):
        draft.refuse("layout.shard_embedding", f"embedding and head are sharded over {layout.dp_shard} ranks only")


def _write_reduction(draft: Draft) -> None:
    layout = draft.candidate.layout
    if layout.gradient_reduction == _reduction(layout.pp, layout.dp_shard):
        return
    when = "after a pipeline's last micro-batch" if layout.pp > 1 else "after every micro-batch"
    draft.warn("layout.gradient_reduction", f"gradients are always reduced {when}")


def _reduction(pp: int, dp_shard: int) -> Literal["each", "last"]:
    """When torchtitan reduces gradients: its loop never puts that off, torch's pipelines always do."""
    return "last" if pp > 1 and dp_shard > 1 else "each"


def _read_reduction(settings: Settings) -> dict[str, Any]:
    return {"layout.gradient_reduction": _reduction(settings[_PP], settings[_SHARDS])}


def _chooses_engine(layout: Layout) -> bool:
    return layout.zero_stage == 0 and layout.dp_replicate * layout.cp > 1


def _read_data_parallel(settings: Settings) -> dict[str, Any]:
    replicas, shards = settings[_REPLICAS], settings[_SHARDS]
    stage: Any = 0 if shards == 1 else 3 if settings[_RESHARD] == "always" else 2
    layout = Layout(dp_replicate=replicas, dp_shard=shards, cp=settings[_CP], zero_stage=stage)
    return {
        "layout.dp_replicate": replicas,
        "layout.dp_shard": shards,
        "layout.zero_stage": stage,
        "layout.replicate_with": "fsdp2" if _chooses_engine(layout) else "ddp",
        "layout.shard_embedding": shards > 1,
    }


# ---- tensor parallelism ----


def _write_tensor_parallel(draft: Draft) -> None:
    layout = draft.candidate.layout
    draft.settings |= {_TP: layout.tp, _SP: layout.sequence_parallel, _BACKEND: _ENGINES[layout.tp_engine]}


def _read_tensor_parallel(settings: Settings) -> dict[str, Any]:
    engine = next(ours for ours, theirs in _ENGINES.items() if theirs == settings[_BACKEND])
    return {"layout.tp": settings[_TP], "layout.sequence_parallel": settings[_SP], "layout.tp_engine": engine}


# ---- pipeline ----


def _write_pipeline(draft: Draft) -> None:
    layout = draft.candidate.layout
    draft.settings[_PP] = layout.pp
    if layout.pp == 1:
        return
    parts = module_names(draft)
    is_looped_gpipe = layout.schedule == "gpipe" and layout.num_virtual_stages > 1
    draft.settings |= {_SCHEDULE: LOOPED_GPIPE if is_looped_gpipe else SCHEDULES[layout.schedule], _PARTS: parts}
    if not all(parts):
        draft.refuse("layout.stage_layers", "torchtitan cannot run a stage without a layer, between first and last")


def module_names(draft: Draft) -> list[list[str]]:
    """Names of the modules of each stage, in the order of the model."""
    chunks = all_chunks(draft.candidate.layout, draft.workload.num_layers)
    parts = [[f"layers.{layer}" for layer in chunk.layer_ids] for chunk in chunks]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


def _read_pipeline(settings: Settings) -> dict[str, Any]:
    pp = settings[_PP]
    if pp == 1:
        return {"layout.pp": 1}
    named = settings[_SCHEDULE]
    schedule = "gpipe" if named == LOOPED_GPIPE else next(s for s, name in SCHEDULES.items() if name == named)
    counts = _stage_layers(settings[_PARTS], pp, schedule)
    return {
        "layout.pp": pp,
        "layout.schedule": schedule,
        "layout.num_virtual_stages": len(counts),
        "layout.stage_layers": counts,
    }


def _stage_layers(parts: list[list[str]], pp: int, schedule: str) -> Counts:
    """Layers of every chunk and stage; under the V placement the second chunks run backwards."""
    flat = [sum(name.startswith("layers.") for name in part) for part in parts]
    rows = [flat[i : i + pp] for i in range(0, len(flat), pp)]
    return tuple(tuple(reversed(row) if i and schedule == "zbv" else row) for i, row in enumerate(rows))


# ---- batch, recompute ----


def _write_batch(draft: Draft) -> None:
    """Write the local batch: in a pipeline all of a step's micro-batches, else one step of accumulation."""
    total, layout, micro = draft.workload.global_batch_size, draft.candidate.layout, draft.candidate.micro_batch_size
    draft.settings |= {_LOCAL_BATCH: micro if layout.pp == 1 else total // layout.dp, _GLOBAL_BATCH: total}
    if layout.pp > 1:
        draft.settings[_MICRO] = micro


def _read_batch(settings: Settings) -> dict[str, Any]:
    micro = settings[_LOCAL_BATCH] if settings[_PP] == 1 else settings[_MICRO]
    return {"micro_batch_size": micro, "workload.global_batch_size": settings[_GLOBAL_BATCH]}


def _write_recompute(draft: Draft) -> None:
    full = draft.candidate.recompute.full
    draft.settings[ACTIVATION_CHECKPOINT] = "full" if full else "none"
    if full not in ((), present(draft)):
        draft.warn("recompute.full", "it is all layers or none: this file says all, to be on the safe side of memory")


def _read_recompute(settings: Settings) -> dict[str, Any]:
    num_layers = settings.get("model_spec.n_layers")
    if settings[ACTIVATION_CHECKPOINT] == "none" or num_layers is None:
        return {"recompute.full": ()}
    return {"recompute.full": _read_pipeline(settings).get("layout.stage_layers", ((num_layers,),))}


SETTINGS: tuple[Setting, ...] = (
    custom(
        ("micro_batch_size", "workload.global_batch_size"),
        (_LOCAL_BATCH, _GLOBAL_BATCH, _MICRO),
        _write_batch,
        _read_batch,
    ),
    custom(
        tuple(
            f"layout.{name}" for name in ("dp_replicate", "dp_shard", "zero_stage", "replicate_with", "shard_embedding")
        ),
        (_REPLICAS, _SHARDS, _RESHARD),
        _write_data_parallel,
        _read_data_parallel,
    ),
    custom(("layout.gradient_reduction",), (), _write_reduction, _read_reduction),
    custom(
        ("layout.tp", "layout.sequence_parallel", "layout.tp_engine"),
        (_TP, _SP, _BACKEND),
        _write_tensor_parallel,
        _read_tensor_parallel,
    ),
    lacking(
        "layout.num_copies", "micro-batches are not halved; compile.enable_async_tensor_parallel overlaps otherwise"
    ),
    option("layout.cp", _CP),
    unable("layout.cp_method", message="keys and values are gathered: there is neither Ulysses nor a ring"),
    fixed(_BALANCER, "headtail"),
    custom(
        ("layout.pp", "layout.schedule", "layout.num_virtual_stages", "layout.stage_layers"),
        (_PP, _SCHEDULE, _PARTS),
        _write_pipeline,
        _read_pipeline,
    ),
    custom(("recompute.full",), (ACTIVATION_CHECKPOINT,), _write_recompute, _read_recompute),
    unable("recompute.selective", message="SelectiveAC has a list of its own of what is kept; write a subclass"),
    unable("recompute.communication", message="gathered sequence shards are kept, or recomputed with the whole layer"),
)
