"""Watches a node while a gang measures on it: its processors, and what nvidia-smi tells of its GPUs; of other makers'
devices nobody is asked.

nvidia-smi tells of processes of others, throttling, clocks and heat. It runs beside the gang, looks every few seconds,
and writes to files in the attempt's folder, so that nobody waits for it. Where it is not installed, or does not answer,
all of this is unknown, and no error.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from cluster.hardware.topology import DeviceHandle, read_or_empty
from cluster.node import cpu_load
from cluster.node.cpu_load import MIN_WINDOW_S, CpuLook
from trials.files import to_json, write_atomically
from trials.outcome import Phase
from trials.reports import LOAD_SUFFIX, Disturbance, reasons_in

PERIOD_S = 5
"""Seconds between two looks at the devices."""
_CLOCKS = "--query-gpu=index,uuid,clocks_throttle_reasons.active,clocks.sm,clocks.max.sm,temperature.gpu,memory.used"
_PROCESSES = "--query-compute-apps=gpu_uuid,pid"
_FORMAT = "--format=csv,noheader,nounits"
_GRACE_S = 2.0
"""How long nvidia-smi may take to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One device at one moment; None for what it does not tell."""

    index: str
    uuid: str
    throttle_mask: int | None
    """NVML's bits for the reasons why the clocks are not higher."""
    clock: float | None
    """Clock of the multiprocessors over its highest possible value."""
    temperature_c: float | None
    used_bytes: int | None
    """Memory in use on it, by everybody."""


class LoadWatch:
    """Looks at the node when the gang begins to measure and when it ends; in between nothing runs but nvidia-smi."""

    def __init__(self, node: str, handles: Sequence[DeviceHandle], folder: Path) -> None:
        self._node, self._handles, self._folder = node, handles, folder
        self._owner = cpu_load.owner_pid()
        self._looks: dict[Phase, CpuLook] = {}
        self._devices: DeviceWatch | None = None
        self.found: Disturbance | None = None
        """What was seen; None before the end, and where the gang never measured."""
        self.samples: list[DeviceSample] = []
        """What nvidia-smi told of devices until the end."""

    def enter(self, phase: Phase) -> None:
        """All ranks of the node are in ``phase`` now, maybe since long."""
        if phase == "starting" or phase in self._looks:
            return
        self._looks[phase] = cpu_load.look()
        if phase == "measuring":
            self._devices = DeviceWatch(self._handles, self._folder)

    def end(self) -> None:
        """The first rank has ended measuring, or all are being killed; only the first call counts."""
        if self.found is not None or "measuring" not in self._looks:
            return
        last, first = cpu_load.look(), self._looks["measuring"]
        if last.at_s - first.at_s < MIN_WINDOW_S:
            first = self._looks.get("warmup", first)  # warm-up steps are like the measured ones
        found = cpu_load.disturbance(self._node, first, last, self._owner)
        if self._devices is not None:
            own = cpu_load.family(first.processes, self._owner) | cpu_load.family(last.processes, self._owner)
            found = self._devices.end(found, own)
            self.samples = self._devices.samples()
        self.found = found
        with contextlib.suppress(OSError):  # a full disk: it is told all the same
            path = self._folder / f"{quote(self._node, safe='')}{LOAD_SUFFIX}"
            write_atomically(path, [json.dumps(to_json(found)).encode()])


