"""Nodes with their devices, what this host has in cores and memory, and the catalogue of accelerators."""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import platform
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from configs import CONFIGS
from trials.accelerator.kinds import DeviceKind
from trials.files import read_regular

# ---- Nodes with their devices, and what this host has in cores and memory

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
    """Memory of the host, shared by all its ranks; 0 if unknown."""
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
    it is unknown, or a control group that leaves no core there.
    """
    nodes = {int(path.name.removeprefix("node")) for path in (sysfs / "devices/system/node").glob("node[0-9]*")}
    places = {_place(bus_id, sysfs) for bus_id in bus_ids}
    if len(nodes) < 2 or not places or not places <= nodes:
        return None
    near = frozenset().union(*(_cores(node, sysfs) for node in places)) & os.sched_getaffinity(0)
    return near if near and near < os.sched_getaffinity(0) else None


def _place(bus_id: str, sysfs: Path) -> int:
    """Number of the device's NUMA node; -1, as the kernel writes it, if unknown."""
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


# ---- The catalogue of accelerators and descriptions of clusters: figures of data sheets, read from ``configs/``


class CatalogueError(ValueError):
    """A catalogue file is incomplete, or a name is not in the catalogue. The message says what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One kind of device. Peaks are dense; bandwidths are per device and per direction."""

    name: str
    aliases: tuple[str, ...]
    """Texts by which data sets and drivers call it; a device name matches the longest one it contains."""
    peak_flops_per_s: Mapping[str, float]
    """FLOPs per second by number format: float32, tf32, float16, bfloat16, float8, float4; absent where it has none."""
    memory_bytes: float
    usable_memory_bytes: float
    """The memory that a process can use: the total less what the driver keeps."""
    memory_bytes_per_s: float
    host_bytes_per_s: float
    """Between device and host memory: PCIe, or NVLink-C2C."""
    link_bytes_per_s: float
    network_bytes_per_s: float
    """Network bandwidth of the machine in which the device usually comes; a cluster's file overrides it."""
    devices_per_node: int
    domain_size: int
    """Devices joined by the fast links; above ``devices_per_node`` in rack-scale systems."""
    sources: Mapping[str, str]
    """Where each figure comes from, by its name."""
    models: tuple[str, ...] = ()
    """The aliases, as drivers say them, of which the peaks are; empty where that holds of all aliases."""
    multiprocessors: Mapping[str, int] = field(default_factory=dict)
    """Number of them in the whole accelerator ("whole") and in its slices (MIG) by profile ("3g.40gb"); empty where
    nobody says."""

    @property
    def is_core(self) -> bool:
        """Whether the device is a core of a processor."""
        return self.name == "cpu"

    def peak(self, number_format: str) -> float | None:
        """Dense peak; a format without units of its own runs as the next wider one. None when that is unknown too."""
        for name in _WIDER[number_format]:
            if name in self.peak_flops_per_s:
                return self.peak_flops_per_s[name]
        return None


