"""The fork server of a node, and the warden of each attempt that it forks."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.base import Deadlines, GangProgress
from cluster.gang.environment import rank_folder, with_master
from cluster.gang.gang_outcome import MAY_HAVE_A_CAUSE
from cluster.gang.messages import (
    Beat,
    Lines,
    NodeCompiling,
    NodeEvent,
    NodeFailing,
    NodeGone,
    NodeLaunch,
    Order,
    PeerCompiles,
    RankFailure,
    RankPlace,
    RankProgress,
    RankResult,
    RankSlot,
    RankSuccess,
    StopGang,
    line,
)
from cluster.node.hang import DUMP_SIGNAL, HangingSlot, examine
from cluster.node.load_watch import (
    MIN_SHARED_BYTES,
    SETTLE_AFTER_S,
    SETTLE_BEFORE_S,
    LoadWatch,
    OomKills,
    most_used,
    not_free_reason,
    shared_memory_shortage,
    shortage,
    slot_handles,
    watched_handles,
)
from cluster.node.ranks import (
    ForkedRank,
    GangClocks,
    as_preempted,
    died_of_sigterm,
    explained,
    fork_rank,
    how_it_ended,
    with_arrivals,
    with_host_cause,
    with_log,
    with_program_memory,
)
from cluster.processes import adopt_orphans, children, close_inherited, collapse_pages, kill, kill_descendants
from trials import torch_support
from trials.failure import of_host
from trials.files import CodecError, from_json, make_private_folder
from trials.outcome import RankReport, StepBreakdown
from trials.script.command import remove_scratch, report_folder
from trials.secrets import VARIABLES, keep_secret, redact, redact_file

# ---- The warden of one attempt on one node: forks its ranks, watches them, and leaves no process of theirs behind
#
# Every attempt has its own warden process, forked by the fork server. It adopts the orphans of its ranks, so "all
# descendants are gone" means exactly "the gang is gone", and concurrent gangs cannot be confused.
#
#     devices free? -> fork ranks -> watch -> (first failure, deadline, stop, SIGTERM, a dead agent or silent
#     controller: kill all) -> reap all -> devices free again? -> NodeGone

# The warden's end of the socket to its agent: orders in, events out, never waiting for the agent.


CHUNK = 1 << 16
"""Bytes read at once."""


class AgentLink:
    """Receives orders from the agent and sends it events; never waits for it once watched."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._lines = Lines()
        self._outbox: deque[bytes] = deque()
        self.is_closed = False

    def receive(self) -> list[Any]:
        """Return the complete messages from the agent; mark the link closed if the agent is gone."""
        try:
            chunk = self._agent.recv(CHUNK)
        except ConnectionError:
            chunk = b""
        self.is_closed = not chunk
        return list(self._lines.feed(chunk))

    def watch(self, selector: selectors.BaseSelector, obey: Callable[[list[Any]], None]) -> None:
        """Pass all further messages to ``obey``, and an empty list when the agent is gone."""
        self._selector, self._obey = selector, obey
        self._agent.setblocking(False)
        selector.register(self._agent, selectors.EVENT_READ, self._serve)

    def send(self, event: NodeEvent) -> None:
        self._outbox.append(line(event))
        self._flush()

    def finish(self, event: NodeEvent) -> None:
        """Send the last event after all others, however long that takes."""
        self._agent.setblocking(True)
        with contextlib.suppress(ConnectionError):
            self._agent.sendall(b"".join(self._outbox) + line(event))

    def _serve(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if events & selectors.EVENT_READ:
            messages = self.receive()
            if self.is_closed:
                self._selector.unregister(self._agent)
            self._obey(messages)

    def _flush(self) -> None:
        """Send as much as the socket takes. A slow agent must not delay the watch."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._outbox:
                sent = self._agent.send(self._outbox[0])
                self._outbox[0] = self._outbox[0][sent:]
                if not self._outbox[0]:
                    self._outbox.popleft()
        if self._agent.fileno() in self._selector.get_map():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
            self._selector.modify(self._agent, wanted, self._serve)


COLLATERAL_GRACE_S = 2.0
"""Time for a failure's cause to arrive before the gang is killed for it, in seconds."""
SIGTERM_GRACE_S = 0.5
"""Largest delay between a batch system's signals to the processes of one node, in seconds."""
SIGTERM_SEEN = "the processes of the node received SIGTERM, as sent by batch systems"


class Warden:
    """Runs in its own process, connected to the agent by ``agent``, a stream socket."""

    def __init__(self, agent: socket.socket) -> None:
        self._link = AgentLink(agent)
        self._selector = selectors.DefaultSelector()
        self._ranks: list[ForkedRank] = []
        self._notes: list[RankFailure] = []
        self._oom_kills = OomKills()
        self._kill_at_s = math.inf
        self._release_due_s = math.inf
        self._silent_at_s = math.inf
        """Time (monotonic) at which the controller counts as gone unless it reports before."""
        self._is_stopping = False
        self._began_s = time.monotonic()
        self._started_at_s = math.inf
        """Time (monotonic) at which the latest rank began to train."""
        self._preempted_at_s: float | None = None
        self._reported: tuple[int, int] = (0, 0)

    def run(self) -> None:
        """Wait for an attempt and run it to its end."""
        self._expect_sigterm()
        while not (messages := self._link.receive()):
            if self._link.is_closed:
                return
        self._launch: NodeLaunch = from_json(NodeLaunch, messages.pop(0))
        keep_secret(self._launch.env.get(VARIABLES, "").split(","))
        self._link.watch(self._selector, self._obey)
        self._clocks = GangClocks(self._launch, self._ranks)
        self._load = LoadWatch(self._launch.node, watched_handles(self._launch), Path(self._launch.directory))
        self._began_s = time.monotonic()
        self._start()
        self._obey(messages)
        while any(rank.is_running for rank in self._ranks) and time.monotonic() < self._release_due_s:
            self._wait()
        self._release()
        self._finish()
        kill_descendants()  # the fork server must not wait for those that would not die

    def _wait(self) -> None:
        """Wait for an event and handle it, or for the next deadline."""
        for key, events in self._selector.select(self._patience_s()):
            key.data(events)
        for rank in self._ranks_to_sample():
            rank.sample_memory(time.monotonic())
        self._load.usage.sample()
        self._check_clocks()

    def _ranks_to_sample(self) -> list[ForkedRank]:
        """Return running ranks on CPUs, whose programs' memory is read from the operating system."""
        if not self._launch.is_script or self._launch.device_kind != "cpu":
            return []
        return [rank for rank in self._ranks if rank.is_running]

    def _expect_sigterm(self) -> None:
        """Wake the loop on the signal by which a batch system ends a node's processes."""
        awake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGTERM, self._note_sigterm)
        self._selector.register(awake, selectors.EVENT_READ, lambda _: self._wake(awake))

    def _note_sigterm(self, *_: object) -> None:
        self._preempted_at_s = self._preempted_at_s or time.time()

    def _wake(self, awake: int) -> None:
        os.read(awake, CHUNK)
        if self._preempted_at_s is not None:
            self._stop(SIGTERM_SEEN)

    def _start(self) -> None:
        self._oom_kills.begin()
        try:
            make_private_folder(Path(self._launch.directory))
            if problem := self._not_free():
                self._note("device_busy", f"{self._launch.node} is not free: {problem}")
                self._stop(problem)
                return
            self._launch = with_master(self._launch)
            for slot in self._launch.slots:
                self._fork(slot)
        except OSError as error:
            self._note(of_host(error) or "lost", f"cannot start ranks on {self._launch.node}: {error}")
            self._stop(str(error))

    def _not_free(self) -> str | None:
        """Return the reason why the promised memory is not free; None if it is."""
        if self._launch.device_kind != "cpu":
            return not_free_reason(self._launch, SETTLE_BEFORE_S)
        limit_bytes = self._launch.spec.get("memory_limit_bytes")  # as in TrialSpec; other runners may have none
        num_devices = sum(len(slot.devices) for slot in self._launch.slots)
        return shortage(num_devices, limit_bytes) if isinstance(limit_bytes, int) else None

    def _fork(self, slot: RankSlot) -> None:
        rank = fork_rank(self._launch, slot)
        self._ranks.append(rank)
        self._selector.register(rank.pipe, selectors.EVENT_READ, lambda _: self._read(rank))
        self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda _: self._reap(rank))

    def _obey(self, messages: list[Any]) -> None:
        for message in messages:
            order: Order = from_json(Order, message)
            match order:
                case Beat():
                    self._silent_at_s = time.monotonic() + order.patience_s
                case PeerCompiles():
                    self._clocks.stand_still(order.seconds, time.monotonic())
                case StopGang():
                    if order.is_cause:
                        self._note("controller", order.reason)
                    self._stop(order.reason, is_hang=order.is_hang)
        if self._link.is_closed:
            self._stop("the agent has exited")

    def _read(self, rank: ForkedRank) -> None:
        if rank.pipe < 0:  # drained by _reap() in the same round
            return
        chunk = os.read(rank.pipe, CHUNK)
        if not chunk:
            self._selector.unregister(rank.pipe)
            os.close(rank.pipe)
            rank.pipe = -1
        arrived_s = time.monotonic()
        for message in rank.lines.feed(chunk):
            if message["kind"] == RankProgress.kind:
                self._advance(rank, from_json(RankProgress, message), arrived_s)
                self._report_progress()
            else:
                self._record_result(rank, from_json(RankResult, message))

    def _advance(self, rank: ForkedRank, progress: RankProgress, arrived_s: float) -> None:
        if rank.clock.phase == "starting" != progress.phase:
            self._started_at_s = time.monotonic()
        rank.note_step(progress, arrived_s)
        if seconds := self._clocks.advance(rank, progress, time.monotonic()):
            attempt, token = self._launch.attempt_id, self._launch.token
            self._link.send(NodeCompiling(attempt_id=attempt, token=token, seconds=seconds))

    def _reap(self, rank: ForkedRank) -> None:
        self._selector.unregister(rank.pidfd)
        os.close(rank.pidfd)
        os.close(rank.request_write)
        rank.kill()  # before reaping, while the group's id cannot be anyone else's
        _, status = os.waitpid(rank.pid, 0)
        rank.is_running = False
        self._drain(rank)
        if rank.result is None:
            self._record_result(rank, self._unreported(rank, os.waitstatus_to_exitcode(status)))

    def _drain(self, rank: ForkedRank) -> None:
        """Read the rest of a dead rank's pipe, which a process it left behind may hold open."""
        if rank.pipe >= 0:
            os.set_blocking(rank.pipe, False)
            with contextlib.suppress(BlockingIOError):
                while rank.pipe >= 0:
                    self._read(rank)
        if rank.pipe >= 0:
            self._selector.unregister(rank.pipe)
            rank.pipe = -1

    def _unreported(self, rank: ForkedRank, exit_code: int) -> RankFailure:
        if self._is_stopping and exit_code == -signal.SIGKILL:
            return rank.failure(self._launch.node, "stopped", "killed because the gang was being stopped")
        category, how = how_it_ended(exit_code, self._oom_kills)
        return rank.failure(self._launch.node, category, f"rank {rank.slot.rank} {how}", exit_code)

    def _record_result(self, rank: ForkedRank, result: RankResult) -> None:
        """Record the rank's result. Kill the gang: at once for a root cause, else after a grace period."""
        self._load.end()
        if isinstance(rank.result, RankFailure):  # it hung; its end means nothing
            return
        if isinstance(result, RankFailure):
            result = explained(result, rank, self._launch, self._oom_kills)
            if not self._is_stopping and result.category in MAY_HAVE_A_CAUSE:
                self._kill_at_s = min(self._kill_at_s, time.monotonic() + COLLATERAL_GRACE_S)
            else:
                self._stop(result.message)
        elif self._launch.is_script:
            for other in self._clocks.unsettled():
                other.clock.restart_wait(time.monotonic())
            result = with_program_memory(result, self._program_peak(rank), self._launch.device_kind)
        else:
            result = with_arrivals(result, rank.measured_at_s)
        rank.result = result
        if not self._is_stopping and len(self._ranks) == len(self._launch.slots) and not self._clocks.unsettled():
            self._release_due_s = time.monotonic() + self._launch.release_s

    def _program_peak(self, rank: ForkedRank) -> int:
        """Return the highest known device memory of the rank's program, in bytes; 0 if unknown."""
        if self._launch.device_kind == "cpu":
            return rank.program_peak_bytes
        return most_used(self._load.samples, slot_handles(self._launch, rank.slot))

    def _note(self, category: str, message: str, at_s: float | None = None) -> None:
        node, at_s = self._launch.node, at_s or time.time()
        self._notes.append(RankFailure(rank=None, node=node, category=category, message=message, at_s=at_s))

    def _patience_s(self) -> float | None:
        """Return the seconds until the next deadline."""
        due_s = min(self._release_due_s, self._kill_at_s, self._silent_at_s)
        if not self._is_stopping:
            due_s = min(
                due_s,
                self._load.usage.due_s,
                self._clocks.due_at_s(),
                *(rank.sample_at_s for rank in self._ranks_to_sample()),
            )
        return None if due_s == math.inf else max(0.0, due_s - time.monotonic())

    def _check_clocks(self) -> None:
        now_s = time.monotonic()
        if self._is_stopping:
            return
        if now_s >= self._silent_at_s:
            message = f"{self._launch.node} lost contact with the controller for too long, and stopped its ranks"
            self._note("controller", message)
            self._stop(message)
        elif now_s >= self._kill_at_s:
            self._stop("a connection between ranks was lost")
        elif (reason := self._clocks.overdue_reason(now_s)) is not None:
            self._stop(reason, is_hang=True)

    def _examine_hanging(self, message: str) -> None:
        """Examine all ranks without a result, also those that leave reports to others; this is their result."""
        hanging = [rank for rank in self._clocks.unsettled() if rank.is_running]
        states = examine([self._to_examine(rank) for rank in hanging])
        slowest = self._clocks.slowest()
        for rank in hanging:
            state, clock = states[rank.slot.rank], rank.clock if self._clocks.reports_progress(rank) else slowest
            failure = rank.failure(self._launch.node, "deadline", message, log_tail=state.tail)
            failure = with_host_cause(failure, self._oom_kills, Path(self._launch.directory))
            rank.result = replace(failure, phase=clock.phase, sights=state.sights)

    def _to_examine(self, rank: ForkedRank) -> HangingSlot:
        is_script = self._launch.is_script
        return HangingSlot(
            rank=rank.slot.rank,
            pid=rank.pid,
            log=rank.log,
            device=self._launch.device_kind,
            progress=rank.clock.position if self._clocks.reports_progress(rank) else None,
            folder=Path(self._launch.directory),
            request_write=-1 if is_script else rank.request_write,
            reports=report_folder(rank_folder(self._launch), rank.slot.rank) if is_script else None,
            starts=rank.slot.starts,
        )

    def _stop(self, reason: str, *, is_hang: bool = False) -> None:
        """End the gang here and on the other nodes; ``is_hang``: examine its ranks first."""
        if not self._is_stopping:
            self._is_stopping = True
            self._load.end()
            self._kill_at_s = self._silent_at_s = math.inf
            attempt, token = self._launch.attempt_id, self._launch.token
            self._link.send(NodeFailing(attempt_id=attempt, token=token, reason=reason, is_hang=is_hang))
            if is_hang:  # the other nodes examine theirs at the same time
                self._examine_hanging(reason)
            self._release_due_s = time.monotonic() + self._launch.release_s
            for rank in self._ranks:
                if rank.is_running:
                    rank.kill()

    def _report_progress(self) -> None:
        slowest = self._clocks.slowest()
        if slowest.position > self._reported and len(self._ranks) == len(self._launch.slots):
            self._reported = slowest.position
            self._load.enter(slowest.phase)
            os.utime(self._launch.directory)  # records how long it held its devices, in case the controller dies
            self._link.send(
                GangProgress(
                    attempt_id=self._launch.attempt_id,
                    token=self._launch.token,
                    phase=slowest.phase,
                    step=slowest.step,
                    step_time_s=slowest.step_time_s,
                )
            )

    def _release(self) -> None:
        """Ensure that no process of the gang is left and its devices' memory is free, or record what is not."""
        survivors = kill_descendants(self._launch.release_s)
        if survivors:
            self._note("lost", f"processes {survivors} on {self._launch.node} cannot be killed")
        elif self._ranks and not self._link.is_closed and (problem := not_free_reason(self._launch, SETTLE_AFTER_S)):
            self._note("device_busy", f"{self._launch.node} is not free after the gang: {problem}")
        if any(died_of_sigterm(rank.result) for rank in self._ranks):
            time.sleep(SIGTERM_GRACE_S)
        if self._preempted_at_s is not None:
            self._note("preempted", SIGTERM_SEEN, self._preempted_at_s)

    def _results(self) -> tuple[RankResult, ...]:
        """Return the ranks' results, with the ends of the logs of failed ranks."""
        finished = [with_log(rank.result, rank.log) for rank in self._ranks if rank.result is not None]
        return tuple(finished if self._preempted_at_s is None else map(as_preempted, finished))

    def _finish(self) -> None:
        remove_scratch(rank_folder(self._launch))
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # a full disk: the log stays as it is, for its owner alone
                redact_file(rank.log)
        self._link.finish(
            NodeGone(
                attempt_id=self._launch.attempt_id,
                token=self._launch.token,
                results=(*self._results(), *self._notes),
                disturbance=self._load.found,
            )
        )


