"""Progress of a proof: its rounds, gate runs and reports so far, read from the checks of a sweep's state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import assert_never

from orchestrator.objective import Objective
from orchestrator.proof import confirmation as drift
from orchestrator.proof.confirmation import (
    MAX_PAIRS,
    MIN_SOAK_S,
    Judgement,
    Pair,
    failed_soak,
    is_failed,
    judge,
    judge_soak,
    num_steps,
    order,
    pair_noise,
)
from orchestrator.proof.loss_gate import (
    ROUNDING,
    UNFINISHED,
    GateTrajectories,
    deviations,
    exact_deviations,
    failed_gate,
    judge_gate,
    needs_reference,
    rounding,
    trajectory,
    undecided_gate,
)
from orchestrator.proof.script_gate import OTHER_DRAWS, OTHER_SPLIT, ScriptRuns, judge_script
from orchestrator.statistics import Estimate
from orchestrator.sweep.events import (
    ConfirmationRun,
    ConfirmSettings,
    GateReport,
    GateRole,
    GateRun,
    GateSettings,
    ProfileRun,
    PromotedRounds,
    RatioInterval,
    SoakReport,
    SoakRun,
)
from orchestrator.sweep.state import ProofState, SweepState, Trial, describe_failure
from trials.outcome import Failure, GangLost, TimedOut
from trials.spec import ScriptModel

BASELINE = 0
"""Number of the trial everything is compared with."""
MAX_VOID_ROUNDS = 4
"""Rounds, or pairs of longer runs, that do not count because their runs were on different nodes, before the proof gives
up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of a confirmation: baseline and finalists measured once each."""

    number: int
    runs: dict[int, Trial] = field(default_factory=dict)
    """Measured runs, by the finalist or baseline they measured again."""

    def scores(self, objective: Objective) -> dict[int, float]:
        """How good each was."""
        return {of: objective.score(run.measurement) for of, run in self.runs.items() if run.measurement}

    def rounded_away(self) -> dict[int, float]:
        """How far the logarithm of each speed may be off because step times were reported with few digits."""
        found = {of: run.measurement for of, run in self.runs.items() if run.measurement}
        return {of: one.step_time_resolution_s / 2 / one.step_time_s for of, one in found.items()}

    @property
    def has_baseline(self) -> bool:
        """Whether the baseline was measured in it."""
        return BASELINE in self.runs and self.runs[BASELINE].measurement is not None

    @property
    def is_comparable(self) -> bool:
        """Whether all ran on nodes of the run that used the most."""
        nodes = [{device.node for device in run.attempts[-1].ranks} for run in self.runs.values()]
        widest: set[str] = max(nodes, key=len, default=set())
        return all(names <= widest for names in nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """How far the confirmation of a proof has come, and what it shows."""

    finalists: tuple[int, ...]
    """Finalists still in, the fastest of the search first: neither failed, nor refused by gate, soak or evaluation.
    Those that the gate could not judge are still in."""
    failed: dict[int, str]
    """Why a run was not measured, by its finalist or baseline."""
    complete: tuple[Round, ...]
    """Complete rounds that count."""
    current: Round | None
    """The last round, where it is not complete yet."""
    num_begun: int
    """Rounds begun, those that do not count included."""
    missing: tuple[int, ...]
    """Trials still to be measured in the current or the next round, in order; empty when it is decided."""
    judgement: Judgement


def checks(state: SweepState, proof: ProofState) -> Iterator[Trial]:
    """The checks of this proof, in order, profiles among them."""
    return (trial for trial in state.trials[proof.first_check :] if trial.check is not None)


def _checks_of(state: SweepState, proof: ProofState) -> Iterator[Trial]:
    """The checks of a proof that may have been set aside."""
    end = len(state.trials) if proof.end_check is None else proof.end_check
    return (trial for trial in checks(state, proof) if trial.number < end)


def confirm_settings(state: SweepState) -> ConfirmSettings:
    """The sweep's settings; the defaults where a person asks for a confirmation that its file turned off."""
    return state.sweep.proof.confirm or ConfirmSettings()


