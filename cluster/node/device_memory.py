"""Whether the devices given to a gang are free before it starts, and free again after it ended, as their tool tells.

Called by the warden, which has a process of its own: the answers may take their time. Devices that the tool gives no
figure for (some with unified memory) cannot be checked and count as free.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.gang.messages import NodeLaunch, RankSlot
from cluster.hardware.discovery import listed
from cluster.hardware.listing import nvidia
from cluster.hardware.listing.tools import DeviceQueryError
from cluster.hardware.topology import DeviceHandle
from trials.accelerator.kinds import DeviceKind

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
        rows = nvidia.holders() if kind == "cuda" else []
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
