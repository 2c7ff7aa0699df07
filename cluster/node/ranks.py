"""The ranks of one gang on one node: their processes and their clocks."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from cluster.base import Deadlines
from cluster.gang.environment import NUMA_VARIABLE, rank_env, user_env
from cluster.gang.messages import (
    CompileTime,
    Lines,
    NodeLaunch,
    RankClock,
    RankFailure,
    RankPlace,
    RankProgress,
    RankResult,
    RankSlot,
    RankSuccess,
    due_at_s,
    line,
    overdue_reason,
)
from cluster.hardware.topology import cores_near
from cluster.node.hang import RecordedRank, answer_requests, recorder_env
from cluster.node.load_watch import (
    MIN_SHARED_BYTES,
    OomKills,
    device_names,
    peak_below,
    shared_memory_shortage,
    slot_handles,
)
from cluster.processes import close_inherited, die_with_parent, make_preferred_oom_victim
from trials.accelerator.kinds import DeviceKind, family_of
from trials.failure import InfeasibleSpec, cause_in_log, classify, mentions_abort, of_host
from trials.files import from_json, is_disk_full, to_json, write_atomically
from trials.outcome import Phase, ProgressSink, RankReport
from trials.reports import FOLDER as PROFILE
from trials.reports import FOLDER_VARIABLE as PROFILE_VARIABLE
from trials.reports import ScriptSource
from trials.script.judge import is_of_program
from trials.secrets import redact

# The process of a rank: sets up its environment, calls the runner, reports, exits.


FULL_FRACTION = 0.02
"""Share of free memory below which a device is full: cuBLAS and cuDNN need some hundred MiB of workspace."""

Runner = Callable[[Mapping[str, Any], ProgressSink], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPipes:
    """Descriptors of a rank's pipes from and to its warden."""

    reports: int
    """For progress and the result."""
    requests: int
    """Delivers a byte for every request of the Flight Recorder's record."""


def rank_main(launch: NodeLaunch, slot: RankSlot, pipes: RankPipes, warden_pid: int) -> NoReturn:
    """Run one rank in this freshly forked process. Never returns, so that no code of the parent runs again."""
    code = 1
    try:
        try:
            _set_up(launch, slot, pipes, warden_pid)
        except OSError as error:
            failed = _failure(error, launch, slot, "starting")
            _write(pipes.reports, line(replace(failed, category=of_host(error) or failed.category)))
            raise
        code = _run(launch, slot, pipes.reports)
    except BaseException:  # only the log could show it
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _set_up(launch: NodeLaunch, slot: RankSlot, pipes: RankPipes, warden_pid: int) -> None:
    """Set up this copy of the warden as a rank: signals, descriptors, log, environment."""
    os.setpgid(0, 0)
    die_with_parent(warden_pid)
    signal.set_wakeup_fd(-1)  # the warden's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    make_preferred_oom_victim()
    close_inherited(keep=(pipes.reports, pipes.requests))
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    log = os.open(Path(launch.directory) / f"rank{slot.rank}.log", flags, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(
        {
            PROFILE_VARIABLE: str(Path(launch.directory) / PROFILE),
            **_visible_devices(launch),
            **rank_env(launch, slot),
        }
    )
    folder = Path(launch.directory)
    os.environ.update(recorder_env(folder, user_env(launch)))
    if not launch.is_script:
        recorded = RecordedRank(rank=slot.rank, folder=folder, request_write=-1)
        answer_requests(pipes.requests, recorded.answer)
    _pin_near_devices(launch, slot)
    threads = os.environ["OMP_NUM_THREADS"]
    if (torch := sys.modules.get("torch")) is not None and threads.isdigit():  # torch read it before the fork
        torch.set_num_threads(int(threads))


def _visible_devices(launch: NodeLaunch) -> dict[str, str]:
    """Make the gang's devices on the node visible, as torchrun does: index ``LOCAL_RANK`` is the rank's own."""
    family = family_of(launch.device_kind)
    if not family.visible_variable:
        return {}
    return {family.visible_variable: ",".join(device_names(launch)), **family.order_variables}


def _pin_near_devices(launch: NodeLaunch, slot: RankSlot) -> None:
    """Pin the rank to the cores near the slot's devices before torch starts a thread. Memory is allocated on the socket
    of the core that first touches it."""
    if os.environ.get(NUMA_VARIABLE, "off").lower() in ("off", "0", "false"):
        return
    if near := cores_near(handle.bus_id for handle in slot_handles(launch, slot)):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, near)


