"""A profile from the recordings of a training program's hook: two traces, and the facts recorded with them. Pure.

The first trace has the recorded steps unchanged. The second has one more step with module names and allocations, which
take time to record. Autograd's sequence numbers identify a module's backward pass: an operator of the forward pass and
the node that it created have the same one.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trials.files import make_private_folder, write_atomically
from trials.profiling.traces import (
    COLLECTIVES,
    GRADIENTS,
    STEP,
    Event,
    Interval,
    cast_share,
    general_path,
    idle_gaps,
    intersect,
    lasting,
    length,
    load_trace,
    mean_times,
    memory_curve,
    name_process,
    num_waits,
    step_ranges,
    step_times,
    subtract,
    top_operators,
    union,
)
from trials.reports import CollectiveCount, CompileEvent, MemoryPeak, PeakTensor, PhaseTime, ProfileFile, RankProfile

WINDOW, STEPS_TRACE, MODULES_TRACE, SNAPSHOT = "window.json", "steps.json", "modules.json", "memory.pickle"
"""Files from the hook, prefixed with ``rankN.``; the window is written last, when the others are complete."""
BACKENDS = ("gloo:", "nccl:")
"""Prefixes of the ranges of a backend's collectives, which contain the types of tensors. NCCL's are known only from its
source."""
MODULE = "tc.module:"
"""Prefix of the name of a range for a module's forward pass."""
FORWARD = "tc.forward"
"""Name of the range for the whole model's forward pass."""
# Reading a larger trace would take minutes, and many times its size in memory.
MAX_RAW_BYTES = 1 << 30
MAX_TENSORS = 10

_WRAPPERS = re.compile(r"^(?:(?:module|_orig_mod|_fsdp_wrapped_module|_forward_module)(?:\.|$))+")
"""Prefixes that wrappers add to module names."""
_INNER = re.compile(r"\.?\b(?:_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\b")
_PASS = "autograd::engine::evaluate_function: "
_ACCUMULATES = "torch::autograd::AccumulateGrad"
_RECEIVES_FIRST = re.compile(r"allgather|_allgather|reduce_scatter|_reduce_scatter|alltoall|gather|scatter")
"""Collectives of process groups whose first argument is the receive buffer."""
_SIZES = {"double": 8, "long": 8, "int64": 8, "half": 2, "bfloat16": 2, "short": 2, "bool": 1, "char": 1, "byte": 1}
"""Bytes per element by torch's name of the format; 4 for all others."""
_DEVICES = ("cuda", "xpu", "npu")


class UnreadableProfile(ValueError):  # noqa: N818  # named after the finding
    """The hook's files cannot be read."""


def windows(folder: Path) -> list[Path]:
    """Return the windows of the ranks that report to ``folder``."""
    return sorted(folder.glob(f"rank*.{WINDOW}"))


def read_window(path: Path, folder: Path, alive: Callable[[], None]) -> RankProfile:
    """Read the profile of the rank that wrote the window; put its trace in ``folder``, named after the rank.

    Raises:
        UnreadableProfile: a file is missing, too large or not a trace.
    """
    window: dict[str, Any] = json.loads(path.read_bytes())
    rank = int(window["rank"])
    trace = _raw(path, rank, STEPS_TRACE)
    alive()
    events = lasting(trace)
    steps_us = step_ranges(events)
    if not steps_us:
        raise UnreadableProfile(f"the trace of rank {rank} contains no step")
    step = _raw(path, rank, MODULES_TRACE) if window.get("modules") else None
    alive()
    modules = None if step is None else ModuleStep(step["traceEvents"])
    profile = RankProfile(
        rank=rank,
        stage=0,
        first_step=int(window["first"]),
        last_step=int(window["last"]),
        times=mean_times(step_times(events)),
        phases=_phases(events, steps_us),
        operators=top_operators(events, steps_us),
        collectives=() if modules is None else modules.collectives(int(window["world_size"])),
        memory=None if step is None or modules is None else _memory(step, modules, window),
        gaps=idle_gaps(events, steps_us),
        cast_share=cast_share(events, steps_us),
        num_waits=num_waits(events, steps_us),
        compilations=tuple(_compilations(window)),
        folder=str(folder),
        files=tuple(_kept(path, folder, trace, rank)),
        notes=tuple(map(str, window.get("notes", ()))),
    )
    alive()
    return profile


