"""The commands for the browser and production: ui, promote, rollback, history, show, diff, verify, export."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.options import announce, home_option, json_option, print_result
from orchestrator.errors import ExitCode
from orchestrator.process_support import Invocation
from orchestrator.text import echo, echo_file
from trials.files import write_atomically

if TYPE_CHECKING:
    from orchestrator.frameworks.spelling import Export
    from orchestrator.promotion.references import VersionDescription
    from orchestrator.promotion.verify import Kind


# Commands on recorded sweeps and registered configurations.


_store_option = click.option("--tracking-uri", help="MLflow store to use instead of the one in --home.")
_reason_option = click.option("--reason", default="", help="Reason, for the history.")
_expect_option = click.option(
    "--expect-current", metavar="V", help="Fail unless version V (or none) is in production: compare-and-set."
)


def _change_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the commands that change production."""
    return _reason_option(_expect_option(command))


_port = click.IntRange(1, 65535)


@click.command()
@click.argument("sweep", required=False)
@click.option("--port", type=_port, help="Port of the page on this host.  [default: 5080, or any free port]")
@click.option("--page-only", is_flag=True, help="Serve the page without MLflow.")
@click.option("--mlflow-port", type=_port, help="Port of MLflow.  [default: 5000, or the next free port]")
@click.option(
    "--mlflow-host",
    default="127.0.0.1",
    show_default=True,
    help="Address to serve MLflow at. MLflow has no password: anyone who can reach it can change its data.",
)
@home_option
@json_option
def ui(
    sweep: str | None,
    port: int | None,
    page_only: bool,
    mlflow_port: int | None,
    mlflow_host: str,
    home: Path,
    as_json: bool,
) -> None:
    """Serve a live page of the sweep, and MLflow.

    Serves both until interrupted. The page follows SWEEP live: trials, best so far, confirmation, logs of every rank;
    its buttons pause, drain, cancel, resume and retry. Without SWEEP, it lists all sweeps. It accepts connections from
    this host only, with the token in the printed address.

    \b
    Examples:
      tune-cluster ui quickstart
      tune-cluster ui quickstart --page-only --port 8000
    """
    from orchestrator.live.page_server import Served, serve
    from orchestrator.sweep.snapshot import Home

    what = Served(sweep=sweep, port=port, with_mlflow=not page_only, mlflow_host=mlflow_host, mlflow_port=mlflow_port)
    found: dict[str, str] = {}

    def notify(links: Mapping[str, str], is_last: bool) -> None:
        found.update(links)
        if not as_json:
            announce(dict(links), as_json=False)
        elif is_last:
            announce(found, as_json=True)

    serve(
        Home(home),
        what,
        invocation=Invocation.current(home),
        announce=notify,
        notify=lambda words: echo(words, err=True),
    )
    again = Invocation.current(home).command("ui", *([sweep] if sweep else []))
    echo(f"no longer serving; sweeps keep running. To serve again: {again}", err=True)


@click.command()
@click.argument("sweep")
@click.option("--name", help="Name of the configuration, e.g. llama-quickstart.  [default: the sweep's name]")
@click.option("--trial", help="Promote this trial (3 or t003) instead of the confirmed winner.")
@click.option("--force", is_flag=True, help="Promote any measured trial, even without proof; recorded as forced.")
@click.option(
    "--candidate",
    is_flag=True,
    help="Register it under the alias candidate, not in production. Required for simulated sweeps.",
)
@_change_options
@home_option
@json_option
def promote(
    sweep: str,
    name: str | None,
    trial: str | None,
    force: bool,
    candidate: bool,
    reason: str,
    expect_current: str | None,
    home: Path,
    as_json: bool,
) -> None:
    """Put the confirmed winner of a sweep into production.

    Registers the winner of SWEEP, with its recipe and evidence, as a new version of NAME in MLflow's registry. The
    version gets the alias production; the one that it replaces gets the alias previous. The commands rollback, history,
    show and verify take this NAME. Refused unless the winner was confirmed to be faster and passed the loss gate. Does
    nothing if the same recipe is already in production.

    \b
    Examples:
      tune-cluster promote quickstart
      tune-cluster promote quickstart --name llama-quickstart
      tune-cluster promote quickstart --expect-current 2 --reason "new drivers"
    """
    from orchestrator.promotion import commands
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal import result_screen
    from orchestrator.terminal.fitted import Phases

    with Phases() as phases:
        promoted = commands.promote(
            name or sweep,
            Home(home),
            sweep=sweep,
            trial=trial,
            reason=reason,
            expect_current=expect_current,
            force=force,
            is_candidate=candidate,
            on_phase=phases.begin,
        )
    print_result(as_json, promoted, lambda: result_screen.render_promotion(promoted, Invocation.current(home)))


