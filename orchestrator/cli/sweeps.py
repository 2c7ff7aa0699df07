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


# Commands that show sweeps: all of them, the state of one, its result and the reasons.


@click.command()
@home_option
@json_option
def ps(home: Path, as_json: bool) -> None:
    """List all sweeps.

    Shows the state, progress, best trial and controller of each sweep. A sweep is shown as interrupted if it should be
    running but has no controller. The columns `done`, `run` and `wait` count finished, running and queued trials.

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
        echo(f"sweeps found in {other}: {Invocation.current(other).command('ps')}", err=True)


@click.command()
@click.argument("sweep")
@home_option
@json_option
def status(sweep: str, home: Path, as_json: bool) -> None:
    """Show a sweep's current state.

    Shows the sweep's lease and budget, its running trials and their nodes, pending requests, and recent failures.

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
    """Follow a sweep until it ends or is paused.

    Works no matter which machine the sweep's controller runs on. Pressing Ctrl-C does not affect the sweep. Exits with
    code 1 if the sweep failed or lost its controller.

    With `--json`, prints one JSON object per line: first the current state, then each change. The `change` field gives
    the type of the record: `sweep` (with the fields `state`, `trials`, `winner` and `best_of_search`), `lease`
    (`nodes`, `waiting`), `trial` (`state`, `nodes`, `tokens_per_s_per_device`) or `progress` (`phase`, `step`).

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
    """Show the progress of a sweep until it ends, is paused, or loses its controller; returns the last snapshot."""
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
        echo(f"no longer watching; the sweep {sweep} keeps running. To watch it again: {again}", err=True)
        sys.exit(ExitCode.INTERRUPTED)
    return last


@click.command()
@click.argument("sweep")
@click.argument("trial", required=False)
@click.option(
    "--rank", type=click.IntRange(0), help="Rank to show. Defaults to all ranks, starting with the first to fail."
)
@click.option(
    "--attempt", type=click.IntRange(0), help="Number of the attempt to show, starting from 0. Defaults to the latest."
)
@click.option(
    "--lines",
    type=click.IntRange(0),
    default=200,
    show_default=True,
    metavar="N",
    help="Show the last N lines of each log.",
)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until the trial or controller ends.")
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
    """Show the logs of a trial or the controller.

    TRIAL is a trial number (such as 3 or t003), `baseline`, `best` or `winner`. Without TRIAL, shows the controller's
    log. If you give only TRIAL, the latest sweep is used.

    Logs are kept on the node where each rank ran. For ranks on other nodes, shows only the node and the path of the
    log, plus the last lines if the rank failed. With `--json` and `--follow`, prints one JSON object per line.

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
@click.option("--diagnose", is_flag=True, help="Break down the step time of TRIAL instead of the winner's.")
@home_option
@json_option
def explain(sweep: str, trial: str | None, diagnose: bool, home: Path, as_json: bool) -> None:
    """Explain where the step time goes, or what happened to a trial.

    Without TRIAL, shows the step time breakdown and bottlenecks of the baseline and the winner, which knob would
    relieve each bottleneck and by how much, the importance of each knob, and how accurate the predictions were. Also
    works while the sweep is running.

    With TRIAL, shows why it was proposed, why it is queued or has failed, where each attempt ran, which rank failed,
    and what was done about it. TRIAL is a trial number (such as 3 or t003), `baseline`, `best` or `winner`.

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

    with home.open(sweep) as ledger, SafeConsole(stderr=True).status("looking for bottlenecks ..."):
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
    help="Write a self-contained HTML page with plots to FILE. Defaults to SWEEP-report.html.",
)
@home_option
@json_option
def report_command(sweep: str, html: str | None, home: Path, as_json: bool) -> None:
    """Show a sweep's result: verdict, trials and failures.

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
            echo(f"wrote {path}")
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
    """Compare two sweeps.

    Shows the results of A and B, the speeds of all candidates that both measured, and how their best configurations,
    workloads, hardware, software and budgets differ. To compare promoted versions or single trials, use `diff`.

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


@click.command()
@click.argument("sweep")
@click.argument("trial", required=False)
@click.argument("text", required=False)
@click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Set a tag. Can be repeated.")
@click.option("--remove-tag", "removed", multiple=True, metavar="KEY", help="Remove a tag. Can be repeated.")
@home_option
@json_option
def note(
    sweep: str,
    trial: str | None,
    text: str | None,
    tags: tuple[str, ...],
    removed: tuple[str, ...],
    home: Path,
    as_json: bool,
) -> None:
    """Add a note or tags to a sweep or trial.

    Without TRIAL, the note and tags apply to the whole sweep. TRIAL is a trial number (such as 3 or t003), `baseline`,
    `best` or `winner`. TEXT replaces any earlier note, and an empty TEXT removes it. With neither TEXT nor a tag
    option, prints the current note and tags.

    You can add notes and tags during or after a sweep. They appear in reports, on the web page and in MLflow.

    \b
    Examples:
      tune-cluster note quickstart "first sweep after the driver update"
      tune-cluster note quickstart t003 "near the memory limit" --tag team=vision
      tune-cluster note quickstart t003 --remove-tag team
      tune-cluster note quickstart
    """
    from orchestrator.commands import steering
    from orchestrator.sweep.snapshot import Home
    from orchestrator.sweep.state import is_trial

    if text is None and trial is not None and not is_trial(trial):
        trial, text = None, trial
    if text is None and not tags and not removed:
        noted = steering.read_notes(sweep, Home(home), trial)
    else:
        pairs = _tags(tags)
        noted = steering.annotate(sweep, Home(home), trial=trial, text=text, tags=pairs, removed_tags=removed)
    if noted.replaced:
        echo(f"replaced: {noted.replaced}", err=True)
    if noted.is_controlled and not as_json:
        echo("The running controller will record it.", err=True)
    print_result(as_json, noted.to_json(), lambda: "\n".join(noted.lines()))


def _tags(pairs: tuple[str, ...]) -> dict[str, str]:
    """Values by key, from words such as ``team=vision``."""
    for pair in pairs:
        if "=" not in pair:
            raise click.BadParameter(f"expected KEY=VALUE, got {pair!r}", param_hint="--tag")
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


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


# Commands that pause, stop or remove a sweep.


_no_wait_option = click.option(
    "--no-wait", is_flag=True, help="Return immediately instead of waiting for the request to take effect."
)


@click.command()
@click.argument("sweep")
@_no_wait_option
@home_option
@json_option
def pause(sweep: str, no_wait: bool, home: Path, as_json: bool) -> None:
    """Stop a sweep immediately so that you can resume it later.

    Kills the sweep's running trials and releases its nodes. The killed trials do not count as failures; `resume`
    restarts them.

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
    """Pause a sweep once its running trials have finished.

    Starts no new trials in the meantime. To continue the sweep, use `resume`.

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
    """Stop a sweep permanently.

    Kills the sweep's running trials and keeps all measurements. A cancelled sweep cannot be resumed.

    \b
    Example:
      tune-cluster cancel quickstart
    """
    _stop(sweep, "cancel", home, as_json, no_wait=no_wait)


def _stop(sweep: str, what: Action, home: Path, as_json: bool, *, no_wait: bool) -> None:
    """Record the request and wait until it takes effect. Interrupting the wait does not withdraw the request."""
    from orchestrator.commands import steering
    from orchestrator.sweep.snapshot import Home

    try:
        with steering.progress() as notify:
            stopped = steering.stop(sweep, Home(home), what, wait=not no_wait, notify=notify)
    except KeyboardInterrupt:
        echo(f"no longer waiting; the request to {what} {sweep} remains pending", err=True)
        sys.exit(ExitCode.INTERRUPTED)
    print_result(as_json, stopped.to_json(), lambda: steering.render(stopped))
    if not no_wait and not stopped.is_done:
        sys.exit(ExitCode.FAILED)


@click.command()
@click.argument("sweep")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation. Required when not running in a terminal.")
@click.option(
    "--force",
    is_flag=True,
    help="Delete the sweep even if a promoted configuration depends on it or its files cannot be read.",
)
@click.option("--mlflow", "in_mlflow", is_flag=True, help="Also delete the sweep's MLflow runs.")
@home_option
@json_option
def delete(sweep: str, yes: bool, force: bool, in_mlflow: bool, home: Path, as_json: bool) -> None:
    """Delete a sweep and its files.

    Deletes the sweep's directory, including its ledger, logs and attempts. Fails if its controller is running. Versions
    in the MLflow Model Registry are always kept.

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
    """Whether the user agrees; a UsageError without a terminal."""
    if not sys.stdin.isatty():
        raise click.UsageError("cannot prompt for confirmation without a terminal; to delete the sweep, use --yes")
    return click.confirm(question, default=False, err=True)


LOOKING = (ps, status, watch, logs, explain, report_command, compare)
STOPPING = (pause, drain, cancel, delete)
