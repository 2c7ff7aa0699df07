"""The loader that brings batches to the step: torch's, over endless epochs, with workers that die with their rank."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import logging
import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Generator, Iterator

import torch
from torch.utils.data import DataLoader, Sampler

from trials.datasets import Batch, StepBatches
from trials.failure import DataError
from trials.reports import LoaderPoint, LoaderTuningReport
from trials.spec import Loader, LoaderTuning


def stream_batches(dataset: StepBatches, loader: Loader, *, pin_memory: bool) -> Generator[Batch, None, None]:
    """Batches of steps 0, 1, ... without end, epoch after epoch.

    The iterator starts anew at each epoch, as in ordinary training: without ``persistent_workers`` the workers are
    started again, and the first batch of an epoch is waited for.

    Raises:
        DataError: as the dataset raises it, also when that happened in a worker.
    """
    steps = EpochSteps(dataset.epoch_length)
    data_loader = build_loader(dataset, loader, steps, pin_memory=pin_memory)
    for epoch in itertools.count():
        steps.epoch = epoch
        try:
            with _any_number_of_workers():
                iterator = iter(data_loader)
            yield from iterator
        except DataError as error:
            # A worker's error arrives with its traceback inside the message.
            raise DataError(str(error).rpartition("DataError: ")[2].strip()) from error


def build_loader(dataset: StepBatches, loader: Loader, steps: EpochSteps, *, pin_memory: bool) -> DataLoader[Batch]:
    """A loader that gives the batches of ``steps``, in order, per iteration.

    They are read by ``num_workers`` processes ahead of the step, or in line when there are none. Workers are forked,
    which takes milliseconds where importing torch anew takes seconds, and die with their rank.
    """
    workers = loader.num_workers
    with _any_number_of_workers():
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=steps,
            num_workers=workers,
            prefetch_factor=loader.prefetch_factor if workers else None,
            persistent_workers=loader.persistent_workers and workers > 0,
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=_DieWithParent(os.getpid()) if workers else None,
            generator=torch.Generator().manual_seed(dataset.share.seed),
            pin_memory=pin_memory,
        )


@contextlib.contextmanager
def _any_number_of_workers() -> Iterator[None]:
    """Silence torch's guess at how many workers are too many, made when it is told and when it starts them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        yield


class EpochSteps(Sampler[int]):
    """Numbers of the steps of one epoch; set ``epoch`` before each iteration."""

    def __init__(self, epoch_length: int) -> None:
        self.epoch = 0
        self._epoch_length = epoch_length

    def __len__(self) -> int:
        return self._epoch_length

    def __iter__(self) -> Iterator[int]:
        first = self.epoch * self._epoch_length
        return iter(range(first, first + self._epoch_length))


class _DieWithParent:
    """Has the kernel kill a loader worker when its rank dies, however abruptly (Linux; elsewhere torch polls)."""

    def __init__(self, parent_pid: int) -> None:
        self.parent_pid = parent_pid

    def __call__(self, _worker_id: int) -> None:
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        if prctl is not None:
            prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != self.parent_pid:  # died before the call
            os._exit(1)


# Hill climbing over the loader's worker processes and prefetch, before training.


logger = logging.getLogger(__name__)

PREFETCH_FACTORS = (1, 2, 4, 8)
MAX_SHARE = 0.4
"""Share of the grid's points that a climb may measure."""
POINT_TIME_S = 0.4
"""Measuring a point ends after this time even when ``tuning_steps`` batches have not come."""

_START = (2, 2)
"""Workers and prefetch from which the climb starts."""
_MIN_GAIN = 0.02
"""A neighbour has to be faster by this much to be moved to; less is noise."""
_NEGLIGIBLE_SHARE = 0.02
"""Share of the step below which waiting for data does not matter."""

Point = tuple[int, int]
"""A loader's ``num_workers`` and ``prefetch_factor``."""


def grid(max_workers: int) -> list[Point]:
    """Every point of the exhaustive search."""
    return [(0, 0), *((workers, prefetch) for workers in range(1, max_workers + 1) for prefetch in PREFETCH_FACTORS)]


def climb(time_of: Callable[[Point], float], max_workers: int) -> dict[Point, float]:
    """Seconds per batch of the points measured, in that order; the least is the choice.

    Reading in line, without workers, is a regime of its own and measured once. With workers, moves from the best so far
    to the first neighbour that is clearly better, until there is none or ``MAX_SHARE`` of the grid is used. Along
    either axis times are taken to fall and then to rise, so nothing beyond a worse point is measured.
    """
    max_points = max(1, math.floor(MAX_SHARE * len(grid(max_workers))))
    times = {(0, 0): time_of((0, 0))}
    best = (min(_START[0], max_workers), _START[1])
    waiting = [best]
    while waiting and len(times) < max_points:
        point = waiting.pop(0)
        if _beyond_worse(point, best, times):
            continue
        times[point] = time_of(point)
        if point == best or times[point] < times[best] * (1.0 - _MIN_GAIN):
            best = point
            waiting = [near for near in neighbours(best, max_workers) if near not in times]
    return times


