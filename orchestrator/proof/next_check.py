"""The next step of a proof: a pure function of the sweep's state.

::

    search ended --> finalists chosen --> rounds of confirmation --> gate, soak, evaluation --> verdict --> profiles
                         ^                ^        | undecided       | one of them refuses the finalist:
                         |                |        |                 | the next one that is shown faster
                         |                +--------+                 +--> gate
                         |                                           | no finalist is left, and some were disqualified:
                         +---- trials that they stopped run again <--+ the next best trials

A trial is confirmed only if it was measured again after being chosen, interleaved with the baseline on the same nodes:
the best of many measurements is partly the luckiest one.

Of finalists with equal speeds by the rounds, the smaller change goes first: the baseline's number format, then fewer
differing knobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from orchestrator.proof.confirmation import is_failed
from orchestrator.proof.loss_gate import reference_candidate
from orchestrator.proof.progress import (
    BASELINE,
    MAX_VOID_ROUNDS,
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
    next_soak_run,
    ratio_interval,
    soak_reports,
)
from orchestrator.space.notation import Scalar, change, flat_params, shared_change
from orchestrator.statistics import speed
from orchestrator.sweep.events import (
    Check,
    ChooseFinalists,
    Command,
    Conclude,
    Conclusion,
    ConfirmationRun,
    Disqualified,
    End,
    Evaluate,
    Evaluation,
    Finish,
    FinishCause,
    GateReport,
    GateRole,
    GateRun,
    GateSettings,
    ProfileRun,
    ProposeCheck,
    SetAside,
    SoakReport,
    SoakRun,
    Verdict,
)
from orchestrator.sweep.state import (
    CONVERGED,
    ProofState,
    SweepState,
    Trial,
    describe_failure,
    spent_budget,
    spent_by_search,
)
from orchestrator.units import count, duration, ratio_ci, sure_ratio, trial_id
from trials.outcome import GangLost, StoppedEarly
from trials.spec import Layout

AUTO_PROFILE_S = 600.0
"""Seconds of work from which a sweep's baseline and winner are profiled automatically."""
AUTO_PROFILE_SHARE = 0.1
"""Share of the sweep's device time that these profiles may take."""


def next_command(state: SweepState, end: End) -> Command:
    """Return the next step of the proof, a profile, or the end; the search ended with ``end`` and nothing runs."""
    if (begin := _finalists(state, end)) is not None:
        return begin
    if state.proof is not None and state.proof.verdict is None:
        return _prove(state, state.proof)
    for number in _to_be_profiled(state):
        check = ProfileRun(of=number, profile=state.sweep.profile)
        return _propose(state, check, f"profile of {trial_id(number)}")
    return Finish(status="finished", reason=end.reason, cause=end.cause)


def largest_layout(state: SweepState) -> Layout | None:
    """Return the layout of finalists and baseline that needs the most devices; None before there are finalists."""
    if state.proof is None:
        return None
    layouts = [state.trials[number].candidate.layout for number in (BASELINE, *state.proof.finalists)]
    return max(layouts, key=lambda layout: layout.world_size)


def _finalists(state: SweepState, end: End) -> ChooseFinalists | None:
    if state.proof is not None and state.proof.verdict is None:
        return None  # a started proof is completed first
    if state.proof is None and state.sweep.proof.confirm is not None and state.best is not None:
        chosen = choose_finalists(state)
        finalists = (*chosen, *(n for n in state.to_confirm if n not in chosen))
    elif state.to_confirm:
        finalists = state.to_confirm
    else:
        return None
    return ChooseFinalists(finalists=finalists, reason=end.reason, cause=end.cause)


def choose_finalists(state: SweepState) -> tuple[int, ...]:
    """Choose measured trials that may be faster than the baseline: those with the highest upper bounds of intervals.

    With ``confirm.always``, those with the highest upper bounds, even if they are not faster. After disqualifications,
    the next best that differ from the disqualified ones, see :func:`hopeful`. Of several with one of the values shared
    by all disqualified trials, only the first, while there are others.
    """
    most, suspect = confirm_settings(state).num_finalists, shared_values(state).items()
    chosen: list[int] = []
    later: list[int] = []
    seen: set[object] = set()
    for number in promising(state):
        values = suspect & flat_params(state.trials[number].candidate).items()
        (later if values & seen else chosen).append(number)
        seen |= values
    finalists = [*chosen, *later][:most]
    return tuple(sorted(finalists, key=lambda n: (-state.score(state.trials[n]), n)))


