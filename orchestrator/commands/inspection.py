"""Shows the logs of trials and controllers, MLflow's pages, and two sweeps side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from orchestrator import units
from orchestrator.commands.submission import controller_log
from orchestrator.errors import ConfigError
from orchestrator.mlflow_urls import experiments_url, sweep_links
from orchestrator.promotion.references import ABSENT, Difference, differing, flat_json
from orchestrator.report.result_schema import versioned
from orchestrator.report.summary import Summary, chosen_result
from orchestrator.report.tables import by_speed
from orchestrator.space.notation import flat_params, short_name
from orchestrator.status.explanation import AttemptLogs, RankLog, attempt_logs, log_tail
from orchestrator.status.overview import summary_of
from orchestrator.sweep.ledger import Recorded, tracking_uri
from orchestrator.sweep.snapshot import Home, Snapshot
from orchestrator.sweep.state import SweepState, find_trial, is_trial
from orchestrator.text import Follower, echo, echo_json, follow, one_line, plain
from orchestrator.tracking import mlflow_server
from trials.files import to_json

# ``logs``: prints the logs of trials and controllers for people or as JSON, and follows them.


MAX_RANKS = 8
"""Number of logs shown of an attempt unless a rank is selected; JSON has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How logs are shown."""

    as_json: bool
    num_lines: int
    follow: bool

    def line(self, text: str, rank: int | None = None, *, several: bool = False) -> None:
        """Print a followed line; with JSON, as an object."""
        if self.as_json:
            echo_json({"rank": rank, "line": text}, indent=None)
        else:
            echo(f"[rank {rank}] {text}" if several else text)

    def note(self, text: str) -> None:
        """Print a note for people, apart from the result."""
        echo(text, err=True)


def show_trial_logs(
    name: str, text: str, home: Home, out: Output, *, rank: int | None = None, attempt: int | None = None
) -> None:
    """The logs of an attempt of the trial that ``text`` means.

    Raises:
        ConfigError: the sweep, trial, attempt or rank does not exist.
    """
    sweep = home.read(name)
    trial = find_trial(sweep.state, text, name)
    found = attempt_logs(sweep, trial, attempt=attempt, rank=rank, num_lines=out.num_lines)
    if out.follow:
        _follow_ranks(home, sweep, found, out)
    elif out.as_json:
        echo_json(versioned(found.to_json()))
    else:
        _show(found, out)


def meant(sweep: str, trial: str | None, home: Home, out: Output) -> tuple[str, str | None]:
    """The sweep and trial of two arguments: ``best`` alone is a trial of the latest sweep."""
    if trial is not None or sweep in home.all_names() or not is_trial(sweep):
        return sweep, trial
    latest = next(iter(home.sweeps()), None)
    if latest is None:
        return sweep, trial
    out.note(f"{sweep} of the latest sweep, {latest}:")
    return latest, sweep


def show_controller_log(name: str, home: Home, out: Output) -> None:
    """Print the log of the current or last controller.

    Raises:
        ConfigError: the sweep does not exist, or its controller has not written a log.
        ClusterError: the controller is a Ray Job, and the cluster does not answer.
    """
    sweep = home.read(name)
    lines = controller_log(home, name, follow=out.follow, num_lines=out.num_lines)
    if out.as_json and not out.follow:
        controller = sweep.controller.to_json() if sweep.controller else None
        echo_json(versioned({"sweep": name, "controller": controller, "lines": list(lines)}))
        return
    for line in lines:
        out.line(line)


def _follow_ranks(home: Home, sweep: Snapshot, found: AttemptLogs, out: Output) -> None:
    """Print new lines until the attempt has ended, or its sweep was replaced.

    Waits for ranks without output yet if they may run on this host.
    """
    several, seen = len(found.ranks) > 1, sweep

    def is_over() -> bool:
        nonlocal seen
        seen = home.read(sweep.name, seen)
        if seen.birth != sweep.birth:
            return True
        attempt = seen.state.trials[found.trial].attempts[found.attempt]
        return attempt.outcome is not None or not seen.is_held

    for log in found.ranks:
        for line in log.lines:
            out.line(line, log.rank, several=several)
    for rank, line in follow([(log.rank, Follower(log.path, log.end)) for log in found.ranks], is_over):
        out.line(line, rank, several=several)


def _show(found: AttemptLogs, out: Output) -> None:
    """Print the logs; for a log on another host, the last lines that its node sent."""
    shown = found.ranks[:MAX_RANKS]
    for log in shown:
        if log.is_here:
            _show_rank(log, out, with_heading=len(found.ranks) > 1)
        else:
            out.note(f"rank {log.rank}: log is on node {one_line(log.node)}: {log.path}")
        if not log.is_here and log.is_root_cause:
            _show_evidence(found, out)
    if len(shown) < len(found.ranks):
        out.note(f"{len(found.ranks) - len(shown)} more ranks: use --rank N to show one, --json for all")
    if not any(log.is_here or log.is_root_cause for log in shown):
        _show_evidence(found, out)


def _show_rank(log: RankLog, out: Output, *, with_heading: bool) -> None:
    if with_heading:
        cause = ", failed first" if log.is_root_cause else ""
        out.note(f"==> rank {log.rank} on {one_line(log.node)}{cause}: {log.path}")
    if not log.is_whole:
        out.note(f"... the last {len(log.lines)} lines")
    for line in log.lines:
        echo(line)
    if not log.lines:
        out.note("no output")


def _show_evidence(found: AttemptLogs, out: Output) -> None:
    """Print the ledger's evidence of a failure."""
    if found.evidence is None:
        return
    lines = log_tail(found.evidence)
    where = f"rank {found.evidence.rank}" if found.evidence.rank is not None else "no specific rank"
    last = "; its last lines:" if lines else ""
    out.note(f"==> {found.outcome}, {where}: {one_line(plain(found.evidence.message.strip()))}{last}")
    for line in lines:
        echo(line)


