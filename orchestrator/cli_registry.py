"""Commands on what was recorded and registered."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from orchestrator.cli_options import EXIT_FAILED, announce, home_option, json_option, print_result
from orchestrator.invocation import Invocation


@click.command()
@click.argument("sweep", required=False)
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True, help="Port on this host.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to serve at. The server asks for no password: whoever reaches it changes what it holds.",
)
@home_option
@json_option
def ui(sweep: str | None, port: int, host: str, home: Path, as_json: bool) -> None:
    """Open the MLflow UI on the sweeps' store until interrupted; to this host only, unless told otherwise.

    \b
    Example:
      tune-cluster ui quickstart
    """
    from orchestrator import service
    from orchestrator.home import Home

    if service.serve_ui(Home(home), sweep, host=host, port=port, announce=lambda links: announce(links, as_json)):
        click.echo("error: the MLflow server ended by itself; its own message stands above", err=True)
        sys.exit(EXIT_FAILED)


@click.command()
@click.argument("sweep")
@click.option("--name", required=True, help="Name of the registered configuration, e.g. llama-quickstart.")
@click.option("--trial", type=int, help="Promote this trial instead of the fastest one.")
@click.option("--force", is_flag=True, help="Promote even if it was not shown faster than the baseline; recorded.")
@home_option
@json_option
def promote(sweep: str, name: str, trial: int | None, force: bool, home: Path, as_json: bool) -> None:
    """Register the best configuration of SWEEP as NAME, alias production.

    \b
    Example:
      tune-cluster promote quickstart --name llama-quickstart
    """
    from orchestrator import report_promotion, service
    from orchestrator.home import Home

    promoted = service.promote(name, Home(home), sweep=sweep, trial=trial, force=force)
    print_result(as_json, promoted, lambda: report_promotion.render_promotion(promoted, Invocation.current(home)))


@click.command()
@click.argument("reference")
@home_option
@click.option("--tracking-uri", help="MLflow store to look in, if it is not the one in --home.")
@json_option
def show(reference: str, home: Path, tracking_uri: str | None, as_json: bool) -> None:
    """Print a registered configuration: NAME@production or NAME@3.

    \b
    Example:
      tune-cluster show llama-quickstart@production
    """
    from orchestrator import report_promotion, service
    from orchestrator.home import Home

    shown = service.show(reference, Home(home), tracking_uri=tracking_uri)
    print_result(as_json, shown, lambda: report_promotion.render_recipe(shown))


COMMANDS = (ui, promote, show)
