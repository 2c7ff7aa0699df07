"""The contract of every cluster backend, and the events a gang emits.

A backend holds a lease on nodes, launches gangs on placements chosen by the controller, and reports what happens to
them. The obligations below are checked for every backend by ``tests/cluster/test_conformance.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from cluster.hardware.placement import Placement
from cluster.hardware.topology import Topology
from trials.outcome import Outcome

if TYPE_CHECKING:
    from cluster.queue.share import Admission


class ClusterError(RuntimeError):
    """The cluster cannot be reached or gives no lease. The message names the cause and the remedy."""


class ClusterLostError(ClusterError):
    """The cluster went away while it was in use. Once it is back, a new controller can go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds a gang may spend in each phase, and between two progress reports of any rank, before it is killed."""

    starting_s: float = 120.0
    warmup_s: float = 300.0
    measuring_s: float = 600.0
    stall_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GangLaunch:
    """One attempt, ready to run: all ranks or none."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GangProgress:
    """The slowest rank reached this phase and step."""

    kind: ClassVar[str] = "progress"
    attempt_id: str
    token: str
    phase: str
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

    Obligations: ``launch`` returns at once and is followed by exactly one :class:`GangEnded`, whatever happens;
    any rank's death, error or missed deadline kills the whole gang, including processes the ranks started; after
    ``close`` (or the death of the calling process, however abrupt) no process of the backend is left.
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
        """Why it holds fewer nodes than asked for, for people; empty where it does not."""
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
        """Kill a running gang; its :class:`GangEnded` carries ``GangLost(reason)``. Unknown attempts are ignored."""
        ...

    def close(self) -> None:
        """Kill what runs, give the lease back, end every process started. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
