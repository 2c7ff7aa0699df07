"""Which cores of this host are near a device: memory of another socket is slower to reach."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from cluster.hardware.topology import read_or_empty

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
