"""The commands that run a sweep: submit, resume, retry, confirm, profile."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, cast

import click

from orchestrator.cli.options import home_option, json_option, print_result, program_options
from orchestrator.errors import ExitCode
from orchestrator.process_support import Invocation
from orchestrator.text import echo

if TYPE_CHECKING:
    from rich.console import RenderableType

    from orchestrator.commands.steering import Receipt
    from orchestrator.commands.submission import Mode, StartedSubmission, Submission
    from orchestrator.controller.controller import SweepResult
    from orchestrator.sweep.snapshot import Home


# How these commands start the controller, here or in the background, and what they print.


_HERE = (
    "Run the controller in this terminal even if a cluster address is set. This is the default if no address is set."
)


class Where(NamedTuple):
    """Where the controller runs, from the command line."""

    address: str | None
    """The Ray cluster's; None: from the environment or the file."""
    mode: Mode | None
    """None: depends on the address."""
    follow: bool
    """Print the output of a background controller until it ends."""


def where_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for where the controller runs; the command gets them as ``where``."""

    @wraps(command)
    def with_where(*, address: str | None, foreground: bool, detach: bool, follow: bool, **others: Any) -> Any:
        if foreground and detach:
            raise click.UsageError("--foreground and --detach are mutually exclusive")
        mode: Mode | None = "foreground" if foreground else "detached" if detach else None
        return command(where=Where(address, mode, follow), **others)

    wrapped: Callable[..., Any] = with_where
    for option in (
        click.option("--follow", is_flag=True, help="Print the output of a background controller until it exits."),
        click.option("--detach", is_flag=True, help="Run the controller in the background on this machine."),
        click.option("--foreground", is_flag=True, help=_HERE),
        click.option(
            "--address",
            metavar="HOST:PORT",
            help="Address of the Ray head node, or the URL of its dashboard (http://HOST:PORT). The controller runs "
            "there as a Ray job. Defaults to `$RAY_ADDRESS`, then to `cluster.address` in the sweep file.",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped


def carry_out(receipt: Receipt, home: Home, where: Where, *, as_json: bool, profile_of: int | None = None) -> None:
    """Leave a recorded request to the running controller; without one, resume the sweep.

    Args:
        profile_of: show the profile of this trial instead of the full report.
    """
    if receipt.is_controlled and not where.follow:
        print_result(as_json, receipt.to_json(), lambda: "The running controller will handle it.")
        return
    resume_sweep(receipt.sweep, home, where, as_json=as_json, profile_of=profile_of)


def submit_file(
    file: Path,
    home: Home,
    where: Where,
    *,
    as_json: bool,
    is_new: bool = False,
    is_checked: bool = False,
    budget: Mapping[str, Any] | None = None,
) -> None:
    """Run or resume the sweep of a file; with ``is_new``, replace one without measurements.

    Args:
        budget: overrides values of the file's section ``budget``.
    """
    from orchestrator.commands.submission import submission_of_file

    options = program_options()
    submission = submission_of_file(
        file,
        home,
        address=where.address,
        mode=where.mode,
        options=options,
        replace=is_new,
        is_checked=is_checked,
        budget=budget,
    )
    if submission.budget_change:
        echo(f"budget: {submission.budget_change}", err=True)
    _run_submission(submission, follow=where.follow, as_json=as_json)


def resume_sweep(name: str, home: Home, where: Where, *, as_json: bool, profile_of: int | None = None) -> None:
    """Resume a sweep with the file that it was submitted with, then show its report, or one profile only."""
    from orchestrator.commands.submission import submission_of_sweep

    options = program_options()
    submission = submission_of_sweep(name, home, address=where.address, mode=where.mode, options=options)
    _run_submission(submission, follow=where.follow, as_json=as_json, profile_of=profile_of)


def _run_submission(submission: Submission, *, follow: bool, as_json: bool, profile_of: int | None = None) -> None:
    """Run its controller in this process, under a supervisor, or in the background, and print the result."""
    from orchestrator import process_support
    from orchestrator.commands.submission import find_running, start_in_background

    process_support.remember(submission.home.path)
    if submission.mode == "foreground":
        _run_in_foreground(submission, as_json, profile_of)
        return
    started = find_running(submission.home, submission.name)
    if started is None and submission.address is None and submission.needs_check:
        submission = _checked(submission)
    if started is None:
        started = start_in_background(submission, lambda line: echo(line, err=True))
    if started.exit_code:
        sys.exit(started.exit_code)
    if follow and started.exit_code is None:
        _follow(submission, started)
    if follow or started.exit_code is not None:
        _show_result(submission, as_json, profile_of)
        return
    print_result(as_json, started.to_json(), lambda: _next_steps(submission, started))


def _run_in_foreground(submission: Submission, as_json: bool, profile_of: int | None) -> None:
    from orchestrator.commands.submission import find_running
    from orchestrator.commands.supervisor import supervised_run

    run = supervised_run()
    running = None if submission.is_over or run else find_running(submission.home, submission.name)
    if running is not None:
        _attach(submission, running, as_json, profile_of)
        return
    if submission.needs_supervisor and not run:
        shown = [] if profile_of is None else ["--profile-of", str(profile_of)]
        _become(submission.supervised(*(["--json"] if as_json else []), *shown))
    if run <= 1 and submission.needs_check:
        submission = _checked(submission)
    _run_here(submission, run, as_json, profile_of)


def _attach(submission: Submission, running: StartedSubmission, as_json: bool, profile_of: int | None) -> None:
    """Follow a sweep that already has a running controller, and show its result."""
    from orchestrator.cli.sweeps import follow_sweep

    echo(_next_steps(submission, running), err=True)
    follow_sweep(submission.name, submission.home)
    _show_result(submission, as_json, profile_of)


def _checked(submission: Submission) -> Submission:
    """The submission, after a short run has shown that its trials can be measured; otherwise prints the findings to
    stderr and exits."""
    from orchestrator.commands.short_run import check_sweep
    from orchestrator.console import SafeConsole
    from orchestrator.process_support import interruptible
    from orchestrator.terminal.plan_screen import check_line, expected_line, render_checked

    def notify(line: str) -> None:
        echo(f"check: {line}", err=True)

    with interruptible():
        checked = check_sweep(submission.spec, submission.home, address=submission.address, notify=notify)
    if not checked.is_good:
        SafeConsole(stderr=True).print(render_checked(checked))
        echo("error: the sweep was not started. Fix the problem, or submit with --no-check", err=True)
        sys.exit(ExitCode.USAGE)
    echo(f"check: {check_line(checked)}", err=True)
    if checked.expected is not None:
        echo(f"check: {expected_line(checked.expected)}; --max-trials N shortens it", err=True)
    return replace(submission, is_checked=True)


def _become(argv: list[str]) -> NoReturn:
    """Replace this process with a small one: it may have to run for days."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(argv[0], argv)