@click.command()
@click.argument("name")
@click.option("--to", metavar="V", help="Version to restore; default: the previous one.")
@_change_options
@_store_option
@home_option
@json_option
def rollback(
    name: str,
    to: str | None,
    reason: str,
    expect_current: str | None,
    tracking_uri: str | None,
    home: Path,
    as_json: bool,
) -> None:
    """Put the previous version back into production.

    The files of that version of NAME must be unchanged since it was registered. A rollback is recorded like a
    promotion, and can itself be rolled back.

    \b
    Examples:
      tune-cluster rollback llama-quickstart --reason "slower on the new drivers"
      tune-cluster rollback llama-quickstart --to 1 --expect-current 3
    """
    from orchestrator.promotion import commands
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal import result_screen

    changed = commands.roll_back(
        name, Home(home), to=to, reason=reason, expect_current=expect_current, tracking_uri=tracking_uri
    )
    print_result(as_json, changed, lambda: result_screen.render_rollback(changed, Invocation.current(home)))


@click.command()
@click.argument("name")
@_store_option
@home_option
@json_option
def history(name: str, tracking_uri: str | None, home: Path, as_json: bool) -> None:
    """List the versions of NAME that were in production, newest first.

    \b
    Example:
      tune-cluster history llama-quickstart
    """
    from orchestrator.promotion import commands
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal import result_screen

    found = commands.history(name, Home(home), tracking_uri=tracking_uri)
    print_result(as_json, found, lambda: result_screen.render_history(found))


@click.command()
@click.argument("reference")
@_store_option
@home_option
@json_option
def show(reference: str, tracking_uri: str | None, home: Path, as_json: bool) -> None:
    """Print a registered configuration.

    REFERENCE is NAME@production or NAME@3.

    \b
    Example:
      tune-cluster show llama-quickstart@production
    """
    from orchestrator.promotion import commands
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal import result_screen

    shown = commands.show(reference, Home(home), tracking_uri=tracking_uri)
    print_result(as_json, shown, lambda: result_screen.render_recipe(shown))


@click.command()
@click.argument("a")
@click.argument("b")
@_store_option
@home_option
@json_option
def diff(a: str, b: str, tracking_uri: str | None, home: Path, as_json: bool) -> None:
    """Show the differences between two configurations.

    Compares knobs, workload, environment and evidence. A and B are NAME@production, NAME@3, or a trial as SWEEP:TRIAL.

    \b
    Examples:
      tune-cluster diff llama-quickstart@previous llama-quickstart@production
      tune-cluster diff quickstart:baseline quickstart:winner
    """
    from orchestrator.promotion import commands
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal import result_screen

    found = commands.diff(a, b, Home(home), tracking_uri=tracking_uri)
    print_result(as_json, found.to_json(), lambda: result_screen.render_difference(found))


