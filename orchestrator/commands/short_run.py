"""``tune-cluster check``: one short run of a sweep's smallest candidate, which catches mistakes early."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from packaging.specifiers import SpecifierSet

from cluster.base import ClusterRequest, GangLaunch, GangProgress
from cluster.connect import connect
from cluster.cost.cost_model import OUT_OF_MEMORY_THRESHOLD
from cluster.hardware.topology import Placement, Topology
from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.controller.runtime import LeaseManager, Runtime, SteadyClock, make_launcher, preload
from orchestrator.frameworks.edit import Training
from orchestrator.planning.dry_runs import cluster_request, known_topology
from orchestrator.planning.planner import make_plan
from orchestrator.planning.predictions import relative_predictor
from orchestrator.proof.confirmation import MIN_SOAK_S
from orchestrator.search.knob_effects import memory_shares
from orchestrator.search.predictor import UnpredictableError
from orchestrator.search.search import Search
from orchestrator.space.inside import MICRO_BATCH, NOTHING_INSIDE, InsideBaseline, knobs_set
from orchestrator.space.knobs import is_inside, roles_of
from orchestrator.space.notation import flat_params, short_name
from orchestrator.sweep.events import Budget, Hardware, SweepCreated
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Home
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.text import plain, tail
from trials.files import to_json
from trials.outcome import Evidence, GangLost, Infeasible, Measured, Measurement, Outcome
from trials.reports import ScriptReport
from trials.script.command import ALL_OPTIONS, Expected
from trials.spec import Candidate, Protocol

SHORT = Protocol(min_warmup_steps=1, max_warmup_steps=1, num_steps=2, max_steps=2)
"""Steps of the run: the first compiles, the other two can be compared."""
MIN_STARTING_S = 600.0
"""Minimum time allowed for the start, so that the actual time can be reported."""
DEADLINE_FACTOR = 3.0
"""Factor from the measured start to a deadline that leaves room for compilation and a busy host."""
_REMEDIES = {
    "the world size": "Set cluster.devices_per_node to the number of ranks that the program starts; if it starts them "
    "itself, also set launcher: own.",
    "samples per micro-batch": "Correct baseline.micro_batch_size, or the argument that takes {micro_batch_size}: "
    "`tune-cluster init -- COMMAND` finds the option that acts.",
    "micro-batches per step": "Correct global_batch_size, or the argument that takes {accumulation}; use "
    "{total_accumulation} if the program divides it by the number of ranks.",
    "samples per optimiser step": "Set workload.global_batch_size to the program's number.",
    "the number format": "Correct baseline.precision, or omit precision if the program decides it.",
    "data loader workers": "Correct the argument that takes {num_workers}, or omit num_workers.",
    "recompute, but each layer": "Omit recompute, or correct the argument that turns it on.",
    "never reads": "Correct the name of the option, or remove it from space.own and baseline.own.",
}
"""Remedy for a knob without effect, by words of the reason."""
SILENCE_S = 30.0
"""Interval without a step after which the end of the program's output is shown, in seconds."""
MAX_LOG_LINES = 20
PYTHONS = ("python", "python3")
"""Commands that are looked up on PATH."""
Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedDuration:
    """Expected duration of the sweep if every launch takes as long to start and per step as the checked one."""

    num_trials: int
    least_s: float
    most_s: float
    """Duration with the maximum steps per trial and rounds of confirmation that the file allows."""


