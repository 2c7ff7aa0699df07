"""The commands that show sweeps and steer them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.options import home_option, json_option, print_result
from orchestrator.errors import ExitCode
from orchestrator.process_support import Invocation
from orchestrator.report.result_schema import versioned
from orchestrator.text import echo, echo_json

if TYPE_CHECKING:
    from orchestrator.sweep.events import Action
    from orchestrator.sweep.snapshot import Home, Snapshot


# Commands that look at sweeps: which there are, where one stands, what came out of it and why.


@click.command()
@home_option
@json_option
def ps(home: Path, as_json: bool) -> None:
    """List all sweeps.

    What each does or waits for, how far it is, the best so far, who is at work on it. A sweep is interrupted when
    it should run but no controller is at work on it. Trials are done, running (run) or waiting to be launched
    (wait).

    \b
    Examples:
      tune-cluster ps
      tune-cluster ps --json
    """
    from orchestrator.process_support import elsewhere
    from orchestrator.status import overview
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal import sweep_screen

    sweeps = overview.all_sweeps(Home(home))
    body = [overview.overview(sweep, Home(home)) for sweep in sweeps] if as_json else None
    print_result(as_json, body, lambda: sweep_screen.render_ps(sweeps, Home(home)))
    for other in elsewhere(home) if not sweeps else ():
        echo(f"there are some in {other}: {Invocation.current(other).command('ps')}", err=True)


@click.command()
@click.argument("sweep")
@home_option
@json_option
def status(sweep: str, home: Path, as_json: bool) -> None:
    """Show where SWEEP stands.

    Its lease, its budgets, what runs on which nodes, what was asked of it and what failed last.

    \b
    Example:
      tune-cluster status quickstart
    """
    from orchestrator.status import overview
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal import sweep_screen

    seen = Home(home).read(sweep)
    body = overview.detail(seen, Home(home)) if as_json else None
    print_result(as_json, body, lambda: sweep_screen.render_status(seen, Home(home), Invocation.current(home)))


@click.command()
@click.argument("sweep")
@home_option
@json_option
def watch(sweep: str, home: Path, as_json: bool) -> None:
    """Follow SWEEP until it ends or is paused.

    Its controller may run anywhere. Ctrl-C leaves the sweep alone.

    With --json, one JSON object a line: first everything as it stands, then what is new. "change" says what a line is
    of: sweep (state, trials, best), lease (nodes, waiting), trial (state, nodes, speed) or progress (phase, step).
    Ends with exit code 1 if the sweep failed or no controller is at work on it any more.

    \b
    Examples:
      tune-cluster watch quickstart
      tune-cluster watch quickstart --json | jq 'select(.change == "trial")'
    """
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal import sweep_screen

    last = follow_sweep(sweep, Home(home), as_json=as_json)
    if last is not None and not as_json:
        end = last
        print_result(False, None, lambda: sweep_screen.render_status(end, Home(home), Invocation.current(home)))
    if last is None or last.phase in ("failed", "interrupted"):
        sys.exit(ExitCode.FAILED)


def follow_sweep(sweep: str, home: Home, *, as_json: bool = False) -> Snapshot | None:
    """Show what happens in a sweep until it ends, is paused, or has lost its controller; the last look at it."""
    from orchestrator.status.overview import changes, follow, phase_change, show
    from orchestrator.terminal.sweep_screen import LiveView

    last: Snapshot | None = None
    try:
        with home.open(sweep, begun=False) as ledger, LiveView() as view:
            for seen in follow(ledger, home):
                if as_json:
                    for line in changes(seen, last):
                        echo_json(versioned(line), indent=None)
                    sys.stdout.flush()
                else:
                    if (words := phase_change(seen, last)) and not view.console.is_terminal:
                        echo(words, err=True)
                    show(view, seen, last)
                last = seen
    except KeyboardInterrupt:
        again = Invocation.current(home.path).command("watch", sweep)
        echo(f"no longer watching; the sweep {sweep} goes on. To see it again: {again}", err=True)
        sys.exit(ExitCode.INTERRUPTED)
    return last


@click.command()
@click.argument("sweep")
@click.argument("trial", required=False)
@click.option("--rank", type=click.IntRange(0), help="Only this rank; default: all, the one that failed first.")
@click.option("--attempt", type=click.IntRange(0), help="This launch of the trial, from 0; default: the last one.")
@click.option("--lines", type=click.IntRange(0), default=200, show_default=True, help="Last lines of each log.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written until the trial or controller ends.")
@home_option
@json_option
def logs(
    sweep: str,
    trial: str | None,
    rank: int | None,
    attempt: int | None,
    lines: int,
    follow: bool,
    home: Path,
    as_json: bool,
) -> None:
    """Show the logs of a trial's ranks, or of the controller.

    TRIAL is 3, t003, baseline, best or winner; without it, the controller's log is shown, and a TRIAL alone is one of
    the latest sweep. Logs lie where their ranks ran:
    of those on other nodes, node and path are shown, and the last lines that were sent home when they failed. With
    --json and --follow, one JSON object a line.

    \b
    Examples:
      tune-cluster logs quickstart
      tune-cluster logs quickstart t003 --rank 1
      tune-cluster logs quickstart best --follow
      tune-cluster logs best
    """
    from orchestrator.commands import inspection as logs_command
    from orchestrator.sweep.snapshot import Home

    out = logs_command.Output(as_json=as_json, num_lines=lines, follow=follow)
    try:
        sweep, trial = logs_command.meant(sweep, trial, Home(home), out)
        if trial is None:
            logs_command.show_controller_log(sweep, Home(home), out)
        else:
            logs_command.show_trial_logs(sweep, trial, Home(home), out, rank=rank, attempt=attempt)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


@click.command()
@click.argument("sweep")
@click.argument("trial", required=False)
@click.option("--diagnose", is_flag=True, help="Diagnose TRIAL and the baseline, as without TRIAL the winner.")
@home_option
@json_option
def explain(sweep: str, trial: str | None, diagnose: bool, home: Path, as_json: bool) -> None:
    """Explain why SWEEP's trials are as fast as they are, or what became of one TRIAL.

    Without TRIAL: where the step time of baseline and winner goes, what holds them back, which knob answers that and
    what it is expected to bring; how much each knob matters; how good the predictions were. While the sweep runs, of
    what is known by then.

    With TRIAL: why it was proposed, waits or failed, where each launch of it ran, which rank failed, and how the
    sweep reacted. TRIAL is 3, t003, baseline, best or winner.

    \b
    Examples:
      tune-cluster explain quickstart
      tune-cluster explain quickstart t003
      tune-cluster explain quickstart t003 --diagnose
    """
    from orchestrator.status import explanation
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal import explain_screen

    if trial is None or diagnose:
        _explain_sweep(sweep, trial, Home(home), as_json)
        return
    explained = explanation.explain(sweep, trial, Home(home))
    print_result(as_json, explained.to_json(), lambda: explain_screen.render_explanation(explained))


def _explain_sweep(sweep: str, trial: str | None, home: Home, as_json: bool) -> None:
    from orchestrator.console import SafeConsole
    from orchestrator.diagnosis.explain import explain_ledger
    from orchestrator.terminal import explain_screen

    with home.open(sweep) as ledger, SafeConsole(stderr=True).status("looking for what holds it back ..."):
        explained = explain_ledger(ledger, trial=trial)
    body = explained.to_json() if as_json else None
    print_result(as_json, body, lambda: explain_screen.render_sweep_explanation(explained))


@click.command(name="report")
@click.argument("sweep")
@click.option(
    "--html",
    "html",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Write it as one page, readable offline, with plots; default: SWEEP-report.html here.",
)
@home_option
@json_option
def report_command(sweep: str, html: str | None, home: Path, as_json: bool) -> None:
    """Show the result of SWEEP: the verdict and what it rests on, every trial, every failure.

    \b
    Examples:
      tune-cluster report quickstart
      tune-cluster report quickstart --html quickstart.html
    """
    from orchestrator.report.report import make_report
    from orchestrator.report.sources import Sources
    from orchestrator.status.overview import summary_of
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal.result_screen import render_report

    if html is not None:
        path = _write_page(sweep, Path(html) if html else None, Home(home))
        if not as_json:
            echo(f"written to {path}")
            return
    seen = Home(home).read(sweep, begun=True)
    summary = summary_of(seen, Home(home))
    assert summary is not None, "it has begun"
    sources = Sources(recorded=seen.recorded, folder=Home(home).sweep_folder(sweep))
    invocation = Invocation.current(home)
    print_result(
        as_json,
        summary.to_json(),
        lambda: render_report(make_report(seen.state, summary, sources=sources, invocation=invocation)),
    )


@click.command()
@click.argument("a")
@click.argument("b")
@home_option
@json_option
def compare(a: str, b: str, home: Path, as_json: bool) -> None:
    """Compare two sweeps, A and B.

    Shows results, differences in best configurations, workload, hardware, software and budget, and the speeds of every
    candidate that both measured. To compare promoted versions or single trials, use `diff`.

    \b
    Examples:
      tune-cluster compare quickstart quickstart-h100
      tune-cluster compare monday tuesday --json
    """
    from orchestrator.commands import inspection
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal import result_screen

    found = inspection.compare_sweeps(a, b, Home(home))
    print_result(as_json, found.to_json(), lambda: result_screen.render_difference(found))


def _write_page(sweep: str, file: Path | None, home: Home) -> Path:
    from orchestrator.console import SafeConsole
    from orchestrator.report.page.page import write_page
    from orchestrator.report.report import read_report
    from orchestrator.status.overview import summary_of

    seen = home.read(sweep, begun=True)
    summary = summary_of(seen, home)
    assert summary is not None, "it has begun"
    with home.open(sweep) as ledger, SafeConsole(stderr=True).status("drawing ..."):
        return write_page(read_report(ledger, seen.state, summary, Invocation.current(home.path)), file)


# Commands that stop a sweep, for a while or for good, or remove it.


_no_wait_option = click.option("--no-wait", is_flag=True, help="Only ask; do not wait until it is done.")


@click.command()
@click.argument("sweep")
@_no_wait_option
@home_option
@json_option
def pause(sweep: str, no_wait: bool, home: Path, as_json: bool) -> None:
    """Stop SWEEP now, to be resumed later.

    Its nodes are given back; `resume` goes on with it. What runs is killed, recorded as lost for no fault of its
    own, and launched again later.

    \b
    Examples:
      tune-cluster pause quickstart
      tune-cluster pause quickstart --no-wait --json
    """
    _stop(sweep, "pause", home, as_json, no_wait=no_wait)


@click.command()
@click.argument("sweep")
@_no_wait_option
@home_option
@json_option
def drain(sweep: str, no_wait: bool, home: Path, as_json: bool) -> None:
    """Let the running trials of SWEEP end, then pause it.

    No other trial is begun; `resume` goes on with the sweep.

    \b
    Example:
      tune-cluster drain quickstart
    """
    _stop(sweep, "drain", home, as_json, no_wait=no_wait)


@click.command()
@click.argument("sweep")
@_no_wait_option
@home_option
@json_option
def cancel(sweep: str, no_wait: bool, home: Path, as_json: bool) -> None:
    """Stop SWEEP for good.

    What runs is killed. What was measured stays; nothing can be added to it.

    \b
    Example:
      tune-cluster cancel quickstart
    """
    _stop(sweep, "cancel", home, as_json, no_wait=no_wait)


def _stop(sweep: str, what: Action, home: Path, as_json: bool, *, no_wait: bool) -> None:
    """Ask, and wait until it is so. Giving up waiting takes nothing back."""
    from orchestrator.commands import steering
    from orchestrator.sweep.snapshot import Home

    try:
        with steering.progress() as notify:
            stopped = steering.stop(sweep, Home(home), what, wait=not no_wait, notify=notify)
    except KeyboardInterrupt:
        echo(f"no longer waiting; the request to {sweep} stays in force", err=True)
        sys.exit(ExitCode.INTERRUPTED)
    print_result(as_json, stopped.to_json(), lambda: steering.render(stopped))
    if not no_wait and not stopped.is_done:
        sys.exit(ExitCode.FAILED)


@click.command()
@click.argument("sweep")
@click.option("--yes", "-y", is_flag=True, help="Do not ask. Needed where nobody can be asked.")
@click.option("--force", is_flag=True, help="Also where a promoted configuration rests on it, or it cannot be read.")
@click.option("--mlflow", "in_mlflow", is_flag=True, help="Delete its runs in MLflow, too.")
@home_option
@json_option
def delete(sweep: str, yes: bool, force: bool, in_mlflow: bool, home: Path, as_json: bool) -> None:
    """Remove SWEEP for good: its folder with ledger, logs and attempts.

    Refused while a controller is at work on it. Versions in MLflow's registry stay in any case.

    \b
    Examples:
      tune-cluster delete quickstart
      tune-cluster delete quickstart --mlflow --yes --json
    """
    from orchestrator.commands import steering as stopping
    from orchestrator.sweep.snapshot import Home

    what = stopping.describe(sweep, Home(home))
    if not yes and not _agreed(f"Remove {what}{' and its runs in MLflow' if in_mlflow else ''}?"):
        echo("nothing was removed", err=True)
        sys.exit(ExitCode.USAGE)
    removed = stopping.delete(sweep, Home(home), force=force, in_mlflow=in_mlflow)
    if as_json:
        print_result(True, removed.to_json(), str)
    for line in removed.lines() if not as_json else ():
        echo(line)


def _agreed(question: str) -> bool:
    """Whether the user says yes; a UsageError where there is no terminal to ask at."""
    if not sys.stdin.isatty():
        raise click.UsageError("nobody can be asked here; say --yes to remove the sweep")
    return click.confirm(question, default=False, err=True)


COMMANDS = (ps, status, watch, logs, explain, report_command, compare, pause, drain, cancel, delete)
