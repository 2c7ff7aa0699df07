"""The content of the live pages: all sweeps of a home, a sweep, a trial; as HTML fragments, rows, chart points.

Fragments are rendered by the templates of the report page, from the same tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import statistics, units
from orchestrator.errors import ConfigError
from orchestrator.objective import unit_legend
from orchestrator.process_support import Invocation
from orchestrator.report import descriptions
from orchestrator.report.curves import Finalist
from orchestrator.report.descriptions import CommandPurpose, findings_lines
from orchestrator.report.page import page as offline
from orchestrator.report.report import clock_parts, make_short_report, next_commands
from orchestrator.report.summary import Summary, cost, headline, speedup
from orchestrator.report.tables import change_table, make_trial_table, progress_cell
from orchestrator.report.view import Cell, Column, ShownRow, cell_of, table_of
from orchestrator.space.notation import flat_params, short_name
from orchestrator.status.explanation import AttemptExplanation, Explanation, RankLog, attempt_logs, explain
from orchestrator.status.overview import Fact, age_text, eta_s, facts, running_table, summary_of
from orchestrator.sweep.checkpoint import FAULTS, RETRIABLE
from orchestrator.sweep.ledger import LedgerError
from orchestrator.sweep.snapshot import AT_REST, Home, Phase, Snapshot
from orchestrator.sweep.state import SweepState, Trial, find_trial, nodes_of
from orchestrator.text import Follower, plain
from orchestrator.units import watermark, watermark_line
from trials.outcome import Measurement

if TYPE_CHECKING:
    from jinja2 import Environment

_FOLDER = Path(__file__).with_name("static")

Links = Callable[[Snapshot], Mapping[str, str]]
"""Returns the pages of a sweep in MLflow, by title."""

MAX_ROWS = 400
"""Maximum number of trials shown: the baseline, the fastest, and the latest."""
MAX_CHECKS = 100
"""Maximum number of latest checks shown."""
MAX_POINTS = 300
"""Maximum number of latest steps kept for the curve of a running trial."""
MAX_STEPS = 2000
"""Maximum number of latest steps in the curve of a measured trial."""
NUM_LINES = 300
"""Number of last lines of a log shown at first."""

ALLOWED: Mapping[Phase, tuple[str, ...]] = {
    "waiting": ("cancel",),
    "running": ("pause", "drain", "cancel", "retry"),
    "pausing": ("cancel",),
    "draining": ("pause", "cancel"),
    "interrupted": ("resume", "cancel", "retry"),
    "paused": ("resume", "cancel", "retry"),
    "finished": ("retry",),
    "failed": ("retry",),
}
"""The actions that each phase allows, in the order of the buttons."""

PHASE_CLASSES: Mapping[str, str] = {
    **dict.fromkeys(("waiting", "pausing", "draining", "cancelling", "paused"), "wait"),
    "running": "running",
    "finished": "good",
    "failed": "bad",
    "interrupted": "bad",
    "cancelled": "rest",
}

CHECK_COLUMNS = (
    Column(title="check", key="trial"),
    Column(title="what", rises=True),
    Column(title="state", rises=True),
    Column(title="speed", is_number=True),
    Column(title="step", is_number=True, rises=True),
)

INDEX_COLUMNS = (
    Column(title="sweep", rises=True),
    Column(title="state", min_width=20, rises=True),
    Column(title="result", min_width=20, rises=True),
    Column(title="trials done", is_number=True, rises=True),
    Column(title="running", is_number=True),
    Column(title="device time", is_number=True, rises=True),
    Column(title="on", min_width=20, rises=True),
    Column(title="started", is_number=True),
)

ATTEMPT_COLUMNS = (
    Column(title="attempt", is_number=True),
    Column(title="ended"),
    Column(title="on", min_width=10),
    *(Column(title=title, is_number=True) for title in ("ranks", "devices", "took", "device time")),
    Column(title="consequences", min_width=20),
)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """The environment of the report page, with the templates of the live pages."""
    from jinja2 import ChoiceLoader, FileSystemLoader

    base = offline.environment()
    assert base.loader is not None
    loader = ChoiceLoader([FileSystemLoader(_FOLDER), base.loader])
    return base.overlay(loader=loader)


def render(template: str, **values: Any) -> str:
    """A page; ``values`` are escaped."""
    return _environment().get_template(template).render(**values)


def fragment(name: str, *values: Any) -> str:
    """A part of a page, by the macro of this name."""
    return str(getattr(_environment().get_template("parts.html.j2").module, name)(*values)).strip()


@lru_cache(maxsize=32)
def static(name: str) -> tuple[str, bytes] | None:
    """Type and content of the script or style sheet of this name; None if it does not exist."""
    if name == "live.css":
        return "text/css; charset=utf-8", render("live.css.j2").encode()
    files = {path.name: path for folder in (_FOLDER, Path(offline.__file__).parent) for path in folder.glob("*.js")}
    return ("text/javascript; charset=utf-8", files[name].read_bytes()) if name in files else None


class SweepView:
    """Reads one sweep. Rows are only made again for new events or progress."""

    def __init__(self, home: Home, name: str, invocation: Invocation, links: Links) -> None:
        self._home, self._name = home, name
        self._invocation, self._links = invocation, links
        self._to = f"/sweeps/{name}/trials/"
        self._seen: Snapshot | None = None
        self._columns: Mapping[str, tuple[Column, ...]] = {}
        self._rows: dict[str, ShownRow] = {}
        self._parts: dict[str, Any] = {}
        self._steps: dict[int, list[list[float]]] = {}

    def parts(self) -> Mapping[str, Any]:
        """All changing parts; result and rows only if something has changed since the last look."""
        before, sweep = self._seen, self._home.read(self._name, self._seen)
        if before is not None and before.birth != sweep.birth:
            before = None  # it has replaced another of the same name, or has only just begun
        self._seen = sweep
        summary = summary_of(sweep, self._home)
        parts: dict[str, Any] = {
            "head": heading(sweep),
            "html/spending": fragment("spending", _facts(sweep), cost(summary)) if summary else None,
            "html/running": fragment("running", replace(running_table(sweep), title="Running now"), self._to),
            "html/links": fragment("links", self._links(sweep)),
            **self._curves(sweep),
        }
        if before is None or sweep.news or sweep.phase != before.phase:
            parts |= self._result(sweep, summary) | self._tables(sweep)
        elif sweep.live != before.live:
            parts |= self._progress(sweep)
        return parts

    def _result(self, sweep: Snapshot, summary: Summary | None) -> dict[str, Any]:
        """The result so far, the proof, and suggested next commands."""
        if summary is None:
            return dict.fromkeys(("html/verdict", "html/confirmation", "html/commands", "intervals"))
        report = make_short_report(sweep.state, summary)
        is_early = not report.shown and not sweep.state.is_over
        sentence = "Nothing has been measured yet." if is_early else report.headline
        proof = report.proof
        return {
            "html/verdict": fragment("result", report, sentence, self._to),
            "html/confirmation": fragment("confirmation", proof, self._to) if proof.finalists else None,
            "intervals": [_interval(one) for one in proof.finalists],
            "html/commands": fragment("commands", _commands(sweep, self._invocation)),
        }

    def _tables(self, sweep: Snapshot) -> dict[str, Any]:
        state = sweep.state
        if state.created is None:
            return {}
        table = make_trial_table(state, shown_trials(state), sweep.live)
        checks = make_trial_table(state, state.checks()[-MAX_CHECKS:], sweep.live)
        columns = tuple(table.on("live"))
        if columns != self._columns.get("trial"):
            self._parts.clear()  # rows of other columns
        self._columns = {"trial": columns, "check": CHECK_COLUMNS}
        hidden, hidden_checks = state.num_searched - len(table.rows), state.num_checks - len(checks.rows)
        rows = {f"trial/{trial.number}": row for row, trial in zip(table.rows, table.trials, strict=True)}
        for row, trial in zip(checks.rows, checks.trials, strict=True):
            remark = descriptions.note_text(trial.note)
            what = {"what": Cell(descriptions.check_text(trial.check), remark=remark)}
            rows[f"check/{trial.number}"] = replace(row, cells={**row.cells, **what}, mood="")
        gone = dict.fromkeys(self._rows.keys() - rows.keys())
        for name in gone:
            self._rows.pop(name)
            self._parts.pop(name, None)
        return {
            "unit": state.unit,
            "html/about": fragment("about", table, unit_legend(table.unit), hidden) if table.rows else None,
            "html/table": fragment("frame", "Trials", columns, "speed") if table.rows else None,
            "html/notes": fragment("notes", table) if table.rows else None,
            "html/checks-title": f"Checks ({len(checks.rows)}): confirmation, loss gate, profiles"
            if checks.rows
            else None,
            "html/checks": fragment("frame", "Checks", CHECK_COLUMNS, "trial") if checks.rows else None,
            "html/more-checks": f"{hidden_checks} earlier ones are not shown" if hidden_checks else None,
            **gone,
            **{name: self._row(name, row, state) for name, row in rows.items()},
        }

    def _progress(self, sweep: Snapshot) -> dict[str, Any]:
        """Rows of the running trials with their progress; the rest of the table is unchanged."""
        parts = {}
        for trial in sweep.running:
            name = f"{'check' if trial.check else 'trial'}/{trial.number}"
            if (row := self._rows.get(name)) is not None:
                cells = {**row.cells, "state": progress_cell(sweep.live.get(trial.number))}
                parts[name] = self._row(name, replace(row, cells=cells), sweep.state)
        return parts

    def _row(self, name: str, row: ShownRow, state: SweepState) -> dict[str, Any]:
        """The part of a row; rendered only if it differs from the last one of this name."""
        if row.cells["state"].mood == "running":
            row = replace(row, mood="running")
        if row != self._rows.get(name) or name not in self._parts:
            kind, _, number = name.partition("/")
            columns = self._columns[kind]
            html = fragment("row", columns, _cells(row, columns), row, self._to)
            self._rows[name] = row
            trial = state.trials[int(number)]
            self._parts[name] = {"row": html, "status": trial.status, "point": _point(trial, row, state)}
        found: dict[str, Any] = self._parts[name]
        return found

    def _curves(self, sweep: Snapshot) -> dict[str, Any]:
        """Observed step times of the running trials, each with its step."""
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


def shown_trials(state: SweepState) -> list[Trial]:
    """The search's trials with a row, by number."""
    if state.num_searched <= MAX_ROWS:
        return state.searched()
    latest = islice((trial for trial in reversed(state.trials) if trial.check is None), MAX_ROWS)
    numbers = {0, *(ranked.number for ranked in state.fastest), *(trial.number for trial in latest)}
    return [state.trials[number] for number in sorted(numbers)]