def confirmation(state: SweepState, proof: ProofState | None = None) -> Confirmation | None:
    """The confirmation of the last proof, or of ``proof``; None without one, or without anything to confirm."""
    proof = proof or state.proof
    if proof is None or not proof.finalists:
        return None
    settings = confirm_settings(state)
    rounds, failed = _rounds(state, proof)
    reports = proof.verdict.gates if proof.verdict else gate_reports(state)
    soaks = proof.verdict.soaks if proof.verdict else soak_reports(state)
    refused = {report.trial for report in reports if report.answer == "failed"}
    refused |= {soak.trial for soak in soaks if soak.answer == "failed"}
    refused |= {evaluation.trial for evaluation in proof.evaluations if not evaluation.passed}
    finalists = tuple(number for number in proof.finalists if number not in failed and number not in refused)

    def judged(of: list[Round]) -> Judgement:
        found = judge(
            [one.scores(state.objective) for one in of],
            baseline=BASELINE,
            finalists=finalists,
            min_rounds=settings.min_rounds,
            max_rounds=settings.max_rounds,
            rounded_away={number: away for one in of for number, away in one.rounded_away().items()},
        )
        if settings.promoted is None or not finalists:
            return found
        is_settled = _is_verified(state, of, finalists[0])
        to_measure = () if is_settled else (BASELINE, finalists[0])
        return replace(found, is_decided=is_settled, to_measure=to_measure)

    last = rounds[-1] if rounds else None
    before = [one for one in rounds[:-1] if one.has_baseline and one.is_comparable]
    if last is not None:
        wanted = () if _is_gate_begun(state, proof) else order(judged(before).to_measure, last.number)
        missing = tuple(number for number in wanted if number not in last.runs)
        if missing:
            return Confirmation(
                finalists=finalists,
                failed=failed,
                complete=tuple(before),
                current=last,
                num_begun=len(rounds),
                missing=missing,
                judgement=judged(before),
            )
        before += [last] if last.has_baseline and last.is_comparable else []
    judgement = judged(before)
    return Confirmation(
        finalists=finalists,
        failed=failed,
        complete=tuple(before),
        current=None,
        num_begun=len(rounds),
        missing=() if judgement.is_decided else order(judgement.to_measure, len(rounds)),
        judgement=judgement,
    )


def verification_rounds(
    state: SweepState, rounds: Sequence[Round], finalist: int, *, quiet: bool = True
) -> list[Round]:
    """The rounds that a verification compares: those with the finalist, by default only those on a quiet machine."""
    busy = set(state.disturbed) if quiet else set()
    return [
        one
        for one in rounds
        if finalist in one.runs and one.has_baseline and not any(run.number in busy for run in one.runs.values())
    ]


def verified_change(state: SweepState, rounds: Sequence[Round], finalist: int) -> tuple[drift.SpeedChange | None, bool]:
    """What the rounds of a verification show, and whether those on a busy machine count in it.

    Quiet rounds decide. All rounds together can rule a loss out as well, since a busy machine makes nothing faster and
    slows both trials of a round alike; they never show one.
    """
    found = change_since_promotion(state, verification_rounds(state, rounds, finalist), finalist)
    if found is not None and found.loss != "open":
        return found, False
    together = change_since_promotion(state, verification_rounds(state, rounds, finalist, quiet=False), finalist)
    return (together, True) if together is not None and together.loss == "excluded" else (found, False)