def _run_here(submission: Submission, run: int, as_json: bool, profile_of: int | None) -> None:
    """Run the controller in this process.

    Args:
        run: how many controllers a supervisor has started, this one included; 0 without supervisor.
    """
    from cluster.base import ClusterError, ClusterLostError
    from orchestrator.sweep.ledger import MODE_VARIABLE

    try:
        result = _controlled(submission, is_restart=run > 1)
    except KeyboardInterrupt:
        echo(_interrupted(submission), err=True)
        sys.exit(ExitCode.INTERRUPTED)
    except ClusterError as error:
        # A restarted cluster may take a while to become usable.
        if run > 1 or (run and isinstance(error, ClusterLostError)):
            echo(f"error: {error}", err=True)
            sys.exit(ExitCode.CLUSTER_LOST)
        raise
    if MODE_VARIABLE in os.environ:  # no terminal to print to; `report` shows the result
        from orchestrator.units import with_reason

        echo(with_reason(result.state.status, result.state.finish_reason, ": "), err=True)
    else:
        _print(submission, result, as_json, profile_of)
    _exit_by(result)


def _controlled(submission: Submission, *, is_restart: bool) -> SweepResult:
    """Run the controller in this process with a live view, and return the result of the sweep."""
    from orchestrator.commands.submission import ForegroundLog, require_mark
    from orchestrator.console import SafeConsole
    from orchestrator.controller import controller
    from orchestrator.controller.observer import Observers
    from orchestrator.process_support import interruptible
    from orchestrator.sweep.ledger import MODE_VARIABLE
    from orchestrator.terminal.sweep_screen import LiveView

    run = partial(
        controller.submit if submission.verb == "submit" else controller.resume,
        submission.spec,
        submission.home,
        address=submission.address,
        is_restart=is_restart,
    )
    command = Invocation.current(submission.home.path).command("ui", submission.name)
    opening = (
        "" if is_restart or submission.is_over else f"to follow in the browser, run in another terminal: {command}"
    )
    with interruptible(), LiveView(opening=opening) as view:
        require_mark(submission.home, submission.name)
        if MODE_VARIABLE in os.environ:  # its output is already a log
            return run(observer=view)
        log = ForegroundLog(submission.home, submission.name)
        with log, LiveView(SafeConsole(file=cast("IO[str]", log), width=200)) as lines:
            return run(observer=Observers([log, view, lines]))


def _interrupted(submission: Submission) -> str:
    """The state of the sweep after Ctrl-C, and the command that resumes it."""
    program, home, name = Invocation.current(submission.home.path), submission.home, submission.name
    if name not in home.sweeps():
        return f"interrupted before the sweep {name} started; nothing was saved"
    return f"interrupted; to continue the sweep {name}: {program.command('resume', name)}"


