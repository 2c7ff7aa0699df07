"""Commands on what was recorded and registered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.options import announce, home_option, json_option, print_result
from orchestrator.errors import EXIT_FAILED, EXIT_UNVERIFIED
from orchestrator.invocation import Invocation

if TYPE_CHECKING:
    from orchestrator.promotion.drift import Kind

_store_option = click.option("--tracking-uri", help="MLflow store to look in, if it is not the one in --home.")
_reason_option = click.option("--reason", default="", help="Why, for the records.")
_expect_option = click.option(
    "--expect-current", metavar="V", help="Refuse unless version V (or none) is in production: compare-and-set."
)


def _change_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of whatever changes what is in production."""
    return _reason_option(_expect_option(command))


_port = click.IntRange(1, 65535)


@click.command()
@click.argument("sweep", required=False)
@click.option("--port", type=_port, help="Port of the page on this host.  [default: 5080, or any that is free]")
@click.option("--page-only", is_flag=True, help="Serve the page without MLflow.")
@click.option("--mlflow-port", type=_port, help="Port of MLflow.  [default: 5000, or the next that is free]")
@click.option(
    "--mlflow-host",
    default="127.0.0.1",
    show_default=True,
    help="Address to serve MLflow at. It asks for no password: whoever reaches it changes what it holds.",
)
@home_option
@json_option
def ui(
    sweep: str | None,
    port: int | None,
    page_only: bool,
    mlflow_port: int | None,
    mlflow_host: str,
    home: Path,
    as_json: bool,
) -> None:
    """Show SWEEP in the browser while it runs and afterwards, and serve MLflow beside it, until interrupted.

    The page follows the sweep: trials, best so far, confirmation, logs of every rank; its buttons pause, drain, cancel,
    resume and retry. It answers on this host only, to whoever opens the printed address. Without SWEEP it lists all
    sweeps. MLflow keeps them.

    \b
    Examples:
      tune-cluster ui quickstart
      tune-cluster ui quickstart --page-only --port 8000
    """
    from orchestrator.live.serve import Served, serve
    from orchestrator.sweep.home import Home

    what = Served(sweep=sweep, port=port, with_mlflow=not page_only, mlflow_host=mlflow_host, mlflow_port=mlflow_port)
    found: dict[str, str] = {}

    def tell(links: Mapping[str, str], is_last: bool) -> None:
        found.update(links)
        if not as_json:
            announce(dict(links), as_json=False)
        elif is_last:
            announce(found, as_json=True)

    serve(
        Home(home),
        what,
        invocation=Invocation.current(home),
        announce=tell,
        tell=lambda words: click.echo(words, err=True),
    )
    again = Invocation.current(home).command("ui", *([sweep] if sweep else []))
    click.echo(f"no longer served; sweeps go on. To see it again: {again}", err=True)


@click.command()
@click.argument("sweep")
@click.option("--name", required=True, help="Name of the registered configuration, e.g. llama-quickstart.")
@click.option("--trial", help="Promote this trial (3 or t003) instead of the confirmed winner.")
@click.option("--force", is_flag=True, help="Promote whatever was measured, also without proof; recorded as forced.")
@click.option("--candidate", is_flag=True, help="Only register it, alias candidate; the one way for simulated sweeps.")
@_change_options
@home_option
@json_option
def promote(
    sweep: str,
    name: str,
    trial: str | None,
    force: bool,
    candidate: bool,
    reason: str,
    expect_current: str | None,
    home: Path,
    as_json: bool,
) -> None:
    """Put the confirmed winner of SWEEP into production as NAME.

    It becomes a version in MLflow's registry with its recipe and evidence, alias production; the version before gets
    the alias previous. Refused unless it was confirmed to be faster and has passed the loss gate. Nothing changes where
    this very recipe is in production already.

    \b
    Examples:
      tune-cluster promote quickstart --name llama-quickstart
      tune-cluster promote quickstart --name llama-quickstart --expect-current 2 --reason "new drivers"
    """
    from orchestrator.promotion import commands
    from orchestrator.sweep.home import Home
    from orchestrator.terminal import promotion

    promoted = commands.promote(
        name,
        Home(home),
        sweep=sweep,
        trial=trial,
        reason=reason,
        expect_current=expect_current,
        force=force,
        is_candidate=candidate,
    )
    print_result(as_json, promoted, lambda: promotion.render_promotion(promoted, Invocation.current(home)))


@click.command()
@click.argument("name")
@click.option("--to", metavar="V", help="This version, instead of the one that was in production before.")
@_change_options
@_store_option
@home_option
@json_option
def rollback(
    name: str,
    to: str | None,
    reason: str,
    expect_current: str | None,
    tracking_uri: str | None,
    home: Path,
    as_json: bool,
) -> None:
    """Put the version of NAME that was in production before back into production.

    Its files must be those that were registered. A rollback is recorded as a promotion is, and can itself be rolled
    back.

    \b
    Examples:
      tune-cluster rollback llama-quickstart --reason "slower on the new drivers"
      tune-cluster rollback llama-quickstart --to 1 --expect-current 3
    """
    from orchestrator.promotion import commands
    from orchestrator.sweep.home import Home
    from orchestrator.terminal import promotion

    changed = commands.roll_back(
        name, Home(home), to=to, reason=reason, expect_current=expect_current, tracking_uri=tracking_uri
    )
    print_result(as_json, changed, lambda: promotion.render_rollback(changed, Invocation.current(home)))


