"""One attempt on one node: forks its ranks, watches them, and leaves no process of theirs behind.

Every attempt has a warden process of its own, forked by the nursery. It adopts whatever its ranks leave orphaned, so
"all descendants are gone" is exactly "the gang is gone", and concurrent gangs cannot be confused.

    fork ranks -> watch -> (first failure, deadline, stop or a dead agent: kill all) -> reap all -> NodeGone
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.gang import COLLATERAL
from cluster.messages import (
    Lines,
    NodeEvent,
    NodeFailing,
    NodeGone,
    NodeLaunch,
    NodeProgress,
    RankFailure,
    RankProgress,
    RankResult,
    Slot,
    Stop,
    line,
)
from cluster.processes import adopt_orphans, close_inherited, kill_descendants
from cluster.rank import rank_main
from cluster.watch import RankClock, due_at_s, overdue_reason
from trials.codec import from_json

CHUNK = 1 << 16
COLLATERAL_GRACE_S = 2.0
"""How long a lost connection may wait for the failure that caused it before the gang is killed for it."""
LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 8192


@dataclass(slots=True, kw_only=True)
class _Rank:
    slot: Slot
    pid: int
    pidfd: int
    pipe: int
    clock: RankClock
    lines: Lines = field(default_factory=Lines)
    result: RankResult | None = None
    is_running: bool = True


class Warden:
    """Runs in its own process and talks with the agent over ``agent``, a stream socket."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._lines = Lines()
        self._outbox: deque[bytes] = deque()
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._notes: list[RankFailure] = []
        self._kill_at_s: float | None = None
        self._is_stopping = False
        self._is_orphaned = False
        self._reported: tuple[int, int] = (0, 0)

    def run(self) -> None:
        """Wait for an attempt and run it to its end."""
        while not (messages := self._receive()):
            if self._is_orphaned:
                return
        self._launch: NodeLaunch = from_json(NodeLaunch, messages.pop(0))
        self._agent.setblocking(False)
        self._selector.register(self._agent, selectors.EVENT_READ, self._hear)
        self._start()
        self._obey(messages)
        while any(rank.is_running for rank in self._ranks):
            for key, events in self._selector.select(self._patience_s()):
                key.data(events)
            self._check_clocks()
        kill_descendants()
        self._finish()

    def _receive(self) -> list[Any]:
        """Messages that have come from the agent, if any is complete."""
        try:
            chunk = self._agent.recv(CHUNK)
        except ConnectionError:
            chunk = b""
        self._is_orphaned = not chunk
        return list(self._lines.feed(chunk))

    def _start(self) -> None:
        try:
            Path(self._launch.directory).mkdir(parents=True, exist_ok=True)
            for slot in self._launch.slots:
                self._fork(slot)
        except OSError as error:
            self._note("lost", f"cannot start ranks on {self._launch.node}: {error}")
            self._stop(str(error))

    def _fork(self, slot: Slot) -> None:
        read, write = os.pipe()
        warden_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            rank_main(self._launch, slot, write, warden_pid)
        os.close(write)
        with contextlib.suppress(OSError):  # the child does the same; whoever comes first
            os.setpgid(pid, pid)
        clock = RankClock(entered_at_s=time.monotonic())
        rank = _Rank(slot=slot, pid=pid, pidfd=os.pidfd_open(pid), pipe=read, clock=clock)
        self._ranks.append(rank)
        self._selector.register(rank.pipe, selectors.EVENT_READ, lambda _: self._read(rank))
        self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda _: self._reap(rank))

    def _hear(self, events: int) -> None:
        """Take orders from the agent, and give it what could not be sent at once."""
        if events & selectors.EVENT_WRITE:
            self._flush()
        if events & selectors.EVENT_READ:
            self._obey(self._receive())
            if self._is_orphaned:
                self._selector.unregister(self._agent)
                self._stop("the agent is gone")

    def _obey(self, messages: list[Any]) -> None:
        for message in messages:
            order: Stop = from_json(Stop, message)
            if order.is_cause:
                self._note("lost", order.reason)
            self._stop(order.reason)

    def _read(self, rank: _Rank) -> None:
        if rank.pipe < 0:  # drained by _reap() in the same round
            return
        chunk = os.read(rank.pipe, CHUNK)
        if not chunk:
            self._selector.unregister(rank.pipe)
            os.close(rank.pipe)
            rank.pipe = -1
        for message in rank.lines.feed(chunk):
            if message["kind"] == RankProgress.kind:
                rank.clock.advance(from_json(RankProgress, message), time.monotonic())
                self._tell_progress()
            else:
                rank.result = from_json(RankResult, message)
                self._judge(rank.result)

    def _reap(self, rank: _Rank) -> None:
        self._selector.unregister(rank.pidfd)
        os.close(rank.pidfd)
        _kill_group(rank.pid)  # before reaping, while the group's id cannot be anyone else's
        _, status = os.waitpid(rank.pid, 0)
        rank.is_running = False
        self._drain(rank)
        if rank.result is None:
            rank.result = self._unreported(rank, os.waitstatus_to_exitcode(status))
            self._judge(rank.result)

    def _drain(self, rank: _Rank) -> None:
        """Read what the dead rank had written; a process it left behind may hold the pipe open."""
        if rank.pipe >= 0:
            os.set_blocking(rank.pipe, False)
            with contextlib.suppress(BlockingIOError):
                while rank.pipe >= 0:
                    self._read(rank)
        if rank.pipe >= 0:
            self._selector.unregister(rank.pipe)
            rank.pipe = -1

    def _unreported(self, rank: _Rank, exit_code: int) -> RankFailure:
        if self._is_stopping and exit_code == -signal.SIGKILL:
            return self._failure(rank, "stopped", "killed because the gang was ending")
        how = f"exited with code {exit_code} without a report"
        if exit_code < 0:
            how = f"was killed by signal {-exit_code} ({_signal_name(-exit_code)})"
        if exit_code == -signal.SIGKILL:
            how += " that nobody here sent, as the kernel does when host memory runs out"
        return self._failure(rank, "exit", f"rank {rank.slot.rank} {how}", exit_code)

    def _failure(self, rank: _Rank, category: str, message: str, exit_code: int | None = None) -> RankFailure:
        return RankFailure(
            rank=rank.slot.rank,
            node=self._launch.node,
            category=category,
            message=message,
            at_s=time.time(),
            exit_code=exit_code,
            phase=rank.clock.phase,
        )

    def _judge(self, result: RankResult) -> None:
        """Kill the gang for a root cause at once, for a collateral error after a moment."""
        if isinstance(result, RankFailure) and not self._is_stopping:
            if result.category in COLLATERAL:
                self._kill_at_s = min(self._kill_at_s or float("inf"), time.monotonic() + COLLATERAL_GRACE_S)
            else:
                self._stop(result.message)

    def _note(self, category: str, message: str) -> None:
        self._notes.append(
            RankFailure(rank=None, node=self._launch.node, category=category, message=message, at_s=time.time())
        )

    def _patience_s(self) -> float | None:
        """Seconds until the next deadline."""
        if self._is_stopping:
            return None
        due = [due_at_s(rank.clock, self._launch.deadlines) for rank in self._ranks if rank.result is None]
        if self._kill_at_s is not None:
            due.append(self._kill_at_s)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _check_clocks(self) -> None:
        if self._is_stopping:
            return
        now_s = time.monotonic()
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._stop("a connection between ranks was lost")
            return
        waiting = [rank for rank in self._ranks if rank.result is None]
        if any(due_at_s(rank.clock, self._launch.deadlines) <= now_s for rank in waiting):
            # Peers wait for the one that hangs: the one least far is to blame, not the one whose clock ran out first.
            slowest = min(waiting, key=lambda rank: rank.clock.position)
            overdue = min(waiting, key=lambda rank: due_at_s(rank.clock, self._launch.deadlines))
            reason = overdue_reason(overdue.clock, self._launch.deadlines)
            slowest.result = self._failure(slowest, "deadline", reason)
            self._stop(reason)

    def _stop(self, reason: str) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self._tell(NodeFailing(attempt_id=self._launch.attempt_id, token=self._launch.token, reason=reason))
            for rank in self._ranks:
                if rank.is_running:
                    _kill_group(rank.pid)

    def _tell_progress(self) -> None:
        slowest = min(self._ranks, key=lambda rank: rank.clock.position).clock
        if slowest.position > self._reported and len(self._ranks) == len(self._launch.slots):
            self._reported = slowest.position
            os.utime(self._launch.directory)  # shows for how long it held its devices, should the controller die
            self._tell(
                NodeProgress(
                    attempt_id=self._launch.attempt_id,
                    token=self._launch.token,
                    phase=slowest.phase,
                    step=slowest.step,
                    step_time_s=slowest.step_time_s,
                )
            )

    def _tell(self, event: NodeEvent) -> None:
        self._outbox.append(line(event))
        self._flush()

    def _flush(self) -> None:
        """Send what the socket takes; an agent that is slow to read must not hold up the watch."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._outbox:
                sent = self._agent.send(self._outbox[0])
                self._outbox[0] = self._outbox[0][sent:]
                if not self._outbox[0]:
                    self._outbox.popleft()
        if self._agent.fileno() in self._selector.get_map():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
            self._selector.modify(self._agent, wanted, self._hear)

    def _finish(self) -> None:
        results = tuple(self._with_log(rank.result) for rank in self._ranks if rank.result is not None)
        gone = NodeGone(attempt_id=self._launch.attempt_id, token=self._launch.token, results=(*results, *self._notes))
        self._agent.setblocking(True)
        with contextlib.suppress(ConnectionError):
            self._agent.sendall(b"".join(self._outbox) + line(gone))

    def _with_log(self, result: RankResult) -> RankResult:
        if not isinstance(result, RankFailure) or result.category == "stopped":
            return result
        tail = _log_tail(Path(self._launch.directory) / f"rank{result.rank}.log")
        return RankFailure(**{name: getattr(result, name) for name in RankFailure.__slots__} | {"log_tail": tail})


def warden_main(fd: int) -> None:
    """Run a warden in this freshly forked process."""
    close_inherited(keep=(fd,))
    adopt_orphans()
    Warden(socket.socket(fileno=fd)).run()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _log_tail(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            text = log.read().decode("utf-8", errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-LOG_TAIL_LINES:])
