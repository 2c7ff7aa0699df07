"""Shared by all commands: common options, and how a result is printed."""

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
"""Key in a context's meta: the value of --home before the command."""

_HOME_TYPE = click.Path(file_okay=False, path_type=Path)


def _home_of_command(ctx: click.Context, _param: click.Parameter, value: Path) -> Path:
    """Return --home from after the command, before the command, or the environment, in this order."""
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
    show_envvar=True,
    help="Directory for sweeps and the local MLflow store.",
)
global_home_option = click.option(
    "--home",
    type=_HOME_TYPE,
    expose_value=False,
    callback=_keep_home,
    help="Directory for sweeps; can also be given after the command.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON to stdout.")


def program_options() -> tuple[str, ...]:
    """Options given before the command, to pass on to another process."""
    return ("--verbose",) if click.get_current_context().find_root().params.get("verbose") else ()


def print_result(as_json: bool, body: Any, render: Callable[[], Any]) -> None:
    """Print ``body`` as JSON, or the result of ``render`` for people.

    Args:
        body: the JSON document, or a function that makes it if that takes time.
    """
    if as_json:
        echo_json(versioned(body() if callable(body) else body))
        return
    from orchestrator.terminal.fitted import print_for_people

    print_for_people(render())


def announce(links: dict[str, str], as_json: bool) -> None:
    """Print addresses by name and flush: the command keeps running."""
    lines = [json.dumps(versioned(links))] if as_json else [f"{what:<12} {url}" for what, url in links.items()]
    for line in lines:
        echo(line)
    sys.stdout.flush()


CLUSTER_HELP = (
    "Simulate this cluster instead of using a real one: a name from configs/clusters, such as dgx-h100, or a file, "
    "such as ./mine.yaml."
)
