"""Watches a node while a gang runs on it: processors, devices and memory, and the processes that use them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from cluster.gang.messages import NodeLaunch, RankSlot
from cluster.hardware import discovery
from cluster.hardware.discovery import DeviceQueryError, listed
from cluster.hardware.topology import DeviceHandle, read_or_empty
from cluster.processes import descendants
from trials.accelerator.kinds import DeviceKind
from trials.files import to_json, write_atomically
from trials.health import LOAD_SUFFIX, Disturbance, Usage, UsageKind, reasons_in
from trials.outcome import Phase

# ---- How busy a node's processors are, and with whose processes
#
# The load of others is the time the processors were busy less the time of the sweep's own processes. It therefore
# includes other containers, whose processes are invisible here. One sample reads ``/proc/stat`` and the ``stat`` of
# every process, about 20 microseconds each; a warden takes two or three samples per attempt.

CONTROLLER_VARIABLE = "TUNE_CLUSTER_CONTROLLER"
"""The controller's pid, for processes it starts on its own host. Its descendants belong to the sweep."""
MIN_WINDOW_S = 1.0
"""Shortest meaningful window, in seconds: the kernel counts in hundredths of a second."""
NUM_NAMED = 3
"""Most foreign processes to name."""
MIN_NAMED_CPUS = 0.05
"""Least use, in processors, for a foreign process to be named."""
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
    """Time of its ended and reaped children."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSample:
    """A node's counters at one moment, in seconds since it started."""

    at_s: float
    """Monotonic time of the sample."""
    num_cpus: int
    """Processors that this process may run on."""
    busy_s: float | None
    steal_s: float | None
    pressure_s: float | None
    quota_s: float | None
    processes: Mapping[int, ProcessTime]


def sample_cpu() -> CpuSample:
    """Read all counters now."""
    cpus = os.sched_getaffinity(0)
    busy_s, steal_s = _busy_and_steal(read_or_empty(_PROC / "stat"), cpus)
    return CpuSample(
        at_s=time.monotonic(),
        num_cpus=len(cpus),
        busy_s=busy_s,
        steal_s=steal_s,
        pressure_s=_pressure_s(read_or_empty(_PROC / "pressure" / "cpu")),
        quota_s=_quota_s(read_or_empty(_own_group() / "cpu.stat")),
        processes=dict(_processes()),
    )


def disturbance(node: str, before: CpuSample, after: CpuSample, owner: int) -> Disturbance:
    """Compute the disturbance between two samples; the sweep owns ``owner`` and its descendants."""
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
    """Return the pid of the topmost process of the sweep: the controller if it is on this host, else the agent.

    Called by a warden: its parent is the fork server, and its grandparent the agent's process.
    """
    controller_text = os.environ.get(CONTROLLER_VARIABLE, "")
    if controller_text.isdigit() and (_PROC / controller_text).exists():
        return int(controller_text)
    fork_server = os.getppid()
    found = _process(fork_server)
    return found.parent_pid if found is not None and found.parent_pid > 1 else fork_server


def family(processes: Mapping[int, ProcessTime], owner: int) -> set[int]:
    """Return ``owner`` and all its descendants."""
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


def _ticks(seen: CpuSample, pids: set[int]) -> int:
    """Return the time of these processes, including their ended children."""
    times = (seen.processes[pid] for pid in pids if pid in seen.processes)
    return sum(process.own_ticks + process.reaped_ticks for process in times)


def _growth(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(0.0, after - before)


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole))


def _named(before: CpuSample, after: CpuSample, own: set[int], seconds: float) -> Iterator[str]:
    """Name the foreign processes with the highest use: ``python 1.9``; processes of one name are added up."""
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
    """Return the busy and stolen seconds of these processors (proc(5))."""
    rows = [line.split() for line in stat.splitlines() if line.startswith("cpu")]
    ours = [list(map(int, row[1:])) for row in rows if row[0][3:].isdigit() and int(row[0][3:]) in cpus]
    if not ours or not any(map(any, ours)):
        return None, None  # some sandboxes give zeros
    busy = sum(row[0] + row[1] + row[2] for row in ours)  # user, nice, system; guests are within user
    steal = sum(row[7] for row in ours if len(row) > 7)
    return busy / _TICKS_PER_S, steal / _TICKS_PER_S


