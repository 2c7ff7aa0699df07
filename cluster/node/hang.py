"""Examines ranks without progress before they are killed: their stacks, and their collectives according to torch's
Flight Recorder.
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

# A rank's Flight Recorder, torch's ring of the latest collectives: reads it, and answers requests from a thread.
#
# A main thread that waits in C for a collective or a device does not hold the interpreter, so another thread can
# answer. If C code holds it, no thread can. torch exports the recorder as JSON; a summary of bounded size leaves the
# rank (:class:`FlightRecord`).


BUFFER_SIZE = 2000
"""Number of operations the recorder keeps, torch's default. A user's variable overrides it."""
MAX_CALLS = 64
"""Most pending operations in a summary."""
MAX_GROUPS = 256
MAX_CHARS = 200
_MODULES = ("torch._C._distributed_c10d", "torch_npu._C._distributed_c10d")
_READER = re.compile(r"_dump_\w+_trace_json")
"""Functions by which torch and its extensions export a recorder as JSON: one for NCCL, one for the rest."""
_PEER = re.compile(r"(?P<op>send|recv)\s+(?P<own>\d+)(?:->|<-)(?P<peer>\d+)")
"""NCCL's name of a send or receive between two ranks of the group: ``nccl:recv 0<-1``."""

_TOGETHER = "coalesced"
"""Ending of the name under which NCCL records several operations as a whole."""


def answer_requests(requests: int, answer: Path) -> None:
    """Start the thread that writes the record to ``answer`` on every byte from the pipe ``requests``."""
    threading.Thread(target=_serve, args=(requests, answer), name="flight-recorder", daemon=True).start()


def _serve(requests: int, answer: Path) -> None:
    while os.read(requests, 1):
        with contextlib.suppress(Exception):  # a missing answer is handled; training must not fail for it
            write_atomically(answer, [json.dumps(to_json(read_record())).encode()], mode=0o600)


def read_record() -> FlightRecord:
    """Read this process's record; empty if it belongs to no group.

    Raises:
        ValueError, KeyError, TypeError: torch's export has an unknown format.
    """
    dumps = [json.loads(read()) for read in _readers()]
    return merged([summary(dump, _members()) for dump in dumps])


def _readers() -> list[Any]:
    modules = (sys.modules.get(name) for name in _MODULES)
    return [getattr(module, name) for module in modules if module for name in dir(module) if _READER.fullmatch(name)]


def _members() -> dict[str, tuple[int, ...]]:
    """Return the global ranks of this process's groups by name. gloo's recorder lacks them."""
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
    """Merge the records of several recorders of one process."""
    return FlightRecord(
        places=tuple(place for record in records for place in record.places)[:MAX_GROUPS],
        calls=tuple(call for record in records for call in record.calls)[:MAX_CALLS],
        is_complete=all(record.is_complete for record in records),
    )


def summary(dump: Mapping[str, Any], members: Mapping[str, Sequence[int]]) -> FlightRecord:
    """Summarize a rank's place in its groups from a dump of the recorder (its format 2).

    Args:
        members: global ranks by name of group, for dumps that lack them.

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
    """Return backend and name: a group with two backends counts once for each."""
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
    """Return the earliest pending collective, and all pending sends and receives."""
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
    """Return the operations that have not ended.

    NCCL records coalesced operations one by one and then as a whole, all under one number. Only the whole gets start
    and end times.
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
    """Return the number of an operation among those of its kind, or of another operation's kind."""
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
    """Whether the operation has ended. gloo only retires its entries; NCCL also retires those it gave up."""
    return entry.get("state") == "completed" or (bool(entry.get("retired")) and _operation(entry)[0] == "gloo")


# The warden's side of the Flight Recorder: requests records from ranks.
#
# Ranks of the built-in runner answer from a thread (:mod:`cluster.node.hang`). For user programs, NCCL has a named
# pipe that a C++ thread polls about once a second. Its dump is a pickle, and is read by an unpickler without classes.
# Both need the interpreter: NCCL needs it to name the Python frames in its dump. If C code holds it, there is no
# record, and only the stack remains.