def promising(state: SweepState) -> tuple[int, ...]:
    """Return measured trials that may be faster than the baseline and are not confirmed yet, highest upper bound first.

    Trials with all the values shared by the disqualified ones are left out.
    """
    baseline = state.trials[BASELINE].measurement if state.trials else None
    if baseline is None:
        return ()
    bar = state.objective.score(baseline)
    always = confirm_settings(state).always
    tried = {one.trial for one in state.disqualified}
    for proof in state.set_aside:
        shown = confirmation(state, proof)
        tried |= set(proof.finalists) - set(shown_faster(state, shown) if shown is not None else ())
    bounds: dict[int, float] = {}
    for trial in state.searched():
        if trial.number in tried or trial.number == BASELINE or trial.measurement is None:
            continue
        found = speed(trial.measurement, state.objective)
        upper = found.ci95.high if found.ci95 else found.value
        if (upper > bar or always) and not _has_shared(state, trial.number):
            bounds[trial.number] = upper
    return tuple(sorted(bounds, key=lambda n: (-bounds[n], n)))


def shared_values(state: SweepState) -> dict[str, Scalar]:
    """Return the values that all disqualified trials share and the baseline lacks. Empty for fewer than two: a single
    one does not show which of its values is the cause, if any."""
    out = [state.trials[one.trial].candidate for one in state.disqualified]
    return shared_change(out, state.trials[BASELINE].candidate) if len(out) > 1 else {}


def _left_out(state: SweepState) -> tuple[int, ...]:
    """Return measured trials with all the values shared by the disqualified ones."""
    out = {one.trial for one in state.disqualified}
    others = (
        one.number for one in state.searched() if one.measurement is not None and one.number not in (BASELINE, *out)
    )
    return tuple(number for number in others if _has_shared(state, number))


def _with_left_out(state: SweepState, verdict: Verdict) -> Verdict:
    """Add to the verdict the trials that it leaves out; its winner is proven and never one of them."""
    out = {one.trial: one for one in (*state.disqualified, *verdict.disqualified) if one.trial != verdict.winner}
    left_out = _left_out(replace(state, disqualified=tuple(out.values())))
    return replace(verdict, left_out=tuple(number for number in left_out if number != verdict.winner))


def _has_shared(state: SweepState, number: int) -> bool:
    """Whether the trial has all the values shared by the disqualified ones."""
    shared = shared_values(state)
    return bool(shared) and shared.items() <= flat_params(state.trials[number].candidate).items()


def _prove(state: SweepState, proof: ProofState) -> Command:
    found = confirmation(state)
    if found is None:
        return _nothing_to_confirm(state)
    if BASELINE in found.failed:
        why = f"the baseline could not be re-measured: {found.failed[BASELINE]}"
        return _conclude(state, found, "unconfirmed", None, why)
    if (failed := _failed_baseline(state, proof)) is not None:
        what = "run for the loss gate" if isinstance(failed.check, GateRun) else "measured in a longer run"
        why = f"the baseline could not be {what}: {describe_failure(failed.outcome)}"
        return _conclude(state, found, "unconfirmed", None, why)
    spent = "" if proof.is_requested else spent_budget(state)
    if found.missing and not spent:
        return _measure_again(state, found)
    if spent and found.judgement.leader is None:
        why = "; ".join([*_refusals(state, proof), f"{spent} before anything was shown to be faster than the baseline"])
        return _conclude(state, found, "unconfirmed", None, why)
    return _gate(state, proof, found, spent)


def _failed_baseline(state: SweepState, proof: ProofState) -> Trial | None:
    """Return the baseline's run for gate or soak that finally failed; None without one."""
    for trial in checks(state, proof):
        is_gate = trial.check == GateRun(of=BASELINE, role="baseline")
        is_soak = isinstance(trial.check, SoakRun) and trial.check.of == BASELINE
        if (is_gate or is_soak) and is_failed(state, trial):
            return trial
    return None


