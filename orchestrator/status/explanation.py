"""Explains one trial of a sweep (``explain SWEEP TRIAL``): why it was proposed, why it is waiting, how each attempt
ended, and how the sweep reacted. Everything comes from the ledger, in sentences and as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator import units
from orchestrator.errors import ConfigError
from orchestrator.report import curves
from orchestrator.report.descriptions import (
    disturbed,
    evaluation_text,
    finalist_text,
    gate_text,
    soak_text,
    trial_figures,
)
from orchestrator.report.summary import note_json
from orchestrator.space.notation import diff, short_name
from orchestrator.sweep.events import AttemptEnded, LedgerEvent, TrialsRetried
from orchestrator.sweep.fold import apply
from orchestrator.sweep.snapshot import AT_REST, Home, Snapshot, attempt_folder
from orchestrator.sweep.state import (
    Attempt,
    SweepState,
    Trial,
    failure,
    find_trial,
    nodes_of,
    nodes_to_avoid,
    spent_budget,
)
from orchestrator.text import plain, tail
from orchestrator.units import Virtual, count, signal_name, trial_id
from trials.files import fields_json, to_json
from trials.outcome import (
    Crashed,
    Diverged,
    Evidence,
    GangLost,
    HostOutOfMemory,
    Infeasible,
    Measured,
    Measurement,
    NotBelieved,
    Outcome,
    OutOfMemory,
    StoppedEarly,
    TimedOut,
)
from trials.spec import ScriptModel


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptExplanation:
    """One launch of the trial, how it ended, and the consequences."""

    number: int
    attempt: Attempt
    duration_s: float
    """From launch to verified release; of a running one, until now."""
    folder: Path
    """The working folder of its ranks, on each of its nodes."""
    num_logs: int
    """One per rank, or per node where the command starts the ranks itself."""
    consequences: tuple[str, ...]
    """How the sweep reacted to its end, in sentences; empty while it is running."""

    @property
    def is_blameless(self) -> bool:
        """Whether it was ended on purpose: its node and rank are then not the cause."""
        return isinstance(self.attempt.outcome, GangLost) and not self.attempt.outcome.is_counted

    @property
    def evidence(self) -> Evidence | None:
        """Where and how it failed; None while it is running, or if it was measured."""
        return getattr(self.attempt.outcome, "evidence", None)

    @property
    def blamed(self) -> str:
        """Where and how it failed: ``rank 3 on node1, RuntimeError, exit code 1``; empty if it was ended on purpose."""
        evidence = self.evidence
        if evidence is None or self.is_blameless:
            return ""
        rank = f"rank {evidence.rank}" if evidence.rank is not None else ""
        where = " on ".join(filter(None, (rank, evidence.node)))
        code = signal_name(evidence.exit_code) or (f"exit code {evidence.exit_code}" if evidence.exit_code else "")
        return plain(", ".join(filter(None, (where, evidence.error_type, code))))

    def to_json(self) -> dict[str, Any]:
        """Its part of ``explain --json``."""
        outcome = self.attempt.outcome
        return {
            "attempt": self.number,
            "outcome": outcome.kind if outcome else None,
            "consequence": outcome.consequence if outcome else None,
            "nodes": list(nodes_of(self.attempt)),
            "num_ranks": len(self.attempt.ranks),
            "num_devices": self.attempt.num_devices,
            "launched_at_s": self.attempt.launched_at_s,
            "duration_s": self.duration_s,
            "device_seconds": self.attempt.device_seconds,
            "cause": outcome.cause if isinstance(outcome, GangLost) else None,
            "evidence": _evidence_json(self.evidence),
            "consequences": list(self.consequences),
            "folder": str(self.folder),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The full explanation of one trial."""

    sweep: str
    virtual: Virtual | None
    """The origin of its numbers on a simulated cluster."""
    figures: str
    """Its speed in words; empty if it was not measured."""
    trial: Trial
    changed: Mapping[str, tuple[Any, Any]]
    """Knobs that differ from the baseline: (baseline's value, its value)."""
    pending: tuple[str, ...]
    """Why it was not launched yet, or not again; empty if it is not waiting."""
    attempts: tuple[AttemptExplanation, ...]
    """In launch order."""
    proof: tuple[str, ...]
    """The results of the last proof for it, in sentences; empty if it was not a finalist."""
    ruled_out: Mapping[str, int]
    """Rule to the number of candidates that are not tried because this trial ran out of memory or its program rejected
    a knob."""

    @property
    def measurement(self) -> Measurement | None:
        return self.trial.measurement

    @property
    def expected(self) -> str:
        """The step time and memory expected when it was proposed; empty without a prediction."""
        expected = self.trial.expected
        if expected is None:
            return ""
        step = f"step {units.milliseconds(expected.step_time_s)} (± {100 * expected.log_spread:.0f}%)"
        peak = "" if expected.peak_bytes is None else f"peak {units.num_bytes(expected.peak_bytes)}, "
        return f"{step}, {peak}probability of fitting {units.chance(expected.probability_fits)}"

    @property
    def surprise(self) -> float | None:
        """Measured over expected step time; None if one of them is unknown."""
        if self.measurement is None or self.trial.expected is None:
            return None
        return self.measurement.step_time_s / self.trial.expected.step_time_s

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``explain --json``."""
        trial = self.trial
        return {
            "sweep": self.sweep,
            "virtual": self.virtual,
            "trial": trial.number,
            "state": trial.status,
            "short_name": short_name(trial.candidate),
            "origin": trial.origin,
            "reason": trial.reason,
            "proposed_at_s": trial.proposed_at_s,
            "changed": {name: {"baseline": old, "candidate": new} for name, (old, new) in self.changed.items()},
            "expected": to_json(trial.expected),
            "measured": _measured_json(self.measurement),
            "measured_over_expected": self.surprise,
            "pending": list(self.pending),
            "attempts": [attempt.to_json() for attempt in self.attempts],
            "proof": list(self.proof),
            "ruled_out": dict(self.ruled_out),
            "device_seconds": trial.device_seconds,
            "note": None if trial.note is None else note_json(trial.number, trial.note),
        }


def explain(name: str, text: str, home: Home) -> Explanation:
    """Explain the trial of the sweep ``name`` that ``text`` means; see :func:`orchestrator.sweep.state.find_trial`.

    Raises:
        ConfigError: the sweep or trial does not exist.
    """
    sweep = home.read(name)
    trial = find_trial(sweep.state, text, sweep.name)
    state = sweep.state
    ruled_out = [event.rules for event in state.pruned if event.witness == trial.number]
    return Explanation(
        sweep=sweep.name,
        virtual=state.virtual,
        figures=trial_figures(state, trial),
        trial=trial,
        changed=diff(trial.candidate, state.trials[0].candidate),
        pending=_pending_reasons(sweep, trial),
        attempts=tuple(_attempts(sweep, trial, home)),
        proof=tuple(_proof(state, trial.number)),
        ruled_out={rule: count for rules in ruled_out for rule, count in rules.items()},
    )


def _pending_reasons(sweep: Snapshot, trial: Trial) -> tuple[str, ...]:
    """Why the trial was not launched yet, decisive reason first; empty if it is not waiting."""
    if trial.number not in sweep.state.waiting:
        return ()
    phase = sweep.phase
    if phase == "waiting":
        return (units.with_reason("the sweep has no nodes yet", sweep.reason, ": "), *_queue(sweep))
    if phase != "running":
        remedy = "; `resume` continues it" if phase in ("paused", "interrupted") else ""
        verb = "is" if phase not in AT_REST or phase == "paused" else "was"
        return (f"the sweep {verb} {units.with_reason(phase, sweep.reason, ': ')}{remedy}",)
    state = sweep.at_present
    if failing := failure(state):
        return (f"the sweep is about to fail: {failing.reason}",)
    if spent := spent_budget(state):
        return (f"{spent}: no more trials are launched",)
    return (_devices(sweep, trial), *_lease(sweep), *_queue(sweep), *_avoided(trial))


def _devices(sweep: Snapshot, trial: Trial) -> str:
    """Devices that the trial needs, devices that the sweep holds, and the trials that use them."""
    state, needed, devices = sweep.state, trial.candidate.layout.world_size, sweep.state.sweep.devices
    nodes = [node for node in sweep.lease.nodes if node not in state.quarantined]
    busy = sum(state.trials[number].attempts[-1].num_devices for number in state.running)
    by = " ".join(units.trial_id(number) for number in sorted(state.running))
    taken = f"{busy} busy with {by}" if busy else "none of them busy"
    needs = f"it needs {count(needed, 'device')}"
    num_nodes, num_devices = math.ceil(needed / devices.devices_per_node), len(nodes) * devices.devices_per_node
    held = f"the lease holds {count(len(nodes), 'node')} with {count(num_devices, 'device')}, {taken}"
    return f"{needs} on {count(num_nodes, 'node')}; {held}"


def _lease(sweep: Snapshot) -> list[str]:
    """Nodes that the sweep did not get, or no longer uses."""
    lease, quarantined = sweep.lease, sorted(sweep.state.quarantined)
    missing = f"{len(lease.nodes)} of {lease.wanted} nodes are held: {lease.waiting}" if lease.waiting else ""
    out = f"{' '.join(quarantined)} is quarantined and no longer used" if quarantined else ""
    return [line for line in (missing, out) if line]


def _queue(sweep: Snapshot) -> list[str]:
    """The priority of the sweep among those that share the nodes."""
    return [f"priority {sweep.lease.priority}"] if sweep.lease.priority else []


def _avoided(trial: Trial) -> list[str]:
    """Nodes on which earlier attempts failed."""
    avoided = nodes_to_avoid(trial)
    return [f"prefers nodes other than {' '.join(avoided)}, where it failed"] if avoided else []


def _attempts(sweep: Snapshot, trial: Trial, home: Home) -> list[AttemptExplanation]:
    """The trial's attempts. Folds all events again: the states before and after an end show its consequences."""
    with home.open(sweep.name, begun=False) as ledger:
        ends = _ends(ledger.events(), trial.number) if trial.attempts else {}
    now_s = sweep.at_present.now_s
    return [
        AttemptExplanation(
            number=index,
            attempt=attempt,
            duration_s=max(0.0, ends.get(attempt.token, _End(at_s=now_s)).at_s - attempt.launched_at_s),
            folder=attempt_folder(sweep.folder, trial.number, index, attempt.token),
            num_logs=len(_log_nodes(sweep, attempt)),
            consequences=ends[attempt.token].consequences if attempt.token in ends else (),
        )
        for index, attempt in enumerate(trial.attempts)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """When an attempt ended, and the consequences."""

    at_s: float
    consequences: tuple[str, ...] = ()


def _ends(events: Iterable[LedgerEvent], number: int) -> dict[str, _End]:
    """Ends of the attempts of trial ``number``, by their tokens."""
    ends: dict[str, _End] = {}
    state, last = SweepState(), ""
    for event in events:
        before, state = state, apply(state, event)
        match event:
            case AttemptEnded(trial=trial, token=token) if trial == number and token not in ends:
                ends[token] = _End(at_s=event.at_s, consequences=_consequences(before, state, number, event.outcome))
                last = token
            case TrialsRetried(trials=trials) if number in trials and last:
                relaunch_reason = f"launched again, as requested by {plain(event.by)}"
                ends[last] = replace(ends[last], consequences=(*ends[last].consequences, relaunch_reason))
            case _:
                pass
    return ends


_LOSSES = {
    "infrastructure": "an infrastructure fault, not caused by the candidate",
    "controller": "ended by its controller; not counted",
    "preempted": "preempted by another sweep; not counted",
    "killed": "killed by a signal from outside the trial, not caused by the candidate",
}


def _consequences(before: SweepState, after: SweepState, number: int, outcome: Outcome) -> tuple[str, ...]:
    """The consequences of the end of an attempt of trial ``number``, from the states before and after it."""
    return (
        *_search_effect(before, after, number, outcome),
        *_goes_again(after, number, outcome),
        *_strikes(before, after),
    )


def _search_effect(before: SweepState, after: SweepState, number: int, outcome: Outcome) -> list[str]:
    """What the search learned, or the cause of the failure."""
    is_result = outcome.consequence in ("objective", "constraint") and not isinstance(outcome, StoppedEarly)
    if after.trials[number].check is not None and is_result:
        return ["a check: not used by the search"]
    match outcome:
        case Measured():
            is_best = after.best_trial == number != before.best_trial
            return ["reported to the search", *(["the fastest so far"] if is_best and number else [])]
        case StoppedEarly():
            saved = units.device_time(outcome.saved_device_seconds)
            return [
                f"reported to the search as slower than {units.trial_id(outcome.incumbent)}",
                f"at least {saved} saved",
            ]
        case NotBelieved() if after.baseline is after.trials[number]:
            return ["nothing can be compared with the baseline: the sweep ends"]
        case OutOfMemory() | Infeasible() | Diverged() | NotBelieved():
            return ["reported to the search as a constraint: infeasible"]
        case GangLost():
            return [_LOSSES[outcome.cause]]
        case HostOutOfMemory():
            return ["host memory ran out, not device memory: not used by the search"]
        case TimedOut() | Crashed():
            limit = after.sweep.budget.consecutive_failures
            return [f"counted as a fault of the candidate, not used by the search; {limit} in a row stop the sweep"]


def _goes_again(after: SweepState, number: int, outcome: Outcome) -> list[str]:
    """Whether the trial is launched again: only after losses and exhausted hosts, each kind on its own budget."""
    trial, budget = after.trials[number], after.sweep.budget
    if isinstance(outcome, HostOutOfMemory):
        number_of, limit = trial.num_host_ooms, budget.host_ooms_per_trial
    elif isinstance(outcome, GangLost):
        number_of, limit = trial.num_lost, budget.lost_attempts_per_trial
    else:
        return []
    if number not in after.waiting:
        return [f"gave up after failure {number_of} of {limit}"]
    is_counted = isinstance(outcome, HostOutOfMemory) or outcome.is_counted
    return ["will be launched again" + (f" (failure {number_of} of {limit})" if is_counted else "")]


def _strikes(before: SweepState, after: SweepState) -> list[str]:
    """Faults counted against a node, and the consequences."""
    limit = after.sweep.budget.strikes_per_node
    struck = [node for node, count in after.strikes.items() if count > before.strikes.get(node, 0)]
    lines = [f"strike {after.strikes[node]} of {limit} against {node}" for node in struck]
    out = sorted(after.quarantined - before.quarantined)
    return [*lines, *(f"{node} is quarantined and no longer used" for node in out)]


def _proof(state: SweepState, number: int) -> Iterator[str]:
    """The results of rounds, loss gate and evaluation for this trial."""
    for one in curves.finalists(state):
        if one.trial == number:
            speed = f"{units.ratio(one.overall.value, one.overall)} against the baseline, " if one.overall else ""
            yield f"re-measured in {count(len(one.rounds), 'round')}: {speed}{finalist_text(one)}"
    yield from (f"loss gate {gate_text(report)}" for report in curves.gates(state) if report.trial == number)
    yield from (soak_text(report) for report in curves.soaks(state) if report.trial == number)
    yield from (f"your evaluation: {evaluation_text(one)}" for one in curves.evaluations(state) if one.trial == number)


def _evidence_json(evidence: Evidence | None) -> dict[str, Any] | None:
    if evidence is None:
        return None
    return {**to_json(evidence), "signal": signal_name(evidence.exit_code)}


def _measured_json(measurement: Measurement | None) -> dict[str, Any] | None:
    if measurement is None:
        return None
    graph = measurement.findings.graph
    return {
        **fields_json(measurement, "step_time_s", "tokens_per_s_per_device"),
        "peak_bytes": measurement.peak_bytes or None,
        "device_memory": to_json(measurement.device_memory),
        "compile_s": measurement.compile_s or None,
        "compile_cache": measurement.compile_cache,
        "compile_cold_s": None if graph is None else graph.cold_s,
        "compile_warm_s": None if graph is None else graph.warm_s,
        "disturbed": disturbed(measurement),
        "trend": to_json(measurement.trend),
        "nodes": to_json(measurement.disturbances),
        "devices": to_json(measurement.findings.devices),
    }


# The logs of a trial's ranks: their locations and last lines.
#
# Every rank writes ``sweeps/NAME/attempts/ID/rank<r>.log`` on its own node, under the same path.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """The log of one rank. ``lines`` is empty if the file is not on this host."""

    rank: int
    node: str
    path: Path
    is_here: bool
    is_root_cause: bool
    lines: tuple[str, ...] = ()
    is_whole: bool = True
    """Whether ``lines`` is the full log."""
    end: int = 0
    """Byte after the last line read."""

    def to_json(self) -> dict[str, Any]:
        return fields_json(self, "rank", "node", "is_here", "is_root_cause", "is_whole", "path", "lines")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLogs:
    """The logs of one attempt; the rank that failed first comes first."""

    sweep: str
    trial: int
    attempt: int
    outcome: str
    """Its kind; ``running`` while there is none."""
    ranks: tuple[RankLog, ...]
    evidence: Evidence | None
    """The ledger's evidence of a failure, independent of the logs."""

    def to_json(self) -> dict[str, Any]:
        ranks = [log.to_json() for log in self.ranks]
        return {**fields_json(self, "sweep", "trial", "attempt", "outcome", "evidence"), "ranks": ranks}


def attempt_logs(
    sweep: Snapshot, trial: Trial, *, attempt: int | None = None, rank: int | None = None, num_lines: int
) -> AttemptLogs:
    """The logs of an attempt, the last one by default, or of one ``rank`` of it.

    Raises:
        ConfigError: the attempt or rank does not exist, or the cluster is simulated.
    """
    if sweep.is_virtual:
        raise ConfigError(f"the trials in the sweep {sweep.name!r} have no logs, because its cluster is simulated")
    index = _attempt_index(trial, attempt)
    found = trial.attempts[index]
    nodes = _log_nodes(sweep, found)
    if rank is not None and not 0 <= rank < len(nodes):
        raise ConfigError(f"trial {trial_id(trial.number)} has no rank {rank}", remedy=f"Ranks: 0 to {len(nodes) - 1}.")
    evidence = getattr(found.outcome, "evidence", None)
    root = evidence.rank if evidence else None
    ranks = [rank] if rank is not None else sorted(range(len(nodes)), key=lambda r: (r != root, r))
    folder = attempt_folder(sweep.folder, trial.number, index, found.token)
    return AttemptLogs(
        sweep=sweep.name,
        trial=trial.number,
        attempt=index,
        outcome=found.outcome.kind if found.outcome else "running",
        ranks=tuple(_rank_log(folder, r, nodes[r], is_root=r == root, num_lines=num_lines) for r in ranks),
        evidence=None if isinstance(found.outcome, Measured) else evidence,
    )


def _log_nodes(sweep: Snapshot, attempt: Attempt) -> list[str]:
    """The node of each log: one for every rank, or for every node where the command starts the ranks there itself."""
    nodes = [device.node for device in attempt.ranks]
    created = sweep.state.created
    model = created.workload.model if created else None
    is_own = isinstance(model, ScriptModel) and model.launcher == "own"
    return list(dict.fromkeys(nodes)) if is_own else nodes


def _attempt_index(trial: Trial, attempt: int | None) -> int:
    if not trial.attempts:
        raise ConfigError(f"trial {trial_id(trial.number)} has not been launched yet, so it has no log")
    if attempt is None:
        return len(trial.attempts) - 1
    if 0 <= attempt < len(trial.attempts):
        return attempt
    raise ConfigError(
        f"trial {trial_id(trial.number)} has no attempt {attempt}", remedy=f"Attempts: 0 to {len(trial.attempts) - 1}."
    )


def _rank_log(folder: Path, rank: int, node: str, *, is_root: bool, num_lines: int) -> RankLog:
    path = folder / f"rank{rank}.log"
    log = RankLog(rank=rank, node=node, path=path, is_here=path.is_file(), is_root_cause=is_root)
    if not log.is_here:
        return log
    read = tail(path, num_lines)
    return RankLog(
        rank=rank,
        node=node,
        path=path,
        is_here=True,
        is_root_cause=is_root,
        lines=read.lines,
        is_whole=read.is_whole,
        end=read.end,
    )


def log_tail(evidence: Evidence) -> list[str]:
    """The last lines that the ledger keeps of a failing rank, safe to print."""
    return [plain(line) for line in evidence.log_tail]
