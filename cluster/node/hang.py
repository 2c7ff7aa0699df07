"""Looks at ranks that make no progress, before they are killed: their stacks, and what torch's Flight Recorder has of
their collectives.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster.gang.hang_verdict import FlightRecord, GroupPlace, PendingCall, RankSight, StackState
from cluster.node.guardian import environment_of
from cluster.processes import blocking, catches, descendants, is_pending, process_info
from trials.accelerator.kinds import DeviceKind
from trials.files import CodecError, from_json, to_json, write_atomically
from trials.secrets import redact

# A rank's Flight Recorder, torch's ring of the latest collectives: reads it, and tells it from a thread on request.
#
# While the main thread waits in C for a collective or a device it does not hold the interpreter, so that another
# thread can answer; where C code holds it, nobody does. torch tells JSON; what leaves the rank is a summary of bounded
# size (:class:`FlightRecord`).


BUFFER_SIZE = 2000
"""Operations that the recorder remembers, torch's own default; a variable of the user's goes over it."""
MAX_CALLS = 64
"""Most operations under way that a summary tells."""
MAX_GROUPS = 256
MAX_CHARS = 200
_MODULES = ("torch._C._distributed_c10d", "torch_npu._C._distributed_c10d")
_READER = re.compile(r"_dump_\w+_trace_json")
"""Names of the functions by which torch and its extensions tell a recorder as JSON: one for NCCL, one for the rest."""
_PEER = re.compile(r"(?P<op>send|recv)\s+(?P<own>\d+)(?:->|<-)(?P<peer>\d+)")
"""How NCCL names what one rank sends another: ranks in the group, ``nccl:recv 0<-1``."""

_TOGETHER = "coalesced"
"""How the name ends under which NCCL records several operations as a whole."""


def answer_requests(requests: int, answer: Path) -> None:
    """Start the thread that writes the record to ``answer`` whenever a byte comes on the pipe ``requests``."""
    threading.Thread(target=_serve, args=(requests, answer), name="flight-recorder", daemon=True).start()


def _serve(requests: int, answer: Path) -> None:
    while os.read(requests, 1):
        with contextlib.suppress(Exception):  # no answer is an answer, and training must not end for it
            write_atomically(answer, [json.dumps(to_json(read_record())).encode()], mode=0o600)


def read_record() -> FlightRecord:
    """This process's record; empty while it belongs to no group.

    Raises:
        ValueError, KeyError, TypeError: torch tells something that is not known here.
    """
    dumps = [json.loads(read()) for read in _readers()]
    return merged([summary(dump, _members()) for dump in dumps])


def _readers() -> list[Any]:
    modules = (sys.modules.get(name) for name in _MODULES)
    return [getattr(module, name) for module in modules if module for name in dir(module) if _READER.fullmatch(name)]


def _members() -> dict[str, tuple[int, ...]]:
    """Global ranks of this process's groups by name, as ``torch.distributed`` keeps them: gloo's recorder does not."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return {}
    world = c10d._world
    return {
        str(name): tuple(sorted(world.pg_group_ranks[group], key=world.pg_group_ranks[group].get))
        for group, name in world.pg_names.items()
        if group in world.pg_group_ranks
    }


def merged(records: Sequence[FlightRecord]) -> FlightRecord:
    """The records of several recorders of one process as one."""
    return FlightRecord(
        places=tuple(place for record in records for place in record.places)[:MAX_GROUPS],
        calls=tuple(call for record in records for call in record.calls)[:MAX_CALLS],
        is_complete=all(record.is_complete for record in records),
    )