def _pressure_s(text: str) -> float | None:
    """Return the seconds in which a process waited for a processor (Documentation/accounting/psi.rst in Linux)."""
    for line in text.splitlines():
        if line.startswith("some ") and (total := line.rpartition("total=")[2]).isdigit():
            return int(total) / 1e6
    return None


def _quota_s(text: str) -> float | None:
    """Return the seconds a control group was throttled: ``throttled_usec``, ``throttled_time`` (v1, ns)."""
    fields = dict(pair for line in text.splitlines() if len(pair := line.split()) == 2)
    for name, unit in (("throttled_usec", 1e6), ("throttled_time", 1e9)):
        if fields.get(name, "").isdigit():
            return int(fields[name]) / unit
    return None


def _own_group() -> Path:
    """Return the folder of this process's CPU control group; the root if its path is in another namespace."""
    for line in read_or_empty(_PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") or not controllers:
            root = _CGROUP / "cpu" if controllers else _CGROUP
            for folder in (root / path.lstrip("/"), root):
                if (folder / "cpu.stat").exists():
                    return folder
    return _CGROUP


# ---- Watches a node while a gang measures on it: its CPUs, and its GPUs through nvidia-smi. Devices of other makers
# are not watched.
#
# nvidia-smi reports other processes, throttling, clocks and temperatures. It runs next to the gang, samples every few
# seconds, and writes to files in the attempt's folder, so that nothing waits for it. If it is not installed or does not
# answer, all of this is unknown, which is no error.

PERIOD_S = 5
"""Seconds between two samples of the devices."""
USAGE_PERIOD_S = 1.0
"""Seconds between two samples of processors and memory, for gangs of up to a minute."""
MAX_USAGE = 64
"""Most values kept of each figure."""
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""Names of the field with the reasons for lower clocks: today's, and that of drivers before 535, now deprecated."""
_CLOCKS = (
    "--query-gpu=index,uuid,{reasons},clocks.sm,clocks.max.sm,temperature.gpu,memory.used,utilization.gpu,power.draw"
)
_PROCESSES = "--query-compute-apps=gpu_uuid,pid"
_FORMAT = "--format=csv,noheader,nounits"
_GRACE_S = 2.0
"""Time for nvidia-smi to end, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One device at one moment; None for unknown figures."""

    index: str
    uuid: str
    throttle_mask: int | None
    """NVML's bits for the reasons that limit the clocks."""
    clock: float | None
    """Clock of the multiprocessors over its maximum."""
    temperature_c: float | None
    used_bytes: int | None
    """Memory in use by all processes."""
    busy_percent: float | None
    """Share of about the last second in which any kernel ran."""
    power_w: float | None


class UsageWatch:
    """Samples processors and memory of the node: two small files per period.

    The period doubles whenever :data:`MAX_USAGE` samples are full, so that the samples of a gang of any length span its
    whole curve.
    """

    def __init__(self) -> None:
        self._period_s = USAGE_PERIOD_S
        self._cpus = os.sched_getaffinity(0)
        self._due_s = time.monotonic() + self._period_s
        self._before = self._busy()
        self._percent: list[float] = []
        self._used: list[float] = []

    @property
    def due_s(self) -> float:
        """Time (monotonic) of the next sample."""
        return self._due_s

    def sample(self) -> None:
        """Take a sample if one is due."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        at_s, busy_s = self._busy()
        if busy_s is not None and self._before[1] is not None:
            capacity_s = (at_s - self._before[0]) * len(self._cpus)
            self._percent.append(round(100 * _share(busy_s - self._before[1], capacity_s), 1))
        if used := used_bytes():
            self._used.append(used)
        self._before = at_s, busy_s
        self._due_s = now_s + self._period_s
        if max(len(self._percent), len(self._used)) >= MAX_USAGE:
            self._period_s *= 2
            pairs = zip(self._percent[::2], self._percent[1::2], strict=False)
            self._percent = [round((one + other) / 2, 1) for one, other in pairs]
            self._used = self._used[1::2]

    def usage(self) -> tuple[Usage, ...]:
        """Return the samples so far."""
        series: tuple[tuple[UsageKind, list[float]], ...]
        series = (("cpu_percent", self._percent), ("memory_bytes", self._used))
        return tuple(
            Usage(kind=kind, period_s=self._period_s, values=tuple(values)) for kind, values in series if values
        )

    def _busy(self) -> tuple[float, float | None]:
        return time.monotonic(), _busy_and_steal(read_or_empty(_PROC / "stat"), self._cpus)[0]


def device_usage(samples: Sequence[DeviceSample], handles: Sequence[DeviceHandle]) -> tuple[Usage, ...]:
    """Return the curves of the gang's devices from nvidia-smi's samples, thinned to :data:`MAX_USAGE` values."""
    figures: tuple[tuple[UsageKind, Callable[[DeviceSample], float | None]], ...] = (
        ("device_percent", lambda one: one.busy_percent),
        ("device_memory_bytes", lambda one: one.used_bytes),
        ("device_power_w", lambda one: one.power_w),
    )
    ours = [one for one in samples if _is_any(handles, one)]
    found = []
    for index in dict.fromkeys(one.index for one in ours):
        for kind, read in figures:
            values = [value for one in ours if one.index == index and (value := read(one)) is not None]
            step = -(-len(values) // MAX_USAGE)
            if values:
                period_s = float(PERIOD_S * step)
                found.append(Usage(kind=kind, device=index, period_s=period_s, values=tuple(values[::step])))
    return tuple(found)


class LoadWatch:
    """Samples the node when the gang begins to measure and when it ends. In between, only nvidia-smi and
    :class:`UsageWatch` run."""

    def __init__(self, node: str, handles: Sequence[DeviceHandle], folder: Path) -> None:
        self._node, self._handles, self._folder = node, handles, folder
        self._owner = owner_pid()
        self._samples: dict[Phase, CpuSample] = {}
        self.usage = UsageWatch()
        self._devices: DeviceWatch | None = None
        self.found: Disturbance | None = None
        """The disturbance; None before the end and if the gang never measured."""
        self.samples: list[DeviceSample] = []
        """nvidia-smi's samples of the devices until the end."""

    def enter(self, phase: Phase) -> None:
        """Record that all ranks of the node have reached ``phase``, possibly long ago."""
        if phase == "starting" or phase in self._samples:
            return
        self._samples[phase] = sample_cpu()
        if phase == "measuring":
            self._devices = DeviceWatch(self._handles, self._folder)

    def end(self) -> None:
        """Record that the first rank ended measuring, or that all are being killed. Only the first call counts."""
        if self.found is not None or "measuring" not in self._samples:
            return
        last, first = sample_cpu(), self._samples["measuring"]
        if last.at_s - first.at_s < MIN_WINDOW_S:
            first = self._samples.get("warmup", first)  # warm-up steps resemble measured ones
        found = disturbance(self._node, first, last, self._owner)
        if self._devices is not None:
            own = family(first.processes, self._owner) | family(last.processes, self._owner)
            found = self._devices.end(found, own)
            self.samples = self._devices.samples()
        found = replace(found, usage=(*self.usage.usage(), *device_usage(self.samples, self._handles)))
        self.found = found
        with contextlib.suppress(OSError):  # a full disk: it is still reported
            path = self._folder / f"{quote(self._node, safe='')}{LOAD_SUFFIX}"
            write_atomically(path, [json.dumps(to_json(found)).encode()])


@functools.cache
def reasons_field(smi: str) -> str:
    """Return the name under which this nvidia-smi has the reasons for lower clocks. An unknown name would fail the
    whole query."""
    try:
        known = subprocess.run([smi, "--help-query-gpu"], capture_output=True, text=True, timeout=_GRACE_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        known = ""
    return next((name for name in REASONS if name in known), REASONS[-1])


class DeviceWatch:
    """Two runs of nvidia-smi during a gang: a periodic one for clocks, and one for processes."""

    def __init__(self, handles: Sequence[DeviceHandle], folder: Path) -> None:
        self._handles = handles
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        if handles and (smi := shutil.which("nvidia-smi")) is not None:
            self._start([smi, _CLOCKS.format(reasons=reasons_field(smi)), _FORMAT, "-l", str(PERIOD_S)], self._clocks)
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
        """Stop; return ``found`` with the results added. ``own``: pids of the sweep's processes."""
        for process in self._running:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        self._running.clear()
        return with_devices(found, read_or_empty(self._clocks), read_or_empty(self._processes), self._handles, own)

    def samples(self) -> list[DeviceSample]:
        """Return the samples so far of all devices of the node."""
        return parse_samples(read_or_empty(self._clocks))


def most_used(samples: Sequence[DeviceSample], handles: Sequence[DeviceHandle]) -> int:
    """Return the peak memory in use on any of these devices, in bytes; 0 if unknown, as for MIG slices."""
    return max((one.used_bytes for one in samples if one.used_bytes and _is_any(handles, one)), default=0)


def with_devices(
    found: Disturbance, clocks: str, processes: str, handles: Sequence[DeviceHandle], own: Collection[int]
) -> Disturbance:
    """Return ``found`` with nvidia-smi's results for these devices. For a MIG slice they are those of its GPU: clocks
    and heat are shared, but processes may belong to other slices.

    A process counts as foreign only if it is visible here. In a container, nvidia-smi gives the host's pids, which mean
    nothing, or another process, inside.
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
    """Parse nvidia-smi's CSV. Truncated lines are skipped."""
    return [
        DeviceSample(
            index=index,
            uuid=uuid,
            throttle_mask=int(mask, 16) if mask.startswith("0x") else None,  # else "[N/A]" and the like
            clock=_ratio(_number(clock), _number(highest)),
            temperature_c=_number(temperature),
            used_bytes=int(used) << 20 if used.isdigit() else None,
            busy_percent=_number(busy),
            power_w=_number(power),
        )
        for index, uuid, mask, clock, highest, temperature, used, busy, power in _rows(text, 9)
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
    """Whether the sample is of one of these devices, named by index or (the beginning of) a UUID."""
    names = [handle.name for handle in handles]
    return any(name == one.index or (name.startswith("GPU-") and one.uuid.startswith(name)) for name in names)


def _has_any(one: DeviceSample, handles: Sequence[DeviceHandle]) -> bool:
    """Whether the sample is of a GPU that contains one of these slices."""
    return any(handle.gpu_uuid == one.uuid for handle in handles if handle.gpu_uuid)


# ---- Whether the host has enough memory for a gang, how much its programs take, and whether the kernel killed a
# process for lack of memory
#
# A control group counts its processes that the kernel killed for lack of memory, whether its own limit or the host's
# memory was exhausted. That counter distinguishes such a death from any other SIGKILL.

CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_VMSTAT = Path("/proc/vmstat")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class _ControlGroup:
    """A memory control group, with the file names of its version."""

    folder: Path
    events: str
    limit: str
    usage: str
    reclaimable: str
    """Name in ``memory.stat`` of file pages that the kernel can drop."""


def memory_group() -> _ControlGroup | None:
    """Return this process's memory control group; None if none is readable.

    In a container, the path in ``/proc`` may be the host's while the group itself is mounted at the root.
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
    """Counts the kernel's out-of-memory kills from :meth:`begin` on. The constructor locates the counter."""

    def __init__(self) -> None:
        group = memory_group()
        self._counter = _VMSTAT if group is None else group.folder / group.events
        """File with the count; without a control group, that of the whole host, including other users' processes."""
        self.begin()

    def begin(self) -> None:
        self._before = self._count()

    def grew(self) -> bool:
        """Whether a process was killed since :meth:`begin`."""
        return self._count() > self._before

    def _count(self) -> int:
        return _field(read_or_empty(self._counter), "oom_kill")


def shortage(num_ranks: int, limit_bytes: int) -> str | None:
    """Return a message if ``num_ranks`` ranks of ``limit_bytes`` each do not fit this host's memory, else None."""
    available = available_bytes()
    if available is None or num_ranks * limit_bytes <= available:
        return None
    gib = float(1 << 30)
    return (
        f"{num_ranks} rank(s) may use {limit_bytes / gib:.1f} GiB each, but {available / gib:.1f} GiB of host "
        "memory are available; check for other processes on the host, or reduce cluster.device_memory"
    )


def available_bytes() -> int | None:
    """Return the memory available without reclaiming from other processes; None if unknown."""
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


def used_bytes() -> int | None:
    """Return the memory in use on the node; None if unknown."""
    text = read_or_empty(_MEMINFO)
    total_kib, available_kib = _field(text, "MemTotal:"), _field(text, "MemAvailable:")
    return (total_kib - available_kib) << 10 if total_kib and available_kib else None


def peak_below(pid: int) -> int:
    """Return the highest resident memory, in bytes, of any single living process below ``pid``; 0 if there is none.
    Shared pages count in every process, so a sum is impossible."""
    statuses = [read_or_empty(f"/proc/{child}/status").replace("\t", " ") for child in descendants(pid)]
    return max((_field(status, "VmHWM:") << 10 for status in statuses), default=0)


def _field(text: str, name: str) -> int:
    """Return the number after ``name`` at the beginning of a line; 0 if there is none."""
    _, found, rest = f"\n{text}".partition(f"\n{name} ")
    return int(rest.split(maxsplit=1)[0]) if found else 0


SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 256 << 20
"""Least for NCCL with eight ranks, or data loaders with workers. Docker's default is 64 MiB."""
SHARED_REMEDY = "in a container --shm-size=8g or --ipc=host, on Kubernetes an emptyDir of medium Memory at /dev/shm"


def shared_memory_shortage(needed_bytes: int) -> str | None:
    """Return the consequence and remedy of less than this free in /dev/shm; None if it suffices."""
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return f"{SHARED_MEMORY} does not exist: NCCL and data loaders with workers fail; {SHARED_REMEDY}"
    if usage.free >= needed_bytes:
        return None
    return (
        f"{usage.free >> 20} of {usage.total >> 20} MiB are free in {SHARED_MEMORY}: NCCL and data loaders with "
        f'workers may fail with "No space left on device" or a bus error; {SHARED_REMEDY}'
    )


# Whether a gang's devices are free before it starts and after it ended, according to their tool.
#
# Called by the warden, a separate process, so the tool may take its time. Devices without a figure (some with unified
# memory) cannot be checked and count as free.


LEAST_ALLOWANCE_BYTES = 512 << 20
"""Memory use of an idle device of any size: contexts of monitoring tools, the driver's share."""
ALLOWANCE_SHARE = 0.01
"""The same as a share of the device's memory: drivers of large devices keep more."""
GROWTH_BYTES = 256 << 20
"""Growth of a device's memory use since discovery that still counts as idle."""
MAX_IDLE_SHARE = 0.08
"""Largest share of a device's memory at discovery that counts as idle: an Ascend 910B shows 3.3 of 64 GiB. More was in
use by another user."""
SETTLE_BEFORE_S = 5.0
"""Time for the previous owner to release the devices, in seconds."""
SETTLE_AFTER_S = 20.0
"""Time for the driver to clean up after a killed process, in seconds."""
PAUSE_S = 0.25
"""Pause between two queries, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Memory in use on one device."""

    handle: DeviceHandle
    used_bytes: int

    @property
    def is_busy(self) -> bool:
        """Whether it uses more than an idle device."""
        return self.used_bytes > allowance_bytes(self.handle)


def allowance_bytes(handle: DeviceHandle) -> int:
    """Return the memory use that the device may show while idle."""
    idle_bytes = min(handle.idle_bytes + GROWTH_BYTES, int(handle.memory_bytes * MAX_IDLE_SHARE))
    return max(LEAST_ALLOWANCE_BYTES, int(handle.memory_bytes * ALLOWANCE_SHARE), idle_bytes)


def held_handles(launch: NodeLaunch) -> tuple[DeviceHandle, ...]:
    """Return the gang's devices on this node, in the order of local ranks; none on CPUs."""
    return tuple(handle for slot in launch.slots for handle in slot_handles(launch, slot))


def slot_handles(launch: NodeLaunch, slot: RankSlot) -> tuple[DeviceHandle, ...]:
    """Return the devices of one slot."""
    if launch.device_kind == "cpu":
        return ()
    known = launch.handles
    return tuple(known[index] if index < len(known) else DeviceHandle(name=str(index)) for index in slot.devices)


def device_names(launch: NodeLaunch) -> tuple[str, ...]:
    """Return the names of the gang's devices here, for the variable that makes devices visible."""
    return tuple(handle.name for handle in held_handles(launch))


def watched_handles(launch: NodeLaunch) -> tuple[DeviceHandle, ...]:
    """Return the devices whose clocks and foreign processes can be watched: only nvidia-smi reports them."""
    return held_handles(launch) if launch.device_kind == "cuda" else ()


def not_free_reason(launch: NodeLaunch, timeout_s: float) -> str | None:
    """Apply :func:`wait_until_free` to all devices of the gang on this node."""
    return wait_until_free(launch.device_kind, held_handles(launch), timeout_s)


def wait_until_free(kind: DeviceKind, handles: Sequence[DeviceHandle], timeout_s: float) -> str | None:
    """Wait until each device shows no more memory in use than an idle one.

    Returns a message with the devices still in use after ``timeout_s``, or with their tool's failure; else None.
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
    """Return the memory in use on these devices, where their tool gives figures.

    Raises:
        DeviceQueryError: the tool fails, or reports a device as unusable.
    """
    shown = {one.name: one for one in listed(kind, with_slices=any(_is_slice(one) for one in handles))}
    found = []
    for handle in handles:
        if (one := shown.get(handle.name)) is None:
            continue
        if one.trouble:
            raise DeviceQueryError(f"device {one.name} became unusable: {one.trouble}")
        if one.used_bytes is not None:
            found.append(DeviceUse(handle=handle, used_bytes=one.used_bytes))
    return found


def _is_slice(handle: DeviceHandle) -> bool:
    return handle.name.startswith("MIG-")


def _describe(kind: DeviceKind, busy: Sequence[DeviceUse]) -> str:
    try:
        rows = discovery.holders() if kind == "cuda" else []
    except DeviceQueryError:
        rows = []  # figures per device suffice
    what = "NPU" if kind == "npu" else "GPU"
    parts = []
    for use in busy:
        handle = use.handle
        holders = [f"pid {pid} ({mebibytes} MiB)" for uuid, pid, mebibytes in rows if uuid == handle.uuid]
        by = ", ".join(holders) or "no process that its tool lists"
        named = f"{handle.name} ({handle.uuid})" if handle.uuid not in ("", handle.name) else handle.name
        parts.append(f"{what} {named} has {use.used_bytes >> 20} MiB in use by {by}")
    return "; ".join(parts)
