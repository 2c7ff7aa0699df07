"""The proof as the pure controller sees it: sweeps played to their end with made-up step times."""

import dataclasses
import random
import re

import pytest

from cluster.hardware.topology import Device
from orchestrator.controller.step import decide, event_of, step
from orchestrator.errors import ConfigError
from orchestrator.objective import Objective
from orchestrator.promotion.manifest import choose
from orchestrator.proof.loss_gate import ROUNDING
from orchestrator.proof.progress import confirmation, verified_change
from orchestrator.report.report import make_report, make_short_report, report_markdown
from orchestrator.report.summary import summarize
from orchestrator.sweep.events import (
    AttemptEnded,
    AttemptLaunched,
    Budget,
    BudgetChanged,
    ChecksAsked,
    ConfirmationRun,
    ConfirmSettings,
    ControllerStarted,
    Evaluate,
    Evaluation,
    EvaluationEnded,
    Finish,
    GateRun,
    GateSettings,
    Launch,
    ProfileRun,
    PromotedRounds,
    ProofSettings,
    Propose,
    SearchExhausted,
    SoakRun,
    TrialsRetried,
)
from orchestrator.sweep.fold import fold
from orchestrator.sweep.state import SweepState
from tests.support.story import WORKLOAD, created, failures, measured, not_believed, proposed
from trials.outcome import GangLost, StoppedEarly
from trials.reports import Disturbance
from trials.spec import Candidate, Layout, OwnChoice, Precision, Recompute

PROOF = ProofSettings(confirm=ConfirmSettings(max_rounds=6), gate=GateSettings(num_steps=20))
LOSSES = tuple(5.5 - 0.05 * i for i in range(20))
NORMS = tuple(2.0 - 0.02 * i for i in range(20))


class Play:
    """Plays a sweep over candidates whose step times are known, one second of the clock per event.

    Args:
        times_s: step time of each candidate, the baseline's first.
        between: standard deviation of the logarithm of a run's speed, the same for all its steps.
    """

    def __init__(self, times_s, *, between=0.0, seed=0, candidates=None, proof=PROOF, budget=None, wrong=(), **more):
        self.candidates = candidates or [Candidate(micro_batch_size=2**i) for i in range(len(times_s))]
        self.time_of = dict(zip(self.candidates, times_s, strict=True))
        self.rng, self.between = random.Random(seed), between
        self.wrong = {self.candidates[number] for number in wrong}
        self.noise = 1.0
        """What rounding alone makes of losses."""
        self.slowdown = {}
        """Candidate to what the times of the last half of a longer run are multiplied with."""
        self.stopped = {}
        """Candidate to the number of the trial that stops its first attempt early."""
        self.outcomes, self.nodes, self.evaluations = {}, {}, {}
        self.events, self.state, self.now_s = [], SweepState(), 0.0
        self.take(created(proof=proof, budget=budget or Budget(max_trials=len(times_s)), **more))

    def take(self, event):
        self.events.append(event)
        self.state, _ = step(self.state, event)

    def tick(self):
        self.now_s += 1.0
        return self.now_s

    def run(self, limit=400):
        for _ in range(limit):
            commands = decide(self.state)
            if not commands:
                return self.state
            self.execute(commands[0])
        raise AssertionError("the sweep never ends")

    def execute(self, command):
        match command:
            case Propose():
                number = self.state.num_searched
                if number < len(self.candidates):
                    self.take(proposed(command.trial, self.candidates[number], at_s=self.tick()))
                else:
                    self.take(SearchExhausted(at_s=self.tick()))
            case Launch():
                self.launch(command)
            case Evaluate():
                passed = self.evaluations.get(command.trial, True)
                ended = Evaluation(trial=command.trial, passed=passed, exit_code=0 if passed else 1)
                self.take(EvaluationEnded(at_s=self.tick(), evaluation=ended))
            case _:
                self.take(event_of(command, self.state, self.tick()))

    def launch(self, command):
        trial = self.state.trials[command.trial]
        token, node = f"{command.trial}-{command.attempt}", self.nodes.get(command.trial, "host")
        ranks = (Device(node=node, index=0),)
        launch = {"trial": command.trial, "attempt": command.attempt, "ranks": ranks, "num_devices": 1}
        self.take(AttemptLaunched(at_s=self.tick(), token=token, **launch))
        outcome = self.outcomes.pop((command.trial, command.attempt), None) or self.outcome(trial)
        self.take(AttemptEnded(at_s=self.tick(), trial=command.trial, token=token, outcome=outcome, device_seconds=1.0))

    def outcome(self, trial):
        time_s = self.time_of.get(trial.candidate, 0.1) * 2.718281828 ** self.rng.gauss(0.0, self.between)
        if trial.candidate in self.stopped and not trial.attempts and trial.check is None:
            return stopped_by(self.stopped[trial.candidate])
        if isinstance(trial.check, SoakRun):
            return self.soaked(trial, time_s)
        is_twin = isinstance(trial.check, GateRun) and trial.check.perturbation > 0.0
        factor = 1.1 if trial.candidate in self.wrong else self.noise if is_twin else 1.0
        return measured(time_s, losses=tuple(factor * loss for loss in LOSSES), grad_norms=NORMS)

    def soaked(self, trial, time_s):
        """As many steps as asked for, at most 120, each with noise of 1 %."""
        half = min(trial.check.num_steps, 120) // 2
        factors = [1.0] * half + [self.slowdown.get(trial.candidate, 1.0)] * half
        return measured(time_s, step_times_s=tuple(time_s * self.rng.gauss(one, 0.01) for one in factors))


