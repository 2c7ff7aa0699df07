"""Files that trials left on this host: logs of failed ranks, traces of profiles."""

from __future__ import annotations

from pathlib import Path

from orchestrator.report.artifacts import profile_files
from orchestrator.status.logs import attempt_folder
from orchestrator.sweep.checks import ProfileRun
from orchestrator.sweep.state import Trial
from orchestrator.tail import tail
from trials.outcome import Measured, StoppedEarly

MAX_LOG_LINES = 5000
"""Of a rank's log, the last ones; in bytes it is bounded by ``log_files.MAX_TAIL_BYTES``."""
MAX_RANKS = 8
"""Logs kept of an attempt where nobody knows which rank failed."""


def failed_logs(sweep_folder: Path, trial: Trial) -> dict[str, str]:
    """Name to text: the failed rank's log of the last attempt, as far as it lies here; empty for what was measured."""
    if not trial.attempts:
        return {}
    index, attempt = len(trial.attempts) - 1, trial.attempts[-1]
    if attempt.outcome is None or isinstance(attempt.outcome, Measured | StoppedEarly):
        return {}
    folder = attempt_folder(sweep_folder, trial.number, index, attempt.token)
    rank = attempt.outcome.evidence.rank
    ranks = range(min(MAX_RANKS, len(attempt.ranks))) if rank is None else (rank,)
    found = {}
    for path in (folder / f"rank{rank}.log" for rank in ranks):
        if path.is_file():
            read = tail(path, MAX_LOG_LINES)
            cut = "" if read.is_whole else f"... the last {len(read.lines)} lines\n"
            found[f"attempt{index}-{path.name}"] = cut + "\n".join(read.lines) + "\n"
    return found


def profile_paths(sweep_folder: Path, trial: Trial) -> list[Path]:
    """Traces and tables of a profiled trial."""
    if not isinstance(trial.check, ProfileRun) or trial.measurement is None:
        return []
    return profile_files(sweep_folder, trial)
