"""Names and values of the documents that a ledger keeps beside its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from orchestrator.sweep.home import Home
from orchestrator.sweep.ledger import Ledger

SPEC = "spec"
"""The ledger's document with the sweep file, written out."""

CONTROLLER, LEASE, LIVE = "controller", "lease", "live"
"""The documents: who is at work and how; nodes held and why not more; how far running trials have got."""


MODE_VARIABLE, JOB_VARIABLE = "TUNE_CLUSTER_CONTROLLER_MODE", "TUNE_CLUSTER_JOB"
"""Set for controllers that run in the background: ``detached`` or ``ray job``, and the job's id."""

PLAN = "plan"
"""The ledger's document with the plan."""


def tracking_uri(ledger: Ledger, home: Home) -> str:
    """Where the sweep is recorded: the store its file named when it was created, else that of the home."""
    return ledger.document("tracking")["uri"] or home.default_tracking_uri


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Where MLflow holds a sweep: the experiment and the sweep's own run."""

    experiment_id: str
    run_id: str

    @classmethod
    def of(cls, ledger: Ledger) -> Self | None:
        """As noted in the ledger when the sweep was first written to MLflow; None before that."""
        noted = ledger.document("mlflow")
        return cls(experiment_id=noted["experiment_id"], run_id=noted["run_id"]) if noted else None