class BusyPlay(Play):
    """Every run is measured on a busy machine, which slows both trials of a round alike."""

    def outcome(self, trial):
        time_s = self.time_of[trial.candidate] * 1.3 * 2.718281828 ** self.rng.gauss(0.0, self.between)
        return measured(time_s, disturbances=(Disturbance(node="host", seconds=1.0, steal=0.1),))


@pytest.mark.parametrize(("today_s", "loss", "most"), [(0.05, "excluded", 6), (0.07, "open", 12)], ids=["kept", "lost"])
def test_busy_rounds_rule_a_loss_of_speed_out_and_never_show_one(today_s, loss, most):
    then = [measured(time_s).measurement.tokens_per_s_per_device for time_s in (0.05, 0.1)]
    promoted = PromotedRounds(own=(then[0],) * 3, baseline=(then[1],) * 3, tolerance=0.05)
    confirm = ConfirmSettings(min_rounds=3, max_rounds=12, always=True, soak_s=None, promoted=promoted)
    state = BusyPlay([0.1, today_s], between=0.004, proof=ProofSettings(confirm=confirm)).run()
    rounds = confirmation(state).complete
    found, counts_busy = verified_change(state, rounds, 1)
    assert len(rounds) <= most
    assert counts_busy is (loss == "excluded")
    assert (found.loss if found else "open") == loss


def stopped_by(incumbent):
    evidence = failures()["crashed"].evidence
    return StoppedEarly(
        step_times_s=(0.1, 0.1), at_least_s=0.08, incumbent=incumbent, saved_device_seconds=1.0, evidence=evidence
    )


def checks(state, kind):
    return [trial for trial in state.trials if isinstance(trial.check, kind)]


def test_the_fastest_is_measured_again_and_trained_beside_the_baseline_before_it_wins():
    play = Play([0.1, 0.05, 0.08, 0.2])
    state = play.run()
    verdict = state.verdict
    assert (verdict.conclusion, verdict.winner, state.winner.number) == ("confirmed", 1, 1)
    assert verdict.speedup.low <= 2.0 <= verdict.speedup.high
    assert state.proof.finalists == (1, 2)  # t003 cannot be faster than the baseline
    rounds = {(trial.check.round, trial.check.of) for trial in checks(state, ConfirmationRun)}
    assert {of for _, of in rounds} == {0, 1, 2} and verdict.num_rounds == 3
    assert [(trial.check.role, trial.check.of) for trial in checks(state, GateRun)] == [
        ("baseline", 0),
        ("twin", 0),
        ("finalist", 1),
    ]
    assert state.status == "finished" and state.best_trial == 1
    assert state.num_searched == 4 and len(state.end_order) == 4


