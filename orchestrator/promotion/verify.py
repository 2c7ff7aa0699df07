"""Measuring a promoted configuration again on today's cluster, and saying what has drifted.

Every round is an ordinary sweep with one trial, made from the manifest: its baseline is the promoted configuration, its
space is empty. These sweeps lie in a folder of their own, ``verifications`` in the home, and are recorded in the
experiment ``verifications``. Rounds differ as runs do that are started anew, which the interval of one run leaves out.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from orchestrator import units
from orchestrator.config.knobs import BaselineSection
from orchestrator.config.sweep import load_sweep
from orchestrator.controller import controller
from orchestrator.errors import ConfigError
from orchestrator.promotion import drift
from orchestrator.promotion.drift import DriftFinding, Kind
from orchestrator.promotion.evidence import trajectory_json
from orchestrator.promotion.records import Records
from orchestrator.promotion.references import Version, read, store
from orchestrator.report import words
from orchestrator.report.summary import interval_json
from orchestrator.space.knobs.canonical import knob_values
from orchestrator.space.knobs.layer_choices import RecomputeChoice, StageSplit
from orchestrator.statistics import Estimate
from orchestrator.sweep.home import Home
from orchestrator.sweep.snapshot import Observer
from orchestrator.sweep.state import SweepState
from orchestrator.sweep.values import GateSettings
from orchestrator.tracking.registry import Registry
from orchestrator.tracking.tracker import Tracker
from trials.codec import from_json, to_json
from trials.files import write_atomically
from trials.outcome import GangLost, TimedOut
from trials.spec import Candidate, Workload

FOLDER = EXPERIMENT = "verifications"
DEFAULT_ROUNDS = 3
DEFAULT_TOLERANCE = 0.05
KEPT = ("workload", "cluster", "objective", "measure", "runner")
"""Keys of the promoted sweep's file that are measured again as they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What measuring a version again found."""

    name: str
    version: str
    findings: tuple[DriftFinding, ...]
    ignored: tuple[Kind, ...]
    """Kinds of drift that do not count."""
    ratio: Estimate | None
    """Today's speed over the promoted one; None where it did not run."""
    sweeps: tuple[str, ...]
    at_s: float
    run_id: str = ""
    """MLflow run that holds it."""

    @property
    def drifted(self) -> tuple[Kind, ...]:
        """Kinds that have drifted and count."""
        kinds = {one.kind for one in self.findings if one.is_drift and one.kind not in self.ignored}
        return tuple(kind for kind in drift.KINDS if kind in kinds)

    @property
    def result(self) -> str:
        """``no drift``, or ``drift: driver, speed``."""
        return f"drift: {', '.join(self.drifted)}" if self.drifted else "no drift"

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``verify --json``."""
        return {
            "name": self.name,
            "version": self.version,
            "result": self.result,
            "drifted": list(self.drifted),
            "ignored": list(self.ignored),
            "findings": to_json(self.findings),
            "speed_ratio": self.ratio.value if self.ratio else None,
            "speed_ratio_ci95": interval_json(self.ratio.ci95) if self.ratio else None,
            "sweeps": list(self.sweeps),
            "run_id": self.run_id,
            "at_s": self.at_s,
        }


def verify(
    reference: str,
    home: Home,
    observer: Observer,
    *,
    num_rounds: int = DEFAULT_ROUNDS,
    tolerance: float = DEFAULT_TOLERANCE,
    ignored: Collection[Kind] = (),
    address: str | None = None,
    tracking_uri: str | None = None,
) -> Verification:
    """Measure the version again, compare, and write down what was found.

    Raises:
        ConfigError: there is no such version, it was altered, or it cannot be measured here.
        ClusterError: there is no cluster to measure it on.
    """
    tracker = store(home, tracking_uri)
    promoted = read(tracker, reference)
    at_s = time.time()
    states = [
        _measure(spec, home, observer, address) for spec in verification_specs(promoted, tracker, num_rounds, at_s)
    ]
    findings, ratio = compare(promoted, states, tolerance)
    found = Verification(
        name=promoted.registered.name,
        version=promoted.registered.version,
        findings=findings,
        ignored=tuple(ignored),
        ratio=ratio,
        sweeps=tuple(state.sweep.sweep for state in states),
        at_s=at_s,
    )
    return _record(found, tracker)


def verification_specs(promoted: Version, tracker: Tracker, num_rounds: int, at_s: float) -> list[dict[str, Any]]:
    """The contents of one sweep file per round.

    Raises:
        ConfigError: the version cannot be measured.
    """
    if promoted.spec is None:
        raise ConfigError(
            f"{promoted.label} keeps no sweep file", remedy="Promote a sweep that was submitted from one."
        )
    if promoted.spec["cluster"].get("kind") == "replay":
        raise ConfigError(f"{promoted.label} comes from a table of measurements", remedy="It cannot be measured again.")
    kept = {key: value for key, value in promoted.spec.items() if key in KEPT}
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(at_s))
    name = re.sub(r"[^a-z0-9._-]", "-", promoted.registered.name[:28])
    return [
        {
            **kept,
            "name": f"verify-{name}-v{promoted.registered.version}-{stamp}-r{number}",
            "deadlines": promoted.spec.get("deadlines", {}),
            "baseline": baseline_section(promoted.candidate),
            "space": {"world_size": [promoted.candidate.layout.world_size]},
            "search": {"sampler": "grid", "early_stop": "off"},
            "budget": {"max_trials": 1},
            "confirm": "off",
            "gate": "off",
            "tracking": {"uri": tracker.uri, "experiment": EXPERIMENT},
        }
        for number in range(1, num_rounds + 1)
    ]


def baseline_section(candidate: Candidate) -> dict[str, Any]:
    """The candidate as section ``baseline`` of a sweep file: layers per stage written out, nothing left to ``auto``."""
    values = knob_values(candidate)
    layers, policy = candidate.layout.stage_layers, candidate.recompute
    values["stage_layers"] = StageSplit(kind="counts", rows=layers) if layers else StageSplit()
    select = tuple((part.pattern, part.num_layers) for part in policy.selective)
    values["recompute"] = RecomputeChoice(full=policy.full, select=select, communication=policy.communication)
    body: dict[str, Any] = BaselineSection.model_construct(**values).model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    return body


def _measure(spec: Mapping[str, Any], home: Home, observer: Observer, address: str | None) -> SweepState:
    """Run one round. A run that was lost, or hung, tells nothing about the configuration.

    Raises:
        ConfigError: it was not measured, for reasons that are not its own.
    """
    own = Home(home.path / FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sweep.yaml"
        write_atomically(file, [yaml.safe_dump(dict(spec), sort_keys=False).encode()])
        state = controller.submit(load_sweep(file), own, observer, address=address).state
    trial = state.baseline
    if trial is None or trial.outcome is None or isinstance(trial.outcome, GangLost | TimedOut):
        why = words.failure(trial) if trial is not None and trial.outcome is not None else state.finish_reason
        raise ConfigError(
            f"the sweep {spec['name']} could not measure it: {why}",
            remedy=f"See tune-cluster logs {spec['name']} baseline --home {own.path}",
        )
    return state


def compare(
    promoted: Version, states: list[SweepState], tolerance: float
) -> tuple[tuple[DriftFinding, ...], Estimate | None]:
    """Findings on everything that was compared, and today's speed over that of the promotion."""
    facts = promoted.manifest["evidence"]
    findings = drift.environment(facts["fingerprint"], states[0].sweep.fingerprint)
    trials = [state.trials[0] for state in states]
    measured = [trial.measurement for trial in trials if trial.measurement is not None]
    for trial in trials:
        if trial.measurement is None:
            problem = f"it does not run any more: {units.status_words(trial.status)}: {words.failure(trial)}"
            return (*findings, DriftFinding(kind="training", is_drift=True, text=problem)), None
    then = [run["tokens_per_s_per_device"] for run in facts["confirmation"] if run["of"] == facts["trial"]]
    now = [measurement.tokens_per_s_per_device for measurement in measured]
    speed, ratio = drift.speed(then or [facts["tokens_per_s_per_device"]], now, tolerance)
    workload: Workload = from_json(Workload, promoted.manifest["workload"])
    today = trajectory_json(measured[0], promoted.candidate)
    loss = drift.loss(_training(facts), today, _gate_settings(promoted), workload)
    return (*findings, speed, loss), ratio


