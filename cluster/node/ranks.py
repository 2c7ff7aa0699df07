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

# The process of a rank, from the fork to its exit: sets up its environment, calls the runner, reports.


FULL_FRACTION = 0.02
"""A device with less of its memory left is full: handles and workspaces of cuBLAS and cuDNN take some hundred MiB."""

Runner = Callable[[Mapping[str, Any], ProgressSink], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPipes:
    """Descriptors of a rank's pipes from and to its warden."""

    reports: int
    """Takes progress and the result."""
    requests: int
    """Gives a byte whenever the warden wants the Flight Recorder's record."""


def rank_main(launch: NodeLaunch, slot: RankSlot, pipes: RankPipes, warden_pid: int) -> NoReturn:
    """Run one rank in this freshly forked process; never returns, so that nothing of the parent runs again."""
    code = 1
    try:
        try:
            _set_up(launch, slot, pipes, warden_pid)
        except OSError as error:
            failed = _failure(error, launch, slot, "starting")
            _write(pipes.reports, line(replace(failed, category=of_host(error) or failed.category)))
            raise
        code = _run(launch, slot, pipes.reports)
    except BaseException:  # nothing above could see it but the log
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _set_up(launch: NodeLaunch, slot: RankSlot, pipes: RankPipes, warden_pid: int) -> None:
    """Turn this copy of the warden into a process of its own: signals, descriptors, log, environment."""
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
    _keep_near(launch, slot)
    threads = os.environ["OMP_NUM_THREADS"]
    if (torch := sys.modules.get("torch")) is not None and threads.isdigit():  # torch read it before the fork
        torch.set_num_threads(int(threads))


def _visible_devices(launch: NodeLaunch) -> dict[str, str]:
    """As with torchrun, each rank sees the gang's devices on its node, at index ``LOCAL_RANK`` its own."""
    family = family_of(launch.device_kind)
    if not family.visible_variable:
        return {}
    return {family.visible_variable: ",".join(device_names(launch)), **family.order_variables}


def _keep_near(launch: NodeLaunch, slot: RankSlot) -> None:
    """Stay on the cores near the slot's devices, before any thread of torch's starts; memory that a core touches first
    is its own socket's."""
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
            if is_of_program(error):  # its own words stand above, and are what people look for
                sys.stderr.write(f"tune-cluster: {error}\n")
            else:
                traceback.print_exc()
        result = _failure(error, launch, slot, reached)
    with contextlib.suppress(OSError):  # the message counts; the file is for controllers that die before they get it
        _store(launch, slot, result)
    _write(pipe, line(result))
    _leave(result)
    return 0 if isinstance(result, RankSuccess) else 1


def _leave(result: RankResult) -> None:
    """Leave the gang after the result was sent; errors here do not change it."""
    mesh: Any = sys.modules.get("trials.parallel.mesh")
    if mesh is not None and isinstance(result, RankSuccess):
        with contextlib.suppress(Exception):
            mesh.leave_gang(ends_process=True)


def resolve(runner: str) -> Runner:
    """The function that ``module:function`` names. One of the user's may lie in the folder where the sweep was
    submitted, which only ranks look into, and after all other places."""
    module, _, function = runner.partition(":")
    if module.partition(".")[0] != "trials":
        sys.path.append(str(Path.cwd()))
    found: Runner = getattr(importlib.import_module(module), function)
    return found


def _device(slot: RankSlot) -> str:
    """The UUID of the device that the rank used; elsewhere the positions of its slot's devices."""
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
    ):  # asked of the device only where it matters
        found = classify(error, device, is_memory_full=True)
    return str(found)


def is_memory_full(device: DeviceKind) -> bool:
    """Whether the rank's device has less than :data:`FULL_FRACTION` of its memory left; False where it cannot tell."""
    kind = family_of(device).torch_device
    interface: Any = getattr(sys.modules.get("torch"), kind, None)
    if kind == "cpu" or interface is None:
        return False
    try:
        free, total = interface.mem_get_info() if interface.is_initialized() else (1, 1)
    except Exception:  # a device that failed may answer nothing any more
        return False
    return bool(free < FULL_FRACTION * total)