def test_a_lucky_winner_is_refused():
    """Ten candidates that are all as fast as the baseline, in runs that differ by 10 %: one always looks faster."""
    looked_faster, won = 0, 0
    for seed in range(40):
        state = Play([0.1] * 10, between=0.1, seed=seed).run()
        best = state.best.measurement.tokens_per_s_per_device
        looked_faster += best > 1.05 * state.baseline.measurement.tokens_per_s_per_device
        won += state.verdict.conclusion == "confirmed"
        assert state.verdict.conclusion in ("keep", "confirmed")
    assert looked_faster > 20 and won <= 5, (looked_faster, won)  # at 5 % more than 5 of 40 has a chance of 1 %


def test_a_fast_finalist_that_trains_another_model_is_refused_and_the_next_one_wins():
    state = Play([0.1, 0.04, 0.06], wrong=[1]).run()
    verdict = state.verdict
    assert (verdict.conclusion, verdict.winner) == ("confirmed", 2)
    assert [(report.trial, report.passed) for report in verdict.gates] == [(1, False), (2, True)]
    assert "loss" in verdict.gates[0].reasons[0]
    alone = Play([0.1, 0.04], wrong=[1]).run()
    assert (alone.verdict.conclusion, alone.verdict.winner, alone.winner.number) == ("keep", None, 0)
    assert "does not train the same model" in alone.verdict.reason


def test_a_reference_in_full_precision_is_trained_when_number_formats_differ():
    half, other = Precision(level="O1", dtype="bfloat16"), Precision(level="O2", dtype="bfloat16")
    candidates = [Candidate(precision=half), Candidate(precision=other)]
    state = Play([0.1, 0.04], candidates=candidates).run()
    roles = {trial.check.role: trial.candidate.precision.level for trial in checks(state, GateRun)}
    assert roles == {"baseline": "O1", "reference": "O0", "finalist": "O2", "finalist_reference": "O0"}
    same = Play([0.1, 0.04], candidates=[Candidate(), Candidate(precision=half)]).run()
    assert [trial.check.role for trial in checks(same, GateRun)] == [
        "baseline",
        "twin",
        "finalist",
        "finalist_reference",
    ]
    assert checks(same, GateRun)[1].check.perturbation == ROUNDING["bfloat16 O1"]


def test_what_is_judged_in_full_precision_has_its_twin_where_it_is_beyond_the_limits():
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


@pytest.mark.parametrize("evaluated", [None, False, True])
def test_where_rounding_alone_does_as_much_the_gate_cannot_tell_and_the_users_evaluation_may(evaluated):
    gate = GateSettings(num_steps=20, command=() if evaluated is None else ("evaluate",))
    play = Play([0.1, 0.04], wrong=[1], proof=ProofSettings(confirm=PROOF.confirm, gate=gate))
    play.noise, play.evaluations[1] = 0.9, bool(evaluated)
    verdict = play.run().verdict
    (report,) = verdict.gates
    assert report.answer == "inconclusive" and not report.passed and report.remedy
    expected = {None: ("unconfirmed", None), False: ("keep", None), True: ("confirmed", 1)}
    assert (verdict.conclusion, verdict.winner) == expected[evaluated]
    if evaluated is None:
        assert "t001 is faster, but whether it trains the same model could not be told" in verdict.reason
        assert verdict.speedup.value == pytest.approx(2.5)
        chosen = choose(play.state, "1", force=True)
        assert any("could not tell whether it trains the same" in why for why in chosen.missing)
        assert "evaluation of your own" in chosen.remedy
    if evaluated:
        assert not choose(play.state, None, force=False).missing


@pytest.mark.parametrize(
    ("role", "kind", "answer"),
    [
        ("finalist", "timed_out", "inconclusive"),
        ("finalist", "oom", "failed"),
        ("twin", "timed_out", "inconclusive"),
        ("twin", "oom", "passed"),
    ],
)
def test_a_run_that_met_its_deadline_is_not_judged(role, kind, answer):
    play = Play([0.1, 0.04])
    number = next(trial.number for trial in checks(Play([0.1, 0.04]).run(), GateRun) if trial.check.role == role)
    play.outcomes = {(number, 0): failures()[kind]}
    verdict = play.run().verdict
    assert verdict.gates[0].answer == answer
    assert verdict.conclusion == {"inconclusive": "unconfirmed", "failed": "keep", "passed": "confirmed"}[answer]
    assert ("met its deadline" in verdict.reason) == (answer == "inconclusive")


