"""The logs of a trial's ranks, and of the controller: where they lie, and how they end.

Every rank writes ``sweeps/NAME/attempts/ID/rank<r>.log`` on its own node. On other nodes it is the same path there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.sweep.home import attempt_folder
from orchestrator.sweep.snapshot import Snapshot
from orchestrator.sweep.state import Attempt, Trial
from orchestrator.text import plain, tail
from orchestrator.units import trial_id
from trials.codec import to_json
from trials.outcome import Evidence, Measured
from trials.shapes import ScriptModel


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """The log of one rank. ``lines`` is empty where the file is not on this host."""

    rank: int
    node: str
    path: Path
    is_here: bool
    is_root_cause: bool
    lines: tuple[str, ...] = ()
    is_whole: bool = True
    """Whether nothing stands before ``lines``."""
    end: int = 0
    """Byte after the last line read."""

    def to_json(self) -> dict[str, Any]:
        names = ("rank", "node", "is_here", "is_root_cause", "is_whole")
        return {**{name: getattr(self, name) for name in names}, "path": str(self.path), "lines": list(self.lines)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLogs:
    """The logs of one attempt; the rank that caused a failure comes first."""

    sweep: str
    trial: int
    attempt: int
    outcome: str
    """Its kind; ``running`` while there is none."""
    ranks: tuple[RankLog, ...]
    evidence: Evidence | None
    """What the ledger keeps of a failure, wherever the logs lie."""

    def to_json(self) -> dict[str, Any]:
        names = ("sweep", "trial", "attempt", "outcome")
        return {
            **{name: getattr(self, name) for name in names},
            "ranks": [log.to_json() for log in self.ranks],
            "evidence": to_json(self.evidence),
        }


def attempt_logs(
    sweep: Snapshot, trial: Trial, *, attempt: int | None = None, rank: int | None = None, num_lines: int
) -> AttemptLogs:
    """The logs of an attempt, the last one by default, or of one ``rank`` of it.

    Raises:
        ConfigError: there is no such attempt or rank, or the cluster is a simulated one.
    """
    if sweep.is_virtual:
        raise ConfigError(f"the sweep {sweep.name!r} runs on no real cluster: its trials write no logs")
    index = _attempt_index(trial, attempt)
    found = trial.attempts[index]
    nodes = _log_nodes(sweep, found)
    if rank is not None and not 0 <= rank < len(nodes):
        raise ConfigError(f"{trial_id(trial.number)} has no rank {rank}", remedy=f"Ranks: 0 to {len(nodes) - 1}.")
    evidence = getattr(found.outcome, "evidence", None)
    root = evidence.rank if evidence else None
    ranks = [rank] if rank is not None else sorted(range(len(nodes)), key=lambda r: (r != root, r))
    folder = attempt_folder(sweep.folder, trial.number, index, found.token)
    return AttemptLogs(
        sweep=sweep.name,
        trial=trial.number,
        attempt=index,
        outcome=found.outcome.kind if found.outcome else "running",
        ranks=tuple(_rank_log(folder, r, nodes[r], is_root=r == root, num_lines=num_lines) for r in ranks),
        evidence=None if isinstance(found.outcome, Measured) else evidence,
    )


def _log_nodes(sweep: Snapshot, attempt: Attempt) -> list[str]:
    """The node of each log: one for every rank, or for every node where the command starts the ranks there itself."""
    nodes = [device.node for device in attempt.ranks]
    created = sweep.state.created
    model = created.workload.model if created else None
    is_own = isinstance(model, ScriptModel) and model.launcher == "own"
    return list(dict.fromkeys(nodes)) if is_own else nodes


def _attempt_index(trial: Trial, attempt: int | None) -> int:
    if not trial.attempts:
        raise ConfigError(f"{trial_id(trial.number)} was not launched yet, so it has no log")
    if attempt is None:
        return len(trial.attempts) - 1
    if 0 <= attempt < len(trial.attempts):
        return attempt
    raise ConfigError(
        f"{trial_id(trial.number)} has no attempt {attempt}", remedy=f"Attempts: 0 to {len(trial.attempts) - 1}."
    )


def _rank_log(folder: Path, rank: int, node: str, *, is_root: bool, num_lines: int) -> RankLog:
    path = folder / f"rank{rank}.log"
    log = RankLog(rank=rank, node=node, path=path, is_here=path.is_file(), is_root_cause=is_root)
    if not log.is_here:
        return log
    read = tail(path, num_lines)
    return RankLog(
        rank=rank,
        node=node,
        path=path,
        is_here=True,
        is_root_cause=is_root,
        lines=read.lines,
        is_whole=read.is_whole,
        end=read.end,
    )


def log_tail(evidence: Evidence) -> list[str]:
    """The last lines that the ledger keeps of a failing rank, safe to print."""
    return [plain(line) for line in evidence.log_tail]