ANSWER_S = 2.0
"""Time for a rank's thread to answer, in seconds: it has to acquire the interpreter."""
PIPE_S = 10.0
"""Time for NCCL's thread to notice and to write, in seconds. A process's first dump takes 1.5 s of CPU time to name
frames (torch 2.13)."""
POLL_S = 0.02
MAX_BYTES = 32 << 20
"""Largest dump that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRank:
    """Where to get a rank's record."""

    rank: int
    folder: Path
    request_write: int
    """Descriptor of the pipe to the rank's thread; negative if there is none."""

    @property
    def answer(self) -> Path:
        return self.folder / f"rank{self.rank}.flight.json"

    @property
    def dump(self) -> Path:
        """NCCL's dump file."""
        return self.folder / f"{DUMP_PREFIX}{self.rank}"

    @property
    def pipe(self) -> Path:
        """NCCL's named pipe."""
        return self.folder / f"{DUMP_PREFIX}{self.rank}.pipe"


DUMP_PREFIX = "nccl-flight-rank"
_BUFFERS = (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), ("TORCH_HCCL_TRACE_BUFFER_SIZE",))
_FILES = (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), ("TORCH_HCCL_DEBUG_INFO_TEMP_FILE",))
_PIPES = (("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",), ("TORCH_HCCL_DEBUG_INFO_PIPE_FILE",))
"""Variables of NCCL's and HCCL's recorders, each with its names in the versions of torch."""


