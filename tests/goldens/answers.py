"""Questions of one line and their answers: ``answers/KIND.txt`` holds both, with ``> `` before each question.

A case is added by writing its question there. ``python -m tests.goldens.answers --write`` answers all of them again; an
answer that changes on purpose is written again, and its diff read.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import shlex
import sys
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

from orchestrator.config.queue_policy import load_policy
from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.controller.step import decide, step
from orchestrator.errors import ConfigError
from orchestrator.frameworks.catalog import export, training
from orchestrator.frameworks.launchers import program_of, without_launcher
from orchestrator.planning.planner import make_plan
from orchestrator.report.summary import cost, summarize
from orchestrator.space.notation import legend, short_name, spelled
from orchestrator.space.rules import check
from orchestrator.sweep.events import (
    ActionRequested,
    Budget,
    BudgetChanged,
    CandidatesPruned,
    ControllerStarted,
    FinalistsChosen,
    FinishCause,
    LeaseChanged,
    SearchExhausted,
    SweepFinished,
    SweepPaused,
    Tick,
    TrialsRetried,
)
from orchestrator.sweep.fold import fold
from orchestrator.sweep.snapshot import Home
from orchestrator.sweep.state import SweepState, end_of_search
from tests.goldens import frameworks as programs_of
from tests.goldens import outside
from tests.orchestrator.frameworks import commands, programs
from tests.orchestrator.frameworks.configurations import WORKLOAD
from tests.orchestrator.proof import gates, play
from tests.orchestrator.space.candidate_strategies import canonicalize
from tests.support.story import created, ended, evidence, failures, launched, measured, not_believed, proposed
from tests.support.sweep_files import FULL, LINEAR, RESNET, SIMULATED, SMALL, changed, topology, write
from trials.files import from_json, to_json
from trials.outcome import GangLost, HostOutOfMemory
from trials.patterns import pattern_problem
from trials.spec import Candidate, LinearModel, ResNetModel

FOLDER = Path(__file__).with_name("answers")
KINDS = {}
"""By kind: what answers a question."""


def kind(answer):
    KINDS[answer.__name__] = answer
    return answer


def differing(value, default):
    """What of nested JSON is not the default."""
    if not (isinstance(value, dict) and isinstance(default, dict)):
        return value
    found = {key: differing(one, default.get(key)) for key, one in value.items() if one != default.get(key)}
    return {key: one for key, one in found.items() if one != {}}


def merged(value, changes):
    if not (isinstance(value, dict) and isinstance(changes, dict)):
        return changes
    return value | {key: merged(value.get(key), one) for key, one in changes.items()}


# ---- sweep files ----

FILES = {
    "FULL": changed(FULL, ("cluster", "address"), "local"),  # data and programs are read where they are here
    "RAY": FULL,
    "LOCAL": {**SMALL, "cluster": {"kind": "local", "devices_per_node": 2}},
    "RESNET": RESNET,
    "LINEAR": LINEAR,
    "SIMULATED": SIMULATED,
}


@kind
def sweep_files(question):
    """``BASE PATH VALUE``: a right file in which one value is another; ``TEXT TEXT``: all of it. As JSON each."""
    with _folder() as folder:
        try:
            spec = load_sweep(write(folder, content_of(question)))
            key = re.findall(r"[a-z_]+", question)[:2]
            read = f"accepted: {_read(spec, key)}"
            if question.startswith("LOCAL"):
                plan = make_plan(spec, topology(2))
                names = " | ".join(map(short_name, plan.candidates))
                read += f"\n{names}; {plan.num_duplicates} duplicates, rejected {dict(plan.num_rejected)}"
            return read
        except ConfigError as error:
            return _without(folder, error)


def content_of(question):
    """The whole sweep file."""
    base, rest = question.split(" ", 1)
    if base == "TEXT":
        return json.loads(rest).encode("latin-1", "surrogatepass")
    path, at = json.JSONDecoder().raw_decode(rest)
    value = json.loads(rest[at:])
    return changed(FILES[base], path, value) if path else FILES[base] | value


def _read(spec, path):
    found = spec.to_json()
    for part in path:
        found = found.get(part, found) if isinstance(found, dict) else found
    return json.dumps(found)


def _without(folder, error):
    return str(error).replace(f"{folder}/", "").replace(str(folder), "/folder")


@kind
def queue_policies(question):
    """The text of a ``queue.yaml``, as JSON."""
    with _folder() as folder:
        (folder / "queue.yaml").write_text(json.loads(question))
        try:
            return repr(load_policy(Home(folder)))
        except ConfigError as error:
            return _without(folder, error)


@contextlib.contextmanager
def _folder():
    env = {name: text for name, text in os.environ.items() if name not in ("RAY_ADDRESS", "TEAM_WEBHOOK")}
    with tempfile.TemporaryDirectory() as name, mock.patch.dict(os.environ, env, clear=True):
        yield Path(name).resolve()


# ---- candidates ----

MODELS = {
    "LLAMA": SweepSpec.model_validate(SMALL).to_workload().model,
    "RESNET": ResNetModel(),
    "LINEAR": LinearModel(),
}


@kind
def candidates(question):
    """``MODEL CANDIDATE``, of a candidate what is no default: its canonical form, its name, and the rules it breaks."""
    model, rest = question.split(" ", 1)
    written = from_json(Candidate, merged(to_json(Candidate()), json.loads(rest)))
    found = canonicalize(written, MODELS[model])
    workload = dataclasses.replace(SweepSpec.model_validate(SMALL).to_workload(), model=MODELS[model])
    broken = [f"{one.rule_id}: {one.reason}" for one in check(found, workload)] if model == "LLAMA" else []
    as_written = [f"as written {one.rule_id}: {one.reason}" for one in check(written, workload)]
    return "\n".join(
        [
            json.dumps(differing(to_json(found), to_json(Candidate()))),
            short_name(found),
            " | ".join(f"{sign} {meaning}" for sign, meaning in spelled(found)),
            " | ".join(f"{sign} {meaning}" for sign, meaning in legend([found])),
            *broken,
            *(line for line in as_written if line.removeprefix("as written ") not in broken),
        ]
    )


@kind
def patterns(question):
    """A regular expression for names of modules: what is wrong with it."""
    return str(pattern_problem(question.replace("EMPTY", "")))


# ---- frameworks ----


@functools.cache
def _folder_of_programs():
    return programs.written(programs_of.folder())


def command(name, words=(), env=None):
    """A framework and its command, with words added; words that begin with ``python`` take its place."""
    words = tuple(words)
    if name in commands.FRAMEWORKS:
        run = commands.program(name, env=env)
        at = next((at for at, word in enumerate(run.argv) if word.startswith("activation-checkpoint:")), len(run.argv))
        return training(name), dataclasses.replace(run, argv=(*run.argv[:at], *words, *run.argv[at:]))
    known, run = programs.program(name, _folder_of_programs(), **(env or {}))
    argv = words if words[:1] == ("python",) else (*run.argv, *words)
    paths = known.find_files(argv, run.cwd)
    files = {name: Path(run.cwd, paths[name]).read_text() for name in paths}
    return known, dataclasses.replace(run, argv=argv, paths=paths, files=files)


@kind
def readings(question):
    """``KIND [NAME=VALUE ...] WORDS``: a command, with words added, and its reading."""
    name, *words = shlex.split(question)
    env = {}
    while words and words[0].split("=")[0].isupper():
        key, _, value = words.pop(0).partition("=")
        env[key] = value
    known, run = command(name, words, env)
    return programs_of.anywhere(programs_of.reading(known.read(run)))


@kind
def overlays(question):
    """``KIND CHANGES``: a command's own candidate with changes, laid over it: every note."""
    name, rest = question.split(" ", 1)
    changes = json.loads(rest)
    known, run = command(name)
    own = commands.as_it_stands(run, known.name, 8 if name in commands.FRAMEWORKS else 2)
    candidate = commands.canonical(from_json(Candidate, merged(to_json(own), changes)))
    named = {path for part, values in changes.items() for path in _paths(part, values)}
    request = dataclasses.replace(commands.request_for(run, known.name, candidate), named=frozenset(named))
    return programs_of.anywhere(programs_of.notes_of(known.overlay(run, request).notes))


