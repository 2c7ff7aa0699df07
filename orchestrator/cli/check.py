"""The command that tries a sweep file out for a moment, before a sweep is spent on a mistake in it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from orchestrator.cli.options import home_option, json_option, print_result
from orchestrator.errors import EXIT_USER


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--address", metavar="HOST:PORT", help="Run on this Ray cluster; default: RAY_ADDRESS, then FILE's.")
@home_option
@json_option
def check(file: Path, address: str | None, home: Path, as_json: bool) -> None:
    """Run the smallest candidate of FILE for three steps: do its arguments hold, and is everything seen that counts?

    Shows which values a training program of your own tells, where they come from and how finely, whether the knobs
    were seen to act, and how long it took to start. `submit` does the same first, unless it is told --no-check.
    Exit code 0: trials will be measured; 2: something has to be mended first.

    \b
    Examples:
      tune-cluster check sweep.yaml
      tune-cluster check sweep.yaml --json
    """
    from orchestrator.commands.check import check_file
    from orchestrator.sweep.home import Home
    from orchestrator.terminal.probe import render_checked

    checked = check_file(file, Home(home), address=address, tell=lambda line: click.echo(line, err=True))
    print_result(as_json, checked.to_json(), lambda: render_checked(checked))
    if not checked.is_good:
        sys.exit(EXIT_USER)


COMMANDS = (check,)
