"""What a sweep asks of its cluster: kind, nodes, devices, its place in the queue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cluster.hardware.topology import DeviceChoice, Topology
from cluster.queue.share import Claim, QueuePolicy

if TYPE_CHECKING:
    from cluster.virtual.simulated import Fault

Excluded = Callable[[Topology], Collection[str]]
"""Names the nodes of a lease that are not to be used."""


ClusterKind = Literal["ray", "local", "simulated", "replay"]


OnWait = Callable[[str], None]
"""Is told about once a second what is waited for; may raise to give up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """Which cluster, and what of it."""

    kind: ClusterKind = "ray"
    address: str | None = None
    """Of a Ray cluster; None with Ray starts a private one on this host."""
    min_nodes: int = 1
    """Fewer are not held: all of these or none."""
    max_nodes: int = 1
    devices_per_node: int | None = None
    device: DeviceChoice = "auto"
    device_memory_bytes: int | None = None
    simulation: Simulation | None = None
    replay: Replay | None = None
    excluded: Excluded | None = None
    """Nothing runs on these nodes; Ray does not even hold them."""
    claim: Claim | None = None
    """Its place in the queue of those who share the cluster; None: it asks nobody."""
    policy: QueuePolicy = field(default_factory=QueuePolicy)
    """Of that queue, as far as it is known here."""
    queue_folder: Path | None = None
    """Where the queue of this host is kept."""
    max_wait_s: float | None = None
    """How long to wait for ``min_nodes``; None: as long as it takes where somebody is told, else two minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One problem of a table of published measurements."""

    table: Path
    problem: str
    noise: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A cluster that does not exist; see :mod:`cluster.virtual.simulated` and :mod:`cluster.virtual.modelled`."""

    accelerator: str
    """Its name in the catalogue."""
    noise: float = 0.0
    deviation: float = 0.0
    slow_nodes: Mapping[str, float] = field(default_factory=dict)
    node_losses: Mapping[str, float] = field(default_factory=dict)
    faults: Mapping[Fault, float] = field(default_factory=dict)
    seed: int = 0