def _nothing_to_confirm(state: SweepState) -> Conclude:
    conclusion: Conclusion = "keep"
    compared = [one for one in state.searched() if one.measurement is not None or isinstance(one.outcome, StoppedEarly)]
    refusals = [one.reason for proof in state.set_aside if proof.verdict for one in proof.verdict.disqualified]
    reason = "; ".join([*refusals, "no other trial was faster than the baseline" if refusals else ""])
    if state.trials[BASELINE].measurement is None:
        conclusion, reason = "unconfirmed", "the baseline was not measured, so nothing can be compared with it"
    elif not any(one.number != BASELINE for one in compared):
        conclusion, reason = "unconfirmed", "nothing was compared: only the baseline was measured"
    elif not refusals:
        reason = "no trial was faster than the baseline"
    return Conclude(verdict=_with_set_aside(state, Verdict(conclusion=conclusion, winner=None, reason=reason)))


def _measure_again(state: SweepState, found: Confirmation) -> Command:
    number = found.current.number if found.current else found.num_begun
    if number - len(found.complete) > MAX_VOID_ROUNDS:
        why = f"{MAX_VOID_ROUNDS} rounds could not be measured on the same nodes"
        return _conclude(state, found, "unconfirmed", None, why)
    of = found.missing[0]
    name = "the baseline" if of == BASELINE else trial_id(of)
    return _propose(state, ConfirmationRun(of=of, round=number), f"round {number + 1} of confirming {name}")


def _gate(state: SweepState, proof: ProofState, found: Confirmation, spent: str) -> Command:
    """Run gate, soak and evaluation for the first finalist shown faster and not refused yet."""
    if (aside := _set_aside(state, proof, found, spent)) is not None:
        return aside
    settings, reports = gate_settings(state), gate_reports(state)
    undecided = _undecided(reports, settings) | {
        one.trial for one in soak_reports(state) if one.answer == "inconclusive"
    }
    finalist = next((number for number in shown_faster(state, found) if number not in undecided), None)
    if finalist is None:
        return _none_left(state, proof, found, is_settled=not undecided and not _is_one_lost(state, proof), spent=spent)
    if settings is not None and all(report.trial != finalist for report in reports):
        if spent:
            return _conclude(state, found, "unconfirmed", None, f"{spent} before the loss gate finished")
        return _train_for_gate(state, finalist)
    if (soak := next_soak_run(state, found, finalist)) is not None:
        if spent:
            why = f"{spent} before a longer run showed whether {trial_id(finalist)} sustains its speed"
            return _conclude(state, found, "unconfirmed", None, why)
        who = "the baseline" if soak.of == BASELINE else trial_id(finalist)
        return _propose(
            state, soak, f"longer run of {who}: {soak.num_steps} steps, to test whether it sustains its speed"
        )
    if settings is not None and settings.command and evaluation_of(proof, finalist) is None:
        return Evaluate(trial=finalist)
    if state.virtual is not None:
        return _conclude(state, found, "rehearsed", finalist, _rehearsed_reason(found, finalist))
    return _conclude(state, found, "confirmed", finalist, "")


def _none_left(state: SweepState, proof: ProofState, found: Confirmation, *, is_settled: bool, spent: str) -> Command:
    """Handle a proof without a possible winner: the next best trials after disqualifications, else the verdict."""
    reason = _keep_reason(state, proof, found)
    end = _conclude(state, found, "keep" if is_settled else "unconfirmed", None, reason)
    aside = _set_aside(state, proof, found, spent, is_over=True) if is_settled else None
    return aside or end


def _set_aside(
    state: SweepState, proof: ProofState, found: Confirmation, spent: str, *, is_over: bool = False
) -> SetAside | None:
    """Replace the finalists if some were disqualified: at once if a disqualified one had stopped other trials or ended
    the search; once the proof ``is_over``, if there is any trial left to confirm. None in all other cases."""
    out = _disqualified(state, proof)
    if not out or proof.is_requested or spent:
        return None
    after = replace(state, disqualified=(*state.disqualified, *out), set_aside=(*state.set_aside, proof))
    after = replace(after, left_out=_left_out(after))
    reopened = () if spent_by_search(state) else _stopped_for(after)
    if not (reopened or _goes_on(after, proof) or (is_over and promising(after))):
        return None
    stage = _conclude(state, found, "keep", None, _keep_reason(state, proof, found), is_stage=True).verdict
    return SetAside(verdict=stage, reopened=reopened)


