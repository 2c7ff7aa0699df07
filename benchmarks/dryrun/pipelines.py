"""Pipelines that are simulated in full, to hold what is extrapolated from shorter ones against them."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.dryrun.cases import O2, SMALL
from trials.spec import (
    Candidate,
    Layout,
    Offload,
    Precision,
    Recompute,
    SelectiveRecompute,
    TrialSpec,
    Workload,
)


def pipeline(
    stage_layers: tuple[tuple[int, ...], ...],
    num_microbatches: int,
    *,
    micro_batch_size: int = 1,
    candidate: dict[str, Any] | None = None,
    **layout: Any,
) -> TrialSpec:
    """A small Llama with those layers on each stage, by chunk."""
    chosen = Layout(pp=len(stage_layers[0]), stage_layers=stage_layers, num_virtual_stages=len(stage_layers), **layout)
    model = dataclasses.replace(SMALL.model, num_layers=sum(map(sum, stage_layers)))
    workload: Workload = dataclasses.replace(
        SMALL, model=model, global_batch_size=num_microbatches * micro_batch_size * chosen.dp
    )
    made = Candidate(layout=chosen, micro_batch_size=micro_batch_size, **(candidate or {}))
    return TrialSpec(workload=workload, candidate=made)


def _sharded(stage: int, **more: Any) -> dict[str, Any]:
    return {"dp_shard": 2, "zero_stage": stage, **more}


_FOUR, _FIVE = ((2, 2, 2, 2),), ((1, 2, 2, 2, 1),)
_CHUNKS = ((1, 1, 1, 1), (1, 1, 1, 1))
_FEED_FORWARD = SelectiveRecompute(pattern="feed_forward", num_layers=((1, 1, 1, 1),))
_ATTENTION = SelectiveRecompute(pattern="attention", num_layers=((0, 1, 2, 1),))
_TP = {"tp": 2, "sequence_parallel": True}

PIPELINES: dict[str, TrialSpec] = {
    "1f1b": pipeline(_FIVE, 9),
    "1f1b, as few as can be": pipeline(((1,) * 6,), 6),
    "1f1b, uneven": pipeline(((1, 7, 3, 5),), 8),
    "1f1b, an empty stage": pipeline(((2, 0, 2, 2, 1),), 7),
    "1f1b, FSDP replicas, fp8": pipeline(
        _FOUR,
        8,
        dp_replicate=2,
        replicate_with="fsdp2",
        candidate={"precision": Precision(level="O1-fp8", dtype="bfloat16")},
    ),
    "1f1b, ZeRO-1, copies, offloaded optimiser": pipeline(
        _FOUR, 8, **_sharded(1, dp_replicate=2), candidate={"offload": Offload(optimizer=True)}
    ),
    "1f1b, ZeRO-2, offloaded activations": pipeline(
        _FIVE, 9, **_sharded(2), candidate={"offload": Offload(activations=True)}
    ),
    "1f1b, ZeRO-2 at the end, O1": pipeline(
        _FOUR,
        8,
        **_sharded(2, gradient_reduction="last"),
        candidate={"precision": Precision(level="O1", dtype="bfloat16")},
    ),
    "1f1b, ZeRO-3 at the end, CP ring": pipeline(
        _FOUR, 8, **_sharded(3, gradient_reduction="last"), cp=2, cp_method="ring"
    ),
    "1f1b, ZeRO-3, ends sharded, selective recompute": pipeline(
        _FOUR,
        8,
        **_sharded(3, shard_embedding=True),
        candidate={"recompute": Recompute(selective=(_FEED_FORWARD, _ATTENTION))},
    ),
    "1f1b, gathers again": pipeline(
        _FOUR, 8, **_TP, tp_engine="local", candidate={"recompute": Recompute(communication=((2, 2, 1, 2),))}
    ),
    "1f1b, long runs recomputed in part": pipeline(
        ((12, 14, 12, 11),), 6, candidate={"recompute": Recompute(full=((6, 7, 6, 5),))}
    ),
    "gpipe, ZeRO-3": pipeline(_FOUR, 10, schedule="gpipe", **_sharded(3)),
    "interleaved, uneven chunks": pipeline(((2, 1, 1, 3), (1, 2, 0, 1)), 12, schedule="interleaved"),
    "interleaved, odd rounds, full recompute": pipeline(
        _CHUNKS, 10, schedule="interleaved", candidate={"recompute": Recompute(full=((1, 1, 1, 1), (0, 1, 0, 1)))}
    ),
    "interleaved, 3 chunks, ZeRO-1": pipeline(((1,) * 4,) * 3, 16, schedule="interleaved", **_sharded(1)),
    "zbv": pipeline(_CHUNKS, 12, schedule="zbv"),
    "zbv, 6 ranks, ZeRO-1": pipeline(((1,) * 6, (1,) * 6), 14, schedule="zbv", **_sharded(1)),
    "zbv, ZeRO-3": pipeline(_CHUNKS, 12, schedule="zbv", **_sharded(3)),
    "zbv, O2, TP": pipeline(_CHUNKS, 12, schedule="zbv", **_TP, tp_engine="local", candidate={"precision": O2}),
}
"""Trials that are only simulated: every schedule, and what else changes memory in a pipeline."""
