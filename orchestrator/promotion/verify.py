"""Measures a promoted configuration again on the current cluster, and reports drift.

There are three answers: ``no drift`` means that a slowdown beyond the tolerance is ruled out, ``drift`` that one is
shown, and ``could not verify`` that the measurements are too noisy or disturbed, or from a different machine.
:mod:`orchestrator.proof.confirmation` judges the speed, this module everything else.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from cluster.base import ClusterError
from orchestrator import units
from orchestrator.config.settings import BaselineSection
from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.controller import controller
from orchestrator.errors import ConfigError
from orchestrator.objective import Objective
from orchestrator.program.user_program import PROGRAM
from orchestrator.promotion.manifest import is_of_script, trajectory_json
from orchestrator.promotion.records import Records
from orchestrator.promotion.references import Version, differing, read, store
from orchestrator.proof import confirmation as drift
from orchestrator.proof.confirmation import FIRST_LOOK, Rounds, SpeedChange, is_too_busy
from orchestrator.proof.loss_gate import GateTrajectories, Trajectory, judge_gate
from orchestrator.proof.progress import (
    BASELINE,
    change_since_promotion,
    confirmation,
    is_same_hardware,
    verification_rounds,
    verified_change,
)
from orchestrator.proof.script_gate import ScriptRuns, judge_script
from orchestrator.report import curves, descriptions
from orchestrator.report.summary import interval_json
from orchestrator.space.file_types import RecomputeChoice, StageSplit
from orchestrator.space.inside import section_of
from orchestrator.space.knobs import INSIDE, KNOBS
from orchestrator.space.space import knob_values
from orchestrator.statistics import Estimate
from orchestrator.sweep.events import GateSettings, PromotedRounds
from orchestrator.sweep.snapshot import Home, Observer
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.tracking.mlflow_store import Registry
from orchestrator.tracking.mlflow_tracker import Tracker
from orchestrator.units import Virtual, trial_id
from trials.files import from_json, to_json, write_atomically
from trials.outcome import GangLost, Measurement, NotBelieved, TimedOut
from trials.spec import Candidate, Precision, ScriptModel, Workload, with_learned_routing

# Measuring a promoted configuration again: sweeps made from its manifest, and their results.
#
# The configuration is confirmed again as a finalist against the baseline of its sweep: rounds of both, interleaved on
# the same nodes, by the mechanism of :mod:`orchestrator.proof`, until :mod:`orchestrator.proof.confirmation` decides
# whether speed was lost. A temporarily slow machine then slows both. A configuration that *is* the baseline has nothing
# to be interleaved with: every round is a sweep of one trial.


FOLDER = EXPERIMENT = "verifications"
_KEPT = ("workload", "cluster", "measure", "runner", "objective", "deadlines")
"""Sections of the promoted sweep's file about measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemeasurePlan:
    """How a version is measured again."""

    promoted: PromotedRounds | None
    """The reference of its speed; None if speeds do not count, so that no rounds are needed."""
    max_rounds: int

    @property
    def first_look(self) -> int:
        return min(FIRST_LOOK, self.max_rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remeasured:
    """The result of measuring again."""

    states: tuple[SweepState, ...]
    trial: Trial
    """The configuration's trial, or the first one that was not measured."""
    change: SpeedChange | None
    """The rounds' result on its speed; None if no speeds were compared."""
    lost: str
    """Why there are too few rounds, not caused by the configuration; empty if there are enough."""
    busy: str
    """How many rounds were measured on a busy machine, and the disturbance; empty if none."""
    is_too_busy: bool
    """Whether too few rounds were undisturbed: ``change`` then covers all of them, and is not judged."""


def remeasure(
    promoted: Version,
    tracker: Tracker,
    home: Home,
    observer: Observer,
    plan: RemeasurePlan,
    *,
    address: str | None,
    at_s: float,
) -> Remeasured:
    """Run the sweeps.

    Raises:
        ConfigError: the version cannot be measured.
        ClusterError: no cluster is available.
    """
    content = verification_spec(promoted, tracker, plan, at_s)
    own = Home(home.path / FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        place, spec = Path(folder), _loaded(Path(folder), content)
        if spec.baseline_candidate != promoted.candidate:
            state = controller.submit(spec, own, observer, address=address).state
            return _interleaved(state, promoted.candidate, plan)
        rounds = _Alone(plan)
        for number in range(1, (plan.max_rounds if plan.promoted else 1) + 1):
            one = _loaded(place, _alone(content, promoted.candidate, number))
            rounds.add(controller.submit(one, own, observer, address=address).state)
            if rounds.is_settled:
                break
    return rounds.result()


def verification_spec(promoted: Version, tracker: Tracker, plan: RemeasurePlan, at_s: float) -> dict[str, Any]:
    """The content of the sweep file that measures the version against its baseline.

    Raises:
        ConfigError: the version cannot be measured.
    """
    if promoted.spec is None:
        raise ConfigError(
            f"{promoted.label} was not promoted from a sweep file",
            remedy="Promote a sweep that was submitted from a file.",
        )
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(at_s))
    name = re.sub(r"[^a-z0-9._-]", "-", promoted.registered.name[:28])
    return {
        **{key: value for key, value in promoted.spec.items() if key in _KEPT},
        "name": f"verify-{name}-v{promoted.registered.version}-{stamp}",
        "baseline": promoted.spec.get("baseline", {}),
        "space": _space(promoted.candidate, promoted.spec),
        "search": {"sampler": "grid", "early_stop": "off"},
        "budget": {"max_trials": 2},
        "confirm": _confirm_section(plan),
        "gate": "off",
        "tracking": {"uri": tracker.uri, "experiment": EXPERIMENT},
    }


def _confirm_section(plan: RemeasurePlan) -> Any:
    if plan.promoted is None:
        return "off"
    section = {
        "finalists": 1,
        "min_rounds": plan.first_look,
        "max_rounds": plan.max_rounds,
        "always": True,
        "soak": "off",
    }
    return {**section, "promoted": to_json(plan.promoted)}


def _alone(spec: Mapping[str, Any], candidate: Candidate, number: int) -> dict[str, Any]:
    """The content of the sweep file of one round of a configuration that is the baseline itself."""
    return {
        **spec,
        "baseline": spec["baseline"] if candidate.own or is_of_script(spec) else baseline_section(candidate),
        "space": {"world_size": [candidate.layout.world_size]},
        "confirm": "off",
        "budget": {"max_trials": 1},
        "name": f"{spec['name']}-r{number}",
    }


def _loaded(folder: Path, content: Mapping[str, Any]) -> SweepSpec:
    """The sweep of this content. A custom program gets its configuration files as promoted."""
    if is_of_script(content):
        return SweepSpec.from_json(content)
    file = folder / f"{content['name']}.yaml"
    write_atomically(file, [yaml.safe_dump(dict(content), sort_keys=False).encode()])
    return load_sweep(file)


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


def space_section(candidate: Candidate) -> dict[str, Any]:
    """The candidate as section ``space`` of a sweep file, which then contains only it, regardless of the baseline."""
    body = baseline_section(candidate)
    only = {knob.name: [body.get(knob.name, knob.default)] for knob in KNOBS}
    return {**only, "world_size": [candidate.layout.world_size]}


def _space(candidate: Candidate, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Only the candidate as section ``space``; for a custom program only the knobs that the sweep changed: others keep
    their values in the command."""
    if not is_of_script(spec):
        return space_section(candidate)
    named, own = spec.get("space") or {}, {choice.name: choice.value for choice in candidate.own}
    body = {name: values for name, values in space_section(candidate).items() if named.get(name) is not None}
    body = {**body, "world_size": [candidate.layout.world_size], "own": _custom_section(named.get("own") or {}, own)}
    inside = named.get(INSIDE)
    return body if inside is None else {**body, INSIDE: section_of(candidate, inside)}


def _custom_section(named: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Custom knobs as in the file, each with the one value that the candidate has; all of those without one,
    which have no meaning together with others."""
    section = {}
    for name, knob in named.items():
        described = knob if isinstance(knob, Mapping) else {"values": knob}
        section[name] = {**described, "values": [own[name]]} if name in own else knob
    return section


def _interleaved(state: SweepState, candidate: Candidate, plan: RemeasurePlan) -> Remeasured:
    found = next((trial for trial in state.searched() if trial.candidate == candidate), None)
    if found is None:
        raise ConfigError(
            f"the configuration cannot run on this cluster: {state.finish_reason}",
            remedy="`tune-cluster plan` shows the rule that rejects it.",
        )
    confirmed = confirmation(state)
    rounds = [one for one in confirmed.complete if found.number in one.runs] if confirmed else []
    quiet = verification_rounds(state, rounds, found.number)
    change, counts_busy = verified_change(state, rounds, found.number)
    if len(quiet) < plan.first_look and not counts_busy:
        change = change_since_promotion(state, rounds, found.number)
    lost = _lost([state.trials[BASELINE], found], state)
    is_compared = plan.promoted is not None and is_same_hardware(state, plan.promoted)
    if not lost and is_compared and found.measurement is not None and len(rounds) < plan.first_look:
        why = state.verdict.reason if state.verdict else state.finish_reason
        lost = f"only {units.count(len(rounds), 'round')} of the required {plan.first_look} could be measured: {why}"
    return Remeasured(
        states=(state,),
        trial=found,
        change=change,
        lost=lost,
        busy=_busy_text(len(rounds) - len(quiet), len(rounds), curves.caution(state), left_out=not counts_busy),
        is_too_busy=not counts_busy and len(quiet) < min(plan.first_look, len(rounds)),
    )


def _busy_text(num_busy: int, num_rounds: int, why: str, *, left_out: bool = True) -> str:
    if not num_busy:
        return ""
    verb = "was" if num_busy == 1 else "were"
    most = why.partition("; ")[2]
    text = f"{num_busy} of {units.count(num_rounds, 'round')} {verb} measured on a busy machine"
    text = f"{text} ({most})" if most else text
    return f"{text} and excluded" if left_out else text


class _Alone:
    """Rounds of a configuration without a separate baseline: a sweep of one trial each."""

    def __init__(self, plan: RemeasurePlan) -> None:
        self._plan = plan
        self._states: list[SweepState] = []

    def add(self, state: SweepState) -> None:
        """Add the sweep of another round.

        Raises:
            ConfigError: it has no trial.
        """
        self._states.append(state)
        if not state.trials:
            raise ConfigError(f"the configuration could not be launched: {state.finish_reason}")

    @property
    def is_settled(self) -> bool:
        """Whether no further round is needed, or would help."""
        if self._lost or any(trial.measurement is None for trial in self._trials):
            return True
        runs, quiet = self._runs(), self._runs(quiet=True)
        found = self._change(quiet)
        is_shown = found is not None and (found.loss != "open" or found.is_hopeless)
        return is_shown or is_too_busy(len(quiet), len(runs))

    def result(self) -> Remeasured:
        trials, runs, quiet = self._trials, self._runs(), self._runs(quiet=True)
        is_enough = len(quiet) >= self._plan.first_look
        return Remeasured(
            states=tuple(self._states),
            trial=next((trial for trial in trials if trial.measurement is None), trials[0]),
            change=self._change(quiet if is_enough else runs),
            lost=self._lost,
            busy=_busy_text(len(runs) - len(quiet), len(runs), descriptions.busy_note(dict(enumerate(runs)))),
            is_too_busy=len(quiet) < min(self._plan.first_look, len(runs)),
        )

    @property
    def _trials(self) -> list[Trial]:
        return [state.trials[BASELINE] for state in self._states]

    def _runs(self, *, quiet: bool = False) -> list[Measurement]:
        runs = [trial.measurement for trial in self._trials if trial.measurement is not None]
        return [run for run in runs if run.disturbed_by is None] if quiet else runs

    @property
    def _lost(self) -> str:
        return next((why for state in self._states if (why := _lost(state.trials, state))), "")

    def _change(self, runs: list[Measurement]) -> SpeedChange | None:
        promoted = self._plan.promoted
        if promoted is None or not runs or not is_same_hardware(self._states[0], promoted):
            return None
        return drift.change(
            Rounds(own=promoted.own),
            Rounds(own=[run.tokens_per_s_per_device for run in runs]),
            tolerance=promoted.tolerance,
            first_look=self._plan.first_look,
            max_rounds=self._plan.max_rounds,
            rounded_away=(max(run.step_time_resolution_s / 2 / run.step_time_s for run in runs), 0.0),
        )


def _lost(trials: Any, state: SweepState) -> str:
    """Why a trial is not conclusive for its configuration: its gang was lost, hung, was never launched, or reported
    times that contradict the clock."""
    for trial in trials:
        if trial.outcome is None:
            return f"the sweep {state.sweep.sweep} ended before {trial_id(trial.number)} ran: {state.finish_reason}"
        if isinstance(trial.outcome, GangLost | TimedOut):
            return f"{trial_id(trial.number)} of {state.sweep.sweep} was lost: {descriptions.failure(trial)}"
        if isinstance(trial.outcome, NotBelieved):
            return f"{trial_id(trial.number)} of {state.sweep.sweep}: {descriptions.failure(trial)}"
    return ""


# Drift: current environment, speed and losses compared with those of the promotion.


Kind = Literal["driver", "library", "program", "hardware", "training", "speed", "loss"]
KINDS: tuple[Kind, ...] = ("driver", "library", "program", "hardware", "training", "speed", "loss")
"""Kinds of comparison; ``program``: the source of a custom training program, ``training``: whether it still runs,
``speed``: its speed-up over the baseline together with its own speed."""

HARDWARE = ("hardware", "device_memory_bytes", "threads_per_device", "virtual")
MIN_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftFinding:
    """One comparison."""

    kind: Kind
    is_drift: bool
    text: str
    """One sentence for people, without full stop."""
    is_open: bool = False
    """Whether it is inconclusive: then nothing is verified unless something else has drifted."""


def environment(then: Mapping[str, str], now: Mapping[str, str]) -> list[DriftFinding]:
    """Findings for every name with a different value; one finding without drift if there is none.

    Different hardware is not drift: nothing can be verified on another machine.
    """
    found = []
    for name, (before, after) in sorted(differing(then, now).items()):
        kind, text = _kind(name), f"{name} was {before}, is now {after}"
        is_other = kind == "hardware"
        found.append(DriftFinding(kind=kind, is_drift=not is_other, is_open=is_other, text=text))
    return found or [DriftFinding(kind="library", is_drift=False, text="the environment is unchanged")]


def _kind(name: str) -> Kind:
    if name in ("driver", PROGRAM):
        return "driver" if name == "driver" else "program"
    return "hardware" if name in HARDWARE else "library"


def speed(found: SpeedChange, busy: str, *, is_too_busy: bool = False) -> DriftFinding:
    """Drift of the speed, with the rounds' result in words.

    Args:
        busy: how many rounds were measured on a busy machine; empty if none.
        is_too_busy: too few were undisturbed, so that nothing is claimed.
    """
    figures, aside = _compared(found), f"; {busy}" if busy else ""
    if is_too_busy:
        text = f"{busy}; too few others remain. Verify again when the machine is quiet ({figures})"
        return DriftFinding(kind="speed", is_drift=False, is_open=True, text=text)
    return DriftFinding(
        kind="speed",
        is_drift=found.loss == "shown",
        is_open=found.loss == "open",
        text=f"{_conclusion(found)}: {figures}{aside}",
    )


def _conclusion(found: SpeedChange) -> str:
    rounds = units.count(found.num_rounds, "round")
    match found.loss:
        case "shown":
            assert found.shown_loss is not None, "a loss is shown"
            caught_up = "" if found.is_own_speed_lower or found.lead is None else ", since the baseline has caught up"
            return f"at least {found.shown_loss:.1%} slower{caught_up} ({found.tolerance:.0%} allowed) after {rounds}"
        case "excluded":
            slower = "; the machine is slower, but the speed-up is unchanged" if found.is_own_speed_lower else ""
            return f"a slowdown of more than {found.tolerance:.0%} is ruled out after {rounds}{slower}"
        case "open":
            return _doubt(found, rounds)


def _doubt(found: SpeedChange, rounds: str) -> str:
    """What can still be ruled out, and what would resolve the rest."""
    excluded = found.excluded_loss
    ruled_out = (
        "no bound on the slowdown" if excluded is None else f"a slowdown of more than {excluded:.0%} is ruled out"
    )
    text = f"{ruled_out} after {rounds}"
    if found.more_rounds is not None:
        more = units.count(found.more_rounds, "more round")
        return f"{text}; ruling out {found.tolerance:.0%} needs about {more} (raise --max-rounds)"
    return f"{text}; more rounds would not rule out {found.tolerance:.0%}, use a larger --tolerance"


def _compared(found: SpeedChange) -> str:
    own = f"own speed {_ratio(found.own)} of that at promotion"
    if found.lead is None or found.speedups is None:
        return own
    then, now = found.speedups
    return (
        f"{now:.2f}x the baseline now, {then:.2f}x at promotion, ratio {_ratio(found.lead)}; {own}, "
        f"the baseline {found.baseline:.3f}x"
    )


def _ratio(estimate: Estimate) -> str:
    ci95 = estimate.ci95
    return f"{estimate.value:.3f}x" + (f" (95% CI: {units.ratio_interval(ci95)})" if ci95 else "")


def loss_drift(
    then: Mapping[str, Any], now: Mapping[str, Any], settings: GateSettings, workload: Workload
) -> DriftFinding:
    """Drift of the training: losses or gradient norms beyond the limits of the loss gate.

    Both are :func:`orchestrator.promotion.manifest.trajectory_json` of runs with one seed and one configuration.
    """
    num_steps = min(len(then.get("losses", ())), len(now.get("losses", ())))
    if num_steps < MIN_STEPS:
        return DriftFinding(kind="loss", is_drift=False, text="no losses were kept to compare with")
    gate = GateSettings(
        num_steps=num_steps,
        loss_tolerance=settings.loss_tolerance,
        grad_norm_tolerance=settings.grad_norm_tolerance,
    )
    before, after = _trajectory(then), _trajectory(now)
    if isinstance(workload.model, ScriptModel):
        report = judge_script(0, ScriptRuns(baseline=before, again=None, finalist=after), gate)
    else:
        report = judge_gate(0, GateTrajectories(baseline=before, finalist=after), gate, workload)
    if report.answer == "inconclusive":
        doubts = "; ".join(report.doubts).replace("that of the baseline", "that of the promoted one")
        return DriftFinding(kind="loss", is_drift=False, is_open=True, text=doubts)
    if report.passed:
        deviation = f"{report.loss_deviation:.2g}" if report.loss_deviation is not None else "unknown"
        return DriftFinding(kind="loss", is_drift=False, text=f"the same in {num_steps} steps (within {deviation})")
    reasons = "; ".join(report.reasons).replace("that of the baseline", "that of the promoted one")
    return DriftFinding(kind="loss", is_drift=True, text=reasons)


def _trajectory(stored: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        losses=_numbers(stored["losses"]),
        grad_norms=_numbers(stored["grad_norms"]),
        num_skipped_steps=stored["num_skipped_steps"],
        precision=from_json(Precision, stored["precision"]),
        matmul_precision=stored["matmul_precision"],
        micro_batch_size=stored["micro_batch_size"],
        loss_resolution=stored.get("loss_resolution", 0.0),
    )


def _numbers(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)


Answer = Literal["no_drift", "drift", "could_not_verify"]
SCHEMA_VERSION = 1
"""Version of the JSON form."""
DEFAULT_MAX_ROUNDS = 12
DEFAULT_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of measuring a version again."""

    name: str
    version: str
    findings: tuple[DriftFinding, ...]
    ignored: tuple[Kind, ...]
    """Ignored kinds of drift."""
    change: SpeedChange | None
    """The change of its speed; None if it did not run, or speeds could not be compared."""
    sweeps: tuple[str, ...]
    at_s: float
    problem: str = ""
    """Why nothing could be measured; empty if something was."""
    virtual: Virtual | None = None
    """Set if the version is from a simulated cluster: then nothing was measured now either."""
    run_id: str = ""
    """MLflow run of the verification."""

    @property
    def drifted(self) -> tuple[Kind, ...]:
        """Kinds that have drifted and are not ignored."""
        kinds = {one.kind for one in self.findings if one.is_drift and one.kind not in self.ignored}
        return tuple(kind for kind in KINDS if kind in kinds)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why neither drift nor its absence is shown; empty if everything relevant is conclusive."""
        open_ones = (one for one in self.findings if one.is_open and one.kind not in self.ignored)
        return (*((self.problem,) if self.problem else ()), *(f"{one.kind}: {one.text}" for one in open_ones))

    @property
    def _open_kinds(self) -> tuple[Kind, ...]:
        found = {one.kind for one in self.findings if one.is_open and one.kind not in self.ignored}
        return tuple(kind for kind in KINDS if kind in found)

    @property
    def answer(self) -> Answer:
        """The answer: drift takes precedence over inconclusive comparisons."""
        if self.drifted:
            return "drift"
        return "could_not_verify" if self.doubts else "no_drift"

    @property
    def result(self) -> str:
        """``no drift``, ``drift: driver, speed`` or ``could not verify: speed``; the findings have the reasons."""
        match self.answer:
            case "drift":
                return f"drift: {', '.join(self.drifted)}"
            case "could_not_verify":
                return f"could not verify: {self.problem or ', '.join(self._open_kinds)}"
            case "no_drift":
                return "no drift"

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``verify --json``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "version": self.version,
            "answer": self.answer,
            "result": self.result,
            "virtual": self.virtual,
            "drifted": list(self.drifted),
            "reasons": list(self.doubts),
            "ignored": list(self.ignored),
            "findings": to_json(self.findings),
            "speed": None if self.change is None else _speed_json(self.change),
            "sweeps": list(self.sweeps),
            "run_id": self.run_id,
            "at_s": self.at_s,
        }


def _speed_json(found: SpeedChange) -> dict[str, Any]:
    return {
        "loss": found.loss,
        "tolerance": found.tolerance,
        "rounds": found.num_rounds,
        "more_rounds": found.more_rounds,
        "excluded_loss": found.excluded_loss,
        "shown_loss": found.shown_loss,
        "own_ratio": found.own.value,
        "own_ratio_ci95": interval_json(found.own.ci95),
        "speedup_ratio": found.lead.value if found.lead else None,
        "speedup_ratio_ci95": interval_json(found.lead.ci95) if found.lead else None,
        "speedup_then": found.speedups[0] if found.speedups else None,
        "speedup_now": found.speedups[1] if found.speedups else None,
        "baseline_ratio": found.baseline,
    }


def verify(
    reference: str,
    home: Home,
    observer: Observer,
    *,
    max_rounds: int = DEFAULT_MAX_ROUNDS,
    tolerance: float = DEFAULT_TOLERANCE,
    ignored: Collection[Kind] = (),
    address: str | None = None,
    tracking_uri: str | None = None,
) -> Verification:
    """Measure the version again with its baseline, compare, and record the result.

    An unavailable cluster is reported as "could not verify".

    Raises:
        ConfigError: the version does not exist, was altered, or cannot be measured.
    """
    tracker = store(home, tracking_uri)
    promoted = read(tracker, reference)
    at_s = time.time()
    found: Remeasured | None = None
    findings: tuple[DriftFinding, ...] = ()
    problem = ""
    plan = RemeasurePlan(promoted=_promoted_rounds(promoted, tolerance, ignored), max_rounds=max_rounds)
    try:
        found = remeasure(promoted, tracker, home, observer, plan, address=address, at_s=at_s)
        findings = compare(promoted, found)
    except ClusterError as error:
        problem = str(error)
    verification = Verification(
        name=promoted.registered.name,
        version=promoted.registered.version,
        findings=findings,
        ignored=tuple(ignored),
        change=found.change if found else None,
        sweeps=tuple(state.sweep.sweep for state in found.states) if found else (),
        at_s=at_s,
        problem=problem,
        virtual=promoted.manifest["evidence"].get("virtual"),
    )
    return _record(verification, tracker)


def compare(promoted: Version, found: Remeasured) -> tuple[DriftFinding, ...]:
    """Findings of all comparisons."""
    facts = promoted.manifest["evidence"]
    findings = environment(facts["fingerprint"], found.states[0].sweep.fingerprint)
    if found.lost:
        return (*findings, DriftFinding(kind="training", is_drift=False, is_open=True, text=found.lost))
    if found.trial.measurement is None:
        problem = f"it no longer runs: {units.status_label(found.trial.status)}: {descriptions.failure(found.trial)}"
        return (*findings, DriftFinding(kind="training", is_drift=True, text=problem))
    today = trajectory_json(found.trial.measurement, promoted.candidate)
    workload: Workload = from_json(Workload, promoted.manifest["workload"])
    loss = loss_drift(_training(facts, workload), today, _gate_settings(promoted), workload)
    if found.change is None:
        return (*findings, loss)
    return (*findings, speed(found.change, found.busy, is_too_busy=found.is_too_busy), loss)


def _promoted_rounds(promoted: Version, tolerance: float, ignored: Collection[Kind]) -> PromotedRounds | None:
    """Speeds in the rounds of the confirmation; without one, those of the search, from a single run each. None if
    speeds do not count."""
    if "speed" in ignored:
        return None
    facts = promoted.manifest["evidence"]
    fingerprint = facts["fingerprint"]
    hardware = {} if "hardware" in ignored else {name: fingerprint.get(name, "") for name in HARDWARE}
    rounds: dict[int, dict[int, float]] = {}
    for run in facts["confirmation"]:
        rounds.setdefault(run["round"], {})[run["of"]] = run["tokens_per_s_per_device"]
    own = facts["trial"]
    pairs = [speeds for speeds in rounds.values() if own in speeds and BASELINE in speeds]
    if pairs:
        speeds, baseline = tuple(one[own] for one in pairs), tuple(one[BASELINE] for one in pairs)
    else:
        speed, searched = facts["tokens_per_s_per_device"], facts["speedup"]
        is_per_device = facts["objective"] == Objective().name  # the speed-up is in the unit of the objective
        speeds, baseline = (speed,), (speed / searched["value"],) if searched and is_per_device else ()
    return PromotedRounds(own=speeds, baseline=baseline, tolerance=tolerance, hardware=hardware)


def _gate_settings(promoted: Version) -> GateSettings:
    """Settings of the gate, with the tolerances of the promoted sweep's file, if any."""
    gate = (promoted.spec or {}).get("gate")
    given = gate if isinstance(gate, Mapping) else {}
    return GateSettings(
        loss_tolerance=given.get("loss_tolerance"), grad_norm_tolerance=given.get("grad_norm_tolerance")
    )


def _training(facts: Mapping[str, Any], workload: Workload) -> Mapping[str, Any]:
    """The training curve of the promoted trial: from the gate, whose run was the longest, else from the search.

    A custom program may have a schedule that depends on its number of steps, and the gate trains experts with learned
    routing: they are compared with the run in the search, which a verification repeats.
    """
    is_other = isinstance(workload.model, ScriptModel) or with_learned_routing(workload) != workload
    gate = None if is_other else facts["gate"]
    found: Mapping[str, Any] = (gate or {"runs": {}})["runs"].get("finalist") or facts["training"]
    return found


def _record(found: Verification, tracker: Tracker) -> Verification:
    """Record the verification in the experiment of promotions, and as tags of the version."""
    with tracker.reached():
        registry = Registry(tracker.client())
        records = Records(registry, tracker.uri)
        tags = {"tc.name": found.name, "tc.version": found.version, "tc.result": found.result}
        lines = [f"- {_mark(one)}{one.kind}: {one.text}" for one in found.findings]
        note = "\n".join([f"**{found.name} version {found.version}: {found.result}**", "", *lines])
        metrics = {"speed_over_promoted": found.change.own.value} if found.change else {}
        name = f"verify {found.name} v{found.version}: {found.result}"
        run_id = records.put_verification(
            name[:200], tags | {"mlflow.note.content": note}, metrics, json.dumps(found.to_json(), indent=1)
        )
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.at_s))
        for key, text in {"at": stamp, "result": found.result, "run": run_id}.items():
            registry.set_tag(found.name, found.version, f"verified_{key}", text)
    return replace(found, run_id=run_id)


def _mark(one: DriftFinding) -> str:
    return "**drift** " if one.is_drift else "**unclear** " if one.is_open else ""
