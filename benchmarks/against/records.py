"""What a finished trial costs to record in MLflow, ours and by plain calls of its fluent API.

Ours writes a trial's parameters, metrics per step, tags, note and files from the ledger, such that a crash at any point
loses and doubles nothing. The plain calls write the same parameters and metrics of one run per trial, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.against.rows import Row
from benchmarks.overhead import temporary_folder
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Ledger
from orchestrator.tracking.mlflow_tracker import Tracker
from tests.support.story import created, ended, launched, measured, proposed
from trials.spec import Candidate, Loader

NUM_TRIALS = 40
REPEATS = 3


def rows() -> Iterator[Row]:
    _ours(2)
    taken = []
    for _ in range(REPEATS):
        ours, contents = _ours(NUM_TRIALS)
        taken.append((ours, _plain(contents)))
    for what, place in (("recording a trial in MLflow", 0), ("recording a trial in MLflow, CPU time", 1)):
        yield Row(
            what=what,
            peer_name="plain MLflow calls",
            unit="ms",
            ours=tuple(ours[place] for ours, _ in taken),
            peer=tuple(plain[place] for _, plain in taken),
        )


Content = tuple[dict[str, str], list[tuple[str, float, int]]]
Times = tuple[float, float]
"""Milliseconds per trial: wall and CPU time."""


def _since(start: Times, num_trials: int) -> Times:
    wall_s, cpu_s = (now - then for now, then in zip(_now_s(), start, strict=True))
    return 1000 * wall_s / num_trials, 1000 * cpu_s / num_trials


def _now_s() -> Times:
    return time.perf_counter(), time.process_time()


def _ours(num_trials: int) -> tuple[Times, list[Content]]:
    """Time per trial, and the parameters and metrics that were written."""
    with temporary_folder() as folder:
        tracker = Tracker(f"sqlite:///{folder}/mlflow.db", "records")
        tracker.prepare()
        with Ledger(Path(folder)) as ledger, ledger.hold():
            ledger.append(created())
            for trial in range(num_trials):
                for event in (
                    proposed(trial, _candidate(trial)),
                    launched(trial),
                    ended(trial, measured(0.1 + trial / 1000)),
                ):
                    ledger.append(event)
            state = fold(ledger.events())
            start = _now_s()
            while tracker.sync(ledger, state):  # one call writes for a limited time
                pass
            times = _since(start, num_trials)
        runs = tracker.sweep_runs(state)
        client = tracker.client()
        contents: list[Content] = []
        for trial in range(num_trials):
            data = client.get_run(runs[str(trial)]).data
            history = [one for name in data.metrics for one in client.get_metric_history(runs[str(trial)], name)]
            contents.append((dict(data.params), [(one.key, one.value, one.step) for one in history]))
    return times, contents


def _candidate(trial: int) -> Candidate:
    return Candidate(loader=Loader(num_workers=trial + 1, prefetch_factor=2))


def _plain(contents: list[Content]) -> Times:
    import mlflow

    with temporary_folder() as folder:
        mlflow.set_tracking_uri(f"sqlite:///{folder}/plain.db")
        mlflow.set_experiment("plain")
        start = _now_s()
        for params, metrics in contents:
            with mlflow.start_run():
                mlflow.log_params(params)
                steps = sorted({step for _, _, step in metrics})
                for step in steps:
                    mlflow.log_metrics({name: value for name, value, at in metrics if at == step}, step=step)
        return _since(start, len(contents))
