"""Shell completion: click's commands and options, plus names of sweeps, trials, examples, clusters and formats.

It runs at every Tab, so it imports almost nothing, and offers nothing when the names cannot be read.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from orchestrator.cli.options import GLOBAL_HOME, json_option
from orchestrator.errors import ConfigError
from orchestrator.process_support import DEFAULT_HOME, HOME_VARIABLE, PROGRAM
from orchestrator.text import echo

_LEDGER = "ledger.sqlite"
_MAX_TRIALS = 200
"""Offer at most this many trials."""
_TIMEOUT_S = 0.5
"""Longest wait for a ledger that is being written."""

Finder = Callable[[click.Context], Iterable[str]]


class CompletedName(click.ParamType[str]):
    """Any text; the shell offers the names that ``find`` returns."""

    name = "text"

    def __init__(self, find: Finder) -> None:
        self._find = find

    def shell_complete(self, ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        with contextlib.suppress(Exception):  # the command itself reports any problem
            return [CompletionItem(name) for name in self._find(ctx) if name.startswith(incomplete)]
        return []


def _home(ctx: click.Context) -> Path:
    given = ctx.params.get("home") or ctx.meta.get(GLOBAL_HOME)
    return Path(given or os.environ.get(HOME_VARIABLE) or DEFAULT_HOME)


def sweep_names(ctx: click.Context) -> list[str]:
    """Names of the sweeps in the home, latest first."""
    found = sorted(_home(ctx).glob(f"sweeps/*/{_LEDGER}"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.parent.name for path in found]


def trial_names(ctx: click.Context) -> list[str]:
    """Names of the trials of the sweep named earlier on the line."""
    typed = os.environ.get("COMP_WORDS", "").split()  # for lines that cannot be parsed yet, as after an option
    sweep = ctx.params.get("sweep") or next((name for name in sweep_names(ctx) if name in typed), None)
    if not isinstance(sweep, str) or "/" in sweep:
        return []
    ledger = _home(ctx) / "sweeps" / sweep / _LEDGER
    if not ledger.is_file():
        return []
    with contextlib.closing(
        sqlite3.connect(f"{ledger.resolve().as_uri()}?mode=ro", uri=True, timeout=_TIMEOUT_S)
    ) as db:
        (count,) = db.execute(COUNT_TRIALS).fetchone()
    return ["baseline", "best", "winner", *(f"t{number:03d}" for number in range(min(count, _MAX_TRIALS)))]


def example_names(_ctx: click.Context) -> list[str]:
    """Names of the example sweeps."""
    from configs import CONFIGS

    return sorted(path.stem for path in (CONFIGS / "sweeps").glob("*.yaml"))


def cluster_names(ctx: click.Context) -> list[str]:
    """Names of the cluster descriptions, and the YAML files in this folder."""
    from configs import CONFIGS

    del ctx
    files = [f"./{path.name}" for path in sorted(Path().glob("*.yaml"))]
    return [*sorted(path.stem for path in (CONFIGS / "clusters").glob("*.yaml")), *files]


def format_names(_ctx: click.Context) -> list[str]:
    """Names of the export formats."""
    from orchestrator.frameworks.catalog import formats

    return sorted(formats())


COUNT_TRIALS = "SELECT count(*) FROM events WHERE kind = 'trial_proposed'"
_FINDERS: dict[str, Finder] = {
    "sweep": sweep_names,
    "trial": trial_names,
    "trials": trial_names,
    "example": example_names,
    "cluster": cluster_names,
    "format": format_names,
}
"""Which names to offer, by the name of the argument or option."""


def offer_names(command: click.Command) -> click.Command:
    """Enable name completion for the arguments and options of the command that take names; returns the command."""
    for parameter in command.params:
        words = [option.lstrip("-") for option in parameter.opts]
        find = next((_FINDERS[word] for word in words if word in _FINDERS), None)
        if find is not None and isinstance(parameter.type, click.types.StringParamType):
            parameter.type = CompletedName(find)
    return command


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@json_option
def completion(shell: str, as_json: bool) -> None:
    """Generate a shell completion script.

    Completes commands, options, and the names of sweeps, trials, examples, clusters and formats.

    \b
    Examples:
      eval "$(tune-cluster completion bash)"    # in ~/.bashrc
      eval "$(tune-cluster completion zsh)"     # in ~/.zshrc, after compinit
      tune-cluster completion fish > ~/.config/fish/completions/tune-cluster.fish
    """
    found: Any = get_completion_class(shell)
    if found is None:
        raise ConfigError(f"no completion for {shell!r}")
    script = found(click.get_current_context().find_root().command, {}, PROGRAM, "_TUNE_CLUSTER_COMPLETE")
    text = script.source_template % script.source_vars()
    echo(json.dumps({"shell": shell, "script": text}) if as_json else text)


COMMANDS = (completion,)
