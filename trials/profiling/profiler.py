"""Profiles a trial: Chrome traces of its steps, operators and memory, and the graphs that torch.compile compiles."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import logging
import os
import re
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from trials.accelerator.device import is_host, profiler_activity, record_history, synchronize, write_history
from trials.failure import InfeasibleSpec
from trials.files import make_private_folder, write_atomically
from trials.profiling.collectives import CollectiveCounter
from trials.reports import FOLDER_VARIABLE, MemoryPeak, OperatorTime, PhaseTime, ProfileFile, RankProfile, StepTimes
from trials.sizes import coordinates
from trials.spec import Layout, ProfileSpec, Protocol, TrialSpec
from trials.training.loop import Trainer
from trials.training.measure import PHASES, StepClock, StepTiming

# ---- Chrome traces of torch's profiler: where the time of a step goes, and what is added for people who open one
#
# Times are seconds unless a name ends in ``_us``. Intervals are pairs ``(start, end)``; :func:`union` makes sets of
# them, sorted and disjoint. What is added: a name for the rank, and tracks with the step's phases and the allocated
# memory.

Interval = tuple[float, float]
Event = Mapping[str, Any]

MARK = "phase_end:"
"""Beginning of the name of an event that marks the end of a phase of the step."""
PHASES_TRACK = 9_999_999
"""Id of the track of phases, which no thread has: ``pid_max`` is lower."""
_STEP = re.compile(r"ProfilerStep#\d+")
"""Names that the profiler gives the steps it records."""
_MEMORY = "[memory]"
"""Name of the events that tell of an allocation."""
_NUMBERS = {"cpu": 0, "cuda": 1, "xpu": 12, "npu": 20}
"""The numbers of torch's types of devices (``c10::DeviceType``); packages that add one share the last."""
_CPU_COLLECTIVE = re.compile(r"gloo:|mpi:")
"""Names of ranges from the start of a collective to its end."""
_CPU_COMMUNICATION = re.compile(r"c10d|wait_tensor|gloo:|mpi:|record_param_comms")
"""Names of operators that start collectives or wait for them."""
_COMPILED = re.compile(r"CompiledFunction|Torch-Compiled Region")
"""Names of calls into compiled code, whose own kernels leave no events."""


def load_trace(path: Path) -> dict[str, Any]:
    """A Chrome trace as JSON, maybe compressed (``.gz``)."""
    data = path.read_bytes()
    trace: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return trace


def lasting(trace: Mapping[str, Any]) -> list[Event]:
    """The events of a trace with a duration."""
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def step_times(events: Iterable[Event]) -> tuple[StepTimes, ...]:
    """Times of every profiled step, in order."""
    events = list(events)
    communication, computation = _activity(events)
    covered = union([*communication, *computation])
    steps = [(start_us / 1e6, end_us / 1e6) for start_us, end_us in step_ranges(events)]
    return tuple(
        StepTimes(
            total_s=length([step]),
            computation_s=length(intersect(computation, [step])),
            communication_s=length(intersect(communication, [step])),
            uncovered_communication_s=length(intersect(subtract(communication, computation), [step])),
            free_s=length(subtract([step], covered)),
        )
        for step in steps
    )


