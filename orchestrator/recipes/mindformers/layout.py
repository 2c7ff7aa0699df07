"""MindFormers settings of the parallel layout and the batch."""

from __future__ import annotations

from typing import Any

from orchestrator.recipes.base import Draft, Setting, Settings, custom, lacking, option
from orchestrator.recipes.gaps import own_collectives, sharded_from
from orchestrator.recipes.layers import num_microbatches
from trials.spec import Counts

DP, PP = "parallel_config.data_parallel", "parallel_config.pipeline_stage"
TP, CP = "parallel_config.model_parallel", "parallel_config.context_parallel"
NUM_LAYERS = "model.model_config.num_layers"
COPIES = "micro_batch_interleave_num"
BATCH, ACCUMULATED = "runner_config.batch_size", "runner_config.gradient_accumulation_steps"
MICRO_BATCHES = "parallel_config.micro_batch_num"
SHARDS, LEVEL, SHARD_SIZE = (
    "parallel.enable_parallel_optimizer",
    "parallel.parallel_optimizer_config.optimizer_level",
    "parallel.parallel_optimizer_config.optimizer_weight_shard_size",
)
SHARDS_SUMS = "parallel.parallel_optimizer_config.gradient_accumulation_shard"
INTERLEAVE, SCHEDULER = "parallel.pipeline_config.pipeline_interleave", "parallel.pipeline_config.pipeline_scheduler"
CHUNKS, OFFSET = "model.model_config.pp_interleave_num", "model.model_config.offset"
CP_METHOD = "parallel_config.context_parallel_algo"
CP_METHODS = {"all_gather": "colossalai_cp", "ulysses": "ulysses_cp"}
SCHEDULERS = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "1f1b", "zbv": "zero_bubble_v"}


def _write_data_parallel(draft: Draft) -> None:
    layout = draft.candidate.layout
    draft.settings |= {DP: layout.dp, SHARDS: layout.zero_stage > 0}
    if layout.zero_stage:
        draft.settings |= {LEVEL: f"level{layout.zero_stage}", SHARD_SIZE: layout.dp_shard * layout.cp}
    if layout.zero_stage >= 2:
        draft.settings[SHARDS_SUMS] = layout.gradient_reduction == "each"


def _read_data_parallel(settings: Settings) -> dict[str, Any]:
    stage = int(settings[LEVEL].removeprefix("level")) if settings[SHARDS] else 0
    shards = settings[SHARD_SIZE] // settings[CP] if stage else 1
    return {
        "layout.dp_replicate": settings[DP] // shards,
        "layout.dp_shard": shards,
        "layout.zero_stage": stage,
        "layout.gradient_reduction": "each" if stage < 2 or settings[SHARDS_SUMS] else "last",
    }


def _write_embedding(draft: Draft) -> None:
    """Write the embedding split over the vocabulary, like the runner's, wherever there is tensor parallelism."""
    draft.settings["parallel_config.vocab_emb_dp"] = draft.candidate.layout.tp == 1


def _write_cp_method(draft: Draft) -> None:
    layout = draft.candidate.layout
    if layout.cp == 1:
        return
    draft.settings[CP_METHOD] = CP_METHODS.get(layout.cp_method, CP_METHODS["all_gather"])
    if layout.cp_method not in CP_METHODS:
        draft.refuse("layout.cp_method", f"there is no {layout.cp_method}; this file says all_gather")


def _read_cp_method(settings: Settings) -> dict[str, Any]:
    ours = {theirs: name for name, theirs in CP_METHODS.items()}
    return {"layout.cp_method": ours[settings[CP_METHOD]]} if CP_METHOD in settings else {}


