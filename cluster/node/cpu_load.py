"""How busy a node's processors are, and with whose processes.

The load of others is the time that the processors were busy less the time of the sweep's own processes: so the load of
other containers counts too, whose processes cannot be seen from here. One look reads ``/proc/stat`` and the ``stat`` of
every process, some 20 microseconds each; a warden takes two or three looks in an attempt.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.hardware.topology import read_or_empty
from trials.reports import Disturbance

CONTROLLER_VARIABLE = "TUNE_CLUSTER_CONTROLLER"
"""Set to the controller's pid in what it starts on its own host: whatever descends from it is the sweep's own."""
MIN_WINDOW_S = 1.0
"""Shortest window that says anything: the kernel counts in hundredths of a second."""
NUM_NAMED = 3
"""Foreign processes that are named."""
MIN_NAMED_CPUS = 0.05
"""Processors from which on a foreign process is named."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ProcessTime:
    """Processor time of one process, in ticks."""

    parent_pid: int
    name: str
    started_at: int
    own_ticks: int
    reaped_ticks: int
    """Time of its children that have ended and were waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLook:
    """The counters of a node at one moment; seconds since it was started."""

    at_s: float
    """Monotonic time of the look."""
    num_cpus: int
    """Processors that this process may run on."""
    busy_s: float | None
    steal_s: float | None
    pressure_s: float | None
    quota_s: float | None
    processes: Mapping[int, ProcessTime]


def look() -> CpuLook:
    """Read all counters now."""
    cpus = os.sched_getaffinity(0)
    busy_s, steal_s = _busy_and_steal(read_or_empty(_PROC / "stat"), cpus)
    return CpuLook(
        at_s=time.monotonic(),
        num_cpus=len(cpus),
        busy_s=busy_s,
        steal_s=steal_s,
        pressure_s=_pressure_s(read_or_empty(_PROC / "pressure" / "cpu")),
        quota_s=_quota_s(read_or_empty(_own_group() / "cpu.stat")),
        processes=dict(_processes()),
    )


def disturbance(node: str, before: CpuLook, after: CpuLook, owner: int) -> Disturbance:
    """What happened between two looks; ``owner`` is the pid whose descendants, and itself, are the sweep's own."""
    seconds = after.at_s - before.at_s
    if seconds < MIN_WINDOW_S:
        return Disturbance(node=node, seconds=seconds)
    capacity_s = seconds * after.num_cpus
    own = family(after.processes, owner) | family(before.processes, owner)
    own_s = (_ticks(after, own) - _ticks(before, own)) / _TICKS_PER_S
    busy_s = _growth(before.busy_s, after.busy_s)
    steal_s, quota_s = _growth(before.steal_s, after.steal_s), _growth(before.quota_s, after.quota_s)
    pressure_s = _growth(before.pressure_s, after.pressure_s)
    return Disturbance(
        node=node,
        seconds=seconds,
        foreign_cpu=None if busy_s is None else _share(busy_s - own_s, capacity_s),
        foreign_processes=tuple(_named(before, after, own, seconds)),
        steal=None if steal_s is None else _share(steal_s, capacity_s),
        quota=None if quota_s is None else _share(quota_s, seconds),
        pressure=None if pressure_s is None else _share(pressure_s, seconds),
    )


def owner_pid() -> int:
    """Pid of the topmost process that is the sweep's own: the controller where it is on this host, else the agent.

    Called by a warden, whose parent is the fork server and whose grandparent the agent's process.
    """
    told = os.environ.get(CONTROLLER_VARIABLE, "")
    if told.isdigit() and (_PROC / told).exists():
        return int(told)
    fork_server = os.getppid()
    found = _process(fork_server)
    return found.parent_pid if found is not None and found.parent_pid > 1 else fork_server


