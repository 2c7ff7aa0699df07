"""Nodes with their devices, and what this host has in cores and memory."""

from __future__ import annotations

import bisect
import contextlib
import os
import platform
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trials.accelerator.kinds import DeviceKind

DeviceChoice = Literal["auto", "cpu", "cuda", "rocm", "xpu", "npu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one rank can occupy: a GPU, or on a host without any a share of its cores."""

    node: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHandle:
    """By what names the tools of its vendor and the ranks' software know one device of a node."""

    name: str
    """Its name for the variable that says which devices a process sees: a number, or the UUID of a part of a GPU."""
    memory_bytes: int = 0
    idle_bytes: int = 0
    """Memory in use when it was found, before any rank of ours."""
    uuid: str = ""
    bus_id: str = ""
    """Address on the PCI bus; empty where the tool does not tell."""
    gpu_uuid: str = ""
    """UUID of the GPU that a slice is a part of; empty for a whole one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host. ``address`` is where its ranks can be reached by ranks on other nodes."""

    name: str
    address: str
    num_devices: int
    device_kind: DeviceKind
    device_name: str
    """What the hardware calls itself, e.g. "NVIDIA H200" or the CPU's model name."""
    device_memory_bytes: int
    threads_per_device: int
    host_memory_bytes: int = 0
    """Memory of the host, for all its ranks together; 0 where nobody looked."""
    handles: tuple[DeviceHandle, ...] = ()
    """Its devices by position, where they are accelerators that were found here."""

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(Device(node=self.name, index=i) for i in range(self.num_devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The nodes of a lease, in a fixed order."""

    nodes: tuple[Node, ...]

    @property
    def num_devices(self) -> int:
        return sum(node.num_devices for node in self.nodes)

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(device for node in self.nodes for device in node.devices)

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    @property
    def label(self) -> str:
        """Short name of the hardware, for example ``2x8 NVIDIA H200``."""
        first = self.nodes[0]
        return f"{len(self.nodes)}x{first.num_devices} {first.device_name}"


def uniform_topology(num_nodes: int, devices_per_node: int, *, device_name: str, memory_bytes: int) -> Topology:
    """Nodes that are all alike, named ``node0000`` and on."""
    return Topology(
        nodes=tuple(
            Node(
                name=f"node{i:04d}",
                address="127.0.0.1",
                num_devices=devices_per_node,
                device_kind="cuda",
                device_name=device_name,
                device_memory_bytes=memory_bytes,
                threads_per_device=1,
            )
            for i in range(num_nodes)
        )
    )


def is_slice_name(device_name: str) -> bool:
    """Whether a device of this name is a part of a GPU (MIG)."""
    return " MIG " in device_name


def path_safe(name: str) -> str:
    """``name`` with everything replaced that could surprise in a file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".-") or "node"


def num_usable_cores() -> int:
    """Cores this process may run on, within its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    quota = read_or_empty("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def usable_memory_bytes() -> int:
    """Host memory, within the control group's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        read_or_empty("/sys/fs/cgroup/memory.max"),
        read_or_empty("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ]
    return min([total, *(int(limit) for limit in limits if limit.strip().isdigit())])


def cpu_model() -> str:
    """The processor's model name."""
    match = re.search(r"^model name\s*:\s*(.+)$", read_or_empty("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def read_or_empty(path: str | Path) -> str:
    """What a file of the kernel says; empty where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# Chooses the devices of a gang's ranks among those that are free, fast enough for leases of thousands of nodes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``ranks[r]`` is the device of rank ``r``; ``reserved`` are all devices held, a superset of those."""

    ranks: tuple[Device, ...]
    reserved: tuple[Device, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes used, in order of their first rank."""
        return tuple(dict.fromkeys(device.node for device in self.ranks))


class Pool:
    """The free devices of a lease, kept by node and by number so that placing costs little on many nodes."""

    def __init__(self, topology: Topology) -> None:
        self._devices = {node.name: node.devices for node in topology.nodes}
        self._taken: dict[str, set[Device]] = {name: set() for name in self._devices}
        self._closed: set[str] = set()
        sizes = {name: len(devices) for name, devices in self._devices.items()}
        self._partly, self._idle, self._whole = _Nodes(sizes), _Nodes(sizes), _Nodes(sizes)
        self._fewest: dict[tuple[int, int], int] = {}

    @property
    def num_devices(self) -> int:
        """Number of devices, free or not, of all nodes on which something can be placed."""
        return sum(len(devices) for name, devices in self._devices.items() if name not in self._closed)

    def take(self, devices: Iterable[Device]) -> None:
        """Mark the devices as not free."""
        for node, taken in _by_node(devices).items():
            self._set_taken(node, self._taken[node] | set(taken))

    def give_back(self, devices: Iterable[Device]) -> None:
        """Mark the devices as free again, unless their node is closed or gone."""
        for node, given in _by_node(devices).items():
            if node in self._devices:
                self._set_taken(node, self._taken[node] - set(given))

    def set_nodes(self, topology: Topology, closed: Collection[str] = ()) -> None:
        """The lease holds these nodes now, and nothing new is to be placed on ``closed`` ones."""
        nodes = {node.name: node.devices for node in topology.nodes}
        for name in self._devices.keys() - nodes.keys():
            self._set_open(name, False)
            del self._devices[name], self._taken[name]
            self._closed.discard(name)
        for name in nodes.keys() - self._devices.keys():
            self._devices[name], self._taken[name] = nodes[name], set()
            self._set_open(name, name not in closed)
        for name in (set(closed) & nodes.keys()) ^ self._closed:
            self._set_open(name, name in self._closed)

    def place(self, *, world_size: int, tp: int, isolation: str, avoid: Collection[str] = ()) -> Placement | None:
        """Choose free devices for ``world_size`` ranks, or None while not enough are free. Takes nothing.

        Tensor-parallel groups (``tp`` consecutive ranks) never span nodes. With ``isolation="node"`` whole free nodes
        are reserved; with ``"device"`` gangs smaller than a node share it. Ranks are consecutive on a node.

        A gang is never spread over more nodes than it would need on an empty cluster: a slower link would be measured
        in place of a faster one. It waits instead. Nodes in ``avoid`` are used only where it does not fit without.

        Raises:
            ValueError: ``tp`` does not divide ``world_size``, or ``isolation`` is neither of the two.
        """
        if isolation not in ("node", "device"):
            raise ValueError(f"isolation must be 'node' or 'device', not {isolation!r}")
        if world_size < 1 or tp < 1 or world_size % tp:
            raise ValueError(f"world_size {world_size} is not a positive multiple of tp {tp}")
        shunned = [name for name in avoid if name in self._devices and name not in self._closed]
        if shunned:
            with self._without(shunned):
                found = self._fill(world_size, tp, isolation)
            if found is not None:
                return found
        return self._fill(world_size, tp, isolation)

    def _fill(self, world_size: int, tp: int, isolation: str) -> Placement | None:
        nodes = self._idle if isolation == "node" else self._partly
        parts = nodes.fill(world_size, tp)
        if parts is None or len(parts) > self._fewest_nodes(world_size, tp):
            return None
        ranks = tuple(device for node, count in parts for device in _take(self._free_in_order(node), count))
        reserved = ranks if isolation == "device" else tuple(d for node, _ in parts for d in self._devices[node])
        return Placement(ranks=ranks, reserved=reserved)

    @contextlib.contextmanager
    def _without(self, names: Sequence[str]) -> Iterator[None]:
        for name in names:
            self._set_open(name, False)
        try:
            yield
        finally:
            for name in names:
                self._set_open(name, True)

    def _fewest_nodes(self, world_size: int, tp: int) -> int:
        """How many nodes the gang needs on the empty cluster; 0 where that is too small."""
        if (world_size, tp) not in self._fewest:
            self._fewest[world_size, tp] = len(self._whole.fill(world_size, tp) or ())
        return self._fewest[world_size, tp]

    def _free_in_order(self, node: str) -> list[Device]:
        return [device for device in self._devices[node] if device not in self._taken[node]]

    def _set_open(self, node: str, is_open: bool) -> None:
        (self._closed.discard if is_open else self._closed.add)(node)
        self._whole.put(node, len(self._devices[node]) if is_open else 0)
        self._fewest.clear()
        self._set_taken(node, self._taken[node])

    def _set_taken(self, node: str, taken: set[Device]) -> None:
        self._taken[node] = taken
        size = len(self._devices[node])
        num_free = 0 if node in self._closed else size - len(taken)
        self._partly.put(node, num_free)
        self._idle.put(node, num_free if num_free == size else 0)


class _Nodes:
    """Names of nodes, sorted, by the number of devices they can give."""

    def __init__(self, counts: dict[str, int]) -> None:
        self._counts = dict(counts)
        self._names: dict[int, list[str]] = {}
        for name, count in sorted(counts.items()):
            self._names.setdefault(count, []).append(name)

    def put(self, name: str, count: int) -> None:
        before = self._counts.get(name)
        if before == count:
            return
        if before is not None:
            names = self._names[before]
            del names[bisect.bisect_left(names, name)]
        bisect.insort(self._names.setdefault(count, []), name)
        self._counts[name] = count

    def fill(self, world_size: int, tp: int) -> list[tuple[str, int]] | None:
        """How many ranks each node takes: the fewest nodes, the largest first, the last the tightest fit."""
        left = world_size
        unused = {count: len(names) for count, names in self._names.items()}
        parts: list[tuple[str, int]] = []
        while left:
            room = {count: count // tp * tp for count, number in unused.items() if number}
            if fitting := [count for count in room if room[count] >= left]:
                parts.append((self._names[min(fitting)][0], left))
                return parts
            most = max(room, key=lambda count: (room[count], -count), default=0)
            if not room.get(most):
                return None
            unused[most] -= 1
            parts.append((self._names[most][unused[most]], room[most]))
            left -= room[most]
        return parts


def _by_node(devices: Iterable[Device]) -> dict[str, list[Device]]:
    found: dict[str, list[Device]] = {}
    for device in devices:
        found.setdefault(device.node, []).append(device)
    return found


def _take(free: list[Device], count: int) -> list[Device]:
    """``count`` devices in a row from a multiple of ``count``, where links are likeliest the same; else the first."""
    indices = {device.index: device for device in free}
    for start in range(0, max(indices) + 1, count):
        block = [indices[i] for i in range(start, start + count) if i in indices]
        if len(block) == count:
            return block
    return free[:count]


# Which cores of this host are near a device: memory of another socket is slower to reach.


SYSFS = Path("/sys")


def cores_near(bus_ids: Iterable[str], sysfs: Path = SYSFS) -> frozenset[int] | None:
    """Cores of the NUMA nodes that devices with these addresses are attached to, as far as this process may use them.

    None where there is nothing to choose: a host with one NUMA node, devices on all of them, addresses or places that
    nobody knows, or a control group that leaves no core there.
    """
    nodes = {int(path.name.removeprefix("node")) for path in (sysfs / "devices/system/node").glob("node[0-9]*")}
    places = {_place(bus_id, sysfs) for bus_id in bus_ids}
    if len(nodes) < 2 or not places or not places <= nodes:
        return None
    near = frozenset().union(*(_cores(node, sysfs) for node in places)) & os.sched_getaffinity(0)
    return near if near and near < os.sched_getaffinity(0) else None


def _place(bus_id: str, sysfs: Path) -> int:
    """Number of the device's NUMA node; -1, as the kernel writes it, where nobody knows."""
    text = read_or_empty(sysfs / "bus/pci/devices" / bus_id / "numa_node").strip() if bus_id else ""
    return int(text) if text.isdigit() else -1


def _cores(node: int, sysfs: Path) -> frozenset[int]:
    """Those of a NUMA node, from the kernel's list such as ``0-15,32-47``."""
    listed = read_or_empty(sysfs / f"devices/system/node/node{node}/cpulist").strip()
    cores: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
