"""The user's own knobs laid over a command: arguments, keys of configuration files, environment, placeholders."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from orchestrator.recipes.arguments import as_truth, either_dash, read, read_text, remove, write
from orchestrator.recipes.documents import ABSENT, edited, load, value_at
from orchestrator.recipes.training import Run
from orchestrator.scripts.placeholders import names_in
from orchestrator.scripts.script import Script
from orchestrator.space.knobs.own import OwnKnob, OwnScalar, argument_text
from trials.spec import Candidate


def is_placeholder(name: str, run: Run) -> bool:
    return name in names_in((*run.argv, *run.env.values(), *run.files.values()))


def is_settled(name: str, script: Script) -> bool:
    """Whether an own knob is laid over the command here; the others are the recipe's."""
    if not script.training.takes_own_names or name.startswith(("-", "$")) or ":" in name:
        return True
    return name in script.placeholders or any(knob.name == name and knob.flag for knob in script.own)


def with_own(script: Script, candidate: Candidate) -> Run:
    """The command with the candidate's own knobs; placeholders are left to be filled in.

    Raises:
        ConfigError: a configuration file that cannot be read, or a key that cannot be set in it.
    """
    run = script.run
    if candidate == script.unchanged:
        return run
    flags = {knob.name: knob.flag for knob in script.own}
    changes: dict[str, dict[str, OwnScalar]] = {}
    for choice in candidate.own:
        name = choice.name
        if name.startswith("$"):
            run = dataclasses.replace(run, env={**run.env, name[1:]: argument_text(choice.value)})
        elif ":" in name:
            file, _, key = name.partition(":")
            changes.setdefault(file, {})[key] = choice.value
        elif is_settled(name, script) and name not in script.placeholders:
            argv = _with_argument(run.argv, flags.get(name) or _argument_name(name), choice.value)
            run = dataclasses.replace(run, argv=argv)
    return _with_changes(run, changes) if changes else run


def said(knob: OwnKnob, run: Run) -> OwnScalar | None:
    """The one of a knob's values that the command has; None where it says something else, or nothing."""
    if knob.name.startswith("$"):
        given: object = run.env.get(knob.name[1:])
    elif ":" in knob.name:
        file, _, key = knob.name.partition(":")
        given = value_at(load(run.files[file], run.paths.get(file, file)), key) if file in run.files else None
        given = None if given is ABSENT else given
    else:
        given = _argument(knob.flag or _argument_name(knob.name), knob, run)
    return next((value for value in knob.values if _is_same(value, given)), None)


def filled_in(knob: OwnKnob, run: Run) -> str | None:
    """The placeholder in the value of the argument that a knob is; None where there is none."""
    if not knob.name.startswith("-"):
        return None
    return next(iter(names_in([read_text(run.argv, either_dash(knob.name)) or ""])), None)


def _argument_name(name: str) -> str:
    """The argument that a name stands for which is neither placeholder, key nor variable."""
    return name if name.startswith("-") else f"--{name}"


def _argument(name: str, knob: OwnKnob, run: Run) -> object:
    if all(isinstance(value, bool) for value in knob.values):
        found = as_truth(read(run.argv, either_dash(name, "switch")))
        return False if found is None else found
    return read(run.argv, either_dash(name))


def _is_same(value: OwnScalar, given: object) -> bool:
    if isinstance(given, str) and not isinstance(value, str):
        return argument_text(value) == given
    return given == value and isinstance(given, bool) == isinstance(value, bool)


def _with_argument(argv: tuple[str, ...], name: str, value: OwnScalar) -> tuple[str, ...]:
    """The words with an argument; true and false put it in without a value, or leave it out."""
    if value is False:
        return remove(argv, either_dash(name, "switch"))
    if value is True:
        return argv if read(argv, either_dash(name, "switch")) is True else write(argv, either_dash(name, "flag"), True)
    return write(argv, either_dash(name), argument_text(value))


def _with_changes(run: Run, changes: Mapping[str, Mapping[str, OwnScalar]]) -> Run:
    """The command with changed copies of files, which its words name by placeholders; other files stay in place."""
    texts = dict(run.files)
    for file, values in changes.items():
        texts[file] = edited(texts[file], run.paths.get(file, file), values)
    changed = [file for file in changes if texts[file] != run.files[file]]
    argv = tuple(_with_placeholder(word, run, changed) for word in run.argv)
    return dataclasses.replace(run, argv=argv, files=texts)


def _with_placeholder(word: str, run: Run, names: list[str]) -> str:
    """The word with the placeholder of a file in the place of its path."""
    head, equals, path = word.rpartition("=")
    for name in names:
        if name in run.paths and os.path.normpath(Path(run.cwd) / path) == run.paths[name]:
            return f"{head}{equals}{{{name}}}"
    return word
