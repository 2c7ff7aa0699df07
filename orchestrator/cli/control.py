"""Commands that stop a sweep, for a while or for good, or remove it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.options import home_option, json_option, print_result
from orchestrator.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER

if TYPE_CHECKING:
    from orchestrator.sweep.events import Action

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
    from orchestrator.commands import stop
    from orchestrator.sweep.home import Home

    try:
        with stop.progress() as tell:
            stopped = stop.stop(sweep, Home(home), what, wait=not no_wait, tell=tell)
    except KeyboardInterrupt:
        click.echo(f"no longer waiting; what was asked of {sweep} still stands", err=True)
        sys.exit(EXIT_INTERRUPTED)
    print_result(as_json, stopped.to_json(), lambda: stop.render(stopped))
    if not no_wait and not stopped.is_done:
        sys.exit(EXIT_FAILED)


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
    from orchestrator.commands import stop as stopping
    from orchestrator.sweep.home import Home

    what = stopping.describe(sweep, Home(home))
    if not yes and not _agreed(f"Remove {what}{' and its runs in MLflow' if in_mlflow else ''}?"):
        click.echo("nothing was removed", err=True)
        sys.exit(EXIT_USER)
    removed = stopping.delete(sweep, Home(home), force=force, in_mlflow=in_mlflow)
    if as_json:
        print_result(True, removed.to_json(), str)
    for line in removed.lines() if not as_json else ():
        click.echo(line)


def _agreed(question: str) -> bool:
    """Whether the user says yes; a UsageError where there is no terminal to ask at."""
    if not sys.stdin.isatty():
        raise click.UsageError("nobody can be asked here; say --yes to remove the sweep")
    return click.confirm(question, default=False, err=True)


COMMANDS = (pause, drain, cancel, delete)
