"""Commands that look at sweeps: which there are, where one stands, what came out of it and why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.options import home_option, json_option, print_result
from orchestrator.errors import EXIT_FAILED, EXIT_INTERRUPTED
from orchestrator.invocation import Invocation

if TYPE_CHECKING:
    from orchestrator.sweep.home import Home


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
    from orchestrator.homes import elsewhere
    from orchestrator.status import overview
    from orchestrator.sweep.home import Home
    from orchestrator.terminal import status as report_ps

    sweeps = overview.all_sweeps(Home(home))
    body = [overview.overview(sweep, Home(home)) for sweep in sweeps] if as_json else None
    print_result(as_json, body, lambda: report_ps.render_ps(sweeps, Home(home)))
    for other in elsewhere(home) if not sweeps else ():
        click.echo(f"there are some in {other}: {Invocation.current(other).command('ps')}", err=True)


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
    from orchestrator.sweep.home import Home
    from orchestrator.terminal import status as report_status

    seen = Home(home).read(sweep)
    body = overview.detail(seen, Home(home)) if as_json else None
    print_result(as_json, body, lambda: report_status.render_status(seen, Home(home), Invocation.current(home)))


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
    from orchestrator.status.watch import changes, follow, phase_change, show
    from orchestrator.sweep.home import Home
    from orchestrator.sweep.snapshot import Snapshot
    from orchestrator.terminal import status as report_status
    from orchestrator.terminal.live import LiveView

    last: Snapshot | None = None
    try:
        with Home(home).open(sweep, begun=False) as ledger, LiveView() as view:
            for seen in follow(ledger, Home(home)):
                if as_json:
                    for line in changes(seen, last):
                        click.echo(json.dumps(line))
                    sys.stdout.flush()
                else:
                    if (words := phase_change(seen, last)) and not view.console.is_terminal:
                        click.echo(words, err=True)
                    show(view, seen, last)
                last = seen
    except KeyboardInterrupt:
        again = Invocation.current(home).command("watch", sweep)
        click.echo(f"no longer watching; the sweep {sweep} goes on. To see it again: {again}", err=True)
        sys.exit(EXIT_INTERRUPTED)
    if last is not None and not as_json:
        end = last
        print_result(False, None, lambda: report_status.render_status(end, Home(home), Invocation.current(home)))
    if last is None or last.phase in ("failed", "interrupted"):
        sys.exit(EXIT_FAILED)


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
    from orchestrator.commands import logs as logs_command
    from orchestrator.sweep.home import Home

    out = logs_command.Output(as_json=as_json, num_lines=lines, follow=follow)
    try:
        sweep, trial = logs_command.meant(sweep, trial, Home(home), out)
        if trial is None:
            logs_command.show_controller_log(sweep, Home(home), out)
        else:
            logs_command.show_trial_logs(sweep, trial, Home(home), out, rank=rank, attempt=attempt)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


@click.command()
@click.argument("sweep")
@click.argument("trial", required=False)
@click.option("--trial", "other", metavar="TRIAL", help="Hold this trial against the baseline, in place of the winner.")
@home_option
@json_option
def explain(sweep: str, trial: str | None, other: str | None, home: Path, as_json: bool) -> None:
    """Explain why SWEEP's trials are as fast as they are, or what became of one TRIAL.

    Without TRIAL: where the step time of baseline and winner goes, what holds them back, which knob answers that and
    what it is expected to bring; how much each knob matters; how good the predictions were. While the sweep runs, of
    what is known by then.

    With TRIAL: why it was proposed, waits or failed, where each launch of it ran, who is to blame for its end, and
    what the sweep made of that. TRIAL is 3, t003, baseline, best or winner.

    \b
    Examples:
      tune-cluster explain quickstart
      tune-cluster explain quickstart --trial t005
      tune-cluster explain quickstart t003
    """
    from orchestrator.status import explanation
    from orchestrator.sweep.home import Home
    from orchestrator.terminal import explain_trial

    if trial is not None and other is not None:
        raise click.UsageError("TRIAL and --trial exclude each other: one tells a trial's story, one a sweep's.")
    if trial is None:
        _explain_sweep(sweep, other, Home(home), as_json)
        return
    explained = explanation.explain(sweep, trial, Home(home))
    print_result(as_json, explained.to_json(), lambda: explain_trial.render_explanation(explained))


def _explain_sweep(sweep: str, trial: str | None, home: Home, as_json: bool) -> None:
    from rich.console import Console

    from orchestrator.diagnosis.load import explain_ledger
    from orchestrator.terminal import explain_sweep

    with home.open(sweep) as ledger, Console(stderr=True).status("looking for what holds it back ..."):
        explained = explain_ledger(ledger, trial=trial)
    body = explained.to_json() if as_json else None
    print_result(as_json, body, lambda: explain_sweep.render_sweep_explanation(explained))


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
    from orchestrator.sweep.home import Home
    from orchestrator.terminal.report import render_report

    if html is not None:
        path = _write_page(sweep, Path(html) if html else None, Home(home))
        if not as_json:
            click.echo(f"written to {path}")
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


def _write_page(sweep: str, file: Path | None, home: Home) -> Path:
    from rich.console import Console

    from orchestrator.report.page.page import write_page
    from orchestrator.report.report import read_report
    from orchestrator.status.overview import summary_of

    seen = home.read(sweep, begun=True)
    summary = summary_of(seen, home)
    assert summary is not None, "it has begun"
    with home.open(sweep) as ledger, Console(stderr=True).status("drawing ..."):
        return write_page(read_report(ledger, seen.state, summary, Invocation.current(home.path)), file)


COMMANDS = (ps, status, watch, logs, explain, report_command)