def warden_main(fd: int) -> None:
    """Run a warden in this freshly forked process."""
    close_inherited(keep=(fd,))
    adopt_orphans()
    Warden(socket.socket(fileno=fd)).run()


# ---- The fork server: a process with torch and the runners' modules imported, whose children start in milliseconds
#
# It is single-threaded, does not import ray and touches no device, so that its children may. The agent passes it one
# end of a socket per attempt, and it forks a :mod:`cluster.node.warden` for that. When the agent's end of the control
# socket closes for any reason, the fork server kills all its descendants and exits. (It cannot use the kernel's
# parent-death signal: the kernel sends that when the *thread* that started it ends, and an agent has several.)

MESSAGES = (
    NodeLaunch,
    RankSlot,
    Deadlines,
    Beat,
    RankProgress,
    RankSuccess,
    RankPlace,
    RankFailure,
    RankReport,
    StepBreakdown,
)
"""Message types of wardens and ranks: resolved before the first fork, so that no child has to."""

CLOSE_TIMEOUT_S = 120.0
"""Time for its descendants to end, in seconds. A broken driver may hold processes forever."""


def preload(modules: Sequence[str]) -> list[str]:
    """Import ``modules``; return the errors, one line per module."""
    problems = []
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            sys.stderr.write(redact(traceback.format_exc()))
            problems.append(redact(f"cannot import {module}: {type(error).__name__}: {error}"))
    if problems and (known := torch_support.problem(torch_support.installed_version())):
        problems.append(known)
    return problems


