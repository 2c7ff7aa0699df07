"""What a proof does next: a pure function of the sweep's state.

::

    search ended --> finalists chosen --> rounds of confirmation --> gate --> user's evaluation --> verdict --> profiles
                                          ^        | undecided       | failed, or cannot be told and nobody evaluates:
                                          |        |                 | the next finalist that is shown faster
                                          +--------+                 +--> gate

Nothing is confirmed that was not measured again, interleaved with the baseline on the same nodes, after it had been
chosen: the best of many measurements is partly the luckiest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.proof.loss_gate import reference_candidate
from orchestrator.proof.progress import (
    BASELINE,
    Confirmation,
    checks,
    confirm_settings,
    confirmation,
    fastest_finalist,
    gate_reports,
    gate_roles,
    gate_run,
    gate_runs,
    gate_settings,
    is_open,
    ratio_interval,
)
from orchestrator.statistics import speed
from orchestrator.sweep.events import ChooseFinalists, Command, Conclude, Evaluate, Finish, ProposeCheck
from orchestrator.sweep.limits import spent_budget
from orchestrator.sweep.state import ProofState, SweepState, Trial, describe_failure
from orchestrator.sweep.values import (
    Check,
    Conclusion,
    ConfirmationRun,
    End,
    Evaluation,
    GateReport,
    GateRole,
    GateRun,
    GateSettings,
    ProfileRun,
    Verdict,
)
from orchestrator.units import trial_id
from trials.outcome import Failure, GangLost
from trials.spec import Layout

MAX_VOID_ROUNDS = 4
"""Rounds whose runs had to be spread over different nodes and do not count, before the proof gives up."""


def next_command(state: SweepState, end: End) -> Command:
    """The search has ended because of ``end`` and nothing runs: the next step of the proof, a profile, or the end."""
    if (begin := _finalists(state, end)) is not None:
        return begin
    if state.proof is not None and state.proof.verdict is None:
        return _prove(state, state.proof)
    for number in _to_be_profiled(state):
        check = ProfileRun(of=number, profile=state.sweep.profile)
        return _propose(state, check, f"profile of {trial_id(number)}")
    return Finish(status="finished", reason=end.reason, cause=end.cause)


def largest_layout(state: SweepState) -> Layout | None:
    """The layout, of the finalists and the baseline, that needs most devices; None before there are finalists."""
    if state.proof is None:
        return None
    layouts = [state.trials[number].candidate.layout for number in (BASELINE, *state.proof.finalists)]
    return max(layouts, key=lambda layout: layout.world_size)


def _finalists(state: SweepState, end: End) -> ChooseFinalists | None:
    if state.proof is not None and state.proof.verdict is None:
        return None  # what has been begun is ended first
    if state.proof is None and state.sweep.proof.confirm is not None and state.best is not None:
        chosen = choose_finalists(state)
        finalists = (*chosen, *(n for n in state.to_confirm if n not in chosen))
    elif state.to_confirm:
        finalists = state.to_confirm
    else:
        return None
    return ChooseFinalists(finalists=finalists, reason=end.reason, cause=end.cause)


def choose_finalists(state: SweepState) -> tuple[int, ...]:
    """Measured trials that may be faster than the baseline: those with the highest upper bounds of their intervals.

    With ``confirm.always`` those with the highest upper bounds, whether they may be faster or not.
    """
    baseline = state.trials[BASELINE].measurement
    if baseline is None:
        return ()
    bar = state.objective.score(baseline)
    bounds: dict[int, tuple[float, float]] = {}
    for trial in state.searched():
        if trial.number != BASELINE and trial.measurement is not None:
            found = speed(trial.measurement, state.objective)
            bounds[trial.number] = (found.ci95.high if found.ci95 else found.value, found.value)
    always = confirm_settings(state).always
    hopeful = [number for number, (upper, _) in bounds.items() if upper > bar or always]
    chosen = sorted(hopeful, key=lambda n: (-bounds[n][0], n))[: confirm_settings(state).num_finalists]
    return tuple(sorted(chosen, key=lambda n: (-bounds[n][1], n)))


def _prove(state: SweepState, proof: ProofState) -> Command:
    found = confirmation(state)
    if found is None:
        return _nothing_to_confirm(state)
    if BASELINE in found.failed:
        why = f"the baseline could not be measured again: {found.failed[BASELINE]}"
        return _conclude(found, "unconfirmed", None, why)
    trained = [trial for trial in checks(state, proof) if trial.check == GateRun(of=BASELINE, role="baseline")]
    if any(isinstance(run.outcome, Failure) and not is_open(state, run) for run in trained):
        why = f"the baseline could not be trained for the loss gate: {describe_failure(trained[-1].outcome)}"
        return _conclude(found, "unconfirmed", None, why)
    spent = "" if proof.is_asked else spent_budget(state)
    if found.missing and not spent:
        return _measure_again(state, found)
    if spent and found.judgement.leader is None:
        return _conclude(found, "unconfirmed", None, f"{spent} before anything was shown faster than the baseline")
    return _gate(state, proof, found, spent)


def _nothing_to_confirm(state: SweepState) -> Conclude:
    is_measured = state.trials[BASELINE].measurement is not None
    return Conclude(
        verdict=Verdict(
            conclusion="keep" if is_measured else "unconfirmed",
            winner=None,
            reason="no trial was faster than the baseline"
            if is_measured
            else "the baseline was not measured, so that nothing can be compared with it",
        )
    )


def _measure_again(state: SweepState, found: Confirmation) -> Command:
    number = found.current.number if found.current else found.num_begun
    if number - len(found.complete) > MAX_VOID_ROUNDS:
        why = f"{MAX_VOID_ROUNDS} rounds could not be measured on the same nodes"
        return _conclude(found, "unconfirmed", None, why)
    of = found.missing[0]
    name = "the baseline" if of == BASELINE else trial_id(of)
    return _propose(state, ConfirmationRun(of=of, round=number), f"round {number + 1} of confirming {name}")


def _gate(state: SweepState, proof: ProofState, found: Confirmation, spent: str) -> Command:
    """The fastest finalist that is shown faster and was not refused yet trains beside the baseline."""
    settings, reports = gate_settings(state), gate_reports(state)
    undecided = _undecided(reports, settings)
    finalist = next((number for number in shown_faster(found) if number not in undecided), None)
    if finalist is None:
        reason = _keep_reason(found, reports, proof.evaluations)
        conclusion: Conclusion = "unconfirmed" if undecided or _is_one_lost(state, proof) else "keep"
        return _conclude(found, conclusion, None, reason, reports, proof.evaluations)
    if settings is not None:
        if all(report.trial != finalist for report in reports):
            if spent:
                return _conclude(found, "unconfirmed", None, f"{spent} before the loss gate was through", reports)
            return _train_for_gate(state, finalist)
        if settings.command and evaluation_of(proof, finalist) is None:
            return Evaluate(trial=finalist)
    if state.virtual is not None:
        return _conclude(found, "rehearsed", finalist, _rehearsed_reason(found, finalist))
    return _conclude(found, "confirmed", finalist, _winner_reason(found, finalist), reports, proof.evaluations)


def _undecided(reports: Sequence[GateReport], settings: GateSettings | None) -> set[int]:
    """Finalists that the gate could not judge, and no evaluation of the user's will."""
    if settings is not None and settings.command:
        return set()
    return {report.trial for report in reports if report.answer == "inconclusive"}


