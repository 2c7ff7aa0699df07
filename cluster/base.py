"""The contract of cluster backends, and the events that a gang emits.

A backend holds a lease on nodes, launches gangs on placements chosen by the controller, and reports what happens to
them. What it owes its caller stands with :class:`Cluster`.
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
    """The cluster cannot be reached or gives no lease. The message names the cause and the remedy."""


class ClusterLostError(ClusterError):
    """The cluster went away while it was in use. Once it is back, a new controller can go on."""


class PrivateClusterLostError(ClusterLostError):
    """A cluster that this process had started itself has failed; it can start another one at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds a gang may spend in each phase, and between two progress reports of any rank, before it is killed."""

    starting_s: float = 120.0
    warmup_s: float = 300.0
    measuring_s: float = 600.0
    stall_s: float = 120.0
    compile_s: float = 1800.0
    """Seconds that compiling may take in all; as long as a rank compiles, the other deadlines stand still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangLaunch:
    """An attempt that is ready to run: all of its ranks or none."""

    attempt_id: str
    """Unique, path-safe; names the attempt's folder."""
    token: str
    """Fencing token, copied into every event so that late results of another launch can be told apart."""
    runner: str
    """``module:function``, called in every rank as ``function(spec, progress) -> RankReport as JSON``."""
    spec: Mapping[str, Any]
    """The trial's specification as JSON, opaque to the cluster."""
    placement: Placement
    deadlines: Deadlines = Deadlines()
    env: Mapping[str, str] = field(default_factory=dict)
    one_rank_per_node: bool = False
    """Whether one process per node holds all devices of the gang there and starts the ranks for them, instead of one
    process per device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangProgress:
    """The slowest rank of a gang, or of its part on one node, has reached this phase and step."""

    kind: ClassVar[str] = "progress"
    attempt_id: str
    token: str
    phase: Phase
    step: int
    step_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GangEnded:
    """The gang is over: every process of it is gone and its devices are free again. Sent exactly once per launch."""

    kind: ClassVar[str] = "ended"
    attempt_id: str
    token: str
    outcome: Outcome
    device_seconds: float
    """Seconds from launch to verified release, times the number of devices held."""
    log_dir: str = ""


GangEvent = GangProgress | GangEnded


class Cluster(Protocol):
    """A lease on some nodes, which may grow and shrink. Not thread-safe: one controller calls it from one thread.

    Each obligation below is checked by the test of its name, ``test_<name>`` in ``tests/cluster/test_conformance.py``
    unless another file is named. Time is the host's, on virtual clusters that of their clock.

    Obligations of every backend (local, ray, simulated):

    - ``measured``: a gang whose ranks all do their work ends as ``Measured``, with figures of every rank.
    - ``launch_returns``: launching does not wait for the gang.
    - ``one_end``: a launch is followed by exactly one :class:`GangEnded`, whatever happens, and nothing after it.
    - ``identity``: every event carries attempt id and token of its launch.
    - ``progress``: each step that the slowest rank reaches is reported at most once, in order, the last one always.
    - ``device_seconds``: the end tells the time for which the gang held its devices times all devices reserved.
    - ``disjoint_gangs``: gangs on disjoint devices do not disturb each other, and devices are free after an end.
    - ``out_of_memory``: a rank that runs out of device memory ends its gang as ``OutOfMemory``.
    - ``deadline``: a missed deadline ends the gang as ``TimedOut`` with the phase and the rank to blame.
    - ``kill``: a killed gang ends as ``GangLost`` with the reason given.
    - ``kill_at_once``: so does one that is killed before it has begun.
    - ``kill_unknown``: killing an attempt that is unknown or has ended changes nothing.
    - ``poll_timeout``: where nothing happens, polling takes the time allowed and returns no event.
    - ``release``: a node given back leaves the lease for good, and its gangs end as ``GangLost``.
    - ``resize``: nodes too many leave unless they are to be kept, and come back when they are asked for again.
    - ``close``: closing with a running gang, and closing again, raises nothing.

    Obligations of backends that run processes (local, ray):

    - ``ranks_meet``: the ranks of a gang form a process group, and their reports are merged into one measurement.
    - ``result_on_disk``: the result can be recovered from the attempt's folder without the controller.
    - ``environment``: ranks see the variables that torchrun would set, and those of the launch.
    - ``one_rank_per_node``: where the launch says so, one process per node has all of the gang's devices there.
    - ``exception``: a rank's exception ends the gang with its rank, type, message and the end of its log as evidence.
    - ``killed_rank``: a rank that is killed is the cause, not the connections of its peers that break.
    - ``exit_code``: a rank that exits without a report crashes the gang, with its exit code as evidence.
    - ``missing_runner``: so does a runner that cannot be imported.
    - ``hanging_rank``: of several ranks that make no progress the one for which the others wait is named.
    - ``grandchildren``: processes that ranks started and detached are ended with the gang.
    - ``no_process_left``: when the end is reported, no process of the gang is left.
    - ``disjoint_processes``: nor is any process of a gang on other devices harmed.
    - ``close_leaves_nothing``: after closing no process of the backend is left (``test_leftovers.py``).
    - ``death_leaves_nothing``: nor after the calling process died, however abruptly (``test_leftovers.py``).

    Obligations of backends whose nodes can be lost (ray, simulated), in ``ray/test_backend.py`` and
    ``tests/cluster/test_virtual.py``:

    - ``lost_nodes``: gangs on a lost node end as ``GangLost`` at once, those on other nodes go on.
    """

    @property
    def topology(self) -> Topology:
        """What the lease holds now. It changes inside :meth:`poll`, :meth:`resize` and :meth:`release` only; a name
        always means the same node."""
        ...

    @property
    def lost_nodes(self) -> frozenset[str]:
        """Names of nodes that went away; gangs launched on them end at once."""
        ...

    @property
    def waiting(self) -> str:
        """Why the lease has fewer nodes than asked for, for people; empty where it has as many."""
        ...

    @property
    def admission(self) -> Admission:
        """The queue of those who share this cluster."""
        ...

    def resize(self, num_nodes: int, *, at_least: int = 1, keep: Collection[str] = ()) -> None:
        """Ask for ``num_nodes`` nodes from now on. Returns at once: nodes come as they become free, the first
        ``at_least`` together or not at all; nodes too many are given back, those in ``keep`` last and only when named
        no more."""
        ...

    def release(self, node: str) -> None:
        """Give the node back and do not lease it again; another one may take its place."""
        ...

    def launch(self, launch: GangLaunch) -> None:
        """Start the gang; devices of its placement must be free."""
        ...

    def poll(self, timeout_s: float) -> Sequence[GangEvent]:
        """Wait up to ``timeout_s`` for events and return them in the order they happened; empty on time-out."""
        ...

    def kill(self, attempt_id: str, reason: str) -> None:
        """Kill a running gang, whose end then is ``GangLost`` with ``reason``. Unknown attempts are ignored."""
        ...

    def close(self) -> None:
        """Kill what runs, give the lease back, end every process started. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


# What a sweep asks of its cluster: the kind of backend, nodes, devices and its place in the queue.


Excluded = Callable[[Topology], Collection[str]]
"""Given what a lease holds, the names of those of its nodes that are not to be used."""

Fault = Literal["crash", "hang", "start_hang", "exit"]
"""What a simulated rank does: it raises, stops in the middle, never starts, or is killed."""

ClusterKind = Literal["ray", "local", "simulated"]

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
    excluded: Excluded | None = None
    """Nodes on which nothing is to run; a lease on a Ray cluster gives them back at once."""
    claim: Claim | None = None
    """Its request to the queue of a shared cluster; None: it does not queue."""
    policy: QueuePolicy = field(default_factory=QueuePolicy)
    """Quotas and weights that this host knows of; sweeps submitted elsewhere may bring others."""
    queue_folder: Path | None = None
    """Folder of the queue of the sweeps that share this host."""
    max_wait_s: float | None = None
    """How long to wait for ``min_nodes``; None: forever if there is a listener for the reasons, else two
    minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A cluster that does not exist; see :mod:`cluster.virtual` and :mod:`cluster.virtual`."""

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