def _follow(submission: Submission, started: StartedSubmission) -> None:
    from orchestrator.commands.submission import follow

    if started.is_attached:
        echo(_next_steps(submission, started), err=True)
    try:
        for line in follow(started, submission.home):
            echo(line, err=True)
    except KeyboardInterrupt:
        program, name = Invocation.current(submission.home.path), submission.name
        echo(
            f"no longer following; the sweep {name} keeps running. To pause it: {program.command('pause', name)}; "
            f"to stop it for good: {program.command('cancel', name)}",
            err=True,
        )
        sys.exit(ExitCode.INTERRUPTED)


def _show_result(submission: Submission, as_json: bool, profile_of: int | None) -> None:
    from orchestrator.controller import controller

    result = controller.load(submission.name, submission.home)
    _print(submission, result, as_json, profile_of)
    if result.state.status == "running":
        echo(
            f"error: the controller exited before the sweep was finished. To resume: "
            f"{Invocation.current(submission.home.path).command('resume', submission.name)}",
            err=True,
        )
        sys.exit(ExitCode.INFRASTRUCTURE)
    _exit_by(result)


def _print(submission: Submission, result: SweepResult, as_json: bool, profile_of: int | None) -> None:
    from orchestrator.report.report import make_report
    from orchestrator.report.sources import Sources
    from orchestrator.terminal.result_screen import render_profiled, render_report

    sources = Sources(recorded=result.recorded, folder=submission.home.sweep_folder(submission.name))
    invocation = Invocation.current(submission.home.path)

    def render() -> RenderableType:
        report = make_report(result.state, result.summary, sources=sources, invocation=invocation)
        return render_report(report) if profile_of is None else render_profiled(report, profile_of)

    print_result(as_json, result.summary.to_json(), render)


def _exit_by(result: SweepResult) -> None:
    if result.state.status == "failed":
        echo(f"error: the sweep failed: {result.state.finish_reason}", err=True)
        for line in result.state.last_output:
            echo(f"  | {line}", err=True)
        sys.exit(ExitCode.FAILED)


def _next_steps(submission: Submission, started: StartedSubmission) -> str:
    """What runs where, and what to type next."""
    program, name = Invocation.current(submission.home.path), submission.name
    how = "is already running" if started.is_attached else "is running"
    where = {
        "ray job": f"as Ray Job {started.job} at {started.address}",
        "detached": "in the background",
        "foreground": "in another terminal",
    }[started.mode]
    next_steps = {
        program.command("watch", name): "follow it",
        program.command("ui", name): "follow it in the browser",
        program.command("logs", name): "show the controller's log",
        program.command("pause", name): "stop it; `resume` continues it",
    }
    width = max(map(len, next_steps))
    lines = (f"  {command:<{width}}  {what}" for command, what in next_steps.items())
    return "\n".join([f"The sweep {name} {how} {where}.", *lines])


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--replace", is_flag=True, help="Replace an existing sweep of the same name. Fails if it has measurements."
)
@click.option("--no-check", is_flag=True, help="Skip the initial check of a training program (see `check`).")
@click.option("--max-trials", type=click.IntRange(min=1), metavar="N", help="Override `budget.max_trials` in FILE.")
@click.option(
    "--wall-time",
    metavar="DURATION",
    help="Override `budget.wall_time` in FILE with a duration such as 90s, 30m or 2h.",
)
@where_options
@home_option
@json_option
def submit(
    file: Path,
    replace: bool,
    no_check: bool,
    max_trials: int | None,
    wall_time: str | None,
    where: Where,
    home: Path,
    as_json: bool,
) -> None:
    """Run or resume a sweep.

    Without a cluster address, the sweep in FILE runs in this terminal until it finishes, or in the background with
    `--detach`. With an address, the controller runs as a Ray job on the head node, and this command returns once the
    job is running. The head node must be able to access the `--home` directory.

    If the sweep is already running, its budget is updated from FILE and its progress is shown. To continue a sweep that
    has used up its budget, submit it with a larger budget.

    \b
    Examples:
      tune-cluster submit configs/sweeps/quickstart.yaml
      tune-cluster submit configs/sweeps/quickstart.yaml --detach --follow
      tune-cluster submit sweep.yaml --max-trials 40 --wall-time 2h
      tune-cluster submit sweep.yaml --replace
      tune-cluster submit sweep.yaml --address 10.0.0.1:6379 --home /shared/sweeps
    """
    from orchestrator.sweep.snapshot import Home

    given = {"max_trials": max_trials, "wall_time": wall_time}
    budget = {key: value for key, value in given.items() if value is not None}
    submit_file(file, Home(home), where, as_json=as_json, is_new=replace, is_checked=no_check, budget=budget)


