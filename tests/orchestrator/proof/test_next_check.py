"""The proof as the pure controller sees it: sweeps played to their end with made-up step times."""

import dataclasses

import pytest

from orchestrator.controller.step import decide, step
from orchestrator.objective import Objective
from orchestrator.promotion.manifest import choose
from orchestrator.proof.loss_gate import ROUNDING
from orchestrator.proof.progress import confirmation, verified_change
from orchestrator.sweep.events import (
    Budget,
    BudgetChanged,
    ConfirmationRun,
    ConfirmSettings,
    ControllerStarted,
    Finish,
    GateRun,
    Launch,
    ProfileRun,
    PromotedRounds,
    ProofSettings,
    SoakRun,
)
from orchestrator.sweep.fold import fold
from tests.orchestrator.proof.play import PROOF, BusyPlay, Play, cheats, checks, play_of
from tests.support.story import WORKLOAD, failures, measured
from trials.outcome import GangLost
from trials.spec import Candidate, Layout, Precision, Recompute


@pytest.mark.parametrize(("today_s", "loss", "most"), [(0.05, "excluded", 6), (0.07, "open", 12)], ids=["kept", "lost"])
def test_busy_rounds_may_exclude_a_slowdown_but_never_show_one(today_s, loss, most):
    then = [measured(time_s).measurement.tokens_per_s_per_device for time_s in (0.05, 0.1)]
    promoted = PromotedRounds(own=(then[0],) * 3, baseline=(then[1],) * 3, tolerance=0.05)
    confirm = ConfirmSettings(min_rounds=3, max_rounds=12, always=True, soak_s=None, promoted=promoted)
    state = BusyPlay([0.1, today_s], between=0.004, proof=ProofSettings(confirm=confirm)).run()
    rounds = confirmation(state).complete
    found, counts_busy = verified_change(state, rounds, 1)
    assert len(rounds) <= most
    assert counts_busy is (loss == "excluded")
    assert (found.loss if found else "open") == loss


def test_a_lucky_winner_is_refused():
    """Ten candidates that are all as fast as the baseline, in runs that differ by 10%: one always looks faster."""
    looked_faster, won = 0, 0
    for seed in range(40):
        state = Play([0.1] * 10, between=0.1, seed=seed).run()
        best = state.best.measurement.tokens_per_s_per_device
        looked_faster += best > 1.05 * state.baseline.measurement.tokens_per_s_per_device
        won += state.verdict.conclusion == "confirmed"
        assert state.verdict.conclusion in ("keep", "confirmed")
    assert looked_faster > 20 and won <= 5, (looked_faster, won)  # at 5% more than 5 of 40 has a chance of 1%


def test_a_full_precision_finalist_beyond_the_limits_gets_a_twin():
    """A finalist in 16 bits that is wrong in full precision, too: rounding has to be shown not to explain that."""
    half = Precision(level="O1", dtype="bfloat16")
    for baseline, of in ((Candidate(), Candidate()), (Candidate(precision=half), Candidate())):
        play = Play([0.1, 0.04], candidates=[baseline, Candidate(micro_batch_size=2, precision=half)], wrong=[1])
        exact = dataclasses.replace(play.candidates[1], precision=Precision())
        play.wrong.add(dataclasses.replace(exact, recompute=Recompute(full=((WORKLOAD.num_layers,),))))
        state = play.run()
        (twin,) = [trial for trial in checks(state, GateRun) if trial.check.role == "reference_twin"]
        assert (twin.candidate.precision, twin.check.perturbation) == (of.precision, ROUNDING["float32"])
        (report,) = state.verdict.gates
        assert report.answer == "failed" and any("trained in O0" in reason for reason in report.reasons)


def test_an_inconclusive_gate_requires_force_or_an_evaluation_to_promote():
    given = {"times_s": [0.1, 0.04], "wrong": [1], "noise": 0.9}
    chosen = choose(play_of(given).run(), "1", force=True)
    assert any("the loss gate is inconclusive" in why for why in chosen.missing)
    assert "custom evaluation" in chosen.remedy
    evaluated = play_of({**given, "proof": {"gate": {"command": ["evaluate"]}}}).run()
    assert not choose(evaluated, None, force=False).missing


def test_of_candidates_that_share_a_suspect_value_one_at_a_time_is_tried():
    """The disqualified have ``w=cheat`` and a micro-batch size in common: which of them it is, the next ones show."""
    candidates = cheats("a", "cheat", "cheat", "cheat", "a", "a", mbs=[1, 8, 8, 4, 8, 4])
    candidates[2] = dataclasses.replace(candidates[2], recompute=Recompute(full=((2,),)))
    two = dataclasses.replace(PROOF.confirm, num_finalists=2)
    play = Play(
        [0.1, 0.025, 0.026, 0.027, 0.05, 0.06],
        candidates=candidates,
        wrong=[1, 2, 3],
        proof=ProofSettings(confirm=two, gate=PROOF.gate),
    )
    state = play.run()
    assert [proof.finalists for proof in state.set_aside] == [(1, 2)] and state.proof.finalists == (3, 4)
    assert state.verdict.winner == 4 and state.verdict.shared == ("w=cheat",)


