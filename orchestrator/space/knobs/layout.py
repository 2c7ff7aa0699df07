"""The knobs of the parallel layout, with their types, defaults and descriptions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.space.knobs.knob import Knob
from orchestrator.space.knobs.layer_choices import resolve_stage_layers
from orchestrator.space.knobs.layer_types import StageLayersValue
from orchestrator.space.knobs.sections import Degree
from trials.spec import Candidate, Layout, Schedule


def _resolve_stage_layers(value: Any, candidate: Candidate, num_layers: int) -> Any:
    layout = candidate.layout
    return resolve_stage_layers(
        value,
        num_layers=num_layers,
        pp=layout.pp,
        num_virtual_stages=layout.num_virtual_stages,
        schedule=layout.schedule,
    )


def _knob(name: str, value_type: Any, description: str, **options: Any) -> Knob:
    default = options.pop("default", getattr(Layout(), name))
    return Knob(
        name=name,
        type=value_type,
        default=default,
        part="layout",
        read=lambda candidate: getattr(candidate.layout, name),
        description=description,
        **options,
    )


LAYOUT_KNOBS: tuple[Knob, ...] = (
    _knob("pp", Degree, "Pipeline-parallel degree: stages the layers are spread over."),
    _knob(
        "schedule",
        Schedule,
        "Order of forward and backward passes in a pipeline; zbv is zero bubble with two V-shaped chunks per rank.",
    ),
    _knob(
        "num_virtual_stages",
        Degree,
        "Chunks of layers per pipeline rank: at least 2 for interleaved, any number for gpipe, 1 for 1f1b. "
        "Becomes 2 with zbv and 1 where pp is 1.",
    ),
    _knob(
        "stage_layers",
        StageLayersValue,
        "Layers per stage: even (what is left over goes to the first stages in model order), {offset: [-2, 1, 1, 0]} "
        "or {counts: [10, 11, 11, 8]}; one list per chunk where there are several.",
        default="even",
        resolve=_resolve_stage_layers,
    ),
    _knob("dp_replicate", Degree, "Data-parallel replicas (outer degree): every replica holds all states."),
    _knob("dp_shard", Degree, "Data-parallel ranks that share one copy of what `zero_stage` names."),
    _knob(
        "zero_stage",
        Annotated[int, Field(ge=0, le=3)],
        "What `dp_shard` shards: 1 optimiser states, 2 also gradients, 3 also parameters. "
        "Becomes 0 where dp_shard is 1.",
    ),
    _knob(
        "gradient_reduction",
        Literal["each", "last"],
        "When ZeRO stages 2 and 3 reduce gradients while accumulating: after each micro-batch, or after the last and "
        "keep them whole until then. Becomes each where zero_stage is below 2.",
    ),
    _knob(
        "replicate_with",
        Literal["auto", "ddp", "fsdp2"],
        "Engine of replication without sharding; auto: ddp where tp is 1, stages have one chunk and shard_embedding "
        "is off, else fsdp2. ZeRO-1 always uses buckets of its own, ZeRO-2 and 3 FSDP2.",
        default="auto",
        resolved_type=Literal["ddp", "fsdp2"],
    ),
    _knob(
        "shard_embedding",
        bool,
        "Shard embedding and head over all data-parallel ranks, whatever the layers do. "
        "Becomes false without data-parallel ranks.",
    ),
    _knob("cp", Degree, "Context-parallel degree: parts every sequence is split into."),
    _knob(
        "cp_method",
        Literal["all_gather", "ulysses", "ring"],
        "How attention sees the whole sequence: gather keys and values, exchange sequence for heads (Ulysses), or pass "
        "keys and values around (ring).",
    ),
    _knob("tp", Degree, "Tensor-parallel degree, kept inside a node."),
    _knob(
        "sequence_parallel",
        bool,
        "Shard the norm regions along the sequence over the tp ranks. Becomes false where tp is 1.",
    ),
    _knob(
        "tp_engine",
        Literal["auto", "dtensor", "local"],
        "dtensor: PyTorch's own; local: plain tensors with explicit collectives; auto: local where dtensor cannot "
        "do it (num_copies 2, DDP or ZeRO-1, recompute of communication), else dtensor.",
        default="auto",
        resolved_type=Literal["dtensor", "local"],
    ),
    _knob(
        "num_copies",
        Literal[1, 2],
        "2 runs each micro-batch as two halves, one's collectives behind the other's computation. "
        "Becomes 1 where tp is 1.",
    ),
)
