"""Evidence: which trial of a sweep may be promoted, what speaks for it, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator import units
from orchestrator.errors import ConfigError
from orchestrator.proof.progress import checks, gate_runs
from orchestrator.proof.trajectories import trajectory
from orchestrator.report import words
from orchestrator.report.summary import confirmed_figures, interval_json, result, speedup
from orchestrator.statistics import tokens_per_s_per_device
from orchestrator.sweep.events import sweep_id
from orchestrator.sweep.state import SweepState, Trial, find_trial
from orchestrator.sweep.values import ConfirmationRun, GateReport, Verdict
from trials.codec import to_json
from trials.outcome import Measurement
from trials.spec import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A measured trial, and what is missing for it to be promoted without force."""

    trial: Trial
    missing: tuple[str, ...]
    remedy: str

    @property
    def forced(self) -> bool:
        return bool(self.missing)


def choose(
    state: SweepState,
    trial: str | None,
    *,
    force: bool,
    is_candidate: bool = False,
    objections: Sequence[str] = (),
) -> Chosen:
    """The confirmed winner of a sweep, or the trial that was named.

    Args:
        is_candidate: it is to be registered only, not to go to production: nothing needs to be proven.
        objections: what speaks against it besides its evidence.

    Raises:
        ConfigError: there is no such trial, it was not measured or is a check; or, without force, it is not the
            confirmed winner, or has not passed the loss gate. Whatever the force: the cluster does not exist.
    """
    name = state.sweep.sweep
    if state.virtual is not None and not is_candidate:
        raise ConfigError(
            f"{name} is {state.virtual}: nothing was measured, so nothing of it goes to production, by force neither",
            remedy="Submit it on a cluster that exists. --candidate registers the configuration under the alias"
            " candidate, marked as what it is.",
        )
    chosen = find_trial(state, trial, name) if trial is not None else state.winner
    if chosen is None:
        raise ConfigError(f"sweep {name} measured nothing", remedy=f"See why: tune-cluster report {name}")
    if chosen.check is not None:
        of = units.trial_id(chosen.check.of)
        raise ConfigError(f"{units.trial_id(chosen.number)} of {name} is a check of {of}", remedy=f"Promote {of}.")
    if chosen.measurement is None:
        why = f"{units.status_words(chosen.status)}: {words.failure(chosen)}"
        raise ConfigError(
            f"{units.trial_id(chosen.number)} of {name} was not measured ({why})", remedy="Choose another trial."
        )
    remedy = _remedy(state, chosen, is_changed=bool(objections))
    found = Chosen(trial=chosen, missing=(*_missing(state, chosen), *objections), remedy=remedy)
    if found.missing and not force and not is_candidate:
        subject = f"{units.trial_id(chosen.number)} of {name} cannot go to production: "
        raise ConfigError(subject + "; ".join(found.missing), remedy=found.remedy)
    return found


def _missing(state: SweepState, chosen: Trial) -> tuple[str, ...]:
    """What is missing for a promotion without force: sentences without full stops."""
    missing = [] if state.is_over else [f"the sweep is {state.status}, its proof may still come"]
    verdict = state.verdict
    if state.virtual is not None:
        return (*missing, f"the sweep is {state.virtual}: nothing was measured, nothing is proven")
    if chosen.number == 0:
        why = f" ({verdict.reason})" if verdict and verdict.conclusion == "keep" else ""
        return (*missing, f"it is the present configuration{why}")
    if verdict is None:
        return (*missing, "it was not measured again, interleaved with the baseline", _gate_missing(None))
    if verdict.winner == chosen.number:
        return (*missing, *_gate_doubt(verdict, chosen.number))
    if verdict.conclusion != "confirmed" and not _is_judged(state, chosen):
        return (*missing, "the last proof of the sweep was not about it", _gate_missing(None))
    return (*missing, _not_the_winner(verdict, chosen.number), *_gate_doubt(verdict, chosen.number))


def _is_judged(state: SweepState, chosen: Trial) -> bool:
    """Whether the last proof was about this trial; without finalists it was about all: none was as fast."""
    return state.proof is None or not state.proof.finalists or chosen.number in state.proof.finalists


def _not_the_winner(verdict: Verdict, number: int) -> str:
    match verdict.conclusion:
        case "confirmed":
            assert verdict.winner is not None, "a confirmed verdict has a winner"
            tied = ", though it cannot be told from it" if number in verdict.tied_with else ""
            return f"the confirmed winner is {units.trial_id(verdict.winner)}{tied}"
        case "keep":
            return f"it is not shown to be faster than what you have ({verdict.reason})"
        case "unconfirmed" | "rehearsed":
            return f"the confirmation was not settled ({verdict.reason})"


def _gate_doubt(verdict: Verdict, number: int) -> tuple[str, ...]:
    """What the loss gate has against it; an evaluation of the user's that passed settles what the gate could not."""
    report = gate_of(verdict, number)
    is_settled = any(one.trial == number and one.passed for one in verdict.evaluations)
    if report is not None and (report.passed or (report.answer == "inconclusive" and is_settled)):
        return ()
    return (_gate_missing(report),)


