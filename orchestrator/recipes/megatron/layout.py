"""Megatron-LM arguments of the parallel layout."""

from __future__ import annotations

import re
from typing import Any

from orchestrator.recipes.base import Draft, Setting, Settings, custom, lacking, option
from orchestrator.recipes.gaps import own_collectives, sharded_from
from orchestrator.recipes.layers import in_model_order, is_uniform, num_microbatches, refuse_stages
from orchestrator.recipes.shell import WORLD_SIZE
from trials.spec import Counts

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
_INSTANCES = "--num-distributed-optimizer-instances"
_FSDP = "--use-megatron-fsdp"
_STRATEGY = "--data-parallel-sharding-strategy"
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_STAGES = "--pipeline-model-parallel-layout"
_CP_METHOD = "--cp-comm-type"
_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
CP_METHODS = {"all_gather": "all_gather", "ulysses": "a2a", "ring": "p2p"}

_DATA_PARALLEL = (
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--use-distributed-optimizer",
    _INSTANCES,
    _FSDP,
    _STRATEGY,
    "--no-gradient-accumulation-fusion",
    "--ckpt-format",
)


def degree(settings: Settings, name: str) -> int:
    return int(settings.get(name, 1))


def data_parallel(settings: Settings) -> int:
    """Data-parallel degree: the ranks that the other degrees leave over."""
    return int(settings[WORLD_SIZE]) // (degree(settings, TP) * degree(settings, PP) * degree(settings, CP))


def _write_data_parallel(draft: Draft) -> None:
    layout, settings = draft.candidate.layout, draft.settings
    settings[WORLD_SIZE] = layout.world_size
    if layout.dp * layout.cp > 1:
        settings["--overlap-grad-reduce"] = True
    if layout.zero_stage >= 1:
        settings |= {"--use-distributed-optimizer": True, "--overlap-param-gather": True}
        settings[_INSTANCES] = layout.dp_replicate
    if layout.zero_stage >= 2:
        settings |= {_FSDP: True, _STRATEGY: _STRATEGIES[layout.zero_stage]}
        settings |= {"--no-gradient-accumulation-fusion": True, "--ckpt-format": "fsdp_dtensor"}


def _read_data_parallel(settings: Settings) -> dict[str, Any]:
    total = data_parallel(settings)
    stage = {name: stage for stage, name in _STRATEGIES.items()}.get(settings.get(_STRATEGY, ""), 1)
    if "--use-distributed-optimizer" not in settings:
        return {"layout.dp_replicate": total, "layout.dp_shard": 1, "layout.zero_stage": 0}
    replicas = degree(settings, _INSTANCES)
    return {"layout.dp_replicate": replicas, "layout.dp_shard": total // replicas, "layout.zero_stage": stage}


def _write_sequence_parallel(draft: Draft) -> None:
    if draft.candidate.layout.sequence_parallel:
        draft.settings["--sequence-parallel"] = True


def _write_cp_method(draft: Draft) -> None:
    if draft.candidate.layout.cp > 1:
        draft.settings[_CP_METHOD] = CP_METHODS[draft.candidate.layout.cp_method]


def _read_cp_method(settings: Settings) -> dict[str, Any]:
    names = {theirs: ours for ours, theirs in CP_METHODS.items()}
    return {"layout.cp_method": names[settings[_CP_METHOD]]} if _CP_METHOD in settings else {}


def _write_pipeline(draft: Draft) -> None:
    layout = draft.candidate.layout
    if layout.pp == 1:
        return
    _note_schedule(draft)
    counts = in_model_order(layout, draft.workload.num_layers)
    if not is_uniform(layout.stage_layers):
        draft.settings[_STAGES] = _stages_text(counts)
    elif layout.num_virtual_stages > 1:
        draft.settings[_CHUNKS] = layout.num_virtual_stages


def _note_schedule(draft: Draft) -> None:
    layout = draft.candidate.layout
    if layout.schedule == "zbv":
        draft.refuse("layout.schedule", "Megatron-LM has no zero-bubble schedule")
        refuse_stages(draft, "stages in a V need the zero-bubble schedule")
    elif layout.schedule == "gpipe":
        kind = "interleaved 1F1B" if layout.num_virtual_stages > 1 else "1F1B"
        draft.warn("layout.schedule", f"Megatron-LM runs {kind}: the same bubble, fewer activations in flight")
    number = num_microbatches(draft)
    if layout.num_virtual_stages > 1 and number % layout.pp:
        draft.refuse("layout.num_virtual_stages", f"{number} micro-batches do not come in rounds of pp {layout.pp}")


def _stages_text(counts: list[int]) -> str:
    stages = [f"t*{count}" if count else "" for count in counts]
    return "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])


def _read_pipeline(settings: Settings) -> dict[str, Any]:
    if degree(settings, PP) == 1:
        return {}
    rows = held_layers(settings)
    return {
        "layout.schedule": "interleaved" if len(rows) > 1 else "1f1b",
        "layout.num_virtual_stages": len(rows),
        "layout.stage_layers": rows,
    }


def held_layers(settings: Settings) -> Counts:
    """Layers of every chunk and stage; without a pipeline all in one."""
    pp = degree(settings, PP)
    if _STAGES in settings:
        counts = [sum(map(int, re.findall(r"t\*(\d+)", stage))) for stage in settings[_STAGES].split("|")]
    else:
        stages = pp * degree(settings, _CHUNKS)
        counts = [int(settings.get("--num-layers", 0)) // stages] * stages
    return tuple(tuple(counts[start : start + pp]) for start in range(0, len(counts), pp))


SETTINGS: tuple[Setting, ...] = (
    option("layout.tp", TP, of=int),
    option("layout.pp", PP, of=int),
    option("layout.cp", CP, of=int),
    custom(
        ("layout.dp_replicate", "layout.dp_shard", "layout.zero_stage"),
        (WORLD_SIZE, *_DATA_PARALLEL),
        _write_data_parallel,
        _read_data_parallel,
    ),
    lacking("layout.replicate_with", "Megatron-LM replicates with its own bucketed all-reduce, as ddp does"),
    sharded_from(
        3,
        refused="embedding and head are sharded with zero_stage 3 only",
        warned="zero_stage 3 shards embedding and head, as parts of larger units",
    ),
    custom(
        ("layout.sequence_parallel",),
        ("--sequence-parallel",),
        _write_sequence_parallel,
        lambda settings: {"layout.sequence_parallel": "--sequence-parallel" in settings},
    ),
    own_collectives(
        "Megatron-LM always places its collectives by hand, as tp_engine local does",
        lambda settings: degree(settings, TP),
    ),
    lacking(
        "layout.num_copies",
        "a micro-batch runs as one; what overlaps instead, inside operators, is --tp-comm-overlap, not set here",
    ),
    custom(("layout.cp_method",), (_CP_METHOD,), _write_cp_method, _read_cp_method),
    custom(
        ("layout.schedule", "layout.num_virtual_stages", "layout.stage_layers"),
        (_CHUNKS, _STAGES),
        _write_pipeline,
        _read_pipeline,
    ),
)
