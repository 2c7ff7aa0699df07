"""How the commands that run a sweep start its controller, here or in the background, and what they print of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import click

from orchestrator.cli.options import print_result, program_options
from orchestrator.errors import EXIT_CLUSTER_LOST, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER
from orchestrator.invocation import Invocation

if TYPE_CHECKING:
    from rich.console import RenderableType

    from orchestrator.commands.control import Receipt
    from orchestrator.commands.submit import Mode, StartedSubmission, Submission
    from orchestrator.controller.controller import SweepResult
    from orchestrator.sweep.home import Home

_HERE = "Keep the controller in this terminal, also with an address. The default without one."


class Where(NamedTuple):
    """Where the controller runs, as said on the command line."""

    address: str | None
    """The Ray cluster's; None: as the environment or the file says."""
    mode: Mode | None
    """None leaves it to the address."""
    follow: bool
    """Show what a controller in the background writes, until it ends."""


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


def carry_out(receipt: Receipt, home: Home, where: Where, *, as_json: bool, profile_of: int | None = None) -> None:
    """Leave what was asked of a sweep to the controller at work; where there is none, resume the sweep.

    Args:
        profile_of: show the profile of this trial in place of the whole report.
    """
    if receipt.is_controlled and not where.follow:
        print_result(as_json, receipt.to_json(), lambda: "The controller at work takes it up.")
        return
    resume_sweep(receipt.sweep, home, where, as_json=as_json, profile_of=profile_of)


def submit_file(
    file: Path, home: Home, where: Where, *, as_json: bool, is_new: bool = False, is_checked: bool = False
) -> None:
    """Run the sweep of a file, or go on with it; with ``is_new``, begin one anew that measured nothing."""
    from orchestrator.commands.submit import submission_of_file

    options = program_options()
    submission = submission_of_file(
        file,
        home,
        address=where.address,
        mode=where.mode,
        options=options,
        replace=is_new,
        is_checked=is_checked,
    )
    _run_submission(submission, follow=where.follow, as_json=as_json)


def resume_sweep(name: str, home: Home, where: Where, *, as_json: bool, profile_of: int | None = None) -> None:
    """Go on with a sweep as its file said when it was submitted; then show its report, or one profile alone."""
    from orchestrator.commands.submit import submission_of_sweep

    options = program_options()
    submission = submission_of_sweep(name, home, address=where.address, mode=where.mode, options=options)
    _run_submission(submission, follow=where.follow, as_json=as_json, profile_of=profile_of)


def _run_submission(submission: Submission, *, follow: bool, as_json: bool, profile_of: int | None = None) -> None:
    """Run its controller in this process or a supervisor's, or start it in the background; print what came of it."""
    from orchestrator import homes
    from orchestrator.commands.submit import find_running, start_in_background

    homes.remember(submission.home.path)
    if submission.mode == "foreground":
        _run_in_foreground(submission, as_json, profile_of)
        return
    started = find_running(submission.home, submission.name)
    if started is None and submission.address is None and submission.needs_check:
        submission = _checked(submission)
    if started is None:
        started = start_in_background(submission, lambda line: click.echo(line, err=True))
    if started.exit_code:
        sys.exit(started.exit_code)
    if follow and started.exit_code is None:
        _follow(submission, started)
    if follow or started.exit_code is not None:
        _show_result(submission, as_json, profile_of)
        return
    print_result(as_json, started.to_json(), lambda: _next_steps(submission, started))


def _run_in_foreground(submission: Submission, as_json: bool, profile_of: int | None) -> None:
    from orchestrator.commands.submit import find_running
    from orchestrator.commands.supervisor import supervised_run

    run = supervised_run()
    if not submission.is_over and not run:
        find_running(submission.home, submission.name)  # one that has just paused it ends; any other holds the ledger
    if submission.needs_supervisor and not run:
        shown = [] if profile_of is None else ["--profile-of", str(profile_of)]
        _become(submission.supervised(*(["--json"] if as_json else []), *shown))
    if run <= 1 and submission.needs_check:
        submission = _checked(submission)
    _run_here(submission, run, as_json, profile_of)


def _checked(submission: Submission) -> Submission:
    """The submission once a short run has shown that its trials can be measured; otherwise the program ends, with what
    was seen on stderr."""
    from rich.console import Console

    from orchestrator.commands.check import check_sweep
    from orchestrator.processes import interruptible
    from orchestrator.terminal.probe import check_line, render_checked

    def tell(line: str) -> None:
        click.echo(f"check: {line}", err=True)

    with interruptible():
        checked = check_sweep(submission.spec, submission.home, address=submission.address, tell=tell)
    if not checked.is_good:
        Console(stderr=True).print(render_checked(checked))
        click.echo("error: the sweep was not begun. Mend that, or submit with --no-check", err=True)
        sys.exit(EXIT_USER)
    click.echo(f"check: {check_line(checked)}", err=True)
    return replace(submission, is_checked=True)


