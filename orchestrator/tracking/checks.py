"""What MLflow is told about a proof as plain values: roles, tags and notes of checks, verdict and promotions."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator import units
from orchestrator.report import words
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.sweep.values import ConfirmationRun, GateRun, ProfileRun


def role_tags(trial: Trial) -> dict[str, str]:
    """What a run is for: ``tc.role``, and for a check what it checks and how. The proof makes a trial more than that:
    see :func:`proof_tags`."""
    match trial.check:
        case None:
            return {"tc.role": "baseline" if trial.number == 0 else "trial"}
        case ConfirmationRun() as check:
            return {"tc.role": "confirmation", "tc.of": units.trial_id(check.of), "tc.round": str(check.round + 1)}
        case GateRun() as check:
            return {"tc.role": "gate", "tc.of": units.trial_id(check.of), "tc.gate_role": check.role}
        case ProfileRun() as check:
            return {"tc.role": "profile", "tc.of": units.trial_id(check.of)}


def check_note(trial: Trial, name: str, score: float, unit: str) -> str:
    """What was measured of a check called ``name``, in Markdown."""
    if trial.measurement is None:
        return f"**{units.status_words(trial.status)}** — {name}\n\n{words.failure(trial)}".rstrip()
    if isinstance(trial.check, ConfirmationRun):
        return f"**{units.rate(score)} {unit}** — {name}"
    if isinstance(trial.check, GateRun):
        losses = trial.measurement.losses
        if not losses:
            return f"**{len(trial.measurement.step_times_s)} steps trained**, losses not known — {name}"
        return f"**{len(losses)} steps trained**, last loss {losses[-1]:.4g} — {name}"
    return f"**Profiled** — {name}"


def verdict_tags(state: SweepState) -> dict[str, str]:
    """Tags of the sweep's run that tell its verdict; empty before there is one."""
    verdict = state.verdict
    if verdict is None:
        return {}
    winner = "none" if verdict.winner is None else units.trial_id(verdict.winner)
    return {"tc.verdict": verdict.conclusion, "tc.winner": winner, "tc.verdict_reason": verdict.reason}


def proof_tags(state: SweepState) -> dict[int, dict[str, str]]:
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
