"""Which rank runs on which device: pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.topology import Device, Node, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``ranks[r]`` is the device of rank ``r``; ``reserved`` are all devices held, a superset of those."""

    ranks: tuple[Device, ...]
    reserved: tuple[Device, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes used, in order of their first rank."""
        return tuple(dict.fromkeys(device.node for device in self.ranks))


def place(topology: Topology, free: frozenset[Device], *, world_size: int, tp: int, isolation: str) -> Placement | None:
    """Choose devices for ``world_size`` ranks, or None while not enough are free.

    Tensor-parallel groups (``tp`` consecutive ranks) never span nodes. With ``isolation="node"`` whole free nodes are
    reserved; with ``"device"`` gangs smaller than a node share it. Ranks are consecutive on a node.

    A gang is never spread over more nodes than it would need on an empty cluster: a slower link would be measured in
    place of a faster one. It waits instead.

    Raises:
        ValueError: ``tp`` does not divide ``world_size``, or ``isolation`` is neither of the two.
    """
    if isolation not in ("node", "device"):
        raise ValueError(f"isolation must be 'node' or 'device', not {isolation!r}")
    if world_size < 1 or tp < 1 or world_size % tp:
        raise ValueError(f"world_size {world_size} is not a positive multiple of tp {tp}")
    whole = {node: list(node.devices) for node in topology.nodes}
    usable = {node: [device for device in devices if device in free] for node, devices in whole.items()}
    if isolation == "node":
        usable = {node: devices for node, devices in usable.items() if len(devices) == node.num_devices}
    parts = _fill(usable, world_size, tp)
    if parts is None or len(parts) > len(_fill(whole, world_size, tp) or ()):
        return None
    ranks = tuple(device for node, count in parts for device in _take(usable[node], count))
    reserved = ranks if isolation == "device" else tuple(device for node, _ in parts for device in node.devices)
    return Placement(ranks=ranks, reserved=reserved)


def _fill(usable: dict[Node, list[Device]], world_size: int, tp: int) -> list[tuple[Node, int]] | None:
    """How many ranks each node takes: the fewest nodes, the largest first, the last the tightest fit."""
    left = world_size
    room = {node: len(devices) // tp * tp for node, devices in usable.items()}
    parts: list[tuple[Node, int]] = []
    while left:
        fitting = [node for node in room if room[node] >= left]
        if fitting:
            node = min(fitting, key=lambda node: (len(usable[node]), node.name))
        elif any(room.values()):
            node = max(room, key=lambda node: (room[node], -len(usable[node]), node.name))
        else:
            return None
        parts.append((node, min(left, room.pop(node))))
        left -= parts[-1][1]
    return parts


def _take(free: list[Device], count: int) -> list[Device]:
    """``count`` devices in a row from a multiple of ``count``, where links are likeliest the same; else the first."""
    indices = {device.index: device for device in free}
    for start in range(0, max(indices) + 1, count):
        block = [indices[i] for i in range(start, start + count) if i in indices]
        if len(block) == count:
            return block
    return free[:count]