def _write_pipeline(draft: Draft) -> None:
    layout = draft.candidate.layout
    if layout.pp == 1:
        return
    chunks = layout.num_virtual_stages
    draft.settings |= {INTERLEAVE: chunks > 1, SCHEDULER: SCHEDULERS[layout.schedule], CHUNKS: chunks}
    share = draft.workload.num_layers // (layout.pp * chunks)
    rows = [[count - share for count in row] for row in layout.stage_layers]
    draft.settings[OFFSET] = rows[0] if len(rows) == 1 else rows
    if 0 in [count for row in layout.stage_layers for count in row][1:-1]:
        draft.refuse("layout.stage_layers", "only the first and the last stage may be without layers")
    if num_microbatches(draft) < layout.pp:
        draft.refuse("layout.pp", f"MindFormers needs a micro-batch per stage: {num_microbatches(draft)}")


def _read_pipeline(settings: Settings) -> dict[str, Any]:
    if settings[PP] == 1:
        return {}
    theirs = settings[SCHEDULER]
    schedule = {"zero_bubble_v": "zbv"}.get(theirs, theirs)
    chunks = settings[CHUNKS]
    return {
        "layout.schedule": "interleaved" if chunks > 1 and schedule == "1f1b" else schedule,
        "layout.num_virtual_stages": chunks,
        "layout.stage_layers": held_layers(settings),
    }


def held_layers(settings: Settings) -> Counts:
    """Layers of every chunk and stage; without a pipeline all in one."""
    pp = settings[PP]
    if pp == 1:
        return ((settings.get(NUM_LAYERS, 0),),)
    share = settings.get(NUM_LAYERS, 0) // (pp * settings[CHUNKS])
    offset = settings[OFFSET]
    rows = offset if isinstance(offset[0], list) else [offset]
    return tuple(tuple(share + number for number in row) for row in rows)


def _write_batch(draft: Draft) -> None:
    candidate, number = draft.candidate, num_microbatches(draft)
    copies = candidate.layout.num_copies
    draft.settings |= {COPIES: copies, BATCH: candidate.micro_batch_size // copies}
    draft.settings |= {MICRO_BATCHES: number} if candidate.layout.pp > 1 else {ACCUMULATED: number}


def _read_batch(settings: Settings) -> dict[str, Any]:
    micro_batch = settings[BATCH] * settings[COPIES]
    number = settings[MICRO_BATCHES if settings[PP] > 1 else ACCUMULATED]
    return {
        "layout.num_copies": settings[COPIES],
        "micro_batch_size": micro_batch,
        "workload.global_batch_size": micro_batch * number * settings[DP],
    }


_PIPELINE = (INTERLEAVE, SCHEDULER, CHUNKS, OFFSET)

SETTINGS: tuple[Setting, ...] = (
    option("layout.tp", TP),
    option("layout.pp", PP),
    option("layout.cp", CP),
    custom(
        ("layout.dp_replicate", "layout.dp_shard", "layout.zero_stage", "layout.gradient_reduction"),
        (DP, SHARDS, LEVEL, SHARD_SIZE, SHARDS_SUMS),
        _write_data_parallel,
        _read_data_parallel,
    ),
    lacking("layout.replicate_with", "MindSpore replicates with its own fused all-reduce, as ddp does"),
    sharded_from(
        1,
        refused="embedding and head are sharded by the parallel optimiser only",
        warned="the parallel optimiser shards embedding and head like other weights",
    ),
    option("layout.sequence_parallel", "parallel_config.use_seq_parallel"),
    own_collectives("MindSpore's compiler places the collectives", lambda settings: int(settings[TP])),
    custom((), ("parallel_config.vocab_emb_dp",), _write_embedding),
    custom(("layout.cp_method",), (CP_METHOD,), _write_cp_method, _read_cp_method),
    custom(
        ("layout.schedule", "layout.num_virtual_stages", "layout.stage_layers"),
        _PIPELINE,
        _write_pipeline,
        _read_pipeline,
    ),
    custom(
        ("layout.num_copies", "micro_batch_size", "workload.global_batch_size"),
        (COPIES, BATCH, MICRO_BATCHES, ACCUMULATED),
        _write_batch,
        _read_batch,
    ),
)
