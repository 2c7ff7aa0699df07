"""The command that writes a configuration as another framework's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.options import home_option, json_option, print_result

if TYPE_CHECKING:
    from orchestrator.promotion.references import VersionDescription
    from orchestrator.recipes import Export

COMMAND = "command"
"""Format of a training program of the user's own: its own command."""


@click.command()
@click.argument("reference", required=False)
@click.option("--format", "name", help="Framework to write for; --formats lists them.")
@click.option("--formats", "lists", is_flag=True, help="List the formats there are.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for the files; made if need be.")
@click.option("--allow-lossy", is_flag=True, help="Write also what the framework cannot do like this; notes say what.")
@home_option
@click.option("--tracking-uri", help="MLflow store to look in, if it is not the one in --home.")
@json_option
def export(
    reference: str | None,
    name: str | None,
    lists: bool,
    out: Path | None,
    allow_lossy: bool,
    home: Path,
    tracking_uri: str | None,
    as_json: bool,
) -> None:
    """Write NAME@production, or trial SWEEP:TRIAL, as a training framework's configuration.

    A training program of your own is written as its own command, with copies of its configuration files and the diff
    against yours (--format command, the default for these).

    What the framework cannot express ends the command with exit code 2, or stands on stderr as a warning where it was
    only approximated or is left to your script.

    \b
    Examples:
      tune-cluster export llama-quickstart@production --format deepspeed --out train
      tune-cluster export quickstart:winner --format accelerate
      tune-cluster export my-script@production --out train
    """
    from orchestrator import recipes

    if lists:
        _print_formats(as_json)
        return
    if reference is None:
        raise click.UsageError("say what to export and how: NAME@production --format FORMAT, or --formats for a list")
    if name not in (None, COMMAND):
        recipes.recipe(name)

    from orchestrator.promotion import references
    from orchestrator.sweep.home import Home

    described = references.describe(reference, Home(home), tracking_uri)
    made = _with_variables(_made(described, name, allow_lossy=allow_lossy), described)
    written = [] if out is None else _write(made, out)
    if as_json:
        print_result(
            True,
            {"exported": described.label, "verdict": described.verdict, **_to_json(made), "written": written},
            lambda: None,
        )
        return
    _tell(made, described.label, out)
    click.echo(f"how it was proven: {described.verdict}", err=True)


def _made(described: VersionDescription, name: str | None, *, allow_lossy: bool) -> Export:
    """The export in that format; a training program of the user's own is exported as its own command by default."""
    from orchestrator import recipes
    from orchestrator.errors import ConfigError
    from orchestrator.scripts.artifact import artifact
    from orchestrator.scripts.overlay import START

    script = described.script
    if name == COMMAND and script is None:
        raise ConfigError(f"{described.label} is no training program of your own", remedy="Name a framework's format.")
    if name is None and script is None:
        raise click.UsageError("say how to export it: --format FORMAT, or --formats for a list")
    if script is None or name not in (None, COMMAND):
        return recipes.export(str(name), described.candidate, described.workload, allow_lossy=allow_lossy)
    made = artifact(script, described.candidate, described.label)
    notes = tuple(recipes.Note(knob=script.training.name, message=note, severity="warning") for note in made.notes)
    return recipes.Export(format=COMMAND, files=made.files, command=f"sh {START}", notes=notes)


def _with_variables(made: Export, described: VersionDescription) -> Export:
    """The export with the environment variables that ranks of its sweep had."""
    from orchestrator.recipes.variables import with_exports

    return replace(made, files=with_exports(made.files, described.fingerprint))


def _print_formats(as_json: bool) -> None:
    from orchestrator import recipes

    titles = {name: recipes.recipe(name).title for name in recipes.FORMATS}
    print_result(as_json, titles, lambda: "\n".join(f"{name:<12} {title}" for name, title in titles.items()))


def _to_json(made: Export) -> dict[str, Any]:
    notes = [{"severity": note.severity, "knob": note.knob, "message": note.message} for note in made.notes]
    return {"format": made.format, "command": made.command, "files": dict(made.files), "notes": notes}


def _write(made: Export, folder: Path) -> list[str]:
    """Raises ConfigError, before anything is written, where a file of that name says something else."""
    from orchestrator.errors import ConfigError
    from trials.files import write_atomically

    for name, text in made.files.items():
        path = folder / name
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise ConfigError(f"{path} is there, with other content", remedy="Name another folder, or move it away.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in made.files.items():
        write_atomically(folder / name, [text.encode()])
    return [str(folder / name) for name in made.files]


def _tell(made: Export, label: str, folder: Path | None) -> None:
    """Files on stdout, unless they went into a folder; everything else on stderr."""
    if folder is None:
        for name, text in made.files.items():
            click.echo(f"==> {name} <==\n{text}" if len(made.files) > 1 else text, nl=len(made.files) > 1)
    else:
        click.echo("\n".join(str(folder / name) for name in made.files))
    for note in made.notes:
        click.echo(str(note), err=True)
    where = f"in {folder}" if folder else "beside the files"
    form = "as its own command" if made.format == COMMAND else f"for {made.format}"
    click.echo(f"{label} {form}; start it {where} with: {made.command}", err=True)


COMMANDS = (export,)
