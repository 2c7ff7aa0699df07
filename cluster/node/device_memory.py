"""Whether the GPUs given to a gang are free before it starts, and free again after it ended, as nvidia-smi tells.

Called by the warden, which has a process of its own: the answers may take their time. Devices that nvidia-smi does not
list by themselves (MIG slices) or gives no figure for (some with unified memory) cannot be checked and count as free.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.gang.messages import NodeLaunch, RankSlot

ALLOWANCE_BYTES = 512 << 20
"""What an idle device may show as used: contexts of monitoring tools, the driver's own share."""
SETTLE_BEFORE_S = 5.0
"""How long whoever had the devices before may take to let go of them."""
SETTLE_AFTER_S = 20.0
"""How long the driver may take to clean up after a killed process."""
PAUSE_S = 0.25
"""Pause between two queries."""
QUERY_TIMEOUT_S = 15.0
"""A driver that is slower to answer than this is broken."""


class DeviceQueryError(RuntimeError):
    """nvidia-smi fails or hangs: no trial should run on these devices. The message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Memory in use on one GPU."""

    index: str
    uuid: str
    used_bytes: int


def device_names(launch: NodeLaunch) -> tuple[str, ...]:
    """Names of the ranks' devices for ``CUDA_VISIBLE_DEVICES``, in the order of local ranks; empty without GPUs."""
    return tuple(name for slot in launch.slots for name in slot_device_names(launch, slot))


def slot_device_names(launch: NodeLaunch, slot: RankSlot) -> tuple[str, ...]:
    """Those of one slot's devices."""
    if launch.device_kind != "cuda":
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else None
    return tuple(names[index] if names else str(index) for index in slot.devices)


def wait_until_free(names: Sequence[str], timeout_s: float) -> str | None:
    """Wait until at most :data:`ALLOWANCE_BYTES` are in use on each device.

    Returns a message that names the devices still in use after ``timeout_s``, or how nvidia-smi fails; else None.
    """
    give_up_s = time.monotonic() + timeout_s
    while names:
        try:
            busy = [use for use in device_uses(names) if use.used_bytes > ALLOWANCE_BYTES]
            if not busy:
                break
            if time.monotonic() >= give_up_s:
                return _describe(busy)
        except DeviceQueryError as error:
            return str(error)
        time.sleep(PAUSE_S)
    return None


def device_uses(names: Sequence[str]) -> list[DeviceUse]:
    """Memory in use on the devices of these names, each an index or (the beginning of) a UUID.

    Raises:
        DeviceQueryError: nvidia-smi fails.
    """
    listed = []
    for index, uuid, used in _rows("--query-gpu=index,uuid,memory.used", num_columns=3):
        if used.isdigit():  # else "[N/A]" and the like
            listed.append(DeviceUse(index=index, uuid=uuid, used_bytes=int(used) << 20))
    return [use for use in listed if any(name == use.index or _is_uuid_of(name, use) for name in names)]


def _is_uuid_of(name: str, use: DeviceUse) -> bool:
    return name.startswith("GPU-") and use.uuid.startswith(name)


def _describe(busy: Sequence[DeviceUse]) -> str:
    try:
        rows = _rows("--query-compute-apps=gpu_uuid,pid,used_memory", num_columns=3)
    except DeviceQueryError:
        rows = []  # the figures per device are enough
    parts = []
    for use in busy:
        holders = [f"pid {pid} ({mebibytes} MiB)" for uuid, pid, mebibytes in rows if uuid == use.uuid]
        by = ", ".join(holders) or "no process that nvidia-smi shows"
        parts.append(f"GPU {use.index} ({use.uuid}) has {use.used_bytes >> 20} MiB in use by {by}")
    return "; ".join(parts)


def _rows(query: str, *, num_columns: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in row.split(",")] for row in _ask(query).splitlines()]
    return [row for row in rows if len(row) == num_columns]


def _ask(query: str) -> str:
    """What nvidia-smi answers; empty where it is not installed."""
    if (smi := shutil.which("nvidia-smi")) is None:
        return ""
    command = [smi, query, "--format=csv,noheader,nounits"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=QUERY_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _abandon(process)
        raise DeviceQueryError(f"nvidia-smi gave no answer within {QUERY_TIMEOUT_S:g} s") from None
    if process.returncode != 0:
        raise DeviceQueryError(f"nvidia-smi failed with code {process.returncode}: {' '.join(output.split())[:300]}")
    return output


def _abandon(process: subprocess.Popen[str]) -> None:
    """Kill the process without insisting on its end: nothing can end what hangs in a broken driver."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    if process.stdout is not None:
        process.stdout.close()