def _activity(events: list[Event]) -> tuple[list[Interval], list[Interval]]:
    """Intervals of communication and of computation: the accelerator's if the trace has kernels, else the CPU's."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if kernels:
        is_nccl = ["nccl" in event["name"].lower() for event in kernels]
        return (
            union(_interval(event) for event in itertools.compress(kernels, is_nccl)),
            union(_interval(event) for event, nccl in zip(kernels, is_nccl, strict=True) if not nccl),
        )
    communication = union(_interval(event) for event in events if _CPU_COLLECTIVE.match(event["name"]))
    return communication, _cpu_computation([event for event in events if event.get("cat") == "cpu_op"])


def _cpu_computation(operators: list[Event]) -> list[Interval]:
    """Intervals of torch's operators and compiled code, less waiting for collectives inside of them.

    Autograd's events do not count: they enclose waiting and Python as well as the operators of the backward pass.
    """
    computing = [event for event in operators if _is_computation(event["name"])]
    waiting = [event for event in operators if _CPU_COMMUNICATION.search(event["name"])]
    return subtract(union(map(_interval, computing)), union(map(_interval, waiting)))


def is_operator(name: str) -> bool:
    """Whether this event on the CPU is an operator of torch, or a call into compiled code."""
    return ("::" in name and "autograd::" not in name) or _COMPILED.search(name) is not None


def _is_computation(name: str) -> bool:
    return is_operator(name) and not _CPU_COMMUNICATION.search(name)


def _interval(event: Event) -> Interval:
    """The event's interval in seconds; Chrome traces count microseconds."""
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def mean_times(steps: Sequence[StepTimes]) -> StepTimes:
    """Means over one step or more."""
    means = {field.name: statistics.fmean(getattr(step, field.name) for step in steps) for field in fields(StepTimes)}
    return StepTimes(**means)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The points in any of the intervals; touching ones become one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(whole: list[Interval], holes: list[Interval]) -> list[Interval]:
    """The points of ``whole`` in none of ``holes``. Linear in their numbers."""
    left: list[Interval] = []
    first = 0
    for start, end in whole:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        for hole_start, hole_end in itertools.takewhile(lambda hole: hole[0] < end, holes[first:]):  # noqa: B023
            if hole_start > start:
                left.append((start, hole_start))
            start = max(start, hole_end)
        if start < end:
            left.append((start, end))
    return left


def intersect(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """The points that lie in both."""
    return subtract(one, subtract(one, other))


def length(intervals: list[Interval]) -> float:
    """Sum of the intervals' lengths."""
    return sum(end - start for start, end in intervals)


def name_process(trace: dict[str, Any], pid: int, name: str, sort_index: int) -> None:
    """Give the process a name and a place among others, for when traces of several ranks are opened together."""
    events = trace["traceEvents"]
    kinds = ("process_name", "process_sort_index")
    events[:] = [event for event in events if event.get("name") not in kinds or event.get("pid") != pid]
    events[:0] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": sort_index}},
    ]


def phase_ranges(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The phases of every step as events, from the marks at their ends."""
    ranges: list[dict[str, Any]] = []
    for start_us, end_us in step_ranges(trace["traceEvents"]):
        marks = [event for event in trace["traceEvents"] if _is_mark(event) and start_us <= event["ts"] <= end_us]
        ends = [(start_us, ""), *sorted((mark["ts"], mark["name"].removeprefix(MARK)) for mark in marks)]
        for (begin_us, _), (mark_us, name) in itertools.pairwise(ends):
            ranges.append({"ph": "X", "cat": "phase", "name": name, "ts": begin_us, "dur": mark_us - begin_us})
    return ranges


def step_ranges(events: Iterable[Event]) -> list[Interval]:
    """Start and end of every recorded step, in the trace's microseconds."""
    steps = (event for event in events if event.get("cat") == "user_annotation" and _STEP.fullmatch(event["name"]))
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in steps)


def show_phases(trace: dict[str, Any], pid: int) -> None:
    """Put :func:`phase_ranges` in place of the marks."""
    ranges = phase_ranges(trace)
    events = trace["traceEvents"]
    events[:] = [event for event in events if not _is_mark(event)]
    name = {"name": "phases of the step (host)"}
    events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": PHASES_TRACK, "ts": 0, "args": name})
    events.extend({**event, "pid": pid, "tid": PHASES_TRACK} for event in ranges)


def memory_curve(trace: Mapping[str, Any], device: str) -> list[tuple[float, int]]:
    """Time in microseconds and bytes allocated on the device, after every allocation.

    On the CPU bytes count from the start of the recording.
    """
    wanted = _NUMBERS[device]
    curve = [
        (event["ts"], int(event["args"]["Total Allocated"]))
        for event in trace["traceEvents"]
        if event.get("name") == _MEMORY and event["args"].get("Device Type") == wanted
    ]
    return sorted(curve)