@click.command()
@click.argument("name")
@_store_option
@home_option
@json_option
def history(name: str, tracking_uri: str | None, home: Path, as_json: bool) -> None:
    """List what was in production as NAME, the newest record first.

    \b
    Example:
      tune-cluster history llama-quickstart
    """
    from orchestrator.promotion import commands
    from orchestrator.sweep.home import Home
    from orchestrator.terminal import promotion

    found = commands.history(name, Home(home), tracking_uri=tracking_uri)
    print_result(as_json, found, lambda: promotion.render_history(found))


@click.command()
@click.argument("reference")
@_store_option
@home_option
@json_option
def show(reference: str, tracking_uri: str | None, home: Path, as_json: bool) -> None:
    """Print a registered configuration: NAME@production or NAME@3.

    \b
    Example:
      tune-cluster show llama-quickstart@production
    """
    from orchestrator.promotion import commands
    from orchestrator.sweep.home import Home
    from orchestrator.terminal import promotion

    shown = commands.show(reference, Home(home), tracking_uri=tracking_uri)
    print_result(as_json, shown, lambda: promotion.render_recipe(shown))


@click.command()
@click.argument("a")
@click.argument("b")
@_store_option
@home_option
@json_option
def diff(a: str, b: str, tracking_uri: str | None, home: Path, as_json: bool) -> None:
    """Show what differs between A and B: knobs, workload, environment, evidence.

    Each is NAME@production, NAME@3, or a trial of a sweep as SWEEP:TRIAL.

    \b
    Examples:
      tune-cluster diff llama-quickstart@previous llama-quickstart@production
      tune-cluster diff quickstart:baseline quickstart:winner
    """
    from orchestrator.promotion import commands
    from orchestrator.sweep.home import Home
    from orchestrator.terminal import promotion

    found = commands.diff(a, b, Home(home), tracking_uri=tracking_uri)
    print_result(as_json, found.to_json(), lambda: promotion.render_difference(found))


@click.command()
@click.argument("reference")
@click.option(
    "--rounds",
    type=click.IntRange(2, 50),
    default=3,
    show_default=True,
    help="Times it and its baseline are measured, one after the other, each run anew.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.05,
    show_default=True,
    help="Relative loss of speed that does not count.",
)
@click.option(
    "--ignore",
    "ignored",
    multiple=True,
    type=click.Choice(["driver", "library", "program", "hardware", "training", "speed_up", "speed", "loss"]),
    help="Kind of drift that does not count; may be repeated.",
)
@click.option("--address", metavar="HOST:PORT", help="Head of a Ray cluster, in place of the one in the sweep's file.")
@_store_option
@home_option
@json_option
def verify(
    reference: str,
    rounds: int,
    tolerance: float,
    ignored: tuple[Kind, ...],
    address: str | None,
    tracking_uri: str | None,
    home: Path,
    as_json: bool,
) -> None:
    """Measure NAME@production again on today's cluster, beside its baseline, and report what has drifted.

    Compared are driver and libraries with those it was promoted with, its speed-up over the baseline and its own speed
    with those of the promotion, and its losses, step by step. The rounds of both are interleaved, so that a slow hour
    of the machine is no drift. The result is recorded in MLflow.

    \b
    Exit codes, for cron and CI:
      0  no drift: a loss of speed beyond the tolerance is excluded
      1  drift
      2  there is no such version, or it was altered
      3  could not verify: too noisy or disturbed, too few rounds, other hardware, no cluster; each with its reason

    \b
    Examples:
      tune-cluster verify llama-quickstart@production
      tune-cluster verify llama-quickstart@production --tolerance 0.1 --ignore library --json
    """
    from orchestrator.processes import interruptible
    from orchestrator.promotion import verify as verification
    from orchestrator.sweep.home import Home
    from orchestrator.terminal import promotion
    from orchestrator.terminal.live import LiveView

    with interruptible(), LiveView() as view:
        found = verification.verify(
            reference,
            Home(home),
            view,
            num_rounds=rounds,
            tolerance=tolerance,
            ignored=ignored,
            address=address,
            tracking_uri=tracking_uri,
        )
    print_result(as_json, found.to_json(), lambda: promotion.render_verification(found))
    sys.exit({"no_drift": 0, "drift": EXIT_FAILED, "could_not_verify": EXIT_UNVERIFIED}[found.answer])


COMMANDS = (ui, promote, rollback, history, show, diff, verify)