def result_file(slot: RankSlot) -> str:
    """Name of the file in the attempt's folder that keeps the rank's result."""
    return f"rank{slot.rank}.json"


def _store(launch: NodeLaunch, slot: RankSlot, result: RankResult) -> None:
    """Keep the result on disk before telling, so that it outlives the controller."""
    path = Path(launch.directory) / result_file(slot)
    write_atomically(path, [line({"token": launch.token, "result": to_json(result)})])


def _write(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]


# A rank as its warden sees it: a child process, its pipe, its progress, its end.


LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 8192
ABORT_TAIL_BYTES = 1 << 20
"""How much of a log's end is searched for why a process aborted: of each rank that writes to it, stacks of C++ and of
Python's threads may follow."""
MAX_SEEN_STEPS = 4096
"""Measured steps whose arrival is kept."""
WEIGH_S = 0.5
SYSTEM = "system"
"""Source of what the operating system tells of a program."""
_ABORTED = re.compile(rf"\bkilled by signal {int(signal.SIGABRT)}\b")
"""How the message of a rank reads that aborted, or whose program did: libraries do so after saying why in the log."""
_SHELL_ABORTED = re.compile(r"\bthe command exited with code (?:134|250)\b")
"""How it reads where a shell (128 + 6) or deepspeed (-6 as a byte) passed the abort on as a code."""
_COMMAND_FAILED = re.compile(r"\bthe command exited with code [1-9]")
"""How it reads where a program ended, which may have been no more than a launcher's way to say that a rank did."""
_UNHANDLED = re.compile(r"\bunhandled (?:cuda|system) error\b")
"""How NCCL's errors read, whose reason stands in further lines."""
_UNTOLD = re.compile(rf"^the command |^rank \d+ was killed|{_UNHANDLED.pattern}")
"""How the message of an ``error`` reads that gives no reason of the program's own."""
_MAY_BE_SURVIVED = frozenset({"exit", "error", "oom", "host_oom", "connection", "device_suspect"})
"""Categories that an abort may overrule: what a program printed before it, it may have survived."""
_MAY_BE_OF_DISK = frozenset({"exit", "error", "data", "deadline"})
"""Categories that a full disk explains: what cannot be written is not reported either."""
_BUS_ERROR = re.compile(rf"\bkilled by signal {int(signal.SIGBUS)}\b")
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that a program does not get for its own errors."""
_PROGRAM_KILLED = re.compile(rf"\bthe command was killed by signal ({'|'.join(map(str, map(int, _FROM_OUTSIDE)))})\b")
_ABOUT_OUR_VARIABLES = re.compile(r"variable TORCH_NCCL_TRACE_BUFFER_SIZE is deprecated")
_CHILD_KILLED = re.compile(
    r"DataLoader worker .*(killed by signal|exited unexpectedly)|the command was killed by signal 9\b"
)


@dataclass(slots=True, kw_only=True)
class ForkedRank:
    """The process of one rank, with what it has reported."""

    slot: RankSlot
    pid: int
    pidfd: int
    pipe: int
    request_write: int
    """Descriptor of the pipe on which the rank is asked for its Flight Recorder."""
    log: Path
    clock: RankClock
    lines: Lines = field(default_factory=Lines)
    result: RankResult | None = None
    is_running: bool = True
    measured_at_s: dict[int, float] = field(default_factory=dict)
    """When (monotonic) it reported each measured step."""
    program_peak_bytes: int = 0
    """Most resident memory seen of a process of the user's program; 0 where the rank runs a model of ours."""
    weigh_at_s: float = 0.0
    """When (monotonic) to look again how much that is: twice a second, as a program may end between two readings."""

    def weigh(self, now_s: float) -> None:
        """Look how much memory the rank's program has taken so far, if it is time to."""
        if now_s >= self.weigh_at_s:
            self.weigh_at_s = now_s + WEIGH_S
            self.program_peak_bytes = max(self.program_peak_bytes, peak_below(self.pid))

    def note_step(self, progress: RankProgress, now_s: float) -> None:
        """Remember when the rank reported a measured step."""
        if progress.phase == "measuring" and progress.step > 0 and len(self.measured_at_s) < MAX_SEEN_STEPS:
            self.measured_at_s.setdefault(progress.step, now_s)

    def failure(
        self, node: str, category: str, message: str, exit_code: int | None = None, log_tail: tuple[str, ...] = ()
    ) -> RankFailure:
        """The failure of the rank, which has just failed on ``node``."""
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
        """Kill the rank, which must not have been reaped, and whatever shares its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def fork_rank(launch: NodeLaunch, slot: RankSlot) -> ForkedRank:
    """Fork a rank that is listened to, and whose clock starts now."""
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
    """Fork the process of a rank, the leader of a process group of its own; gives its pid."""
    warden_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        rank_main(launch, slot, pipes, warden_pid)
    with contextlib.suppress(OSError):  # the child does the same; whoever comes first
        os.setpgid(pid, pid)
    return pid


def how_it_ended(exit_code: int, oom_kills: OomKills) -> tuple[str, str]:
    """Category and message for a rank that ended without a report and that nobody here killed.

    SIGTERM alone is no sign of a preemption: batch systems send it to every process on the node, so that the warden
    gets it too and reports it. A rank that gets it alone was singled out, by a person, a program, or its own code,
    which would do the same in every attempt: so these attempts are repeated, but only a few times.
    """
    if exit_code >= 0:
        return "exit", f"exited with code {exit_code} without a report"
    how = f"was killed by signal {-exit_code} ({_signal_name(-exit_code)})"
    if exit_code == -signal.SIGKILL and oom_kills.grew():
        return "host_oom", f"{how} by the kernel, because host memory ran out"
    return ("killed", f"{how} from outside the trial") if -exit_code in _FROM_OUTSIDE else ("exit", how)


def explained(failure: RankFailure, rank: ForkedRank, launch: NodeLaunch, oom_kills: OomKills) -> RankFailure:
    """The failure of a rank, with what kernel, log and devices say of it."""
    found = with_host_cause(failure, oom_kills, Path(launch.directory))
    found = with_logged_cause(found, rank.log, launch.device_kind)
    return with_devices(found, [handle.name for handle in slot_handles(launch, rank.slot)])


def with_host_cause(failure: RankFailure, oom_kills: OomKills, folder: Path) -> RankFailure:
    """The failure, put down to the host where its disk is full, where the kernel killed not the rank but what loads its
    data, where /dev/shm has no room for what it shares with others, or where a signal came from outside.

    Args:
        folder: the attempt's.
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
    """The failure of a process that aborted, put down to what its log says: the threads of NCCL cannot raise.

    So with a user's program that starts its ranks by itself, where its launcher says that one aborted. An
    error that the program reported itself stands, unless a device broke; and a lost connection explains nothing that is
    known better.
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
    is_explained = failure.category == "error" and not _UNTOLD.search(message)
    is_collateral = kind == "connection" and failure.category not in ("exit", "error")
    if is_collateral or (is_explained and kind != "device_lost"):
        return failure
    category = "oom" if (kind, device) == ("host_oom", "cpu") else kind
    between = "\n" if kind == "error" else ": "  # the first line of a crash is alike whenever it is repeated
    return replace(failure, category=category, message=f"{message}{between}{line}")


def with_devices(failure: RankFailure, names: Sequence[str]) -> RankFailure:
    """The failure, with the names of the rank's devices where they may be at fault: behind the message's first line,
    which is what people see."""
    if not failure.category.startswith("device_") or not names:
        return failure
    what, end, rest = failure.message.partition("\n")
    devices = f"device{'s' if len(names) > 1 else ''} {', '.join(names)}"
    return replace(failure, message=f"{what} ({devices}){end}{rest}")


def with_arrivals(success: RankSuccess, arrived_s: Mapping[int, float]) -> RankSuccess:
    """The report of a rank that trained a model of ours, with when each measured step arrived."""
    return replace(success, seen_steps=tuple(arrived_s), seen_at_s=tuple(arrived_s.values()))


def with_program_memory(success: RankSuccess, peak_bytes: int, device: DeviceKind) -> RankSuccess:
    """The report of a rank whose program did not report its memory, with the system's figure."""
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
    """The result by what is known at the end where the warden got a SIGTERM: so a rank that it killed was preempted."""
    if isinstance(result, RankFailure) and died_of_sigterm(result):
        return replace(result, category="preempted")
    return result