def summary(dump: Mapping[str, Any], members: Mapping[str, Sequence[int]]) -> FlightRecord:
    """What a dump of the recorder (its format 2) says of a rank's place in its groups.

    Args:
        members: global ranks by name of group, where the dump may not have them.

    Raises:
        ValueError, KeyError, TypeError: the dump has another format.
    """
    entries = [entry for entry in dump.get("entries", ()) if isinstance(entry, Mapping)]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(_group(entry), []).append(entry)
    known = {**_dumped_members(dump), **members}
    places, calls = [], []
    for group, found in list(groups.items())[:MAX_GROUPS]:
        name, label = (str(part) for part in found[-1]["process_group"])
        ranks = tuple(known.get(name, ()))
        entered = max(int(entry["collective_seq_id"]) for entry in found)
        places.append(GroupPlace(group=group, label=(label or name)[:MAX_CHARS], ranks=ranks, entered=entered))
        calls += _pending(group, found, ranks)
    first = min((int(entry["record_id"]) for entry in entries), default=0)
    return FlightRecord(places=tuple(places), calls=tuple(calls[:MAX_CALLS]), is_complete=first == 0)


def _group(entry: Mapping[str, Any]) -> str:
    """Backend and name: a group of two backends counts for each."""
    return f"{_operation(entry)[0]}:{entry['process_group'][0]}"[:MAX_CHARS]


def _operation(entry: Mapping[str, Any]) -> tuple[str, str]:
    backend, _, name = str(entry["profiling_name"]).rpartition(":")
    return backend, name[:MAX_CHARS]


def _dumped_members(dump: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    config = dump.get("pg_config") or {}
    return {
        str(name): tuple(int(rank) for rank in re.findall(r"\d+", str(group.get("ranks", ""))))
        for name, group in config.items()
    }


def _pending(group: str, entries: Iterable[Mapping[str, Any]], ranks: Sequence[int]) -> list[PendingCall]:
    """The earliest collective that has not ended, and all sends and receives that have not."""
    active = _active(entries)
    collectives = [entry for entry in active if not entry.get("is_p2p")]
    earliest = sorted(collectives, key=lambda entry: int(entry["collective_seq_id"]))[:1]
    found = [_call(group, entry, None) for entry in earliest]
    for entry in active:
        match = _PEER.search(str(entry["profiling_name"])) if entry.get("is_p2p") else None
        if match and int(match["peer"]) < len(ranks):
            found.append(_call(group, entry, ranks[int(match["peer"])]))
    return found


def _active(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The operations that have not ended.

    NCCL records operations that it sends off together one by one and then as a whole, all under one number; only the
    whole is reported when it begins and ends.
    """
    found: list[Mapping[str, Any]] = []
    whole: Mapping[str, Any] | None = None
    for entry in sorted(entries, key=lambda entry: int(entry["record_id"]), reverse=True):
        if str(entry["profiling_name"]).endswith(_TOGETHER):
            whole = entry
        is_part = whole is not None and entry is not whole and _number(entry) == _number(whole, like=entry)
        reported = whole if is_part and whole is not None else entry
        if not _has_ended(reported):
            found.append({**entry, "state": reported.get("state")})
    return found


def _number(entry: Mapping[str, Any], like: Mapping[str, Any] | None = None) -> int:
    """The number of an operation among those of its kind, or of the kind of another one."""
    return int(entry["p2p_seq_id" if (like or entry).get("is_p2p") else "collective_seq_id"])


def _call(group: str, entry: Mapping[str, Any], peer: int | None) -> PendingCall:
    sizes = json.dumps(entry.get("input_sizes", []), separators=(",", ":"))
    return PendingCall(
        group=group,
        number=0 if peer is not None else int(entry["collective_seq_id"]),
        name=_operation(entry)[1].partition(" ")[0],
        sizes=sizes[:MAX_CHARS],
        is_started=entry.get("state") == "started",
        peer=peer,
    )


def _has_ended(entry: Mapping[str, Any]) -> bool:
    """Whether the operation is over. gloo only retires its entries; NCCL also those that it gave up."""
    return entry.get("state") == "completed" or (bool(entry.get("retired")) and _operation(entry)[0] == "gloo")


# The warden's side of the Flight Recorder: asks ranks for their records.
#
# Ranks of ours have a thread that tells it (:mod:`cluster.node.hang`). Users' programs have none;
# for them NCCL has a named pipe, which a thread of C++ looks at about once a second: its dump is a pickle, and is read
# by an unpickler that knows no class. Both need the interpreter, NCCL to name the Python frames in its dump: where C
# code holds it there is no record, and the stack alone tells.


ANSWER_S = 2.0
"""How long a rank's thread may take to answer: it has to get at the interpreter."""
PIPE_S = 10.0
"""How long NCCL's thread may take to notice and to write. A process's first dump takes 1.5 s of CPU time to name frames
(torch 2.13)."""
POLL_S = 0.02
MAX_BYTES = 32 << 20
"""A dump that is larger is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRank:
    """Where the record of a rank can be had."""

    rank: int
    folder: Path
    request_write: int
    """Descriptor of the pipe to the rank's thread; below 0 where there is none."""

    @property
    def answer(self) -> Path:
        return self.folder / f"rank{self.rank}.flight.json"

    @property
    def dump(self) -> Path:
        """Where NCCL dumps to."""
        return self.folder / f"{DUMP_PREFIX}{self.rank}"

    @property
    def pipe(self) -> Path:
        """NCCL's named pipe."""
        return self.folder / f"{DUMP_PREFIX}{self.rank}.pipe"


DUMP_PREFIX = "nccl-flight-rank"
_BUFFERS = (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), ("TORCH_HCCL_TRACE_BUFFER_SIZE",))
_FILES = (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), ("TORCH_HCCL_DEBUG_INFO_TEMP_FILE",))
_PIPES = (("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",), ("TORCH_HCCL_DEBUG_INFO_PIPE_FILE",))
"""Variables of NCCL's recorder and of HCCL's, each with the names that versions of torch have for it."""