def _become(argv: list[str]) -> NoReturn:
    """A small process in this one's place: it may have to last for days."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(argv[0], argv)


def _run_here(submission: Submission, run: int, as_json: bool, profile_of: int | None) -> None:
    """Run the controller in this process.

    Args:
        run: how many controllers a supervisor has started, this one included; 0 without supervisor.
    """
    from cluster.base import ClusterError, ClusterLostError
    from orchestrator.sweep.documents import MODE_VARIABLE

    try:
        result = _controlled(submission, is_restart=run > 1)
    except KeyboardInterrupt:
        click.echo(_interrupted(submission), err=True)
        sys.exit(EXIT_INTERRUPTED)
    except ClusterError as error:
        # A cluster that comes back may take some time until it can be used.
        if run > 1 or (run and isinstance(error, ClusterLostError)):
            click.echo(f"error: {error}", err=True)
            sys.exit(EXIT_CLUSTER_LOST)
        raise
    if MODE_VARIABLE in os.environ:  # nobody sees it; `report` shows the result to whoever asks
        click.echo(f"{result.state.status}: {result.state.finish_reason}", err=True)
    else:
        _print(submission, result, as_json, profile_of)
    _exit_by(result)


def _controlled(submission: Submission, *, is_restart: bool) -> SweepResult:
    """The result of the sweep, with its controller in this process and what happens shown live."""
    from rich.console import Console

    from orchestrator.commands.background import ForegroundLog, require_mark
    from orchestrator.controller import controller
    from orchestrator.controller.observer import Observers
    from orchestrator.processes import interruptible
    from orchestrator.sweep.documents import MODE_VARIABLE
    from orchestrator.terminal.live import LiveView

    run = partial(
        controller.submit if submission.verb == "submit" else controller.resume,
        submission.spec,
        submission.home,
        address=submission.address,
        is_restart=is_restart,
    )
    command = Invocation.current(submission.home.path).command("ui", submission.name)
    opening = "" if is_restart or submission.is_over else f"in the browser, from another terminal: {command}"
    with interruptible(), LiveView(opening=opening) as view:
        require_mark(submission.home, submission.name)
        if MODE_VARIABLE in os.environ:  # all that it prints is a log already
            return run(observer=view)
        log = ForegroundLog(submission.home, submission.name)
        with log, LiveView(Console(file=cast("IO[str]", log), width=200)) as lines:
            return run(observer=Observers([log, view, lines]))


def _interrupted(submission: Submission) -> str:
    """What became of the sweep after Ctrl-C, and the command to go on with."""
    program, home, name = Invocation.current(submission.home.path), submission.home, submission.name
    if name not in home.sweeps():
        return f"interrupted before the sweep {name} began; nothing is left of it"
    return f"interrupted; the sweep {name} goes on where it stopped with: {program.command('resume', name)}"


def _follow(submission: Submission, started: StartedSubmission) -> None:
    from orchestrator.commands.submit import follow

    if started.is_attached:
        click.echo(_next_steps(submission, started), err=True)
    try:
        for line in follow(started, submission.home):
            click.echo(line, err=True)
    except KeyboardInterrupt:
        program, name = Invocation.current(submission.home.path), submission.name
        click.echo(
            f"no longer following; the sweep {name} goes on. To stop it: {program.command('pause', name)}, "
            f"or for good: {program.command('cancel', name)}",
            err=True,
        )
        sys.exit(EXIT_INTERRUPTED)


def _show_result(submission: Submission, as_json: bool, profile_of: int | None) -> None:
    from orchestrator.controller import controller

    result = controller.load(submission.name, submission.home)
    _print(submission, result, as_json, profile_of)
    if result.state.status == "running":
        click.echo(
            f"error: the controller has ended before the sweep; go on with "
            f"{Invocation.current(submission.home.path).command('resume', submission.name)}",
            err=True,
        )
        sys.exit(EXIT_USER)
    _exit_by(result)


def _print(submission: Submission, result: SweepResult, as_json: bool, profile_of: int | None) -> None:
    from orchestrator.report.report import make_report
    from orchestrator.report.sources import Sources
    from orchestrator.terminal.report import render_profiled, render_report

    sources = Sources(recorded=result.recorded, folder=submission.home.sweep_folder(submission.name))
    invocation = Invocation.current(submission.home.path)

    def render() -> RenderableType:
        report = make_report(result.state, result.summary, sources=sources, invocation=invocation)
        return render_report(report) if profile_of is None else render_profiled(report, profile_of)

    print_result(as_json, result.summary.to_json(), render)


def _exit_by(result: SweepResult) -> None:
    if result.state.status == "failed":
        click.echo(f"error: the sweep failed: {result.state.finish_reason}", err=True)
        for line in result.state.last_words:
            click.echo(f"  | {line}", err=True)
        sys.exit(EXIT_FAILED)


def _next_steps(submission: Submission, started: StartedSubmission) -> str:
    """What runs where, and what to type next."""
    program, name = Invocation.current(submission.home.path), submission.name
    how = "runs already" if started.is_attached else "runs"
    where = {
        "ray job": f"as Ray Job {started.job} at {started.address}",
        "detached": "apart from this terminal",
        "foreground": "in another terminal",
    }[started.mode]
    next_steps = {
        program.command("watch", name): "follow it",
        program.command("ui", name): "follow it in the browser",
        program.command("logs", name): "what its controller writes",
        program.command("pause", name): "stop it; `resume` goes on",
    }
    width = max(map(len, next_steps))
    lines = (f"  {command:<{width}}  {what}" for command, what in next_steps.items())
    return "\n".join([f"The sweep {name} {how}, {where}.", *lines])