def change_since_promotion(state: SweepState, rounds: Sequence[Round], finalist: int) -> drift.SpeedChange | None:
    """What these rounds of a verification show beside those of the promotion; None where there is nothing to compare:
    no rounds, or other hardware."""
    settings = confirm_settings(state)
    promoted = settings.promoted
    if promoted is None or not rounds or not is_same_hardware(state, promoted):
        return None
    pairs = [(one.runs[finalist].measurement, one.runs[BASELINE].measurement) for one in rounds]
    own, baseline = ([run.tokens_per_s_per_device for run in runs if run] for runs in zip(*pairs, strict=True))
    away = [one.rounded_away() for one in rounds]
    return drift.change(
        drift.Rounds(own=promoted.own, baseline=promoted.baseline),
        drift.Rounds(own=own, baseline=baseline),
        tolerance=promoted.tolerance,
        first_look=settings.min_rounds,
        max_rounds=settings.max_rounds,
        rounded_away=(max(one[finalist] for one in away), max(one[BASELINE] for one in away)),
    )


def _is_verified(state: SweepState, rounds: Sequence[Round], finalist: int) -> bool:
    """Whether a verification needs no further round."""
    settings = confirm_settings(state)
    assert settings.promoted is not None, "requires a verification"
    if not is_same_hardware(state, settings.promoted) or len(rounds) >= settings.max_rounds:
        return True
    found, _ = verified_change(state, rounds, finalist)
    return found is not None and (found.loss != "open" or found.is_hopeless)


def is_same_hardware(state: SweepState, promoted: PromotedRounds) -> bool:
    """Whether this cluster is such that speeds can be compared with those of the promotion."""
    fingerprint = state.sweep.fingerprint
    return all(fingerprint.get(name, "") == value for name, value in promoted.hardware.items())


def _is_gate_begun(state: SweepState, proof: ProofState) -> bool:
    """Whether something ran for gate or soak since the last round: whoever is measured now was not beside it."""
    proving = [trial.check for trial in checks(state, proof) if not isinstance(trial.check, ProfileRun)]
    return bool(proving) and isinstance(proving[-1], GateRun | SoakRun)


def _rounds(state: SweepState, proof: ProofState) -> tuple[list[Round], dict[int, str]]:
    """All rounds with their measured runs, also those begun without any, and why other runs were not measured."""
    rounds: dict[int, Round] = {}
    failed: dict[int, str] = {}
    for trial in _checks_of(state, proof):
        check = trial.check
        if isinstance(check, ConfirmationRun):
            runs = rounds.setdefault(check.round, Round(number=check.round)).runs
            if trial.measurement is not None:
                runs[check.of] = trial
            elif isinstance(trial.outcome, Failure) and not is_open(state, trial):
                failed[check.of] = describe_failure(trial.outcome) or trial.status
    return [rounds[number] for number in sorted(rounds)], failed


def fastest_finalist(found: Confirmation) -> int | None:
    """The finalist with the highest ratio, of those still in; None where none was measured beside the baseline."""
    compared = found.judgement.against_baseline
    return max(compared, key=lambda n: compared[n].ratio.value, default=None)


def confirmed_step_times(found: Confirmation, number: int) -> tuple[float, float] | None:
    """Step times in seconds of trial ``number`` and of the baseline, as the rounds that both were measured in have
    them: geometric means of runs, so that they are in the ratio that the verdict tells. None without such a round."""
    rounds = [one.runs for one in found.complete if number in one.runs]
    pairs = [(runs[number].measurement, runs[BASELINE].measurement) for runs in rounds]
    times = [(own.step_time_s, base.step_time_s) for own, base in pairs if own is not None and base is not None]
    if not times:
        return None
    own_s, base_s = zip(*times, strict=True)
    return geometric_mean(own_s), geometric_mean(base_s)


def ratio_interval(ratio: Estimate) -> RatioInterval:
    """The ratio in the form that the verdict keeps."""
    ci95 = ratio.ci95
    return RatioInterval(value=ratio.value, low=ci95.low if ci95 else None, high=ci95.high if ci95 else None)