def _run(launch: NodeLaunch, slot: RankSlot, pipe: int) -> int:
    reached: Phase = "starting"

    def progress(phase: Phase, *, step: int = 0, step_time_s: float | None = None, is_compiling: bool = False) -> None:
        nonlocal reached
        reached = phase
        _write(pipe, line(RankProgress(phase=phase, step=step, step_time_s=step_time_s, is_compiling=is_compiling)))

    try:
        report = resolve(launch.runner)(launch.spec, progress)
        place = RankPlace(node=launch.node, host=socket.gethostname(), device=_device(slot))
        result: RankResult = RankSuccess(rank=slot.rank, report=from_json(RankReport, report), place=place)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the log is on a full disk
            if is_of_program(error):  # its own message precedes it, and matters more
                sys.stderr.write(f"tune-cluster: {error}\n")
            else:
                traceback.print_exc()
        result = _failure(error, launch, slot, reached)
    with contextlib.suppress(OSError):  # the message counts; the file is for controllers that die before receiving it
        _store(launch, slot, result)
    _write(pipe, line(result))
    _leave(result)
    return 0 if isinstance(result, RankSuccess) else 1


def _leave(result: RankResult) -> None:
    """Leave the gang after sending the result. Errors here do not change it."""
    mesh: Any = sys.modules.get("trials.parallel.mesh")
    if mesh is not None and isinstance(result, RankSuccess):
        with contextlib.suppress(Exception):
            mesh.leave_gang(ends_process=True)


def resolve(runner: str) -> Runner:
    """Import the function named ``module:function``. A user's module may be in the folder where the sweep was
    submitted; only ranks search it, and after all other places."""
    module, _, function = runner.partition(":")
    if module.partition(".")[0] != "trials":
        sys.path.append(str(Path.cwd()))
    found: Runner = getattr(importlib.import_module(module), function)
    return found


def _device(slot: RankSlot) -> str:
    """Return the UUID of the rank's device; without one, the positions of its slot's devices."""
    positions = ",".join(map(str, slot.devices))
    if "torch" not in sys.modules:
        return positions
    from trials.accelerator.device import current_device, device_uuid  # imports torch

    device = current_device()
    return positions if device is None else device_uuid(device) or positions


def _failure(error: BaseException, launch: NodeLaunch, slot: RankSlot, phase: Phase) -> RankFailure:
    cls = type(error)
    return RankFailure(
        rank=slot.rank,
        node=launch.node,
        category=_category(error, launch.device_kind),
        message=redact(str(error)) or cls.__name__,
        at_s=time.time(),
        error_type=cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}",
        phase=phase,
        refused=error.refused if isinstance(error, InfeasibleSpec) else (),
    )


def _category(error: BaseException, device: DeviceKind) -> str:
    if not isinstance(error, Exception):
        return "exception"
    found = classify(error, device)
    if found in ("error", "connection", "device_suspect") and is_memory_full(
        device
    ):  # queries the device only if it matters
        found = classify(error, device, is_memory_full=True)
    return str(found)


def is_memory_full(device: DeviceKind) -> bool:
    """Whether the rank's device has less than :data:`FULL_FRACTION` of its memory left; False if unknown."""
    kind = family_of(device).torch_device
    interface: Any = getattr(sys.modules.get("torch"), kind, None)
    if kind == "cpu" or interface is None:
        return False
    try:
        free, total = interface.mem_get_info() if interface.is_initialized() else (1, 1)
    except Exception:  # a failed device may not answer
        return False
    return bool(free < FULL_FRACTION * total)


