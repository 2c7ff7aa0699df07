"""Sweeps from Python: run one, and read its result as tables.

    from orchestrator.api import load, note, results, submit

    sweep = load("sweep.yaml")               # checked as by `submit`
    found = submit("sweep.yaml", max_trials=6)
    found.trials                             # a DataFrame, one row per trial
    found.verdict["winner"]                  # the document of `report --json`
    found.curves("winner")                   # loss, gradient norm, step time and memory by step
    note(found.name, "new drivers", tags={"team": "vision"})

:func:`results` reads any sweep of a home at any time, even while it runs. Columns have the names of the metrics in
MLflow (docs/review.md), knobs those of the sweep file.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.processes import python_module
from orchestrator.commands import steering
from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.errors import ExitCode
from orchestrator.process_support import DEFAULT_HOME
from orchestrator.report.summary import note_json, notes_of
from orchestrator.report.tables import by_speed
from orchestrator.space.notation import flat_params, short_name
from orchestrator.status.overview import summary_of
from orchestrator.sweep.snapshot import Home, Snapshot
from orchestrator.sweep.state import Trial, find_trial
from orchestrator.tracking import run_records

if TYPE_CHECKING:
    import pandas

__all__ = ["Results", "SweepError", "SweepSpec", "load", "note", "results", "submit"]


class SweepError(RuntimeError):
    """The sweep could not be run, or failed.

    Attributes:
        exit_code: that of ``tune-cluster submit``, see :class:`orchestrator.errors.ExitCode`.
    """

    def __init__(self, file: Path, exit_code: int) -> None:
        super().__init__(f"submitting {file} failed with exit code {exit_code}; see stderr for the reason")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Results:
    """A sweep at the time it was read."""

    name: str
    _snapshot: Snapshot
    _home: Home

    @property
    def state(self) -> str:
        """``running``, ``finished``, ``interrupted``, ...: the status that ``ps`` shows."""
        return self._snapshot.phase

    @property
    def verdict(self) -> dict[str, Any]:
        """The document of ``report --json``, described by ``docs/result.schema.json``."""
        summary = summary_of(self._snapshot, self._home)
        assert summary is not None, "only started sweeps are read"
        return dict(summary.to_json())

    @property
    def notes(self) -> list[dict[str, Any]]:
        """Notes on the sweep (``trial`` is None) and on trials: ``trial``, ``text``, ``tags``, ``by``, ``at_s``."""
        return [dict(note_json(*one)) for one in notes_of(self._snapshot.state)]

    @property
    def trials(self) -> pandas.DataFrame:
        """One row per trial of the search, by number; the winner first, then fastest first.

        Columns: ``name``, ``status``, ``origin``, every knob (``micro_batch_size``, ...), and MLflow's metrics, named
        with their units (``tokens_per_s_per_device``, ``step_time_ms``, ``peak_memory_gib``, ``mfu``, ...). Missing
        measurements are NaN.
        """
        import pandas

        trials = by_speed(self._snapshot.state)
        rows = [self._row(trial) for trial in trials]
        return pandas.DataFrame(rows, index=pandas.Index([one.number for one in trials], name="trial"))

    def _row(self, trial: Trial) -> dict[str, Any]:
        about = {"name": short_name(trial.candidate), "status": trial.status, "origin": trial.origin}
        metrics = run_records.trial_metrics(self._snapshot.state, trial)
        return {**about, **flat_params(trial.candidate), **metrics}

    def curves(self, trial: int | str) -> pandas.DataFrame:
        """The recorded values of every step of a trial, from its first warm-up step, number 1.

        Args:
            trial: its number, ``t003``, ``baseline``, ``best`` or ``winner``.

        Returns:
            Columns ``loss``, ``grad_norm``, ``memory_gib`` and ``step_time_ms``, if recorded, by ``step``.

        Raises:
            ConfigError: the trial does not exist.
        """
        import pandas

        found = find_trial(self._snapshot.state, str(trial), self.name)
        curves = run_records.trial_curves(found)
        series = {name.removeprefix("curve/"): pandas.Series(points) for name, points in curves.items() if points}
        return pandas.DataFrame(series).rename_axis("step")


def load(file: str | Path) -> SweepSpec:
    """Read and check a sweep file.

    Raises:
        ConfigError: the file is invalid; the message has file, line, key and remedy.
    """
    return load_sweep(Path(file))


def submit(
    file: str | Path,
    *,
    home: str | Path = DEFAULT_HOME,
    max_trials: int | None = None,
    wall_time: str | None = None,
    options: Sequence[str] = (),
) -> Results:
    """Run the sweep of a file to its end, or continue it, and return its result.

    The controller is a separate process; its output goes to stderr. An interrupt ends it as Ctrl-C does in a
    terminal, and calling this again continues the sweep.

    Args:
        file: the sweep file.
        home: folder of all sweeps and of the local MLflow store.
        max_trials: overrides the file's ``budget.max_trials``.
        wall_time: overrides the file's ``budget.wall_time``, like ``30m``.
        options: further options of ``tune-cluster submit``, such as ``["--no-check"]``.

    Raises:
        ConfigError: the file is invalid.
        SweepError: the sweep failed, or could not run.
    """
    spec = load(file)
    limits = {"--max-trials": max_trials, "--wall-time": wall_time}
    given = [word for name, value in limits.items() if value is not None for word in (name, str(value))]
    arguments = ["submit", str(file), "--home", str(home), "--foreground", *given, *options]
    exit_code = _run(python_module("orchestrator", *arguments))
    if exit_code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if exit_code:
        raise SweepError(Path(file), exit_code)
    return results(spec.name, home=home)


def _run(command: list[str]) -> int:
    """Exit code of a command whose output goes to stderr, which is not a file in a notebook; forwards an interrupt."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        assert child.stdout is not None
        while True:
            try:
                for line in child.stdout:
                    sys.stderr.write(line)
                return child.wait()
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)


def results(sweep: str, *, home: str | Path = DEFAULT_HOME) -> Results:
    """Read a sweep, whether it is running, waiting or has ended.

    Args:
        sweep: its name.
        home: folder of all sweeps.

    Raises:
        ConfigError: the sweep does not exist, or has not started.
    """
    found = Home(Path(home))
    return Results(sweep, found.read(sweep, begun=True), found)


def note(
    sweep: str,
    text: str | None = None,
    *,
    trial: int | str | None = None,
    tags: Mapping[str, str] | None = None,
    remove_tags: Collection[str] = (),
    home: str | Path = DEFAULT_HOME,
) -> None:
    """Change the note and tags on a sweep, or on a trial of it, like ``tune-cluster note``.

    A running controller records the change within a second or two; without one it is recorded at once.

    Args:
        sweep: its name.
        text: replaces an earlier note; empty: removes it; None: keeps it.
        trial: its number, ``t003``, ``baseline``, ``best`` or ``winner``; None: the sweep itself.
        tags: to set.
        remove_tags: names of the tags to remove.
        home: folder of all sweeps.

    Raises:
        ConfigError: the sweep or trial does not exist, or the note is too long.
    """
    of_trial = None if trial is None else str(trial)
    steering.annotate(sweep, Home(Path(home)), trial=of_trial, text=text, tags=tags, removed_tags=remove_tags)