def _is_one_lost(state: SweepState, proof: ProofState) -> bool:
    """Whether a finalist is out because its gang was lost again and again, which says nothing about it."""
    lost = (trial.check for trial in checks(state, proof) if isinstance(trial.outcome, GangLost))
    return any(
        isinstance(check, ConfirmationRun) or (isinstance(check, GateRun) and check.role == "finalist")
        for check in lost
    )


def _gate_reason(report: GateReport) -> str:
    """Sentence for a report that did not pass: a run that failed shows nothing about what the model learns."""
    if report.answer == "inconclusive":
        return "is faster, but whether it trains the same model could not be told"
    return "does not train the same model" if report.precision_class else "failed in the loss gate"


def shown_faster(found: Confirmation) -> tuple[int, ...]:
    """Finalists shown faster than the baseline, the leader first, then by their ratios."""
    compared = found.judgement.against_baseline
    faster = [n for n in found.finalists if n in compared and compared[n].verdict == "faster"]
    return tuple(sorted(faster, key=lambda n: (n != found.judgement.leader, -compared[n].ratio.value, n)))


def evaluation_of(proof: ProofState, finalist: int) -> Evaluation | None:
    """How the user's evaluation of ``finalist`` ended; None while it has not."""
    return next((one for one in proof.evaluations if one.trial == finalist), None)