@pytest.mark.parametrize("check", [ConfirmationRun, GateRun])
@pytest.mark.parametrize("of", [0, 1])
def test_a_check_that_is_not_believed_takes_its_finalist_out_and_leaves_no_proof_without_a_baseline(check, of):
    runs = checks(Play([0.1, 0.04]).run(), check)
    number = next(trial.number for trial in runs if trial.check.of == of)
    play = Play([0.1, 0.04])
    play.outcomes = {(number, 0): not_believed()}
    verdict = play.run().verdict
    assert (verdict.conclusion, verdict.winner) == ("unconfirmed" if of == 0 else "keep", None)
    assert "reported 16 ms, but 400 ms passed" in verdict.reason


def test_on_a_cluster_that_does_not_exist_a_proof_is_rehearsed():
    """Nothing trains for the gate, nothing is confirmed, nothing can be forced into production."""
    state = Play([0.1, 0.05, 0.08], cluster_kind="simulated").run()
    verdict = state.verdict
    assert (verdict.conclusion, verdict.winner, verdict.gates) == ("rehearsed", 1, ())
    assert not checks(state, GateRun) and checks(state, ConfirmationRun)
    report = make_short_report(state, summarize(state, "sqlite:///x"))
    text = report_markdown(report)
    word = "SIMULATED"
    assert text.startswith(f"# {word}") and f"{word}: nothing was measured" in text
    assert (
        "2.00x the speed of your present configuration" in report.headline
        and report.headline[:8] == word[:1] + word[1:8].lower()
    )
    assert not re.search("onfirmed:|proven winner|trains the same", text) and not report.is_faster
    assert summarize(state, "sqlite:///x").to_json()["measured"] is False
    for trial in (None, "1", "2"):
        with pytest.raises(ConfigError, match="nothing was measured, so nothing of it goes to production"):
            choose(state, trial, force=True)
    assert choose(state, None, force=False, is_candidate=True).trial.number == 1


def test_a_finalist_that_fails_when_measured_again_is_out():
    play = Play([0.1, 0.04, 0.06])
    play.outcomes[(5, 0)] = failures()["oom"]
    state = play.run()
    failed = state.trials[5].check.of
    assert state.verdict.conclusion == "confirmed" and state.verdict.winner == ({1, 2} - {failed}).pop()


def cheats(*modes, mbs=None):
    """Candidates with a knob ``w``, which cheats where it is ``cheat``, each with another micro-batch size."""
    sizes = mbs or [2**i for i in range(len(modes))]
    knob = {mode: (OwnChoice(name="w", value=mode),) for mode in modes}
    return [Candidate(micro_batch_size=size, own=knob[mode]) for size, mode in zip(sizes, modes, strict=True)]


def test_finalists_that_all_cheat_are_replaced_by_the_best_that_differ():
    """The three fastest share ``w=cheat`` and train another model: the honest ones follow, and the fastest wins."""
    candidates = cheats("a", "cheat", "cheat", "cheat", "a", "cheat", "a", "a")
    play = Play([0.1, 0.025, 0.026, 0.027, 0.053, 0.028, 0.066, 0.081], candidates=candidates, wrong=[1, 2, 3, 5])
    state = play.run()
    verdict = state.verdict
    assert (verdict.conclusion, verdict.winner) == ("confirmed", 4)
    assert [proof.finalists for proof in state.set_aside] == [(1, 2, 3)] and state.proof.finalists == (4, 6, 7)
    assert [(one.trial, one.by) for one in verdict.disqualified] == [(1, "gate"), (2, "gate"), (3, "gate")]
    assert verdict.shared == ("w=cheat",) and "t001, t002, t003 all have w=cheat" in verdict.reason
    assert {report.trial for report in verdict.gates} == {1, 2, 3, 4}
    roles = [(run.check.role, run.check.of) for run in checks(state, GateRun)]
    assert roles.count(("baseline", 0)) == roles.count(("twin", 0)) == 1, "they serve the next finalists, too"
    assert state.best_trial == 4 and [one.number for one in state.fastest][:2] == [4, 6]
    text = report_markdown(make_short_report(state, summarize(state, "sqlite:///x")))
    assert "Confirmed: " in text and "t004" in text and "w=cheat" in text


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