def show_memory(trace: dict[str, Any], pid: int, curve: Sequence[tuple[float, int]]) -> None:
    """Draw the curve, in place of the events it came from."""
    events = trace["traceEvents"]
    events[:] = [event for event in events if event.get("name") != _MEMORY]
    events.extend(
        {"ph": "C", "name": "allocated memory", "pid": pid, "ts": ts_us, "args": {"bytes": size}}
        for ts_us, size in curve
    )


def phase_at(ranges: Iterable[Event], ts_us: float) -> str:
    """The phase of the step at this time; empty between steps."""
    return next((event["name"] for event in ranges if event["ts"] <= ts_us <= event["ts"] + event["dur"]), "")


def _is_mark(event: Event) -> bool:
    return str(event.get("name", "")).startswith(MARK)


# Finds the operators that take most time, from the events of a trace. Pure.


MAX_OPERATORS = 20
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what an operator has the accelerator do."""


@dataclass(slots=True)
class _Sum:
    num_calls: int = 0
    cpu_us: float = 0.0
    device_us: float = 0.0


def top_operators(events: Iterable[Event], steps_us: Sequence[Interval]) -> tuple[OperatorTime, ...]:
    """Times per step of the longest operators; ``steps_us`` are the steps in the trace's microseconds."""
    events = list(events)
    operators = [event for event in events if event.get("cat") == "cpu_op" and _is_inside(event, steps_us)]
    device_us = _device_times(events)
    sums: dict[str, _Sum] = defaultdict(_Sum)
    for operator, own_us in _own_times(operators):
        launched_us = device_us.get(_external_id(operator), 0.0)
        if launched_us or is_operator(operator["name"]):
            entry = sums[operator["name"]]
            entry.num_calls += 1
            entry.cpu_us += own_us
            entry.device_us += launched_us
    return _longest(sums, len(steps_us), on_device=any(entry.device_us for entry in sums.values()))


def _longest(sums: Mapping[str, _Sum], num_steps: int, *, on_device: bool) -> tuple[OperatorTime, ...]:
    def own_us(entry: _Sum) -> float:
        return entry.device_us if on_device else entry.cpu_us

    total_us = sum(map(own_us, sums.values())) or 1.0
    longest = sorted(sums.items(), key=lambda item: (-own_us(item[1]), item[0]))[:MAX_OPERATORS]
    return tuple(
        OperatorTime(
            name=name,
            num_calls=entry.num_calls / num_steps,
            cpu_s=entry.cpu_us / 1e6 / num_steps,
            device_s=entry.device_us / 1e6 / num_steps,
            share=own_us(entry) / total_us,
        )
        for name, entry in longest
    )


