"""What the commands of the command line share: options, and how a result is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from orchestrator.process_support import DEFAULT_HOME, HOME_VARIABLE
from orchestrator.report.result_schema import versioned
from orchestrator.text import echo, echo_json

GLOBAL_HOME = "orchestrator.cli.home"
"""Key of a context's meta: the home given before the command."""

_HOME_TYPE = click.Path(file_okay=False, path_type=Path)


def _home_of_command(ctx: click.Context, _param: click.Parameter, value: Path) -> Path:
    """The home given to the command, or else before it, or else in the environment."""
    is_specified = ctx.get_parameter_source("home") is ParameterSource.COMMANDLINE
    return value if is_specified else ctx.meta.get(GLOBAL_HOME, value)


def _keep_home(ctx: click.Context, _param: click.Parameter, value: Path | None) -> None:
    if value is not None:
        ctx.meta[GLOBAL_HOME] = value


home_option = click.option(
    "--home",
    type=_HOME_TYPE,
    envvar=HOME_VARIABLE,
    default=DEFAULT_HOME,
    show_default=True,
    callback=_home_of_command,
    help=f"Folder of all sweeps and of the local MLflow store (or {HOME_VARIABLE}).",
)
global_home_option = click.option(
    "--home", type=_HOME_TYPE, expose_value=False, callback=_keep_home, help="The same as --home after the command."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")


def program_options() -> tuple[str, ...]:
    """Options of the whole program, as given to this command: another process is to have them, too."""
    return ("--verbose",) if click.get_current_context().find_root().params.get("verbose") else ()


def print_result(as_json: bool, body: Any, render: Callable[[], Any]) -> None:
    """Print ``body`` as JSON, or what ``render`` makes of it for people.

    Args:
        body: what is printed as JSON, or what makes it, where that takes time.
    """
    if as_json:
        echo_json(versioned(body() if callable(body) else body))
        return
    from orchestrator.terminal.fitted import print_for_people

    print_for_people(render())


def announce(links: dict[str, str], as_json: bool) -> None:
    """Print addresses by what is there, at once, since the command goes on."""
    lines = [json.dumps(links)] if as_json else [f"{what:<12} {url}" for what, url in links.items()]
    for line in lines:
        echo(line)
    sys.stdout.flush()


CLUSTER_HELP = "A described cluster in the place of a real one: dgx-h100, another of configs/clusters, or ./mine.yaml."
