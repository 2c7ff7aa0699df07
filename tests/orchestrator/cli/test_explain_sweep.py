"""`explain SWEEP` from real ledgers: finished, running, old, without a baseline, for people and for scripts."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from orchestrator.config.sweep import load_sweep
from orchestrator.diagnosis.explain import explain_sweep
from orchestrator.planning.dry_runs import fingerprint, known_topology
from orchestrator.sweep.events import Hardware
from orchestrator.terminal.explain_screen import render_sweep_explanation
from tests.orchestrator.diagnosis.diagnosed import TINY, TWO_NODES, basis, llama, simulate, sweep
from tests.support import long_story, virtual_sweeps
from tests.support.cli_homes import keep, run
from tests.support.story import ended, launched, proposed
from tests.support.sweep_files import write
from trials.spec import Layout, Precision


def shown(explained, width=80):
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render_sweep_explanation(explained))
    return console.export_text()


def body_of(folder, name, *more):
    result = run("explain", name, "--home", folder, "--json", *more)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_simulated_sweep_is_explained_from_its_ledger_alone(tmp_path):
    """Hardware and candidates follow from what is kept with the sweep, wherever it is explained."""
    spec = load_sweep(write(tmp_path, virtual_sweeps.SWEEP))
    topology = known_topology(spec)
    layout = Layout(dp_shard=16, zero_stage=3)
    candidates = [spec.baseline_candidate, llama(layout), llama(layout, micro_batch_size=2)]
    state = sweep(candidates, simulate(candidates, spec.to_workload()), spec.to_workload())
    known = {"hardware": topology.label, "devices": Hardware.of(topology), "fingerprint": fingerprint(topology)}
    story = [replace(state.sweep, sweep="first", **known)]
    for trial in state.trials:
        story.append(proposed(trial.number, trial.candidate))
        story += [launched(trial.number), ended(trial.number, trial.outcome)]
    keep(tmp_path, "first", story, spec=spec.to_json())
    body = body_of(tmp_path, "first")
    assert body["unmodelled"] == ""
    for side in ("baseline", "chosen"):
        parts = body[side]["parts"]
        assert sum(part["seconds"] for part in parts) == pytest.approx(body[side]["step_time_s"])
        assert {part["source"] for part in parts} == {"modelled"}
    assert {"compute", "recompute", "communication"} <= {part["name"] for part in body["baseline"]["parts"]}
    assert body["baseline"]["bottleneck"] == "memory", "it recomputes in full with most memory free"
    answer = body["baseline"]["losses"][0]["answer"]
    assert (answer["source"], answer["trial"]) == ("measured", body["chosen"]["trial"])
    assert max(loss["num_changes"] for loss in body["chosen"]["losses"]) > len(candidates), "the plan's count as well"
    assert body_of(tmp_path, "first", "t000", "--diagnose")["chosen"] is None


def test_a_ledger_of_another_version_is_explained_as_far_as_it_goes(tmp_path):
    """No sweep file that could be read, no hardware, no knowledge: measurements are reported all the same."""
    keep(tmp_path, "story", long_story.events(long_story.all_kinds()), spec={"unknown": 1})
    body = body_of(tmp_path, "story")
    assert body["unmodelled"] == "its stored sweep file has a different version"
    names = [part["name"] for part in body["chosen"]["parts"]]
    assert names == ["forward_backward", "optimizer", "data", "other"]
    assert body["bottleneck"] is None or body["bottleneck"] == "io"


@pytest.mark.parametrize("num_trials", [1, 18])
def test_the_explanation_for_people_fits_with_few_and_with_many_trials(num_trials):
    layouts = [Layout(dp_replicate=16), Layout(dp_shard=16, zero_stage=1), Layout(dp_shard=16, zero_stage=3)]
    candidates = [
        llama(layout, micro_batch_size=size, precision=precision)
        for precision in (Precision(), Precision(level="O1", dtype="bfloat16"))
        for layout in layouts
        for size in (1, 2, 4)
    ]
    candidates = candidates[:num_trials]
    state = sweep(candidates, simulate(candidates, TINY), TINY)
    text = shown(explain_sweep(state, basis(candidates, TWO_NODES)))
    assert max(map(len, text.splitlines())) <= 80
    for heading in ("Where the step time goes", "Bottlenecks", "Effect of each knob", "Expected and "):
        assert heading in text
    assert "compute" in text and "step" in text
    if num_trials == 18:
        assert "pairs" in text