def heading(sweep: Snapshot) -> dict[str, Any]:
    """The sweep's phase, and the allowed actions."""
    state = sweep.state
    retriable = {kind: count for kind, count in state.counts().items() if kind in RETRIABLE}
    allowed = [action for action in ALLOWED.get(sweep.phase, ()) if action != "retry" or retriable]
    return {
        "sweep": sweep.name,
        "hardware": state.created.hardware if state.created else "",
        "mark": watermark(state.virtual),
        "watermark": watermark_line(state.virtual),
        "phase": sweep.phase,
        "class": PHASE_CLASSES.get(sweep.phase, ""),
        "status": status_line(sweep),
        "is_virtual": sweep.is_virtual,
        "actions": allowed,
        "retriable": [[kind, units.status_label(kind), number, kind in FAULTS] for kind, number in retriable.items()],
    }


def status_line(sweep: Snapshot) -> str:
    """One sentence for screen readers, which changes only if something has happened."""
    state = sweep.state
    parts = [units.with_reason(sweep.phase, plain(sweep.reason))]
    if state.created is not None:
        limit = state.created.budget.max_trials
        number = f"{sweep.num_done} of {units.count(limit, 'trial')}" if limit else units.count(sweep.num_done, "trial")
        parts.append(f"{number} done")
    if state.verdict is not None and state.verdict.winner is not None:
        parts.append(f"winner {units.trial_id(state.verdict.winner)}")
    elif state.best is not None and not state.is_over:
        parts.append(f"best so far {units.trial_id(state.best.number)}")
    return "; ".join(parts)