def recorder_env(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make torch keep and dump records in ``folder``, where ``environment`` does not set them.

    Versions of torch know different names of one variable, and read them in different orders. A value that the
    environment has under one name is therefore set under all, so that ours never overrides it. The pipe is omitted if
    the
    file system does not support pipes: NCCL would not start.
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
    """Return the ranks on this host that listen on a pipe in ``folder``, in order. Nodes may share it."""
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
    """Return the records of those ranks that give one. Takes up to :data:`ANSWER_S` and :data:`PIPE_S`."""
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
    """Read NCCL's dump; None while it is incomplete."""
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
    """Builds dictionaries, lists, strings and numbers, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a record names the class {module}.{name}")


def unpickled(content: bytes) -> dict[str, Any]:
    """Unpickle torch's dump of a recorder.

    Raises:
        pickle.UnpicklingError: it is not plain data.
    """
    found = _PlainUnpickler(io.BytesIO(content)).load()
    if not isinstance(found, dict):
        raise pickle.UnpicklingError("a record is a dictionary")
    return found


# A slot without progress: which processes are its ranks, and which of them can write their stacks.
#
# A program that starts its ranks itself has one slot per node. Records number its ranks in the whole gang, and so does
# this module.


REPORT_BYTES = 1 << 20
"""Bytes of a report file to search for the hook's announcement."""
_RANK = re.compile(rb"RANK=(\d{1,7})")
_REPORT = re.compile(r"rank(\d{1,7})\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangingSlot:
    """A slot to examine."""

    rank: int
    """The slot's number."""
    pid: int
    log: Path
    device: DeviceKind
    progress: tuple[int, int] | None
    """Last reported phase and step, as numbers; None if others report for it."""
    folder: Path
    """The attempt's folder, which receives the records."""
    request_write: int = -1
    """Descriptor of the pipe for requesting the record from its thread; negative if there is none."""
    reports: Path | None = None
    """Folder for the reports of a user's program and of the hook in it; None for built-in models."""
    starts: tuple[int, ...] = ()
    """The gang's ranks on its devices, if it starts them itself."""

    def ranks(self) -> dict[int, list[int]]:
        """Return the gang's ranks here, each with the known pids of its processes.

        Ranks that the slot starts itself are recognized by ``RANK`` in their environment. If the program sets it later,
        the pipes that NCCL listens on identify them. Otherwise the slot counts as the first rank of its devices.
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
        """Return where to get the record of one of its ranks."""
        return RecordedRank(rank=rank, folder=self.folder, request_write=self.request_write)

    def stack_writers(self, ranks: dict[int, list[int]]) -> dict[int, int]:
        """Return for each of ``ranks``, if possible, the process that writes its main thread's stack on request: the
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
    """Return the pids of processes in which the hook writes stacks on request, from their reports. The flag states
    whether the training loop has begun."""
    found = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        for text in file.read(REPORT_BYTES).splitlines():
            if b'"stack_signal"' in text:
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    reported = json.loads(text)
                    if reported["stack_signal"] is True:
                        found.append((int(reported["pid"]), reported.get("event") == "begin"))
    return found


# Finds where ranks without progress are, and how far they are in their collectives.
#
# The fork server makes faulthandler dump ranks' stacks into the slot's log on SIGUSR1. This works even while C code
# holds the interpreter. The signal would end user programs, so it is sent only to processes in which the hook has
# registered a handler.


DUMP_SIGNAL = signal.SIGUSR1
DUMP_S = 3.0
"""Time for a rank to write its stack, in seconds. Milliseconds suffice except on a loaded node."""
ALL_DUMPS_S = 12.0
"""Time for all ranks of a slot, in seconds. They write one after another."""
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
"""Code that waits for the device: reads a value, branches on one, or selects by a mask."""
_WAITS = ("synchronize", "wait", "wait_event", "elapsed_time")
"""Functions of torch that wait for the device."""
_HOST_WORK = ("utils/data/", "_dynamo/", "_inductor/", "multiprocessing/", "serialization.py")
"""Parts of torch that keep the host busy and give the device no work."""
_WORDS: dict[StackState, Literal["stopped", "elsewhere", "unclear", "waiting"]] = {
    StackState.STOPPED: "stopped",
    StackState.ELSEWHERE: "elsewhere",
    StackState.UNCLEAR: "unclear",
    StackState.WAITING: "waiting",
}
_FRAME = re.compile(r'^ *File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """State of the ranks of one slot."""

    sights: tuple[RankSight, ...]
    tail: tuple[str, ...]
    """The log's last lines and the innermost frames of a main thread, if possible of one that waits for no peer."""


def examine(slots: Sequence[HangingSlot]) -> dict[int, SlotState]:
    """Examine hanging slots, by number: the stacks of their ranks, and their records if they have any.

    Stacks take as long as the ranks of one slot need to write them, at most :data:`ALL_DUMPS_S`, at the same time in
    all slots. Records then take no time if all ranks give theirs, and some seconds if one does not.
    """
    before = {slot.rank: _Before.of(slot.log) for slot in slots}
    ranks = {slot.rank: slot.ranks() for slot in slots}
    stacks = _stacks(slots, ranks)
    found = records([slot.recorded(rank) for slot in slots for rank in ranks[slot.rank]])
    return {
        slot.rank: _examine_slot(slot, before[slot.rank], ranks[slot.rank], stacks[slot.rank], found) for slot in slots
    }


def _stacks(slots: Sequence[HangingSlot], ranks: Mapping[int, dict[int, list[int]]]) -> dict[int, dict[int, Stack]]:
    """Return stacks of main threads by slot and rank, for the ranks that got a request; empty if a rank wrote none in
    time. Ranks of one slot share a log, so they write one after another."""
    waiting = {slot.rank: sorted(slot.stack_writers(ranks[slot.rank]).items()) for slot in slots}
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
    """Wait until all stacks are written and the logs stop growing, at most until ``limit_s``. A thread that blocked the
    signal before may be the one that writes."""
    sizes: list[int] = []
    while time.monotonic() < limit_s:
        before, sizes = sizes, [_Before.of(question.slot.log).size for question in requests]
        if sizes == before and not any(question.is_open() for question in requests):
            return
        time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class _Question:
    """A process that was sent a request for its stack."""

    slot: HangingSlot
    pid: int
    size: int
    """Size of the slot's log before, in bytes."""
    blocked_before: frozenset[str]
    """Threads that blocked the signal before."""

    @classmethod
    def put(cls, slot: HangingSlot, pid: int) -> _Question:
        """Send the request to a process that catches the signal, which would end others."""
        question = cls(slot, pid, _Before.of(slot.log).size, blocking(pid, DUMP_SIGNAL))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, DUMP_SIGNAL)
        return question

    def has_begun(self) -> bool:
        """Whether the signal has reached the process."""
        return not is_pending(self.pid, DUMP_SIGNAL)

    def is_open(self) -> bool:
        """Whether the stack may still arrive. A stopped or ended process writes none."""
        info = process_info(self.pid)
        if info is None or not info.is_running or info.state in "Tt":
            return False
        return self.may_write() or not self.stack()

    def may_write(self) -> bool:
        """Whether more may be written: only while a thread is in the signal's handler."""
        return not self.has_begun() or bool(blocking(self.pid, DUMP_SIGNAL) - self.blocked_before)

    def stack(self) -> Stack:
        return main_thread(_read(self.slot.log, self.size))


@dataclass(frozen=True, slots=True)
class _Before:
    """A slot's log before the requests for stacks."""

    size: int
    silent_s: float
    """Seconds since it last grew, at that time."""

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
    """Return the main thread's lines of faulthandler's dump, which come last; innermost frame first."""
    lines = dump.splitlines()
    headers = [number for number, text in enumerate(lines) if text.endswith(_HEADER)]
    return tuple(lines[headers[-1] :]) if headers else ()


def judge(stack: Sequence[str], device: DeviceKind = "cpu") -> tuple[StackState, str]:
    """Judge a rank by the innermost frame of its stack, or by that of the caller if it is an operator; return the state
    and the frame in words.

    On accelerators, collectives run on the device. A rank waits for its peers wherever it waits for its device, and
    possibly wherever it gives the device work, once the queue is full.
    """
    frames = [match for text in stack if (match := _FRAME.match(text))]
    frame = next((frame for frame in frames if not frame["file"].endswith("torch/_ops.py")), None)
    if frame is None:
        return StackState.ELSEWHERE, "its stack is unavailable"
    where = f"it was in {frame['function']} ({Path(frame['file']).name}:{frame['line']})"
    part = _in_torch(frame["file"])
    if re.fullmatch(r"distributed/[^/]+", part):  # not deeper: DTensor's and FSDP's own work
        return StackState.WAITING, f"{where}, waiting for its peers"
    if device != "cpu" and _waits_for_device(frame, part):
        return StackState.WAITING, f"{where}, waiting for its device"
    is_unclear = part.startswith(("autograd/", "distributed/")) or (device != "cpu" and _feeds_device(frame, part))
    return (StackState.UNCLEAR if is_unclear else StackState.ELSEWHERE), where


def _in_torch(file: str) -> str:
    """Return the part of a path inside torch or an extension of it; empty for other code."""
    match = _TORCH.match(file)
    return "" if match is None else match["part"]


def _waits_for_device(frame: re.Match[str], part: str) -> bool:
    """Whether a frame waits for the device: in torch by its name, elsewhere by the calls in its line, because methods
    such as ``item`` are C and have no frame of their own."""
    if part and frame["function"] in _WAITS:
        return True
    return _WAITING_CALL.search(linecache.getline(frame["file"], int(frame["line"]))) is not None


def _feeds_device(frame: re.Match[str], part: str) -> bool:
    """Whether a frame may have given the device work: torch's own code except what keeps the host busy, and code
    generated by its compiler."""
    return "torchinductor" in frame["file"] or (bool(part) and not part.startswith(_HOST_WORK))


def _read(log: Path, start: int, end: int | None = None) -> str:
    try:
        with log.open("rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start).decode("utf-8", errors="replace")
    except OSError:
        return ""
