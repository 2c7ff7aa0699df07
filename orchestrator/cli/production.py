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


_store_option = click.option("--tracking-uri", help="URI of the MLflow store to use instead of the one in `--home`.")
_reason_option = click.option("--reason", default="", help="Reason to record in the history.")
_expect_option = click.option(
    "--expect-current",
    metavar="V",
    help="Compare-and-set: fail unless V is the current production version. Pass `none` to require that there is none.",
)


def _change_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the commands that change production."""
    return _reason_option(_expect_option(command))


_port = click.IntRange(1, 65535)


@click.command()
@click.argument("sweep", required=False)
@click.option("--port", type=_port, show_default="5080, or any free port", help="Port for the web page.")
@click.option("--page-only", is_flag=True, help="Serve the web page without the MLflow UI.")
@click.option("--mlflow-port", type=_port, show_default="5000, or the next free port", help="Port for the MLflow UI.")
@click.option(
    "--mlflow-host",
    default="127.0.0.1",
    show_default=True,
    help="Address to serve the MLflow UI on. MLflow has no authentication, so anyone who can reach it can change its "
    "data.",
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
    """Serve a live web page for a sweep, plus the MLflow UI.

    Serves both until interrupted. The page shows the trials, best result, confirmation and logs of SWEEP as they
    change. It has buttons to pause, drain, cancel, resume and retry. Without SWEEP, it lists all sweeps. It can be
    opened only on this machine, and only at the printed URL, which contains a token.

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
@click.option("--name", help="Name to register the configuration under. Defaults to the sweep's name.")
@click.option("--trial", help="Promote the given trial (such as 3 or t003) instead of the confirmed winner.")
@click.option(
    "--force",
    is_flag=True,
    help="Promote any measured trial, even if it is not confirmed. The promotion is recorded as forced.",
)
@click.option(
    "--candidate",
    is_flag=True,
    help="Register the version under the alias `candidate` instead of `production`. Required for simulated sweeps.",
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
    """Register a sweep's confirmed winner as the production version.

    Registers the winner's configuration and measurements as a new version of NAME in the MLflow Model Registry. The new
    version gets the alias `production`; the version that it replaces gets the alias `previous`. Use NAME with
    `rollback` and `history`, and NAME@production with `show` and `verify`.

    Fails unless the winner was confirmed to be faster and its losses match the baseline's. Does nothing if the same
    configuration is already in production.

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
@click.option("--to", metavar="V", help="Version to restore. Defaults to the previous one.")
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
    """Restore the previous production version.

    Fails if that version's files have changed since it was registered. A rollback is recorded like a
    promotion and can itself be rolled back.

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
    """List past and current production versions, newest first.

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

    REFERENCE is NAME@ALIAS or NAME@VERSION, such as llama@production or llama@3.

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

    Compares knobs, workload, environment and measurements. A and B are each NAME@ALIAS or NAME@VERSION (such as
    llama@production or llama@3), or SWEEP:TRIAL for a trial.

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
    help="Maximum number of rounds. Stops earlier once the result is clear.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.05,
    show_default=True,
    help="Slowdown to tolerate, as a fraction.",
)
@click.option(
    "--ignore",
    "ignored",
    multiple=True,
    type=click.Choice(["driver", "library", "program", "hardware", "training", "speed", "loss"]),
    help="Kind of drift to ignore. Can be repeated.",
)
@click.option(
    "--address",
    metavar="HOST:PORT",
    help="Address of the Ray head node. Defaults to `$RAY_ADDRESS`, then to `cluster.address` in the sweep file.",
)
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
    """Re-measure a promoted configuration to detect drift.

    Re-measures NAME@production and its baseline on the current cluster, and compares the driver, libraries, speed,
    speed-up and per-step losses with those recorded at promotion. Each round runs both, so a temporary slowdown of
    the machine is not mistaken for drift. Rounds continue until a regression is confirmed or ruled out. The result is
    recorded in MLflow.

    \b
    Exit codes, for cron and CI:
      0    no drift: a slowdown beyond the tolerance is ruled out
      1    drift
      2    invalid usage, or the version does not exist or was altered
      3    inconclusive: too much noise, too few rounds, different hardware,
           or no cluster; prints how large a slowdown has been ruled out and
           how many more rounds are needed
      4    MLflow store or disk failure
      130  interrupted

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
@click.option("--format", "name", help="Export format to use (see `--formats`).")
@click.option("--formats", "lists", is_flag=True, help="List the export formats.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory to write the files to. By default, they are printed.",
)
@click.option(
    "--allow-lossy",
    is_flag=True,
    help="Export even if the framework cannot express every knob. Warnings list what is lost.",
)
@click.option(
    "--as",
    "form",
    type=click.Choice(["hook", "diff"]),
    default="hook",
    show_default=True,
    help="For knobs that your program has no option for, include the `hook` that sets them, or list the lines to add "
    "to your program (`diff`).",
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
    """Export a configuration as a command or framework config files.

    REFERENCE is NAME@ALIAS or NAME@VERSION (such as llama@production or llama@3), or SWEEP:TRIAL for a trial.

    For a sweep of your own training program, exports the training command, copies of its config files with the new
    settings, and a diff against your originals. This is `--format command`, the default for such sweeps.

    Exits with code 2 if the framework cannot express a knob. Warnings on stderr list knobs that were
    approximated or that your script must set itself.

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
    where = f"in {folder}" if folder else "in the directory with these files"
    form = "as a command" if made.format == COMMAND else f"for {made.format}"
    echo(f"{label} {form}; run {where}: {made.command}", err=True)


PROMOTING = (promote, rollback, history, show, diff, verify, export)