def soak_pairs(state: SweepState, finalist: int) -> list[Round]:
    """The pairs of longer runs begun for ``finalist`` in the last proof, each like a round of two."""
    pairs: dict[int, Round] = {}
    for trial in checks(state, state.proof) if state.proof else ():
        check = trial.check
        if isinstance(check, SoakRun) and check.finalist == finalist:
            pairs.setdefault(check.number, Round(number=check.number)).runs[check.of] = trial
    return [pairs[number] for number in sorted(pairs)]


def next_soak_run(state: SweepState, found: Confirmation, finalist: int) -> SoakRun | None:
    """The longer run of the finalist, or of the baseline beside it, that is due; None where none is left.

    The second pair runs in the order opposite to the first.
    """
    settings, times = confirm_settings(state), confirmed_step_times(found, finalist)
    if settings.soak_s == 0.0 or state.virtual is not None or times is None or soak_report(state, finalist) is not None:
        return None
    seconds = settings.soak_s or max(MIN_SOAK_S, *(_seconds_of(found, number) for number in (finalist, BASELINE)))
    pairs = soak_pairs(state, finalist)
    number = len(pairs) - 1 if pairs and len(pairs[-1].runs) < 2 else len(pairs)
    done = pairs[number].runs if number < len(pairs) else {}
    of = next(of for of in order((BASELINE, finalist), number) if of not in done)
    step_time_s = times[0] if of == finalist else times[1]
    steps = num_steps(seconds, step_time_s)
    return SoakRun(of=of, finalist=finalist, number=number, num_steps=steps, expected_s=steps * step_time_s)


def _seconds_of(found: Confirmation, number: int) -> float:
    """Seconds of all steps measured of the trial in complete rounds."""
    runs = (one.runs[number].measurement for one in found.complete if number in one.runs)
    return sum(sum(run.step_times_s) for run in runs if run is not None)


def soak_reports(state: SweepState) -> tuple[SoakReport, ...]:
    """Reports on the finalists of the last proof whose longer runs are there, in their order."""
    numbers = state.proof.finalists if state.proof else ()
    return tuple(report for number in numbers if (report := soak_report(state, number)) is not None)


def soak_report(state: SweepState, finalist: int) -> SoakReport | None:
    """What the longer runs of ``finalist`` show; None while more of them are due.

    Pairs whose runs were on different nodes do not count.
    """
    pairs = soak_pairs(state, finalist)
    complete: list[Pair] = []
    for pair in pairs:
        own, base = pair.runs.get(finalist), pair.runs.get(BASELINE)
        if own is not None and is_failed(state, own):
            return failed_soak(own, complete)
        if own is None or base is None or own.measurement is None or base.measurement is None:
            return None
        if pair.is_comparable:
            complete.append((own.measurement, base.measurement))
    if len(pairs) >= MAX_PAIRS + MAX_VOID_ROUNDS and len(complete) < MAX_PAIRS:
        why = "its longer runs could not be placed on the nodes of the baseline's longer runs"
        return SoakReport(trial=finalist, answer="inconclusive", reason=why)
    if not complete or state.proof is None:
        return None
    rounds, _ = _rounds(state, state.proof)
    scores = [one.scores(state.objective) for one in rounds if one.has_baseline and one.is_comparable]
    noise = pair_noise([one for one in scores if len(one) > 1])
    searched = state.trials[finalist].measurement
    return judge_soak(
        finalist, complete, noise, state.objective, limit_bytes=state.sweep.rank_memory_bytes, searched=searched
    )


def gate_settings(state: SweepState) -> GateSettings | None:
    """How the gate of this sweep judges; None where it is off, and where the cluster does not exist: nothing trains."""
    return None if state.virtual is not None else state.sweep.proof.gate


def gate_runs(state: SweepState, finalist: int) -> dict[GateRole, Trial]:
    """The last proof's gate runs that judge ``finalist``; the baseline's runs serve all finalists that they fit."""
    found: dict[GateRole, Trial] = {}
    if state.proof is None:
        return found
    for trial in state.trials[state.proof.gate_from :]:
        check = trial.check
        if isinstance(check, GateRun) and check == gate_run(state, finalist, check.role):
            found[check.role] = trial
    return found


