"""What MLflow is told about a proof as plain values: tags, metrics and notes of checks, verdict and promotions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator import units
from orchestrator.report import words
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.sweep.values import Check, ConfirmationRun, GateRole, GateRun, ProfileRun

GATE_PREFIXES: Mapping[GateRole, str] = {
    "reference": "gate reference ",
    "finalist_reference": "gate reference ",
    "twin": "gate twin ",
    "reference_twin": "gate reference twin ",
}
"""Beginnings of the names of gate runs other than those of a finalist or baseline as it is."""


def check_prefix(check: Check | None) -> str:
    """``confirm r1 ``, the beginning of a check's run name; empty for the search's own trials."""
    match check:
        case None:
            return ""
        case ConfirmationRun():
            return f"confirm r{check.round + 1} "
        case GateRun():
            return GATE_PREFIXES.get(check.role, "gate ")
        case ProfileRun():
            return "profile "


def check_tags(check: Check | None) -> dict[str, str]:
    """Tags of a check besides those of every trial: what it checks and how; empty for the search's own trials."""
    match check:
        case None:
            return {}
        case ConfirmationRun():
            return {"tc.check": check.kind, "tc.of": units.trial_id(check.of), "tc.round": str(check.round + 1)}
        case GateRun():
            return {"tc.check": check.kind, "tc.of": units.trial_id(check.of), "tc.gate_role": check.role}
        case ProfileRun():
            return {"tc.check": check.kind, "tc.of": units.trial_id(check.of)}


def trial_series(trial: Trial) -> dict[str, Sequence[float]]:
    """Loss and gradient norm of every step of a gate run, for MLflow's charts; empty for other trials."""
    if trial.measurement is None or not isinstance(trial.check, GateRun):
        return {}
    return {"loss": trial.measurement.losses, "grad_norm": trial.measurement.grad_norms}


def check_note(trial: Trial, name: str, score: float, unit: str) -> str:
    """What was measured of a check called ``name``, in Markdown."""
    if trial.measurement is None:
        return f"**{units.status_words(trial.status)}** — {name}\n\n{words.failure(trial)}".rstrip()
    if isinstance(trial.check, ConfirmationRun):
        return f"**{units.rate(score)} {unit}** — {name}"
    if isinstance(trial.check, GateRun):
        return (
            f"**{len(trial.measurement.losses)} steps trained**, last loss {trial.measurement.losses[-1]:.4g} — {name}"
        )
    return f"**Profiled** — {name}"


def verdict_tags(state: SweepState) -> dict[str, str]:
    """Tags of the sweep's run that tell its verdict; empty before there is one."""
    verdict = state.verdict
    if verdict is None:
        return {}
    winner = "none" if verdict.winner is None else units.trial_id(verdict.winner)
    return {"tc.verdict": verdict.conclusion, "tc.winner": winner, "tc.verdict_reason": verdict.reason}


def verdict_metrics(state: SweepState) -> dict[str, float]:
    """Metrics of the sweep's run: the confirmed speed-up of the winner, or of the fastest finalist."""
    verdict = state.verdict
    if verdict is None:
        return {}
    found = verdict.speedup
    values = {"confirmation_rounds": float(verdict.num_rounds)}
    if found is not None:
        values |= {"speedup": found.value}
    if found is not None and found.low is not None and found.high is not None:
        values |= {"speedup_ci95_low": found.low, "speedup_ci95_high": found.high}
    return values


def roles(state: SweepState) -> dict[int, dict[str, str]]:
    """Number of each trial that the proof is about to the tags that say what came of it."""
    if state.proof is None:
        return {}
    tags = {number: {"tc.role": "finalist"} for number in state.proof.finalists}
    if state.verdict is not None and state.verdict.winner is not None:
        tags[state.verdict.winner] = {"tc.role": "winner"}
    for report in state.verdict.gates if state.verdict else ():
        tags.setdefault(report.trial, {})["tc.gate"] = report.answer
    for one in state.proof.evaluations:
        tags.setdefault(one.trial, {})["tc.evaluation"] = "passed" if one.passed else "failed"
    return tags


def promotion_tags(record: Mapping[str, str]) -> dict[str, str]:
    """Tags of the sweep's and the trial's run that say where it is in production."""
    version = f"{record['name']} version {record['to_version']}"
    return {"tc.promoted": version if record["action"] == "promote" else f"rolled back to {version}"}
