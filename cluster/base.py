"""Contract of cluster backends, and the events of a gang.

A backend holds a lease on nodes, launches gangs on placements that the controller chooses, and reports their events.
:class:`Cluster` lists its obligations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from cluster.hardware.topology import DeviceChoice, Placement, Topology
from cluster.queue import Claim, QueuePolicy
from trials.outcome import Outcome, Phase

if TYPE_CHECKING:
    from cluster.queue import Admission


class ClusterError(RuntimeError):
    """No connection to the cluster, or no lease. The message names the cause and the remedy."""


class ClusterLostError(ClusterError):
    """The cluster went away during use. A new controller can continue once it is back."""


class PrivateClusterLostError(ClusterLostError):
    """A private cluster of this process failed. The process can start another one at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Time limits of a gang, in seconds: for each phase, and between two progress reports of a rank."""

    starting_s: float = 120.0
    warmup_s: float = 300.0
    measuring_s: float = 600.0
    stall_s: float = 120.0
    compile_s: float = 1800.0
    """Total compile time allowed, in seconds. The other deadlines pause while a rank compiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangLaunch:
    """An attempt to start: all of its ranks or none."""

    attempt_id: str
    """Unique and path-safe; also the name of the attempt's folder."""
    token: str
    """Fencing token, copied into every event to recognize late results of another launch."""
    runner: str
    """``module:function``, called in every rank as ``function(spec, progress) -> RankReport as JSON``."""
    spec: Mapping[str, Any]
    """The trial's specification as JSON, opaque to the cluster."""
    placement: Placement
    deadlines: Deadlines = Deadlines()
    env: Mapping[str, str] = field(default_factory=dict)
    one_rank_per_node: bool = False
    """Whether one process per node holds all of the gang's devices there and starts their ranks, instead of one process
    per device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangProgress:
    """Phase and step of the slowest rank of a gang, or of the gang's part on one node."""

    kind: ClassVar[str] = "progress"
    attempt_id: str
    token: str
    phase: Phase
    step: int
    step_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GangEnded:
    """End of a gang: no process is left and its devices are free. Sent exactly once per launch."""

    kind: ClassVar[str] = "ended"
    attempt_id: str
    token: str
    outcome: Outcome
    device_seconds: float
    """Seconds from launch to verified release, times the number of devices held."""
    log_dir: str = ""


GangEvent = GangProgress | GangEnded