def _own_times(operators: Iterable[Event]) -> list[tuple[Event, float]]:
    """Every operator with its duration less that of the operators it calls, which lie within it on its thread."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for operator in operators:
        threads[operator["pid"], operator["tid"]].append(operator)
    own: list[tuple[Event, float]] = []
    for calls in threads.values():
        open_calls: list[int] = []
        for call in sorted(calls, key=lambda call: (call["ts"], -call["dur"])):
            while open_calls and _end_us(own[open_calls[-1]][0]) <= call["ts"]:
                open_calls.pop()
            if open_calls:
                caller, left_us = own[open_calls[-1]]
                own[open_calls[-1]] = caller, left_us - call["dur"]
            open_calls.append(len(own))
            own.append((call, call["dur"]))
    return [(call, max(0.0, own_us)) for call, own_us in own]


def _device_times(events: Iterable[Event]) -> dict[Any, float]:
    """Microseconds on the accelerator by the id of the operator that launched them."""
    times: dict[Any, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in _DEVICE and (launcher := _external_id(event)) is not None:
            times[launcher] += event["dur"]
    return times


def _external_id(event: Event) -> Any:
    return event.get("args", {}).get("External id")


def _is_inside(event: Event, steps_us: Sequence[Interval]) -> bool:
    return any(start_us <= event["ts"] <= end_us for start_us, end_us in steps_us)


def _end_us(event: Event) -> float:
    return float(event["ts"] + event["dur"])


# ---- Writes the FX graphs of what torch.compile compiles as text, with the shapes of every value

logger = logging.getLogger(__name__)

_TRACE = "torch.__trace"
"""The logger that torch tells what it compiles, in as much detail as there is, if anybody listens."""
_GRAPHS = {
    "dynamo_output_graph": "traced",
    "aot_forward_graph": "forward",
    "aot_backward_graph": "backward",
    "aot_inference_graph": "inference",
}
MAX_GRAPHS = 100
"""Most files per rank: recompilations may have no end."""


class _Writer(logging.Handler):
    """Graphs of one compilation share its number: ``rank0.graph-0-0.forward.txt``, ``rank0.graph-0-0.backward.txt``.

    Where DDP has one cut to pieces, at its buckets, the later ones are ``rank0.graph-0-0-part2.forward.txt`` and so on.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        super().__init__(logging.DEBUG)
        self._folder = folder
        self._prefix = prefix
        self.num_graphs = 0
        self._parts: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        told = getattr(record, "metadata", {})
        what = next((word for name, word in _GRAPHS.items() if name in told), None)
        text = getattr(record, "payload", None)
        if what is None or not isinstance(text, str):
            return
        self.num_graphs += 1
        if self.num_graphs > MAX_GRAPHS:
            return
        number = f"{told.get('frame_id', 0)}-{told.get('frame_compile_id', 0)}"
        self._parts[number, what] += 1
        if (part := self._parts[number, what]) > 1:
            number = f"{number}-part{part}"
        try:
            write_atomically(self._folder / f"{self._prefix}.graph-{number}.{what}.txt", [text.encode()], mode=0o600)
        except OSError as error:  # training goes on without
            logger.warning("cannot write a graph: %s", error)


@contextlib.contextmanager
def dumped_graphs(folder: Path, prefix: str) -> Iterator[_Writer]:
    """Write the graphs that are compiled inside to ``folder``.

    The compiler's caches are off inside: what comes from them has no graphs.
    """
    writer = _Writer(folder, prefix)
    trace = logging.getLogger(_TRACE)
    trace.addHandler(writer)
    try:
        with torch.compiler.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
            yield writer
    finally:
        trace.removeHandler(writer)


# Records some steps of some ranks with torch's profiler, and counts the collectives of one further step.


_GRAPH_MODE = (
    "collectives were counted in a step without graph mode, which makes the same ones unless the compiler moves them"
)


def check_profile(spec: ProfileSpec) -> None:
    """Refuse steps that cannot be recorded.

    Raises:
        InfeasibleSpec: names the rule and the remedy.
    """
    if spec.start_step < 1:
        raise InfeasibleSpec(f"profile.start_step is {spec.start_step}; steps count from 1")
    if spec.stop_step < spec.start_step:
        raise InfeasibleSpec(
            f"profile.stop_step {spec.stop_step} comes before start_step {spec.start_step}; both are recorded, so make "
            "stop_step at least start_step"
        )


def last_step(spec: ProfileSpec) -> int:
    """The step after which the run may end; it counts collectives after the recorded ones."""
    return spec.stop_step + spec.communication


def long_enough(protocol: Protocol, spec: ProfileSpec) -> Protocol:
    """A protocol that ends with the last step needed: what it measures counts for nothing."""
    num_warmup = max(protocol.min_warmup_steps, 1)
    num_steps = max(1, last_step(spec) - num_warmup)
    return replace(protocol, max_warmup_steps=num_warmup, num_steps=num_steps, max_steps=num_steps)