# ``tune-cluster ui``: serves the MLflow UI for the store of a sweep, or of the home.


def serve_ui(home: Home, sweep: str | None, *, host: str, port: int, announce: Callable[[dict[str, str]], None]) -> int:
    """Serve the MLflow UI until interrupted; return the server's exit status, 0 after an interrupt.

    Args:
        sweep: whose store to show, with links to its trials; None: the home's own store.
        announce: receives the links once the server is up.

    Raises:
        ConfigError: the sweep does not exist, or nothing has been recorded.
    """
    recorded = None
    if sweep is None:
        uri = _store(home)
    else:
        with home.open(sweep) as ledger:
            uri, recorded = tracking_uri(ledger, home), Recorded.read(ledger)

    def ready(base: str) -> None:
        if sweep is None or recorded is None:
            announce({"experiments": experiments_url(base)})
        else:
            announce(sweep_links(base, recorded.experiment_id, recorded.run_id, sweep))

    return mlflow_server.serve(uri, host, port, on_ready=ready)


def _store(home: Home) -> str:
    """The home's own MLflow store.

    Raises:
        ConfigError: nothing has been recorded there.
    """
    if not home.has_store:
        raise ConfigError(
            f"no MLflow store in {home.path}",
            remedy="Submit a sweep first. If the store is elsewhere, pass its directory with --home.",
        )
    return home.default_tracking_uri


# Two sweeps side by side (``compare``).


def compare_sweeps(a: str, b: str, home: Home) -> Difference:
    """The results of two sweeps and their differences; for candidates that both measured, both speeds.

    Raises:
        ConfigError: one of them does not exist or has not started.
    """
    one, other = home.read(a, begun=True), home.read(b, begun=True)
    results = [_result(sweep, home) for sweep in (one, other)]
    chosen = [_chosen(sweep, home) for sweep in (one, other)]
    workloads = [flat_json(to_json(sweep.state.sweep.workload)) for sweep in (one, other)]
    settings = [flat_json(to_json(sweep.state.sweep.budget)) for sweep in (one, other)]
    environments = [{"hardware": sweep.state.sweep.hardware, **sweep.state.sweep.fingerprint} for sweep in (one, other)]
    parts = {
        "result": {name: (text, results[1][name]) for name, text in results[0].items()},
        "knobs": differing(*chosen),
        "workload": differing(*workloads),
        "environment": differing(*environments),
        "budget": differing(*settings),
        "trials in both": dict(_common_trials(one.state, other.state)),
    }
    return Difference(a=a, b=b, parts=parts)


def _result(sweep: Snapshot, home: Home) -> dict[str, str]:
    summary = summary_of(sweep, home)
    assert summary is not None, "it has begun"
    found = chosen_result(sweep.state, summary) or summary.baseline
    return {
        "state": sweep.phase,
        "verdict": _verdict(sweep.state, summary),
        "configuration": short_name(found.trial.candidate) if found else ABSENT,
        "speed": f"{units.rate(found.speed.value)} {sweep.state.unit}" if found else ABSENT,
        "trials": str(summary.trials["total"]),
        "device-hours": units.rate(summary.device_hours),
    }


def _verdict(state: SweepState, summary: Summary) -> str:
    """``confirmed, 1.31x (1.30x - 1.31x)``; without a proof the ratio that the search measured."""
    if state.verdict is None:
        ratio = summary.speedup.ratio if summary.speedup else None
        return f"not confirmed, {units.ratio(ratio.value, ratio.ci95)}" if ratio else ABSENT
    found = state.verdict.speedup
    return ", ".join([state.verdict.conclusion, *([units.ratio(found.value, found)] if found else [])])


def _chosen(sweep: Snapshot, home: Home) -> dict[str, object]:
    """The knobs of the winner, else of the fastest, else of the baseline."""
    summary = summary_of(sweep, home)
    assert summary is not None, "it has begun"
    found = chosen_result(sweep.state, summary) or summary.baseline
    return dict(flat_params(found.trial.candidate)) if found else {}


def _common_trials(a: SweepState, b: SweepState) -> Iterator[tuple[str, tuple[str, str]]]:
    """Candidates that both sweeps measured by the same objective: name to both speeds, fastest first."""
    if a.unit != b.unit:
        return
    others = {trial.candidate: trial for trial in b.searched() if trial.measurement}
    for trial in by_speed(a):
        if trial.measurement and (other := others.get(trial.candidate)) is not None:
            one, two = a.score(trial), b.score(other)
            yield short_name(trial.candidate), (units.rate(one), f"{units.rate(two)} ({two / one:.2f}x)")
