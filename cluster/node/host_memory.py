"""Whether the host has memory enough for a gang, how much its programs take, and whether the kernel killed a process
for want of it.

A control group counts the processes that the kernel killed in it for want of memory, whether its own limit or the
host's memory was exhausted. That counter tells such a death from any other SIGKILL.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from cluster.hardware.topology import read_or_empty
from cluster.processes import descendants

CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_VMSTAT = Path("/proc/vmstat")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class _ControlGroup:
    """A memory control group, with the file names that its version uses."""

    folder: Path
    events: str
    limit: str
    usage: str
    reclaimable: str
    """Name in ``memory.stat`` of file pages that the kernel drops when it must."""


def memory_group() -> _ControlGroup | None:
    """This process's memory control group; None where none can be read.

    In a container the path named in ``/proc`` may be the host's, while the group itself is mounted at the root.
    """
    for line in read_or_empty(_OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            words = ("memory.oom_control", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount = CGROUP_ROOT / "memory"
        elif not controllers:
            words = ("memory.events", "memory.max", "memory.current", "inactive_file")
            mount = CGROUP_ROOT
        else:
            continue
        for folder in (mount / path.lstrip("/"), mount):
            if (folder / words[0]).exists():
                return _ControlGroup(folder, *words)
    return None


class OomKills:
    """Counts the kernel's out-of-memory kills from :meth:`begin` on. Construction finds out where they are counted."""

    def __init__(self) -> None:
        group = memory_group()
        self._counter = _VMSTAT if group is None else group.folder / group.events
        """File with the count; without a control group that of the whole host, which counts others' processes too."""
        self.begin()

    def begin(self) -> None:
        self._before = self._count()

    def grew(self) -> bool:
        """Whether a process was killed since :meth:`begin`."""
        return self._count() > self._before

    def _count(self) -> int:
        return _field(read_or_empty(self._counter), "oom_kill")


def shortage(num_ranks: int, limit_bytes: int) -> str | None:
    """A message if ``num_ranks`` ranks of ``limit_bytes`` each do not fit this host's memory; None if they do."""
    available = available_bytes()
    if available is None or num_ranks * limit_bytes <= available:
        return None
    gib = float(1 << 30)
    return (
        f"{num_ranks} rank(s) may use {limit_bytes / gib:.1f} GiB each, but {available / gib:.1f} GiB of host memory "
        "are available; is something else running here, or is cluster.device_memory too large?"
    )


def available_bytes() -> int | None:
    """Memory that can be had without anything else losing its own; None where the system does not tell."""
    amounts = []
    if available_kib := _field(read_or_empty(_MEMINFO), "MemAvailable:"):
        amounts.append(available_kib << 10)
    if (group := memory_group()) is not None:
        limit = read_or_empty(group.folder / group.limit).strip()
        used = read_or_empty(group.folder / group.usage).strip()
        if limit.isdigit() and used.isdigit():  # "max" is no limit
            reclaimable = _field(read_or_empty(group.folder / "memory.stat"), group.reclaimable)
            amounts.append(max(0, int(limit) - int(used) + reclaimable))
    return min(amounts, default=None)


def peak_below(pid: int) -> int:
    """The most memory, in bytes, that any one of the living processes below ``pid`` has ever had resident; 0 if there
    is none. What they share counts in each, so there is no telling for all of them together."""
    statuses = [read_or_empty(f"/proc/{child}/status").replace("\t", " ") for child in descendants(pid)]
    return max((_field(status, "VmHWM:") << 10 for status in statuses), default=0)


def _field(text: str, name: str) -> int:
    """The number behind ``name`` at the beginning of a line; 0 where there is none."""
    _, found, rest = f"\n{text}".partition(f"\n{name} ")
    return int(rest.split(maxsplit=1)[0]) if found else 0


SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 256 << 20
"""Less is not enough for NCCL among eight ranks, or data loaders with workers; Docker gives 64 MiB unless told."""
SHARED_REMEDY = "in a container --shm-size=8g or --ipc=host, on Kubernetes an emptyDir of medium Memory at /dev/shm"


def shared_memory_shortage(needed_bytes: int) -> str | None:
    """What happens where less than this is free in /dev/shm, and the remedy; None where there is enough."""
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return f"there is no {SHARED_MEMORY}: NCCL and data loaders with workers fail; {SHARED_REMEDY}"
    if usage.free >= needed_bytes:
        return None
    return (
        f"{usage.free >> 20} of {usage.total >> 20} MiB are free in {SHARED_MEMORY}: NCCL and data loaders with "
        f'workers may fail with "No space left on device" or a bus error; {SHARED_REMEDY}'
    )