def recorder_env(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which torch keeps and dumps records in ``folder``, as far as ``environment`` does not say otherwise.

    torch reads the names of one variable in an order of its own, and versions know different ones: a value that the
    environment has under one name is given under all, so that ours never goes over it. The pipe is left out where the
    file system has none: NCCL would refuse to start.
    """
    prefix = str(folder / DUMP_PREFIX)
    wanted = {**dict.fromkeys(_BUFFERS, str(BUFFER_SIZE)), **dict.fromkeys(_FILES, prefix)}
    if _has_pipes(folder):
        wanted |= dict.fromkeys(_PIPES, prefix)
    found = {}
    for names, ours in wanted.items():
        value = next((environment[name] for name in names if name in environment), ours)
        found.update({name: value for name in names if name not in environment})
    return found


def listening(folder: Path) -> list[int]:
    """The ranks on this host that listen on a pipe in ``folder``, in order; nodes may share the folder."""
    found = []
    for path in folder.glob(f"{DUMP_PREFIX}*.pipe"):
        number = path.name.removeprefix(DUMP_PREFIX).removesuffix(".pipe")
        if number.isdigit():
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                found.append(int(number))
    return sorted(found)


def _has_pipes(folder: Path) -> bool:
    probe = folder / f".pipe-{os.getpid()}"
    try:
        os.mkfifo(probe, 0o600)
        probe.unlink()
    except OSError:
        return False
    return True


def records(ranks: Sequence[RecordedRank]) -> dict[int, FlightRecord]:
    """The records of those ranks that give one. Takes up to :data:`ANSWER_S` and :data:`PIPE_S`."""
    found = _collected([rank for rank in ranks if _request_dump(rank)], _answer, ANSWER_S)
    without_thread = [rank for rank in ranks if rank.request_write < 0 and _request_nccl_dump(rank)]
    return {**found, **_collected(without_thread, _dumped, PIPE_S)}


def _request_dump(rank: RecordedRank) -> bool:
    if rank.request_write < 0:
        return False
    rank.answer.unlink(missing_ok=True)
    try:
        os.write(rank.request_write, b"?")
    except OSError:
        return False
    return True


def _request_nccl_dump(rank: RecordedRank) -> bool:
    """Write to the rank's named pipe, if NCCL has made one and listens."""
    rank.dump.unlink(missing_ok=True)
    try:
        pipe = os.open(rank.pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.write(pipe, b"?")
    except OSError:
        return False
    finally:
        os.close(pipe)
    return True


def _collected(
    ranks: Sequence[RecordedRank], read: Callable[[RecordedRank], FlightRecord | None], patience_s: float
) -> dict[int, FlightRecord]:
    give_up_s = time.monotonic() + patience_s
    found: dict[int, FlightRecord] = {}
    while len(found) < len(ranks):
        for rank in ranks:
            if rank.rank not in found and (record := read(rank)) is not None:
                found[rank.rank] = record
        if time.monotonic() >= give_up_s:
            break
        time.sleep(POLL_S)
    return found


def _answer(rank: RecordedRank) -> FlightRecord | None:
    with contextlib.suppress(ValueError, CodecError):
        if content := _content(rank.answer):
            record: FlightRecord = from_json(FlightRecord, json.loads(content))
            return record
    return None


def _dumped(rank: RecordedRank) -> FlightRecord | None:
    """What NCCL wrote; None while it is not all there."""
    if not (content := _content(rank.dump)):
        return None
    try:
        return summary(unpickled(content), {})
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError:
        return b""
    return content if len(content) <= MAX_BYTES else b""


class _PlainUnpickler(pickle.Unpickler):
    """Builds dictionaries, lists, texts and numbers, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a record names the class {module}.{name}")


def unpickled(content: bytes) -> dict[str, Any]:
    """The dump of a recorder as torch pickles it.

    Raises:
        pickle.UnpicklingError: it is no plain data.
    """
    found = _PlainUnpickler(io.BytesIO(content)).load()
    if not isinstance(found, dict):
        raise pickle.UnpicklingError("a record is a dictionary")
    return found


# A slot whose ranks make no progress: which of its processes are which ranks, and which of them tell their stacks.
#
# A program that starts its ranks itself has one slot per node, and its ranks are numbered in the gang: by those
# numbers records name them, and so do we.


REPORT_BYTES = 1 << 20
"""How far into a report file is looked for what our hook says when it is loaded."""
_RANK = re.compile(rb"RANK=(\d{1,7})")
_REPORT = re.compile(r"rank(\d{1,7})\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangingSlot:
    """A slot to look at."""

    rank: int
    """Its number."""
    pid: int
    log: Path
    device: DeviceKind
    progress: tuple[int, int] | None
    """Phase and step that it has reported, as numbers; None where others report for it."""
    folder: Path
    """The attempt's, where records are written to."""
    request_write: int = -1
    """Descriptor of the pipe on which its thread is asked for the record; below 0 where there is none."""
    reports: Path | None = None
    """Folder in which a user's program, and our hook in it, report; None where it runs a model of ours."""
    starts: tuple[int, ...] = ()
    """The gang's ranks that belong on its devices, where it starts them itself."""

    def ranks(self) -> dict[int, list[int]]:
        """The gang's ranks here, each with the pids of its processes, as far as these are known.

        Those that the slot starts itself are recognised by the ``RANK`` in their environment. A program that sets it
        later is recognised by the pipes that NCCL listens on. Otherwise the slot is the first rank of its devices.
        """
        if self.reports is None:
            return {self.rank: [self.pid]}
        below = descendants(self.pid)
        if not self.starts:
            return {self.rank: below}
        found: dict[int, list[int]] = {}
        for pid in below:
            reported = next((match for entry in environment_of(pid) if (match := _RANK.fullmatch(entry))), None)
            if reported is not None:
                found.setdefault(int(reported[1]), []).append(pid)
        return found or {rank: [] for rank in listening(self.folder)} or {self.starts[0]: below}

    def recorded(self, rank: int) -> RecordedRank:
        """Where the record of one of its ranks can be had."""
        return RecordedRank(rank=rank, folder=self.folder, request_write=self.request_write)

    def telling(self, ranks: dict[int, list[int]]) -> dict[int, int]:
        """For each of ``ranks`` that has one, the process that writes its main thread's stack when it is asked: the
        one in which the training loop began, else the first that announced it."""
        if self.reports is None:
            return {self.rank: self.pid}
        found: dict[int, int] = {}
        living = set(descendants(self.pid))
        for path in sorted(self.reports.glob("rank*.jsonl")):
            number = _REPORT.fullmatch(path.name)
            rank = int(number[1]) if number and self.starts else self.rank
            for pid, trains in _registered(path):
                if rank in ranks and pid in living and (trains or rank not in found):
                    found[rank] = pid
        return found


def _registered(path: Path) -> list[tuple[int, bool]]:
    """Pids of the processes in which our hook has the stacks written when it is asked, by what they reported, each with
    whether its training loop has begun."""
    found = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        for text in file.read(REPORT_BYTES).splitlines():
            if b'"stack_signal"' in text:
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    reported = json.loads(text)
                    if reported["stack_signal"] is True:
                        found.append((int(reported["pid"]), reported.get("event") == "begin"))
    return found


# Sees where ranks stand that make no progress, and how far they are in their collectives.
#
# The fork server has faulthandler dump their stacks into the slot's log on SIGUSR1, which works even while C code
# holds the interpreter. Users' programs would be ended by that signal: it goes to those processes of theirs
# only in which our hook has allowed it.


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
_WORDS: dict[StackState, Literal["stopped", "elsewhere", "unclear", "waiting"]] = {
    StackState.STOPPED: "stopped",
    StackState.ELSEWHERE: "elsewhere",
    StackState.UNCLEAR: "unclear",
    StackState.WAITING: "waiting",
}
_FRAME = re.compile(r'^ *File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """What the ranks of one slot were doing."""

    sights: tuple[RankSight, ...]
    tail: tuple[str, ...]
    """The log's last lines and the innermost frames of a main thread, one that waits for no peer where there is any."""


def examine(slots: Sequence[HangingSlot]) -> dict[int, SlotState]:
    """Look at hanging slots, by their number: at the stacks of their ranks and at their records, where they have any.

    Takes as long as the ranks that one slot has need to write their stacks, at most :data:`ALL_DUMPS_S`, at the same
    time in all slots, and then no time where all give their records, some seconds where one does not.
    """
    before = {slot.rank: _Before.of(slot.log) for slot in slots}
    ranks = {slot.rank: slot.ranks() for slot in slots}
    stacks = _stacks(slots, ranks)
    found = records([slot.recorded(rank) for slot in slots for rank in ranks[slot.rank]])
    return {
        slot.rank: _examine_slot(slot, before[slot.rank], ranks[slot.rank], stacks[slot.rank], found) for slot in slots
    }


def _stacks(slots: Sequence[HangingSlot], ranks: Mapping[int, dict[int, list[int]]]) -> dict[int, dict[int, Stack]]:
    """Stacks of main threads by slot and rank, of those that were asked; empty where a rank gave none in time. Ranks of
    one slot write to one log: they are asked one by one."""
    waiting = {slot.rank: sorted(slot.telling(ranks[slot.rank]).items()) for slot in slots}
    found: dict[int, dict[int, Stack]] = {slot.rank: {} for slot in slots}
    late: list[_Question] = []
    end_s = time.monotonic() + ALL_DUMPS_S
    while any(waiting.values()):
        firsts = [(slot, *waiting[slot.rank].pop(0)) for slot in slots if waiting[slot.rank]]
        requests = [(rank, _Question.put(slot, pid)) for slot, rank, pid in firsts if catches(pid, DUMP_SIGNAL)]
        _wait_for([question for _, question in requests], min(time.monotonic() + DUMP_S, end_s))
        for rank, question in requests:
            is_mixed = any(one.slot is question.slot and one.has_begun() for one in late)
            found[question.slot.rank][rank] = () if is_mixed or question.may_write() else question.stack()
        late += [question for _, question in requests if question.may_write()]
    return found


def _wait_for(requests: Sequence[_Question], limit_s: float) -> None:
    """Wait until all stacks are written and the logs grow no more, for a thread that took no signal before may be the
    one that writes; at most until ``limit_s``."""
    sizes: list[int] = []
    while time.monotonic() < limit_s:
        before, sizes = sizes, [_Before.of(question.slot.log).size for question in requests]
        if sizes == before and not any(question.is_open() for question in requests):
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


def _examine_slot(
    slot: HangingSlot,
    log: _Before,
    ranks: Mapping[int, list[int]],
    stacks: Mapping[int, Stack],
    found: Mapping[int, FlightRecord],
) -> SlotState:
    sights = []
    for rank, pids in sorted(ranks.items()):
        stack_state, where = judge(stacks.get(rank, ()), slot.device)
        states = [info.state for pid in pids if (info := process_info(pid)) is not None]
        if any(state in ("T", "t") for state in states):
            stack_state, where = StackState.STOPPED, "it was stopped by a signal"
        elif stacks.get(rank) == () and any(state not in ("Z", "X") for state in states):
            stack_state, where = StackState.UNCLEAR, "it did not report its stack in time"
        elif slot.reports is not None and not stacks.get(rank):
            where = f"its program had printed nothing for {log.silent_s:.0f} s"
        sights.append(
            RankSight(rank=rank, stack=_WORDS[stack_state], where=where, progress=slot.progress, record=found.get(rank))
        )
    shown = min(
        (sight for sight in sights if stacks.get(sight.rank)), key=lambda sight: sight.stack_state, default=None
    )
    stack = () if shown is None else stacks[shown.rank]
    before = tuple(redact(_read(slot.log, max(0, log.size - 4096), log.size)).splitlines()[-TAIL_LINES // 4 :])
    return SlotState(sights=tuple(sights), tail=(*before, *stack)[:TAIL_LINES])


def main_thread(dump: str) -> Stack:
    """The lines of faulthandler's dump that are about the main thread, which comes last; innermost frame first."""
    lines = dump.splitlines()
    headers = [number for number, text in enumerate(lines) if text.endswith(_HEADER)]
    return tuple(lines[headers[-1] :]) if headers else ()


def judge(stack: Sequence[str], device: DeviceKind = "cpu") -> tuple[StackState, str]:
    """The blame by the innermost frame of a stack, or by its caller where that is an operator, and that frame in
    words.

    On an accelerator collectives run on the device: a rank waits for its peers wherever it waits for its device, and
    may do so wherever it gives the device work, once the queue is full.
    """
    frames = [match for text in stack if (match := _FRAME.match(text))]
    frame = next((frame for frame in frames if not frame["file"].endswith("torch/_ops.py")), None)
    if frame is None:
        return StackState.ELSEWHERE, "its stack is unavailable"
    where = f"it was in {frame['function']} ({Path(frame['file']).name}:{frame['line']})"
    part = _in_torch(frame["file"])
    if re.fullmatch(r"distributed/[^/]+", part):  # not what lies deeper, DTensor's and FSDP's own work
        return StackState.WAITING, f"{where}, waiting for its peers"
    if device != "cpu" and _waits_for_device(frame, part):
        return StackState.WAITING, f"{where}, waiting for its device"
    is_unclear = part.startswith(("autograd/", "distributed/")) or (device != "cpu" and _feeds_device(frame, part))
    return (StackState.UNCLEAR if is_unclear else StackState.ELSEWHERE), where


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