def _facts(sweep: Snapshot) -> list[Fact]:
    found = facts(sweep)
    if sweep.phase == "running" and (left := eta_s(sweep.state, sweep.at_present.now_s)) is not None:
        found.append(Fact(label="left", text=f"about {units.duration(left)}"))
    return found


def _commands(sweep: Snapshot, invocation: Invocation) -> list[tuple[str, str]]:
    """Commands without a button; only reading ones while the sweep is not over."""
    purposes: list[CommandPurpose] = ["page", "explain"]
    if sweep.state.is_over:
        purposes += ["promote", "rollback", "confirm"]
    found = {one.purpose: one.command for one in next_commands(sweep.state, invocation)}
    return [(descriptions.PURPOSE_LABELS[purpose], found[purpose]) for purpose in purposes if purpose in found]


def _interval(one: Finalist) -> dict[str, Any]:
    """A finalist in the chart of the confirmation."""
    overall = one.overall
    return {
        "id": units.trial_id(one.trial),
        "outcome": one.outcome,
        "title": f"{units.ratio(overall.value, overall) if overall else units.DASH}, {descriptions.finalist_text(one)}",
        "value": overall.value if overall else None,
        "low": overall.low if overall else None,
        "high": overall.high if overall else None,
        "rounds": [[found.round + 1, found.value] for found in one.rounds],
    }


