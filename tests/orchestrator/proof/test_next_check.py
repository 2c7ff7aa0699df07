"""The proof as the pure controller sees it: sweeps played to their end with made-up step times."""

import dataclasses
import random
import re

import pytest

from cluster.hardware.topology import Device
from orchestrator.controller.command_events import event_of
from orchestrator.controller.step import decide, step
from orchestrator.errors import ConfigError
from orchestrator.objective import Objective
from orchestrator.promotion.evidence import choose
from orchestrator.proof.progress import confirmation
from orchestrator.proof.tolerances import ROUNDING
from orchestrator.report.markdown import report_markdown
from orchestrator.report.report import make_short_report
from orchestrator.report.summary import summarize
from orchestrator.sweep.events import (
    AttemptEnded,
    AttemptLaunched,
    Budget,
    ChecksAsked,
    ControllerStarted,
    Evaluate,
    EvaluationEnded,
    Finish,
    Launch,
    Propose,
    SearchExhausted,
    TrialsRetried,
)
from orchestrator.sweep.fold import fold
from orchestrator.sweep.state import SweepState
from orchestrator.sweep.values import (
    ConfirmationRun,
    ConfirmSettings,
    Evaluation,
    GateRun,
    GateSettings,
    ProfileRun,
    ProofSettings,
)
from tests.support.story import WORKLOAD, created, failures, measured, proposed
from trials.outcome import GangLost
from trials.spec import Candidate, Layout, Precision, Recompute

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
                if command.trial < len(self.candidates):
                    self.take(proposed(command.trial, self.candidates[command.trial], at_s=self.tick()))
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
        is_twin = isinstance(trial.check, GateRun) and trial.check.perturbation > 0.0
        factor = 1.1 if trial.candidate in self.wrong else self.noise if is_twin else 1.0
        return measured(time_s, losses=tuple(factor * loss for loss in LOSSES), grad_norms=NORMS)


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


@pytest.mark.parametrize("kind", ["simulated", "replay"])
def test_on_a_cluster_that_does_not_exist_a_proof_is_rehearsed(kind):
    """Nothing trains for the gate, nothing is confirmed, nothing can be forced into production."""
    state = Play([0.1, 0.05, 0.08], cluster_kind=kind).run()
    verdict = state.verdict
    assert (verdict.conclusion, verdict.winner, verdict.gates) == ("rehearsed", 1, ())
    assert not checks(state, GateRun) and checks(state, ConfirmationRun)
    report = make_short_report(state, summarize(state, "sqlite:///x"))
    text = report_markdown(report)
    word = {"simulated": "SIMULATED", "replay": "REPLAYED"}[kind]
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


def test_an_old_ledger_tells_a_virtual_cluster_by_its_fingerprint():
    assert created(fingerprint={"torch": "2", "virtual": "abc"}).virtual == "simulated"
    assert created().virtual is None and created(cluster_kind="local").virtual is None


def test_a_finalist_that_fails_when_measured_again_is_out():
    play = Play([0.1, 0.04, 0.06])
    play.outcomes[(5, 0)] = failures()["oom"]
    state = play.run()
    failed = state.trials[5].check.of
    assert state.verdict.conclusion == "confirmed" and state.verdict.winner == ({1, 2} - {failed}).pop()


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
