"""Placement of stages, and what a pipeline's ranks report."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trials.gang import run_gang
from tests.trials.tiny import tiny_spec
from trials.outcome import RankReport
from trials.reports import OperatorCast, PatternEffect
from trials.sizes import all_chunks, chunks_of_stage, coordinates, count_at, data_parallel_rank
from trials.spec import AXES, Layout, Loader, LoaderTuning
from trials.training.loop import merged_casts, merged_effects


@st.composite
def pipelines(draw):
    """A pipeline with any numbers of layers, and their sum."""
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zbv"]))
    chunks = {"1f1b": 1, "zbv": 2}.get(schedule) or draw(st.integers(1, 3))
    pp = draw(st.integers(2, 5))
    row = st.lists(st.integers(0, 4), min_size=pp, max_size=pp).map(tuple)
    counts = tuple(draw(st.lists(row, min_size=chunks, max_size=chunks)))
    layout = Layout(pp=pp, schedule=schedule, num_virtual_stages=chunks, stage_layers=counts)
    return layout, sum(map(sum, counts))


@given(pipelines())
def test_chunks_partition_the_layers_in_model_order(pipeline):
    layout, num_layers = pipeline
    chunks = all_chunks(layout, num_layers)
    assert [i for chunk in chunks for i in chunk.layer_ids] == list(range(num_layers))
    assert [chunk.virtual_stage for chunk in chunks] == list(range(layout.pp * layout.num_virtual_stages))
    assert [chunk.is_first for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for chunk in chunks:
        assert len(chunk.layer_ids) == count_at(layout.stage_layers, chunk.chunk, chunk.stage)


@given(pipelines())
def test_stages_share_out_the_chunks(pipeline):
    layout, num_layers = pipeline
    held = [chunks_of_stage(layout, stage, num_layers) for stage in range(layout.pp)]
    assert all([chunk.chunk for chunk in chunks] == list(range(layout.num_virtual_stages)) for chunks in held)
    assert sorted((c for chunks in held for c in chunks), key=lambda c: c.virtual_stage) == list(
        all_chunks(layout, num_layers)
    )
    if layout.schedule == "zbv":
        assert held[0][0].is_first and held[0][1].is_last  # the loss is where the data comes in


@given(st.tuples(*[st.integers(1, 3)] * 5))
def test_coordinates_are_those_of_a_row_major_mesh(degrees):
    layout = Layout(**dict(zip(AXES, degrees, strict=True)))
    places = [coordinates(layout, rank) for rank in range(layout.world_size)]
    assert [dataclasses.astuple(place) for place in places] == sorted({dataclasses.astuple(p) for p in places})
    readers = [data_parallel_rank(layout, rank) for rank in range(layout.world_size)]
    assert {readers.count(part) for part in range(layout.dp)} == {layout.world_size // layout.dp}


def test_findings_of_the_chunks_of_a_rank_are_added():
    effect = PatternEffect(pattern="a", num_matches=2, saved_bytes=10, recompute_s=0.5)
    other = dataclasses.replace(effect, pattern="b")
    doubled = PatternEffect(pattern="a", num_matches=4, saved_bytes=20, recompute_s=1.0)
    assert merged_effects([(effect,), (other, effect)]) == (doubled, other)
    cast = OperatorCast(name="linear", list="black", num_calls=3)
    assert merged_casts([(cast,), (cast,)]) == (dataclasses.replace(cast, num_calls=6),)


def _slow_in_the_schedule():
    """The second stage takes its time before each forward pass."""
    from trials.training.loop import Stage

    forward = Stage.forward_one_chunk

    def delayed(self, *args, **options):
        time.sleep(0.1)
        return forward(self, *args, **options)

    if os.environ["RANK"] == "1":
        Stage.forward_one_chunk = delayed


def _late_for_the_totals():
    """The second stage comes late after its last pass."""
    from trials.training.loop import Pipeline

    run = Pipeline.run

    def delayed(self, *args):
        loss = run(self, *args)
        time.sleep(0.4)
        return loss

    if os.environ["RANK"] == "1":
        Pipeline.run = delayed


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("neighbour", [_slow_in_the_schedule, _late_for_the_totals])
def test_waiting_for_a_neighbour_is_bubble(neighbour, tmp_path):
    """Waiting counts as bubble inside the schedule and after the stage's own work; without a pipeline there is none."""
    layouts = [
        Layout(pp=2, schedule="gpipe", stage_layers=((1, 1),)),
        Layout(pp=2, schedule="1f1b", stage_layers=((1, 1),)),
        Layout(pp=2, schedule="zbv", num_virtual_stages=2, stage_layers=((1, 0), (1, 0))),
    ]
    specs = [tiny_spec(Layout(dp_replicate=2)), *_with_microbatches(layouts)]
    flat, *reports = run_gang(specs, tmp_path, before=neighbour)
    assert isinstance(flat, RankReport) and flat.breakdown.bubble_s == 0.0
    for report in reports:
        assert isinstance(report, RankReport), report
        step_time_s = sum(report.step_times_s) / len(report.step_times_s)
        assert report.breakdown.bubble_s > 0.5 * step_time_s, (report.breakdown, step_time_s)


def _with_microbatches(layouts):
    return [tiny_spec(layout, num_microbatches=4) for layout in layouts]


def _reads_nothing_in_the_middle():
    """Rank 1 of 3 fails where it would open a data set, and where a step counts time for data."""
    from trials import worker
    from trials.training import measure

    stop = measure.StepClock.stop

    def checked(self):
        timing = stop(self)
        assert timing.read()[1]["data"] == 0.0
        return timing

    if os.environ["RANK"] == "1":
        del worker.open_dataset
        measure.StepClock.stop = checked


@pytest.mark.slow
def test_stages_in_the_middle_read_no_data(tmp_path):
    """Ranks without data do not keep the others waiting when these tune their loaders."""
    tuned = Loader(tuning=LoaderTuning(tuning_steps=2, max_workers=1))
    three = Layout(pp=3, stage_layers=((1, 0, 1),))
    (alone,) = run_gang([tiny_spec(num_microbatches=4)], tmp_path / "1")
    results = run_gang(
        [tiny_spec(three, num_microbatches=4, loader=loader) for loader in (Loader(), tuned)],
        tmp_path / "3",
        before=_reads_nothing_in_the_middle,
    )
    for result in results:
        assert isinstance(result, RankReport) and isinstance(alone, RankReport), result
        assert result.losses == pytest.approx(alone.losses, abs=1e-5) and result.breakdown.data_s > 0.0