def _paths(part, values):
    return [f"{part}.{name}" for name in values] if isinstance(values, dict) else [part]


@kind
def exports(question):
    """``FORMAT CANDIDATE``: the refusal with every reason, or that it is written."""
    name, rest = question.split(" ", 1)
    candidate = from_json(Candidate, merged(to_json(Candidate()), json.loads(rest)))
    try:
        return f"written: {export(name, candidate, WORKLOAD).command}"
    except ConfigError as error:
        return str(error)


@kind
def launchers(question):
    """A command: itself without its launcher, ranks, and its program."""
    made = without_launcher(tuple(shlex.split(question)))
    program = program_of(made.argv)
    assert (*program.head, *program.arguments) == made.argv
    return f"{shlex.join(made.argv)}\nranks: {made.world_size}\nprogram: {program.name} {list(program.arguments)}"


# ---- courses of a sweep ----

OUTCOMES = {
    **failures(),
    "measured": measured(),
    "not_believed": not_believed(),
    "host_oom": HostOutOfMemory(evidence=evidence("killed by the kernel")),
    "killed": GangLost(cause="killed", evidence=evidence()),
    "controller": GangLost(cause="controller", evidence=evidence()),
    "preempted": GangLost(cause="preempted", evidence=evidence()),
}


class Course:
    """Events in short, one second apart: ``p0`` proposed, ``l0`` launched, ``e0=measured`` ended, ``w0=0.2`` all three
    (a number is a step time), ``ask=pause``, ``paused``, ``started``, ``tick``, ``+60`` later, ``retry=0,1``,
    ``budget:max_trials=3``, ``exhausted``, ``finished=exhausted``, ``cancelled``, ``lease=host``, ``pruned=1``,
    ``finalists``."""

    def __init__(self, settings):
        limits = {name: float(text) if "." in text else int(text) for name, text in settings.items()}
        concurrent = limits.pop("concurrent", 1)
        self.now_s, self.state, self.commands, self.events = 0.0, SweepState(), (), []
        self.attempts, self.num_requests = Counter(), 0
        self.take(created(budget=Budget(**limits), max_concurrent=concurrent))

    def take(self, event):
        self.events.append(event)
        self.state, self.commands = step(self.state, event)

    def does(self, word):
        name, _, value = word.partition("=")
        if name.startswith("+"):
            self.now_s += float(name)
            return
        self.now_s += 1.0
        if name[0] == "w" and name[1:].isdigit():
            for letter in "ple":
                self.trial(letter, int(name[1:]), value)
        elif name[1:].isdigit():
            self.trial(name[0], int(name[1:]), value)
        else:
            self.take(self.other(name, value))

    def trial(self, letter, number, value):
        if letter == "p":
            self.take(proposed(number, at_s=self.now_s))
        elif letter == "l":
            self.take(launched(number, self.attempts[number], at_s=self.now_s))
        else:
            kind, _, message = value.partition(":")
            outcome = OUTCOMES.get(kind) or measured(float(kind))
            outcome = failures(message)[kind] if message else outcome
            attempt = self.attempts[number]
            self.attempts[number] += letter == "e"
            self.take(ended(number, outcome, max(0, attempt - (letter == "x")), at_s=self.now_s))

    def other(self, name, value):
        by = {"at_s": self.now_s, "request": self.num_requests + 1, "by": "eve@host"}
        self.num_requests += name in ("ask", "retry") or name.startswith("budget")
        if name.startswith("budget:"):
            limit = float(value) if "." in value else int(value)
            return BudgetChanged(**by, budget=Budget(**{name.partition(":")[2]: limit}))
        end = end_of_search(self.state)
        return {
            "ask": lambda: ActionRequested(**by, action=value),
            "retry": lambda: TrialsRetried(**by, trials=tuple(map(int, value.split(",")))),
            "paused": lambda: SweepPaused(at_s=self.now_s, reason="paused"),
            "started": lambda: ControllerStarted(at_s=self.now_s, epoch=self.state.epoch + 1, pid=1, host="host"),
            "tick": lambda: Tick(at_s=self.now_s),
            "exhausted": lambda: SearchExhausted(at_s=self.now_s),
            "finished": lambda: self.finished("finished", FinishCause(value) if value else end.cause),
            "failed": lambda: self.finished("failed", FinishCause(value)),
            "cancelled": lambda: self.finished("cancelled", FinishCause.CANCELLED),
            "lease": lambda: LeaseChanged(at_s=self.now_s, nodes=tuple(filter(None, value.split(",")))),
            "pruned": lambda: CandidatesPruned(at_s=self.now_s, witness=int(value), rules={"oom-tp": 3}),
            "finalists": lambda: FinalistsChosen(
                at_s=self.now_s, finalists=(), reason=end.reason, first_check=len(self.state.trials), cause=end.cause
            ),
        }[name]()

    def finished(self, status, cause):
        return SweepFinished(at_s=self.now_s, status=status, reason="reason", cause=cause)