def result_file(slot: RankSlot) -> str:
    """Return the name of the rank's result file in the attempt's folder."""
    return f"rank{slot.rank}.json"


def _store(launch: NodeLaunch, slot: RankSlot, result: RankResult) -> None:
    """Store the result on disk before sending it, so that it outlives the controller."""
    path = Path(launch.directory) / result_file(slot)
    write_atomically(path, [line({"token": launch.token, "result": to_json(result)})])


def _write(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]


# A rank from its warden's view: a child process, its pipe, its progress, its end.


LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 8192
ABORT_TAIL_BYTES = 1 << 20
"""Bytes at a log's end to search for the reason of an abort: each rank that writes to the log may append C++ and Python
stacks."""
MAX_SEEN_STEPS = 4096
"""Most measured steps whose arrival is recorded."""
WEIGH_S = 0.5
SYSTEM = "system"
"""Source of figures from the operating system."""
_ABORTED = re.compile(rf"\bkilled by signal {int(signal.SIGABRT)}\b")
"""Message of a rank or program that aborted. Libraries log the reason before they abort."""
_SHELL_ABORTED = re.compile(r"\bthe command exited with code (?:134|250)\b")
"""The same where a shell (128 + 6) or deepspeed (-6 as a byte) turned the abort into an exit code."""
_COMMAND_FAILED = re.compile(r"\bthe command exited with code [1-9]")
"""Message of a program that failed. It may be a launcher that only reports a rank's failure."""
_UNHANDLED = re.compile(r"\bunhandled (?:cuda|system) error\b")
"""NCCL's errors, whose reason follows in further lines."""
_UNEXPLAINED = re.compile(rf"^the command |^rank \d+ was killed|{_UNHANDLED.pattern}")
"""Message of an ``error`` without a reason from the program."""
_MAY_BE_SURVIVED = frozenset({"exit", "error", "oom", "host_oom", "connection", "device_suspect"})
"""Categories that an abort may override: the program may have survived what it printed before."""
_MAY_BE_OF_DISK = frozenset({"exit", "error", "data", "deadline"})
"""Categories that a full disk may explain, because reports could not be written."""
_BUS_ERROR = re.compile(rf"\bkilled by signal {int(signal.SIGBUS)}\b")
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that a program's own errors do not cause."""
_PROGRAM_KILLED = re.compile(rf"\bthe command was killed by signal ({'|'.join(map(str, map(int, _FROM_OUTSIDE)))})\b")
_ABOUT_OUR_VARIABLES = re.compile(r"variable TORCH_NCCL_TRACE_BUFFER_SIZE is deprecated")
_CHILD_KILLED = re.compile(
    r"DataLoader worker .*(killed by signal|exited unexpectedly)|the command was killed by signal 9\b"
)