def _raw(path: Path, rank: int, kind: str) -> dict[str, Any]:
    raw = path.with_name(f"rank{rank}.{kind}")
    try:
        if raw.stat().st_size > MAX_RAW_BYTES:
            raise UnreadableProfile(
                f"the trace of rank {rank} is larger than {MAX_RAW_BYTES >> 30} GiB; record fewer steps"
            )
        return load_trace(raw)
    except (OSError, ValueError) as error:
        if isinstance(error, UnreadableProfile):
            raise
        raise UnreadableProfile(f"the trace of rank {rank} cannot be read: {error}") from error


def _kept(path: Path, folder: Path, trace: dict[str, Any], rank: int) -> Iterator[ProfileFile]:
    """Keep the rank's files in the profile's folder."""
    make_private_folder(folder)
    pid = next((event["pid"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"), 0)
    name_process(trace, pid, f"rank {rank}", rank)
    data = gzip.compress(json.dumps(trace).encode(), compresslevel=6)
    kept = {f"rank{rank}.trace.json.gz": data}
    snapshot = path.with_name(f"rank{rank}.{SNAPSHOT}")
    if snapshot.is_file():
        kept[snapshot.name] = snapshot.read_bytes()
    for name, content in kept.items():
        write_atomically(folder / name, [content], mode=0o600)
        yield ProfileFile(name=name, num_bytes=len(content))


def _compilations(window: Mapping[str, Any]) -> Iterator[CompileEvent]:
    for compilation in window.get("compilations", ()):
        yield CompileEvent(
            kind="recompilation" if compilation["kind"] == "recompilation" else "graph break",
            place=str(compilation["place"]),
            reason=str(compilation["reason"]),
            num_times=int(compilation["times"]),
        )


def _phases(events: Sequence[Event], steps_us: Sequence[Interval]) -> tuple[PhaseTime, ...]:
    """Return seconds per step of the host's phases, from the ranges set by torch and the hook."""

    def found(is_of: Callable[[str], bool]) -> list[Interval]:
        return union((event["ts"], event["ts"] + event["dur"]) for event in events if is_of(event["name"]))

    ranges = {
        "data": found(lambda name: name.startswith("enumerate(DataLoader)")),
        "optimizer": found(lambda name: name.startswith("Optimizer.step#")),
        "forward": found(lambda name: name == FORWARD),
        "backward": found(lambda name: name.startswith(_PASS)),
    }
    taken: list[Interval] = []
    seconds: dict[str, float] = {}
    steps = list(steps_us)
    for name in ("backward", "forward", "data", "optimizer"):  # Lightning's passes are inside the optimiser's step
        seconds[name] = length(intersect(subtract(ranges[name], taken), steps)) / 1e6 / len(steps)
        taken = union([*taken, *ranges[name]])
    seconds["other"] = length(subtract(steps, taken)) / 1e6 / len(steps)
    return tuple(PhaseTime(name=name, time_s=seconds[name]) for name in sorted(seconds) if seconds[name] > 0)


@dataclass(frozen=True, slots=True)
class _StepPlace:
    """Position of an event in the step."""

    module: str
    phase: str
    operator: str


class ModuleStep:
    """The step with named modules: what happened in which of them."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = list(events)
        self._threads: dict[Any, list[Event]] = defaultdict(list)
        for event in self.events:
            if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation"):
                self._threads[event["tid"]].append(event)
        self._starts: dict[Any, list[float]] = {}
        self._stacks: dict[Any, list[tuple[Event, ...]]] = {}
        for thread, calls in self._threads.items():
            self._nest(thread, calls)
        self._owners = self._owners_of_nodes()

    def _nest(self, thread: Any, calls: list[Event]) -> None:
        """For every start or end of a call, store the open calls from then on, the outermost first."""
        edges = [(call["ts"], 1, -call["dur"], call) for call in calls]
        edges += [(call["ts"] + call["dur"], 0, -call["dur"], call) for call in calls]
        edges.sort(key=lambda edge: edge[:3])
        stack: list[Event] = []
        starts: list[float] = []
        stacks: list[tuple[Event, ...]] = []
        for at_us, is_start, _, call in edges:
            if is_start:
                stack.append(call)
            else:
                stack = [one for one in stack if one is not call]
            starts.append(at_us)
            stacks.append(tuple(stack))
        self._starts[thread], self._stacks[thread] = starts, stacks

    def open_at(self, thread: Any, at_us: float) -> tuple[Event, ...]:
        """Return the open calls of a thread, the outermost first."""
        starts = self._starts.get(thread, [])
        at = bisect.bisect_right(starts, at_us) - 1
        return self._stacks[thread][at] if at >= 0 else ()

    def _owners_of_nodes(self) -> dict[int, str]:
        """Map the number of every graph node to its module."""
        owners: dict[int, str] = {}
        for thread, calls in self._threads.items():
            for call in calls:
                number = call.get("args", {}).get("Sequence number")
                if number is None or call["args"].get("Fwd thread id") or call["name"].startswith(_PASS):
                    continue
                module = _module(self.open_at(thread, call["ts"]))
                if module is not None:
                    owners.setdefault(int(number), module)
        return owners

    def place(self, thread: Any, at_us: float) -> _StepPlace:
        """Return a thread's position in the step."""
        stack = self.open_at(thread, at_us)
        node = next((call for call in reversed(stack) if call["name"].startswith(_PASS)), None)
        module = _module(stack)
        operator = next((call["name"] for call in reversed(stack) if "::" in call["name"] and call is not node), "")
        if node is None:
            is_optimizer = any(call["name"].startswith("Optimizer.step#") for call in stack)
            phase = "optimizer" if is_optimizer else "forward" if module is not None else STEP
            return _StepPlace(module if module is not None else STEP, phase, operator)
        if module is not None:
            return _StepPlace(module, "recompute", operator)
        name = node["name"].removeprefix(_PASS)
        if name == _ACCUMULATES:
            return _StepPlace(GRADIENTS, "backward", operator)
        owner = self._owners.get(int(node.get("args", {}).get("Sequence number", -1)), STEP)
        return _StepPlace(owner, "backward", operator or name)

    def collectives(self, world_size: int) -> tuple[CollectiveCount, ...]:
        """Count the collectives of the step by module."""
        sizes = self._element_sizes()
        totals: dict[tuple[str, str, str, int], tuple[int, int]] = {}
        for thread, calls in self._threads.items():
            for call in calls:
                kind = _collective(call)
                outer = () if kind is None else self.open_at(thread, call["ts"])
                if kind is None or any(one is not call and _collective(one) and _holds(one, call) for one in outer):
                    continue
                place = self.place(thread, call["ts"])
                phase = STEP if place.phase == "optimizer" else place.phase
                key = place.module, phase, kind, self._group_size(call) or world_size
                count, num_bytes = totals.get(key, (0, 0))
                totals[key] = count + 1, num_bytes + _sent_bytes(call, sizes)
        return tuple(
            CollectiveCount(
                module=module,
                phase=phase,
                kind=kind,
                axis="all" if size == world_size else "group",
                group_size=size,
                num_calls=count,
                num_bytes=num_bytes,
            )
            for (module, phase, kind, size), (count, num_bytes) in totals.items()
        )

    def _group_size(self, call: Event) -> int | None:
        """Return the size of a collective's group, if torch recorded it among the parameters."""
        for inner in self._threads[call["tid"]]:
            if inner["name"] == "record_param_comms" and _holds(call, inner):
                size = inner.get("args", {}).get("Group size")
                return int(size) if size else None
        return None

    def _element_sizes(self) -> dict[int, deque[int]]:
        """Map numbers of elements sent to bytes per element, from the ranges of the backend's collectives, in order."""
        found: dict[int, deque[int]] = defaultdict(deque)
        for event in self.events:
            if str(event.get("name", "")).startswith(BACKENDS):
                args = event.get("args", {})
                for dims, kind in zip(args.get("Input Dims", ()), args.get("Input type", ()), strict=False):
                    found[_numel(dims)].append(_size_of(kind))
        return found


def _collective(call: Event) -> str | None:
    """Return the kind of collective that an operator starts; None for all others."""
    return COLLECTIVES.get(call["name"].replace("::", ".", 1))


def _holds(outer: Event, inner: Event) -> bool:
    return bool(
        outer["tid"] == inner["tid"]
        and outer["ts"] <= inner["ts"]
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    )


def _module(stack: Sequence[Event]) -> str | None:
    """Return the general name of the innermost module among open calls."""
    name = next((call["name"] for call in reversed(stack) if call["name"].startswith(MODULE)), None)
    return None if name is None else module_name(name.removeprefix(MODULE))


def module_name(path: str) -> str:
    """Return a module's path without wrapper prefixes, and with ``*`` for numbers."""
    return general_path(_INNER.sub("", _WRAPPERS.sub("", path)).lstrip("."))


def _numel(dims: Any) -> int:
    """Count the elements of a tensor, or of all in a list."""
    if dims and isinstance(dims[0], list):
        return sum(map(_numel, dims))
    product = 1
    for size in dims or ():
        product *= int(size)
    return product


def _size_of(kind: str) -> int:
    return _SIZES.get(str(kind).lower().removeprefix("c10::"), 4)


def _sent_bytes(call: Event, sizes: Mapping[int, deque[int]]) -> int:
    """Return the bytes that a collective sends, from the shapes of its argument."""
    args = call.get("args", {})
    dims, kinds = args.get("Input Dims", ()), args.get("Input type", ())
    is_later = call["name"].startswith("c10d::") and _RECEIVES_FIRST.match(call["name"].removeprefix("c10d::"))
    at = 1 if is_later and len(dims) > 1 and dims[1] else 0
    if at >= len(dims):
        return 0
    numel = _numel(dims[at])
    if kinds and at < len(kinds) and kinds[at] != "TensorList":
        return numel * _size_of(kinds[at])
    queue = sizes.get(numel)
    return numel * ((queue.popleft() if len(queue) > 1 else queue[0]) if queue else 4)


@dataclass(slots=True)
class _Alive:
    """A tensor that existed before the step or was created in it."""

    module: str
    what: str
    num_bytes: int


def _memory(step: dict[str, Any], modules: ModuleStep, window: Mapping[str, Any]) -> MemoryPeak | None:
    """Return the step's memory peak, with the largest tensors alive at that time."""
    device = window.get("device", "cpu")
    curve = memory_curve(step, device if device in _DEVICES else "cpu")
    if not curve:
        return None
    peak_us, highest = max(curve, key=lambda point: point[1])
    held = window.get("tensors", ())
    start_bytes = int(window.get("start_bytes", 0))
    alive = {
        int(one["address"]): _Alive(module_name(str(one["module"])), str(one["what"]), int(one["bytes"]))
        for one in held
    }
    for event in sorted(_allocations(modules.events, device), key=lambda event: event["ts"]):
        if event["ts"] > peak_us:
            break
        address, size = int(event["args"]["Addr"]), int(event["args"]["Bytes"])
        if size < 0:
            alive.pop(address, None)
        else:
            place = modules.place(event["tid"], event["ts"])
            alive[address] = _Alive(place.module, f"{place.phase}: {place.operator}".rstrip(": "), size)
    at = next((event for event in modules.events if event.get("ts") == peak_us and "tid" in event), None)
    return MemoryPeak(
        peak_bytes=highest if device in _DEVICES else start_bytes + highest,
        start_bytes=start_bytes,
        phase="" if at is None else modules.place(at["tid"], peak_us).phase,
        tensors=_largest(alive.values()),
    )


def _allocations(events: Iterable[Event], device: str) -> Iterator[Event]:
    for event in events:
        if event.get("name") == "[memory]":
            is_host = event["args"].get("Device Type") == 0
            if is_host == (device not in _DEVICES):
                yield event


def _largest(alive: Iterable[_Alive]) -> tuple[PeakTensor, ...]:
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for one in alive:
        count, size = sums.get((one.module, one.what), (0, 0))
        sums[one.module, one.what] = count + 1, size + one.num_bytes
    largest = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))[:MAX_TENSORS]
    return tuple(
        PeakTensor(module=module, what=what, num_tensors=count, num_bytes=size)
        for (module, what), (count, size) in largest
    )
