"""One trial explained from the ledger: why it was proposed, why it waits, what became of each launch of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.plain_text import plain
from orchestrator.report import proof as proof_data
from orchestrator.report.verdict import evaluation_words, gate_words, ratio_interval, rounds
from orchestrator.space.naming import diff, short_name
from orchestrator.status.consequences import made_of_it
from orchestrator.status.pending import why_pending
from orchestrator.status.snapshot import Snapshot, read_snapshot
from orchestrator.sweep.events import AttemptEnded, LedgerEvent, TrialsRetried
from orchestrator.sweep.fold import apply
from orchestrator.sweep.home import attempt_folder
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.state import Attempt, SweepState, Trial, find_trial, nodes_of
from orchestrator.units import signal_name
from trials.codec import to_json
from trials.outcome import Evidence, GangLost, Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStory:
    """One launch of the trial, and what the sweep made of its end."""

    number: int
    attempt: Attempt
    duration_s: float
    """From launch to verified release; of a running one, until now."""
    folder: Path
    """Where its ranks work, on each of its nodes."""
    made_of_it: tuple[str, ...]
    """Sentences; empty while it runs."""

    @property
    def is_blameless(self) -> bool:
        """Whether it was ended on purpose, so that its node and rank are only where it ran."""
        return isinstance(self.attempt.outcome, GangLost) and self.attempt.outcome.cause != "infrastructure"

    @property
    def evidence(self) -> Evidence | None:
        """Where and how it failed; None while it runs and where it was measured."""
        return getattr(self.attempt.outcome, "evidence", None)

    def to_json(self) -> dict[str, Any]:
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
            "made_of_it": list(self.made_of_it),
            "folder": str(self.folder),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What there is to say of a trial."""

    sweep: str
    unit: str
    trial: Trial
    changed: Mapping[str, tuple[Any, Any]]
    """Knobs in which it differs from the baseline: (baseline's value, its value)."""
    pending: tuple[str, ...]
    """Why it was not launched yet, or not again; empty where it does not wait."""
    attempts: tuple[AttemptStory, ...]
    proof: tuple[str, ...]
    """What the last proof showed of it, in words; empty where it was no finalist."""
    ruled_out: Mapping[str, int]
    """Rule to the number of candidates that are not tried because this trial ran out of memory."""

    @property
    def measurement(self) -> Measurement | None:
        return self.trial.measurement

    @property
    def surprise(self) -> float | None:
        """Measured step time over the expected one; None where one of them is unknown."""
        if self.measurement is None or self.trial.expected is None:
            return None
        return self.measurement.step_time_s / self.trial.expected.step_time_s

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``explain --json``."""
        trial = self.trial
        return {
            "sweep": self.sweep,
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
            "attempts": [story.to_json() for story in self.attempts],
            "proof": list(self.proof),
            "ruled_out": dict(self.ruled_out),
            "device_seconds": trial.device_seconds,
        }


def explain(ledger: Ledger, text: str) -> Explanation:
    """Explain the trial that ``text`` means; see :func:`orchestrator.sweep.state.find_trial`.

    Raises:
        ConfigError: it means none.
    """
    sweep = read_snapshot(ledger)
    trial = find_trial(sweep.state, text, sweep.name)
    state = sweep.state
    ruled_out = [event.rules for event in state.pruned if event.witness == trial.number]
    return Explanation(
        sweep=sweep.name,
        unit=state.sweep.workload.speed_unit,
        trial=trial,
        changed=diff(trial.candidate, state.trials[0].candidate),
        pending=why_pending(sweep, trial),
        attempts=tuple(_stories(sweep, trial)),
        proof=tuple(_proof(state, trial.number)),
        ruled_out={rule: count for rules in ruled_out for rule, count in rules.items()},
    )


def _proof(state: SweepState, number: int) -> Iterator[str]:
    for one in proof_data.finalists(state):
        if one.trial == number:
            speed = f"{one.overall.value:.2f}x the baseline ({ratio_interval(one.overall)}), " if one.overall else ""
            yield f"measured again in {rounds(len(one.rounds))}: {speed}{one.words}"
    yield from (f"loss gate {gate_words(report)}" for report in proof_data.gates(state) if report.trial == number)
    yield from (
        f"your evaluation: {evaluation_words(one)}" for one in proof_data.evaluations(state) if one.trial == number
    )


def _stories(sweep: Snapshot, trial: Trial) -> list[AttemptStory]:
    """By going through all events once more: what an end led to shows in the states before and after it."""
    ends = _ends(sweep.news, trial.number)
    now_s = sweep.at_present.now_s
    return [
        AttemptStory(
            number=index,
            attempt=attempt,
            duration_s=max(0.0, ends.get(attempt.token, _End(at_s=now_s)).at_s - attempt.launched_at_s),
            folder=attempt_folder(sweep.folder, trial.number, index, attempt.token),
            made_of_it=ends[attempt.token].made_of_it if attempt.token in ends else (),
        )
        for index, attempt in enumerate(trial.attempts)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    at_s: float
    made_of_it: tuple[str, ...] = ()


def _ends(events: tuple[LedgerEvent, ...], number: int) -> dict[str, _End]:
    """By token: when the trial's attempts ended, and what that led to."""
    ends: dict[str, _End] = {}
    state, last = SweepState(), ""
    for event in events:
        before, state = state, apply(state, event)
        match event:
            case AttemptEnded(trial=trial, token=token) if trial == number and token not in ends:
                ends[token] = _End(at_s=event.at_s, made_of_it=made_of_it(before, state, number, event.outcome))
                last = token
            case TrialsRetried(trials=trials) if number in trials and last:
                asked = f"launched again because {plain(event.by)} asked for it"
                ends[last] = replace(ends[last], made_of_it=(*ends[last].made_of_it, asked))
            case _:
                pass
    return ends


def _evidence_json(evidence: Evidence | None) -> dict[str, Any] | None:
    if evidence is None:
        return None
    return {**to_json(evidence), "signal": signal_name(evidence.exit_code)}


def _measured_json(measurement: Measurement | None) -> dict[str, Any] | None:
    if measurement is None:
        return None
    return {
        "step_time_s": measurement.step_time_s,
        "tokens_per_s_per_device": measurement.tokens_per_s_per_device,
        "peak_bytes": measurement.peak_bytes,
    }