@click.command()
@click.argument("reference")
@click.option(
    "--max-rounds",
    type=click.IntRange(2, 100),
    default=12,
    show_default=True,
    help="Maximum number of rounds; stops earlier once the answer is clear.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.05,
    show_default=True,
    help="Relative slowdown to tolerate.",
)
@click.option(
    "--ignore",
    "ignored",
    multiple=True,
    type=click.Choice(["driver", "library", "program", "hardware", "training", "speed", "loss"]),
    help="Kind of drift to ignore. Repeatable.",
)
@click.option("--address", metavar="HOST:PORT", help="Head of a Ray cluster, instead of the one in the sweep's file.")
@_store_option
@home_option
@json_option
def verify(
    reference: str,
    max_rounds: int,
    tolerance: float,
    ignored: tuple[Kind, ...],
    address: str | None,
    tracking_uri: str | None,
    home: Path,
    as_json: bool,
) -> None:
    """Measure a promoted configuration again to detect drift.

    Measures NAME@production and its baseline on the current cluster, and compares the result with that of the
    promotion: driver and libraries, speed-up over the baseline, speed, and losses step by step. Each round restarts
    both. Rounds are interleaved, so that a temporarily slow machine is not reported as drift, and continue until a
    slowdown is shown or ruled out. The result is recorded in MLflow.

    \b
    Exit codes, for cron and CI:
      0  no drift: a slowdown beyond the tolerance is ruled out
      1  drift
      2  the version does not exist, or it was altered
      3  could not verify: too much noise, too few rounds, different hardware
         or no cluster; shows the slowdown that is ruled out, and how many
         more rounds are needed
      4  MLflow store or disk failure

    \b
    Examples:
      tune-cluster verify llama-quickstart@production
      tune-cluster verify llama-quickstart@production --tolerance 0.1 --json
    """
    from orchestrator.process_support import interruptible
    from orchestrator.promotion import verify as verification
    from orchestrator.sweep.snapshot import Home
    from orchestrator.terminal import result_screen
    from orchestrator.terminal.sweep_screen import LiveView

    with interruptible(), LiveView() as view:
        found = verification.verify(
            reference,
            Home(home),
            view,
            max_rounds=max_rounds,
            tolerance=tolerance,
            ignored=ignored,
            address=address,
            tracking_uri=tracking_uri,
        )
    print_result(as_json, found.to_json(), lambda: result_screen.render_verification(found))
    sys.exit({"no_drift": 0, "drift": ExitCode.FAILED, "could_not_verify": ExitCode.UNVERIFIED}[found.answer])


# The command that exports a configuration to a framework.


COMMAND = "command"
"""Format of a custom training program: its own command."""


@click.command()
@click.argument("reference", required=False)
@click.option("--format", "name", help="Export format; --formats lists them.")
@click.option("--formats", "lists", is_flag=True, help="List the export formats.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Output folder; created if missing.")
@click.option(
    "--allow-lossy",
    is_flag=True,
    help="Export even if the framework cannot express everything; warnings list what is lost.",
)
@click.option(
    "--as",
    "form",
    type=click.Choice(["hook", "diff"]),
    default="hook",
    show_default=True,
    help="For knobs without a flag: include the hook that sets them, or list the lines to add to your program.",
)
@home_option
@_store_option
@json_option
def export(
    reference: str | None,
    name: str | None,
    lists: bool,
    out: Path | None,
    allow_lossy: bool,
    form: str,
    home: Path,
    tracking_uri: str | None,
    as_json: bool,
) -> None:
    """Write a configuration as a command or framework files.

    REFERENCE is NAME@production, NAME@3, or a trial as SWEEP:TRIAL. A sweep of your own training program is exported as
    its command, with copies of its configuration files and a diff against yours (--format command, the default for such
    sweeps).

    Exits with 2 if the framework cannot express something. A warning on stderr lists what was approximated or is left
    to your script.

    \b
    Examples:
      tune-cluster export llama@production --format deepspeed --out train
      tune-cluster export quickstart:winner --format accelerate
      tune-cluster export my-script@production --out train
      tune-cluster export my-script@production --as diff
    """
    from orchestrator.frameworks import catalog

    if lists:
        _print_formats(as_json)
        return
    if reference is None:
        raise click.UsageError("missing REFERENCE, such as NAME@production. To list the export formats, use --formats.")
    if name not in (None, COMMAND):
        catalog.recipe(name)

    from orchestrator.promotion import references
    from orchestrator.sweep.snapshot import Home

    described = references.describe(reference, Home(home), tracking_uri)
    made = _with_variables(_made(described, name, allow_lossy=allow_lossy, as_lines=form == "diff"), described)
    written = [] if out is None else _write(made, out)
    if as_json:
        print_result(
            True,
            {
                "exported": described.label,
                "verdict": described.verdict,
                "doubt": described.doubt,
                **_to_json(made),
                "written": written,
            },
            lambda: None,
        )
        return
    _print_export(made, described.label, out)
    doubt = f" ({described.doubt})" if described.doubt else ""
    echo(f"evidence: {described.verdict}{doubt}", err=True)