def expected_duration(spec: SweepSpec, num_legal: int, *, starting_s: float, step_s: float) -> ExpectedDuration:
    """The time of the search, with trials one after another, the confirmation, the loss gate and the soak; at most the
    wall time of the budget.

    Args:
        num_legal: candidates that may be tried.
        starting_s: from the launch to the first step.
        step_s: time of a step.
    """
    trials = min(spec.budget.max_trials, num_legal)
    measure, confirm, gate = spec.measure, spec.confirm.to_settings(), spec.gate.to_settings()
    num_finalists = min(confirm.num_finalists, trials - 1) if spec.confirm.is_on else 0
    gate_s = 2 * (starting_s + gate.num_steps * step_s) if spec.gate.is_on and num_finalists else 0.0

    def total_s(num_steps: int, num_rounds: int) -> float:
        launches = trials + (num_rounds * (1 + num_finalists) if num_finalists else 0)
        soak_s = max(MIN_SOAK_S, num_rounds * num_steps * step_s) if confirm.soak_s is None else confirm.soak_s
        soaks_s = 2 * (starting_s + soak_s) if soak_s and num_finalists else 0.0
        return launches * (starting_s + num_steps * step_s) + gate_s + soaks_s

    limit_s = spec.budget.wall_time_s or math.inf
    return ExpectedDuration(
        num_trials=trials,
        least_s=min(limit_s, total_s(measure.min_warmup_steps + measure.num_steps, confirm.min_rounds)),
        most_s=min(limit_s, total_s(measure.max_warmup_steps + measure.max_steps, confirm.max_rounds)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedInside:
    """The result of another run with knobs of ``space.inside``."""

    knobs: tuple[str, ...]
    """The knobs that it set, by their keys in the hook's file."""
    applied: tuple[tuple[str, ...], ...]
    """Pairs of knob and observation, if all take effect."""
    problem: str | None
    """Which knobs have no effect, and why; or how the run failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedMemory:
    """What the peak of a custom program consists of, and what follows for the sweep."""

    peak_bytes: int
    """Peak of the fullest rank."""
    limit_bytes: int
    weights_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    sample_bytes: int
    """Activations per sample of the micro-batch."""
    num_fitting: int
    """Candidates that are expected to fit."""
    num_candidates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of a short run."""

    sweep: str
    candidate: str
    """The candidate, in short notation."""
    values: dict[str, Any]
    """The candidate, knob by knob."""
    command: tuple[str, ...]
    """The command of a rank, with placeholders for the trial's files."""
    outcome: Outcome
    starting_s: float | None
    """Seconds from the launch to the first step; None: no step was made."""
    deadline_s: float
    """The file's deadline for starting."""
    duration_s: float
    training: Training | None = None
    """The program's framework; None for the built-in runner."""
    expected: ExpectedDuration | None = None
    """Expected duration of the sweep; None if no step was measured."""
    global_batch_size: int = 0
    """Samples per optimiser step in the sweep file."""
    seq_length: int = 1
    """Tokens per sample in the sweep file; 1: not counted."""
    data_parallel: int = 1
    """Number of data-parallel ranks."""
    memory: CheckedMemory | None = None
    """None if the peak was not split, or memory has no limit."""
    inside: CheckedInside | None = None
    """Whether the program accepts the knobs of ``space.inside``; None without that section, or if it was not run."""

    @property
    def measurement(self) -> Measurement | None:
        return self.outcome.measurement if isinstance(self.outcome, Measured) else None

    @property
    def evidence(self) -> Evidence | None:
        return None if isinstance(self.outcome, Measured) else self.outcome.evidence

    @property
    def is_good(self) -> bool:
        return self.measurement is not None and not self.contradiction

    @property
    def contradiction(self) -> str:
        """Contradictions between the program and the sweep file or its recipe."""
        return self.other_batch or self.longer_samples or self.unknown_release

    @property
    def seen_batch(self) -> int | None:
        """Samples per optimiser step as observed inside the program; None if not observed."""
        samples = self.seen.facts.samples_per_step
        return None if samples is None else samples * self.data_parallel

    @property
    def other_batch(self) -> str:
        """The contradiction between the program's batch size and ``workload.global_batch_size``, if any."""
        seen, facts = self.seen_batch, self.seen.facts
        if seen is None or self.global_batch_size == seen:
            return ""
        if facts.backwards_per_step is None and self.global_batch_size == (facts.micro_batch_size or 0) * (
            self.data_parallel
        ):
            return ""  # models may run forward several times for one micro-batch, as those of a GAN do
        return (
            f"global_batch_size is {self.global_batch_size}, but the program trains {seen} samples per optimiser step "
            f"({facts.micro_batch_size} per micro-batch, {facts.micro_batches} micro-batches, "
            f"{self.data_parallel} data-parallel ranks)"
        )

    @property
    def longer_samples(self) -> str:
        """The problem if samples have more tokens than ``workload.seq_length``. Shorter samples may be specific to this
        batch, and one extra token is the label of the last one."""
        seen = self.seen.facts.seq_length
        if seen is None or self.seq_length <= 1 or seen <= self.seq_length + 1:
            return ""
        return f"seq_length is {self.seq_length}, but the program's samples have {seen} tokens"

    @property
    def unknown_release(self) -> str:
        """A warning if the recipe does not support the framework's release, in which names may have other meanings;
        empty if it does, or the release is unknown."""
        if self.training is None or not self.training.releases:
            return ""
        package = _module(self.training.package or "")
        seen = {_module(name): version for name, version, *_ in self.seen.versions}
        if package not in seen or SpecifierSet(self.training.releases, prereleases=True).contains(seen[package]):
            return ""
        known = f"{self.training.title} {seen[package]} is not a release that its recipe supports"
        doubt = "its arguments may have other meanings; --no-check submits anyway"
        return f"{known} ({self.training.releases}): {doubt}"

    @property
    def seen(self) -> ScriptReport:
        """The observations of a custom program; empty for others."""
        found = self.measurement.findings.script if self.measurement is not None else None
        return found or ScriptReport()

    @property
    def facts(self) -> dict[str, Any]:
        """The values observed inside the program, by name."""
        facts = self.seen.facts
        named = {field.name: getattr(facts, field.name) for field in fields(facts)}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def is_not_applied(self) -> bool:
        """Whether the program trained something other than the candidate."""
        return isinstance(self.outcome, Infeasible) and "not applied" in self.outcome.evidence.message

    @property
    def needed_starting_s(self) -> int | None:
        """A better ``deadlines.starting_s``, if the file's leaves too little room."""
        if self.starting_s is None or self.starting_s * DEADLINE_FACTOR <= self.deadline_s:
            return None
        return round(self.starting_s * DEADLINE_FACTOR / 60 + 0.5) * 60

    @property
    def remedy(self) -> str | None:
        """Remedy for a differing number, or for a module that is missing in the Python on PATH."""
        if self.is_not_applied and self.evidence is not None:
            return next((words for sign, words in _REMEDIES.items() if sign in self.evidence.message), None)
        if self.measurement is not None and self.other_batch:
            return f"Set workload.global_batch_size: {self.seen_batch}, or correct baseline.micro_batch_size."
        if self.longer_samples:
            return f"Set workload.seq_length: {self.seen.facts.seq_length}."
        if not self.command or self.command[0] not in PYTHONS or self.evidence is None:
            return None
        if "No module named" not in self.evidence.message:
            return None
        found = shutil.which(self.command[0])
        here = f", {found} on this host" if found else ""
        return (
            f"{self.command[0]} is the one on PATH{here}: activate your environment, or use the full path of its"
            " Python in workload.run"
        )

    @property
    def log_tail(self) -> tuple[str, ...]:
        """The last lines of the rank that failed."""
        return self.evidence.log_tail[-MAX_LOG_LINES:] if self.evidence is not None else ()

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``check --json``."""
        found, evidence = self.measurement, self.evidence
        return {
            "sweep": self.sweep,
            "ok": self.is_good,
            "candidate": self.candidate,
            "knobs": self.values,
            "command": list(self.command),
            "outcome": self.outcome.kind,
            "problem": evidence.message if evidence else self.contradiction or None,
            "remedy": self.remedy,
            "not_applied": self.is_not_applied,
            "exit_code": evidence.exit_code if evidence else None,
            "log_tail": list(self.log_tail),
            "step_time_s": found.step_time_s if found else None,
            "sources": [to_json(value) for value in self.seen.sources],
            "facts": self.facts,
            "versions": {name: version for name, version, *_ in self.seen.versions},
            "notes": list(self.seen.notes),
            "starting_s": self.starting_s,
            "starting_deadline_s": self.deadline_s,
            "needed_starting_s": self.needed_starting_s,
            "duration_s": self.duration_s,
            "expected": to_json(self.expected) if self.expected is not None else None,
            "memory": to_json(self.memory) if self.memory is not None else None,
            "inside": to_json(self.inside) if self.inside is not None else None,
        }


def check_file(file: Path, home: Home, *, address: str | None = None, notify: Notify | None = None) -> Checked:
    """Run the smallest candidate of a sweep file for a few steps, and again with the knobs of ``space.inside``.

    Args:
        address: of the Ray cluster, instead of the one in the file.
        notify: receives progress messages.

    Raises:
        ConfigError: the file, or a cluster on which nothing runs.
        ClusterError: no lease, or the candidate does not fit.
    """
    spec = load_sweep(file, address=address)
    checked = check_sweep(spec, home, address=address, notify=notify)
    return replace(checked, inside=_check_inside(spec, home, address, notify)) if checked.is_good else checked


def _check_inside(spec: SweepSpec, home: Home, address: str | None, notify: Notify | None) -> CheckedInside | None:
    """Run the candidate with the most inside knobs that otherwise resembles the smallest one."""
    today = NOTHING_INSIDE if spec.script is None else spec.script.inside
    topology = known_topology(spec, home, address=address)
    least, _ = smallest(spec, topology)
    table = make_plan(spec, topology).candidates
    of_layout = table.codes["layout"] == table.places["layout"].get(least.layout, -1)
    of_batch = table.codes["micro_batch_size"] == table.places["micro_batch_size"].get(least.micro_batch_size, -1)
    alike = table.take(np.flatnonzero(of_layout if MICRO_BATCH in today.values else of_layout & of_batch))
    chosen = max(alike, key=lambda one: _informativeness(one, least, today), default=least)
    knobs = knobs_set(chosen, today)
    if not knobs:
        return None
    report_line = notify or (lambda _: None)
    report_line(f"running {short_name(chosen)} again with the knobs of space.inside")
    outcome = run_once(spec, chosen, home, report_line, address=address).outcome
    found = outcome.measurement.findings.script if isinstance(outcome, Measured) else None
    return CheckedInside(
        knobs=tuple(knobs),
        applied=found.knobs if found is not None else (),
        problem=None if isinstance(outcome, Measured) else outcome.evidence.message,
    )


def _informativeness(one: Candidate, least: Candidate, today: InsideBaseline) -> tuple[Any, ...]:
    """How well the candidate shows which knobs the program accepts: nothing else differs, and no knob hides another."""
    command = [[choice for choice in each.own if not is_inside(choice.name)] for each in (one, least)]
    return (
        command[0] == command[1],
        one.kernels.compile == "off",  # a compiled model ignores recompute
        sum(len(value) if isinstance(value, Mapping) else 1 for value in knobs_set(one, today).values()),
        -one.micro_batch_size,
    )


def check_sweep(spec: SweepSpec, home: Home, *, address: str | None = None, notify: Notify | None = None) -> Checked:
    """The same for a parsed sweep."""
    if spec.cluster.kind not in ("ray", "local"):
        raise spec.error(
            ("cluster", "kind"), f"{spec.cluster.kind} clusters cannot run trials", "Use 'ray' or 'local'."
        )
    report_line = notify or (lambda _: None)
    topology = known_topology(spec, home, address=address)
    candidate, num_legal = smallest(spec, topology)
    begun_s = time.monotonic()
    report_line(f"running {short_name(candidate)} for {SHORT.min_warmup_steps + SHORT.num_steps} steps")
    ran = run_once(spec, candidate, home, report_line, address=address)
    expected = memory = None
    if isinstance(ran.outcome, Measured):
        memory = _memory(spec, topology, candidate, ran.outcome.measurement)
    if isinstance(ran.outcome, Measured) and ran.starting_s is not None:
        step_s = ran.outcome.measurement.step_time_s
        expected = expected_duration(spec, num_legal, starting_s=ran.starting_s, step_s=step_s)
    return Checked(
        sweep=spec.name,
        candidate=short_name(candidate),
        values=flat_params(candidate),
        command=ran.command,
        outcome=ran.outcome,
        starting_s=ran.starting_s,
        deadline_s=spec.to_deadlines().starting_s,
        duration_s=time.monotonic() - begun_s,
        training=None if spec.script is None else spec.script.training,
        expected=expected,
        memory=memory,
        global_batch_size=spec.to_workload().global_batch_size,
        seq_length=spec.to_workload().seq_length,
        data_parallel=candidate.layout.dp,
    )


def _memory(
    spec: SweepSpec, topology: Topology | None, candidate: Candidate, measured: Measurement
) -> CheckedMemory | None:
    """The peak taken apart, and how many candidates fit by the memory that the search predicts from it."""
    shares = memory_shares(measured)
    if shares is None or measured.findings.script is None:
        return None
    plan = make_plan(spec, topology)
    try:
        predictor = relative_predictor(plan, spec.to_workload(), topology, roles=roles_of(spec.custom_knobs))
    except UnpredictableError:
        return None
    row, num = predictor.candidates.row_of(candidate), len(plan.candidates)
    belief = None if row is None else predictor.memory_given({row: shares})
    if row is None or belief is None:
        return None
    fits = belief.after({row: measured.peak_bytes / predictor.limit_bytes}, (), ()).probability_fits()[:num]
    facts = measured.findings.script.facts
    per_sample = shares.activations * measured.peak_bytes / (facts.micro_batch_size or candidate.micro_batch_size)
    return CheckedMemory(
        peak_bytes=measured.peak_bytes,
        limit_bytes=int(predictor.limit_bytes),
        weights_bytes=facts.parameter_bytes_local or 0,
        gradient_bytes=facts.gradient_bytes or 0,
        optimizer_bytes=facts.optimizer_bytes or 0,
        sample_bytes=round(per_sample),
        num_fitting=int((fits >= 1 - OUT_OF_MEMORY_THRESHOLD).sum()),
        num_candidates=num,
    )


def _module(package: str) -> str:
    """A common form of pip's and Python's names of a package."""
    name = package.replace("-", "_").replace(".", "_")
    return {"swift": "ms_swift", "lightning": "pytorch_lightning"}.get(name, name)


def _once(notify: Notify) -> Notify:
    """The same, without immediate repetitions."""
    last: list[str] = []

    def report_line(line: str) -> None:
        if last != [line]:
            last[:] = [line]
            notify(line)

    return report_line


def smallest(spec: SweepSpec, topology: Topology | None) -> tuple[Candidate, int]:
    """The smallest candidate, by nodes and memory, and the number of legal candidates.

    Raises:
        ConfigError: as :func:`orchestrator.planning.planner.make_plan`.
    """
    plan = make_plan(spec, topology)
    today = NOTHING_INSIDE if spec.script is None else spec.script.inside
    devices = topology.nodes[0].num_devices if topology is not None else 8

    def needs(candidate: Candidate) -> tuple[Any, ...]:
        layout = candidate.layout
        return (
            layout.world_size > devices,
            len(knobs_set(candidate, today)),  # the program may not accept knobs that are set inside it
            candidate.kernels.compile != "off",
            candidate.micro_batch_size,
            layout.zero_stage == 0,
            not candidate.recompute.full,
            -layout.world_size,
        )

    different, _ = plan.candidates.combinations(("layout", "kernels.compile", "micro_batch_size", "recompute"))
    least: Candidate = min((plan.baseline, *plan.candidates.take(different)), key=needs)
    return least, len(plan.candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The result of a launch."""

    command: tuple[str, ...]
    outcome: Outcome
    starting_s: float | None
    waited_s: float
    """Seconds before its launch, most of them spent waiting for devices that others hold."""


def _request(spec: SweepSpec, home: Home, address: str | None, candidate: Candidate) -> ClusterRequest:
    """Only the nodes that the candidate needs; this host without Ray if the sweep would start Ray on it."""
    request = cluster_request(spec, home, address=address)
    per_node = request.devices_per_node
    nodes = 1 if per_node is None else -(-candidate.layout.world_size // per_node)
    kind = "local" if request.address is None and nodes == 1 else request.kind
    claim = replace(request.claim, min_nodes=nodes, max_nodes=nodes) if request.claim is not None else None
    return replace(request, kind=kind, min_nodes=nodes, max_nodes=nodes, claim=claim)


def run_once(
    spec: SweepSpec,
    candidate: Candidate,
    home: Home,
    report_line: Notify,
    *,
    address: str | None = None,
    step_within_s: float | None = None,
) -> Ran:
    """Run the candidate for a few steps, as the only trial of a sweep whose ledger is deleted afterwards.

    Args:
        step_within_s: time limit for the first step, in seconds, of a run whose facts are only recorded; None: facts
            are compared with the candidate, and the program has time to start.
    """
    folder = home.path / "checks" / f"{spec.name}-{uuid4().hex[:8]}"
    try:
        return _run(
            spec, candidate, _request(spec, home, address, candidate), folder, _once(report_line), step_within_s
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another one may run at the same time
            folder.parent.rmdir()


def _run(
    spec: SweepSpec,
    candidate: Candidate,
    request: ClusterRequest,
    folder: Path,
    report_line: Notify,
    step_within_s: float | None,
) -> Ran:
    begun_s = time.monotonic()
    measure = spec.measure.model_copy(update={name: getattr(SHORT, name) for name in _COUNTS})
    short = spec.model_copy(update={"measure": measure})
    attempts = folder / "attempts"
    with (
        Ledger(folder) as ledger,
        ledger.hold(),
        connect(request, workdir=attempts, on_wait=report_line, preload=preload(spec)) as cluster,
    ):
        topology, clock = cluster.topology, SteadyClock()
        ledger.append(
            SweepCreated(
                at_s=clock(),
                sweep=spec.name,
                spec_hash=spec.spec_hash,
                workload=spec.to_workload(),
                budget=Budget(max_trials=1),
                max_concurrent=1,
                num_legal=1,
                hardware=topology.label,
                devices=Hardware.of(topology),
                cluster_kind=spec.cluster.kind,
                fingerprint={},
            )
        )
        launcher = make_launcher(short, topology, attempts)
        watch = _Watch(launcher.build, attempts, report_line, step_within_s)
        state = Runtime(
            ledger=ledger,
            cluster=cluster,
            search=Search([candidate], features=flat_params, sampler="grid"),
            launcher=replace(launcher, baseline=candidate, isolation="node", build=watch.build),
            projections=(),
            observer=watch,
            lease=LeaseManager(cluster, request.claim),
            clock=clock,
        ).run()
    outcome = state.trials[0].outcome
    assert outcome is not None, "the sweep is over"
    return Ran(
        command=watch.command,
        outcome=outcome,
        starting_s=watch.starting_s,
        waited_s=min(watch.launches_s, default=time.monotonic()) - begun_s,
    )


class _Watch:
    """Gives launches time to start, and reports the trial's progress."""

    def __init__(
        self,
        build: Callable[[Trial, str, str, Placement], GangLaunch],
        attempts: Path,
        report_line: Notify,
        step_within_s: float | None,
    ) -> None:
        self._build = build
        self._step_within_s = step_within_s
        self._attempts = attempts
        self._report_line = report_line
        self._launched_at_s = self._reported_at_s = math.inf
        self.launches_s: list[float] = []
        self.command: tuple[str, ...] = ()
        self.starting_s: float | None = None

    def build(self, trial: Trial, attempt_id: str, token: str, placement: Placement) -> GangLaunch:
        """The gang as the sweep would launch it, with more time to start."""
        if trial.attempts and isinstance(lost := trial.attempts[-1].outcome, GangLost):
            self._report_line(f"the gang was lost; launching again: {lost.evidence.message}")
        built = self._build(trial, attempt_id, token, placement)
        argv = built.spec.get("argv", ())
        self.command = tuple(map(str, argv)) if isinstance(argv, list | tuple) else ()
        self._launched_at_s = self._reported_at_s = time.monotonic()
        self.launches_s.append(self._launched_at_s)
        self.starting_s = None
        if self._step_within_s is not None:
            unspoken = {"expected": to_json(Expected()), "options": [ALL_OPTIONS]}
            deadlines = replace(built.deadlines, starting_s=self._step_within_s, warmup_s=self._step_within_s)
            return replace(built, spec={**built.spec, **unspoken}, deadlines=deadlines)
        start_s = max(MIN_STARTING_S, built.deadlines.starting_s)
        return replace(built, deadlines=replace(built.deadlines, starting_s=start_s))

    def on_state(self, state: SweepState) -> None:  # noqa: ARG002
        now_s = time.monotonic()
        if self.starting_s is None and now_s > self._reported_at_s + SILENCE_S:
            self._reported_at_s = now_s
            self._report_line(f"no step after {now_s - self._launched_at_s:.0f} s{_last_line(self._attempts)}")

    def on_progress(self, trial: int, progress: GangProgress) -> None:  # noqa: ARG002
        if progress.step and self.starting_s is None:
            self.starting_s = time.monotonic() - self._launched_at_s - (progress.step_time_s or 0.0)
            self._report_line(f"first step {self.starting_s:.1f} s after the launch")

    def on_lease(self, nodes: Sequence[str], waiting: str) -> None:
        """The lease is as large as the candidate needs."""


_COUNTS = ("min_warmup_steps", "max_warmup_steps", "num_steps", "max_steps")


def _last_line(attempts: Path) -> str:
    """The last line of the first rank's output, if it is on this host."""
    lines = [line for path in attempts.glob("*/rank0.log") for line in tail(path, 1).lines]
    return f"; last output: {plain(lines[-1])[:200]}" if lines else ""