def gate_run(state: SweepState, finalist: int, role: GateRole) -> GateRun:
    """The run in which ``role`` trains to judge ``finalist``."""
    baseline, candidate = state.trials[BASELINE].candidate, state.trials[finalist].candidate
    match role:
        case "finalist" | "finalist_reference":
            return GateRun(of=finalist, role=role)
        case "baseline" | "reference":
            return GateRun(of=BASELINE, role=role)
        case "twin" if is_script(state):
            return GateRun(of=BASELINE, role=role)  # nothing can be perturbed there: it trains again as it is
        case "twin":
            return GateRun(of=BASELINE, role=role, perturbation=rounding(baseline, candidate))
        case "reference_twin":
            return GateRun(of=BASELINE, role=role, perturbation=ROUNDING["float32"])
        case _:
            assert_never(role)


def gate_roles(state: SweepState, finalist: int) -> tuple[GateRole, ...]:
    """Roles that have to train for the gate to judge ``finalist``, in order, as far as they are known so far.

    Where the reference trains, the baseline is its twin. The twin of what is judged in fp32 trains only where something
    is beyond the limits of fp32: otherwise there is nothing that rounding could explain.
    """
    roles = _certain_roles(state, finalist)
    if is_script(state):
        return roles
    settings, found = gate_settings(state), gate_trajectories(state, finalist)
    if found is None or settings is None or found.num_steps < settings.num_steps:
        return roles
    exact = exact_deviations(found, settings, state.sweep.workload)
    if "reference" in roles and found.finalist.precision.level == "O0":
        exact = deviations(found, settings, state.sweep.workload)
    is_beyond = exact is not None and (exact.loss.beyond or exact.grad_norm.beyond)
    return (*roles, "reference_twin") if is_beyond else roles


def _certain_roles(state: SweepState, finalist: int) -> tuple[GateRole, ...]:
    """Roles that train whatever comes of it, but for the twin, which takes the place of a reference that failed."""
    if is_script(state):
        return "baseline", "twin", "finalist"
    baseline, candidate = state.trials[BASELINE].candidate, state.trials[finalist].candidate
    is_coarse = candidate.precision.level != "O0"
    has_reference = needs_reference(baseline, candidate) or (is_coarse and baseline.precision.level != "O0")
    has_twin = not has_reference or _has_failed(state, gate_runs(state, finalist).get("reference"))
    trained: dict[GateRole, bool] = {
        "baseline": True,
        "reference": has_reference,
        "twin": has_twin,
        "finalist": True,
        "finalist_reference": is_coarse,
    }
    return tuple(role for role, is_trained in trained.items() if is_trained)


def _has_failed(state: SweepState, run: Trial | None) -> bool:
    return run is not None and isinstance(run.outcome, Failure) and not is_open(state, run)


def gate_trajectories(state: SweepState, finalist: int) -> GateTrajectories | None:
    """What has been trained to judge ``finalist``; None before the baseline and itself have."""
    runs, roles = gate_runs(state, finalist), (*_certain_roles(state, finalist), "reference_twin")
    of = {
        role: trajectory(run.measurement, run.candidate)
        for role, run in runs.items()
        if run.measurement is not None and role in roles
    }
    if "baseline" not in of or "finalist" not in of:
        return None
    return GateTrajectories(**of)


def gate_reports(state: SweepState) -> tuple[GateReport, ...]:
    """Reports on the finalists of the last proof whose gate runs are there, in their order."""
    settings = gate_settings(state)
    if state.proof is None or settings is None:
        return ()
    reports = (gate_report(state, finalist, settings) for finalist in state.proof.finalists)
    return tuple(report for report in reports if report is not None)


