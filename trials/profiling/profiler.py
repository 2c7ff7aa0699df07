"""Profiles of a trial: Chrome traces of its steps, operators and memory, and the graphs compiled by torch.compile."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from trials.accelerator.device import is_host, profiler_activity, record_history, synchronize, write_history
from trials.files import make_private_folder, write_atomically
from trials.profiling.collectives import CollectiveCounter
from trials.profiling.traces import (
    MARK,
    cast_share,
    idle_gaps,
    lasting,
    load_trace,
    mean_times,
    memory_curve,
    name_process,
    num_waits,
    phase_at,
    phase_ranges,
    profiled_ranks,
    show_memory,
    show_phases,
    step_ranges,
    step_times,
    top_operators,
)
from trials.reports import FOLDER_VARIABLE, MemoryPeak, PhaseTime, ProfileFile, RankProfile
from trials.sizes import coordinates
from trials.spec import TrialSpec
from trials.training.loop import Trainer
from trials.training.measure import PHASES, StepClock, StepTiming

# ---- FX graphs from torch.compile as text, with the shapes of every value

logger = logging.getLogger(__name__)

_TRACE = "torch.__trace"
"""Logger that gets full detail about compilations from torch, if it has a handler."""
_GRAPHS = {
    "dynamo_output_graph": "traced",
    "aot_forward_graph": "forward",
    "aot_backward_graph": "backward",
    "aot_inference_graph": "inference",
}
# Recompilations may not end.
MAX_GRAPHS = 100


class _Writer(logging.Handler):
    """Log handler that writes graphs. Those of one compilation share its number: ``rank0.graph-0-0.forward.txt``,
    ``rank0.graph-0-0.backward.txt``.

    If DDP splits one at its buckets, later parts are ``rank0.graph-0-0-part2.forward.txt`` and so on.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        super().__init__(logging.DEBUG)
        self._folder = folder
        self._prefix = prefix
        self.num_graphs = 0
        self._parts: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", {})
        what = next((word for name, word in _GRAPHS.items() if name in metadata), None)
        text = getattr(record, "payload", None)
        if what is None or not isinstance(text, str):
            return
        self.num_graphs += 1
        if self.num_graphs > MAX_GRAPHS:
            return
        number = f"{metadata.get('frame_id', 0)}-{metadata.get('frame_compile_id', 0)}"
        self._parts[number, what] += 1
        if (part := self._parts[number, what]) > 1:
            number = f"{number}-part{part}"
        try:
            write_atomically(self._folder / f"{self._prefix}.graph-{number}.{what}.txt", [text.encode()], mode=0o600)
        except OSError as error:  # training continues without it
            logger.warning("cannot write a graph: %s", error)


@contextlib.contextmanager
def dumped_graphs(folder: Path, prefix: str) -> Iterator[_Writer]:
    """Write the graphs compiled in the body to ``folder``.

    The compiler's caches are off in the body, because cached results have no graphs.
    """
    writer = _Writer(folder, prefix)
    trace = logging.getLogger(_TRACE)
    trace.addHandler(writer)
    try:
        with torch.compiler.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
            yield writer
    finally:
        trace.removeHandler(writer)


# Recording of some steps of some ranks with torch's profiler, and the collectives of one additional step.


_GRAPH_MODE = (
    "collectives were counted in a step without graph mode; compiled steps make the same ones unless the "
    "compiler moves them"
)


def folder_of_environment() -> Path | None:
    """Return the launcher's folder for a profile's files; None if it wants none."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else None


class Profiler(StepClock):
    """The clock of a profiled run; on ranks that are not recorded, it only takes part in collective actions.

    Args:
        folder: folder for the rank's files; if None, none are written.
    """

    def __init__(self, trial: TrialSpec, rank: int, device: torch.device, folder: Path | None) -> None:
        super().__init__(device)
        self.late = 0  # a recorded step must be alone on the device
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
        """Context of the whole run; ``tuned_until`` is the last step in which kernels are tuned."""
        self._models = [part.model for part in trainer.parts]
        if not self._is_recorded:
            yield
            return
        if self._spec.start_step <= tuned_until:
            self._notes.append(f"kernels were tuned until step {tuned_until}: later steps are faster")
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
        """Prepare the profiler one step before it records, because CUPTI is slow to start."""
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
            acc_events=True,  # there is only one cycle; older torch warns about losing events of others
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
        """Graph mode is off in this step, on all ranks or none: the compiler may reorder collectives."""
        if self._trial.candidate.kernels.compile != "off":
            self._around_step.enter_context(torch.compiler.set_stance("force_eager"))
        if self._is_recorded:
            self._counter = CollectiveCounter(self._models, self._layout)
            self._around_step.enter_context(self._counter.counting())

    def report(self, alive: Callable[[], None]) -> tuple[RankProfile, ...]:
        """Write the trace; return what was recorded, nothing on ranks that were not recorded.

        A large trace takes minutes; ``alive`` is called in between, as a heartbeat.
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
        steps_us = step_ranges(events)
        operators = top_operators(events, steps_us)
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
                gaps=idle_gaps(events, steps_us),
                cast_share=cast_share(events, steps_us),
                num_waits=num_waits(events, steps_us),
                folder="" if self._folder is None else str(self._folder),
                files=self._files(),
                notes=self._all_notes(),
            ),
        )

    def _exported(self) -> dict[str, Any]:
        """Return the trace as exported by torch."""
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
            notes.append(f"the run has {self._layout.world_size} ranks, no rank {', '.join(map(str, absent))}")
        return tuple(notes)

    def _peak(self, curve: Sequence[tuple[float, int]], phases: Sequence[Any]) -> MemoryPeak | None:
        if not curve:
            return None
        ts_us, peak_bytes = max(curve, key=lambda point: point[1])
        start_bytes = 0 if is_host(self._device) else curve[0][1]
        return MemoryPeak(peak_bytes=peak_bytes, start_bytes=start_bytes, phase=phase_at(phases, ts_us))