class DeviceWatch:
    """Two runs of nvidia-smi beside a gang: one for clocks, again and again, and one for processes."""

    def __init__(self, handles: Sequence[DeviceHandle], folder: Path) -> None:
        self._handles = handles
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        if handles and (smi := shutil.which("nvidia-smi")) is not None:
            self._start([smi, _CLOCKS, _FORMAT, "-l", str(PERIOD_S)], self._clocks)
            self._start([smi, _PROCESSES, _FORMAT], self._processes)

    @property
    def _clocks(self) -> Path:
        return self._folder / "device-clocks.csv"

    @property
    def _processes(self) -> Path:
        return self._folder / "device-processes.csv"

    def _start(self, command: list[str], to: Path) -> None:
        with contextlib.suppress(OSError), to.open("wb") as out:
            null = subprocess.DEVNULL
            self._running.append(subprocess.Popen(command, stdin=null, stdout=out, stderr=null))

    def end(self, found: Disturbance, own: Collection[int]) -> Disturbance:
        """Stop looking; ``found`` with what was seen. ``own``: pids of the sweep's own processes."""
        for process in self._running:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        self._running.clear()
        return with_devices(found, read_or_empty(self._clocks), read_or_empty(self._processes), self._handles, own)

    def samples(self) -> list[DeviceSample]:
        """What was seen so far of all devices of the node."""
        return parse_samples(read_or_empty(self._clocks))


def most_used(samples: Sequence[DeviceSample], handles: Sequence[DeviceHandle]) -> int:
    """The most memory, in bytes, that was in use on one of these devices; 0 where nobody told, as of slices."""
    return max((one.used_bytes for one in samples if one.used_bytes and _is_any(handles, one)), default=0)


def with_devices(
    found: Disturbance, clocks: str, processes: str, handles: Sequence[DeviceHandle], own: Collection[int]
) -> Disturbance:
    """``found`` with what nvidia-smi printed about these devices; of a slice (MIG) about the GPU that it is a part of,
    whose clocks and heat are also its own, but whose processes may be those of other slices.

    A process counts as foreign only if it is visible from here: in a container, nvidia-smi gives the host's pids, which
    mean nothing, or somebody else, inside.
    """
    samples = [one for one in parse_samples(clocks) if _is_any(handles, one) or _has_any(one, handles)]
    masks = [one.throttle_mask for one in samples if one.throttle_mask is not None]
    seen = {one.uuid: one.index for one in samples if _is_any(handles, one)}
    return replace(
        found,
        foreign_on_devices=tuple(
            f"pid {pid} on GPU {seen[uuid]}"
            for uuid, pid in dict.fromkeys(_rows(processes, 2))
            if uuid in seen and pid.isdigit() and int(pid) not in own and Path("/proc", pid).exists()
        ),
        throttled_by=tuple(dict.fromkeys(reason for mask in masks for reason in reasons_in(mask))),
        lowest_clock=min((one.clock for one in samples if one.clock is not None), default=None),
        highest_temperature_c=max(
            (one.temperature_c for one in samples if one.temperature_c is not None), default=None
        ),
    )


def parse_samples(text: str) -> list[DeviceSample]:
    """The samples in nvidia-smi's CSV; a line that was cut off is left out."""
    return [
        DeviceSample(
            index=index,
            uuid=uuid,
            throttle_mask=int(mask, 16) if mask.startswith("0x") else None,  # else "[N/A]" and the like
            clock=_ratio(_number(clock), _number(highest)),
            temperature_c=_number(temperature),
            used_bytes=int(used) << 20 if used.isdigit() else None,
        )
        for index, uuid, mask, clock, highest, temperature, used in _rows(text, 7)
    ]


def _rows(text: str, num_columns: int) -> list[tuple[str, ...]]:
    complete = text[: text.rfind("\n") + 1]
    rows = [tuple(cell.strip() for cell in line.split(",")) for line in complete.splitlines()]
    return [row for row in rows if len(row) == num_columns]


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _is_any(handles: Sequence[DeviceHandle], one: DeviceSample) -> bool:
    """Whether the sample is of one of these devices, each called by an index or (the beginning of) a UUID."""
    names = [handle.name for handle in handles]
    return any(name == one.index or (name.startswith("GPU-") and one.uuid.startswith(name)) for name in names)


def _has_any(one: DeviceSample, handles: Sequence[DeviceHandle]) -> bool:
    """Whether the sample is of a GPU that one of these slices is a part of."""
    return any(handle.gpu_uuid == one.uuid for handle in handles if handle.gpu_uuid)
