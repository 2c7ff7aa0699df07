"""The command line: thin. stdout carries the result, stderr is for people; heavy imports happen inside commands.

Exit codes: :class:`orchestrator.errors.ExitCode`, printed below the help of every command.
"""

from __future__ import annotations

import codecs
import errno
import gc
import io
import logging
import sys
from typing import Any

import click

from orchestrator.cli import completion, preparing, production, running, sweeps
from orchestrator.cli.options import global_home_option
from orchestrator.errors import ExitCode
from orchestrator.text import echo, plain
from trials.secrets import RedactingFormatter, redact, redact_uncaught

GC_THRESHOLDS = (50_000, 20, 100)
"""Modules and ledgers are many objects that stay: at Python's own (700, 10, 10), looking through them again and again
is a good part of most commands' time."""

_FALLBACKS = "-─━═‐–—−· |│┃║ +╭╮╰╯┌┐└┘├┤┬┴┼┏┓┗┛✓ #█ x×✗ ~≈ *• uµ 2² 3³"  # noqa: RUF001
ASCII = str.maketrans(
    {sign: word[0] for word in _FALLBACKS.split() for sign in word[1:]}
    | {"≥": ">=", "≤": "<=", "±": "+-", "→": "->", "…": "..."}
)
"""What stands for characters of ours that an output cannot encode; others become question marks."""


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(ASCII)
    return text.encode("ascii", "replace").decode("ascii"), error.end


def make_outputs_encode_everything() -> None:
    """Have stdout and stderr write ASCII for what their encoding lacks: it depends on the locale."""
    codecs.register_error("tune-cluster-ascii", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="tune-cluster-ascii")


OF_A_PATH = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG),
    *(errno.ELOOP, errno.EINVAL, errno.EADDRINUSE, errno.EROFS),
)
"""Errors of the system that another path or port avoids; others are of the host."""
EXIT_CODES = (
    "Exit codes: 0 done; 1 the sweep, or what was requested, failed; 2 wrong usage or input; 3 could not verify; "
    "4 cluster, disk or store does not work; 130 interrupted."
)


class _PlainFormatter(RedactingFormatter):
    """Formats log lines and warnings without secrets and without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


class CommandGroup(click.Group):
    """Turns errors into one message on stderr and an exit code of :class:`orchestrator.errors.ExitCode`."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        make_outputs_encode_everything()
        return super().main(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """In the order of use, not of the alphabet."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        from cluster.base import ClusterError
        from orchestrator.errors import ConfigError, ServiceError
        from orchestrator.sweep.ledger import LedgerError, SweepBusyError

        code = ExitCode.USAGE
        try:
            return super().invoke(ctx)
        except (ConfigError, ClusterError, LedgerError) as error:
            is_ours = isinstance(error, ConfigError | SweepBusyError) and not isinstance(error, ServiceError)
            code = ExitCode.USAGE if is_ours else ExitCode.INFRASTRUCTURE
            echo(f"error: {redact(str(error))}", err=True)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader has closed its end
            code = ExitCode.USAGE if error.errno in OF_A_PATH else ExitCode.INFRASTRUCTURE
            echo(redact(f"error: {error.filename or ''}: {error.strerror or error}".replace(": :", ":")), err=True)
        except KeyboardInterrupt:
            echo("interrupted; a sweep goes on where it stopped when it is submitted again", err=True)
            sys.exit(ExitCode.INTERRUPTED)
        sys.exit(code)


@click.group(cls=CommandGroup, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-v", "--verbose", is_flag=True, help="Log what the controller does, on stderr.")
@global_home_option
@click.version_option(package_name="tune-cluster")
def main(verbose: bool) -> None:
    """Find the fastest way to train a model on a cluster, by measuring.

    \b
    Example:
      tune-cluster submit configs/sweeps/quickstart.yaml
    """
    gc.set_threshold(*GC_THRESHOLDS)
    redact_uncaught(plain)
    handler = logging.StreamHandler()
    handler.setFormatter(_PlainFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.captureWarnings(True)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


for _module in (preparing, running, sweeps, production, completion):
    for _command in _module.COMMANDS:
        _command.epilog = EXIT_CODES
        _command.context_settings = main.context_settings  # a command used apart from the group has -h, too
        main.add_command(completion.offer_names(_command))
