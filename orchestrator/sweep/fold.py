"""The fold: the effect of an event on a sweep's state. Pure; the state after a crash is the one before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import assert_never

from orchestrator.sweep.events import (
    ActionRequested,
    Annotated,
    AttemptEnded,
    AttemptLaunched,
    AttemptStopped,
    BudgetChanged,
    CandidatesPruned,
    ChecksRequested,
    ConfirmationRun,
    ControllerStarted,
    EvaluationEnded,
    Event,
    FinalistsChosen,
    FinalistsDisqualified,
    GateRun,
    LeaseChanged,
    ProfileRun,
    Promoted,
    SearchExhausted,
    SoakRun,
    SweepCreated,
    SweepFinished,
    SweepPaused,
    Tick,
    TrialProposed,
    TrialsRetried,
    UserNote,
    Verdict,
    VerdictReached,
)
from orchestrator.sweep.state import (
    MAX_FAILURES,
    MAX_FASTEST,
    Attempt,
    ProofState,
    SweepState,
    SweepStatus,
    Trial,
    Vector,
    end_of_search,
    rank,
    rank_fastest,
    spent_budget,
    spent_by_search,
    updated,
)
from trials.outcome import Failure, GangLost, HostOutOfMemory, Measured, Measurement, Outcome, StoppedEarly, TimedOut

TrialEvent = TrialProposed | AttemptLaunched | AttemptStopped | AttemptEnded
RequestEvent = ActionRequested | TrialsRetried | ChecksRequested | BudgetChanged | Annotated
ProofEvent = FinalistsChosen | EvaluationEnded | FinalistsDisqualified | VerdictReached


def fold(events: Iterable[Event]) -> SweepState:
    """Return the state after ``events``."""
    return reduce(apply, events, SweepState())


def apply(state: SweepState, event: Event) -> SweepState:
    """Return the state after ``event``. Events about unknown or stale attempts change only the time."""
    state = _advance_clock(state, event)
    if isinstance(event, TrialEvent):
        return _apply_to_trial(state, event)
    if isinstance(event, ProofEvent):
        return _apply_to_proof(state, event)
    if isinstance(event, RequestEvent):
        return _apply_request(state, event)
    match event:
        case SweepCreated():
            return updated(state, created=event)
        case ControllerStarted():
            return _apply_started(state, event)
        case Promoted():
            return updated(state, promotions=(*state.promotions, event))
        case LeaseChanged():
            return updated(state, nodes=event.nodes)
        case CandidatesPruned():
            return updated(state, pruned=state.pruned.append(event))
        case SearchExhausted():
            return updated(state, exhausted=event.reason)
        case SweepPaused() | SweepFinished():
            return _apply_end(state, event)
        case Tick():
            return state
        case _:
            assert_never(event)


def _apply_to_trial(state: SweepState, event: TrialEvent) -> SweepState:
    match event:
        case TrialProposed():
            return _apply_proposed(state, event)
        case AttemptLaunched():
            return _apply_launched(state, event)
        case AttemptStopped():
            return _apply_stopped(state, event)
        case AttemptEnded():
            return _apply_ended(state, event)
        case _:
            assert_never(event)


def _apply_request(state: SweepState, event: RequestEvent) -> SweepState:
    state = updated(state, num_requests=max(state.num_requests, event.request))
    match event:
        case ActionRequested():
            return _apply_action(state, event)
        case TrialsRetried():
            return _apply_retried(state, event)
        case ChecksRequested():
            return _apply_checks_requested(state, event)
        case BudgetChanged():
            return _apply_budget(state, event)
        case Annotated():
            return _apply_annotated(state, event)
        case _:
            assert_never(event)


def _apply_to_proof(state: SweepState, event: ProofEvent) -> SweepState:
    match event:
        case FinalistsChosen():
            begun = ProofState(
                finalists=event.finalists,
                reason=event.reason,
                first_check=event.first_check,
                gate_from=state.set_aside[0].first_check if state.set_aside else event.first_check,
                cause=event.cause,
                is_requested=bool(state.to_confirm),
            )
            return updated(state, proof=begun, to_confirm=(), waiting=_without_proof(state))
        case EvaluationEnded():
            assert state.proof is not None, "an evaluation belongs to a proof"
            evaluations = (*state.proof.evaluations, event.evaluation)
            return updated(state, proof=replace(state.proof, evaluations=evaluations))
        case FinalistsDisqualified():
            return _apply_disqualified(state, event)
        case VerdictReached():
            assert state.proof is not None, "a verdict belongs to a proof"
            ended = updated(state, proof=replace(state.proof, verdict=event.verdict))
            return _with_disqualified(ended, event.verdict)
        case _:
            assert_never(event)


def _apply_disqualified(state: SweepState, event: FinalistsDisqualified) -> SweepState:
    """Reopen the search if a disqualified trial had ended it; the trials it had stopped wait again."""
    assert state.proof is not None, "finalists belong to a proof"
    again = tuple(number for number in event.reopened if is_retriable(state, number))
    kept = Vector(number for number in state.end_order if number not in again) if again else state.end_order
    reopened = updated(
        state,
        proof=None,
        set_aside=(*state.set_aside, replace(state.proof, verdict=event.verdict, end_check=len(state.trials))),
        waiting=tuple(sorted({*_without_proof(state), *again})),
        end_order=kept,
        judged_from=min(state.judged_from, len(kept)),
        patience_from=len(kept),
        exhausted="",
    )
    return _with_disqualified(reopened, event.verdict)


def _with_disqualified(state: SweepState, verdict: Verdict) -> SweepState:
    """Remove trials ruled out by the verdict from the fastest, and include its winner."""
    out = {one.trial: one for one in (*state.disqualified, *verdict.disqualified) if one.trial != verdict.winner}
    left_out = verdict.left_out
    if (tuple(out.values()), left_out) == (state.disqualified, state.left_out):
        return state
    counting = (
        (trial.number, trial.measurement)
        for trial in state.searched()
        if trial.measurement is not None and trial.number not in (*out, *left_out)
    )
    fastest = rank_fastest(counting, state.objective)
    return updated(state, disqualified=tuple(out.values()), left_out=left_out, fastest=fastest)


def _advance_clock(state: SweepState, event: Event) -> SweepState:
    """Advance the time. Time without a controller or nodes does not count as active."""
    is_idle = isinstance(event, ControllerStarted | SweepCreated) or state.nodes == () or state.status != "running"
    elapsed = 0.0 if is_idle else max(0.0, event.at_s - state.now_s)
    return updated(state, now_s=event.at_s, active_s=state.active_s + elapsed)


def _apply_started(state: SweepState, event: ControllerStarted) -> SweepState:
    """Resume a paused sweep: starting a controller overrides earlier requests. A cancellation remains, so that it is
    not undone by accident."""
    status: SweepStatus = "running" if state.status == "paused" else state.status
    return updated(
        state,
        epoch=event.epoch,
        status=status,
        finish_reason="" if status == "running" else state.finish_reason,
        requested_action=state.requested_action if state.requested_action == "cancel" or event.is_restart else None,
        nodes=None,
        ended_at_s=None if status == "running" else state.ended_at_s,
    )


def _apply_action(state: SweepState, event: ActionRequested) -> SweepState:
    """Record the request. Nothing overrides a cancellation."""
    if state.is_over or state.requested_action == "cancel":
        return state
    return updated(state, requested_action=event.action, requested_by=event.by)


def _apply_end(state: SweepState, event: SweepPaused | SweepFinished) -> SweepState:
    status: SweepStatus = "paused" if isinstance(event, SweepPaused) else event.status
    cause = event.cause if isinstance(event, SweepFinished) else None
    return updated(
        state,
        status=status,
        finish_reason=event.reason,
        finish_cause=cause,
        requested_action=None,
        nodes=(),
        ended_at_s=event.at_s,
    )


def _apply_retried(state: SweepState, event: TrialsRetried) -> SweepState:
    """Let ended, unmeasured trials wait again, and reopen the candidates they ruled out."""
    again = tuple(number for number in event.trials if is_retriable(state, number))
    if not again or state.status == "cancelled" or spent_by_search(state):
        return state
    return updated(
        _opened(state),
        proof=None,  # these trials may now be faster than the finalists
        set_aside=(),
        waiting=tuple(sorted({*_without_proof(state), *again})),
        end_order=(kept := Vector(number for number in state.end_order if number not in again)),
        judged_from=len(kept),
        exhausted="",
        pruned=Vector(pruning for pruning in state.pruned if pruning.witness not in again),
    )


def _without_proof(state: SweepState) -> tuple[int, ...]:
    """Return the waiting trials, without checks of a finished proof."""
    over = ConfirmationRun | GateRun | SoakRun
    return tuple(number for number in state.waiting if not isinstance(state.trials[number].check, over))


def _apply_checks_requested(state: SweepState, event: ChecksRequested) -> SweepState:
    if state.status in ("cancelled", "failed"):
        return state
    return updated(
        _opened(state),
        to_confirm=tuple(dict.fromkeys((*state.to_confirm, *event.confirm))),
        to_profile=tuple(dict.fromkeys((*state.to_profile, *event.profile))),
    )


def _apply_budget(state: SweepState, event: BudgetChanged) -> SweepState:
    """Change the budget. If the former one ended the search and this one does not, the search continues, with a new
    proof. If it cut the proof short, the proof continues."""
    if state.status == "cancelled":
        return state
    changed = updated(state, created=replace(state.sweep, budget=event.budget))
    if state.status == "failed":
        return changed
    cause = state.finish_cause if state.proof is None else state.proof.cause
    searching = updated(changed, proof=None, waiting=_without_proof(changed))
    if cause is not None and cause.is_limit and not end_of_search(searching):
        return _opened(searching)
    if state.proof is not None and _is_cut_short(state, state.proof) and not spent_budget(changed):
        return _opened(updated(changed, proof=replace(state.proof, verdict=None)))
    return changed


def _apply_annotated(state: SweepState, event: Annotated) -> SweepState:
    if event.trial is None:
        return updated(state, note=_changed_note(state.note, event))
    if not 0 <= event.trial < len(state.trials):
        return state
    trial = state.trials[event.trial]
    trial = replace(trial, note=_changed_note(trial.note, event))
    others = tuple(number for number in state.noted if number != trial.number)
    noted = others if trial.note is None else tuple(sorted((*others, trial.number)))
    return updated(state, trials=state.trials.with_item(trial.number, trial), noted=noted)


def _changed_note(note: UserNote | None, event: Annotated) -> UserNote | None:
    """Return the note after the event; None if nothing is left of it."""
    before = note or UserNote()
    kept = {key: value for key, value in before.tags.items() if key not in event.removed_tags}
    text, tags = before.text if event.text is None else event.text, {**kept, **event.tags}
    return UserNote(text=text, tags=tags, by=event.by, at_s=event.written_at_s) if text or tags else None


def _is_cut_short(state: SweepState, proof: ProofState) -> bool:
    """Whether the proof ended without a winner after the budget was spent."""
    is_open = proof.verdict is None or proof.verdict.winner is not None
    return not (is_open or proof.is_requested) and bool(spent_budget(state))


def _opened(state: SweepState) -> SweepState:
    """Reopen a sweep that is over."""
    if not state.is_over:
        return state
    return updated(state, status="running", finish_reason="", finish_cause=None, ended_at_s=None)


def is_retriable(state: SweepState, number: int) -> bool:
    """Whether the trial ended unmeasured and is not about to be launched again anyway."""
    if not 0 <= number < len(state.trials) or number in state.waiting or state.trials[number].check is not None:
        return False
    return isinstance(state.trials[number].outcome, Failure)


def _apply_proposed(state: SweepState, event: TrialProposed) -> SweepState:
    trial = Trial(
        number=event.trial,
        candidate=event.candidate,
        origin=event.origin,
        reason=event.reason,
        proposed_at_s=event.at_s,
        expected=event.expected,
        num_ended=len(state.end_order),
        check=event.check,
    )
    state = updated(state, trials=state.trials.append(trial), waiting=(*state.waiting, trial.number))
    if event.check is None:
        num_proposed = state.num_by_status.get(trial.status, 0) + 1
        return updated(state, num_by_status={**state.num_by_status, trial.status: num_proposed})
    profiled = event.check.of if isinstance(event.check, ProfileRun) else None
    to_profile = tuple(number for number in state.to_profile if number != profiled)
    return updated(state, check_numbers=state.check_numbers.append(trial.number), to_profile=to_profile)


def _apply_launched(state: SweepState, event: AttemptLaunched) -> SweepState:
    attempt = Attempt(token=event.token, launched_at_s=event.at_s, ranks=event.ranks, num_devices=event.num_devices)
    before = state.trials[event.trial]
    trial = replace(before, attempts=(*before.attempts, attempt))
    state = _with_trial(state, before, trial)
    if isinstance(before.outcome, StoppedEarly):  # its savings are now spent
        state = updated(state, saved_device_seconds=_saved_device_seconds(state))
    return updated(
        state,
        waiting=tuple(number for number in state.waiting if number != trial.number),
        running=state.running | {trial.number},
    )


def _apply_stopped(state: SweepState, event: AttemptStopped) -> SweepState:
    trial = state.trials[event.trial]
    if not trial.is_running or trial.attempts[-1].token != event.token:
        return state
    stopped = replace(trial.attempts[-1], stopped=event.outcome)
    return updated(
        state, trials=state.trials.with_item(trial.number, replace(trial, attempts=(*trial.attempts[:-1], stopped)))
    )


def _apply_ended(state: SweepState, event: AttemptEnded) -> SweepState:
    before = state.trials[event.trial]
    if not before.is_running or before.attempts[-1].token != event.token:
        return state
    ended = replace(before.attempts[-1], outcome=event.outcome, device_seconds=event.device_seconds)
    trial = replace(before, attempts=(*before.attempts[:-1], ended))
    goes_again = _is_launched_again(state, trial, event.outcome)
    is_learned = trial.check is None and not goes_again and not _is_lost(event.outcome)
    state = _note_outcome(_with_trial(state, before, trial), trial, event.outcome)
    state = updated(
        _strike(state, trial, event.outcome),
        device_seconds=state.device_seconds + event.device_seconds,
        end_order=state.end_order.append(trial.number) if is_learned else state.end_order,
        running=state.running - {trial.number},
    )
    if goes_again:
        return updated(state, waiting=tuple(sorted((*state.waiting, trial.number))))
    return _rank(state, trial)


def _with_trial(state: SweepState, before: Trial, trial: Trial) -> SweepState:
    """Replace ``before`` by ``trial``, which has the same number."""
    trials = state.trials.with_item(trial.number, trial)
    if trial.check is not None or trial.status == before.status:
        return updated(state, trials=trials)
    counts = {**state.num_by_status, before.status: state.num_by_status[before.status] - 1}
    counts[trial.status] = counts.get(trial.status, 0) + 1
    return updated(state, trials=trials, num_by_status=counts)


def _note_outcome(state: SweepState, trial: Trial, outcome: Outcome) -> SweepState:
    """Update frequently read values: busy machines, the latest failures, savings of early stops."""
    if isinstance(outcome, Measured):
        return _note_disturbance(state, trial.number, outcome.measurement)
    failure = (trial.number, len(trial.attempts) - 1)
    saved = outcome.saved_device_seconds if isinstance(outcome, StoppedEarly) and trial.check is None else 0.0
    return updated(
        state,
        last_failures=(failure, *state.last_failures)[:MAX_FAILURES],
        saved_device_seconds=state.saved_device_seconds + saved,
    )


def _note_disturbance(state: SweepState, number: int, measurement: Measurement) -> SweepState:
    worst = measurement.disturbed_by
    if worst is None:
        return state
    before = None if state.most_disturbed is None else state.trials[state.most_disturbed].measurement
    is_most = before is None or before.disturbed_by is None or worst.severity > before.disturbed_by.severity
    return updated(
        state,
        disturbed=state.disturbed.append(number),
        most_disturbed=number if is_most else state.most_disturbed,
    )


def _saved_device_seconds(state: SweepState) -> float:
    outcomes = (trial.outcome for trial in state.searched())
    return sum(outcome.saved_device_seconds for outcome in outcomes if isinstance(outcome, StoppedEarly))


def _is_launched_again(state: SweepState, trial: Trial, outcome: Outcome) -> bool:
    """Whether ``trial``, already ended with ``outcome``, is launched again."""
    budget = state.sweep.budget
    if isinstance(outcome, HostOutOfMemory):
        return trial.num_host_ooms < budget.host_ooms_per_trial
    return _is_lost(outcome) and trial.num_lost < budget.lost_attempts_per_trial


def _is_lost(outcome: Outcome) -> bool:
    return isinstance(outcome, GangLost)


def _strike(state: SweepState, trial: Trial, outcome: Outcome) -> SweepState:
    """Count faults of nodes: consecutive ones put a node into quarantine; a measurement there clears them."""
    if isinstance(outcome, Measured):
        cleared = state.strikes.keys() & {device.node for device in trial.attempts[-1].ranks}
        left = {node: count for node, count in state.strikes.items() if node not in cleared}
        return updated(state, strikes=left) if cleared else state
    node = blamed_node(outcome)
    if node is None:
        return state
    count = state.strikes.get(node, 0) + 1
    is_out = count >= state.sweep.budget.strikes_per_node
    return updated(
        state,
        strikes={**state.strikes, node: count},
        quarantined=state.quarantined | {node} if is_out else state.quarantined,
    )


def blamed_node(outcome: Outcome) -> str | None:
    """Return the node that may have caused the outcome: a lost node, or one on which a rank hung."""
    match outcome:
        case GangLost(cause="infrastructure") | TimedOut():
            return outcome.evidence.node
        case _:
            return None


def _rank(state: SweepState, trial: Trial) -> SweepState:
    """Rank a newly ended trial among the fastest, if it is one."""
    if trial.check is not None or trial.measurement is None or state.is_disqualified(trial.number):
        return state
    key = -state.objective.score(trial.measurement), trial.number
    if len(state.fastest) == MAX_FASTEST and key > state.fastest[-1].key:
        return state
    ranked = rank(trial.number, trial.measurement, state.objective)
    fastest = sorted((*state.fastest, ranked), key=lambda one: one.key)
    return updated(state, fastest=tuple(fastest[:MAX_FASTEST]))
