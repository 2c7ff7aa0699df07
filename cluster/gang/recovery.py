"""The outcome of an attempt whose controller died, from what its ranks left on disk."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.gang.messages import RankFailure, RankResult, RankSuccess
from cluster.gang.outcome import COLLATERAL, fold
from trials.codec import CodecError, from_json
from trials.outcome import Evidence, GangLost, Outcome
from trials.reports.disturbance import LOAD_SUFFIX, Disturbance


@dataclass(frozen=True, slots=True)
class Remains:
    """What became of an attempt. ``ended_at_s``: when it last wrote anything; None where it left nothing."""

    outcome: Outcome
    ended_at_s: float | None


def recover(attempts: Path, token: str, world_size: int) -> Remains:
    """The outcome of the attempt with this token, if it is known; else ``GangLost``.

    It is known when reports of all ranks were stored, or why some rank failed: its peers were killed for it.
    ``attempts`` is the folder the backend worked in; what ranks stored on other hosts is not found. Results of other
    launches (other tokens) do not count.
    """
    folder = next((path for path in attempts.glob(f"*-{token[:8]}") if path.is_dir()), None)
    if folder is None:
        return Remains(_lost("the controller ended before the gang had started"), None)
    ended_at_s = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
    results = [_result(folder / f"rank{rank}.json", token) for rank in range(world_size)]
    complete = [result for result in results if result is not None]
    num_ranks = sum(result.report.num_ranks if isinstance(result, RankSuccess) else 1 for result in complete)
    if num_ranks < world_size and not any(_is_root_cause(result) for result in complete):
        return Remains(_lost("the controller ended while the gang was running"), ended_at_s)
    return Remains(fold(complete, _disturbances(folder)), ended_at_s)


def _disturbances(folder: Path) -> list[Disturbance]:
    """What wardens stored of their nodes while the gang measured."""
    found: list[Disturbance] = []
    for path in sorted(folder.glob(f"*{LOAD_SUFFIX}")):
        with contextlib.suppress(OSError, ValueError):
            found.append(from_json(Disturbance, json.loads(path.read_text(encoding="utf-8"))))
    return found


def _result(path: Path, token: str) -> RankResult | None:
    try:
        stored: Any = json.loads(path.read_text(encoding="utf-8"))
        if stored["token"] != token:
            return None
        result: RankResult = from_json(RankResult, stored["result"])
    except (OSError, ValueError, KeyError, CodecError):
        return None
    return result


def _is_root_cause(result: RankResult) -> bool:
    return isinstance(result, RankFailure) and result.category not in COLLATERAL


def _lost(message: str) -> Outcome:
    return GangLost(evidence=Evidence(message=message), cause="controller")