@dataclass(slots=True, kw_only=True)
class ForkedRank:
    """The process of one rank, with its reports."""

    slot: RankSlot
    pid: int
    pidfd: int
    pipe: int
    request_write: int
    """Descriptor of the pipe for requesting the rank's Flight Recorder."""
    log: Path
    clock: RankClock
    lines: Lines = field(default_factory=Lines)
    result: RankResult | None = None
    is_running: bool = True
    measured_at_s: dict[int, float] = field(default_factory=dict)
    """Time (monotonic) of the report of each measured step."""
    program_peak_bytes: int = 0
    """Highest resident memory seen of a process of the user's program; 0 for built-in models."""
    sample_at_s: float = 0.0
    """Time (monotonic) of the next memory reading: twice a second, as a program may end between two readings."""

    def sample_memory(self, now_s: float) -> None:
        """Read the peak memory of the rank's program, if a reading is due."""
        if now_s >= self.sample_at_s:
            self.sample_at_s = now_s + WEIGH_S
            self.program_peak_bytes = max(self.program_peak_bytes, peak_below(self.pid))

    def note_step(self, progress: RankProgress, now_s: float) -> None:
        """Record the time of the report of a measured step."""
        if progress.phase == "measuring" and progress.step > 0 and len(self.measured_at_s) < MAX_SEEN_STEPS:
            self.measured_at_s.setdefault(progress.step, now_s)

    def failure(
        self, node: str, category: str, message: str, exit_code: int | None = None, log_tail: tuple[str, ...] = ()
    ) -> RankFailure:
        """Return the failure of the rank, which just failed on ``node``."""
        return RankFailure(
            rank=self.slot.rank,
            node=node,
            category=category,
            message=message,
            at_s=time.time(),
            exit_code=exit_code,
            phase=self.clock.phase,
            log_tail=log_tail,
        )

    def kill(self) -> None:
        """Kill the rank, which must not have been reaped, and its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def fork_rank(launch: NodeLaunch, slot: RankSlot) -> ForkedRank:
    """Fork a rank, connect its pipes, and start its clock."""
    read, write = os.pipe()
    requests, request_write = os.pipe()
    pid = fork_process(launch, slot, RankPipes(reports=write, requests=requests))
    os.close(write)
    os.close(requests)
    log = Path(launch.directory) / f"rank{slot.rank}.log"
    clock = RankClock(entered_at_s=time.monotonic())
    return ForkedRank(
        slot=slot, pid=pid, pidfd=os.pidfd_open(pid), pipe=read, request_write=request_write, log=log, clock=clock
    )


def fork_process(launch: NodeLaunch, slot: RankSlot, pipes: RankPipes) -> int:
    """Fork the process of a rank, as the leader of its own process group; return its pid."""
    warden_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        rank_main(launch, slot, pipes, warden_pid)
    with contextlib.suppress(OSError):  # the child does the same; either may be first
        os.setpgid(pid, pid)
    return pid


def how_it_ended(exit_code: int, oom_kills: OomKills) -> tuple[str, str]:
    """Return category and message for a rank that ended without a report and was not killed by this module.

    SIGTERM alone is no sign of a preemption: batch systems send it to every process on the node, so the warden gets it
    too and reports it. A rank that gets it alone was a target of a person, a program or its own code, which may do the
    same in every attempt. Such attempts are therefore repeated only a few times.
    """
    if exit_code >= 0:
        return "exit", f"exited with code {exit_code} without a report"
    how = f"was killed by signal {-exit_code} ({_signal_name(-exit_code)})"
    if exit_code == -signal.SIGKILL and oom_kills.grew():
        return "host_oom", f"{how} by the kernel, because host memory ran out"
    return ("killed", f"{how} from outside the trial") if -exit_code in _FROM_OUTSIDE else ("exit", how)


def explained(failure: RankFailure, rank: ForkedRank, launch: NodeLaunch, oom_kills: OomKills) -> RankFailure:
    """Add what kernel, log and devices report about a rank's failure."""
    found = with_host_cause(failure, oom_kills, Path(launch.directory))
    found = with_logged_cause(found, rank.log, launch.device_kind)
    return with_devices(found, [handle.name for handle in slot_handles(launch, rank.slot)])


def with_host_cause(failure: RankFailure, oom_kills: OomKills, folder: Path) -> RankFailure:
    """Attribute the failure to the host if its disk is full, if the kernel killed a data loader's process, if
    /dev/shm has no room for shared data, or if a signal came from outside.

    Args:
        folder: the attempt's folder.
    """
    if failure.category in _MAY_BE_OF_DISK and is_disk_full(folder):
        return replace(failure, category="disk", message=f"the disk of {folder} is full: {failure.message}")
    if failure.category == "error" and _CHILD_KILLED.search(failure.message) and oom_kills.grew():
        return replace(failure, category="host_oom")
    if failure.category == "error" and _PROGRAM_KILLED.search(failure.message):
        return replace(failure, category="killed")
    is_bus_error = failure.category in ("exit", "error") and _BUS_ERROR.search(failure.message)
    if is_bus_error and (too_small := shared_memory_shortage(MIN_SHARED_BYTES)):
        return replace(failure, category="host_oom", message=f"{failure.message}: {too_small}")
    return failure


