from __future__ import annotations

import logging
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.trials.gang import run_gang
from tests.trials.tiny import tiny_spec
from trials.datasets import (
    MAX_SHARE,
    Batch,
    Point,
    Share,
    StepBatches,
    climb,
    grid,
    neighbours,
    tune_loader,
    with_verdict,
)
from trials.outcome import RankReport
from trials.reports import LoaderPoint, LoaderTuningReport
from trials.spec import Layout, Loader, LoaderTuning

START = (2, 2)


def surface(
    point: Point, *, work: float, cores: float, transfer: float, contention: float, burst: float, memory: float
) -> float:
    """Seconds per batch of a loader whose workers share ``cores``; unimodal in workers and in prefetch."""
    workers, prefetch = point
    if workers == 0:
        return work
    reading = work / min(workers, cores) * (1.0 + contention * max(0.0, workers - cores))
    return max(reading, transfer) * (1.0 + burst / prefetch**2 + memory * prefetch) + transfer


SURFACES = {
    "work": st.floats(1e-4, 1.0),
    "cores": st.floats(1.0, 16.0),
    "contention": st.floats(0.0, 0.3),
    "burst": st.floats(0.0, 0.5),
    "memory": st.floats(0.0, 0.02),
}


@given(max_workers=st.integers(1, 20), transfer=st.floats(0.0, 1.0), **SURFACES)
def test_a_climb_is_cheap_and_never_worse_than_its_start(max_workers: int, transfer: float, **shape: float) -> None:
    def time_of(point: Point) -> float:
        return surface(point, transfer=transfer, **shape)

    times = climb(time_of, max_workers)
    assert len(times) <= MAX_SHARE * len(grid(max_workers))
    assert set(times) <= set(grid(max_workers))
    best = min(times.values())
    assert best <= time_of((0, 0))
    if max_workers >= 2:
        assert best <= time_of(START)


@given(max_workers=st.integers(8, 20), share=st.floats(0.0, 0.02), **SURFACES)
@example(max_workers=16, share=0.0, work=1.0, cores=10.0, contention=1 / 64, burst=0.0, memory=0.0).via("slow rise")
@example(max_workers=9, share=0.0, work=0.8, cores=7.14, contention=0.3, burst=0.5, memory=0.0).via("few points")
@example(max_workers=18, share=0.0, work=1.0, cores=12.9, contention=0.025, burst=0.26, memory=0.0).via("both axes")
def test_a_climb_finds_the_best_within_five_per_cent(max_workers: int, share: float, **shape: float) -> None:
    def time_of(point: Point) -> float:
        return surface(point, transfer=share * shape["work"], **shape)

    found = min(climb(time_of, max_workers).values())
    assert found <= 1.05 * min(map(time_of, grid(max_workers)))


def test_no_workers_are_found_when_reading_is_cheap() -> None:
    times = climb(lambda point: 1.0 if point[0] == 0 else 3.0 + 0.001 * point[0], max_workers=8)
    assert min(times, key=times.__getitem__) == (0, 0)


def test_noise_moves_nothing() -> None:
    times = climb(lambda point: 1.0 - 0.001 * point[0], max_workers=8)
    assert list(times) == [(0, 0), (2, 2), *neighbours((2, 2), 8)]