def gate_report(state: SweepState, finalist: int, settings: GateSettings) -> GateReport | None:
    """What the gate says about ``finalist``; None while its runs are not there."""
    roles, runs = gate_roles(state, finalist), gate_runs(state, finalist)
    if any(role not in runs or runs[role].outcome is None or is_open(state, runs[role]) for role in roles):
        return None
    for role in ("baseline", "finalist"):
        if runs[role].measurement is None:
            return _unmeasured_report(finalist, role, runs[role], settings)
    for role in roles:  # the others may not fit, and the gate does without; one that was stopped may have fitted
        if isinstance(runs[role].outcome, TimedOut | GangLost):
            return _unmeasured_report(finalist, role, runs[role], settings)
    found = gate_trajectories(state, finalist)
    assert found is not None, "baseline and finalist were measured"
    if is_script(state):
        return judge_script(finalist, script_runs(state, finalist, found), settings)
    report = judge_gate(finalist, found, settings, state.sweep.workload)
    return replace(report, notes=(*report.notes, *_role_notes(runs, roles)))


def script_runs(state: SweepState, finalist: int, found: GateTrajectories) -> ScriptRuns:
    """What was trained, where a user's program is."""
    one, other = state.trials[BASELINE].candidate, state.trials[finalist].candidate
    if (one.layout.dp, one.micro_batch_size) != (other.layout.dp, other.micro_batch_size):
        differs = OTHER_SPLIT
    else:
        differs = OTHER_DRAWS if _draws_otherwise(gate_runs(state, finalist)) else ""
    return ScriptRuns(baseline=found.baseline, again=found.twin, finalist=found.finalist, differs=differs)


def _draws_otherwise(runs: Mapping[GateRole, Trial]) -> bool:
    """Whether samples draw random numbers as they are loaded, and the finalist has another number of loader workers."""
    measured = [runs["baseline"].measurement, runs["finalist"].measurement]
    facts = [one.findings.script.facts for one in measured if one is not None and one.findings.script is not None]
    return any(one.items_draw for one in facts) and len({one.num_workers for one in facts}) > 1


def is_script(state: SweepState) -> bool:
    """Whether a user's program is trained."""
    return isinstance(state.sweep.workload.model, ScriptModel)


_WHOSE: Mapping[GateRole, str] = {
    "baseline": "the baseline's",
    "finalist": "the finalist's",
    "twin": "the baseline's twin's",
    "reference": "the float32 reference's",
    "finalist_reference": "the finalist's float32",
    "reference_twin": "the reference's twin's",
}


def _unmeasured_report(finalist: int, role: GateRole, run: Trial, settings: GateSettings) -> GateReport:
    """A run that was stopped from outside is no evidence on what it trains; one that failed by itself is a failure."""
    why = describe_failure(run.outcome) or run.status
    if isinstance(run.outcome, TimedOut | GangLost):
        how = "exceeded its deadline" if isinstance(run.outcome, TimedOut) else "was lost"
        return undecided_gate(
            finalist, settings, f"undecided: {_WHOSE[role]} run for the gate {how}: {why}", UNFINISHED
        )
    return failed_gate(finalist, settings, f"{_WHOSE[role]} run for the gate failed: {why}")


def _role_notes(runs: Mapping[GateRole, Trial], roles: Collection[GateRole]) -> Iterator[str]:
    for role in ("twin", "reference_twin"):
        if role in roles and runs[role].measurement is None:
            why = describe_failure(runs[role].outcome) or runs[role].status
            yield f"the effect of rounding alone was not measured: {why}"
    if "finalist_reference" in roles:
        exact = runs["finalist_reference"]
        why = describe_failure(exact.outcome) or exact.status
        yield (
            "its layout was also compared in float32"
            if exact.measurement
            else f"its layout was not compared in float32: {why}"
        )


def is_open(state: SweepState, run: Trial) -> bool:
    """Whether ``run`` is running, or is to be launched, maybe again."""
    return run.number in state.waiting or run.number in state.running