def test_a_finalist_of_two_proofs_has_the_reports_of_the_last():
    """The longer run of t001 is lost in the first proof; t002 is disqualified there, so that t003 runs again."""

    def play():
        found = Play([0.1, 0.04, 0.06, 0.12], wrong=[2])
        found.stopped = {found.candidates[3]: 2}
        return found

    soak = next(run.number for run in checks(play().run(), SoakRun) if run.check.of == 1)
    one = play()
    one.outcomes = {(soak, attempt): GangLost(evidence=failures()["crashed"].evidence) for attempt in range(3)}
    state = one.run()
    assert [[report.answer for report in proof.verdict.soaks] for proof in state.set_aside] == [["inconclusive"]]
    assert (state.verdict.winner, [(report.trial, report.answer) for report in state.verdict.soaks]) == (
        1,
        [(1, "passed")],
    )
    assert "a longer run of 120 steps" in state.verdict.reason


def test_a_superseded_proof_keeps_its_rounds():
    """A larger budget drops the proof that follows; its rounds have the numbers of those that were set aside."""
    candidates = cheats("a", "cheat", "cheat", "a", "a", "a", mbs=[1, 2, 4, 8, 16, 32])
    two = ProofSettings(confirm=dataclasses.replace(PROOF.confirm, num_finalists=2), gate=PROOF.gate)
    times_s = [0.1, 0.025, 0.026, 0.05, 0.06, 0.07]
    play = Play(times_s, candidates=candidates, wrong=[1, 2], proof=two, budget=Budget(max_trials=5))
    while not (play.state.set_aside and len(checks(play.state, ConfirmationRun)) > 11):
        play.execute(decide(play.state)[0])
    before = confirmation(play.state, play.state.set_aside[0])
    play.take(BudgetChanged(at_s=play.tick(), request=1, budget=Budget(max_trials=6), by="someone"))
    state = play.run()
    assert confirmation(state, state.set_aside[0]) == before
    assert (state.num_searched, state.verdict.winner, len(before.complete)) == (6, 3, 3)


def test_the_search_leaves_a_share_of_the_budget_for_the_proof():
    budget = Budget(max_trials=99, device_hours=40 / 3600)
    candidates = [Candidate(micro_batch_size=i + 1) for i in range(99)]
    play = Play([0.1, 0.05, *[0.09] * 97], budget=budget, candidates=candidates)
    state = play.run()
    assert state.num_searched == 32 and "80% of the budget" in state.finish_reason
    assert state.verdict.conclusion in ("confirmed", "unconfirmed") and state.num_checks == 8
    tight = dataclasses.replace(PROOF.confirm, budget_share=0.02)
    play = Play([0.1, 0.05, *[0.09] * 97], budget=budget, candidates=candidates, proof=ProofSettings(confirm=tight))
    assert play.run().verdict.conclusion == "unconfirmed"


@pytest.mark.parametrize("seed", range(3))
def test_every_play_folds_to_the_same_state_and_continues_alike(seed):
    """Killed between any two events, the next controller proposes what this one would have."""
    play = Play([0.1, 0.05, 0.06, 0.2], between=0.05, seed=seed, profiled=("winner",))
    play.outcomes[(5, 0)] = GangLost(evidence=failures()["crashed"].evidence)
    play.run()
    for end in range(1, len(play.events)):
        state = fold(play.events[:end])
        begun = ControllerStarted(at_s=state.now_s, epoch=1, pid=1, host="host")
        again, _ = step(state, begun)
        assert decide(again) == decide(dataclasses.replace(state, epoch=1, nodes=None)), play.events[end - 1]
    found = confirmation(play.state)
    assert found is not None and all(len(one.scores(Objective())) >= 2 for one in found.complete)


@pytest.mark.parametrize(("seconds_per_event", "num_trials", "of"), [(1.0, 24, []), (20.0, 24, [0, 1]), (40.0, 2, [])])
def test_automatic_profiles_are_made_only_after_a_long_sweep_of_many_runs(seconds_per_event, num_trials, of):
    candidates = [Candidate(micro_batch_size=size + 1) for size in range(num_trials)]
    times_s = [0.1, 0.05, *[0.2] * (num_trials - 2)]
    play = Play(times_s, candidates=candidates, profiled=("baseline", "winner"), is_profile_auto=True)
    play.tick = lambda: setattr(play, "now_s", play.now_s + seconds_per_event) or play.now_s
    state = play.run()
    assert state.verdict.winner == 1
    assert [trial.check.of for trial in state.checks() if isinstance(trial.check, ProfileRun)] == of


def test_runs_of_a_round_are_placed_where_the_largest_of_them_fits():
    wide = Candidate(layout=Layout(dp_replicate=2))
    play = Play([0.1, 0.05], candidates=[wide, Candidate()])
    for _ in range(60):
        command = decide(play.state)[0]
        if isinstance(command, Launch) and isinstance(play.state.trials[command.trial].check, ConfirmationRun):
            assert command.within == wide.layout
            return
        assert not isinstance(command, Finish)
        play.execute(command)
    raise AssertionError("nothing was confirmed")
