"""Nodes with their devices, this host's cores and memory, and the catalogue of accelerators."""

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

# ---- Nodes with their devices, and this host's cores and memory

DeviceChoice = Literal["auto", "cpu", "cuda", "rocm", "xpu", "npu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Unit that one rank can occupy: a GPU, or a share of the cores on a host without one."""

    node: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHandle:
    """Names of one device for its vendor's tools and the ranks' software."""

    name: str
    """Name in the variable that makes devices visible: a number, or the UUID of a MIG slice."""
    memory_bytes: int = 0
    idle_bytes: int = 0
    """Memory in use at discovery, before any rank."""
    uuid: str = ""
    bus_id: str = ""
    """Address on the PCI bus; empty if unknown."""
    gpu_uuid: str = ""
    """UUID of the slice's GPU; empty for a whole GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host. Ranks on other nodes reach its ranks at ``address``."""

    name: str
    address: str
    num_devices: int
    device_kind: DeviceKind
    device_name: str
    """Name reported by the hardware, such as "NVIDIA H200" or the CPU's model name."""
    device_memory_bytes: int
    threads_per_device: int
    host_memory_bytes: int = 0
    """Memory of the host, shared by all its ranks; 0 if unknown."""
    handles: tuple[DeviceHandle, ...] = ()
    """Its devices by position, if they are discovered accelerators."""

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
        """Short name of the hardware, such as ``2x8 NVIDIA H200``."""
        first = self.nodes[0]
        return f"{len(self.nodes)}x{first.num_devices} {first.device_name}"


def uniform_topology(num_nodes: int, devices_per_node: int, *, device_name: str, memory_bytes: int) -> Topology:
    """Return equal nodes, named ``node0000`` and on."""
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
    """Whether a device of this name is a MIG slice."""
    return " MIG " in device_name


def path_safe(name: str) -> str:
    """Replace everything in ``name`` that is unsafe in a file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".-") or "node"


def num_usable_cores() -> int:
    """Return the number of cores this process may use, within its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    quota = read_or_empty("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def usable_memory_bytes() -> int:
    """Return the host's memory, within the control group's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        read_or_empty("/sys/fs/cgroup/memory.max"),
        read_or_empty("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ]
    return min([total, *(int(limit) for limit in limits if limit.strip().isdigit())])


def cpu_model() -> str:
    """Return the processor's model name."""
    match = re.search(r"^model name\s*:\s*(.+)$", read_or_empty("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def read_or_empty(path: str | Path) -> str:
    """Return the content of a kernel file; empty if unreadable."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# Chooses free devices for a gang's ranks, fast enough for leases of thousands of nodes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``ranks[r]`` is the device of rank ``r``; ``reserved``: all devices held, a superset of those."""

    ranks: tuple[Device, ...]
    reserved: tuple[Device, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes used, in order of their first rank."""
        return tuple(dict.fromkeys(device.node for device in self.ranks))


class Pool:
    """Free devices of a lease, indexed by node and by number, so that placement is cheap with many nodes."""

    def __init__(self, topology: Topology) -> None:
        self._devices = {node.name: node.devices for node in topology.nodes}
        self._taken: dict[str, set[Device]] = {name: set() for name in self._devices}
        self._closed: set[str] = set()
        sizes = {name: len(devices) for name, devices in self._devices.items()}
        self._partly, self._idle, self._whole = _Nodes(sizes), _Nodes(sizes), _Nodes(sizes)
        self._fewest: dict[tuple[int, int], int] = {}

    @property
    def num_devices(self) -> int:
        """Number of devices, free or not, of all open nodes."""
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
        """Set the lease's nodes. Nothing new is placed on ``closed`` ones."""
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
        """Choose free devices for ``world_size`` ranks; None while too few are free. Takes nothing.

        Tensor-parallel groups (``tp`` consecutive ranks) never span nodes. With ``isolation="node"``, whole free nodes
        are reserved; with ``"device"``, gangs smaller than a node share it. Ranks on a node are consecutive.

        A gang never spreads over more nodes than it needs on an empty cluster, as a slower link would be measured. It
        waits instead. Nodes in ``avoid`` are used only if it does not fit without them.

        Raises:
            ValueError: ``tp`` does not divide ``world_size``, or ``isolation`` is invalid.
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
        """Return the number of nodes that the gang needs on the empty cluster; 0 if the cluster is too small."""
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
    """Sorted names of nodes, by number of available devices."""

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
        """Return the ranks per node: as few nodes as possible, largest first, the last with the tightest fit."""
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
    """Take ``count`` aligned consecutive devices, whose links are likely equal; else the first ``count``."""
    indices = {device.index: device for device in free}
    for start in range(0, max(indices) + 1, count):
        block = [indices[i] for i in range(start, start + count) if i in indices]
        if len(block) == count:
            return block
    return free[:count]


# Cores near a device: memory of another socket is slower.


SYSFS = Path("/sys")


def cores_near(bus_ids: Iterable[str], sysfs: Path = SYSFS) -> frozenset[int] | None:
    """Return the cores of the NUMA nodes of devices with these addresses, as far as this process may use them.

    None if there is no choice: one NUMA node only, devices on all of them, unknown addresses or NUMA nodes, or no core
    there in this process's control group.
    """
    nodes = {int(path.name.removeprefix("node")) for path in (sysfs / "devices/system/node").glob("node[0-9]*")}
    places = {_place(bus_id, sysfs) for bus_id in bus_ids}
    if len(nodes) < 2 or not places or not places <= nodes:
        return None
    near = frozenset().union(*(_cores(node, sysfs) for node in places)) & os.sched_getaffinity(0)
    return near if near and near < os.sched_getaffinity(0) else None


def _place(bus_id: str, sysfs: Path) -> int:
    """Return the number of the device's NUMA node; -1, as from the kernel, if unknown."""
    text = read_or_empty(sysfs / "bus/pci/devices" / bus_id / "numa_node").strip() if bus_id else ""
    return int(text) if text.isdigit() else -1


def _cores(node: int, sysfs: Path) -> frozenset[int]:
    """Return the cores of a NUMA node, from the kernel's list such as ``0-15,32-47``."""
    listed = read_or_empty(sysfs / f"devices/system/node/node{node}/cpulist").strip()
    cores: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


# ---- The catalogue of accelerators and descriptions of clusters: data sheets' figures, read from ``configs/``


class CatalogueError(ValueError):
    """Incomplete catalogue file, or a name that is not in the catalogue. The message lists what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One kind of device. Peaks are dense; bandwidths are per device and per direction."""

    name: str
    aliases: tuple[str, ...]
    """Names in data sets and drivers. A device name matches the longest alias it contains."""
    peak_flops_per_s: Mapping[str, float]
    """FLOPs per second by number format: float32, tf32, float16, bfloat16, float8, float4; absent if unsupported."""
    memory_bytes: float
    usable_memory_bytes: float
    """Memory that a process can use: the total less the driver's share."""
    memory_bytes_per_s: float
    host_bytes_per_s: float
    """Between device and host memory: PCIe, or NVLink-C2C."""
    link_bytes_per_s: float
    network_bytes_per_s: float
    """Network bandwidth of the device's usual machine. A cluster's file overrides it."""
    devices_per_node: int
    domain_size: int
    """Devices joined by the fast links; above ``devices_per_node`` in rack-scale systems."""
    sources: Mapping[str, str]
    """Source of each figure, by its name."""
    models: tuple[str, ...] = ()
    """Aliases, as reported by drivers, that the peaks hold for; empty: all of them."""
    multiprocessors: Mapping[str, int] = field(default_factory=dict)
    """Number of multiprocessors in the whole accelerator ("whole") and in its MIG slices by profile ("3g.40gb"); empty
    if unknown."""

    @property
    def is_core(self) -> bool:
        """Whether the device is a CPU core."""
        return self.name == "cpu"

    def peak(self, number_format: str) -> float | None:
        """Return the dense peak. A format without hardware runs as the next wider one. None if that is unknown too."""
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
    """A cluster for the cost model: equal nodes."""

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
    """Return all accelerators by name.

    Raises:
        CatalogueError: a file lacks a figure or its source.
    """
    return {path.stem: _accelerator(path) for path in sorted((CONFIGS / "accelerators").glob("*.yaml"))}


def find_accelerator(device_name: str) -> Accelerator:
    """Return the accelerator with this name, a label or a driver's name. For a MIG slice, return its share of the
    whole: by multiprocessors if known, else by sevenths.

    Raises:
        CatalogueError: the name contains no alias.
    """
    found = _match(device_name)
    if found is None:
        raise CatalogueError(f"unknown accelerator {device_name!r}; the catalogue has {', '.join(catalogue())}")
    part = _MIG.search(device_name)
    return found[1] if part is None else _slice(found[1], part)


def dense_peak(device_name: str, number_format: str) -> float | None:
    """Return a device's dense peak in exactly this number format, by the driver's name; None if unknown.

    Unlike :meth:`Accelerator.peak`, it is never another format's, except for float32 products that may run as TF32 on a
    device before TF32. It is never that of another model or form (PCIe and NVL cards have lower peaks), nor that of a
    slice with an unknown number of multiprocessors, such as compute instances.
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
    """Whether an accelerator is of NVIDIA's Hopper generation or later. FlashAttention-2, PyTorch's own kernel, does
    not use their asynchronous matmuls (Shah et al., arXiv 2407.08608)."""
    return re.match(r"g?[hb]\d", name) is not None


_FORMS = ("pcie", "nvl", "ti", "super", "d")
"""Words in drivers' names for forms of an accelerator with different peaks."""
_OTHERS = re.compile(r"\blaptop\b|\bmax[ -]?q\b", re.IGNORECASE)
"""Words for a different accelerator of the same name: those of laptops have half of the figures, or less."""
_BEFORE_TF32 = ("v100",)
"""Accelerators that ignore a request for TF32. Others without it may emulate it at their own rates: AMD's from the
MI350 on with bfloat16."""
_MIG = re.compile(r"\bMIG (?P<instance>\dc\.)?(?P<profile>(?P<compute>\d)g\.(?P<gigabytes>\d+)gb)", re.IGNORECASE)
"""A slice in a driver's name, and the compute instance within it unless that is the whole slice."""
_MIG_SLICES = 7
"""Compute slices per accelerator (NVIDIA Multi-Instance GPU user guide, GPU instance profiles). Together they have at
most all multiprocessors."""


def _match(device_name: str) -> tuple[str, Accelerator] | None:
    """Return the longest alias in the name, and its accelerator."""
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
    """Whether the name has the alias as a word: an H200 is not a GH200, an A100 not an A1000, an A10G not an A10. A
    size, a socket or an "s" may follow."""
    end = r"(?!\d|(?!gb|sxm|s\b|x\d)[a-z])" if alias[-1].isdigit() else ""
    return re.search(rf"(?:^|[^a-z]|\dx){re.escape(alias)}{end}", name) is not None


def _is_whole_word(alias: str, name: str) -> bool:
    wanted = name.lower().replace(" ", "-")
    return re.search(rf"(?<![a-z0-9]){re.escape(alias.lower())}(?![a-z0-9])", wanted) is not None


def _words(name: str) -> list[str]:
    return re.split(r"[\s-]+", name.lower())


def _slice(whole: Accelerator, part: re.Match[str]) -> Accelerator:
    """Return a MIG slice: compute by multiprocessors or sevenths; bandwidth, like memory, by eighths."""
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
    """Read a cluster from ``configs/clusters/<name>.yaml``, or from a user's file such as ``./mine.yaml``.

    Raises:
        CatalogueError: the file is missing, or its accelerator unknown.
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
    """Return the names of the clusters in ``configs/clusters``."""
    return tuple(sorted(path.stem for path in (CONFIGS / "clusters").glob("*.yaml")))


def describe_topology(topology: Topology) -> ClusterDescription:
    """Describe the cluster for the cost model, with the least memory of any node's devices.

    Raises:
        CatalogueError: the device is not in the catalogue.
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
    import yaml  # agents run without it until a figure is needed

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
