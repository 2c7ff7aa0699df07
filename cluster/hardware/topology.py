"""Nodes with their devices, and what this host has in cores and memory."""

from __future__ import annotations

import os
import platform
import re
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