def _stopped_for(state: SweepState) -> tuple[int, ...]:
    """Return trials that were stopped because they were slower than one since disqualified."""
    return tuple(
        trial.number
        for trial in state.searched()
        if isinstance(trial.outcome, StoppedEarly)
        and state.is_disqualified(trial.outcome.incumbent)
        and not _has_shared(state, trial.number)
    )


def _goes_on(state: SweepState, proof: ProofState) -> bool:
    """Whether the search ended only because it expected nothing faster than a trial that is now disqualified."""
    is_judged = proof.cause is FinishCause.PATIENCE or state.exhausted == CONVERGED
    is_best_out = state.best_trial is not None and state.is_disqualified(state.best_trial)
    return is_judged and is_best_out and not spent_by_search(state)


def _disqualified(state: SweepState, proof: ProofState) -> tuple[Disqualified, ...]:
    """Return the proof's finalists that cannot win at any speed, with reasons."""
    found = confirmation(state)
    failed = found.failed if found is not None else {}
    lost = {one.check.of for one in checks(state, proof) if one.check and isinstance(one.outcome, GangLost)}
    out: dict[int, Disqualified] = {}
    for number, why in failed.items():
        if number not in lost and number != BASELINE:
            reason = f"{trial_id(number)} failed when it was re-measured: {why}"
            out[number] = Disqualified(trial=number, by="failure", reason=reason)
    for report in gate_reports(state):
        if report.answer == "failed":
            reason = f"{trial_id(report.trial)} {_gate_reason(report)}: {report.objections[0]}"
            out.setdefault(report.trial, Disqualified(trial=report.trial, by="gate", reason=reason))
    for soak in soak_reports(state):
        if soak.answer == "failed":
            reason = f"{trial_id(soak.trial)}: {soak.reason}"
            out.setdefault(soak.trial, Disqualified(trial=soak.trial, by="soak", reason=reason))
    for one in proof.evaluations:
        if not one.passed:
            reason = f"{trial_id(one.trial)} failed your evaluation"
            out.setdefault(one.trial, Disqualified(trial=one.trial, by="evaluation", reason=reason))
    return tuple(out[number] for number in proof.finalists if number in out)


def _undecided(reports: Sequence[GateReport], settings: GateSettings | None) -> set[int]:
    """Return finalists that the gate could not judge, and no user's evaluation will."""
    if settings is not None and settings.command:
        return set()
    return {report.trial for report in reports if report.answer == "inconclusive"}


def _is_one_lost(state: SweepState, proof: ProofState) -> bool:
    """Whether a finalist is out because its gang was lost repeatedly, which is no evidence against it."""
    lost = (trial.check for trial in checks(state, proof) if isinstance(trial.outcome, GangLost))
    return any(
        isinstance(check, ConfirmationRun) or (isinstance(check, GateRun) and check.role == "finalist")
        for check in lost
    )


def _gate_reason(report: GateReport) -> str:
    """Return a sentence for a report that did not pass; a failed run is no evidence about the trained model."""
    if report.answer == "inconclusive":
        return "is faster, but it is unknown whether its losses match the baseline's"
    return "does not match the baseline's losses" if report.precision_class else "failed in the loss gate"


def shown_faster(state: SweepState, found: Confirmation) -> tuple[int, ...]:
    """Return finalists shown faster than the baseline: first those equal to the leader, smaller changes first; then the
    others by their ratios."""
    compared, equal = found.judgement.against_baseline, _equal(found)

    def place(number: int) -> tuple[bool, tuple[bool, int], float, int]:
        change = _size_of_change(state, number) if number in equal else (False, 0)
        return number not in equal, change, -compared[number].ratio.value, number

    faster = [n for n in found.finalists if n in compared and compared[n].verdict == "faster"]
    return tuple(sorted(faster, key=place))


def _equal(found: Confirmation) -> tuple[int, ...]:
    """Return the leader and the finalists with equal speeds by the rounds; empty without a leader."""
    judgement = found.judgement
    return () if judgement.leader is None else (judgement.leader, *judgement.tied_with_leader)


