"""Whether drift is found where there is some, and only there."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.confirmation.verification import World, rates
from orchestrator.config.settings import BaselineSection, SpaceSection
from orchestrator.errors import ConfigError
from orchestrator.promotion import commands
from orchestrator.promotion import verify as drift
from orchestrator.promotion.manifest import trajectory_json
from orchestrator.promotion.references import Version, store
from orchestrator.promotion.release import Releases
from orchestrator.promotion.verify import DriftFinding, Verification, baseline_section, space_section, verify
from orchestrator.proof.confirmation import Rounds, change
from orchestrator.space.space import build_candidate, knob_values
from orchestrator.sweep.events import GateSettings
from orchestrator.sweep.fold import fold
from orchestrator.sweep.snapshot import Home
from orchestrator.terminal.result_screen import render_verification
from orchestrator.tracking.mlflow_store import Registered
from orchestrator.tracking.mlflow_tracker import Tracker
from tests.orchestrator.promotion.proven import manifest, proven_home
from tests.orchestrator.space.candidate_strategies import random_candidate
from tests.support.cli_homes import run as run_command
from tests.support.story import WORKLOAD, measured
from tests.support.virtual_sweeps import SWEEP, Quiet, home, submit
from trials.legality import violations
from trials.outcome import Measurement
from trials.spec import Candidate, Experts, LlamaModel

THEN = Rounds(own=(2.97, 3.0, 3.03), baseline=(1.0, 1.0, 1.0))
OK, DRIFT, OPEN = (False, False), (True, False), (False, True)


def judged(own: tuple[float, ...], baseline: tuple[float, ...], busy: str = "", **more: bool) -> DriftFinding:
    now = Rounds(own=own, baseline=baseline)
    return drift.speed(change(THEN, now, tolerance=0.05, max_rounds=12), busy, **more)


@pytest.mark.parametrize(
    ("now", "expected", "part"),
    [
        (((2.97, 3.0, 3.03), (1.0, 1.0, 1.0)), OK, "a slowdown of more than 5% is ruled out after 3 rounds"),
        (((2.55, 2.58, 2.61), (1.0, 1.0, 1.0)), DRIFT, "% slower (5% allowed)"),  # the configuration alone is slower
        (((1.49, 1.5, 1.51), (0.5, 0.5, 0.5)), OK, "the machine is slower, but the speed-up is unchanged"),
        (((2.97, 1.5, 3.01), (1.0, 0.5, 1.0)), OK, "ruled out"),  # slow during one round: the lead does not see it
        (((2.97, 3.0, 3.03), (1.2, 1.2, 1.2)), DRIFT, "since the baseline has caught up"),
        (((2.97, 3.0, 3.03), (0.8, 1.0, 1.25)), OK, "ruled out"),  # a noisy baseline: its own speed shows no loss
        (((2.9, 2.95, 3.0), (1.0, 1.0, 1.0)), OPEN, "ruling out 5% needs"),
        (((2.0, 3.0, 4.0), (1.0, 1.0, 1.0)), OPEN, "more rounds would not rule out 5%"),
        (((4.2, 4.5, 4.8), (1.0, 1.0, 1.0)), OK, "ruled out"),
    ],
)
def test_lead_and_absolute_speed_give_one_answer(now: Any, expected: tuple[bool, bool], part: str):
    found = judged(*now)
    assert (found.kind, found.is_drift, found.is_open) == ("speed", *expected) and part in found.text, found.text


def test_an_open_result_names_the_excluded_loss_and_the_rounds_needed():
    now = Rounds(own=(2.9, 2.95, 3.0), baseline=(1.0, 1.0, 1.0))
    found = change(THEN, now, tolerance=0.05, max_rounds=12)
    assert found.loss == "open" and found.more_rounds is not None and found.excluded_loss is not None
    text = drift.speed(found, "").text
    assert text.startswith(
        f"a slowdown of more than {found.excluded_loss:.0%} is ruled out after 3 rounds; "
        f"ruling out 5% needs about {found.more_rounds} more round"
    )
    more = Rounds(own=now.own * 8, baseline=now.baseline * 8)
    assert change(THEN, more, tolerance=0.05, max_rounds=24).loss == "excluded"
    early = change(THEN, Rounds(own=(3.0, 3.0), baseline=(1.0, 1.0)), tolerance=0.05, max_rounds=12)
    assert early.loss == "open" and early.excluded_loss is None and not early.is_hopeless


def test_too_few_quiet_rounds_are_judged_by_no_figure():
    busy = "5 of 6 rounds were measured on a busy machine"
    for own in ((2.97, 3.0, 3.03), (2.55, 2.58, 2.61)):
        found = judged(own, (1.0, 1.0, 1.0), busy, is_too_busy=True)
        assert found.is_open and not found.is_drift and busy in found.text
    assert judged((2.97, 3.0, 3.03), (1.0, 1.0, 1.0), "1 of 4 rounds was").text.endswith("; 1 of 4 rounds was")


def test_without_a_baseline_the_speed_alone_is_judged():
    for now, expected in {(0.99, 1.0, 1.01): OK, (0.85, 0.86, 0.87): DRIFT, (0.5, 0.9, 1.3): OPEN}.items():
        found = change(Rounds(own=(0.99, 1.0, 1.01)), Rounds(own=now), tolerance=0.05, max_rounds=12)
        one = drift.speed(found, "")
        assert (one.is_drift, one.is_open) == expected, one.text
        assert found.lead is None and "baseline" not in one.text


def test_times_that_were_reported_as_rounded_figures_rule_out_less():
    exact = change(THEN, THEN, tolerance=0.05, max_rounds=12)
    coarse = change(THEN, THEN, tolerance=0.05, max_rounds=12, rounded_away=(0.02, 0.02))
    assert exact.loss == "excluded" and coarse.loss == "open"
    assert exact.excluded_loss is not None and coarse.excluded_loss > exact.excluded_loss


@pytest.mark.parametrize(("loss", "noise", "answer"), [(0.0, 0.01, "no_drift"), (0.1, 0.01, "drift")])
def test_answers_are_right_as_often_as_promised(loss: float, noise: float, answer: str):
    found = rates(World(loss=loss, noise=noise), 60)
    assert found[answer] >= 0.95 and found["missed"] <= 0.08
    wrong = {"no_drift": "drift", "drift": "no_drift"}[answer]
    assert rates(World(loss=loss, noise=0.05), 60)[wrong] <= 0.05


def test_environments_are_compared_by_name():
    then = {"torch": "2.12", "driver": "535", "hardware": "1x8 A100", "kernel": "6.1"}
    now = {"torch": "2.13", "driver": "550", "hardware": "1x8 H100", "kernel": "6.1", "virtual": "simulated"}
    found = {(one.kind, one.text) for one in drift.environment(then, now)}
    assert ("driver", "driver was 535, is now 550") in found and ("library", "torch was 2.12, is now 2.13") in found
    assert {kind for kind, _ in found} == {"driver", "library", "hardware"} and len(found) == 4
    assert all(one.is_open == (one.kind == "hardware") != one.is_drift for one in drift.environment(then, now))
    assert [one.is_drift for one in drift.environment(then, then)] == [False]


def trained(losses: tuple[float, ...]) -> dict[str, object]:
    found = measured(losses=losses, grad_norms=(1.0,) * len(losses))
    measurement: Measurement = found.measurement
    return trajectory_json(measurement, Candidate())


@pytest.mark.parametrize(
    ("now", "is_drift", "part"),
    [
        ((5.5, 5.4), False, "the same in 2 steps"),
        ((5.5, 5.4, 5.3, 5.2), False, "the same in 3 steps"),
        ((5.5, 5.4, 5.2), True, "deviates from that of the promoted one by"),
        ((5.5, float("nan"), 5.3), True, "not finite in step 2"),
        ((), False, "no losses were kept"),
    ],
)
def test_losses_are_compared_step_by_step(now: tuple[float, ...], is_drift: bool, part: str):
    found = drift.loss_drift(trained((5.5, 5.4, 5.3)), trained(now), GateSettings(), WORKLOAD)
    assert (found.is_drift, part in found.text) == (is_drift, True), found.text


def test_only_a_speed_up_per_device_is_compared_with_a_ratio_of_speeds_per_device():
    facts = {
        "fingerprint": {},
        "confirmation": [],
        "trial": 1,
        "tokens_per_s_per_device": 8.0,
        "speedup": {"value": 1.6},
    }
    registered = Registered(name="m", version="1", run_id="r", source="runs:/r/f")
    for objective, baseline in {"tokens_per_s_per_device": (5.0,), "step_time": (), "device_cost": ()}.items():
        found = {"evidence": {**facts, "objective": objective}}
        version = Version(registered=registered, manifest=found, candidate=Candidate(), spec=None)
        assert drift._promoted_rounds(version, 0.05, ()).baseline == baseline


def test_the_gate_of_experts_with_balanced_routing_trained_something_else():
    facts = {"gate": {"runs": {"finalist": "of the gate"}}, "training": "of the search"}
    for routing, found in {"balanced": "of the search", "learned": "of the gate"}.items():
        experts = Experts(num_experts=4, top_k=2, ffn_hidden_size=8, routing=routing)
        workload = replace(WORKLOAD, model=replace(WORKLOAD.model, experts=experts))
        assert drift._training(facts, workload) == found
    assert drift._training({**facts, "gate": None}, workload) == "of the search"


def test_any_candidate_can_be_a_baseline_or_a_space_again():
    rng = random.Random(0)
    model = LlamaModel(hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_hidden_size=128)
    drawn = (build_candidate(knob_values(random_candidate(rng, fitting=True)), model) for _ in range(3000))
    legal = [candidate for candidate in drawn if not any(violations(replace(WORKLOAD, model=model), candidate))]
    assert len(legal) > 20 and any(c.layout.stage_layers for c in legal) and any(c.recompute.selective for c in legal)
    for candidate in legal:
        section = BaselineSection.model_validate(baseline_section(candidate))
        assert build_candidate(section.values(), model) == candidate
        alone = SpaceSection.model_validate(space_section(candidate)).choices(section.values())
        assert build_candidate({name: value for name, (value,) in alone.items()}, model) == candidate


@pytest.mark.parametrize("which", ["baseline", "winner"])
def test_a_promoted_configuration_is_measured_again(tmp_path: Path, which: str):
    """On a simulated cluster, which does not change: with its baseline, and alone where it is the baseline."""
    own = home(tmp_path)
    submit(tmp_path, {**SWEEP, "budget": {"max_trials": 3}})
    commands.promote("llama", own, sweep="first", trial=which, is_candidate=True)
    found = verify("llama@1", own, Quiet(), max_rounds=3 if which == "winner" else 2)
    assert (found.answer, found.result) == ("no_drift", "no drift"), found.doubts
    assert found.change is not None and found.change.own.value == pytest.approx(1.0)
    assert {one.kind for one in found.findings} == {"library", "speed", "loss"}
    body = found.to_json()
    assert (body["schema_version"], body["speed"]["loss"], body["speed"]["rounds"]) == (
        1,
        "excluded",
        3 if which == "winner" else 2,
    )
    assert (body["speed"]["speedup_ratio"] is None) == (which == "baseline")
    assert len(found.sweeps) == (1 if which == "winner" else 2) and own.sweeps() == ["first"]
    shown = commands.show("llama@1", own)
    assert shown["verified"]["result"] == "no drift" and shown["verified"]["run"] == found.run_id
    run = store(own, None).client().get_run(found.run_id)
    assert run.data.tags["tc.kind"] == "verification" and run.data.metrics["speed_over_promoted"] == pytest.approx(1.0)


def test_an_unavailable_cluster_has_a_distinct_exit_code(tmp_path: Path):
    own = home(tmp_path)
    submit(tmp_path, {**SWEEP, "budget": {"max_trials": 1}})
    with own.open("first", read_only=False) as ledger:
        ledger.put_document("spec", {**SWEEP, "cluster": {"kind": "ray", "address": "127.0.0.1:1", "num_nodes": 2}})
    commands.promote("llama", own, sweep="first", is_candidate=True)
    result = run_command("verify", "llama@1", "--home", own.path, "--json")
    body = json.loads(result.stdout)
    assert (result.exit_code, body["answer"], body["findings"]) == (3, "could_not_verify", []), result.output
    assert "127.0.0.1:1" in body["reasons"][0] and body["result"].startswith("could not verify: ")


@pytest.mark.exhaustive
def test_drift_of_every_kind_is_found(tmp_path: Path):
    """A configuration promoted elsewhere, with made-up measurements, is verified on a simulated cluster."""
    own = proven_home(tmp_path)
    model = {"kind": "llama", **_fields(WORKLOAD.model)}
    workload = {"model": model, "seq_length": 64, "global_batch_size": 8}
    spec = {**SWEEP, "name": "story", "workload": workload, "baseline": {"dp_replicate": 2}, "space": {}}
    with own.open("story", read_only=False) as ledger:
        ledger.put_document("spec", spec)
    Releases(Tracker(own.default_tracking_uri)).promote("llama", manifest(own, 1))
    found = verify("llama@1", own, Quiet(), ignored=("library",))
    kinds = {one.kind: one.is_drift for one in found.findings}
    assert kinds["driver"] and kinds["library"] and kinds["loss"] and not kinds["hardware"]
    assert "speed" not in kinds, "other hardware: speeds are not compared"
    assert "library" not in found.drifted and found.result == "drift: driver, loss"
    assert any(reason.startswith("hardware: ") for reason in found.doubts)
    with Home(own.path / "verifications").open(found.sweeps[0]) as ledger:
        assert not fold(ledger.events()).check_numbers, "nor measured in rounds"


def _fields(model: LlamaModel) -> dict[str, int]:
    names = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_hidden_size")
    return {name: getattr(model, name) for name in names}


def test_versions_that_cannot_be_measured_again_are_refused_with_a_reason(tmp_path: Path):
    own = proven_home(tmp_path)
    Releases(Tracker(own.default_tracking_uri)).promote("llama", manifest(own, 1))
    with pytest.raises(ConfigError, match="was not promoted from a sweep file"):
        verify("llama", own, Quiet())
    for reference in ("llama@7", "other", "llama@nowhere"):
        with pytest.raises(ConfigError, match="the registry has no"):
            verify(reference, own, Quiet())


def test_a_reason_is_shown_once():
    why = "4 of 4 rounds were measured on a busy machine"
    findings = (
        DriftFinding(kind="library", is_drift=False, text="the environment is unchanged"),
        DriftFinding(kind="speed", is_drift=False, is_open=True, text=why),
    )
    found = Verification(name="m", version="1", findings=findings, ignored=(), change=None, sweeps=(), at_s=0.0)
    assert (found.result, found.doubts) == ("could not verify: speed", (f"speed: {why}",))
    with (console := Console(width=200, color_system=None)).capture() as shown:
        console.print(render_verification(found))
    assert shown.get().count(why) == 1
