"""PaddleNLP arguments of the parallel layout and the batch."""

from __future__ import annotations

from typing import Any

from orchestrator.recipes.base import Draft, Setting, Settings, custom, lacking, option
from orchestrator.recipes.gaps import own_collectives, sharded_from
from orchestrator.recipes.layers import is_uniform, num_microbatches, refuse_stages
from orchestrator.recipes.shell import WORLD_SIZE
from trials.spec import Counts

TP, PP = "tensor_parallel_degree", "pipeline_parallel_degree"
RING, ULYSSES = "context_parallel_degree", "sep_parallel_degree"
CHUNKS = "virtual_pp_degree"
SHARDING, SHARDS = "sharding", "sharding_parallel_degree"
BATCH, ACCUMULATED = "per_device_train_batch_size", "gradient_accumulation_steps"
NUM_LAYERS = "model:num_hidden_layers"


def _cp(settings: Settings) -> int:
    return int(max(settings.get(RING, 1), settings.get(ULYSSES, 1)))


def data_parallel(settings: Settings) -> int:
    """Data-parallel degree: the ranks that the other degrees leave over."""
    return int(settings[WORLD_SIZE] // (settings[TP] * settings[PP] * _cp(settings)))


def _write_data_parallel(draft: Draft) -> None:
    layout = draft.candidate.layout
    draft.settings[WORLD_SIZE] = layout.world_size
    if layout.zero_stage:
        draft.settings |= {SHARDING: f"stage{layout.zero_stage}", SHARDS: layout.dp_shard}
    if layout.zero_stage > 1 and layout.pp > 1:
        draft.refuse("layout.zero_stage", "PaddleNLP takes stage1 only beside pipeline stages")
    if layout.zero_stage and layout.cp > 1:
        draft.refuse("layout.dp_shard", "states are not sharded over context-parallel ranks too: more memory")


def _read_data_parallel(settings: Settings) -> dict[str, Any]:
    shards = settings.get(SHARDS, 1)
    return {
        "layout.dp_replicate": data_parallel(settings) // shards,
        "layout.dp_shard": shards,
        "layout.zero_stage": int(settings.get(SHARDING, "stage0").removeprefix("stage")),
    }


def _write_cp(draft: Draft) -> None:
    layout = draft.candidate.layout
    if layout.cp > 1 and layout.cp_method == "ulysses":
        draft.settings[ULYSSES] = layout.cp
    elif layout.cp > 1:
        draft.settings[RING] = layout.cp
    if layout.cp > 1 and layout.cp_method == "all_gather":
        draft.warn("layout.cp_method", "keys and values go round a ring instead of being gathered at once")


def _method(settings: Settings) -> str:
    if _cp(settings) == 1:
        return "all_gather"
    return "ulysses" if ULYSSES in settings else "ring"


def _read_cp(settings: Settings) -> dict[str, Any]:
    return {"layout.cp": _cp(settings), "layout.cp_method": _method(settings)}


def _write_pipeline(draft: Draft) -> None:
    layout = draft.candidate.layout
    if layout.pp == 1:
        return
    draft.settings[CHUNKS] = layout.num_virtual_stages
    if layout.schedule == "zbv":
        draft.refuse("layout.schedule", "PaddleNLP has no such zero-bubble schedule")
        refuse_stages(draft, "stages in a V need the zero-bubble schedule")
    elif layout.schedule == "gpipe":
        kind = "interleaved 1F1B" if layout.num_virtual_stages > 1 else "1F1B"
        draft.warn("layout.schedule", f"Paddle runs {kind}: the same bubble, fewer activations in flight")
    if layout.schedule != "zbv" and not is_uniform(layout.stage_layers):
        refuse_stages(draft, "every stage holds the same number of layers")
    number = num_microbatches(draft)
    if layout.num_virtual_stages > 1 and number % layout.pp:
        draft.refuse("layout.num_virtual_stages", f"{number} micro-batches do not come in rounds of pp {layout.pp}")


def _read_pipeline(settings: Settings) -> dict[str, Any]:
    if settings[PP] == 1:
        return {}
    rows = held_layers(settings)
    return {
        "layout.schedule": "interleaved" if len(rows) > 1 else "1f1b",
        "layout.num_virtual_stages": len(rows),
        "layout.stage_layers": rows,
    }


def held_layers(settings: Settings) -> Counts:
    """Layers of every chunk and stage; without a pipeline all in one."""
    pp, chunks = int(settings[PP]), int(settings.get(CHUNKS, 1))
    return ((int(settings.get(NUM_LAYERS, 0)) // (pp * chunks),) * pp,) * chunks


def _write_batch(draft: Draft) -> None:
    draft.settings |= {BATCH: draft.candidate.micro_batch_size, ACCUMULATED: num_microbatches(draft)}


def _read_batch(settings: Settings) -> dict[str, Any]:
    size, number = settings[BATCH], settings[ACCUMULATED]
    return {"micro_batch_size": size, "workload.global_batch_size": size * number * data_parallel(settings)}


SETTINGS: tuple[Setting, ...] = (
    option("layout.tp", TP),
    option("layout.pp", PP),
    custom(("layout.cp", "layout.cp_method"), (RING, ULYSSES), _write_cp, _read_cp),
    custom(
        ("layout.dp_replicate", "layout.dp_shard", "layout.zero_stage"),
        (WORLD_SIZE, SHARDING, SHARDS),
        _write_data_parallel,
        _read_data_parallel,
    ),
    lacking("layout.replicate_with", "Paddle replicates with its own bucketed all-reduce, as ddp does"),
    sharded_from(
        3,
        refused="embedding and head are sharded with stage3 only",
        warned="stage3 shards embedding and head like other weights",
    ),
    option("layout.sequence_parallel", "sequence_parallel"),
    own_collectives(
        "Paddle always places its collectives by hand, as tp_engine local does", lambda settings: int(settings[TP])
    ),
    lacking("layout.num_copies", "a micro-batch runs as one"),
    custom(
        ("layout.schedule", "layout.num_virtual_stages", "layout.stage_layers"),
        (CHUNKS,),
        _write_pipeline,
        _read_pipeline,
    ),
    custom(("micro_batch_size", "workload.global_batch_size"), (BATCH, ACCUMULATED), _write_batch, _read_batch),
)
