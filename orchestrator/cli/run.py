"""The commands that run a sweep: submit and resume it, launch its trials again, have them confirmed or profiled."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from orchestrator.cli.options import home_option, json_option
from orchestrator.cli.run_controller import Where, carry_out, resume_sweep, submit_file, where_options


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--replace", is_flag=True, help="Begin a sweep of this name anew that measured nothing.")
@click.option("--no-check", is_flag=True, help="Leave out the short run that comes before a training program's sweep.")
@where_options
@home_option
@json_option
def submit(file: Path, replace: bool, no_check: bool, where: Where, home: Path, as_json: bool) -> None:
    """Run the sweep in FILE, or go on with it if it was interrupted or paused.

    Without a cluster's address it runs here until it has ended, or apart from this terminal with --detach. With one
    the controller runs as a Ray Job on the cluster's head, and this command returns when it is at work; --home has to
    be a folder that the head sees, too. Submitting a sweep that runs already changes nothing.

    \b
    Examples:
      tune-cluster submit configs/sweeps/quickstart.yaml
      tune-cluster submit configs/sweeps/quickstart.yaml --detach --follow
      tune-cluster submit sweep.yaml --replace
      tune-cluster submit sweep.yaml --address 10.0.0.1:6379 --home /shared/sweeps
    """
    from orchestrator.sweep.home import Home

    submit_file(file, Home(home), where, as_json=as_json, is_new=replace, is_checked=no_check)


@click.command()
@click.argument("sweep")
@click.option("--profile-of", type=int, hidden=True, help="Show the profile of this trial alone.")
@where_options
@home_option
@json_option
def resume(sweep: str, profile_of: int | None, where: Where, home: Path, as_json: bool) -> None:
    """Go on with SWEEP, which was paused or lost its controller, as its file said when it was submitted.

    \b
    Examples:
      tune-cluster resume quickstart
      tune-cluster resume quickstart --detach --json
    """
    from orchestrator.sweep.home import Home

    resume_sweep(sweep, Home(home), where, as_json=as_json, profile_of=profile_of)


@click.command()
@click.argument("sweep")
@click.option(
    "--failed",
    is_flag=False,
    flag_value="faults",
    default="faults",
    metavar="[=CLASS,...]",
    help="Which trials: crashed, timed_out, gang_lost and host_oom by default; also oom, infeasible, diverged and "
    "stopped_early.",
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
    """Launch trials of SWEEP again that ended without being measured.

    A controller at work takes it up; otherwise this goes on with the sweep as `resume` does, also with one that was
    finished or had failed.

    \b
    Examples:
      tune-cluster retry quickstart --failed
      tune-cluster retry quickstart --failed=oom,crashed --detach
    """
    from orchestrator.commands import control
    from orchestrator.sweep.home import Home
    from orchestrator.units import trial_id

    sweeps = Home(home)
    receipt = control.retry(sweep, sweeps, _classes(failed))
    numbers = ", ".join(trial_id(number) for number in receipt.trials)
    click.echo(f"to be launched again: {numbers}", err=True)
    carry_out(receipt, sweeps, where, as_json=as_json)


def _classes(text: str) -> tuple[str, ...]:
    from orchestrator.errors import ConfigError
    from orchestrator.sweep.requests import FAULTS, RETRIABLE

    if text == "faults":
        return FAULTS
    classes = tuple(word.strip() for word in text.split(","))
    unknown = [word for word in classes if word not in RETRIABLE]
    if unknown:
        raise ConfigError(
            f"trials do not end as {unknown[0]!r}", key="--failed", remedy=f"Classes: {', '.join(RETRIABLE)}."
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
    """Measure a trial of SWEEP again, interleaved with the baseline, and put it through the loss gate.

    TRIAL is 3, t003, winner or best, the default. A sweep does this by itself when it ends, for its fastest trials; the
    last verdict is the one that counts. The sweep's budget does not bound what you ask for.

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
    """Run a trial of SWEEP with the profiler on, as section `profile` of its file says.

    TRIAL is 3, t003, baseline, best or winner, the default. The traces open in Perfetto; docs/profiler.md.

    \b
    Examples:
      tune-cluster profile quickstart
      tune-cluster profile quickstart baseline
    """
    _check("profile", sweep, trial, where, home, as_json)


def _check(
    what: Literal["confirm", "profile"], sweep: str, trial: str | None, where: Where, home: Path, as_json: bool
) -> None:
    from orchestrator.commands import control
    from orchestrator.sweep.home import Home
    from orchestrator.units import trial_id

    sweeps = Home(home)
    receipt = control.ask_checks(sweep, sweeps, what, trial)
    words = {"confirm": "to be confirmed", "profile": "to be profiled"}[what]
    click.echo(f"{words}: {trial_id(receipt.trials[0])}", err=True)
    profiled = receipt.trials[0] if what == "profile" else None
    carry_out(receipt, sweeps, where, as_json=as_json, profile_of=profiled)


COMMANDS = (submit, resume, retry, confirm, profile)