def with_logged_cause(failure: RankFailure, log: Path, device: DeviceKind) -> RankFailure:
    """Attribute the failure of an aborted process to the reason in its log: NCCL's threads cannot raise.

    This includes a user's program that starts its ranks itself, when its launcher reports an abort. An error that the
    program reported itself stands, unless a device broke. A lost connection never replaces a better-known cause.
    """
    message = failure.message
    is_aborted = any(how.search(message) for how in (_ABORTED, _SHELL_ABORTED, _UNHANDLED))
    if failure.category not in _MAY_BE_SURVIVED or not (is_aborted or _COMMAND_FAILED.search(message)):
        return failure
    text = _end(log, ABORT_TAIL_BYTES)
    found = cause_in_log(text) if is_aborted or mentions_abort(text) else None
    if found is None:
        return failure
    kind, line = found
    is_explained = failure.category == "error" and not _UNEXPLAINED.search(message)
    is_collateral = kind == "connection" and failure.category not in ("exit", "error")
    if is_collateral or (is_explained and kind != "device_lost"):
        return failure
    category = "oom" if (kind, device) == ("host_oom", "cpu") else kind
    between = "\n" if kind == "error" else ": "  # repeated crashes have the same first line
    return replace(failure, category=category, message=f"{message}{between}{line}")


def with_devices(failure: RankFailure, names: Sequence[str]) -> RankFailure:
    """Add the names of the rank's devices where they may be at fault, after the message's first line, which is what
    users see."""
    if not failure.category.startswith("device_") or not names:
        return failure
    what, end, rest = failure.message.partition("\n")
    devices = f"device{'s' if len(names) > 1 else ''} {', '.join(names)}"
    return replace(failure, message=f"{what} ({devices}){end}{rest}")


def with_arrivals(success: RankSuccess, arrived_s: Mapping[int, float]) -> RankSuccess:
    """Add the arrival time of each measured step to the report of a rank that trained a built-in model."""
    return replace(success, seen_steps=tuple(arrived_s), seen_at_s=tuple(arrived_s.values()))


def with_program_memory(success: RankSuccess, peak_bytes: int, device: DeviceKind) -> RankSuccess:
    """Add the system's memory figure to the report of a rank whose program reported none."""
    report, script = success.report, success.report.findings.script
    if script is None or report.peak_allocated_bytes or report.peak_reserved_bytes or not peak_bytes:
        return success
    reports = ScriptSource(name="rss_bytes" if device == "cpu" else "allocated_bytes", source=SYSTEM)
    sources = (*script.sources, reports) if script.sources else script.sources
    findings = replace(report.findings, script=replace(script, sources=sources))
    return replace(success, report=replace(report, peak_allocated_bytes=peak_bytes, findings=findings))


def died_of_sigterm(result: RankResult | None) -> bool:
    """Whether a SIGTERM killed the rank."""
    return isinstance(result, RankFailure) and result.exit_code == -signal.SIGTERM


def as_preempted(result: RankResult) -> RankResult:
    """Reinterpret a result after the warden got a SIGTERM: a rank killed by SIGTERM was preempted."""
    if isinstance(result, RankFailure) and died_of_sigterm(result):
        return replace(result, category="preempted")
    return result


def with_log(result: RankResult, log: Path) -> RankResult:
    """Add the last lines of the rank's log to a failure without any."""
    if not isinstance(result, RankFailure) or result.category == "stopped" or result.log_tail:
        return result
    return replace(result, log_tail=tail_of(log))