def _beyond_worse(point: Point, best: Point, times: dict[Point, float]) -> bool:
    """Whether a point that is no better than ``best`` lies between the two, on the line through both."""
    return any(
        _is_between(best, near, point) and times[near] >= times[best] for near in times if near not in (best, point)
    )


def _is_between(start: Point, point: Point, end: Point) -> bool:
    """Whether ``point`` lies on the line between two points that agree in workers or in prefetch."""
    return all(min(a, b) <= x <= max(a, b) for a, x, b in zip(start, point, end, strict=True))


def neighbours(point: Point, max_workers: int) -> list[Point]:
    """Points to try next: workers doubled and halved, or a quarter, an eighth or one more and less; then prefetch."""
    workers, prefetch = point
    counts = [2 * workers, workers // 2]
    for step in (workers // 4, workers // 8, 1):
        counts += [workers + step, workers - step]
    near = [(min(count, max_workers), prefetch) for count in counts]
    near += [(workers, 2 * prefetch), (workers, prefetch // 2)]
    return list(dict.fromkeys(p for p in near if p[0] >= 1 and p[1] in PREFETCH_FACTORS and p != point))


def tune_loader(
    dataset: StepBatches | None,
    loader: Loader,
    tuning: LoaderTuning,
    *,
    pin_memory: bool,
    agree: Callable[[float], float],
) -> tuple[Loader, LoaderTuningReport]:
    """Find the fastest loader; the report's verdict is open until the steps are measured.

    All ranks call this together, as they will load together; those that will not, without a dataset. ``agree`` gives
    the gang's value (the slowest rank's) of a rank's own, so that all walk the same way.
    """
    start_s = time.perf_counter()

    def time_of(point: Point) -> float:
        own_s = 0.0
        if dataset is not None:
            own_s = time_batches(dataset, _at(loader, point), tuning.tuning_steps, pin_memory=pin_memory)
        batch_time_s = agree(own_s)
        logger.info("loader: %d workers, prefetch %d: %.3f ms per batch", *point, batch_time_s * 1e3)
        return batch_time_s

    points = list(_points(climb(time_of, tuning.max_workers)))
    chosen = min(points, key=lambda point: point.batch_time_s)
    report = LoaderTuningReport(
        points=tuple(points), chosen=chosen, tuning_time_s=time.perf_counter() - start_s, verdict=""
    )
    return _at(loader, (chosen.num_workers, chosen.prefetch_factor)), report


def _points(times: dict[Point, float]) -> Iterator[LoaderPoint]:
    for (workers, prefetch), batch_time_s in times.items():
        yield LoaderPoint(num_workers=workers, prefetch_factor=prefetch, batch_time_s=batch_time_s)


def _at(loader: Loader, point: Point) -> Loader:
    workers, prefetch = point
    return dataclasses.replace(loader, num_workers=workers, prefetch_factor=prefetch, tuning=None)


def time_batches(dataset: StepBatches, loader: Loader, num_batches: int, *, pin_memory: bool) -> float:
    """Mean seconds per batch when nothing but the loader limits; starting the workers is not counted.

    Batches arrive in bursts of one per worker, so whole bursts are timed.
    """
    batches = stream_batches(dataset, loader, pin_memory=pin_memory)
    burst = max(1, loader.num_workers)
    for _ in range(burst):
        next(batches)
    num_read, elapsed_s, start_s = 0, 0.0, time.perf_counter()
    while num_read < num_batches and elapsed_s < POINT_TIME_S:
        for _ in range(burst):
            next(batches)
        num_read += burst
        elapsed_s = time.perf_counter() - start_s
    batches.close()
    return elapsed_s / num_read


def with_verdict(report: LoaderTuningReport, *, data_s: float, step_time_s: float) -> LoaderTuningReport:
    """Add the verdict, from the measured steps: whether the loader matters, and whether tuning it was the answer.

    It does not matter only where reading without loading processes would take as small a share of the step.
    """
    share = data_s / step_time_s if step_time_s else 0.0
    untuned_s = _untuned_s(report)
    untuned = untuned_s / (untuned_s + step_time_s - data_s) if untuned_s else 0.0
    took = f"waiting for data takes {share:.1%} of the step ({data_s * 1e3:.2f} of {step_time_s * 1e3:.2f} ms)"
    if share >= _NEGLIGIBLE_SHARE:
        verdict = f"The loader matters: with the best one found, {took}."
    elif untuned >= _NEGLIGIBLE_SHARE:
        verdict = (
            f"The loader matters, and tuning has solved it: {took}; without loading processes it would take"
            f" {untuned:.0%} ({untuned_s * 1e3:.3g} ms per batch)."
        )
    else:
        verdict = f"The loader does not matter here: {took}."
    return dataclasses.replace(report, verdict=verdict)


def _untuned_s(report: LoaderTuningReport) -> float:
    """Seconds per batch without loading processes; 0 where tuning chose none, and so changed nothing."""
    if report.chosen.num_workers == 0:
        return 0.0
    return next((point.batch_time_s for point in report.points if point.num_workers == 0), 0.0)
