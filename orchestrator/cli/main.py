"""The command line: the group of all commands, its help, and how errors become exit codes.

Results go to stdout, messages for people to stderr. Exit codes: :class:`orchestrator.errors.ExitCode`, printed below
the help of every command.
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
from orchestrator.process_support import PROGRAM
from orchestrator.text import echo, plain
from trials.secrets import RedactingFormatter, redact, redact_uncaught

# Modules and ledgers create many long-lived objects. With Python's defaults (700, 10, 10), repeated collections take a
# good part of most commands' time.
GC_THRESHOLDS = (50_000, 20, 100)

_FALLBACKS = "-─━═‐–—−· |│┃║ +╭╮╰╯┌┐└┘├┤┬┴┼┏┓┗┛✓ #█ x×✗ ~≈ *• uµ 2² 3³"  # noqa: RUF001
ASCII = str.maketrans(
    {sign: word[0] for word in _FALLBACKS.split() for sign in word[1:]}
    | {"≥": ">=", "≤": "<=", "±": "+-", "→": "->", "…": "..."}
)
"""ASCII replacements for our characters that an output cannot encode; others become question marks."""


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(ASCII)
    return text.encode("ascii", "replace").decode("ascii"), error.end


def make_outputs_encode_everything() -> None:
    """Make stdout and stderr fall back to ASCII for characters that the locale's encoding lacks."""
    codecs.register_error("tune-cluster-ascii", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="tune-cluster-ascii")


OF_A_PATH = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG),
    *(errno.ELOOP, errno.EINVAL, errno.EADDRINUSE, errno.EROFS),
)
"""Codes of system errors that another path or port would avoid; the others are caused by the host."""
EXIT_CODES = (
    "Exit codes: 0 success; 1 the sweep or request failed; 2 invalid usage or input; "
    "3 `verify` was inconclusive; 4 cluster, disk or store failure; 130 interrupted."
)
"""Printed below the help of every command except `verify`, which has its own list."""


SECTIONS: dict[str, tuple[click.Command, ...]] = {
    "Get started": preparing.COMMANDS,
    "Run and control": (*running.COMMANDS, *sweeps.STOPPING),
    "Inspect": (*sweeps.LOOKING, sweeps.note, production.ui),
    "Promote and export": production.PROMOTING,
    "Other": completion.COMMANDS,
}
"""All commands, by their titles in the help."""


class _PlainFormatter(RedactingFormatter):
    """Formats log lines and warnings without secrets and without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


class CommandGroup(click.Group):
    """Reports errors as one message on stderr and an exit code of :class:`orchestrator.errors.ExitCode`."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        make_outputs_encode_everything()
        return super().main(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """In order of use, not alphabetically."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """One list for each of :data:`SECTIONS`, in aligned columns."""
        width = max(map(len, self.commands))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{command.name:<{width}}", command.get_short_help_str(formatter.width)) for command in commands]
                )

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
            echo("interrupted; submit the sweep again to continue where it stopped", err=True)
            sys.exit(ExitCode.INTERRUPTED)
        sys.exit(code)


@click.group(PROGRAM, cls=CommandGroup, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-v", "--verbose", is_flag=True, help="Log the controller's actions to stderr.")
@global_home_option
@click.version_option(package_name="tune-cluster")
def main(verbose: bool) -> None:
    """Find the fastest way to train your model by measuring real trials.

    \b
    Examples:
      tune-cluster init -- torchrun --nproc-per-node 8 train.py --batch-size 4
      tune-cluster submit sweep.yaml
    """
    gc.set_threshold(*GC_THRESHOLDS)
    redact_uncaught(plain)
    handler = logging.StreamHandler()
    handler.setFormatter(_PlainFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.captureWarnings(True)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


for _command in (_command for _commands in SECTIONS.values() for _command in _commands):
    _command.epilog = None if _command is production.verify else EXIT_CODES
    _command.context_settings = main.context_settings  # a command used without the group has -h, too
    main.add_command(completion.offer_names(_command))
