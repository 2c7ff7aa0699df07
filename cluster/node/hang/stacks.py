"""Sees where ranks stand that make no progress, and how far they are in their collectives.

The fork server has faulthandler dump their stacks into the slot's log on SIGUSR1, which works even while C code holds
the interpreter. Programs of the user's own would be ended by that signal: it goes to those processes of theirs only in
which our hook has said that it may.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.gang.sights import Blame, FlightRecord, RankSight
from cluster.node.hang.hanging import HangingSlot
from cluster.node.hang.recorder import records
from cluster.processes import blocking, catches, is_pending, process_info
from trials.accelerator.kinds import DeviceKind
from trials.secrets import redact

DUMP_SIGNAL = signal.SIGUSR1
DUMP_S = 3.0
"""How long a rank is given to write its stack: some milliseconds are enough, but on a loaded node."""
ALL_DUMPS_S = 12.0
"""How long all ranks of a slot are given, which are asked one by one."""
_POLL_S = 0.01
TAIL_LINES = 20
Stack = tuple[str, ...]
"""The lines of faulthandler's dump of one thread, innermost frame first."""
_HEADER = "(most recent call first):"
_TORCH = re.compile(r".*/torch(?:_npu)?/(?P<part>.*)$")
_WAITING_CALL = re.compile(
    r"\.(?:item|tolist|cpu|numpy|synchronize|wait|wait_stream|elapsed_time)\(|\.to\([\"']cpu"
    r"|\b(?:bool|float|int|nonzero|argwhere|masked_select|unique|equal|allclose)\("
    r"|^\s*(?:if|elif|while|assert)\b.*\b(?:torch\.|(?:all|any)\()"
    r"|\w\[[^\]]*[<>!=]=?[^\]]*\]"
)
"""Code that goes on when the device has done its work: what reads a value, branches on one, or picks by a mask."""
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
class SlotLook:
    """What the ranks of one slot were doing."""

    sights: tuple[RankSight, ...]
    tail: tuple[str, ...]
    """The log's last lines and the innermost frames of a main thread, one that waits for no peer where there is any."""


def examine(slots: Sequence[HangingSlot]) -> dict[int, SlotLook]:
    """Look at hanging slots, by their number: at the stacks of their ranks and at their records, where they have any.

    Takes as long as the ranks that one slot has need to write their stacks, at most :data:`ALL_DUMPS_S`, at the same
    time in all slots, and then no time where all give their records, some seconds where one does not.
    """
    before = {slot.rank: _Before.of(slot.log) for slot in slots}
    ranks = {slot.rank: slot.ranks() for slot in slots}
    stacks = _stacks(slots, ranks)
    found = records([slot.recorded(rank) for slot in slots for rank in ranks[slot.rank]])
    return {slot.rank: _look(slot, before[slot.rank], ranks[slot.rank], stacks[slot.rank], found) for slot in slots}


def _stacks(slots: Sequence[HangingSlot], ranks: Mapping[int, dict[int, list[int]]]) -> dict[int, dict[int, Stack]]:
    """Stacks of main threads by slot and rank, of those that were asked; empty where a rank gave none in time. Ranks of
    one slot write to one log: they are asked one by one."""
    waiting = {slot.rank: sorted(slot.telling(ranks[slot.rank]).items()) for slot in slots}
    found: dict[int, dict[int, Stack]] = {slot.rank: {} for slot in slots}
    late: list[_Question] = []
    end_s = time.monotonic() + ALL_DUMPS_S
    while any(waiting.values()):
        firsts = [(slot, *waiting[slot.rank].pop(0)) for slot in slots if waiting[slot.rank]]
        asked = [(rank, _Question.put(slot, pid)) for slot, rank, pid in firsts if catches(pid, DUMP_SIGNAL)]
        _wait_for([question for _, question in asked], min(time.monotonic() + DUMP_S, end_s))
        for rank, question in asked:
            is_mixed = any(one.slot is question.slot and one.has_begun() for one in late)
            found[question.slot.rank][rank] = () if is_mixed or question.may_write() else question.stack()
        late += [question for _, question in asked if question.may_write()]
    return found


def _wait_for(asked: Sequence[_Question], limit_s: float) -> None:
    """Wait until all stacks are written and the logs grow no more, for a thread that took no signal before may be the
    one that writes; at most until ``limit_s``."""
    sizes: list[int] = []
    while time.monotonic() < limit_s:
        before, sizes = sizes, [_Before.of(question.slot.log).size for question in asked]
        if sizes == before and not any(question.is_open() for question in asked):
            return
        time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class _Question:
    """A process that was asked for its stack."""

    slot: HangingSlot
    pid: int
    size: int
    """Bytes in the slot's log, before."""
    deaf: frozenset[str]
    """Threads that did not take the signal before."""

    @classmethod
    def put(cls, slot: HangingSlot, pid: int) -> _Question:
        """Ask a process that catches the signal: it would end others."""
        question = cls(slot, pid, _Before.of(slot.log).size, blocking(pid, DUMP_SIGNAL))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, DUMP_SIGNAL)
        return question

    def has_begun(self) -> bool:
        """Whether the signal has reached the process."""
        return not is_pending(self.pid, DUMP_SIGNAL)

    def is_open(self) -> bool:
        """Whether the stack is still to come. A process that is stopped, or gone, writes none."""
        info = process_info(self.pid)
        if info is None or not info.is_running or info.state in "Tt":
            return False
        return self.may_write() or not self.stack()

    def may_write(self) -> bool:
        """Whether anything may yet be written: not once no thread is in the signal's handler any more."""
        return not self.has_begun() or bool(blocking(self.pid, DUMP_SIGNAL) - self.deaf)

    def stack(self) -> Stack:
        return main_thread(_read(self.slot.log, self.size))


@dataclass(frozen=True, slots=True)
class _Before:
    """A slot's log before its ranks were asked for stacks."""

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


def _look(
    slot: HangingSlot,
    log: _Before,
    ranks: Mapping[int, list[int]],
    stacks: Mapping[int, Stack],
    found: Mapping[int, FlightRecord],
) -> SlotLook:
    sights = []
    for rank, pids in sorted(ranks.items()):
        blame, where = judge(stacks.get(rank, ()), slot.device)
        states = [info.state for pid in pids if (info := process_info(pid)) is not None]
        if any(state in ("T", "t") for state in states):
            blame, where = Blame.STOPPED, "it was stopped by a signal"
        elif stacks.get(rank) == () and any(state not in ("Z", "X") for state in states):
            blame, where = Blame.UNCLEAR, "it did not tell its stack in time"
        elif slot.reports is not None and not stacks.get(rank):
            where = f"its program had printed nothing for {log.silent_s:.0f} s"
        sights.append(
            RankSight(rank=rank, stack=_WORDS[blame], where=where, progress=slot.progress, record=found.get(rank))
        )
    shown = min((sight for sight in sights if stacks.get(sight.rank)), key=lambda sight: sight.blame, default=None)
    stack = () if shown is None else stacks[shown.rank]
    before = tuple(redact(_read(slot.log, max(0, log.size - 4096), log.size)).splitlines()[-TAIL_LINES // 4 :])
    return SlotLook(sights=tuple(sights), tail=(*before, *stack)[:TAIL_LINES])


def main_thread(dump: str) -> Stack:
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
