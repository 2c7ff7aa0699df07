"""What the pages look with: a sweep, or all sweeps of a home, read again and again from where the last look ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from orchestrator import units
from orchestrator.errors import ConfigError
from orchestrator.invocation import Invocation
from orchestrator.live import sweep_parts
from orchestrator.live.rows import Row, progress_cells, row_part, trial_rows
from orchestrator.report.summary import speedup
from orchestrator.report.verdict import headline
from orchestrator.status.overview import summary_of
from orchestrator.status.words import age_words
from orchestrator.sweep.home import Home
from orchestrator.sweep.ledger import FILE_NAME, LedgerError
from orchestrator.sweep.snapshot import AT_REST, Snapshot
from orchestrator.text import plain
from orchestrator.virtual import watermark

Links = Callable[[Snapshot], Mapping[str, str]]
"""Finds the pages of a sweep in MLflow, by what they show."""

MAX_POINTS = 300
"""Steps of a running trial that are kept for its curve, the latest."""


class SweepLook:
    """Reads one sweep. Rows are made anew only when an event or a running trial's progress asks for it."""

    def __init__(self, home: Home, name: str, invocation: Invocation, links: Links) -> None:
        self._home, self._name = home, name
        self._invocation, self._links = invocation, links
        self._seen: Snapshot | None = None
        self._file: int | None = None
        self._rows: dict[int, Row] = {}
        self._steps: dict[int, list[list[float]]] = {}

    def parts(self) -> Mapping[str, Any]:
        """All that changes by itself; result and rows where something has happened since the last look."""
        file = (self._home.sweep_folder(self._name) / FILE_NAME).stat().st_ino
        before = self._seen if file == self._file else None  # a sweep of this name may have taken the place of another
        sweep = self._home.read(self._name, before)
        self._seen, self._file = sweep, file
        parts: dict[str, Any] = {
            "head": sweep_parts.heading(sweep),
            "spending": sweep_parts.spending(sweep),
            "running": sweep_parts.running(sweep),
            "links": dict(self._links(sweep)),
            **self._curves(sweep),
        }
        if before is None or sweep.news or sweep.phase != before.phase:
            parts |= sweep_parts.result(sweep, self._home, self._invocation) | self._table(sweep)
        elif sweep.live != before.live:
            parts |= self._running_rows(sweep)
        return parts

    def _table(self, sweep: Snapshot) -> dict[str, Any]:
        if sweep.state.created is None:
            return {}
        rows, about = trial_rows(sweep)
        gone = {row_part(number): None for number in self._rows.keys() - rows.keys()}
        self._rows = rows
        return {"table": about, **gone, **{row_part(number): row for number, row in rows.items()}}

    def _running_rows(self, sweep: Snapshot) -> dict[str, Any]:
        """Rows of the running trials with what they are doing now: the rest of the table is as it was."""
        for trial in sweep.running:
            if trial.number in self._rows:
                self._rows[trial.number] |= progress_cells(trial, sweep.live.get(trial.number))
        return {row_part(number): self._rows[number] for number in sweep.state.running if number in self._rows}

    def _curves(self, sweep: Snapshot) -> dict[str, Any]:
        """Step times of the running trials as far as they were seen, each with its step; none of those that ended."""
        ended = [number for number in self._steps if number not in sweep.state.running]
        parts: dict[str, Any] = {f"steps/{number}": None for number in ended}
        for number in ended:
            del self._steps[number]
        for number, progress in sweep.live.items():
            points = self._steps.setdefault(number, [])
            if progress.step_time_s and (not points or points[-1][0] != progress.step):
                if points and points[-1][0] > progress.step:
                    points.clear()  # another attempt, or measuring after warm-up
                points.append([progress.step, progress.step_time_s])
                del points[:-MAX_POINTS]
            parts[f"steps/{number}"] = {"phase": progress.phase, "points": list(points)}
        return parts


class IndexLook:
    """Reads all sweeps of a home."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._seen: dict[str, tuple[int, Snapshot]] = {}
        self._told: set[str] = set()

    def parts(self) -> Mapping[str, Any]:
        """A part for each sweep that can be read."""
        found = {f"sweep/{name}": line for name in self._home.all_names() if (line := self._line(name))}
        gone = dict.fromkeys(self._told - found.keys())
        self._told = set(found)
        return {"home": str(self._home.path), **found, **gone}

    def _line(self, name: str) -> dict[str, Any] | None:
        """A sweep in short; None for one of which nothing is known yet."""
        try:
            file = (self._home.sweep_folder(name) / FILE_NAME).stat().st_ino
            known = self._seen.get(name)
            sweep = self._home.read(name, known[1] if known and known[0] == file else None)
        except (ConfigError, LedgerError, OSError) as error:
            return {"name": name, "phase": "unreadable", "reason": plain(str(error)), "order": 2}
        self._seen[name] = (file, sweep)
        return _index_line(sweep, self._home) if sweep.state.created or sweep.controller else None


def _index_line(sweep: Snapshot, home: Home) -> dict[str, Any]:
    state, summary = sweep.state, summary_of(sweep, home)
    compared = speedup(state.best, state.baseline, state.objective)
    limit = state.created.budget.max_trials if state.created else None
    age = "" if sweep.began_at_s is None else age_words(sweep.at_s - sweep.began_at_s)
    return {
        "name": sweep.name,
        "mark": watermark(state.virtual),
        "phase": sweep.phase,
        "reason": plain(sweep.reason),
        "headline": headline(state, summary) if summary and (compared or state.is_over) else "",
        "done": f"{sweep.num_done} of {limit}" if limit else str(sweep.num_done),
        "running": len(state.running),
        "cost": units.device_time(sweep.device_seconds),
        "hardware": state.created.hardware if state.created else "",
        "age": age,
        "began": sweep.began_at_s or 0.0,
        "order": int(sweep.phase in AT_REST),
    }