@click.command()
@click.argument("sweep")
@click.option("--profile-of", type=int, hidden=True, help="Show only the profile of this trial.")
@where_options
@home_option
@json_option
def resume(sweep: str, profile_of: int | None, where: Where, home: Path, as_json: bool) -> None:
    """Resume a paused or interrupted sweep.

    Uses the sweep file that SWEEP was submitted with.

    \b
    Examples:
      tune-cluster resume quickstart
      tune-cluster resume quickstart --detach --json
    """
    from orchestrator.sweep.snapshot import Home

    resume_sweep(sweep, Home(home), where, as_json=as_json, profile_of=profile_of)


@click.command()
@click.argument("sweep")
@click.option(
    "--failed",
    is_flag=False,
    flag_value="faults",
    default="faults",
    metavar="[=CLASS,...]",
    help="Failure classes to retry. Defaults to `crashed`, `timed_out`, `gang_lost` and `host_oom`. The other classes "
    "are `oom`, `infeasible`, `diverged`, `not_believed` and `stopped_early`.",
)
@where_options
@home_option
@json_option
def retry(
    sweep: str,
    failed: str,
    where: Where,
    home: Path,
    as_json: bool,
) -> None:
    """Retry a sweep's failed trials.

    If the sweep's controller is running, it retries the trials. Otherwise, the sweep is resumed, even if it has already
    finished or failed.

    \b
    Examples:
      tune-cluster retry quickstart --failed
      tune-cluster retry quickstart --failed=oom,crashed --detach
    """
    from orchestrator.commands import steering
    from orchestrator.sweep.snapshot import Home
    from orchestrator.units import trial_id

    sweeps = Home(home)
    receipt = steering.retry(sweep, sweeps, _classes(failed))
    numbers = ", ".join(trial_id(number) for number in receipt.trials)
    echo(f"will be launched again: {numbers}", err=True)
    carry_out(receipt, sweeps, where, as_json=as_json)


def _classes(text: str) -> tuple[str, ...]:
    from orchestrator.errors import ConfigError
    from orchestrator.sweep.checkpoint import FAULTS, RETRIABLE

    if text == "faults":
        return FAULTS
    classes = tuple(word.strip() for word in text.split(","))
    unknown = [word for word in classes if word not in RETRIABLE]
    if unknown:
        raise ConfigError(
            f"unknown failure type {unknown[0]!r}", key="--failed", remedy=f"Choose from: {', '.join(RETRIABLE)}."
        )
    return classes


@click.command()
@click.argument("sweep")
@click.argument("trial", required=False)
@where_options
@home_option
@json_option
def confirm(
    sweep: str,
    trial: str | None,
    where: Where,
    home: Path,
    as_json: bool,
) -> None:
    """Confirm that a trial is faster than the baseline.

    Re-measures TRIAL, interleaved with the baseline, and checks that their losses match. TRIAL is a trial number (3 or
    t003), `winner` or `best` (the default).

    Every sweep ends by confirming its fastest trials this way. The new verdict replaces the sweep's previous one. A
    confirmation runs even if the sweep's budget is used up.

    \b
    Examples:
      tune-cluster confirm quickstart
      tune-cluster confirm quickstart t003
    """
    _check("confirm", sweep, trial, where, home, as_json)


@click.command()
@click.argument("sweep")
@click.argument("trial", required=False)
@where_options
@home_option
@json_option
def profile(
    sweep: str,
    trial: str | None,
    where: Where,
    home: Path,
    as_json: bool,
) -> None:
    """Rerun a trial under the profiler.

    Profiles TRIAL using the `profile` section of the sweep file. TRIAL is a trial number (such as 3 or t003),
    `baseline`, `best` or `winner` (the default). You can open the traces in Perfetto; see docs/profiler.md.

    \b
    Examples:
      tune-cluster profile quickstart
      tune-cluster profile quickstart baseline
    """
    _check("profile", sweep, trial, where, home, as_json)


def _check(
    what: Literal["confirm", "profile"], sweep: str, trial: str | None, where: Where, home: Path, as_json: bool
) -> None:
    from orchestrator.commands import steering
    from orchestrator.sweep.snapshot import Home
    from orchestrator.units import trial_id

    sweeps = Home(home)
    receipt = steering.request_checks(sweep, sweeps, what, trial)
    words = {"confirm": "will be confirmed", "profile": "will be profiled"}[what]
    echo(f"{words}: {trial_id(receipt.trials[0])}", err=True)
    profiled = receipt.trials[0] if what == "profile" else None
    carry_out(receipt, sweeps, where, as_json=as_json, profile_of=profiled)


COMMANDS = (submit, resume, retry, confirm, profile)