_WIDER = {
    "float4": ("float4", "float8", "bfloat16", "float16"),
    "float8": ("float8", "bfloat16", "float16"),
    "bfloat16": ("bfloat16", "float16"),
    "float16": ("float16",),
    "tf32": ("tf32", "float32"),
    "float32": ("float32",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDescription:
    """A cluster as the cost model sees it: nodes that are all alike."""

    name: str
    accelerator: Accelerator
    num_nodes: int
    devices_per_node: int
    network_bytes_per_s: float

    @property
    def domain_size(self) -> int:
        return max(self.devices_per_node, self.accelerator.domain_size)


@functools.cache
def catalogue() -> Mapping[str, Accelerator]:
    """All accelerators by name.

    Raises:
        CatalogueError: a file lacks a figure or the source of one.
    """
    return {path.stem: _accelerator(path) for path in sorted((CONFIGS / "accelerators").glob("*.yaml"))}


def find_accelerator(device_name: str) -> Accelerator:
    """The accelerator that ``device_name`` (a label, or what the driver says) means; of a MIG slice, its share of the
    whole one: by multiprocessors where those are known, else by sevenths.

    Raises:
        CatalogueError: no alias is part of the name.
    """
    found = _match(device_name)
    if found is None:
        raise CatalogueError(f"unknown accelerator {device_name!r}; the catalogue has {', '.join(catalogue())}")
    part = _MIG.search(device_name)
    return found[1] if part is None else _slice(found[1], part)


def dense_peak(device_name: str, number_format: str) -> float | None:
    """Dense peak of a device in this very number format, by what the driver calls it; None where that is not known.

    Unlike :meth:`Accelerator.peak` it is never that of another format, but for float32 products that may run as TF32 on
    a device before TF32; nor that of another model or form of the device, as PCIe and NVL cards have lower peaks; nor
    that of a slice whose number of multiprocessors is not known, as of compute instances within one.
    """
    found = _match(device_name)
    if found is None or any(form in _words(device_name) and form not in _words(found[0]) for form in _FORMS):
        return None
    whole, part = found[1], _MIG.search(device_name)
    if not any(_is_whole_word(model, device_name) for model in whole.models or [found[0]]):
        return None
    if part is not None and (part["instance"] is not None or part["profile"].lower() not in whole.multiprocessors):
        return None
    if number_format == "tf32" and whole.name.startswith(_BEFORE_TF32):
        number_format = "float32"
    return find_accelerator(device_name).peak_flops_per_s.get(number_format)


def outruns_flash_attention_2(name: str) -> bool:
    """Whether an accelerator of the catalogue is of NVIDIA's Hopper generation or a later one, whose asynchronous
    matmuls FlashAttention-2, PyTorch's own kernel, does not use (Shah et al., arXiv 2407.08608)."""
    return re.match(r"g?[hb]\d", name) is not None


_FORMS = ("pcie", "nvl", "ti", "super", "d")
"""Words in a driver's names that tell forms of an accelerator apart which differ in their peaks."""
_OTHERS = re.compile(r"\blaptop\b|\bmax[ -]?q\b", re.IGNORECASE)
"""Words that tell another accelerator of the same name: those of laptops have half of everything, or less."""
_BEFORE_TF32 = ("v100",)
"""Accelerators that take a request for TF32 for nothing. Others without it may emulate it, at rates of their own: AMD's
from the MI350 on with bfloat16."""
_MIG = re.compile(r"\bMIG (?P<instance>\dc\.)?(?P<profile>(?P<compute>\d)g\.(?P<gigabytes>\d+)gb)", re.IGNORECASE)
"""A slice in a driver's name, and the compute instance within it where it is not the whole slice."""
_MIG_SLICES = 7
"""Slices of compute that an accelerator is divided into (NVIDIA Multi-Instance GPU user guide, GPU instance profiles);
together they have at most all multiprocessors."""


def _match(device_name: str) -> tuple[str, Accelerator] | None:
    """The accelerator with the longest alias in the name, and that alias."""
    if _OTHERS.search(device_name):
        return None
    wanted = device_name.lower().replace(" ", "-")
    matches = [
        (alias, accelerator)
        for accelerator in catalogue().values()
        for alias in (accelerator.name, *accelerator.aliases)
        if _is_part(alias.lower(), wanted)
    ]
    return max(matches, key=lambda match: len(match[0]), default=None)


def _is_part(alias: str, name: str) -> bool:
    """Whether the name has the alias as a word: an H200 is no GH200, an A100 no A1000 and an A10G no A10. A size or
    a socket may follow, or an "s"."""
    end = r"(?!\d|(?!gb|sxm|s\b|x\d)[a-z])" if alias[-1].isdigit() else ""
    return re.search(rf"(?:^|[^a-z]|\dx){re.escape(alias)}{end}", name) is not None


def _is_whole_word(alias: str, name: str) -> bool:
    wanted = name.lower().replace(" ", "-")
    return re.search(rf"(?<![a-z0-9]){re.escape(alias.lower())}(?![a-z0-9])", wanted) is not None


def _words(name: str) -> list[str]:
    return re.split(r"[\s-]+", name.lower())


def _slice(whole: Accelerator, part: re.Match[str]) -> Accelerator:
    """A MIG slice: compute by multiprocessors, or by sevenths, and bandwidth like memory by eighths."""
    compute = int(part["compute"] if part["instance"] is None else part["instance"][0])
    known = whole.multiprocessors.get(part["profile"].lower()) if part["instance"] is None else None
    share = compute / _MIG_SLICES if known is None else known / whole.multiprocessors["whole"]
    memory_bytes = min(float(part["gigabytes"]) * 2**30, whole.memory_bytes)
    eighths = max(1, round(8 * memory_bytes / whole.memory_bytes))
    return replace(
        whole,
        name=f"{whole.name}-mig-{compute}g",
        peak_flops_per_s={name: peak * share for name, peak in whole.peak_flops_per_s.items()},
        memory_bytes=memory_bytes,
        usable_memory_bytes=min(memory_bytes, whole.usable_memory_bytes),
        memory_bytes_per_s=whole.memory_bytes_per_s * eighths / 8,
    )


def load_cluster(name: str) -> ClusterDescription:
    """The cluster described in ``configs/clusters/<name>.yaml``, or in a file of the user's, like ``./mine.yaml``.

    Raises:
        CatalogueError: there is no such file, or its accelerator is unknown.
    """
    is_file = "/" in name or name.endswith((".yaml", ".yml"))
    path = Path(name) if is_file else CONFIGS / "clusters" / f"{name}.yaml"
    if not path.is_file():
        raise CatalogueError(
            f"unknown cluster {'file' if is_file else 'name'} {name!r}; available: {', '.join(clusters())}"
        )
    data = _read(path, {"accelerator", "num_nodes"}, {"devices_per_node", "network_bytes_per_s", "sources"})
    for key in ("num_nodes", "devices_per_node"):
        if not isinstance(size := data.get(key, 1), int) or isinstance(size, bool) or size < 1:
            raise CatalogueError(f"{path.name}: {key} is {str(size)[:40]!r}, not a number")
    accelerator = find_accelerator(str(data["accelerator"]))
    return ClusterDescription(
        name=path.stem,
        accelerator=accelerator,
        num_nodes=int(data["num_nodes"]),
        devices_per_node=int(data.get("devices_per_node", accelerator.devices_per_node)),
        network_bytes_per_s=float(data.get("network_bytes_per_s", accelerator.network_bytes_per_s)),
    )


def clusters() -> tuple[str, ...]:
    """Names of the clusters that are described in ``configs/clusters``."""
    return tuple(sorted(path.stem for path in (CONFIGS / "clusters").glob("*.yaml")))


def describe_topology(topology: Topology) -> ClusterDescription:
    """The cluster as the cost model sees it; the memory is the least of any node's devices.

    Raises:
        CatalogueError: the catalogue does not have the device.
    """
    first = topology.nodes[0]
    accelerator = catalogue()["cpu"] if first.device_kind == "cpu" else find_accelerator(first.device_name)
    memory_bytes = float(min(node.device_memory_bytes for node in topology.nodes))
    if first.device_kind != "cpu":
        memory_bytes = min(memory_bytes, accelerator.usable_memory_bytes)
    return ClusterDescription(
        name=topology.label,
        accelerator=replace(accelerator, usable_memory_bytes=memory_bytes),
        num_nodes=len(topology.nodes),
        devices_per_node=max(node.num_devices for node in topology.nodes),
        network_bytes_per_s=accelerator.network_bytes_per_s,
    )


_FIGURES = {
    "peak_flops_per_s",
    "memory_bytes",
    "usable_memory_bytes",
    "memory_bytes_per_s",
    "host_bytes_per_s",
    "link_bytes_per_s",
    "network_bytes_per_s",
    "devices_per_node",
    "domain_size",
}


def _accelerator(path: Path) -> Accelerator:
    data = _read(path, _FIGURES | {"aliases", "sources"}, {"models", "multiprocessors"})
    multiprocessors = data.get("multiprocessors", {})
    if multiprocessors and "whole" not in multiprocessors:
        raise CatalogueError(f"{path.name}: multiprocessors without those of the whole")
    if missing := (_FIGURES | {"multiprocessors"} & set(data)) - set(data["sources"]):
        raise CatalogueError(f"{path.name}: no source for {', '.join(sorted(missing))}")
    if unknown := set(data["peak_flops_per_s"]) - set(_WIDER):
        raise CatalogueError(f"{path.name}: unknown number format {', '.join(sorted(unknown))}")
    return Accelerator(
        name=path.stem,
        aliases=tuple(data["aliases"]),
        peak_flops_per_s={name: float(value) for name, value in data["peak_flops_per_s"].items()},
        sources=dict(data["sources"]),
        models=tuple(data.get("models", ())),
        multiprocessors={str(name): int(number) for name, number in multiprocessors.items()},
        devices_per_node=int(data["devices_per_node"]),
        domain_size=int(data["domain_size"]),
        **{name: float(data[name]) for name in _FIGURES if name.endswith(("bytes", "bytes_per_s"))},
    )


def _read(path: Path, required: set[str], optional: set[str]) -> Any:
    import yaml  # agents come without it as long as nobody asks for a figure

    try:
        data = yaml.safe_load(read_regular(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise CatalogueError(f"{path}{line}: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise CatalogueError(f"{path.name}: not a mapping")
    if missing := required - set(data):
        raise CatalogueError(f"{path.name}: missing {', '.join(sorted(missing))}")
    if unknown := set(data) - required - optional:
        raise CatalogueError(f"{path.name}: unknown key {', '.join(sorted(unknown))}")
    return data