def family(processes: Mapping[int, ProcessTime], owner: int) -> set[int]:
    """``owner`` and all that descend from it."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid, process in processes.items():
        children[process.parent_pid].append(pid)
    found, ahead = set(), [owner]
    while ahead:
        pid = ahead.pop()
        if pid in processes and pid not in found:
            found.add(pid)
            ahead += children[pid]
    return found


def _ticks(seen: CpuLook, pids: set[int]) -> int:
    """Time of these processes and of those of their children that have ended: what a child used is not lost."""
    times = (seen.processes[pid] for pid in pids if pid in seen.processes)
    return sum(process.own_ticks + process.reaped_ticks for process in times)


def _growth(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(0.0, after - before)


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole))


def _named(before: CpuLook, after: CpuLook, own: set[int], seconds: float) -> Iterator[str]:
    """The foreign processes that used most, by name: ``python 1.9``; those of one name are added up."""
    used: dict[str, float] = defaultdict(float)
    for pid, process in after.processes.items():
        if pid not in own:
            earlier = before.processes.get(pid)
            is_same = earlier is not None and earlier.started_at == process.started_at
            since = earlier.own_ticks if earlier is not None and is_same else 0
            used[process.name] += (process.own_ticks - since) / _TICKS_PER_S / seconds
    for name, cpus in sorted(used.items(), key=lambda item: -item[1])[:NUM_NAMED]:
        if cpus >= MIN_NAMED_CPUS:
            yield f"{name} {cpus:.1f}"


def _processes() -> Iterator[tuple[int, ProcessTime]]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (found := _process(int(entry.name))) is not None:
            yield int(entry.name), found


def _process(pid: int) -> ProcessTime | None:
    text = read_or_empty(_PROC / str(pid) / "stat")
    head, _, rest = text.rpartition(")")
    fields = rest.split()
    if len(fields) < 20:
        return None  # it has ended meanwhile
    ticks = [int(field) for field in fields[11:15]]
    return ProcessTime(
        parent_pid=int(fields[1]),
        name="".join(c if c.isprintable() else "?" for c in head.partition("(")[2]),
        started_at=int(fields[19]),
        own_ticks=ticks[0] + ticks[1],
        reaped_ticks=ticks[2] + ticks[3],
    )


def _busy_and_steal(stat: str, cpus: set[int]) -> tuple[float | None, float | None]:
    """Seconds that these processors worked for processes, and that were stolen from them (proc(5))."""
    rows = [line.split() for line in stat.splitlines() if line.startswith("cpu")]
    ours = [list(map(int, row[1:])) for row in rows if row[0][3:].isdigit() and int(row[0][3:]) in cpus]
    if not ours or not any(map(any, ours)):
        return None, None  # some sandboxes give zeros
    busy = sum(row[0] + row[1] + row[2] for row in ours)  # user, nice, system; guests are within user
    steal = sum(row[7] for row in ours if len(row) > 7)
    return busy / _TICKS_PER_S, steal / _TICKS_PER_S


def _pressure_s(text: str) -> float | None:
    """Seconds in which some process waited for a processor (the kernel's Documentation/accounting/psi.rst)."""
    for line in text.splitlines():
        if line.startswith("some ") and (total := line.rpartition("total=")[2]).isdigit():
            return int(total) / 1e6
    return None


def _quota_s(text: str) -> float | None:
    """Seconds in which a control group was stopped for its quota: ``throttled_usec``, ``throttled_time`` (v1, ns)."""
    fields = dict(pair for line in text.splitlines() if len(pair := line.split()) == 2)
    for name, unit in (("throttled_usec", 1e6), ("throttled_time", 1e9)):
        if fields.get(name, "").isdigit():
            return int(fields[name]) / unit
    return None


def _own_group() -> Path:
    """Folder of this process's control group for processors; the root, where its path is another namespace's."""
    for line in read_or_empty(_PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") or not controllers:
            root = _CGROUP / "cpu" if controllers else _CGROUP
            for folder in (root / path.lstrip("/"), root):
                if (folder / "cpu.stat").exists():
                    return folder
    return _CGROUP