def _size_of_change(state: SweepState, number: int) -> tuple[bool, int]:
    """Return whether the number format differs from the baseline's, and the number of differing knobs."""
    baseline, candidate = state.trials[BASELINE].candidate, state.trials[number].candidate
    formats = {(one.precision.level, one.precision.dtype) for one in (baseline, candidate)}
    return len(formats) > 1, len(change(candidate, baseline))


def evaluation_of(proof: ProofState, finalist: int) -> Evaluation | None:
    """Return the result of the user's evaluation of ``finalist``; None while it runs."""
    return next((one for one in proof.evaluations if one.trial == finalist), None)


def _train_for_gate(state: SweepState, finalist: int) -> Command:
    runs = gate_runs(state, finalist)
    role: GateRole = next(role for role in gate_roles(state, finalist) if role not in runs)
    run = gate_run(state, finalist, role)
    who = "the baseline" if run.of == BASELINE else trial_id(finalist)
    who += " in fp32" if role.endswith("reference") else ""
    who += " with initial weights changed by rounding errors" if run.perturbation else ""
    who += ", again unchanged," if role == "twin" and not run.perturbation else ""
    return _propose(state, run, f"losses of {who} for the gate")


def _propose(state: SweepState, check: Check, reason: str) -> ProposeCheck:
    candidate = state.trials[check.of].candidate
    if isinstance(check, GateRun) and _is_exact(state, check):
        candidate = reference_candidate(candidate, state.sweep.workload)
    return ProposeCheck(trial=len(state.trials), check=check, candidate=candidate, reason=reason)


def _is_exact(state: SweepState, check: GateRun) -> bool:
    """Whether the run is always in fp32: the references, and the twin of one."""
    is_twin = check.role == "reference_twin" and state.trials[BASELINE].candidate.precision.level != "O0"
    return is_twin or check.role.endswith("reference")


def _to_be_profiled(state: SweepState) -> Iterator[int]:
    """Yield trials to profile: requested ones, then those in the sweep's file; measured ones only."""
    yield from state.to_profile
    if not state.sweep.profiled or (state.sweep.is_profile_auto and not _is_worth_profiling(state)):
        return
    done = {trial.check.of for trial in state.trials if isinstance(trial.check, ProfileRun)}
    for name in state.sweep.profiled:
        trial = named(state, name)
        if trial is not None and trial.measurement is not None and trial.number not in done:
            yield trial.number


def _is_worth_profiling(state: SweepState) -> bool:
    """Whether automatic profiles are cheap compared with the sweep, and within every budget."""
    runs = [state.trials[BASELINE].device_seconds / max(1, len(state.trials[BASELINE].attempts))]
    if (winner := state.winner) is not None:
        runs.append(winner.device_seconds / max(1, len(winner.attempts)))
    confirm = state.sweep.proof.confirm
    if confirm is not None and confirm.promoted is not None:
        return False  # a verification measures speed only
    is_cheap = sum(runs) <= AUTO_PROFILE_SHARE * state.device_seconds
    return is_cheap and state.active_s >= AUTO_PROFILE_S and not spent_budget(state)


def named(state: SweepState, name: str) -> Trial | None:
    """Return the trial named ``winner``, ``baseline`` or by its number; None if there is none."""
    if name == "winner":
        return state.winner
    number = BASELINE if name == "baseline" else int(name)
    return state.trials[number] if number < len(state.trials) else None


# ---- reasons ----


def _conclude(
    state: SweepState,
    found: Confirmation,
    conclusion: Conclusion,
    winner: int | None,
    reason: str,
    *,
    is_stage: bool = False,
) -> Conclude:
    """Conclude with the results of this sweep's earlier proofs, unless this proof is to be set aside."""
    proof, equal = state.proof, _equal(found)
    assert proof is not None, "a verdict requires a proof"
    shown = winner if winner is not None else fastest_finalist(found)
    compared = found.judgement.against_baseline.get(shown) if shown is not None else None
    speedup = None if compared is None else ratio_interval(compared.ratio)
    verdict = Verdict(
        conclusion=conclusion,
        winner=winner,
        reason=reason,
        speedup=speedup,
        tied_with=tuple(number for number in equal if number != winner) if winner in equal else (),
        num_rounds=len(found.complete),
        gates=gate_reports(state),
        evaluations=proof.evaluations,
        soaks=soak_reports(state),
        disqualified=_disqualified(state, proof),
    )
    if conclusion == "confirmed" and winner is not None:
        verdict = replace(verdict, reason=_winner_reason(verdict, winner))
    return Conclude(verdict=_with_left_out(state, verdict) if is_stage else _with_set_aside(state, verdict))


