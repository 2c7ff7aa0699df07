"""Takes a sweep out of MLflow again.

Runs are deleted, not the experiment that they are in: other sweeps of the same model and hardware go there, and when a
deleted experiment is brought back, so are all the runs it ever had.
"""

from __future__ import annotations

from orchestrator.sweep.documents import Recorded
from orchestrator.sweep.state import SweepState
from orchestrator.tracking.tracker import Tracker

GONE_WITH = "mlflow gc"
"""The command that takes deleted runs and their files off the disk."""


def remove_runs(tracker: Tracker, state: SweepState, recorded: Recorded | None) -> int:
    """Delete the runs of a sweep; returns how many there were, 0 where MLflow was never told of it.

    MLflow hides deleted runs, and keeps them until its own :data:`GONE_WITH`. Versions in the registry stay.

    Raises:
        ConfigError: the store cannot be reached or refuses.
    """
    if recorded is None or state.created is None:
        return 0
    with tracker.reached():
        client, runs = tracker.client(), tracker.runs_in(recorded.experiment_id, state)
        for run_id in runs:
            client.delete_run(run_id)
    return len(runs)
