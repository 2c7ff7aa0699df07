"""The contract of every cluster backend, and the events a gang emits.

A backend holds a lease on nodes, launches gangs on placements chosen by the controller, and reports what happens to
them. The obligations below are checked for every backend by ``tests/cluster/test_conformance.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

from cluster.placement import Placement
from cluster.topology import Topology
from trials.outcome import Outcome


class ClusterError(RuntimeError):
    """The cluster cannot be reached or gives no lease. The message names the cause and the remedy."""


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
    """A lease on some nodes. Not thread-safe: one controller calls it from one thread.

    Obligations: ``launch`` returns at once and is followed by exactly one :class:`GangEnded`, whatever happens;
    any rank's death, error or missed deadline kills the whole gang, including processes the ranks started; after
    ``close`` (or the death of the calling process, however abrupt) no process of the backend is left.
    """

    @property
    def topology(self) -> Topology:
        """What the lease holds. Constant for the life of the lease in this backend contract."""
        ...

    @property
    def lost_nodes(self) -> frozenset[str]:
        """Names of nodes of the topology that went away; gangs launched on them end at once."""
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
