"""A rank's Flight Recorder, torch's ring of the latest collectives: reads it, and tells it from a thread on request.

While the main thread waits in C for a collective or a device it does not hold the interpreter, so that another thread
can answer; where C code holds it, nobody does. torch tells JSON; what leaves the rank is a summary of bounded size
(:class:`FlightRecord`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.gang.sights import FlightRecord, GroupPlace, PendingCall
from trials.codec import to_json
from trials.files import write_atomically

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


def answer_requests(asked: int, answer: Path) -> None:
    """Start the thread that writes the record to ``answer`` whenever a byte comes on the pipe ``asked``."""
    threading.Thread(target=_serve, args=(asked, answer), name="flight-recorder", daemon=True).start()


def _serve(asked: int, answer: Path) -> None:
    while os.read(asked, 1):
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
    known = {**_told_members(dump), **members}
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


def _told_members(dump: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
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
    whole is told when it begins and ends.
    """
    found: list[Mapping[str, Any]] = []
    whole: Mapping[str, Any] | None = None
    for entry in sorted(entries, key=lambda entry: int(entry["record_id"]), reverse=True):
        if str(entry["profiling_name"]).endswith(_TOGETHER):
            whole = entry
        is_part = whole is not None and entry is not whole and _number(entry) == _number(whole, like=entry)
        told = whole if is_part and whole is not None else entry
        if not _has_ended(told):
            found.append({**entry, "state": told.get("state")})
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