def _gate_settings(promoted: Version) -> GateSettings:
    """Settings of the gate, with the tolerances of the promoted sweep's file where it names any."""
    gate = (promoted.spec or {}).get("gate")
    given = gate if isinstance(gate, Mapping) else {}
    return GateSettings(
        loss_tolerance=given.get("loss_tolerance"), grad_norm_tolerance=given.get("grad_norm_tolerance")
    )


def _training(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the promoted trial trained: in the gate, whose run was the longest, else in the search."""
    gate = facts["gate"] or {"runs": {}}
    found: Mapping[str, Any] = gate["runs"].get("finalist") or facts["training"]
    return found


def _record(found: Verification, tracker: Tracker) -> Verification:
    """Write the verification into the experiment of promotions, and as tags of the version."""
    with tracker.reached():
        registry = Registry(tracker.client())
        records = Records(registry, tracker.uri)
        tags = {"tc.name": found.name, "tc.version": found.version, "tc.result": found.result}
        lines = [f"- {'**drift** ' if one.is_drift else ''}{one.kind}: {one.text}" for one in found.findings]
        note = "\n".join([f"**{found.name} version {found.version}: {found.result}**", "", *lines])
        metrics = {"speed_over_promoted": found.ratio.value} if found.ratio else {}
        name = f"verify {found.name} v{found.version}: {found.result}"
        run_id = records.put_verification(
            name[:200], tags | {"mlflow.note.content": note}, metrics, json.dumps(found.to_json(), indent=1)
        )
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.at_s))
        for key, text in {"at": stamp, "result": found.result, "run": run_id}.items():
            registry.set_tag(found.name, found.version, f"verified_{key}", text)
    return replace(found, run_id=run_id)
