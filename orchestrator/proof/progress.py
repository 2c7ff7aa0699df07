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
"""Number of the baseline's trial."""
MAX_VOID_ROUNDS = 4
"""Most rounds, or pairs of longer runs, on different nodes, which do not count, before the proof gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of a confirmation: baseline and finalists measured once each."""

    number: int
    runs: dict[int, Trial] = field(default_factory=dict)
    """Measured runs, by the finalist or baseline they measured again."""

    def scores(self, objective: Objective) -> dict[int, float]:
        """Return each run's score."""
        return {of: objective.score(run.measurement) for of, run in self.runs.items() if run.measurement}

    def rounded_away(self) -> dict[int, float]:
        """Return the largest error of each log speed by step times reported with few digits."""
        found = {of: run.measurement for of, run in self.runs.items() if run.measurement}
        return {of: one.step_time_resolution_s / 2 / one.step_time_s for of, one in found.items()}

    @property
    def has_baseline(self) -> bool:
        """Whether it includes a measurement of the baseline."""
        return BASELINE in self.runs and self.runs[BASELINE].measurement is not None

    @property
    def is_comparable(self) -> bool:
        """Whether all ran on nodes of the run with the most nodes."""
        nodes = [{device.node for device in run.attempts[-1].ranks} for run in self.runs.values()]
        widest: set[str] = max(nodes, key=len, default=set())
        return all(names <= widest for names in nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """Progress and result of a proof's confirmation."""

    finalists: tuple[int, ...]
    """Remaining finalists, the fastest of the search first: neither failed, nor refused by gate, soak or evaluation.
    Includes those that the gate could not judge."""
    failed: dict[int, str]
    """Reasons why runs were not measured, by finalist or baseline."""
    complete: tuple[Round, ...]
    """Complete rounds that count."""
    current: Round | None
    """The last round, if incomplete."""
    num_begun: int
    """Rounds begun, including those that do not count."""
    missing: tuple[int, ...]
    """Trials still to be measured in the current or the next round, in order; empty once decided."""
    judgement: Judgement


def checks(state: SweepState, proof: ProofState) -> Iterator[Trial]:
    """Yield the checks of this proof, in order, including profiles."""
    return (trial for trial in state.trials[proof.first_check :] if trial.check is not None)


def _checks_of(state: SweepState, proof: ProofState) -> Iterator[Trial]:
    """Yield the checks of a proof, possibly set aside."""
    end = len(state.trials) if proof.end_check is None else proof.end_check
    return (trial for trial in checks(state, proof) if trial.number < end)


def confirm_settings(state: SweepState) -> ConfirmSettings:
    """Return the sweep's settings; the defaults for a requested confirmation that its file turned off."""
    return state.sweep.proof.confirm or ConfirmSettings()


def confirmation(state: SweepState, proof: ProofState | None = None) -> Confirmation | None:
    """Return the confirmation of ``proof``, by default the last one; None without a proof or anything to confirm."""
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
    """Return a verification's rounds: those with the finalist, by default only those on a quiet machine."""
    busy = set(state.disturbed) if quiet else set()
    return [
        one
        for one in rounds
        if finalist in one.runs and one.has_baseline and not any(run.number in busy for run in one.runs.values())
    ]


def verified_change(state: SweepState, rounds: Sequence[Round], finalist: int) -> tuple[drift.SpeedChange | None, bool]:
    """Return the result of a verification's rounds, and whether it includes those on a busy machine.

    Quiet rounds decide. All rounds together can also rule out a loss, because a busy machine makes nothing faster and
    slows both trials of a round equally. They never show a loss.
    """
    found = change_since_promotion(state, verification_rounds(state, rounds, finalist), finalist)
    if found is not None and found.loss != "open":
        return found, False
    together = change_since_promotion(state, verification_rounds(state, rounds, finalist, quiet=False), finalist)
    return (together, True) if together is not None and together.loss == "excluded" else (found, False)


def change_since_promotion(state: SweepState, rounds: Sequence[Round], finalist: int) -> drift.SpeedChange | None:
    """Compare these rounds of a verification with those of the promotion; None without rounds, or on other hardware."""
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
    """Whether speeds on this cluster are comparable with those of the promotion."""
    fingerprint = state.sweep.fingerprint
    return all(fingerprint.get(name, "") == value for name, value in promoted.hardware.items())


def _is_gate_begun(state: SweepState, proof: ProofState) -> bool:
    """Whether anything ran for gate or soak since the last round, so that a run now would not belong to it."""
    proving = [trial.check for trial in checks(state, proof) if not isinstance(trial.check, ProfileRun)]
    return bool(proving) and isinstance(proving[-1], GateRun | SoakRun)


def _rounds(state: SweepState, proof: ProofState) -> tuple[list[Round], dict[int, str]]:
    """Return all rounds with their measured runs, even without any, and the reasons for unmeasured runs."""
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
    """Return the remaining finalist with the highest ratio; None if none was measured with the baseline."""
    compared = found.judgement.against_baseline
    return max(compared, key=lambda n: compared[n].ratio.value, default=None)


def confirmed_step_times(found: Confirmation, number: int) -> tuple[float, float] | None:
    """Return the step times of trial ``number`` and of the baseline, in seconds, from the rounds with both: geometric
    means of runs, so that their ratio is that of the verdict. None without such a round."""
    rounds = [one.runs for one in found.complete if number in one.runs]
    pairs = [(runs[number].measurement, runs[BASELINE].measurement) for runs in rounds]
    times = [(own.step_time_s, base.step_time_s) for own, base in pairs if own is not None and base is not None]
    if not times:
        return None
    own_s, base_s = zip(*times, strict=True)
    return geometric_mean(own_s), geometric_mean(base_s)


def ratio_interval(ratio: Estimate) -> RatioInterval:
    """Convert the ratio to the verdict's form."""
    ci95 = ratio.ci95
    return RatioInterval(value=ratio.value, low=ci95.low if ci95 else None, high=ci95.high if ci95 else None)


def soak_pairs(state: SweepState, finalist: int) -> list[Round]:
    """Return the pairs of longer runs begun for ``finalist`` in the last proof, each like a round of two."""
    pairs: dict[int, Round] = {}
    for trial in checks(state, state.proof) if state.proof else ():
        check = trial.check
        if isinstance(check, SoakRun) and check.finalist == finalist:
            pairs.setdefault(check.number, Round(number=check.number)).runs[check.of] = trial
    return [pairs[number] for number in sorted(pairs)]


def next_soak_run(state: SweepState, found: Confirmation, finalist: int) -> SoakRun | None:
    """Return the next longer run of the finalist, or of the baseline paired with it; None if none is left.

    The second pair runs in the opposite order.
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
    """Return the seconds of all measured steps of the trial in complete rounds."""
    runs = (one.runs[number].measurement for one in found.complete if number in one.runs)
    return sum(sum(run.step_times_s) for run in runs if run is not None)


def soak_reports(state: SweepState) -> tuple[SoakReport, ...]:
    """Return the reports on the last proof's finalists with completed longer runs, in order."""
    numbers = state.proof.finalists if state.proof else ()
    return tuple(report for number in numbers if (report := soak_report(state, number)) is not None)


def soak_report(state: SweepState, finalist: int) -> SoakReport | None:
    """Return the result of the longer runs of ``finalist``; None while more of them are due.

    Pairs with runs on different nodes do not count.
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
        finalist,
        complete,
        noise,
        state.objective,
        limit_bytes=state.sweep.rank_memory_bytes,
        searched=searched,
        on_cpu=state.sweep.devices.device_kind == "cpu",
    )


def gate_settings(state: SweepState) -> GateSettings | None:
    """Return this sweep's gate settings; None if it is off, or on a simulated cluster, where nothing trains."""
    return None if state.virtual is not None else state.sweep.proof.gate


def gate_runs(state: SweepState, finalist: int) -> dict[GateRole, Trial]:
    """Return the last proof's gate runs for ``finalist``. The baseline's runs serve all finalists that they fit."""
    found: dict[GateRole, Trial] = {}
    if state.proof is None:
        return found
    for trial in state.trials[state.proof.gate_from :]:
        check = trial.check
        if isinstance(check, GateRun) and check == gate_run(state, finalist, check.role):
            found[check.role] = trial
    return found


def gate_run(state: SweepState, finalist: int, role: GateRole) -> GateRun:
    """Return the run of ``role`` for judging ``finalist``."""
    baseline, candidate = state.trials[BASELINE].candidate, state.trials[finalist].candidate
    match role:
        case "finalist" | "finalist_reference":
            return GateRun(of=finalist, role=role)
        case "baseline" | "reference":
            return GateRun(of=BASELINE, role=role)
        case "twin" if is_script(state):
            return GateRun(of=BASELINE, role=role)  # nothing can be perturbed there, so it trains again unchanged
        case "twin":
            return GateRun(of=BASELINE, role=role, perturbation=rounding(baseline, candidate))
        case "reference_twin":
            return GateRun(of=BASELINE, role=role, perturbation=ROUNDING["float32"])
        case _:
            assert_never(role)


def gate_roles(state: SweepState, finalist: int) -> tuple[GateRole, ...]:
    """Return the roles that must train for the gate to judge ``finalist``, in order, as far as known.

    If the reference trains, the baseline is its twin. The twin of an fp32 run trains only if something exceeds the
    limits of fp32: otherwise rounding has nothing to explain.
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
    """Return the roles that always train, and the twin that replaces a failed reference."""
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
    """Return the trajectories for judging ``finalist``; None before it and the baseline have trained."""
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
    """Return the reports on the last proof's finalists with completed gate runs, in order."""
    settings = gate_settings(state)
    if state.proof is None or settings is None:
        return ()
    reports = (gate_report(state, finalist, settings) for finalist in state.proof.finalists)
    return tuple(report for report in reports if report is not None)


def gate_report(state: SweepState, finalist: int, settings: GateSettings) -> GateReport | None:
    """Return the gate's report on ``finalist``; None while its runs are incomplete."""
    roles, runs = gate_roles(state, finalist), gate_runs(state, finalist)
    if any(role not in runs or runs[role].outcome is None or is_open(state, runs[role]) for role in roles):
        return None
    for role in ("baseline", "finalist"):
        if runs[role].measurement is None:
            return _unmeasured_report(finalist, role, runs[role], settings)
    for role in roles:  # the others may not fit, and the gate works without them; a stopped one may have fit
        if isinstance(runs[role].outcome, TimedOut | GangLost):
            return _unmeasured_report(finalist, role, runs[role], settings)
    found = gate_trajectories(state, finalist)
    assert found is not None, "baseline and finalist were measured"
    if is_script(state):
        return judge_script(finalist, script_runs(state, finalist, found), settings)
    report = judge_gate(finalist, found, settings, state.sweep.workload)
    return replace(report, notes=(*report.notes, *_role_notes(runs, roles)))


def script_runs(state: SweepState, finalist: int, found: GateTrajectories) -> ScriptRuns:
    """Return the gate runs of a user's program."""
    one, other = state.trials[BASELINE].candidate, state.trials[finalist].candidate
    if (one.layout.dp, one.micro_batch_size) != (other.layout.dp, other.micro_batch_size):
        differs = OTHER_SPLIT
    else:
        differs = OTHER_DRAWS if _draws_differently(gate_runs(state, finalist)) else ""
    return ScriptRuns(baseline=found.baseline, again=found.twin, finalist=found.finalist, differs=differs)


def _draws_differently(runs: Mapping[GateRole, Trial]) -> bool:
    """Whether loading samples uses random numbers, and the finalist has a different number of loader workers."""
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
    """Report an unmeasured run: one stopped from outside is no evidence, one that failed by itself is a failure."""
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
    """Whether ``run`` is running or is to be launched (again)."""
    return run.number in state.waiting or run.number in state.running
