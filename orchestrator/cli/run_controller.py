"""How commands run a controller: where, in the foreground or not, and what they print."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from orchestrator.cli.options import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER, print_result
from orchestrator.invocation import Invocation

if TYPE_CHECKING:
    from orchestrator.commands.control import Receipt
    from orchestrator.commands.submit import Begun, Mode, Submission
    from orchestrator.controller.service import SweepResult

_HERE = "Keep the controller in this terminal, also with an address. The default without one."


class Where(NamedTuple):
    """Where the controller runs, as said on the command line."""

    address: str | None
    mode: Mode | None
    """None leaves it to the address."""
    follow: bool


def where_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say where the controller runs; the command gets them as ``where``."""

    @wraps(command)
    def with_where(*, address: str | None, foreground: bool, detach: bool, follow: bool, **others: Any) -> Any:
        if foreground and detach:
            raise click.UsageError("--foreground and --detach exclude each other")
        mode: Mode | None = "foreground" if foreground else "detached" if detach else None
        return command(where=Where(address, mode, follow), **others)

    wrapped: Callable[..., Any] = with_where
    for option in (
        click.option("--follow", is_flag=True, help="Show what a controller in the background writes, until it ends."),
        click.option("--detach", is_flag=True, help="Run the controller on this host, but apart from this terminal."),
        click.option("--foreground", is_flag=True, help=_HERE),
        click.option(
            "--address",
            metavar="HOST:PORT",
            help="Head of a Ray cluster, or http://HOST:PORT of its dashboard; default: RAY_ADDRESS, then "
            "cluster.address of the file. The controller runs there, as a Ray Job.",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped


def take_up(answer: Receipt, home: Path, where: Where, *, as_json: bool) -> None:
    """Leave what was asked of a sweep to the controller at work, or go on with the sweep."""
    from orchestrator.commands import submit
    from orchestrator.sweep.home import Home

    if answer.is_controlled and not where.follow:
        print_result(as_json, answer.to_json(), lambda: "The controller at work takes it up.")
        return
    made = submit.of_sweep(answer.sweep, Home(home), address=where.address, mode=where.mode, options=program_options())
    go(made, follow=where.follow, as_json=as_json)


def program_options() -> tuple[str, ...]:
    return ("--verbose",) if click.get_current_context().find_root().params.get("verbose") else ()


def go(made: Submission, *, follow: bool, as_json: bool) -> None:
    from orchestrator.commands import submit
    from orchestrator.commands.supervisor import supervised_run

    if made.mode == "foreground":
        run = supervised_run()
        if not made.is_over and not run:
            submit.find_running(made)  # one that has just paused it ends; with any other the ledger is busy
        if made.needs_supervisor and not run:
            _become(made.supervised(*(["--json"] if as_json else [])))
        _run_here(made, run, as_json)
        return
    begun = submit.find_running(made) or submit.begin(made, lambda line: click.echo(line, err=True))
    if begun.exit_code:
        sys.exit(begun.exit_code)
    if follow and begun.exit_code is None:
        _follow(made, begun)
    if follow or begun.exit_code is not None:
        _show_result(made, as_json)
        return
    print_result(as_json, begun.to_json(), lambda: _words(made, begun))


def _become(argv: list[str]) -> NoReturn:
    """A small process in this one's place: it may have to last for days."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(argv[0], argv)


def _run_here(made: Submission, run: int, as_json: bool) -> None:
    """``run``: how many controllers a supervisor has started, this one included; 0 without supervisor."""
    from cluster.base import ClusterError, ClusterLostError
    from orchestrator.commands import background
    from orchestrator.commands.supervisor import EXIT_CLUSTER_LOST
    from orchestrator.controller import service
    from orchestrator.processes import interruptible
    from orchestrator.sweep.documents import MODE_VARIABLE
    from orchestrator.terminal.live import LiveView

    try:
        with interruptible(), LiveView() as view:
            background.require_mark(made.home, made.name)
            if made.words[0] == "submit":
                file = Path(made.words[1])
                result = service.submit(file, made.home, view, address=made.address, is_restart=run > 1)
            else:
                result = service.resume(made.name, made.home, view, address=made.address, is_restart=run > 1)
    except ClusterError as error:
        # A cluster that comes back may take some time until it can be used.
        if run > 1 or (run and isinstance(error, ClusterLostError)):
            click.echo(f"error: {error}", err=True)
            sys.exit(EXIT_CLUSTER_LOST)
        raise
    if MODE_VARIABLE in os.environ:  # nobody sees it; `report` shows the result to whoever asks
        click.echo(f"{result.state.status}: {result.state.finish_reason}", err=True)
        _exit_by(result)
        return
    _print(made, result, as_json)
    _exit_by(result)


def _follow(made: Submission, begun: Begun) -> None:
    from orchestrator.commands import submit

    if begun.is_attached:
        click.echo(_words(made, begun), err=True)
    try:
        for line in submit.follow(begun, made.home):
            click.echo(line, err=True)
    except KeyboardInterrupt:
        program = Invocation.current(made.home.path)
        click.echo(
            f"no longer following; the sweep {made.name} goes on. To stop it: {program.command('pause', made.name)}, "
            f"or for good: {program.command('cancel', made.name)}",
            err=True,
        )
        sys.exit(EXIT_INTERRUPTED)


def _show_result(made: Submission, as_json: bool) -> None:
    from orchestrator.controller import service

    result = service.load(made.name, made.home)
    _print(made, result, as_json)
    if result.state.status == "running":
        click.echo(
            f"error: the controller has ended before the sweep; go on with "
            f"{Invocation.current(made.home.path).command('resume', made.name)}",
            err=True,
        )
        sys.exit(EXIT_USER)
    _exit_by(result)


def _print(made: Submission, result: SweepResult, as_json: bool) -> None:
    from orchestrator.report.report import make_report
    from orchestrator.report.sources import Sources
    from orchestrator.terminal.report import render_report

    sources = Sources(recorded=result.recorded, folder=made.home.sweep_folder(made.name))
    invocation = Invocation.current(made.home.path)
    print_result(
        as_json,
        result.summary.to_json(),
        lambda: render_report(make_report(result.state, result.summary, sources=sources, invocation=invocation)),
    )


def _exit_by(result: SweepResult) -> None:
    if result.state.status == "failed":
        click.echo(f"error: the sweep failed: {result.state.finish_reason}", err=True)
        for line in result.state.last_words:
            click.echo(f"  | {line}", err=True)
        sys.exit(EXIT_FAILED)


def _words(made: Submission, begun: Begun) -> str:
    """What runs where, and what to type next."""
    program = Invocation.current(made.home.path)
    how = "runs already" if begun.is_attached else "runs"
    where = {
        "ray job": f"as Ray Job {begun.job} at {begun.address}",
        "detached": "apart from this terminal",
        "foreground": "in another terminal",
    }[begun.mode]
    next_steps = {
        program.command("watch", made.name): "follow it",
        program.command("logs", made.name): "what its controller writes",
        program.command("pause", made.name): "stop it; `resume` goes on",
    }
    width = max(map(len, next_steps))
    lines = (f"  {command:<{width}}  {what}" for command, what in next_steps.items())
    return "\n".join([f"The sweep {made.name} {how}, {where}.", *lines])
