"""The two ways to count micro-batches in flight agree."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.cost.inputs import SCHEDULES
from cluster.cost.work import in_flight, in_flight_peaks
from tests.cluster.cost.rows import inputs, row


@st.composite
def layouts(draw):
    schedule = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.integers(1, 6))
    v = {"interleaved": draw(st.integers(2, 4)), "zbv": 2}.get(schedule, 1)
    m = draw(st.integers(1, 24))
    return schedule, pp, v, m * pp if schedule == "interleaved" else m


@given(layouts())
def test_the_total_is_the_largest_sum_over_chunks(layout):
    schedule, pp, v, m = layout
    x = inputs(row(pp=pp, num_virtual_stages=v, num_microbatches=m, schedule=SCHEDULES.index(schedule)), row(pp=8))
    peaks = in_flight_peaks(schedule, pp=pp, num_virtual_stages=v, num_microbatches=m)
    largest = [max(sum(moment) for moment in moments) / v for moments in peaks]
    np.testing.assert_allclose(in_flight(x)[0, :pp], largest)