def _gate_missing(report: GateReport | None) -> str:
    if report is None:
        return "the loss gate did not look whether it trains the same model"
    if report.answer == "inconclusive":
        return f"the loss gate could not tell whether it trains the same model: {report.objections[0]}"
    if not report.precision_class:
        return f"it failed in the loss gate: {report.reasons[0]}"
    return f"the loss gate found that it does not train the same model: {report.reasons[0]}"


def _remedy(state: SweepState, chosen: Trial, *, is_changed: bool = False) -> str:
    name, verdict = state.sweep.sweep, state.verdict
    force = "--force promotes it all the same, and that is recorded."
    if is_changed:
        return f"Submit the sweep under another name, which measures the program of today. {force}"
    if not state.is_over:
        return f"Wait for it: tune-cluster status {name}. {force}"
    report = gate_of(verdict, chosen.number) if verdict else None
    is_refuted = verdict is not None and verdict.conclusion == "keep" and _is_judged(state, chosen)
    if chosen.number == 0 or is_refuted or (report is not None and report.answer == "failed"):
        return f"Keep what you have. {force}"
    if report is not None and report.answer == "inconclusive":
        return f"{report.remedy}. {force}" if report.remedy else force
    if verdict is not None and verdict.winner == chosen.number:
        return f"Submit the sweep under another name with `gate:` on. {force}"
    return f"Prove it: tune-cluster confirm {name} {units.trial_id(chosen.number)}. {force}"


def gate_of(verdict: Verdict, number: int) -> GateReport | None:
    """The gate's report about a finalist; None where it did not look."""
    return next((report for report in verdict.gates if report.trial == number), None)


def evidence(state: SweepState, chosen: Chosen) -> dict[str, Any]:
    """What was measured of the trial, as JSON values: enough to judge it, and to compare with later."""
    trial = chosen.trial
    measured, compared = result(trial, state.objective), speedup(trial, state.baseline, state.objective)
    assert measured is not None and trial.measurement is not None, "only measured trials are chosen"
    return {
        "sweep": state.sweep.sweep,
        "sweep_id": sweep_id(state.sweep),
        "virtual": state.virtual,
        "trial": trial.number,
        "tokens_per_s_per_device": measured.figures.tokens_per_s_per_device,
        "objective": state.objective.name,
        "confirmed": _confirmed(state, trial.number),
        "unit": state.sweep.workload.speed_unit,
        "ci95": interval_json(tokens_per_s_per_device(trial.measurement).ci95),
        "speedup": compared.to_json() if compared else None,
        "verdict": to_json(state.verdict),
        "confirmation": _confirmation(state, trial.number),
        "gate": _gate(state, trial.number),
        "training": trajectory_json(trial.measurement, trial.candidate),
        "forced": chosen.forced,
        "missing": list(chosen.missing),
        "hardware": state.sweep.hardware,
        "fingerprint": dict(state.sweep.fingerprint),
    }


def _confirmed(state: SweepState, number: int) -> dict[str, Any] | None:
    """What the last proof measured of the trial and the baseline, which is what its ratio is made of; None without."""
    found = confirmed_figures(state)
    return found.to_json() if found is not None and found.trial == number else None


def _confirmation(state: SweepState, number: int) -> list[dict[str, Any]]:
    """Runs of the trial and of the baseline in the last proof."""
    if state.proof is None:
        return []
    return [
        {
            "trial": run.number,
            "of": run.check.of,
            "round": run.check.round,
            "tokens_per_s_per_device": run.measurement.tokens_per_s_per_device,
        }
        for run in checks(state, state.proof)
        if isinstance(run.check, ConfirmationRun) and run.check.of in (0, number) and run.measurement is not None
    ]


def _gate(state: SweepState, number: int) -> dict[str, Any] | None:
    """What the gate said of the trial and what it compared; None where it did not look at it."""
    report = gate_of(state.verdict, number) if state.verdict else None
    if report is None:
        return None
    runs = {
        role: {"trial": run.number, **trajectory_json(run.measurement, run.candidate)}
        for role, run in gate_runs(state, number).items()
        if run.measurement is not None
    }
    return {"report": to_json(report), "runs": runs}


def trajectory_json(measurement: Measurement | None, candidate: Candidate) -> dict[str, Any]:
    """How a run trained, step by step from the first: what :class:`orchestrator.proof.loss_gate.Trajectory` needs."""
    if measurement is None:
        return {}
    run = trajectory(measurement, candidate)
    return {
        "losses": _finite(run.losses),
        "grad_norms": _finite(run.grad_norms),
        "num_skipped_steps": run.num_skipped_steps,
        "precision": to_json(run.precision),
        "matmul_precision": run.matmul_precision,
        "micro_batch_size": run.micro_batch_size,
        "loss_resolution": run.loss_resolution,
    }


def _finite(values: Sequence[float]) -> list[float | None]:
    """The values, None for those that are not finite: JSON has no other numbers."""
    return [value if math.isfinite(value) else None for value in values]