class ForkServer:
    """Forks a warden for each attempt socket that arrives on ``control``, a packet socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._wardens: dict[int, int] = {}
        """By pid of each warden, the fork server's copy of its socket."""

    def serve(self) -> None:
        """Fork and reap until the agent is gone."""
        self._selector.register(self._control, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._reap(warden=key.data, pidfd=key.fd)
                elif not self._accept():
                    return

    def _accept(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if not message:
            return False
        warden = os.fork()
        if warden == 0:
            _run_warden(fds[0])
        self._wardens[warden] = fds[0]
        self._selector.register(os.pidfd_open(warden), selectors.EVENT_READ, warden)
        return True

    def _reap(self, *, warden: int, pidfd: int) -> None:
        """Reap an ended warden, and kill its remaining processes if it was killed.

        The agent takes the end of the attempt's socket as proof, so this process keeps a copy of it until then.
        """
        self._selector.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(warden, 0)
        fd = self._wardens.pop(warden)
        while orphans := [pid for pid in children() if pid not in self._wardens]:
            for pid in orphans:
                kill(pid)
                os.waitpid(pid, 0)
        os.close(fd)


def _run_warden(fd: int) -> None:
    code = 1
    try:
        warden_main(fd)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """``python -m cluster.node.warden <control fd> <sys.path entries as JSON> <module>...``"""
    gc.disable()  # imported modules stay: scanning them repeatedly takes a fifth of the start
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.path.extend(entry for entry in json.loads(sys.argv[2]) if entry not in sys.path)
    adopt_orphans()
    faulthandler.enable(file=2)  # ranks inherit both; their descriptor 2 is their own log
    faulthandler.register(DUMP_SIGNAL, file=2)
    problems = preload(sys.argv[3:])
    if too_small := shared_memory_shortage(MIN_SHARED_BYTES):
        problems.append(too_small)
    for cls in MESSAGES:  # parsing an empty message fails, but caches its types
        with contextlib.suppress(CodecError):
            from_json(cls, {})
    gc.collect()
    gc.freeze()
    gc.enable()
    collapse_pages()
    with contextlib.suppress(ConnectionError):
        control.send(json.dumps({"problems": problems}).encode())
        ForkServer(control).serve()
    kill_descendants(CLOSE_TIMEOUT_S)


if __name__ == "__main__":
    main()
