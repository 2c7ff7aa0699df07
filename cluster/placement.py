"""Which rank runs on which device: pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.topology import Device, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``ranks[r]`` is the device of rank ``r``; ``reserved`` are all devices held, a superset of those."""

    ranks: tuple[Device, ...]
    reserved: tuple[Device, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes used, in order of their first rank."""
        return tuple(dict.fromkeys(device.node for device in self.ranks))


def place(
    topology: Topology, free: frozenset[Device], *, world_size: int, tp: int, isolation: str
) -> Placement | None:
    """Choose devices for ``world_size`` ranks, or None while not enough are free.

    Tensor-parallel groups (``tp`` consecutive ranks) never span nodes. With ``isolation="node"`` whole free nodes are
    reserved; with ``"device"`` gangs smaller than a node share it. Ranks are consecutive on a node.
    """
    raise NotImplementedError