class Slow(StepBatches):
    """Waits, as reading from far away does: workers help whatever the number of cores."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(Share(global_batch_size=1), 1000)
        self.delay_s = delay_s

    def read(self, step: int, rows: slice) -> Batch:
        time.sleep(self.delay_s)
        return torch.tensor([step]), torch.tensor([step])


@pytest.mark.slow
def test_tuning_finds_workers_for_slow_reading(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trials.datasets")
    wanted = Loader(persistent_workers=True, tuning=LoaderTuning(tuning_steps=24, max_workers=4))
    assert wanted.tuning is not None
    agreed: list[float] = []
    loader, report = tune_loader(
        Slow(0.01), wanted, wanted.tuning, pin_memory=False, agree=lambda own_s: agreed.append(own_s) or own_s
    )
    assert loader.num_workers >= 3 and loader.prefetch_factor >= 1
    assert loader.tuning is None and loader.persistent_workers
    assert (report.chosen.num_workers, report.chosen.prefetch_factor) == (loader.num_workers, loader.prefetch_factor)
    assert agreed == [point.batch_time_s for point in report.points] and len(agreed) <= 6
    assert report.points[0].num_workers == 0 and report.chosen.batch_time_s < report.points[0].batch_time_s / 2
    assert len(caplog.records) == len(agreed)


@pytest.mark.slow
def test_a_gang_tunes_together_and_trains_the_same(tmp_path: Path) -> None:
    tuning = LoaderTuning(tuning_steps=4, max_workers=2)
    layout = Layout(dp_replicate=2)
    plain, tuned = run_gang(
        [tiny_spec(layout), tiny_spec(layout, loader=Loader(persistent_workers=True, tuning=tuning))], tmp_path
    )
    assert isinstance(plain, RankReport) and isinstance(tuned, RankReport), (plain, tuned)
    assert tuned.losses == plain.losses and plain.findings.loader is None
    found = tuned.findings.loader
    assert found is not None and found.chosen in found.points
    assert found.points[0].num_workers == 0 and 2 <= len(found.points) <= 3
    assert found.tuning_time_s > sum(point.batch_time_s for point in found.points)
    assert "waiting for data takes" in found.verdict


def _reads_slowly() -> None:
    """Rank 1 waits for every batch."""
    from trials.datasets import TokenBatches

    read = TokenBatches.read

    def delayed(self: TokenBatches, step: int, rows: slice) -> Batch:
        time.sleep(0.1)
        return read(self, step, rows)

    if os.environ["RANK"] == "1":
        TokenBatches.read = delayed  # type: ignore[method-assign]


@pytest.mark.slow
def test_the_slowest_rank_decides(tmp_path: Path) -> None:
    """Rank 0, which reports, reads fast; all walk by the other one's times, and its share of the step is judged."""
    tuning = LoaderTuning(tuning_steps=2, max_workers=1)
    spec = tiny_spec(Layout(dp_replicate=2), loader=Loader(persistent_workers=True, tuning=tuning))
    (result,) = run_gang([spec], tmp_path, before=_reads_slowly)
    assert isinstance(result, RankReport), result
    found = result.findings.loader
    assert found is not None and found.points[0].batch_time_s >= 0.1
    judged_ms = re.search(r"\((\S+) of", found.verdict)
    assert found.verdict.startswith("The loader matters") and judged_ms is not None
    assert float(judged_ms[1]) > 3 * result.breakdown.data_s * 1e3


@pytest.mark.parametrize(
    ("inline_s", "data_s", "sentence"),
    [
        (0.001, 0.001, "The loader does not matter here: waiting for data takes 1.0% of the step (1.00 of 100.00 ms)."),
        (0.07, 0.02, "The loader matters: with the best one found, waiting for data takes 20.0% of the step"),
        (
            0.07,
            0.0008,
            "The loader matters, and tuning has solved it: waiting for data takes 0.8% of the step (0.80 of 100.00 ms);"
            " without loading processes it would take 41% (70 ms per batch).",
        ),
    ],
)
def test_the_verdict_is_about_the_measured_share_and_that_before_tuning(
    inline_s: float, data_s: float, sentence: str
) -> None:
    points = [LoaderPoint(num_workers=n, prefetch_factor=2, batch_time_s=s) for n, s in ((0, inline_s), (6, 0.0001))]
    report = LoaderTuningReport(points=tuple(points), chosen=points[1], tuning_time_s=1.0, verdict="")
    assert with_verdict(report, data_s=data_s, step_time_s=0.1).verdict.startswith(sentence)
    assert "solved" not in with_verdict(replace(report, chosen=points[0]), data_s=data_s, step_time_s=0.1).verdict
