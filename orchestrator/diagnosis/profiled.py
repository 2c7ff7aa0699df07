"""What profile runs found out about the trials they repeat."""

from __future__ import annotations

from orchestrator.diagnosis.step_parts import ProfileOf
from orchestrator.sweep.checks import ProfileRun
from orchestrator.sweep.state import SweepState


def profiles_of(state: SweepState) -> dict[int, ProfileOf]:
    """By the trial that was profiled; of several runs the last one counts."""
    found: dict[int, ProfileOf] = {}
    for trial in state.trials:
        if not isinstance(trial.check, ProfileRun) or trial.measurement is None:
            continue
        ranks = tuple(rank for rank in trial.measurement.findings.profile if rank.times.total_s > 0)
        if ranks:
            found[trial.check.of] = ProfileOf(run=trial.number, ranks=ranks)
    return found