def _with_set_aside(state: SweepState, verdict: Verdict) -> Verdict:
    """Add the reports of proofs set aside earlier, and the values shared by all disqualified trials."""
    verdict = _with_left_out(state, verdict)
    earlier = [proof.verdict for proof in state.set_aside if proof.verdict is not None]
    if not (earlier or verdict.disqualified) or (state.proof is not None and state.proof.is_requested):
        return verdict
    ruled_out = tuple(one for before in (*earlier, verdict) for one in before.disqualified)
    after = replace(state, disqualified=ruled_out)
    values = tuple(f"{name}={value}" for name, value in shared_values(after).items())
    reason = verdict.reason
    if values:
        common = f"{', '.join(trial_id(one.trial) for one in ruled_out)} all have {', '.join(values)}"
        reason = "; ".join(part for part in (reason, common) if part)
    return replace(
        verdict,
        reason=reason,
        gates=_last_of_each(one for before in (*earlier, verdict) for one in before.gates),
        evaluations=_last_of_each(one for before in (*earlier, verdict) for one in before.evaluations),
        soaks=_last_of_each(one for before in (*earlier, verdict) for one in before.soaks),
        disqualified=ruled_out,
        shared=values,
    )


_OfTrial = TypeVar("_OfTrial", GateReport, Evaluation, SoakReport)


def _last_of_each(reports: Iterable[_OfTrial]) -> tuple[_OfTrial, ...]:
    """Return the last report on each trial: a finalist of two proofs is judged in both."""
    return tuple({one.trial: one for one in reports}.values())


def _winner_reason(verdict: Verdict, winner: int) -> str:
    """Write ``t004 is 1.52x as fast as the baseline (95% CI: 1.40x–1.66x) over 6 rounds and a longer run of 310 steps
    (41 s); equal: t007``."""  # noqa: RUF002
    speedup, soak = verdict.speedup, verdict.soak(winner)
    speed_text = f"{trial_id(winner)} is faster than the baseline"
    if speedup is not None:
        speed_text = (
            f"{trial_id(winner)} is {sure_ratio(speedup.value, speedup)} as fast as the baseline {ratio_ci(speedup)}"
        )
    longer = f" and a longer run of {soak.num_steps} steps ({duration(soak.seconds)})" if soak else ""
    equal = f"; equal: {', '.join(map(trial_id, verdict.tied_with))}" if verdict.tied_with else ""
    return f"{speed_text} over {count(verdict.num_rounds, 'round')}{longer}{equal}"


def _rehearsed_reason(found: Confirmation, winner: int) -> str:
    return (
        f"{trial_id(winner)} was faster than the baseline in {len(found.complete)} simulated rounds, without "
        "any measurement"
    )


def _refusals(state: SweepState, proof: ProofState) -> list[str]:
    """Return reasons why finalists are out, each a clause; those of proofs set aside first."""
    earlier = [one.reason for before in state.set_aside if before.verdict for one in before.verdict.disqualified]
    out = [one.reason for one in _disqualified(state, proof)]
    evaluated = {one.trial for one in proof.evaluations}
    for report in gate_reports(state):
        if report.answer == "inconclusive" and report.trial not in evaluated:
            out.append(f"{trial_id(report.trial)} {_gate_reason(report)}: {report.objections[0]}")
    out += [f"{trial_id(one.trial)}: {one.reason}" for one in soak_reports(state) if one.answer == "inconclusive"]
    return [*earlier, *out]


def _keep_reason(state: SweepState, proof: ProofState, found: Confirmation) -> str:
    refused = _refusals(state, proof)
    named = {one.trial for one in _disqualified(state, proof)}
    refused += [
        f"{trial_id(n)} failed when it was re-measured: {why}" for n, why in found.failed.items() if n not in named
    ]
    if not found.finalists:
        return "; ".join(refused)
    others = "other " if refused else ""
    return "; ".join(
        [
            *refused,
            f"no {others}finalist was shown to be faster than the baseline in {count(len(found.complete), 'round')}",
        ]
    )
