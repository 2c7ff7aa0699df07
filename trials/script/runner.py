"""Entry point of a rank that runs a training program: starts it, watches it, reports.

Also runs under plain torchrun::

    torchrun --nproc-per-node 2 -m trials.script.runner --spec spec.json --out report.json
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trials.failure import NodeFault, of_host
from trials.files import from_json, is_disk_full, to_json, write_json
from trials.outcome import Phase, ProgressSink, RankReport, ignore_progress
from trials.profiling.program_profile import UnreadableProfile, read_window, windows
from trials.reports import Findings, RankProfile, ScriptReport
from trials.script.command import (
    OUT,
    PeerState,
    Places,
    ScriptCommand,
    ScriptRank,
    child_environment,
    extensions_folder,
    remember_secrets,
    remove_stale_locks,
)
from trials.script.judge import (
    NEEDLES,
    CommandError,
    Judge,
    MeasuredSteps,
    NoMetricsError,
    OutputWatch,
    TooFewStepsError,
    failure,
    how_it_ended,
)
from trials.script.logs import LogParser, make_parser
from trials.script.report_lines import BoundedLog, FolderTails, LineSplitter, StepBook

# ---- The program as a process: started in a separate session, ended together with everything that it started
#
# The rank becomes the parent of the program's orphans, so no process escapes by detaching itself. The kernel ends the
# program when the rank dies.

TERM_GRACE_S = 2.0
"""Seconds from SIGTERM to SIGKILL."""
KILL_TIMEOUT_S = 30.0
"""Time limit for the kernel to end its processes, in seconds: a driver may hold them."""
PIPE_BYTES = 1 << 20
"""Buffer for output that the rank has not yet read, so that programs with much output need not wait."""
_SETTLE_S = 0.01
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """The running program.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, argv: Sequence[str], *, cwd: str, environment: Mapping[str, str]) -> None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._others = set(_children())
        self._process = subprocess.Popen(
            list(argv),
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
            preexec_fn=_die_with_rank,
        )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        assert self._process.stdout is not None
        self.output: int = self._process.stdout.fileno()
        os.set_blocking(self.output, False)
        with contextlib.suppress(OSError):  # the user already has many pipes
            fcntl.fcntl(self.output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def end(self) -> int | None:
        """End the program and everything it started; return the exit code if it had ended by itself."""
        code = self.exit_code
        if code is None:
            _signal_group(self.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(TERM_GRACE_S)
        _signal_group(self.pid, signal.SIGKILL)
        self._kill_adopted()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_TIMEOUT_S)
        return code

    def close(self) -> None:
        """Close pipe and process; call :meth:`end` first."""
        if self._process.stdout is not None:
            self._process.stdout.close()
        os.close(self.pidfd)

    def _kill_adopted(self) -> None:
        """Kill and reap the program's descendants, which become children of this process when their parents die."""
        give_up_s = time.monotonic() + KILL_TIMEOUT_S
        while time.monotonic() < give_up_s:
            left = [pid for pid in _children() if pid not in self._others and pid != self.pid]
            for pid in left:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
            if not left and self.exit_code is not None:
                return
            time.sleep(_SETTLE_S)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _die_with_rank() -> None:
    """Run in the program's process before exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _children() -> list[int]:
    """Return the pids of this process's children, including adopted ones."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


# ---- Watching of a program until its steps are measured or it has ended: output, report files, log files, peers

POLL_S = 0.1
"""Seconds between reads of files."""
REPORTS_S = 0.02
"""Minimum seconds between reads of report files: the arrival of their lines shows how long steps took. Two reads per
step see each line separately; more of them would take time from programs that use all cores."""
PEERS_S = 0.2
"""Seconds between reads of the states of the node's ranks."""
MAX_JUDGING = 0.05
"""Largest fraction of the time for judging the reports: it grows with the number of steps."""
LIFE_S = 5.0
"""Seconds between heartbeats of a program that prints but ends no step."""
READ_BYTES = 1 << 18
READS_PER_POLL = 16
DRAIN_S = 1.0
"""Time limit for reading the output of an ended program, in seconds: its leftover processes may print for ever."""
GRACE_S = 2.0
"""Seconds, in addition to the time of two steps, that peers on other nodes get to end this rank's last step."""
MAX_GRACE_S = 30.0
"""Seconds that a rank with all its steps waits for those of its node, and at most for others."""
SETTLE_S = 20.0
"""Seconds that loader workers may take to lose their lead; less than :data:`MAX_GRACE_S`."""
PEER_WAIT_S = 5.0
"""Seconds that a rank without reports waits for one that reports for it, after its program has succeeded."""
PEER_WAIT_AFTER_FAILURE_S = 0.5
PROFILE_WAIT_S = 120.0
"""Seconds that a program continues until the hook has written its recording."""
DISK_FULL_S = 2.0
"""Seconds for which the disk may be full while the program runs; report files then lose lines."""


class ProgramWatch:
    """Watch over one rank's program, from its start to the end of its measured steps."""

    def __init__(
        self,
        command: ScriptCommand,
        rank: ScriptRank,
        places: Places,
        child: Child,
        files: FolderTails,
        progress: ProgressSink,
    ) -> None:
        self._command, self._rank, self._places, self._child = command, rank, places, child
        self._progress = progress
        self.book = StepBook(command)
        self.judge = Judge(command, self.book)
        self._errors = OutputWatch()
        self._log = BoundedLog(1, is_own=places.has_own_log)
        self._parser = make_parser(command.log)
        self._lines = LineSplitter(_needles(self._parser))
        self._reports = FolderTails([f"{glob.escape(str(places.report))}/rank*.jsonl"], poll_again_s=POLL_S)
        self._files = files
        self._file_parsers: dict[str, LogParser] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(child.output, selectors.EVENT_READ)
        self._selector.register(child.pidfd, selectors.EVENT_READ)
        self._output_bytes = 0
        self._is_open = True
        self._polled_at_s = self._output_at_s = self._judge_at_s = 0.0
        self._reported_steps = -1
        self._step_time_s = 0.0
        self._reported_at_s = time.monotonic()
        self._reported_bytes = 0
        self._reported_state: PeerState | None = None
        self._has_measured = False
        self._settles_since_s: float | None = None
        """When all required steps were complete."""
        self._peers: list[PeerState] = []
        self._polled_peers_at_s = 0.0
        self._disk_full_since_s: float | None = None

    def follow(self) -> MeasuredSteps | None:
        """Follow it until the steps of this rank and of its peers are measured. Return None if another rank of this
        node reports for this one.

        Raises:
            NotApplied, TrainingDiverged, NodeFault: see :mod:`trials.failure`.
            Exception: the error that ended the program before its steps were measured, under its own type.
        """
        times = None
        while times is None:
            if self._child.exit_code is not None:
                return self._after_end()
            if self._wait(POLL_S):
                begin_s = time.monotonic()
                self._publish_progress()
                times = self._measured()
                self._judge_at_s = time.monotonic() + (time.monotonic() - begin_s) / MAX_JUDGING
                if times is None and self._is_covered_by_peer():
                    return None
        self._await_profile()
        self._publish_measured()
        self._let_peers_finish(times)
        return self._measured()

    def _await_profile(self) -> None:
        """In a recorded run, continue until the hook has written the recordings of this rank's processes."""
        end_s = time.monotonic() + PROFILE_WAIT_S
        while self._child.exit_code is None and time.monotonic() < end_s:
            if len(windows(self._places.report)) >= _num_recorded(self._command, self._rank):
                return
            self._wait(POLL_S)
            self._progress("measuring", step=self._command.protocol.num_steps)

    def close(self) -> None:
        """Write the rest of the log."""
        self._selector.close()
        self._log.close()

    def _wait(self, timeout_s: float) -> bool:
        """Sleep until the program prints or ends, at most this long, and read what is new. Return True if it is time to
        judge it: all files were read, and the last time was long enough ago."""
        pause_s = min(timeout_s, max(REPORTS_S, self._step_time_s / 2)) if self._reports.tails else timeout_s
        for key, _ in self._selector.select(pause_s):
            if key.fd == self._child.output:
                self._read()
            else:
                self._selector.unregister(self._child.pidfd)
        self._read_reports()
        is_due = time.monotonic() - self._polled_at_s >= POLL_S
        if is_due:
            self._watch_disk()
            self._poll()
        return is_due and time.monotonic() >= self._judge_at_s

    def _read(self) -> bool:
        """Read the program's output; return whether there may be more."""
        for _ in range(READS_PER_POLL):
            try:
                chunk = os.read(self._child.output, READ_BYTES)
            except BlockingIOError:
                return False
            if not chunk:
                self._selector.unregister(self._child.output)
                self._is_open = False
                return False
            self._output_bytes += len(chunk)
            self._output_at_s = time.monotonic()
            self._log.write(chunk)
            for line in self._lines.feed(chunk):
                self._parse_line(line, self._parser, "output", arrived_s=self._output_at_s)
        return True

    def _parse_line(
        self, line: str, parser: LogParser, origin: str, *, arrived_s: float, since_s: float | None = None
    ) -> None:
        self._errors.feed(line)
        name = self._command.log.name
        for record in parser.feed(line):
            self.book.add_log_record(record, format_name=name, origin=origin, arrived_s=arrived_s, since_s=since_s)

    def _poll(self, *, is_last: bool = False) -> None:
        """Read what was appended to files."""
        self._polled_at_s = time.monotonic()
        self._read_reports(is_last=is_last)
        for path, line in self._files.new_lines(is_last=is_last):
            if path not in self._file_parsers:
                self._file_parsers[path] = make_parser(self._command.log)
            tail = self._files.tails[path]
            self._parse_line(line, self._file_parsers[path], path, arrived_s=tail.written_s, since_s=tail.since_s)
        for path in (*self._reports.full, *self._files.full):
            self.book.note(f"{Path(path).name} is too long and not read to its end")

    def _read_reports(self, *, is_last: bool = False) -> None:
        for path, line in self._reports.new_lines(is_last=is_last):
            tail = self._reports.tails[path]
            self.book.add_report_line(line, origin=Path(path).name, arrived_s=tail.written_s, since_s=tail.since_s)

    def _measured(self) -> MeasuredSteps | None:
        """Return the times of the measured steps, if they are complete and not contradicted."""
        if self.judge.num_steps < max(1, self._command.num_warmup_steps):
            return None
        self.judge.check_finite()
        self.judge.check_facts()
        self.judge.check_knobs()
        if self.judge.num_steps < self._command.num_required_steps:
            return None
        self.judge.check_options()
        self.judge.check_knobs(is_last=True)
        return self.judge.times() if self._has_settled() else None

    def _has_settled(self) -> bool:
        """Whether the measured steps are final: loader workers may be ahead of the program for some time."""
        if self._command.is_detection or self._command.profile is not None:
            return True
        now_s = time.monotonic()
        self._settles_since_s = self._settles_since_s or now_s
        is_over = now_s - self._settles_since_s >= SETTLE_S or self._child.exit_code is not None
        return self.judge.settle(is_last=is_over)

    def _publish_progress(self) -> None:
        """Report progress: new steps, or a heartbeat."""
        if self._has_measured:
            return
        command, now_s = self._command, time.monotonic()
        steps = min(self.judge.num_steps, command.num_required_steps)
        is_alive = self._output_bytes > self._reported_bytes and now_s - self._reported_at_s >= LIFE_S
        if steps == 0:  # the first may compile for long: until it ends, the start deadline applies
            self._report_peers()
            return
        if steps <= self._reported_steps and not is_alive:
            return
        self._reported_steps, self._reported_at_s, self._reported_bytes = (
            max(steps, self._reported_steps),
            now_s,
            self._output_bytes,
        )
        is_warm = self._reported_steps > command.num_warmup_steps
        phase: Phase = "measuring" if is_warm else "warmup"
        step = self._reported_steps - (command.num_warmup_steps if is_warm else 0)
        time_s = self.judge.last_step_time_s()
        self._step_time_s = time_s or 0.0
        self._places.publish(PeerState(state="training", phase=phase, step=step, step_time_s=time_s))
        self._progress(phase, step=step, step_time_s=time_s)

    def _report_peers(self) -> None:
        """Report the progress of the rank of this node that reports for this one."""
        if self._rank.local_slots == 1:
            return
        words = [word for word in self._peer_states() if word.phase is not None]
        furthest = max(words, key=lambda word: (word.phase == "measuring", word.step), default=None)
        if furthest is not None and furthest.phase is not None and furthest != self._reported_state:
            self._reported_state = furthest
            self._progress(furthest.phase, step=furthest.step, step_time_s=furthest.step_time_s)

    def _let_peers_finish(self, times: MeasuredSteps) -> None:
        """Continue until all ranks of the node are done and others have had enough time, or the program has ended."""
        begin_s, are_all_here = time.monotonic(), self._rank.num_slots == self._rank.local_slots
        grace_s = 0.0 if are_all_here else min(MAX_GRACE_S, GRACE_S + 2 * times.seconds[-1])
        while (waited_s := time.monotonic() - begin_s) < MAX_GRACE_S and self._child.exit_code is None:
            if waited_s >= grace_s and self._num_done() >= self._rank.local_slots:
                break
            self._wait(POLL_S)
        self._finish_reading()

    def _is_covered_by_peer(self) -> bool:
        """Whether another rank of the node has measured, and this one has nothing to report."""
        if self._rank.local_slots == 1 or not self._is_measured_by_peer():
            return False
        if self.judge.last_step_time_s() is not None:
            end_s = time.monotonic() + MAX_GRACE_S
            while self._measured() is None and self._child.exit_code is None and time.monotonic() < end_s:
                self._wait(POLL_S)
            if self._measured() is not None or self._child.exit_code is not None:
                return False
            self.book.note("this rank reported fewer steps than another rank of its node, whose report is used")
        self._report_peers()
        self._places.publish(PeerState(state="silent"))
        return True

    def _after_end(self) -> MeasuredSteps | None:
        """Return the times, including the program's last output, or raise the reason why there are none."""
        self._finish_reading()
        if (times := self._measured()) is not None:
            self._publish_measured()
            return times
        cause = self._failure()
        if isinstance(cause, TooFewStepsError) and self._has_enough() and (times := self._measured()) is not None:
            self._publish_measured()
            return times
        is_good = self._child.exit_code == 0 and isinstance(cause, NoMetricsError | TooFewStepsError)
        end_s = time.monotonic() + (PEER_WAIT_S if is_good else PEER_WAIT_AFTER_FAILURE_S)
        while self._rank.local_slots > 1 and time.monotonic() < end_s:
            if self._is_measured_by_peer():
                self._places.publish(PeerState(state="silent"))
                return None
            if self._num_done() >= self._rank.local_slots - 1:
                break
            time.sleep(POLL_S)
        if is_good and self._rank.num_slots > self._rank.local_slots and not self.book.series:
            self._places.publish(PeerState(state="silent"))
            return None
        raise cause

    def _has_enough(self) -> bool:
        """Whether the program succeeded after fewer steps than configured, but enough; these then count as measured."""
        command, fewest = self._command, self._command.fewest_steps
        done = self.judge.num_steps - command.num_warmup_steps
        if self._child.exit_code != 0 or fewest is None or not fewest <= done < command.protocol.num_steps:
            return False
        self._command = replace(command, protocol=replace(command.protocol, num_steps=done, max_steps=done))
        self.judge = Judge(self._command, self.book)
        return True

    def _publish_measured(self) -> None:
        """Publish that this rank has its steps: its last message."""
        self._publish_progress()
        self._has_measured = True
        self._places.publish(PeerState(state="measured", phase="measuring", step=self._command.protocol.num_steps))

    def _peer_states(self) -> list[PeerState]:
        """Return the latest states of the node's ranks."""
        if time.monotonic() - self._polled_peers_at_s >= PEERS_S:
            self._polled_peers_at_s, self._peers = time.monotonic(), self._places.peer_states()
        return self._peers

    def _is_measured_by_peer(self) -> bool:
        return any(word.state == "measured" for word in self._peer_states())

    def _num_done(self) -> int:
        """Count the ranks of the node that no longer need their programs."""
        return (
            1
            if self._rank.local_slots == 1
            else sum(word.state != "training" or word.is_gone for word in self._peer_states())
        )

    def _finish_reading(self) -> None:
        """Read the rest of output and files."""
        end_s = time.monotonic() + DRAIN_S
        while self._is_open and time.monotonic() < end_s and self._read():
            pass
        for line in self._lines.flush():
            self._parse_line(line, self._parser, "output", arrived_s=self._output_at_s)
        self._poll(is_last=True)
        self._publish_progress()

    def _watch_disk(self) -> None:
        """Record when the disk of the attempt's folder is full.

        Raises:
            OSError: it has been for too long.
        """
        if not is_disk_full(self._places.scratch):
            return
        now_s = time.monotonic()
        self._disk_full_since_s = self._disk_full_since_s or now_s
        if not self._has_measured and now_s - self._disk_full_since_s >= DISK_FULL_S:
            raise self._disk_error()

    def _disk_error(self) -> OSError:
        return OSError(errno.ENOSPC, "the disk was full while the program ran", str(self._places.scratch))

    def _failure(self) -> Exception:
        """Return why the program has ended too early."""
        if self._disk_full_since_s is not None or is_disk_full(self._places.scratch):
            return self._disk_error()
        code, done = self._child.exit_code, min(self.judge.num_steps, self._command.num_required_steps)
        found = failure(
            reported_errors=self.book.errors,
            file=self._places.error_file,
            output=self._errors,
            exit_code=code,
            where=f"after {done} of {self._command.num_required_steps} steps",
            is_megatron=self._command.log.name == "megatron",
        )
        if found is not None:
            return found
        if self.judge.num_steps == 0:
            return NoMetricsError(self._nothing_reported())
        return TooFewStepsError(self._too_few())

    def _nothing_reported(self) -> str:
        """Describe the ways to report steps, and what was observed of each."""
        log, hooked = self._command.log, "the hook is off"
        if self.book.facts or self.book.versions:
            hooked = "the hook was loaded but saw no optimiser step"
        elif self._command.hook:
            hooked = "the hook did not report"
        looked_at = f"{self._output_bytes} bytes of output and {len(self._file_parsers)} log files have no line that"
        lines = f"{looked_at} looks like {log.name}'s"
        if log.name in ("none", "pattern"):
            lines = f"{looked_at} {log.pattern!r} matches" if log.pattern else "no log format is set"
        return (
            f"the command {how_it_ended(self._child.exit_code)} but reported no step. Steps can be reported with "
            f"`from tune_cluster_report import report` ({len(self._reports.tails)} report files found), by the "
            f"hook in its Python ({hooked}), or in printed lines ({lines})"
        )

    def _too_few(self) -> str:
        """Describe what is missing in the reported steps."""
        needed, warm_up = self._command.num_required_steps, self._command.num_warmup_steps
        counted = f"{self.judge.num_steps} of {needed} steps ({warm_up} to warm up, {needed - warm_up} to measure)"
        if self.judge.num_steps < needed:
            return f"the command {how_it_ended(self._child.exit_code)} after {counted}: let it train longer"
        return (
            f"the command reported {counted}, but not the time of each: report each step with its time, or print "
            "its line when the step ends"
        )


def _num_recorded(command: ScriptCommand, rank: ScriptRank) -> int:
    """Return the least number of recorded processes of this slot."""
    if command.profile is None:
        return 0
    if command.launcher == "env":
        return int(rank.rank in command.profile.ranks)
    first = rank.rank * rank.num_devices
    return sum(first <= one < first + rank.num_devices for one in command.profile.ranks)


def read_profile(
    command: ScriptCommand, rank: ScriptRank, places: Places, progress: ProgressSink
) -> tuple[RankProfile, ...]:
    """Read the hook's recordings of this slot's processes; empty in a run that is not recorded.

    Raises:
        CommandError: nothing was recorded, or it cannot be read.
    """
    wanted = _num_recorded(command, rank)
    found = windows(places.report)
    if wanted and not found:
        raise CommandError("the hook recorded no step: no torch optimiser made a step, or the torch profiler failed")
    step = command.protocol.num_steps
    try:
        return tuple(read_window(path, places.profile, lambda: progress("measuring", step=step)) for path in found)
    except (UnreadableProfile, KeyError) as error:
        raise CommandError(f"the hook's recording cannot be read: {error}") from error


def log_files(command: ScriptCommand, places: Places) -> FolderTails:
    """Find the program's log files before it starts: what they contain by then is from earlier runs.

    Raises:
        ValueError: the log format is unknown, or its pattern is invalid.
    """
    patterns = [_pattern(file, command, places) for file in command.log.files]
    files = FolderTails(patterns, _needles(make_parser(command.log)))
    files.skip_present()
    return files


def _needles(parser: LogParser) -> tuple[bytes, ...] | None:
    return None if parser.needles is None else (*parser.needles, *NEEDLES)


def _pattern(file: str, command: ScriptCommand, places: Places) -> str:
    """Return the absolute pattern of a log file."""
    filled = places.fill(file.replace(OUT, glob.escape(str(places.out))), command)
    return filled if filled.startswith("/") else f"{glob.escape(command.cwd)}/{filled}"


def run_rank(spec: Mapping[str, Any], progress: ProgressSink) -> dict[str, Any]:
    """Run this rank's program; return its :class:`RankReport` as JSON, without steps if another rank reports for it.

    ``spec`` is a :class:`ScriptCommand` as JSON. Returns or raises only after all processes of the program have ended.

    Raises:
        CodecError: the JSON is not a ScriptCommand.
        NotApplied, TrainingDiverged, NodeFault: see :mod:`trials.failure`. Other errors that ended the program pass
            through under their own type, for :func:`trials.failure.classify`.
    """
    command: ScriptCommand = from_json(ScriptCommand, spec)
    remember_secrets(command.env)
    rank = ScriptRank.from_env(os.environ)
    places = Places.from_env(os.environ, rank)
    places.make(command)
    try:
        if rank.local_rank == 0:
            remove_stale_locks(extensions_folder(command, os.environ))
        report = _run(command, rank, places, progress)
    finally:
        places.leave()
    return to_json(report)  # type: ignore[no-any-return]


def _run(command: ScriptCommand, rank: ScriptRank, places: Places, progress: ProgressSink) -> RankReport:
    files = _log_files(command, places)
    began_s = time.monotonic()
    child = _start(command, rank, places)
    try:
        watch = ProgramWatch(command, rank, places, child, files, progress)
        try:
            times = watch.follow()
        finally:
            exit_code = child.end()
            watch.close()
    finally:
        child.end()
        child.close()
    report = _report(command, rank, watch.judge, times, exit_code)
    if times is None or command.is_detection:
        return report
    if command.profile is not None:  # recording delays the lines, and its times are no measurement
        profile = read_profile(command, rank, places, progress)
        return replace(report, findings=replace(report.findings, profile=profile))
    contradiction = watch.judge.contradiction(began_s=began_s if exit_code is not None else None)
    return replace(report, contradiction=contradiction)


def _start(command: ScriptCommand, rank: ScriptRank, places: Places) -> Child:
    argv = [places.fill(argument, command) for argument in command.argv]
    own = tuple((pair[0], places.fill(pair[1], command)) for pair in command.env if len(pair) == 2)
    environment = child_environment(
        replace(command, env=own), rank, os.environ, report=places.report, error_file=places.error_file
    )
    try:
        return Child(argv, cwd=command.cwd, environment=environment)
    except OSError as error:
        if of_host(error) is not None:
            raise NodeFault(f"cannot start the command on {socket.gethostname()}: {error}") from error
        if not Path(command.cwd).is_dir():
            where = f"directory {command.cwd} does not exist on node {socket.gethostname()}"
            raise CommandError(
                f"{where}: the program starts from its original path, which must exist on every node"
            ) from error
        reason = error.strerror or type(error).__name__
        raise CommandError(f"cannot start {argv[0]!r} in {command.cwd}: {reason}") from error


def _log_files(command: ScriptCommand, places: Places) -> FolderTails:
    try:
        return log_files(command, places)
    except ValueError as error:  # invalid log format
        raise CommandError(str(error)) from None


def _report(
    command: ScriptCommand, rank: ScriptRank, judge: Judge, times: MeasuredSteps | None, exit_code: int | None
) -> RankReport:
    """Build the rank's report, without values that were not reported."""
    seconds = times.seconds if times is not None else ()
    script = judge.report(times, exit_code)
    resident = judge.peak("rss_bytes") if command.device == "cpu" else 0
    return RankReport(
        rank=rank.rank,
        world_size=rank.num_slots,
        tokens_per_step=_amount(script.tokens_per_step, command.tokens_per_step),
        step_times_s=seconds,
        breakdown=judge.breakdown(seconds),
        peak_allocated_bytes=judge.peak("allocated_bytes") or resident,
        peak_reserved_bytes=judge.peak("reserved_bytes") or resident,
        num_warmup_steps=judge.num_warmup_steps,
        losses=judge.per_step("loss"),
        grad_norms=judge.per_step("grad_norm"),
        model_flops_per_token=command.model_flops_per_token or _flops_per_token(script, command),
        device_name=script.facts.device_name or "",
        matmul_format=dtype if (dtype := script.facts.dtype) in HALF else "",  # fp32 may run as TF32
        step_memory_bytes=judge.peaks("rss_bytes" if command.device == "cpu" else "allocated_bytes"),
        samples_per_step=_amount(script.samples_per_step, command.samples_per_step),
        findings=Findings(script=script),
        num_ranks=rank.num_devices if command.launcher == "own" else 1,
        step_time_resolution_s=times.resolution_s if times is not None else 0.0,
    )


HALF = ("float16", "bfloat16")


def _flops_per_token(script: ScriptReport, command: ScriptCommand) -> float:
    """Compute from the operators of a step on this rank, assuming equal ranks; 0 if some may be counted twice."""
    facts = script.facts
    if not facts.flops_per_step or facts.layer_calls_per_forward != 1:
        return 0.0
    return facts.flops_per_step * command.num_devices / _amount(script.tokens_per_step, command.tokens_per_step)


def _amount(seen: float | None, reported: int) -> int:
    """Return the amount trained on per step, by the program's own count if it has one: batches may vary in length."""
    return max(1, round(seen)) if seen is not None else reported


def main() -> None:
    """Run one rank under torchrun; rank 0 writes the report."""
    parser = argparse.ArgumentParser(description="Run one rank of your training program under torchrun.")
    parser.add_argument("--spec", type=Path, required=True, help="ScriptCommand as JSON")
    parser.add_argument("--out", type=Path, default=None, help="file for rank 0's report as JSON; stdout by default")
    arguments = parser.parse_args()
    report = run_rank(json.loads(arguments.spec.read_text()), ignore_progress)
    if report["rank"] == 0:
        write_json(report, arguments.out)


if __name__ == "__main__":
    main()
