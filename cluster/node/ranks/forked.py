"""A rank as its warden sees it: a child process, its pipe, its progress, its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster.gang.deadlines import RankClock
from cluster.gang.messages import Lines, NodeLaunch, RankFailure, RankResult, RankSlot, RankSuccess
from cluster.node.device_memory import slot_handles
from cluster.node.host_memory import MIN_SHARED_BYTES, OomKills, peak_below, shared_memory_shortage
from cluster.node.ranks.rank import RankPipes, rank_main
from trials.accelerator.kinds import DeviceKind
from trials.failure.logs import cause_in_log, tells_of_abort
from trials.reports.script import ScriptSource
from trials.secrets import redact

LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 8192
ABORT_TAIL_BYTES = 1 << 20
"""How much of a log's end is searched for why a process aborted: of each rank that writes to it, stacks of C++ and of
Python's threads may follow."""
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
_BUS_ERROR = re.compile(rf"\bkilled by signal {int(signal.SIGBUS)}\b")
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
    asking: int
    """Descriptor of the pipe on which the rank is asked for its Flight Recorder."""
    log: Path
    clock: RankClock
    lines: Lines = field(default_factory=Lines)
    result: RankResult | None = None
    is_running: bool = True
    program_peak_bytes: int = 0
    """Most resident memory seen of a process of the user's own program; 0 where the rank runs a model of ours."""
    weigh_at_s: float = 0.0
    """When (monotonic) to look again how much that is: twice a second, as a program may be gone before it is heard."""

    def weigh(self, now_s: float) -> None:
        """Look how much memory the rank's program has taken so far, if it is time to."""
        if now_s >= self.weigh_at_s:
            self.weigh_at_s = now_s + WEIGH_S
            self.program_peak_bytes = max(self.program_peak_bytes, peak_below(self.pid))

    def failure(
        self, node: str, category: str, message: str, exit_code: int | None = None, log_tail: tuple[str, ...] = ()
    ) -> RankFailure:
        """What is to be said of the rank, which has just failed on ``node``."""
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
    asked, asking = os.pipe()
    pid = fork_process(launch, slot, RankPipes(told=write, asked=asked))
    os.close(write)
    os.close(asked)
    log = Path(launch.directory) / f"rank{slot.rank}.log"
    clock = RankClock(entered_at_s=time.monotonic())
    return ForkedRank(slot=slot, pid=pid, pidfd=os.pidfd_open(pid), pipe=read, asking=asking, log=log, clock=clock)


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
    gets it too and says so. A rank that gets it alone was singled out, by a person or by its own code, which would do
    the same in every attempt: a preemption is repeated without limit, and this must not be.
    """
    if exit_code >= 0:
        return "exit", f"exited with code {exit_code} without a report"
    how = f"was killed by signal {-exit_code} ({_signal_name(-exit_code)})"
    if exit_code != -signal.SIGKILL:
        return "exit", f"{how} that nobody here sent"
    if oom_kills.grew():
        return "host_oom", f"{how} by the kernel, because host memory ran out"
    return "exit", f"{how} that nobody here sent, though the kernel counts no process killed for want of memory"


def explained(failure: RankFailure, rank: ForkedRank, launch: NodeLaunch, oom_kills: OomKills) -> RankFailure:
    """The failure of a rank, with what kernel, log and devices say of it."""
    found = with_logged_cause(with_host_cause(failure, oom_kills), rank.log, launch.device_kind)
    return with_devices(found, [handle.name for handle in slot_handles(launch, rank.slot)])


def with_host_cause(failure: RankFailure, oom_kills: OomKills) -> RankFailure:
    """The failure, put down to the host's memory where the kernel killed not the rank but what loads its data, or where
    /dev/shm has no room for what it shares with others."""
    if failure.category == "error" and _CHILD_KILLED.search(failure.message) and oom_kills.grew():
        return replace(failure, category="host_oom")
    is_bus_error = failure.category in ("exit", "error") and _BUS_ERROR.search(failure.message)
    if is_bus_error and (too_small := shared_memory_shortage(MIN_SHARED_BYTES)):
        return replace(failure, category="host_oom", message=f"{failure.message}: {too_small}")
    return failure


def with_logged_cause(failure: RankFailure, log: Path, device: DeviceKind) -> RankFailure:
    """The failure of a process that aborted, put down to what its log says: the threads of NCCL cannot raise.

    So with a program of the user's own that starts its ranks by itself, where its launcher says that one aborted. An
    error that the program told of itself stands, unless a device broke; and a lost connection explains nothing that is
    known better.
    """
    message = failure.message
    is_aborted = any(how.search(message) for how in (_ABORTED, _SHELL_ABORTED, _UNHANDLED))
    if failure.category not in _MAY_BE_SURVIVED or not (is_aborted or _COMMAND_FAILED.search(message)):
        return failure
    text = _end(log, ABORT_TAIL_BYTES)
    found = cause_in_log(text) if is_aborted or tells_of_abort(text) else None
    if found is None:
        return failure
    kind, line = found
    is_told = failure.category == "error" and not _UNTOLD.search(message)
    is_collateral = kind == "connection" and failure.category not in ("exit", "error")
    if is_collateral or (is_told and kind != "device_lost"):
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


def with_program_memory(success: RankSuccess, peak_bytes: int, device: DeviceKind) -> RankSuccess:
    """The report of a rank whose program told nothing of its memory, with what the system knows of it."""
    report, script = success.report, success.report.findings.script
    if script is None or report.peak_allocated_bytes or report.peak_reserved_bytes or not peak_bytes:
        return success
    told = ScriptSource(name="rss_bytes" if device == "cpu" else "allocated_bytes", source=SYSTEM)
    sources = (*script.sources, told) if script.sources else script.sources
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