def with_log(result: RankResult, log: Path) -> RankResult:
    """``result``, with the last lines of the rank's log where it is a failure without any."""
    if not isinstance(result, RankFailure) or result.category == "stopped" or result.log_tail:
        return result
    return replace(result, log_tail=tail_of(log))


def tail_of(path: Path) -> tuple[str, ...]:
    """The last lines of a rank's log, without what torch says of variables that we set for older versions of it."""
    lines = _end(path, LOG_TAIL_BYTES).splitlines()
    return tuple([line for line in lines if not _ABOUT_OUR_VARIABLES.search(line)][-LOG_TAIL_LINES:])


def _end(path: Path, num_bytes: int) -> str:
    """The last bytes of a log as text, without secrets; empty where it cannot be read."""
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


# The clocks of a gang's ranks on one node: which of them have to keep which deadlines, and who has missed one.


class GangClocks:
    """Follows the ranks of ``launch``, to which ``ranks`` is added as they are forked."""

    def __init__(self, launch: NodeLaunch, ranks: list[ForkedRank]) -> None:
        self._launch = launch
        self._ranks = ranks
        self._compiling = CompileTime(left_s=launch.deadlines.compile_s)

    def unsettled(self) -> list[ForkedRank]:
        """The ranks without a result."""
        return [rank for rank in self._ranks if rank.result is None]

    def watched(self) -> list[ForkedRank]:
        """The ranks that have to keep deadlines: all that are not done, but of a user's program those that
        say anything, once any does. The others follow them."""
        waiting = self.unsettled()
        return [rank for rank in waiting if self.speaks(rank)] or waiting

    def speaks(self, rank: ForkedRank) -> bool:
        """Whether what the rank has reported tells how far it is: of a user's program it need not report."""
        return not self._launch.is_script or rank.clock.reported_at_s is not None

    def slowest(self) -> RankClock:
        """The clock of the rank that is least far; there has to be a rank."""
        return min(self.watched() or self._ranks, key=lambda rank: rank.clock.position).clock

    def advance(self, rank: ForkedRank, progress: RankProgress, now_s: float) -> float:
        """Take in what a rank reports; gives the seconds of compiling that it brings to account."""
        since_s = rank.clock.compiles_since_s
        seconds = 0.0 if since_s is None else self.stand_still(now_s - since_s, now_s)
        rank.clock.advance(progress, now_s, is_sign=not progress.is_compiling or self._compiling.left_s > 0)
        return seconds

    def stand_still(self, seconds: float, now_s: float) -> float:
        """Leave out of all clocks so many seconds for which a rank of the gang has compiled, as far as they have not
        been yet; gives how many those were."""
        passed_s = self._compiling.passed(now_s - seconds, now_s)
        for rank in self._ranks:
            rank.clock.stand_still(passed_s, now_s)
        return passed_s

    def due_at_s(self) -> float:
        """When (monotonic) the next deadline is missed unless a rank reports before."""
        deadlines = self._deadlines
        return min((due_at_s(rank.clock, deadlines) for rank in self.watched()), default=math.inf)

    def overdue_reason(self, now_s: float) -> str | None:
        """Which deadline has been missed, for people; None where none has."""
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
        """Those of the launch. Of programs that tell of themselves on one node only, the others report nothing."""
        found = self._launch.deadlines
        if not self._launch.is_script or self._launch.num_nodes == 1:
            return found
        return replace(found, starting_s=found.starting_s + found.warmup_s + found.measuring_s)
