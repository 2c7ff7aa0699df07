"""Runners that do as little as a trial can do: join the gang, reduce one number, report."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trials.files import to_json
from trials.outcome import ProgressSink, RankReport, StepBreakdown

STAMP = "TUNE_CLUSTER_BENCH_STAMP"
"""Environment variable: where rank 0 notes the time of its first finished all-reduce."""


def no_op(spec: Mapping[str, Any], progress: ProgressSink) -> dict[str, Any]:  # noqa: ARG001
    """Form the gang, all-reduce once, and report a constant measurement."""
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    progress("starting")
    dist.init_process_group("gloo", init_method=os.environ["TUNE_CLUSTER_RENDEZVOUS"], rank=rank, world_size=world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    if total.item() != world_size:
        raise RuntimeError(f"all-reduce gave {total.item()} instead of {world_size}")
    if rank == 0 and STAMP in os.environ:
        Path(os.environ[STAMP]).write_text(repr(time.time()), encoding="ascii")
    dist.destroy_process_group()
    return _report(rank, world_size)


def _report(rank: int, world_size: int) -> dict[str, Any]:
    report = RankReport(
        rank=rank,
        world_size=world_size,
        tokens_per_step=1,
        step_times_s=(1.0, 1.0, 1.0),
        breakdown=StepBreakdown(),
        peak_allocated_bytes=0,
        peak_reserved_bytes=0,
        num_warmup_steps=0,
        losses=(1.0,),
        grad_norms=(1.0,),
        model_flops_per_token=1.0,
    )
    encoded: dict[str, Any] = to_json(report)
    return encoded
