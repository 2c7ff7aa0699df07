"""Peak memory of a real CPU rank, built or in a step, from the allocator's events: what dry runs are held against."""

from __future__ import annotations

import gc
import json
import tempfile
from bisect import bisect_left, insort
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trials.dryrun.simulate import batch
from trials.parallel.mesh import RankIdentity, build_mesh, process_group
from trials.sizes import coordinates
from trials.spec import TrialSpec
from trials.training.loop import SilentMarker, Trainer
from trials.training.tensors import live_storages

CPU = torch.device("cpu")
_MEASURED = "measured step"


def measure_rank(spec: TrialSpec) -> int:
    """Train four steps on zeros as the rank that the environment names; gives the peak bytes of the last.

    The profiler watches the third too, as it does not report releases of what it has not seen allocated.
    """
    identity = RankIdentity.from_env()
    with process_group(identity, CPU):
        mesh = build_mesh(spec.candidate.layout, CPU)
        trainer = Trainer(spec, mesh, CPU, place=coordinates(spec.candidate.layout, identity.rank))
        inputs, targets = batch(spec, trainer)
        for _ in range(2):  # in the second, DDP makes its buckets again
            trainer.step(inputs, targets, SilentMarker())
        gc.collect()
        live = live_storages()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            trainer.step(inputs, targets, SilentMarker())
            gc.collect()
            with record_function(_MEASURED):
                trainer.step(inputs, targets, SilentMarker())
        return peak_bytes(live, *_events(profiler))


def measure_build(spec: TrialSpec) -> int:
    """Peak bytes of building the rank that the environment names: its model with initial values, and its optimiser."""
    identity = RankIdentity.from_env()
    with process_group(identity, CPU):
        mesh = build_mesh(spec.candidate.layout, CPU)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function(_MEASURED):
            trainer = Trainer(spec, mesh, CPU, place=coordinates(spec.candidate.layout, identity.rank))
        del trainer
        return peak_bytes({}, *_events(profiler))


def _events(profiler: profile) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Address and bytes of every allocation (positive) and release (negative), before and in the measured step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    start = next(event["ts"] for event in trace if event.get("name") == _MEASURED and event.get("ph") == "X")
    before: list[tuple[int, int]] = []
    within: list[tuple[int, int]] = []
    for event in sorted((event for event in trace if event.get("name") == "[memory]"), key=lambda event: event["ts"]):
        events = before if event["ts"] < start else within
        events.append((int(event["args"]["Addr"]), int(event["args"]["Bytes"])))
    return before, within


def peak_bytes(live: dict[int, int], before: Iterable[tuple[int, int]], within: Iterable[tuple[int, int]]) -> int:
    """Largest sum of what is allocated during ``within``; ``live`` is what there is before ``before``.

    The profiler does not see releases by the threads of gloo. A block is known to be gone, however, when another one
    is given its place.
    """
    heap = _Heap(live)
    for address, num_bytes in before:
        heap.change(address, num_bytes)
    peak = heap.total
    for address, num_bytes in within:
        heap.change(address, num_bytes)
        peak = max(peak, heap.total)
    return peak


class _Heap:
    """Live bytes, by block, and their peak."""

    def __init__(self, live: dict[int, int]) -> None:
        self._sizes = dict(live)
        self._addresses = sorted(live)
        self.total = sum(live.values())

    def change(self, address: int, num_bytes: int) -> None:
        """Allocate, or release where ``num_bytes`` is negative."""
        if num_bytes < 0:
            self._drop([address] if address in self._sizes else [])
            return
        self._drop(self._overlapping(address, num_bytes))
        self._sizes[address] = num_bytes
        insort(self._addresses, address)
        self.total += num_bytes

    def _drop(self, addresses: list[int]) -> None:
        for address in addresses:
            self.total -= self._sizes.pop(address)
            self._addresses.pop(bisect_left(self._addresses, address))

    def _overlapping(self, address: int, num_bytes: int) -> list[int]:
        start = bisect_left(self._addresses, address)
        if start and self._addresses[start - 1] + self._sizes[self._addresses[start - 1]] > address:
            start -= 1
        return self._addresses[start : bisect_left(self._addresses, address + num_bytes)]
