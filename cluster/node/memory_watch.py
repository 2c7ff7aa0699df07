"""Whether the host has memory enough for a gang, how much its programs take, and whether the kernel killed a process
for want of it.

A control group counts the processes that the kernel killed in it for want of memory, whether its own limit or the
host's memory was exhausted. That counter tells such a death from any other SIGKILL.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.gang.messages import NodeLaunch, RankSlot
from cluster.hardware import listing
from cluster.hardware.discovery import listed
from cluster.hardware.listing import DeviceQueryError
from cluster.hardware.topology import DeviceHandle, read_or_empty
from cluster.processes import descendants
from trials.accelerator.kinds import DeviceKind

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


# Whether the devices given to a gang are free before it starts, and free again after it ended, as their tool tells.
#
# Called by the warden, which has a process of its own: the answers may take their time. Devices that the tool gives no
# figure for (some with unified memory) cannot be checked and count as free.


LEAST_ALLOWANCE_BYTES = 512 << 20
"""What an idle device may show as used whatever its size: contexts of monitoring tools, the driver's own share."""
ALLOWANCE_SHARE = 0.01
"""The same as a share of its memory: drivers of large devices keep more."""
GROWTH_BYTES = 256 << 20
"""How much more than when the node was looked at a device may show as used."""
MAX_IDLE_SHARE = 0.08
"""The share of a device's memory up to which what it showed then counts as idle: an Ascend 910B shows 3.3 of 64 GiB.
What shows more was somebody's."""
SETTLE_BEFORE_S = 5.0
"""How long whoever had the devices before may take to let go of them."""
SETTLE_AFTER_S = 20.0
"""How long the driver may take to clean up after a killed process."""
PAUSE_S = 0.25
"""Pause between two queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Memory in use on one device."""

    handle: DeviceHandle
    used_bytes: int

    @property
    def is_busy(self) -> bool:
        """Whether that is more than an idle device shows."""
        return self.used_bytes > allowance_bytes(self.handle)


def allowance_bytes(handle: DeviceHandle) -> int:
    """Memory that the device may show as used while it is idle."""
    idle_bytes = min(handle.idle_bytes + GROWTH_BYTES, int(handle.memory_bytes * MAX_IDLE_SHARE))
    return max(LEAST_ALLOWANCE_BYTES, int(handle.memory_bytes * ALLOWANCE_SHARE), idle_bytes)


def held_handles(launch: NodeLaunch) -> tuple[DeviceHandle, ...]:
    """The devices of the gang on this node, in the order of local ranks; none on CPUs."""
    return tuple(handle for slot in launch.slots for handle in slot_handles(launch, slot))


def slot_handles(launch: NodeLaunch, slot: RankSlot) -> tuple[DeviceHandle, ...]:
    """Those of one slot."""
    if launch.device_kind == "cpu":
        return ()
    known = launch.handles
    return tuple(known[index] if index < len(known) else DeviceHandle(name=str(index)) for index in slot.devices)


def device_names(launch: NodeLaunch) -> tuple[str, ...]:
    """Names of the gang's devices here for the variable that says which ones ranks see."""
    return tuple(handle.name for handle in held_handles(launch))


def watched_handles(launch: NodeLaunch) -> tuple[DeviceHandle, ...]:
    """The devices whose clocks and strangers can be watched: nvidia-smi alone tells of them."""
    return held_handles(launch) if launch.device_kind == "cuda" else ()


def why_not_free(launch: NodeLaunch, timeout_s: float) -> str | None:
    """As :func:`wait_until_free`, for all devices of the gang on this node."""
    return wait_until_free(launch.device_kind, held_handles(launch), timeout_s)


def wait_until_free(kind: DeviceKind, handles: Sequence[DeviceHandle], timeout_s: float) -> str | None:
    """Wait until each device shows as much memory in use as an idle one.

    Returns a message that names the devices still in use after ``timeout_s``, or how their tool fails; else None.
    """
    give_up_s = time.monotonic() + timeout_s
    while handles:
        try:
            busy = [use for use in device_uses(kind, handles) if use.is_busy]
            if not busy:
                break
            if time.monotonic() >= give_up_s:
                return _describe(kind, busy)
        except DeviceQueryError as error:
            return str(error)
        time.sleep(PAUSE_S)
    return None


def device_uses(kind: DeviceKind, handles: Sequence[DeviceHandle]) -> list[DeviceUse]:
    """Memory in use on these devices, as far as their tool gives figures.

    Raises:
        DeviceQueryError: the tool fails, or says that one of them cannot be used.
    """
    shown = {one.name: one for one in listed(kind, with_slices=any(_is_slice(one) for one in handles))}
    found = []
    for handle in handles:
        if (one := shown.get(handle.name)) is None:
            continue
        if one.trouble:
            raise DeviceQueryError(f"device {one.name} is of no use any more: {one.trouble}")
        if one.used_bytes is not None:
            found.append(DeviceUse(handle=handle, used_bytes=one.used_bytes))
    return found


def _is_slice(handle: DeviceHandle) -> bool:
    return handle.name.startswith("MIG-")


def _describe(kind: DeviceKind, busy: Sequence[DeviceUse]) -> str:
    try:
        rows = listing.holders() if kind == "cuda" else []
    except DeviceQueryError:
        rows = []  # the figures per device are enough
    what = "NPU" if kind == "npu" else "GPU"
    parts = []
    for use in busy:
        handle = use.handle
        holders = [f"pid {pid} ({mebibytes} MiB)" for uuid, pid, mebibytes in rows if uuid == handle.uuid]
        by = ", ".join(holders) or "no process that its tool shows"
        named = f"{handle.name} ({handle.uuid})" if handle.uuid not in ("", handle.name) else handle.name
        parts.append(f"{what} {named} has {use.used_bytes >> 20} MiB in use by {by}")
    return "; ".join(parts)