@kind
def courses(question):
    """``SETTINGS; EVENTS``: the commands after each event, and the state in the end."""
    settings, _, words = question.partition("; ")
    course = Course(dict(one.split("=") for one in settings.split()))
    shown = []
    for word in words.split():
        course.does(word)
        shown.append(f"{word}: {', '.join(map(_command, course.commands)) or '-'}")
    state = course.state
    assert fold(course.events) == state
    assert course.commands == decide(state)
    names = (
        "status",
        "finish_reason",
        "requested_action",
        "waiting",
        "best_trial",
        "strikes",
        "exhausted",
        "epoch",
        "num_requests",
    )
    names += ("device_seconds", "active_s", "paused_s", "duration_s")
    reported = {name: getattr(state, name) for name in names}
    reported |= {"end_order": [*state.end_order], "quarantined": sorted(state.quarantined), "pruned": [*state.pruned]}
    reported["trials"] = " ".join(f"{one.status}/{len(one.attempts)}/{one.num_lost}" for one in state.trials)
    reported["budget"] = differing(to_json(state.sweep.budget), to_json(Budget()))
    if state.is_over or state.trials:
        reported["cost"] = cost(summarize(state, ""))
    return "\n".join(
        [*shown, " ".join(f"{name}={value!r}" for name, value in reported.items() if value not in (None, "", [], 0))]
    )


