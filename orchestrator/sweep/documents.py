"""What a ledger keeps beside its events: typed values, each under a name of its own, the latest one only.

``spec`` (the sweep file written out) and ``plan`` stay plain JSON here: they belong to :mod:`orchestrator.config` and
:mod:`orchestrator.planning`, which stand above this room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from orchestrator.sweep.ledger import Ledger, LedgerError
from trials.codec import CodecError, from_json, to_json

if TYPE_CHECKING:
    from orchestrator.sweep.home import Home

SPEC, PLAN = "spec", "plan"
"""Names of the documents that their owners read: the sweep file written out, and the plan."""

MODE_VARIABLE, JOB_VARIABLE = "TUNE_CLUSTER_CONTROLLER_MODE", "TUNE_CLUSTER_JOB"
"""Set for controllers that run in the background: the :data:`Mode`, and the Ray job's id."""


Mode = Literal["foreground", "detached", "ray job"]
"""Where a controller runs: in a terminal, in the background on a host, or on a cluster's head."""


class Document:
    """Base of the values below: reads and writes them as JSON through the codec."""

    __slots__ = ()
    name: ClassVar[str]

    @classmethod
    def read(cls, ledger: Ledger) -> Self | None:
        """The document as last written; None where there is none.

        Raises:
            LedgerError: another version of this program wrote it, and it is not understood.
        """
        body = ledger.document(cls.name)
        if not body:
            return None
        try:
            return from_json(cls, body)
        except CodecError as error:
            problem = f"{cls.name} of {ledger.path} is not understood, another version wrote it: {error}"
            raise LedgerError(problem) from None

    def put(self, ledger: Ledger) -> None:
        """Store it in place of an older one.

        Raises:
            LedgerError: the ledger cannot be written.
        """
        ledger.put_document(self.name, to_json(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller(Document):
    """The controller that was last at work."""

    name: ClassVar[str] = "controller"
    host: str = "?"
    pid: int | None = None
    mode: Mode = "foreground"
    job: str | None = None
    address: str | None = None
    """Address of its Ray cluster; None where it uses none."""
    started_at_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form, in ``ps --json`` and elsewhere."""
        body: dict[str, Any] = to_json(self)
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldNodes(Document):
    """The nodes a sweep holds, and why they are fewer than it could use."""

    name: ClassVar[str] = "lease"
    nodes: tuple[str, ...] = ()
    waiting: str = ""
    """What is waited for; empty where nothing is."""
    at_s: float | None = None
    """When it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRank:
    """What the slowest rank of a running trial was last seen doing."""

    phase: str = "starting"
    """Phase that its ranks go through, see :data:`trials.outcome.Phase`."""
    step: int = 0
    step_time_s: float | None = None
    at_s: float = 0.0
    """When it was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProgress(Document):
    """How far the running trials are."""

    name: ClassVar[str] = "live"
    trials: Mapping[str, LiveRank] = field(default_factory=dict)
    """By the trial's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFile(Document):
    """The sweep file as the user wrote it, without secrets."""

    name: ClassVar[str] = "sweep_yaml"
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProgram(Document):
    """The source of the user's own training program when the sweep was created."""

    name: ClassVar[str] = "measured_program"
    sha256: str
    commit: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each file by its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracking(Document):
    """The MLflow store that the sweep's file named when the sweep was created."""

    name: ClassVar[str] = "tracking"
    uri: str | None = None
    """None: the home's own store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(Document):
    """Where MLflow holds a sweep: the experiment and the sweep's own run. Written when it first is in MLflow."""

    name: ClassVar[str] = "mlflow"
    experiment_id: str
    run_id: str


def tracking_uri(ledger: Ledger, home: Home) -> str:
    """Where the sweep is recorded: the store its file named when it was created, else that of the home."""
    tracking = Tracking.read(ledger)
    return (tracking.uri if tracking else None) or home.default_tracking_uri
