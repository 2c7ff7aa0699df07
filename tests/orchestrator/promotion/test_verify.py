"""Whether drift is found where there is some, and only there."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.knobs import BaselineSection, SpaceSection
from orchestrator.errors import ConfigError
from orchestrator.promotion import commands, drift
from orchestrator.promotion.drift import Speeds
from orchestrator.promotion.evidence import trajectory_json
from orchestrator.promotion.references import store
from orchestrator.promotion.release import Releases
from orchestrator.promotion.remeasure import baseline_section, space_section
from orchestrator.promotion.verify import verify
from orchestrator.space.knobs.canonical import build_candidate, knob_values
from orchestrator.sweep.values import GateSettings
from orchestrator.tracking.tracker import Tracker
from tests.orchestrator.promotion.proven import manifest, proven_home
from tests.orchestrator.space.candidate_strategies import random_candidate
from tests.support.cli_homes import run as run_command
from tests.support.story import WORKLOAD, measured
from tests.support.virtual_sweeps import SWEEP, Quiet, home, submit
from trials.legality.rules import violations
from trials.outcome import Measurement
from trials.spec import Candidate, LlamaModel

THEN = Speeds(configuration=(2.97, 3.0, 3.03), baseline=(1.0, 1.0, 1.0))


def judged(
    configuration: tuple[float, ...], baseline: tuple[float, ...], busy: str = ""
) -> dict[str, tuple[bool, bool]]:
    """Per kind, whether it drifted and whether it could not be told."""
    now = Speeds(configuration=configuration, baseline=baseline)
    return {one.kind: (one.is_drift, one.is_open) for one in drift.speeds(THEN, now, 0.05, busy)}


OK, DRIFT, OPEN = (False, False), (True, False), (False, True)


@pytest.mark.parametrize(
    ("now", "speed_up", "speed"),
    [
        (((2.97, 3.0, 3.03), (1.0, 1.0, 1.0)), OK, OK),
        (((2.55, 2.58, 2.61), (1.0, 1.0, 1.0)), DRIFT, DRIFT),  # the configuration alone is slower
        (((1.48, 1.5, 1.52), (0.5, 0.5, 0.5)), OK, OPEN),  # a slow hour: both are slower by as much
        (((2.97, 1.5, 3.03), (1.0, 0.5, 1.01)), OK, OK),  # slow during one round: the ratio does not see it
        (((2.97, 3.0, 3.03), (1.2, 1.2, 1.2)), DRIFT, OK),  # as fast as then, but the baseline has caught up
        (((1.5, 3.0, 4.5), (1.0, 1.0, 1.0)), OPEN, OPEN),  # too noisy to tell
        (((4.2, 4.5, 4.8), (1.0, 1.0, 1.0)), OK, OK),
    ],
)
def test_a_lost_lead_is_drift_and_a_slow_machine_is_not(now: Any, speed_up: Any, speed: Any):
    assert judged(*now) == {"speed_up": speed_up, "speed": speed}


def test_nothing_is_claimed_of_rounds_on_a_busy_machine():
    for now in ((2.97, 3.0, 3.03), (2.55, 2.58, 2.61)):
        assert judged(now, (1.0, 1.0, 1.0), "1 of 3 rounds was measured on a busy machine") == dict.fromkeys(
            ("speed_up", "speed"), OPEN
        )


def test_the_reason_of_an_open_finding_is_told_with_it():
    now = Speeds(configuration=(2.97, 3.0, 3.03), baseline=(1.0, 1.0, 1.0))
    assert all(
        one.text.endswith("5% of the promoted speed, but busy") or "5%, but busy" in one.text
        for one in drift.speeds(THEN, now, 0.05, "busy")
    )


def test_without_a_baseline_the_speed_alone_is_judged():
    cases = {(0.99, 1.0, 1.01): OK, (0.85, 0.86, 0.87): DRIFT, (0.5, 0.9, 1.3): OPEN}
    for now, found in cases.items():
        then, today = (Speeds(configuration=speeds, baseline=()) for speeds in ((0.99, 1.0, 1.01), now))
        (one,) = drift.speeds(then, today, 0.05, "")
        assert (one.kind, one.is_drift, one.is_open) == ("speed", *found), one.text


def test_the_interval_of_the_ratio_covers_it():
    rng = random.Random(0)
    hits = 0
    for _ in range(400):
        then, now = ([2.718 ** rng.gauss(mean, 0.03) for _ in range(3)] for mean in (0.0, -0.1))
        ci95 = drift.speed_ratio(then, now).ci95
        assert ci95 is not None
        hits += ci95.low < 2.718**-0.1 < ci95.high
    assert 0.92 <= hits / 400 <= 0.98


def test_environments_are_compared_by_name():
    then = {"torch": "2.12", "driver": "535", "hardware": "1x8 A100", "kernel": "6.1"}
    now = {"torch": "2.13", "driver": "550", "hardware": "1x8 H100", "kernel": "6.1", "virtual": "simulated"}
    found = {(one.kind, one.text) for one in drift.environment(then, now)}
    assert ("driver", "driver was 535, is 550") in found and ("library", "torch was 2.12, is 2.13") in found
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
        ((5.5, 5.4, 5.2), True, "off the promoted one's in step 3"),
        ((5.5, float("nan"), 5.3), True, "not finite in step 2"),
        ((), False, "no losses were kept"),
    ],
)
def test_losses_are_compared_step_by_step(now: tuple[float, ...], is_drift: bool, part: str):
    found = drift.loss(trained((5.5, 5.4, 5.3)), trained(now), GateSettings(), WORKLOAD)
    assert (found.is_drift, part in found.text) == (is_drift, True), found.text


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
    """On a simulated cluster, which does not change: beside its baseline, and alone where it is the baseline."""
    own = home(tmp_path)
    submit(tmp_path, {**SWEEP, "budget": {"max_trials": 3}})
    commands.promote("llama", own, sweep="first", trial=which, is_candidate=True)
    found = verify("llama@1", own, Quiet(), num_rounds=2)
    assert (found.answer, found.result) == ("no_drift", "no drift"), found.doubts
    assert found.ratio is not None and found.ratio.value == pytest.approx(1.0)
    kinds = {one.kind for one in found.findings}
    assert kinds == {"library", "speed", "loss"} | ({"speed_up"} if which == "winner" else set())
    assert len(found.sweeps) == (1 if which == "winner" else 2) and own.sweeps() == ["first"]
    shown = commands.show("llama@1", own)
    assert shown["verified"]["result"] == "no drift" and shown["verified"]["run"] == found.run_id
    run = store(own, None).client().get_run(found.run_id)
    assert run.data.tags["tc.kind"] == "verification" and run.data.metrics["speed_over_promoted"] == pytest.approx(1.0)


def test_a_cluster_that_cannot_be_had_is_an_answer_with_its_own_exit_code(tmp_path: Path):
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
    found = verify("llama@1", own, Quiet(), num_rounds=2, ignored=("library",))
    kinds = {one.kind: one.is_drift for one in found.findings}
    assert kinds["driver"] and kinds["library"] and kinds["loss"] and not kinds["hardware"]
    assert "speed" not in kinds, "other hardware: speeds are not compared"
    assert "library" not in found.drifted and found.result == "drift: driver, loss"
    assert any(reason.startswith("hardware: ") for reason in found.doubts)


def _fields(model: LlamaModel) -> dict[str, int]:
    names = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_hidden_size")
    return {name: getattr(model, name) for name in names}


def test_what_cannot_be_measured_again_is_said(tmp_path: Path):
    own = proven_home(tmp_path)
    Releases(Tracker(own.default_tracking_uri)).promote("llama", manifest(own, 1))
    with pytest.raises(ConfigError, match="keeps no sweep file"):
        verify("llama", own, Quiet())
    for reference in ("llama@7", "other", "llama@nowhere"):
        with pytest.raises(ConfigError, match="the registry has no"):
            verify(reference, own, Quiet())