def test_what_a_disqualified_trial_stopped_early_runs_again():
    candidates = cheats("a", "cheat", "a", "a")
    play = Play([0.1, 0.025, 0.05, 0.09], candidates=candidates, wrong=[1])
    play.stopped = {candidates[2]: 1}
    state = play.run()
    assert (state.verdict.conclusion, state.verdict.winner) == ("confirmed", 2)
    assert [attempt.outcome.kind for attempt in state.trials[2].attempts] == ["stopped_early", "measured"]
    spent = Play([0.1, 0.025, 0.05, 0.09], candidates=candidates, wrong=[1], budget=Budget(device_hours=15 / 3600))
    spent.stopped = {candidates[2]: 1}
    state = spent.run()
    assert len(state.trials[2].attempts) == 1 and state.verdict.conclusion != "confirmed"


@pytest.mark.parametrize("why", ["oom", "gate"])
@pytest.mark.parametrize("reopens", [False, True])
def test_one_disqualified_trial_does_not_take_those_with_it_that_have_its_values(why, reopens):
    """t002 has the value of t001 and another: it is no worse for that, and as the winner it is the best."""
    sizes = [(1, Recompute()), (8, Recompute()), (8, Recompute(full=((2,),))), (2, Recompute())]
    candidates = [Candidate(micro_batch_size=size, recompute=recompute) for size, recompute in sizes]

    def play():
        found = Play([0.1, 0.04, 0.05, 0.12], candidates=candidates, wrong=[1] if why == "gate" else [])
        found.stopped = {candidates[3]: 1} if reopens else {}
        return found

    one = play()
    if why == "oom":
        again = next(run.number for run in checks(play().run(), ConfirmationRun) if run.check.of == 1)
        one.outcomes = {(again, 0): failures()["oom"]}
    state = one.run()
    assert (state.verdict.conclusion, state.verdict.winner, state.best_trial) == ("confirmed", 2, 2)
    assert [found.trial for found in state.verdict.disqualified] == [1] and not state.left_out
    assert len(state.set_aside) == reopens and not state.is_disqualified(2)


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


def test_a_proof_that_was_set_aside_keeps_its_own_rounds():
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


@pytest.mark.parametrize(
    ("hours", "words"), [(8, "before anything was shown faster"), (12, "the loss gate"), (16, "a longer run")]
)
def test_a_proof_that_the_budget_cut_short_goes_on_with_a_larger_one(hours, words):
    play = Play([0.1, 0.05, 0.08], budget=Budget(max_trials=9, device_hours=hours / 3600))
    cut, num_trials = play.run(), len(play.state.trials)
    assert cut.verdict.conclusion == "unconfirmed" and words in cut.verdict.reason
    larger = {"request": 1, "by": "someone"}
    play.take(BudgetChanged(at_s=play.tick(), budget=Budget(max_trials=9, device_hours=hours / 3600), **larger))
    assert play.state.status == "finished"
    play.take(BudgetChanged(at_s=play.tick(), budget=Budget(max_trials=9, device_hours=1.0), **larger))
    state = play.run()
    assert (state.verdict.conclusion, state.verdict.winner) == ("confirmed", 1)
    assert state.num_searched == 3 and len(state.trials) > num_trials and fold(play.events) == state


def test_a_search_that_ended_for_a_disqualified_trial_goes_on():
    """Patience was spent waiting for a trial faster than the cheat."""
    candidates = cheats("a", "cheat", "a", "a", "a", "a")
    budget = Budget(max_trials=6, patience=2)
    play = Play([0.1, 0.025, 0.2, 0.2, 0.05, 0.2], candidates=candidates, wrong=[1], budget=budget)
    state = play.run()
    assert state.set_aside[0].cause == "patience" and state.num_searched == 6
    assert state.verdict.conclusion == "confirmed" and state.winner.candidate == candidates[4]


