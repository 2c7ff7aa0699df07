"""The command line: thin. stdout carries the result, stderr is for people; heavy imports happen inside commands.

Exit codes: 0 done, or at work in the background, paused, cancelled; the others are in :mod:`orchestrator.errors`.
"""

from __future__ import annotations

import errno
import gc
import logging
import sys
from typing import Any

import click

from orchestrator.cli import check, completion, control, export, plan, registry, run, start, sweeps
from orchestrator.errors import EXIT_INTERRUPTED, EXIT_USER
from trials.secrets import RedactingFormatter, redact, redact_uncaught

GC_THRESHOLDS = (50_000, 20, 100)
"""Modules and ledgers are many objects that stay: at Python's own (700, 10, 10), looking through them again and again
is a good part of most commands' time."""


class CommandGroup(click.Group):
    """Turns errors the user can mend into one message on stderr and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """In the order of use, not of the alphabet."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        from cluster.base import ClusterError
        from orchestrator.errors import ConfigError
        from orchestrator.sweep.ledger import LedgerError

        try:
            return super().invoke(ctx)
        except (ConfigError, ClusterError, LedgerError) as error:
            click.echo(f"error: {redact(str(error))}", err=True)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # a reader that has seen enough: nothing to mend
            click.echo(
                redact(f"error: {error.filename or ''}: {error.strerror or error}".replace(": :", ":")), err=True
            )
        except KeyboardInterrupt:
            click.echo("interrupted; a sweep goes on where it stopped when it is submitted again", err=True)
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(EXIT_USER)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-v", "--verbose", is_flag=True, help="Log what the controller does, on stderr.")
@click.version_option(package_name="tune-cluster")
def main(verbose: bool) -> None:
    """Find the fastest way to train a model on a cluster, by measuring.

    \b
    Example:
      tune-cluster submit configs/sweeps/quickstart.yaml
    """
    gc.set_threshold(*GC_THRESHOLDS)
    redact_uncaught()
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


for _module in (start, plan, check, run, sweeps, control, registry, export, completion):
    for _command in _module.COMMANDS:
        main.add_command(completion.offer_names(_command))