def _command(command):
    values = {field.name: getattr(command, field.name) for field in dataclasses.fields(command)}
    return f"{type(command).__name__}({', '.join(f'{n}={v}' for n, v in values.items() if v not in (None, ()))})"


KINDS |= {"plays": play.played, "gates": gates.gates, "script_gates": gates.script_gates}


# ---- commands ----


@contextlib.contextmanager
def home_of_states():
    """A home with the sweeps of :mod:`tests.goldens.outside`, next to a sweep file and a program."""
    with (
        outside.frozen() as folder,
        outside.kept(folder),
        mock.patch("shutil.which", lambda name, *_: None if name.endswith("-smi") else f"/bin/{name}"),
    ):
        write(folder, SIMULATED)
        (folder / "config.json").write_text("{}")
        (folder / "train.py").write_text("import torch\n---\nx: [")
        yield folder


def refusals(questions):
    """Command lines in one home: exit code and messages."""
    with home_of_states() as folder:
        before = sorted(folder.iterdir())
        said = [outside.plain(outside.run(*shlex.split(one)), folder).partition("\n")[2].rstrip() for one in questions]
        assert sorted(folder.iterdir()) == before, "what is refused leaves nothing behind"
        return said


# ---- the files ----


def read(name):
    """Questions and answers of a kind."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    blocks = [block.partition("\n") for block in ("\n" + text).split("\n> ")[1:]]
    return {question: answer.strip("\n") for question, _, answer in blocks}


def answered(name, questions):
    if name == "refusals":
        return dict(zip(questions, refusals(questions), strict=True))
    return {question: KINDS[name](question).strip("\n") for question in questions}


NAMES = (*KINDS, "refusals")


def _main():
    for name in NAMES:
        found = answered(name, read(name))
        if sys.argv[1:] == ["--write"]:
            text = "\n".join(f"> {question}\n{answer}\n" for question, answer in found.items())
            (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")
        else:
            differences = {question: answer for question, answer in found.items() if read(name)[question] != answer}
            print(*(f"> {question}\n{answer}" for question, answer in differences.items()), sep="\n")


if __name__ == "__main__":
    _main()
