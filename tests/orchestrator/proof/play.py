"""Sweeps played to their end with made-up step times, as the pure controller sees them."""

import dataclasses
import json
import random

from cluster.hardware.topology import Device
from orchestrator.controller.step import decide, event_of, step
from orchestrator.report.report import make_short_report, report_markdown
from orchestrator.report.summary import summarize
from orchestrator.sweep.events import (
    AttemptEnded,
    AttemptLaunched,
    Budget,
    BudgetChanged,
    ChecksRequested,
    ConfirmSettings,
    Evaluate,
    Evaluation,
    EvaluationEnded,
    GateRun,
    GateSettings,
    Launch,
    ProofSettings,
    Propose,
    SearchExhausted,
    SoakRun,
    TrialsRetried,
)
from orchestrator.sweep.fold import fold
from orchestrator.sweep.state import SweepState
from tests.support.story import created, failures, measured, not_believed, proposed
from trials.files import from_json, to_json
from trials.health import Disturbance
from trials.outcome import GangLost, StoppedEarly
from trials.spec import Candidate, CustomChoice

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
        """As many steps as requested, at most 120, each with noise of 1%."""
        half = min(trial.check.num_steps, 120) // 2
        factors = [1.0] * half + [self.slowdown.get(trial.candidate, 1.0)] * half
        return measured(time_s, step_times_s=tuple(time_s * self.rng.gauss(one, 0.01) for one in factors))


class BusyPlay(Play):
    """Every run is measured on a busy machine, which slows both trials of a round alike."""

    def outcome(self, trial):
        time_s = self.time_of[trial.candidate] * 1.3 * 2.718281828 ** self.rng.gauss(0.0, self.between)
        return measured(time_s, disturbances=(Disturbance(node="host", seconds=1.0, steal=0.1),))


def stopped_by(incumbent):
    evidence = failures()["crashed"].evidence
    return StoppedEarly(
        step_times_s=(0.1, 0.1), at_least_s=0.08, incumbent=incumbent, saved_device_seconds=1.0, evidence=evidence
    )


def checks(state, kind):
    return [trial for trial in state.trials if isinstance(trial.check, kind)]


def cheats(*modes, mbs=None):
    """Candidates with a knob ``w``, which cheats where it is ``cheat``, each with another micro-batch size."""
    sizes = mbs or [2**i for i in range(len(modes))]
    knob = {mode: (CustomChoice(name="w", value=mode),) for mode in modes}
    return [Candidate(micro_batch_size=size, own=knob[mode]) for size, mode in zip(sizes, modes, strict=True)]


OUTCOMES = {
    **failures(),
    "lost": GangLost(evidence=failures()["crashed"].evidence),
    "not_believed": not_believed(),
}


def play_of(given):
    """A play from JSON: step times, of candidates what is no default, and what happens to which run.

    A run is named by its number and attempt, or as "gate finalist", "confirmation_run 1", "soak_run 0": the first of
    its kind and role or trial in a play in which nothing happens.
    """
    given = dict(given)
    more = {name: given.pop(name) for name in ("wrong", "between", "seed", "profiled", "cluster_kind") if name in given}
    if "candidates" in given:
        plain = to_json(Candidate())
        more["candidates"] = [
            from_json(Candidate, {**plain, **{k: plain[k] | v if isinstance(v, dict) else v for k, v in one.items()}})
            for one in given.pop("candidates")
        ]
    if "cheats" in given:
        more["candidates"] = cheats(*given.pop("cheats"), mbs=given.pop("mbs", None))
    if "budget" in given:
        more["budget"] = Budget(**given.pop("budget"))
    settings = given.pop("proof", {})
    parts = {"confirm": PROOF.confirm, "gate": PROOF.gate}
    changes = {name: settings.get(name, {}) for name in parts}
    changed = {name: dataclasses.replace(parts[name], **one) for name, one in changes.items() if one is not None}
    more["proof"] = ProofSettings(**changed)

    def made():
        play = Play(given["times_s"], **{k: tuple(v) if k == "profiled" else v for k, v in more.items()})
        play.noise = given.get("noise", 1.0)
        for name in ("slowdown", "stopped"):
            setattr(play, name, {play.candidates[int(at)]: value for at, value in given.get(name, {}).items()})
        play.nodes = {int(number): node for number, node in given.get("nodes", {}).items()}
        play.evaluations = {int(number): passed for number, passed in given.get("evaluations", {}).items()}
        return play

    play = made()
    for run, kind in given.get("outcomes", {}).items():
        number, _, attempt = run.partition("/")
        key = (int(number), int(attempt or 0)) if number.isdigit() else (_first(made(), run), 0)
        play.outcomes[key] = OUTCOMES[kind]
    return play


def _first(play, named):
    kind, _, of = named.partition(" ")
    for run in play.run().trials:
        if (
            run.check is not None
            and run.check.kind == kind
            and of in (str(run.check.of), getattr(run.check, "role", ""))
        ):
            return run.number
    raise LookupError(named)


def played(question):
    """The verdict of a play, its checks, and what became of its trials; ``then`` holds requests after its end."""
    given = json.loads(question)
    requests = given.pop("then", [])
    play = play_of(given)
    shown = [_as_text(play.run())]
    for request in requests:
        by = {"at_s": play.tick(), "request": play.state.num_requests + 1, "by": "someone"}
        if "budget" in request:
            play.take(BudgetChanged(**by, budget=Budget(**request["budget"])))
        elif "retry" in request:
            play.take(TrialsRetried(**by, trials=tuple(request["retry"])))
        else:
            play.take(ChecksRequested(**by, **{name: tuple(numbers) for name, numbers in request.items()}))
        shown += [f"then {json.dumps(request)}", _as_text(play.run())]
    assert fold(play.events) == play.state
    return "\n".join(shown)


def _as_text(state):
    verdict = json.dumps(rounded(to_json(state.verdict)) if state.verdict else None)
    runs = [f"{run.number}:{_check(run)}" for run in state.trials if run.check is not None]
    trials = [f"{one.status} {len(one.attempts)}" for one in state.trials if one.check is None]
    names = ("status", "finish_reason", "best_trial", "num_searched", "num_checks", "num_requests", "left_out")
    fields = {name: getattr(state, name) for name in names}
    fields |= {"finalists": state.proof and state.proof.finalists, "fastest": [one.number for one in state.fastest]}
    fields["set aside"] = [(one.finalists, one.cause) for one in state.set_aside]
    note = report_markdown(make_short_report(state, summarize(state, "sqlite:///x"))).splitlines()
    return "\n".join(
        [
            f"verdict: {verdict}",
            *(f"{name}: {value}" for name, value in fields.items() if value),
            f"trials: {', '.join(trials)}",
            *(" ".join(line.split()) for line in runs),
            *(f"note: {line}" for line in note[:3] if line),
        ]
    )


def _check(run):
    check, level = run.check, run.candidate.precision.level
    more = getattr(check, "perturbation", "") or getattr(check, "num_steps", "")
    return f"{check.kind} {getattr(check, 'role', '')} {check.of} {level} {more} {run.status} {len(run.attempts)}"


def rounded(value):
    """What is no default of a report stays; floats keep four digits, which no processor disputes."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items() if one not in (None, [], "", {})}
    return [rounded(one) for one in value] if isinstance(value, list) else value
