"""Finds which of several ranks without progress is to blame, while the others only wait for it.

Ranks in step report the same progress, so the stacks decide. The fork server has faulthandler dump them into the
rank's log on SIGUSR1, which works even while C code holds the interpreter.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.processes import process_info
from trials.secrets import redact

DUMP_SIGNAL = signal.SIGUSR1
DUMP_S = 0.3
"""How long stacks take to be written."""
TAIL_LINES = 20
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


def examine(ranks: Sequence[tuple[int, Path]]) -> list[HangFinding]:
    """Look at hanging ranks, each a pid and its log. Takes :data:`DUMP_S`."""
    sizes = [_size(log) for _, log in ranks]
    for pid, _ in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, DUMP_SIGNAL)
    time.sleep(DUMP_S)
    return [_finding(pid, log, size) for (pid, log), size in zip(ranks, sizes, strict=True)]


def _finding(pid: int, log: Path, size: int) -> HangFinding:
    stack = main_thread(_read(log, size))
    before = tuple(redact(_read(log, max(0, size - 4096), size)).splitlines()[-TAIL_LINES // 4 :])
    tail = (*before, *stack)[:TAIL_LINES]
    info = process_info(pid)
    if info is not None and info.state in ("T", "t"):
        return HangFinding(blame=Blame.STOPPED, where="it was stopped by a signal", tail=tail)
    blame, where = judge(stack)
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


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _read(log: Path, start: int, end: int | None = None) -> str:
    try:
        with log.open("rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start).decode("utf-8", errors="replace")
    except OSError:
        return ""