def _made(described: VersionDescription, name: str | None, *, allow_lossy: bool, as_lines: bool) -> Export:
    """The export in that format; a custom training program is exported as its own command by default."""
    from orchestrator.errors import ConfigError
    from orchestrator.frameworks import catalog
    from orchestrator.frameworks.spelling import Export, Note
    from orchestrator.program.candidate_command import START, artifact

    script = described.script
    if name == COMMAND and script is None:
        raise ConfigError(
            f"--format {COMMAND} is only supported for sweeps of a training program, not for {described.label}",
            remedy="To list the framework formats, use --formats.",
        )
    if name is None and script is None:
        raise click.UsageError("missing --format. To list the export formats, use --formats.")
    if script is None or name not in (None, COMMAND):
        return catalog.export(str(name), described.candidate, described.workload, allow_lossy=allow_lossy)
    made = artifact(script, described.candidate, described.label, seen=described.seen, as_lines=as_lines)
    notes = tuple(Note(knob=script.training.name, message=note, severity="warning") for note in made.notes)
    return Export(format=COMMAND, files=made.files, command=f"sh {START}", notes=notes)


def _with_variables(made: Export, described: VersionDescription) -> Export:
    """Add the environment variables of the ranks of its sweep."""
    from orchestrator.frameworks.shell import with_exports

    return replace(made, files=with_exports(made.files, described.fingerprint))


def _print_formats(as_json: bool) -> None:
    from orchestrator.frameworks import catalog

    titles = {name: catalog.recipe(name).title for name in catalog.formats()}
    print_result(
        as_json, {"formats": titles}, lambda: "\n".join(f"{name:<12} {title}" for name, title in titles.items())
    )


def _to_json(made: Export) -> dict[str, Any]:
    notes = [{"severity": note.severity, "knob": note.knob, "message": note.message} for note in made.notes]
    return {"format": made.format, "command": made.command, "files": dict(made.files), "notes": notes}


def _write(made: Export, folder: Path) -> list[str]:
    """Write all files, or none.

    Raises:
        ConfigError: a file of that name exists with different content; nothing was written.
    """
    from orchestrator.errors import ConfigError

    for name, text in made.files.items():
        path = folder / name
        if path.exists() and (not path.is_file() or path.read_bytes() != text.encode()):
            raise ConfigError(
                f"{path} already exists with different content", remedy="Choose another directory, or move the file."
            )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as staged:
        for name, text in made.files.items():
            path = Path(staged) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, [text.encode()])
        for name in made.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for name in made.files:
            (Path(staged) / name).replace(folder / name)
    return [str(folder / name) for name in made.files]


def _print_export(made: Export, label: str, folder: Path | None) -> None:
    """Print the files to stdout unless they were written to a folder; everything else goes to stderr."""
    if folder is None:
        for name, text in made.files.items():
            echo_file(f"==> {name} <==\n{text}" if len(made.files) > 1 else text, nl=len(made.files) > 1)
    else:
        echo("\n".join(str(folder / name) for name in made.files))
    for note in made.notes:
        echo(str(note), err=True)
    where = f"in {folder}" if folder else "in the folder with these files"
    form = "as a command" if made.format == COMMAND else f"for {made.format}"
    echo(f"{label} {form}; run {where}: {made.command}", err=True)


PROMOTING = (promote, rollback, history, show, diff, verify, export)