def _point(trial: Trial, row: ShownRow, state: SweepState) -> dict[str, Any] | None:
    """A trial in the charts; None for checks and unmeasured trials."""
    measurement = trial.measurement
    if measurement is None or trial.check is not None:
        return None
    cells, speed = row.cells, statistics.speed(measurement, state.objective)
    name = f"{cells['trial'].text} {cells['configuration'].text}"
    low, high = (speed.ci95.low, speed.ci95.high) if speed.ci95 else (speed.value, speed.value)
    versus = f", {cells['speed-up'].text}" if "speed-up" in cells else ""
    found: dict[str, Any] = {
        "x": trial.number,
        "y": speed.value,
        "low": low,
        "high": high,
        "title": f"{name}: {cells['speed'].text} ({units.interval(speed.ci95)}), step {cells['step'].text}{versus}",
        "color": "grey" if trial.number == 0 else "green" if row.mood == "best" else "blue",
    }
    if trial.expected is not None:
        predicted, off = cells["predicted step"].text, cells["measured/predicted"].text
        found |= {"step_s": measurement.step_time_s, "predicted_s": trial.expected.step_time_s}
        found["off"] = f"{name}: predicted {predicted}, measured {cells['step'].text} ({off})"
    return found


class IndexView:
    """Reads all sweeps of a home."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._seen: dict[str, Snapshot] = {}
        self._published: set[str] = set()

    def parts(self) -> Mapping[str, Any]:
        """A row for each sweep that can be read."""
        rows = [row for name in self._home.all_names() if (row := self._row(name))]
        found = {f"sweep/{row.cells['sweep'].text}": _index_part(row) for row in rows}
        gone = dict.fromkeys(self._published - found.keys())
        self._published = set(found)
        return {"html/table": fragment("frame", "All sweeps", INDEX_COLUMNS, "state"), **found, **gone}

    def _row(self, name: str) -> ShownRow | None:
        """A sweep in short; None if nothing is known yet."""
        try:
            sweep = self._home.read(name, self._seen.get(name))
        except (ConfigError, LedgerError, OSError) as error:
            state = Cell("unreadable", 2e12, "bad", below=plain(str(error)))
            return ShownRow(cells={"sweep": Cell(name), "state": state})
        self._seen[name] = sweep
        return _index_row(sweep, self._home) if sweep.state.created or sweep.controller else None


def _cells(row: ShownRow, columns: Sequence[Column]) -> list[Cell]:
    return [cell_of(row, column) for column in columns]


def _index_part(row: ShownRow) -> dict[str, str]:
    return {"row": fragment("sweep_row", INDEX_COLUMNS, row, _cells(row, INDEX_COLUMNS))}


def _index_row(sweep: Snapshot, home: Home) -> ShownRow:
    state, summary, began_at_s = sweep.state, summary_of(sweep, home), sweep.began_at_s or 0.0
    compared = speedup(state.best, state.baseline, state.objective)
    limit = state.created.budget.max_trials if state.created else None
    age = age_text(sweep.at_s - began_at_s) if began_at_s else ""
    cells = {
        "sweep": Cell(sweep.name, below=watermark(state.virtual)),
        "state": Cell(sweep.phase, 1e12 * int(sweep.phase in AT_REST) - began_at_s, below=plain(sweep.reason)),
        "result": Cell(headline(state, summary) if summary and (compared or state.is_over) else ""),
        "trials done": Cell(f"{sweep.num_done} of {limit}" if limit else str(sweep.num_done), sweep.num_done),
        "running": Cell(str(len(state.running) or ""), len(state.running)),
        "device time": Cell(units.device_time(sweep.device_seconds), sweep.device_seconds),
        "on": Cell(state.created.hardware if state.created else ""),
        "started": Cell(age, began_at_s),
    }
    return ShownRow(cells=cells, mood="running" if sweep.phase == "running" else "")


STATUS_CLASSES: Mapping[str, str] = {
    "measured": "good",
    "running": "running",
    "proposed": "wait",
    "stopped_early": "rest",
}


def trial_document(home: Home, sweep: str, number: int, invocation: Invocation) -> dict[str, Any]:
    """The full data of a trial: why it was proposed, its measurements, the end of each attempt.

    Raises:
        ConfigError: the sweep or trial does not exist.
    """
    found = explain(sweep, str(number), home)
    trial, measurement = found.trial, found.measurement
    evidence = found.attempts[-1].evidence if found.attempts and measurement is None else None
    knobs = {name: units.value_text(value) for name, value in flat_params(trial.candidate).items()}
    lines = [*found.proof, *(findings_lines(measurement.findings) if measurement else ())]
    is_measured = measurement is not None or lines
    attempts = table_of(ATTEMPT_COLUMNS, map(_attempt, found.attempts), "Attempts")
    html = {
        "origin": fragment("origin", trial, change_table(found.changed), _predicted(found)),
        "failed": fragment("failed", found, evidence),
        "measured": fragment("measured", *_measured(found), lines) if is_measured else "",
        "attempts": fragment("attempts", attempts),
        "configuration": fragment("configuration", knobs),
        "commands": fragment("commands", list(_trial_commands(found, invocation))),
    }
    state = units.status_label(trial.status)
    return {
        "title": f"{units.trial_id(number)} of {sweep}: {state}",
        "name": short_name(trial.candidate),
        "state": state,
        "class": STATUS_CLASSES.get(trial.status, "bad"),
        "status": "; ".join(filter(None, (descriptions.check_text(trial.check), *map(plain, found.pending)))),
        "html": html,
        "curves": _curves(measurement) if measurement else {},
        "attempts": [[one.number, _ended(one), one.num_logs] for one in found.attempts],
    }


def _measured(found: Explanation) -> tuple[dict[str, str], list[str]]:
    """Measurements by name, and the parts of a step."""
    measurement = found.measurement
    if measurement is None:
        return {}, []
    graph, peak = measurement.findings.graph, descriptions.peak_memory(measurement)
    rows = {
        "speed": found.figures,
        "spread of the step time": descriptions.spread(measurement),
        "peak memory": f"{peak} on the fullest rank" if measurement.peak_bytes else "",
        "steps": f"{len(measurement.step_times_s)} measured after {measurement.num_warmup_steps} of warm-up",
        "of which": descriptions.peak_memory_parts(measurement),
        "model FLOPs utilization": "" if measurement.mfu is None else f"{100 * measurement.mfu:.1f}%",
        "machine": descriptions.usage(measurement),
        "busy machine": descriptions.disturbed(measurement),
        "trend": descriptions.trend(measurement),
        "compilation": descriptions.compilation(graph) if graph is not None and graph.compile_s else "",
    }
    step = clock_parts(found.trial.number, measurement)
    parts = [
        f"{one.name.replace('_', '+')} {units.milliseconds(one.seconds)} ({one.seconds / step.step_time_s:.0%})"
        for one in step.parts
        if one.seconds
    ]
    return {name: text for name, text in rows.items() if text}, parts


def _predicted(found: Explanation) -> str:
    ratio = "" if found.surprise is None else f"; measured over predicted {found.surprise:.2f}x"
    return f"{found.expected}{ratio}" if found.expected else ""


def _curves(measurement: Measurement) -> dict[str, list[float]]:
    return {
        "step_times": list(measurement.step_times_s[-MAX_STEPS:]),
        "losses": list(measurement.losses[-MAX_STEPS:]),
    }


def _ended(one: AttemptExplanation) -> str:
    outcome = one.attempt.outcome
    return units.status_label(outcome.kind if outcome else "running")


def _attempt(one: AttemptExplanation) -> Sequence[str]:
    attempt = one.attempt
    return (
        str(one.number),
        _ended(one),
        " ".join(nodes_of(attempt)[:8]),
        str(len(attempt.ranks)),
        str(attempt.num_devices),
        units.duration(one.duration_s),
        units.device_time(attempt.device_seconds),
        "; ".join(map(plain, one.consequences)),
    )


def _trial_commands(found: Explanation, invocation: Invocation) -> Iterator[tuple[str, str]]:
    """Purposes and commands, ready to copy."""
    sweep, trial = found.sweep, units.trial_id(found.trial.number)
    yield "explain it", invocation.command("explain", sweep, trial)
    if found.attempts:
        yield "show its logs", invocation.command("logs", sweep, trial)
    if found.measurement is None or found.trial.check is not None:
        return
    if found.trial.number:
        yield (
            "show the differences from the baseline",
            invocation.command("diff", f"{sweep}:baseline", f"{sweep}:{trial}"),
        )
        yield "measure it again, interleaved with the baseline", invocation.command("confirm", sweep, trial)
    yield "run it with the profiler", invocation.command("profile", sweep, trial)
    yield "show its command lines", invocation.command("export", f"{sweep}:{trial}", "--format", "torchrun")


def log_document(home: Home, name: str, number: int, *, attempt: int | None, rank: int, after: int) -> dict[str, Any]:
    """The log of a rank: its last lines, or the lines since ``after``, the end of an earlier response.

    Raises:
        ConfigError: the sweep, trial, attempt or rank does not exist, or the cluster is simulated.
    """
    sweep = home.read(name)
    trial = find_trial(sweep.state, str(number), name)
    found = attempt_logs(sweep, trial, attempt=attempt, rank=rank, num_lines=NUM_LINES if after < 0 else 0)
    log = found.ranks[0]
    if log.path.is_symlink():
        raise ConfigError(f"{log.path} is a link and was not written by a rank", remedy="Inspect it manually.")
    lines, end = _news(log, after)
    evidence = found.evidence
    return {
        "rank": log.rank,
        "node": log.node,
        "path": str(log.path),
        "is_here": log.is_here,
        "is_root_cause": log.is_root_cause,
        "is_whole": log.is_whole,
        "is_over": found.outcome != "running" or not sweep.is_held,
        "lines": lines,
        "end": end,
        "kept": [plain(line) for line in evidence.log_tail] if evidence and log.is_root_cause else [],
    }


def _news(log: RankLog, after: int) -> tuple[list[str], int]:
    if after < 0 or not log.is_here:
        return list(log.lines), log.end
    follower = Follower(log.path, after)
    return follower.new_lines(), follower.at
