"""What a sweep asks of its cluster: the kind of backend, nodes, devices and its place in the queue."""

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
"""Given what a lease holds, the names of those of its nodes that are not to be used."""

ClusterKind = Literal["ray", "local", "simulated", "replay"]

OnWait = Callable[[str], None]
"""Called about once a second with what is waited for; may raise to give up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """Which cluster a sweep runs on, and which part of it."""

    kind: ClusterKind = "ray"
    address: str | None = None
    """``HOST:PORT`` of the head of a Ray cluster; None: a private Ray is started on this host."""
    min_nodes: int = 1
    """The least that is of use: fewer nodes are not held."""
    max_nodes: int = 1
    devices_per_node: int | None = None
    device: DeviceChoice = "auto"
    device_memory_bytes: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all processes that ranks are forked from, and so of ranks."""
    simulation: Simulation | None = None
    replay: Replay | None = None
    excluded: Excluded | None = None
    """Nodes on which nothing is to run; a lease on a Ray cluster gives them back at once."""
    claim: Claim | None = None
    """What it wants of a cluster that it shares with other sweeps; None: it asks nobody."""
    policy: QueuePolicy = field(default_factory=QueuePolicy)
    """Quotas and weights that this host knows of; sweeps submitted elsewhere may bring others."""
    queue_folder: Path | None = None
    """Folder of the queue of those who share this host."""
    max_wait_s: float | None = None
    """How long to wait for ``min_nodes``; None: for ever where somebody is told what is waited for, else two
    minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A cluster that answers from one problem of a table of published measurements; see
    :mod:`cluster.virtual.replay`."""

    table: Path
    problem: str
    noise: float = 0.0
    """Standard deviation of the logarithm of each step time."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A cluster that does not exist; see :mod:`cluster.virtual.simulated` and :mod:`cluster.virtual.modelled`."""

    accelerator: str
    """Name of the nodes' devices in the catalogue."""
    noise: float = 0.0
    """Standard deviation of the logarithm of each step time."""
    deviation: float = 0.0
    """How far the machine lies from what the cost model assumes, in standard deviations of its prior."""
    slow_nodes: Mapping[str, float] = field(default_factory=dict)
    """Node name to the factor by which its steps take longer."""
    node_losses: Mapping[str, float] = field(default_factory=dict)
    """Node name to the second in which it goes away."""
    faults: Mapping[Fault, float] = field(default_factory=dict)
    """Fault to its probability per launch."""
    seed: int = 0
