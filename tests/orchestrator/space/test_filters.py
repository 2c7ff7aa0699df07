"""Patterns that forbid and require knobs, and what a pattern's regular expressions may be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.space.file_types import ALL_LAYERS, RecomputeChoice, StageSplit
from orchestrator.space.rules import Case, Filters, matches
from tests.orchestrator.space.candidate_strategies import CANDIDATES
from tests.orchestrator.space.test_rules import WORKLOAD, broken
from trials.spec import Candidate, Layout, Recompute

PATTERNS = st.fixed_dictionaries(
    {},
    optional={
        "tp": st.sampled_from([(1,), (2, 4)]),
        "micro_batch_size": st.sampled_from([(1, 2), (8,)]),
        "compile": st.just(("block", "model")),
        "world_size": st.sampled_from([(1,), (2, 4, 8)]),
    },
).filter(bool)


def selected(candidate, name):
    return {
        "tp": candidate.layout.tp,
        "micro_batch_size": candidate.micro_batch_size,
        "compile": candidate.kernels.compile,
        "world_size": candidate.layout.world_size,
    }[name]


@given(CANDIDATES, PATTERNS)
def test_a_pattern_matches_when_all_its_knobs_do(candidate, pattern):
    expected = True
    for name, accepted in pattern.items():
        expected = expected and selected(candidate, name) in accepted
    assert matches(pattern, Case(candidate=candidate, workload=WORKLOAD)) == expected


@given(CANDIDATES, st.lists(PATTERNS, max_size=3), st.lists(PATTERNS, max_size=3))
def test_forbid_and_require_are_opposites(candidate, forbid, require):
    case = Case(candidate=candidate, workload=WORKLOAD)
    found = broken(candidate, filters=Filters(forbid=tuple(forbid), require=tuple(require))) - broken(candidate)
    assert found == {
        *(f"forbid.{i}" for i, pattern in enumerate(forbid) if matches(pattern, case)),
        *(f"require.{i}" for i, pattern in enumerate(require) if not matches(pattern, case)),
    }


@given(CANDIDATES, st.lists(st.integers(1, 16), min_size=1, max_size=4))
def test_world_size_is_a_filter(candidate, sizes):
    found = broken(candidate, filters=Filters(world_size=tuple(sizes)))
    assert ("world-size" in found) == (candidate.layout.world_size not in sizes)


@pytest.mark.parametrize(
    ("pattern", "accepted", "expected"),
    [
        ("recompute", RecomputeChoice(full=ALL_LAYERS), True),
        ("recompute", RecomputeChoice(full=((1, 3),)), True),
        ("recompute", RecomputeChoice(full=3), True),
        ("recompute", RecomputeChoice(full=2), False),
        ("recompute", RecomputeChoice(), False),
        ("stage_layers", StageSplit(kind="offset", rows=((-1, 1),)), True),
        ("stage_layers", StageSplit(kind="counts", rows=((1, 3),)), True),
        ("stage_layers", StageSplit(), False),
        ("schedule", "gpipe", True),
        ("tp_engine", "local", False),
    ],
)
def test_patterns_are_resolved_against_the_candidate(pattern, accepted, expected):
    layout = Layout(pp=2, schedule="gpipe", stage_layers=((1, 3),))
    case = Case(candidate=Candidate(layout=layout, recompute=Recompute(full=((1, 3),))), workload=WORKLOAD)
    assert matches({pattern: ("zbv", accepted) if pattern == "schedule" else (accepted,)}, case) == expected