def test_where_the_budget_ends_before_the_next_finalists_their_names_are_told():
    candidates = cheats("a", "cheat", "cheat", "cheat", "a")
    budget = Budget(max_trials=5, device_hours=20.5 / 3600)
    share = dataclasses.replace(PROOF.confirm, budget_share=0.7)
    proof = ProofSettings(confirm=share, gate=PROOF.gate)
    times_s = [0.1, 0.025, 0.026, 0.027, 0.053]
    state = Play(times_s, candidates=candidates, wrong=[1, 2, 3], budget=budget, proof=proof).run()
    assert state.verdict.conclusion in ("keep", "unconfirmed") and state.verdict.winner is None
    report = make_report(state, summarize(state, "sqlite:///x"))
    assert [one.command for one in report.commands if one.purpose == "confirm"] == ["tune-cluster confirm story t004"]


def test_a_finalist_whose_speed_fades_is_disqualified():
    play = Play([0.1, 0.05, 0.08])
    play.slowdown = {play.candidates[1]: 2.5}
    state = play.run()
    verdict = state.verdict
    assert (verdict.conclusion, verdict.winner) == ("confirmed", 2)
    fading = verdict.disqualified[0].reason
    assert re.search(r"its speed fades: 2\.0\dx in the first third .*, 0\.8\dx in the last", fading)
    assert [(one.trial, one.answer) for one in verdict.soaks] == [(1, "failed"), (2, "passed")]
    assert re.fullmatch(
        r"t002 is 1\.\d\dx as fast as the baseline \(95 %: .*\) over 3 rounds and a longer run of 120 steps \(10 s\)",
        verdict.reason,
    )
    runs = [(run.check.of, run.check.finalist) for run in checks(state, SoakRun)]
    assert runs == [(0, 1), (1, 1), (0, 2), (2, 2)]
    assert [run.check.expected_s for run in checks(state, SoakRun)] == pytest.approx([30.0] * 4, rel=0.01)
    alone = Play([0.1, 0.05])
    alone.slowdown = {alone.candidates[1]: 2.5}
    assert alone.run().verdict.conclusion == "keep"


@pytest.mark.parametrize(
    ("of", "kind", "conclusion", "words"),
    [
        (1, "timed_out", "keep", "failed in its longer run"),
        (1, "oom", "keep", "failed in its longer run"),
        (0, "oom", "unconfirmed", "the baseline could not be measured in a longer run"),
    ],
)
def test_a_longer_run_that_fails(of, kind, conclusion, words):
    play = Play([0.1, 0.05])
    number = next(run.number for run in checks(Play([0.1, 0.05]).run(), SoakRun) if run.check.of == of)
    play.outcomes = {(number, 0): failures()[kind]}
    verdict = play.run().verdict
    assert verdict.conclusion == conclusion and words in verdict.reason


def test_soak_may_be_off_or_of_a_given_length():
    def proof(soak_s):
        return ProofSettings(confirm=dataclasses.replace(PROOF.confirm, soak_s=soak_s), gate=PROOF.gate)

    off = Play([0.1, 0.05], proof=proof(0.0)).run()
    assert not checks(off, SoakRun) and off.verdict.conclusion == "confirmed"
    state = Play([0.1, 0.05], proof=proof(7.0)).run()
    assert [run.check.num_steps for run in checks(state, SoakRun)] == [70, 140]
    assert not checks(Play([0.1, 0.05], cluster_kind="simulated").run(), SoakRun)


def test_of_equal_finalists_the_smaller_change_wins():
    half = Precision(level="O1", dtype="bfloat16")
    more = Recompute(full=((2,),))
    candidates = [
        Candidate(),
        Candidate(micro_batch_size=2, precision=half),
        Candidate(micro_batch_size=4, recompute=more),
        Candidate(micro_batch_size=8),
    ]
    state = Play([0.1, 0.0495, 0.0497, 0.05], candidates=candidates, between=0.03, seed=1).run()
    verdict = state.verdict
    assert (verdict.conclusion, verdict.winner, set(verdict.tied_with)) == ("confirmed", 3, {1, 2})
    assert "; equal: " in verdict.reason and "t001" in verdict.reason.split("equal: ")[1]
    apart = Play([0.1, 0.03, 0.04, 0.05], candidates=candidates, between=0.001).run().verdict
    assert (apart.winner, apart.tied_with) == (1, ())


