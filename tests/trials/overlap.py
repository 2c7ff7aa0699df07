"""Profiles tensor-parallel layers large enough for their collectives to take time."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import torch
import torch.distributed as dist

from tests.trials.split_models import build
from tests.trials.tiny import SHAPE
from trials.spec import Layout
from trials.stages import Chunk
from trials.trace import load, step_times

LARGE = dataclasses.replace(SHAPE, hidden_size=256, ffn_hidden_size=688, num_heads=8, num_kv_heads=8)
SEQ_LENGTH = 256
LAYERS = Chunk(chunk=0, stage=1, virtual_stage=1, layer_ids=(0, 1, 2), is_first=False, is_last=False)
"""Without embedding and head, which have nothing to hide their collectives behind."""


def overlaps(layouts: list[Layout], folder: Path) -> list[tuple[float, float]]:
    """Median overlap of the forward and of the backward pass on this rank, for each layout."""
    traces = [_profile(layout, folder / f"{i}-{dist.get_rank()}.json") for i, layout in enumerate(layouts)]
    return [(_overlap(trace, "forward"), _overlap(trace, "backward")) for trace in traces]


def _overlap(trace: Path, phase: str) -> float:
    return statistics.median(times.overlap for times in step_times(load(trace), phase))


def _profile(layout: Layout, path: Path) -> Path:
    model, _ = build(layout, LAYERS, LARGE, seq_length=SEQ_LENGTH)
    length = SEQ_LENGTH // layout.tp if layout.sequence_parallel else SEQ_LENGTH
    hidden = torch.ones(4, length, LARGE.hidden_size, requires_grad=True)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=7, repeat=1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=schedule,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(9):
            with torch.profiler.record_function("forward"):
                loss = model(hidden).square().mean()
            with torch.profiler.record_function("backward"):
                loss.backward()
            profiler.step()
    return path
