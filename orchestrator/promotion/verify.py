"""Measuring a promoted configuration again on today's cluster, and saying what has drifted, if that can be said.

There are three answers: ``no drift``, ``drift`` and ``could not verify``. The first claims that a loss of speed beyond
the tolerance is excluded, the second that there is one; what is too noisy, disturbed or on another machine for either
is the third. :mod:`orchestrator.promotion.remeasure` measures, :mod:`orchestrator.promotion.drift` judges.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cluster.base import ClusterError
from orchestrator import units
from orchestrator.promotion import drift
from orchestrator.promotion.drift import DriftFinding, Kind, Speeds
from orchestrator.promotion.evidence import trajectory_json
from orchestrator.promotion.records import Records
from orchestrator.promotion.references import Version, read, store
from orchestrator.promotion.remeasure import Remeasured, remeasure
from orchestrator.proof.progress import BASELINE
from orchestrator.report import words
from orchestrator.report.summary import interval_json
from orchestrator.statistics import Estimate
from orchestrator.sweep.home import Home
from orchestrator.sweep.snapshot import Observer
from orchestrator.sweep.values import GateSettings
from orchestrator.tracking.registry import Registry
from orchestrator.tracking.tracker import Tracker
from orchestrator.virtual import Virtual
from trials.codec import from_json, to_json
from trials.outcome import Measurement
from trials.spec import ScriptModel, Workload

Answer = Literal["no_drift", "drift", "could_not_verify"]
DEFAULT_ROUNDS = 3
DEFAULT_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What measuring a version again found."""

    name: str
    version: str
    findings: tuple[DriftFinding, ...]
    ignored: tuple[Kind, ...]
    """Kinds of drift that do not count."""
    ratio: Estimate | None
    """Today's speed over the promoted one; None where it did not run, or on other hardware."""
    sweeps: tuple[str, ...]
    at_s: float
    problem: str = ""
    """Why nothing could be measured at all; empty where something was."""
    virtual: Virtual | None = None
    """Set where the version is of a cluster that does not exist: then nothing was measured now either."""
    run_id: str = ""
    """MLflow run that holds it."""

    @property
    def drifted(self) -> tuple[Kind, ...]:
        """Kinds that have drifted and count."""
        kinds = {one.kind for one in self.findings if one.is_drift and one.kind not in self.ignored}
        return tuple(kind for kind in drift.KINDS if kind in kinds)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why neither a drift nor its absence is shown; empty where everything that counts could be told."""
        open_ones = (one for one in self.findings if one.is_open and one.kind not in self.ignored)
        return (*((self.problem,) if self.problem else ()), *(f"{one.kind}: {one.text}" for one in open_ones))

    @property
    def answer(self) -> Answer:
        """What was found: a drift that counts is one, whatever else could not be told."""
        if self.drifted:
            return "drift"
        return "could_not_verify" if self.doubts else "no_drift"

    @property
    def result(self) -> str:
        """``no drift``, ``drift: driver, speed_up`` or ``could not verify: ...``, with the first reason."""
        match self.answer:
            case "drift":
                return f"drift: {', '.join(self.drifted)}"
            case "could_not_verify":
                return f"could not verify: {self.doubts[0]}"
            case "no_drift":
                return "no drift"

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``verify --json``."""
        return {
            "name": self.name,
            "version": self.version,
            "answer": self.answer,
            "result": self.result,
            "virtual": self.virtual,
            "drifted": list(self.drifted),
            "reasons": list(self.doubts),
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
    """Measure the version again beside its baseline, compare, and write down what was found.

    A cluster that cannot be had is an answer, too: it could not be verified.

    Raises:
        ConfigError: there is no such version, it was altered, or it cannot be measured at all.
    """
    tracker = store(home, tracking_uri)
    promoted = read(tracker, reference)
    at_s = time.time()
    found: Remeasured | None = None
    findings: tuple[DriftFinding, ...] = ()
    ratio, problem = None, ""
    try:
        found = remeasure(promoted, tracker, home, observer, address=address, num_rounds=num_rounds, at_s=at_s)
        findings, ratio = compare(promoted, found, tolerance, ignored)
    except ClusterError as error:
        problem = str(error)
    verification = Verification(
        name=promoted.registered.name,
        version=promoted.registered.version,
        findings=findings,
        ignored=tuple(ignored),
        ratio=ratio,
        sweeps=tuple(state.sweep.sweep for state in found.states) if found else (),
        at_s=at_s,
        problem=problem,
        virtual=promoted.manifest["evidence"].get("virtual"),
    )
    return _record(verification, tracker)


def compare(
    promoted: Version, found: Remeasured, tolerance: float, ignored: Collection[Kind] = ()
) -> tuple[tuple[DriftFinding, ...], Estimate | None]:
    """Findings on everything that was compared, and today's speed over that of the promotion."""
    facts = promoted.manifest["evidence"]
    findings = drift.environment(facts["fingerprint"], found.states[0].sweep.fingerprint)
    if found.lost:
        return (*findings, DriftFinding(kind="training", is_drift=False, is_open=True, text=found.lost)), None
    if found.trial.measurement is None:
        problem = f"it does not run any more: {units.status_words(found.trial.status)}: {words.failure(found.trial)}"
        return (*findings, DriftFinding(kind="training", is_drift=True, text=problem)), None
    today = trajectory_json(found.trial.measurement, promoted.candidate)
    workload: Workload = from_json(Workload, promoted.manifest["workload"])
    loss = drift.loss(_training(facts, workload), today, _gate_settings(promoted), workload)
    if any(one.kind == "hardware" and one.is_open for one in findings) and "hardware" not in ignored:
        return (*findings, loss), None
    then, now = _speeds_then(facts), Speeds(configuration=_rates(found.runs), baseline=_rates(found.baseline_runs))
    judged = drift.speeds(then, now, tolerance, found.busy)
    return (*findings, *judged, loss), drift.speed_ratio(then.configuration, now.configuration)


def _rates(runs: Sequence[Measurement]) -> list[float]:
    return [run.tokens_per_s_per_device for run in runs]


def _speeds_then(facts: Mapping[str, Any]) -> Speeds:
    """Speeds in the rounds of the confirmation; without one, those of the search, of a single run each."""
    rounds: dict[int, dict[int, float]] = {}
    for run in facts["confirmation"]:
        rounds.setdefault(run["round"], {})[run["of"]] = run["tokens_per_s_per_device"]
    own = facts["trial"]
    pairs = [speeds for speeds in rounds.values() if own in speeds and BASELINE in speeds]
    if pairs:
        return Speeds(configuration=[one[own] for one in pairs], baseline=[one[BASELINE] for one in pairs])
    speed, searched = facts["tokens_per_s_per_device"], facts["speedup"]
    return Speeds(configuration=[speed], baseline=[speed / searched["ratio"]] if searched else [])


def _gate_settings(promoted: Version) -> GateSettings:
    """Settings of the gate, with the tolerances of the promoted sweep's file where it names any."""
    gate = (promoted.spec or {}).get("gate")
    given = gate if isinstance(gate, Mapping) else {}
    return GateSettings(
        loss_tolerance=given.get("loss_tolerance"), grad_norm_tolerance=given.get("grad_norm_tolerance")
    )


def _training(facts: Mapping[str, Any], workload: Workload) -> Mapping[str, Any]:
    """How the promoted trial trained: in the gate, whose run was the longest, else in the search.

    A program of the user's own may have a schedule that follows the number of its steps: it is compared with the run in
    the search, which was asked for as many steps as today's.
    """
    gate = facts["gate"] if not isinstance(workload.model, ScriptModel) else None
    gate = gate or {"runs": {}}
    found: Mapping[str, Any] = gate["runs"].get("finalist") or facts["training"]
    return found


def _record(found: Verification, tracker: Tracker) -> Verification:
    """Write the verification into the experiment of promotions, and as tags of the version."""
    with tracker.reached():
        registry = Registry(tracker.client())
        records = Records(registry, tracker.uri)
        tags = {"tc.name": found.name, "tc.version": found.version, "tc.result": found.result}
        lines = [f"- {_mark(one)}{one.kind}: {one.text}" for one in found.findings]
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


def _mark(one: DriftFinding) -> str:
    return "**drift** " if one.is_drift else "**open** " if one.is_open else ""