def tail_of(path: Path) -> tuple[str, ...]:
    """Return the last lines of a rank's log, without torch's warnings about variables set for older versions."""
    lines = _end(path, LOG_TAIL_BYTES).splitlines()
    return tuple([line for line in lines if not _ABOUT_OUR_VARIABLES.search(line)][-LOG_TAIL_LINES:])


def _end(path: Path, num_bytes: int) -> str:
    """Return the last bytes of a log as text, without secrets; empty if unreadable."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - num_bytes))
            return redact(log.read().decode("utf-8", errors="replace"))
    except OSError:
        return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


# The clocks of a gang's ranks on one node: their deadlines, and which rank has missed one.


class GangClocks:
    """Follows the ranks of ``launch``; ``ranks`` grows as they are forked."""

    def __init__(self, launch: NodeLaunch, ranks: list[ForkedRank]) -> None:
        self._launch = launch
        self._ranks = ranks
        self._compiling = CompileTime(left_s=launch.deadlines.compile_s)

    def unsettled(self) -> list[ForkedRank]:
        """Return the ranks without a result."""
        return [rank for rank in self._ranks if rank.result is None]

    def watched(self) -> list[ForkedRank]:
        """Return the ranks with deadlines: all unfinished ones. Of a user's program, only the ranks that report
        progress, once any does; the others follow them."""
        waiting = self.unsettled()
        return [rank for rank in waiting if self.reports_progress(rank)] or waiting

    def reports_progress(self, rank: ForkedRank) -> bool:
        """Whether the rank reports its progress. Ranks of a user's program need not."""
        return not self._launch.is_script or rank.clock.reported_at_s is not None

    def slowest(self) -> RankClock:
        """Return the clock of the slowest rank; there must be a rank."""
        return min(self.watched() or self._ranks, key=lambda rank: rank.clock.position).clock

    def advance(self, rank: ForkedRank, progress: RankProgress, now_s: float) -> float:
        """Record a rank's report; return the seconds of compile time to account for."""
        since_s = rank.clock.compiles_since_s
        seconds = 0.0 if since_s is None else self.stand_still(now_s - since_s, now_s)
        rank.clock.advance(progress, now_s, is_sign=not progress.is_compiling or self._compiling.left_s > 0)
        return seconds

    def stand_still(self, seconds: float, now_s: float) -> float:
        """Exclude compile time of a rank of the gang from all clocks, unless it was excluded before; return the seconds
        that were excluded."""
        passed_s = self._compiling.passed(now_s - seconds, now_s)
        for rank in self._ranks:
            rank.clock.stand_still(passed_s, now_s)
        return passed_s

    def due_at_s(self) -> float:
        """Return the time (monotonic) of the next missed deadline unless a rank reports before."""
        deadlines = self._deadlines
        return min((due_at_s(rank.clock, deadlines) for rank in self.watched()), default=math.inf)

    def overdue_reason(self, now_s: float) -> str | None:
        """Describe the missed deadline; None if there is none."""
        deadlines = self._deadlines
        overdue = min(self.watched(), key=lambda rank: due_at_s(rank.clock, deadlines), default=None)
        if overdue is None or now_s < due_at_s(overdue.clock, deadlines):
            return None
        compiling = next((rank.clock for rank in self.watched() if rank.clock.compiles_since_s is not None), None)
        if compiling is not None and self._compiling.left_s <= 0:  # the others wait for it
            where = f"in phase {compiling.phase} at step {compiling.step}"
            return f"compiling took longer than {deadlines.compile_s:g} s, {where}"
        return overdue_reason(overdue.clock, deadlines)

    @property
    def _deadlines(self) -> Deadlines:
        """Deadlines of the launch. If a program reports on one node only, the other nodes report nothing."""
        found = self._launch.deadlines
        if not self._launch.is_script or self._launch.num_nodes == 1:
            return found
        return replace(found, starting_s=found.starting_s + found.warmup_s + found.measuring_s)
