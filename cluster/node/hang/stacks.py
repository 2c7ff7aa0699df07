"""Sees where ranks stand that make no progress, and how far they are in their collectives.

The fork server has faulthandler dump them into the
rank's log on SIGUSR1, which works even while C code holds the interpreter. Programs of the user's own would be ended by
that signal: it goes to those processes of theirs only in which our hook has said that it may.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.gang.sights import Blame, FlightRecord, RankSight
from cluster.node.hang.recorder import RecordedRank, records
from cluster.processes import catches, descendants, process_info
from trials.accelerator.kinds import DeviceKind
from trials.secrets import redact

DUMP_SIGNAL = signal.SIGUSR1
DUMP_S = 0.3
"""How long stacks take to be written."""
TAIL_LINES = 20
REPORT_BYTES = 1 << 20
"""How far into a report file is looked for what our hook says when it is loaded."""
_HEADER = "(most recent call first):"
_TORCH = re.compile(r".*/torch(?:_npu)?/(?P<part>.*)$")
_WAITING_CALL = re.compile(r"\.(?:item|tolist|cpu|numpy|synchronize|wait|wait_stream|elapsed_time)\(|\.to\([\"']cpu")
"""Calls that return when the device has done its work."""
_WAITS = ("synchronize", "wait", "wait_event", "elapsed_time")
"""Functions of torch's that do so."""
_HOST_WORK = ("utils/data/", "_dynamo/", "_inductor/", "multiprocessing/", "serialization.py")
"""Parts of torch that keep the host busy, and give the device nothing to do."""
_WORDS: dict[Blame, Literal["stopped", "elsewhere", "unclear", "waiting"]] = {
    Blame.STOPPED: "stopped",
    Blame.ELSEWHERE: "elsewhere",
    Blame.UNCLEAR: "unclear",
    Blame.WAITING: "waiting",
}
_FRAME = re.compile(r'^ *File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLook:
    """What one rank was doing."""

    sight: RankSight
    tail: tuple[str, ...]
    """The log's last lines and the innermost frames of the main thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangingRank:
    """A rank to look at."""

    pid: int
    log: Path
    device: DeviceKind
    progress: tuple[int, int]
    """Phase and step that it has reported, as numbers."""
    recorded: RecordedRank
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


def examine(ranks: Sequence[HangingRank]) -> dict[int, RankLook]:
    """Look at hanging ranks, by their number: at their stacks and at their records, where they have any.

    Takes :data:`DUMP_S` where all give their records, and some seconds where one does not.
    """
    before = [_Before.of(rank.log) for rank in ranks]
    for pid in [pid for rank in ranks for pid in rank.telling]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, DUMP_SIGNAL)
    asked_s = time.monotonic()
    found = records([rank.recorded for rank in ranks])
    time.sleep(max(0.0, DUMP_S - (time.monotonic() - asked_s)))
    return {
        rank.recorded.rank: _look(rank, log, found.get(rank.recorded.rank))
        for rank, log in zip(ranks, before, strict=True)
    }


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


def _look(rank: HangingRank, log: _Before, record: FlightRecord | None) -> RankLook:
    stack = main_thread(_read(rank.log, log.size))
    before = tuple(redact(_read(rank.log, max(0, log.size - 4096), log.size)).splitlines()[-TAIL_LINES // 4 :])
    states = [info.state for pid in rank.trained_by if (info := process_info(pid)) is not None]
    blame, where = judge(stack, rank.device)
    if any(state in ("T", "t") for state in states):
        blame, where = Blame.STOPPED, "it was stopped by a signal"
    elif rank.reports is not None and not stack:
        where = f"its program had printed nothing for {log.silent_s:.0f} s"
    sight = RankSight(stack=_WORDS[blame], where=where, progress=rank.progress, record=record)
    return RankLook(sight=sight, tail=(*before, *stack)[:TAIL_LINES])


def main_thread(dump: str) -> tuple[str, ...]:
    """The lines of faulthandler's dump that are about the main thread, which comes last; innermost frame first."""
    lines = dump.splitlines()
    headers = [number for number, text in enumerate(lines) if text.endswith(_HEADER)]
    return tuple(lines[headers[-1] :]) if headers else ()


def judge(stack: Sequence[str], device: DeviceKind = "cpu") -> tuple[Blame, str]:
    """The blame by the innermost frame of a stack, or by its caller where that is an operator, and that frame in
    words.

    On an accelerator collectives run on the device: a rank waits for its peers wherever it waits for its device, and
    may do so wherever it gives the device work, once the queue is full.
    """
    frames = [match for text in stack if (match := _FRAME.match(text))]
    frame = next((frame for frame in frames if not frame["file"].endswith("torch/_ops.py")), None)
    if frame is None:
        return Blame.ELSEWHERE, "its stack cannot be had"
    where = f"it was in {frame['function']} ({Path(frame['file']).name}:{frame['line']})"
    part = _in_torch(frame["file"])
    if re.fullmatch(r"distributed/[^/]+", part):  # not what lies deeper, DTensor's and FSDP's own work
        return Blame.WAITING, f"{where}, waiting for its peers"
    if device != "cpu" and _waits_for_device(frame, part):
        return Blame.WAITING, f"{where}, waiting for its device"
    is_unclear = part.startswith(("autograd/", "distributed/")) or (device != "cpu" and _feeds_device(frame, part))
    return (Blame.UNCLEAR if is_unclear else Blame.ELSEWHERE), where


def _in_torch(file: str) -> str:
    """The part of a path inside torch, or an extension of it; empty for other code."""
    match = _TORCH.match(file)
    return "" if match is None else match["part"]


def _waits_for_device(frame: re.Match[str], part: str) -> bool:
    """Whether a frame waits for the device: by its name in torch, elsewhere by what its line calls, as methods such as
    ``item`` are C and have no frame of their own."""
    if part and frame["function"] in _WAITS:
        return True
    return _WAITING_CALL.search(linecache.getline(frame["file"], int(frame["line"]))) is not None


def _feeds_device(frame: re.Match[str], part: str) -> bool:
    """Whether a frame may have given the device work: torch's own code but for what keeps the host busy, and what its
    compiler has written."""
    return "torchinductor" in frame["file"] or (bool(part) and not part.startswith(_HOST_WORK))


def _read(log: Path, start: int, end: int | None = None) -> str:
    try:
        with log.open("rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start).decode("utf-8", errors="replace")
    except OSError:
        return ""