def _train_for_gate(state: SweepState, finalist: int) -> Command:
    runs = gate_runs(state, finalist)
    role: GateRole = next(role for role in gate_roles(state, finalist) if role not in runs)
    run = gate_run(state, finalist, role)
    who = "the baseline" if run.of == BASELINE else trial_id(finalist)
    who += " in fp32" if role.endswith("reference") else ""
    who += " with initial weights off by rounding errors" if run.perturbation else ""
    who += ", once more as it is," if role == "twin" and not run.perturbation else ""
    return _propose(state, run, f"losses of {who} for the gate")


def _propose(state: SweepState, check: Check, reason: str) -> ProposeCheck:
    candidate = state.trials[check.of].candidate
    if isinstance(check, GateRun) and _is_exact(state, check):
        candidate = reference_candidate(candidate, state.sweep.workload)
    return ProposeCheck(trial=len(state.trials), check=check, candidate=candidate, reason=reason)


def _is_exact(state: SweepState, check: GateRun) -> bool:
    """Whether the run is in fp32 whatever it checks: the references, and the twin of one."""
    is_twin = check.role == "reference_twin" and state.trials[BASELINE].candidate.precision.level != "O0"
    return is_twin or check.role.endswith("reference")


def _to_be_profiled(state: SweepState) -> Iterator[int]:
    """Trials to profile: those asked for by people, then those of the sweep's file; measured ones only."""
    yield from state.to_profile
    if not state.sweep.profiled:
        return
    done = {trial.check.of for trial in state.trials if isinstance(trial.check, ProfileRun)}
    for name in state.sweep.profiled:
        trial = named(state, name)
        if trial is not None and trial.measurement is not None and trial.number not in done:
            yield trial.number


def named(state: SweepState, name: str) -> Trial | None:
    """The trial called ``winner``, ``baseline`` or by its number; None where there is none."""
    if name == "winner":
        return state.winner
    number = BASELINE if name == "baseline" else int(name)
    return state.trials[number] if number < len(state.trials) else None


# ---- reasons ----


def _conclude(
    found: Confirmation,
    conclusion: Conclusion,
    winner: int | None,
    reason: str,
    gates: Sequence[GateReport] = (),
    evaluations: Sequence[Evaluation] = (),
) -> Conclude:
    judgement = found.judgement
    shown = winner if winner is not None else fastest_finalist(found)
    compared = judgement.against_baseline.get(shown) if shown is not None else None
    return Conclude(
        verdict=Verdict(
            conclusion=conclusion,
            winner=winner,
            reason=reason,
            speedup=None if compared is None else ratio_interval(compared.ratio),
            tied_with=judgement.tied_with_leader if winner is not None and winner == judgement.leader else (),
            num_rounds=len(found.complete),
            gates=tuple(gates),
            evaluations=tuple(evaluations),
        )
    )


def _winner_reason(found: Confirmation, winner: int) -> str:
    tied = found.judgement.tied_with_leader if winner == found.judgement.leader else ()
    reason = f"{trial_id(winner)} is faster than the baseline in {len(found.complete)} rounds"
    if not tied:
        return reason
    return f"{reason}; it cannot be told from {' '.join(trial_id(n) for n in tied)}"


def _rehearsed_reason(found: Confirmation, winner: int) -> str:
    return (
        f"{trial_id(winner)} came out faster than the baseline in {len(found.complete)} rounds, none of them measured"
    )


def _keep_reason(found: Confirmation, reports: Sequence[GateReport], evaluations: Sequence[Evaluation]) -> str:
    evaluated = {one.trial for one in evaluations}
    not_passed = [r for r in reports if not r.passed and not (r.answer == "inconclusive" and r.trial in evaluated)]
    refused = [f"{trial_id(r.trial)} {_gate_reason(r)}: {r.objections[0]}" for r in not_passed]
    refused += [f"{trial_id(e.trial)} failed your evaluation" for e in evaluations if not e.passed]
    refused += [f"{trial_id(n)} failed when it was measured again: {why}" for n, why in found.failed.items()]
    if not found.finalists:
        return "; ".join(refused)
    others = "other " if refused else ""
    return "; ".join(
        [*refused, f"no {others}finalist is shown faster than the baseline in {len(found.complete)} rounds"]
    )
