"""Finds which of several ranks without progress is to blame, while the others only wait for it.

Ranks in step report the same progress, so the stacks decide. The fork server has faulthandler dump them into the
rank's log on SIGUSR1, which works even while C code holds the interpreter. Programs of the user's own would be ended by
that signal: it goes to those processes of theirs only in which our hook has said that it may.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.processes import catches, descendants, process_info
from trials.secrets import redact

DUMP_SIGNAL = signal.SIGUSR1
DUMP_S = 0.3
"""How long stacks take to be written."""
TAIL_LINES = 20
REPORT_BYTES = 1 << 20
"""How far into a report file is looked for what our hook says when it is loaded."""
_HEADER = "(most recent call first):"
_FRAME = re.compile(r'^ *File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


class Blame(enum.IntEnum):
    """How likely a rank is the one for which the others wait; the smaller, the likelier."""

    STOPPED = 0
    """A signal has stopped it: it does not run at all."""
    ELSEWHERE = 1
    """It is in code that waits for no peer, or its stack cannot be had."""
    UNCLEAR = 2
    """It is in code that both computes and communicates: the backward pass, FSDP, distributed tensors."""
    WAITING = 3
    """It waits in a collective operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangFinding:
    """What one rank was doing."""

    blame: Blame
    where: str
    """Function, file and line in which it was, as a clause for people."""
    tail: tuple[str, ...]
    """The log's last lines and the innermost frames of the main thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangingRank:
    """A rank to look at."""

    pid: int
    log: Path
    reports: Path | None = None
    """Folder in which a program of the user's own, and our hook in it, report; None where it runs a model of ours."""

    @property
    def trained_by(self) -> list[int]:
        """The processes that train, the rank itself or those of its program."""
        return [self.pid] if self.reports is None else descendants(self.pid)

    @property
    def telling(self) -> list[int]:
        """Those of them that write their stacks when they are asked."""
        if self.reports is None:
            return [self.pid]
        registered = _registered(self.reports)
        return [pid for pid in self.trained_by if pid in registered and catches(pid, DUMP_SIGNAL)]


def examine(ranks: Sequence[HangingRank]) -> list[HangFinding]:
    """Look at hanging ranks. Takes :data:`DUMP_S`."""
    before = [_Before.of(rank.log) for rank in ranks]
    for pid in [pid for rank in ranks for pid in rank.telling]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, DUMP_SIGNAL)
    time.sleep(DUMP_S)
    return [_finding(rank, log) for rank, log in zip(ranks, before, strict=True)]


@dataclass(frozen=True, slots=True)
class _Before:
    """A rank's log before it was asked for stacks."""

    size: int
    silent_s: float
    """Seconds since it last grew."""

    @classmethod
    def of(cls, log: Path) -> _Before:
        try:
            status = log.stat()
        except OSError:
            return cls(0, 0.0)
        return cls(status.st_size, max(0.0, time.time() - status.st_mtime))


def _registered(reports: Path) -> set[int]:
    """Pids of the processes in which our hook has the stacks written on :data:`DUMP_SIGNAL`, by what they reported."""
    found = set()
    for path in reports.glob("rank*.jsonl"):
        for text in _read(path, 0, REPORT_BYTES).splitlines():
            if '"stack_signal"' in text:
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    told = json.loads(text)
                    found |= {int(told["pid"])} if told["stack_signal"] is True else set()
    return found


def _finding(rank: HangingRank, log: _Before) -> HangFinding:
    stack = main_thread(_read(rank.log, log.size))
    before = tuple(redact(_read(rank.log, max(0, log.size - 4096), log.size)).splitlines()[-TAIL_LINES // 4 :])
    tail = (*before, *stack)[:TAIL_LINES]
    states = [info.state for pid in rank.trained_by if (info := process_info(pid)) is not None]
    if any(state in ("T", "t") for state in states):
        return HangFinding(blame=Blame.STOPPED, where="it was stopped by a signal", tail=tail)
    blame, where = judge(stack)
    if rank.reports is not None and not stack:
        where = f"its program had printed nothing for {log.silent_s:.0f} s"
    return HangFinding(blame=blame, where=where, tail=tail)


def main_thread(dump: str) -> tuple[str, ...]:
    """The lines of faulthandler's dump that are about the main thread, which comes last; innermost frame first."""
    lines = dump.splitlines()
    headers = [number for number, text in enumerate(lines) if text.endswith(_HEADER)]
    return tuple(lines[headers[-1] :]) if headers else ()


def judge(stack: Sequence[str]) -> tuple[Blame, str]:
    """The blame by the innermost frame of a stack, or by its caller where that is an operator, and that frame in
    words."""
    frames = [match for text in stack if (match := _FRAME.match(text))]
    frame = next((frame for frame in frames if not frame["file"].endswith("torch/_ops.py")), None)
    if frame is None:
        return Blame.ELSEWHERE, "its stack cannot be had"
    where = f"it was in {frame['function']} ({Path(frame['file']).name}:{frame['line']})"
    _, in_torch, part = frame["file"].rpartition("/torch/")
    if in_torch and re.fullmatch(r"distributed/[^/]+", part):  # not what lies deeper, DTensor's and FSDP's own work
        return Blame.WAITING, f"{where}, waiting for its peers"
    return (Blame.UNCLEAR if in_torch and part.startswith(("autograd/", "distributed/")) else Blame.ELSEWHERE), where


def _read(log: Path, start: int, end: int | None = None) -> str:
    try:
        with log.open("rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start).decode("utf-8", errors="replace")
    except OSError:
        return ""