def profiled_ranks(spec: ProfileSpec, layout: Layout) -> tuple[int, ...]:
    """The ranks asked for that exist; else, and by default, the first of every pipeline stage."""
    asked = tuple(rank for rank in sorted(set(spec.ranks)) if 0 <= rank < layout.world_size)
    return asked or tuple(range(0, layout.world_size, layout.world_size // layout.pp))


def folder_of_environment() -> Path | None:
    """The folder that the launcher wants a profile's files in; None where it wants none."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else None


class Profiler(StepClock):
    """The clock of a run that is recorded; on ranks that are not, it takes part in what all must do alike.

    Args:
        folder: takes the rank's files; if it is None, none are written.
    """

    def __init__(self, trial: TrialSpec, rank: int, device: torch.device, folder: Path | None) -> None:
        super().__init__(device)
        self.late = 0  # a step that is recorded is alone on the device
        assert trial.profile is not None
        self._spec = trial.profile
        self._trial = trial
        self._layout = trial.candidate.layout
        self._rank = rank
        self._place = coordinates(self._layout, rank)
        self._folder = folder
        self._is_recorded = rank in profiled_ranks(self._spec, self._layout)
        self._models: list[nn.Module] = []
        self._counter: CollectiveCounter | None = None
        self._profile: Any = None
        self._number = 0
        self._phases_s: list[dict[str, float]] = []
        self._notes: list[str] = []
        self._around_step = contextlib.ExitStack()

    @contextlib.contextmanager
    def watching(self, trainer: Trainer, tuned_until: int) -> Iterator[None]:
        """Context of the whole run; ``tuned_until`` is the last step in which kernels are being chosen."""
        self._models = [part.model for part in trainer.parts]
        if not self._is_recorded:
            yield
            return
        if self._spec.start_step <= tuned_until:
            self._notes.append(f"kernels were being tuned until step {tuned_until}: later steps are faster")
        if self._folder is not None:
            make_private_folder(self._folder)
        with contextlib.ExitStack() as stack:
            if self._folder is not None and self._trial.candidate.kernels.compile != "off":
                dump = stack.enter_context(dumped_graphs(self._folder, f"rank{self._rank}"))
            else:
                dump = None
            yield
        if dump is not None and dump.num_graphs > MAX_GRAPHS:
            self._notes.append(f"{dump.num_graphs} graphs were compiled; the first {MAX_GRAPHS} are written")

    def start(self) -> None:
        self._number += 1
        if self._is_recorded and self._number == max(1, self._spec.start_step - 1):
            self._profile = self._prepared()
        if self._profile is not None and self._number == self._spec.start_step:
            self._profile.start_trace()
        if self._spec.communication and self._number == self._spec.stop_step + 1:
            self._begin_counting()
        synchronize(self._device)
        super().start()
        if self._is_recording:
            self._around_step.enter_context(record_function(f"ProfilerStep#{self._number}"))

    def mark(self, phase: str) -> None:
        super().mark(phase)
        if self._is_recording:
            with record_function(MARK + phase):
                pass

    def stop(self) -> StepTiming:
        timing = super().stop()
        _, phases_s = timing.read()
        self._around_step.close()
        if self._is_recording:
            self._phases_s.append(phases_s)
            if self._number == self._spec.stop_step:
                self._end_recording()
        return timing

    @property
    def _is_recording(self) -> bool:
        return self._is_recorded and self._spec.start_step <= self._number <= self._spec.stop_step

    def _prepared(self) -> Any:
        """The profiler one step before it records: CUPTI takes its time to start."""
        activities = [ProfilerActivity.CPU]
        if (own := profiler_activity(self._device)) is not None:
            activities.append(own)
            if self._spec.memory:
                record_history(self._device)
        profiler = profile(
            activities=activities,
            record_shapes=True,
            profile_memory=self._spec.memory,
            with_stack=self._spec.stack,
            acc_events=True,  # of the one cycle there is; older torch warns of losing those of others
        )
        profiler.prepare_trace()
        return profiler

    def _end_recording(self) -> None:
        self._profile.stop_trace()
        if not is_host(self._device) and self._spec.memory and self._folder is not None:
            snapshot = self._folder / f"rank{self._rank}.memory.pickle"
            if write_history(self._device, snapshot):
                snapshot.chmod(0o600)

    def _begin_counting(self) -> None:
        """Graph mode is off in this step, on all ranks or none: the compiler may order collectives differently."""
        if self._trial.candidate.kernels.compile != "off":
            self._around_step.enter_context(torch.compiler.set_stance("force_eager"))
        if self._is_recorded:
            self._counter = CollectiveCounter(self._models, self._layout)
            self._around_step.enter_context(self._counter.counting())

    def report(self, alive: Callable[[], None]) -> tuple[RankProfile, ...]:
        """What was recorded; nothing on ranks that were not. Writes the trace.

        A large trace takes minutes; ``alive`` is called in between, for those who watch over the rank.
        """
        if self._profile is None:
            return ()
        alive()
        trace = self._exported()
        alive()
        phases = phase_ranges(trace)
        curve = memory_curve(trace, self._device.type) if self._spec.memory else []
        events = lasting(trace)
        times = mean_times(step_times(events))
        operators = top_operators(events, step_ranges(events))
        alive()
        self._write_files(trace, curve)
        alive()
        counter = self._counter
        return (
            RankProfile(
                rank=self._rank,
                stage=self._place.pp,
                first_step=self._spec.start_step,
                last_step=self._spec.stop_step,
                times=times,
                phases=self._phase_times(),
                operators=operators,
                collectives=() if counter is None else counter.counts(),
                redundancies=() if counter is None else counter.redundancies(),
                counted=counter is not None,
                memory=self._peak(curve, phases),
                folder="" if self._folder is None else str(self._folder),
                files=self._files(),
                notes=self._all_notes(),
            ),
        )

    def _exported(self) -> dict[str, Any]:
        """The trace as torch writes it."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            return load_trace(path)

    def _write_files(self, trace: dict[str, Any], curve: Sequence[tuple[float, int]]) -> None:
        if self._folder is None:
            return
        pid = os.getpid()
        place = ", ".join(f"{axis} {at}" for axis, at in asdict(self._place).items() if getattr(self._layout, axis) > 1)
        name_process(trace, pid, f"rank {self._rank}" + (f" ({place})" if place else ""), self._rank)
        show_phases(trace, pid)
        if self._spec.memory:
            show_memory(trace, pid, curve)
        path = self._folder / f"rank{self._rank}.trace.json.gz"
        write_atomically(path, [gzip.compress(json.dumps(trace).encode(), compresslevel=6)], mode=0o600)

    def _files(self) -> tuple[ProfileFile, ...]:
        if self._folder is None:
            return ()
        own = sorted(self._folder.glob(f"rank{self._rank}.*"))
        return tuple(ProfileFile(name=path.name, num_bytes=path.stat().st_size) for path in own)

    def _phase_times(self) -> tuple[PhaseTime, ...]:
        means = {name: statistics.fmean(phases_s[name] for phases_s in self._phases_s) for name in PHASES}
        return tuple(PhaseTime(name=name, time_s=time_s) for name, time_s in means.items() if time_s)

    def _all_notes(self) -> tuple[str, ...]:
        notes = list(self._notes)
        if self._counter is not None and self._trial.candidate.kernels.compile != "off":
            notes.append(_GRAPH_MODE)
        if absent := [rank for rank in self._spec.ranks if rank >= self._layout.world_size]:
            notes.append(f"the run has {self._layout.world_size} ranks: no rank {', '.join(map(str, absent))}")
        return tuple(notes)

    def _peak(self, curve: Sequence[tuple[float, int]], phases: Sequence[Any]) -> MemoryPeak | None:
        if not curve:
            return None
        ts_us, peak_bytes = max(curve, key=lambda point: point[1])
        start_bytes = 0 if is_host(self._device) else curve[0][1]
        return MemoryPeak(peak_bytes=peak_bytes, start_bytes=start_bytes, phase=phase_at(phases, ts_us))
