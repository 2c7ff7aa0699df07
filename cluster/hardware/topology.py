"""Nodes with their devices, and the discovery of what this host has to offer."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one rank can occupy: a GPU, or on a host without any a share of its cores."""

    node: str
    index: int


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


class DeviceError(ValueError):
    """This host does not have the devices asked for. The message says what it has."""


def discover_node(
    *,
    name: str | None = None,
    address: str = "127.0.0.1",
    device: DeviceChoice = "auto",
    num_devices: int | None = None,
    device_memory_bytes: int | None = None,
) -> Node:
    """Describe this host without importing torch.

    Without GPUs (or with ``device="cpu"``) every core is a device unless ``num_devices`` says otherwise, and the
    host's cores and memory are shared out evenly. ``device_memory_bytes`` overrides what the hardware reports.

    Raises:
        DeviceError: GPUs are asked for that are not there.
    """
    gpus = [] if device == "cpu" else visible_gpus()
    if device == "cuda" and not gpus:
        raise DeviceError("device: cuda, but nvidia-smi lists no GPU here; use device: cpu, or another host")
    cores = num_usable_cores()
    if gpus:
        count, (device_name, memory_bytes) = num_devices or len(gpus), gpus[0]
        if count > len(gpus):
            raise DeviceError(f"devices_per_node is {count}, but this host has {len(gpus)} GPU(s)")
    else:
        count, device_name = num_devices or cores, cpu_model()
        memory_bytes = usable_memory_bytes() // count
    return Node(
        name=name or path_safe(socket.gethostname()),
        address=address,
        num_devices=count,
        device_kind="cuda" if gpus else "cpu",
        device_name=device_name,
        device_memory_bytes=device_memory_bytes or memory_bytes,
        threads_per_device=max(1, cores // count),
    )


def path_safe(name: str) -> str:
    """``name`` with everything replaced that could surprise in a file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".-") or "node"


def visible_gpus() -> list[tuple[str, int]]:
    """Name and memory in bytes of each GPU, as ``nvidia-smi`` lists them, within ``CUDA_VISIBLE_DEVICES``."""
    if (smi := shutil.which("nvidia-smi")) is None:
        return []
    query = [smi, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for row in listed.splitlines():
        gpu, _, mebibytes = row.rpartition(",")
        if mebibytes.strip().isdigit():
            gpus.append((gpu.strip(), int(mebibytes) << 20))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else gpus[: len([entry for entry in visible.split(",") if entry])]


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