def test_where_nothing_was_compared_nothing_is_concluded():
    verdict = Play([0.1]).run().verdict
    assert verdict.conclusion == "unconfirmed" and "nothing was compared" in verdict.reason
    assert Play([0.1, 0.2]).run().verdict.conclusion == "keep"


def test_without_a_baseline_nothing_is_settled():
    play = Play([0.1, 0.04])
    play.outcomes[(0, 0)] = failures()["oom"]
    assert play.run().verdict.conclusion == "unconfirmed"
    again = Play([0.1, 0.04])
    again.outcomes[(2, 0)] = again.outcomes[(3, 0)] = failures()["crashed"]
    verdict = again.run().verdict
    assert (verdict.conclusion, verdict.winner) in (("unconfirmed", None), ("keep", None))


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


def test_a_round_whose_runs_were_on_different_nodes_does_not_count():
    play = Play([0.1, 0.05])
    play.nodes[3] = "another host"
    state = play.run()
    assert len(checks(state, ConfirmationRun)) == 2 * (state.verdict.num_rounds + 1)
    lost = Play([0.1, 0.05])
    lost.nodes = {number: f"host {number}" for number in range(2, 60)}
    assert lost.run().verdict.conclusion == "unconfirmed"


def test_a_lost_check_is_launched_again():
    play = Play([0.1, 0.05])
    play.outcomes[(3, 0)] = GangLost(evidence=failures()["crashed"].evidence)
    state = play.run()
    assert len(state.trials[3].attempts) == 2 and state.verdict.conclusion == "confirmed"


def test_the_users_evaluation_may_refuse():
    gate = GateSettings(num_steps=20, command=("evaluate",))
    play = Play([0.1, 0.04, 0.06], proof=ProofSettings(confirm=PROOF.confirm, gate=gate))
    play.evaluations[1] = False
    state = play.run()
    assert state.verdict.winner == 2
    assert [(one.trial, one.passed) for one in state.verdict.evaluations] == [(1, False), (2, True)]


def test_profiles_come_last_and_once():
    state = Play([0.1, 0.05], profiled=("winner", "baseline")).run()
    assert [trial.check.of for trial in checks(state, ProfileRun)] == [1, 0]
    assert [trial.number for trial in checks(state, ProfileRun)] == [len(state.trials) - 2, len(state.trials) - 1]


def test_people_may_have_any_trial_confirmed_or_profiled_later():
    play = Play([0.1, 0.05, 0.08])
    first = play.run().verdict
    play.take(ChecksAsked(at_s=play.tick(), request=1, by="someone", confirm=(2,)))
    state = play.run()
    assert first.winner == 1 and (state.verdict.winner, state.proof.finalists) == (2, (2,))
    play.take(ChecksAsked(at_s=play.tick(), request=2, by="someone", profile=(2,)))
    state = play.run()
    assert [trial.check.of for trial in checks(state, ProfileRun)] == [2] and state.verdict.winner == 2
    assert state.status == "finished" and state.num_requests == 2


def test_retried_trials_make_the_verdict_stale():
    play = Play([0.1, 0.05, 0.02])
    play.outcomes[(2, 0)] = failures()["timed_out"]
    assert play.run().verdict.winner == 1
    play.take(TrialsRetried(at_s=play.tick(), request=1, trials=(2,), by="someone"))
    assert play.state.verdict is None
    assert play.run().verdict.winner == 2


def test_off_means_off():
    assert Play([0.1, 0.05], proof=ProofSettings()).run().num_checks == 0
    state = Play([0.1, 0.05], proof=ProofSettings(confirm=PROOF.confirm)).run()
    assert state.verdict.conclusion == "confirmed" and not state.verdict.gates and not checks(state, GateRun)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_was_played_folds_to_the_same_state_and_goes_on_alike(seed):
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