class Cluster(Protocol):
    """A lease on nodes, which may grow and shrink. Not thread-safe: one controller uses it from one thread.

    ``test_<name>`` in ``tests/cluster/test_conformance.py`` checks each obligation, unless another file is named. Time
    is the host's; on virtual clusters, that of their clock.

    Obligations of every backend (local, ray, simulated):

    - ``measured``: a gang whose ranks all finish ends as ``Measured``, with figures of every rank.
    - ``launch_returns``: launching does not wait for the gang.
    - ``one_end``: exactly one :class:`GangEnded` follows each launch, and no event of the launch after it.
    - ``identity``: every event carries attempt id and token of its launch.
    - ``progress``: each step of the slowest rank is reported at most once, in order, and the last one always.
    - ``device_seconds``: the end reports the time the gang held its devices, times the number of devices.
    - ``disjoint_gangs``: gangs on disjoint devices do not disturb each other. Devices are free after an end.
    - ``out_of_memory``: a rank that runs out of device memory ends its gang as ``OutOfMemory``.
    - ``deadline``: a missed deadline ends the gang as ``TimedOut``, with the phase and the rank at fault.
    - ``kill``: a killed gang ends as ``GangLost`` with the given reason.
    - ``kill_at_once``: the same for a gang killed before it begins.
    - ``kill_unknown``: killing an unknown or ended attempt changes nothing.
    - ``poll_timeout``: without events, polling takes the time allowed and returns none.
    - ``release``: a released node leaves the lease for good, and its gangs end as ``GangLost``.
    - ``resize``: surplus nodes leave unless they are to be kept, and return on a later request.
    - ``close``: closing with a running gang, and closing again, raise nothing.

    Obligations of backends that run processes (local, ray):

    - ``ranks_meet``: a gang's ranks form a process group, and their reports are merged into one measurement.
    - ``result_on_disk``: the result can be recovered from the attempt's folder without the controller.
    - ``environment``: ranks see the variables of torchrun and those of the launch.
    - ``one_rank_per_node``: on request, one process per node has all of the gang's devices there.
    - ``exception``: a rank's exception ends the gang, with rank, type, message and the end of the log as evidence.
    - ``killed_rank``: the cause is the killed rank, not the broken connections of its peers.
    - ``exit_code``: a rank that exits without a report crashes the gang, with its exit code as evidence.
    - ``missing_runner``: a runner that cannot be imported crashes the gang.
    - ``hanging_rank``: of several ranks without progress, the one that the others wait for is named.
    - ``grandchildren``: processes that ranks started and detached end with the gang.
    - ``no_process_left``: when the end is reported, no process of the gang is left.
    - ``disjoint_processes``: processes of gangs on other devices are not harmed.
    - ``close_leaves_nothing``: after closing, no process of the backend is left (``test_leftovers.py``).
    - ``death_leaves_nothing``: none is left after the calling process died, however abruptly (``test_leftovers.py``).

    Obligations of backends that can lose nodes (ray, simulated), in ``ray/test_backend.py`` and
    ``tests/cluster/test_virtual.py``:

    - ``lost_nodes``: gangs on a lost node end as ``GangLost`` at once; those on other nodes continue.
    """

    @property
    def topology(self) -> Topology:
        """Present content of the lease. It changes only inside :meth:`poll`, :meth:`resize` and :meth:`release`. A name
        always means the same node."""
        ...

    @property
    def lost_nodes(self) -> frozenset[str]:
        """Names of nodes that went away. Gangs launched on them end at once."""
        ...

    @property
    def waiting(self) -> str:
        """Reason why the lease has fewer nodes than requested, for display; empty if it does not."""
        ...

    @property
    def admission(self) -> Admission:
        """The queue of the sweeps that share this cluster."""
        ...

    def resize(self, num_nodes: int, *, at_least: int = 1, keep: Collection[str] = ()) -> None:
        """Request ``num_nodes`` nodes from now on. Returns at once: nodes join as they become free, the first
        ``at_least`` together or not at all. Surplus nodes are given back; those in ``keep`` stay until a later call no
        longer names them."""
        ...

    def release(self, node: str) -> None:
        """Give the node back for good; another one may take its place."""
        ...

    def launch(self, launch: GangLaunch) -> None:
        """Start the gang. The devices of its placement must be free."""
        ...

    def poll(self, timeout_s: float) -> Sequence[GangEvent]:
        """Wait up to ``timeout_s`` for events and return them in order; empty on time-out."""
        ...

    def kill(self, attempt_id: str, reason: str) -> None:
        """Kill a running gang, which ends as ``GangLost`` with ``reason``. Unknown attempts are ignored."""
        ...

    def close(self) -> None:
        """Kill running gangs, give the lease back, end every process started. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


# A sweep's request to its cluster: the kind of backend, nodes, devices and its place in the queue.


Excluded = Callable[[Topology], Collection[str]]
"""Given a lease's content, the names of its nodes not to be used."""

Fault = Literal["crash", "hang", "start_hang", "exit"]
"""Fault of a simulated rank: it raises, stops midway, never starts, or is killed."""

ClusterKind = Literal["ray", "local", "simulated"]

OnWait = Callable[[str], None]
"""Called about once a second with the reason for waiting; may raise to give up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """The cluster that a sweep runs on, and its share of it."""

    kind: ClusterKind = "ray"
    address: str | None = None
    """``HOST:PORT`` of a Ray cluster's head; None: start a private Ray on this host."""
    min_nodes: int = 1
    """Fewest usable nodes: the lease never holds fewer."""
    max_nodes: int = 1
    devices_per_node: int | None = None
    device: DeviceChoice = "auto"
    device_memory_bytes: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all ranks and of the processes they are forked from."""
    simulation: Simulation | None = None
    excluded: Excluded | None = None
    """Nodes not to be used. A lease on a Ray cluster gives them back at once."""
    claim: Claim | None = None
    """Claim in the queue of a shared cluster; None: no queueing."""
    policy: QueuePolicy = field(default_factory=QueuePolicy)
    """Quotas and weights known on this host. Sweeps submitted elsewhere may add others."""
    queue_folder: Path | None = None
    """Folder with the queue of sweeps that share this host."""
    max_wait_s: float | None = None
    """How long to wait for ``min_nodes``, in seconds. None: forever with an ``OnWait`` callback, else two minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulated cluster; see :mod:`cluster.virtual`."""

    accelerator: str
    """Name of the nodes' devices in the catalogue."""
    noise: float = 0.0
    """Standard deviation of the logarithm of each step time."""
    deviation: float = 0.0
    """Deviation of the machine from the cost model's assumptions, in standard deviations of its prior."""
    slow_nodes: Mapping[str, float] = field(default_factory=dict)
    """By node name, the factor by which its steps are slower."""
    node_losses: Mapping[str, float] = field(default_factory=dict)
    """By node name, the time at which it goes away, in seconds."""
    faults: Mapping[Fault, float] = field(default_factory=dict)
    """By fault, its probability per launch."""
    seed: int = 0
