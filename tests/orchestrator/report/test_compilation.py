"""How long compiling took, wherever it is shown: cold and warm by names of their own."""

import json
from dataclasses import replace

import pytest

from orchestrator.report import words
from orchestrator.sweep.fold import fold
from orchestrator.tracking import run_records
from tests.support.cli_homes import keep, run
from tests.support.proof_story import proof_events
from trials.outcome import Measured
from trials.reports import Findings, GraphReport

COLD = GraphReport(num_graphs=1, num_recompilations=0, compile_s=90.0, cache_misses=2)
WARM = replace(COLD, compile_s=8.0, cache_hits=2, cache_misses=0)
MIXED = replace(COLD, compile_s=50.0, cache_hits=1)
KEPT_NOWHERE = replace(COLD, compile_s=3.0, cache_misses=0)


def story(graph):
    """A sweep, all of whose trials compiled like that."""

    def on(event):
        if not isinstance(outcome := getattr(event, "outcome", None), Measured):
            return event
        found = replace(outcome.measurement, compile_s=graph.compile_s, findings=Findings(graph=graph))
        return replace(event, outcome=Measured(measurement=found))

    return [on(event) for event in proof_events()]


@pytest.mark.parametrize(
    ("graph", "told", "shown"),
    [
        (COLD, {"compile_cold_s": 90.0}, "nothing of it was in the sweep's cache"),
        (WARM, {"compile_warm_s": 8.0}, "8 s, all of it was in the sweep's cache"),
        (MIXED, {"compile_mixed_s": 50.0}, "some of it was in the sweep's cache"),
        (KEPT_NOWHERE, {"compile_s": 3.0}, "3 s"),
    ],
    ids=["cold", "warm", "mixed", "no-cache"],
)
def test_each_kind_of_compilation_has_its_name(graph, told, shown, tmp_path):
    state = fold(story(graph))
    found = run_records.trial_metrics(state, state.trials[1])
    assert {name: value for name, value in found.items() if name.startswith("compile_")} == told
    assert shown in words.compilation(graph)
    keep(tmp_path, "story", story(graph))
    measured = json.loads(run("explain", "story", "t001", "--home", tmp_path, "--json").stdout)["measured"]
    for name in ("compile_cold_s", "compile_warm_s"):
        assert measured[name] == told.get(name)
