"""What recipes are made of: settings that write a configuration as a framework's files and read it back, nothing lost.

A recipe is a table of :class:`Setting` objects. Each names the fields it speaks for (paths as in
:func:`orchestrator.recipes.fields.flatten`), writes them as the framework's settings, and reads them back. What a
framework cannot say becomes a :class:`Note`. Two things make sure of that: a test that every field there is has a
setting in every recipe, and :func:`audited`, which reads every export back and adds a note wherever it says something
else than what was asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.recipes.fields import candidate_of, defaults, flatten, is_at_or_below
from trials.spec import Candidate, HuggingFaceModel, OwnModel, PythonModel, ScriptModel, Workload

Severity = Literal["warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What the framework cannot say of the fields at or below the path ``knob``.

    An error changes what is trained or how; a warning says what was approximated, or left to the framework.
    """

    knob: str
    message: str
    severity: Severity

    def __str__(self) -> str:
        return f"{self.severity}: {self.knob}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Configuration for one framework: text by file name, and the command that starts training with it."""

    format: str
    files: Mapping[str, str]
    command: str
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What exported files say: value by path, for the fields that the framework can express."""

    values: Mapping[str, Any]

    @property
    def candidate(self) -> Candidate:
        return candidate_of(self.values)


@dataclass(slots=True)
class Draft:
    """An export in the making: what is asked for, and what has been written so far."""

    candidate: Candidate
    workload: Workload
    values: Mapping[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def warn(self, knob: str, message: str) -> None:
        self.notes.append(Note(knob=knob, message=message, severity="warning"))

    def refuse(self, knob: str, message: str) -> None:
        self.notes.append(Note(knob=knob, message=message, severity="error"))

    def note(self, severity: Severity, knob: str, message: str) -> None:
        self.notes.append(Note(knob=knob, message=message, severity=severity))


Settings = Mapping[str, Any]
"""Values of settings by the framework's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a framework says some fields; ``names`` are all settings that ``write`` may set."""

    paths: tuple[str, ...]
    names: tuple[str, ...]
    write: Callable[[Draft], None]
    read: Callable[[Settings], Mapping[str, Any]]


def option(path: str, name: str, *, to: Callable[[Any], Any] = lambda value: value, of: Any = None) -> Setting:
    """One field, one setting: ``to`` makes the framework's value, ``of`` makes ours again.

    A field without a value here (of an absent part) writes nothing.
    """

    def write(draft: Draft) -> None:
        if path in draft.values:
            draft.settings[name] = to(draft.values[path])

    def read(settings: Settings) -> dict[str, Any]:
        return {path: of(settings[name]) if of else settings[name]} if name in settings else {}

    return Setting(paths=(path,), names=(name,), write=write, read=read)


def fixed(name: str, value: Any) -> Setting:
    """A setting that every export needs: the runner always works so, and the framework's default differs."""

    def write(draft: Draft) -> None:
        draft.settings[name] = value

    return Setting(paths=(), names=(name,), write=write, read=lambda _: {})


def lacking(path: str, message: str, *, means: Any = None, severity: Severity = "warning") -> Setting:
    """A field, or a part with all its fields, that the framework has no setting for.

    The framework always does ``means`` (by default our default, or nothing for an optional part); anything else is
    noted.
    """
    only = defaults().get(path) if means is None else means

    def write(draft: Draft) -> None:
        if any(value != only for known, value in draft.values.items() if is_at_or_below(known, path)):
            draft.note(severity, path, message)

    return Setting(paths=(path,), names=(), write=write, read=lambda _: {} if only is None else {path: only})


def custom(
    paths: Iterable[str],
    names: Iterable[str],
    write: Callable[[Draft], None],
    read: Callable[[Settings], Mapping[str, Any]] = lambda _: {},
) -> Setting:
    """Several fields, or several settings, that belong together."""
    return Setting(paths=tuple(paths), names=tuple(names), write=write, read=read)


def _refuse_scripts(draft: Draft) -> None:
    if draft.candidate.own:
        draft.refuse("own", "knobs of one's own belong to one's own program")
    if isinstance(draft.workload.model, ScriptModel):
        draft.refuse("workload.model.script", "the program is one's own: its export is the command with its files")


SCRIPTS = custom(("own", "workload.model.script", "workload.data.script"), (), _refuse_scripts)
"""Setting of every recipe: a program of the user's own is not written anew for any framework."""


def _name_code(draft: Draft) -> None:
    model = draft.workload.model
    if isinstance(model, PythonModel):
        draft.warn("workload.model.python", f"your own code builds it: {model.model} in {model.cwd}")
        draft.warn("workload.data.python", "your own code reads it")
    if isinstance(model, HuggingFaceModel):
        draft.warn("workload.model.huggingface", "transformers builds it, from the config.json of the sweep")
    if isinstance(model, OwnModel) and draft.workload.seq_length > 1:
        draft.warn("workload.seq_length", f"samples have {draft.workload.seq_length} tokens, as your data gives them")


MODULES = custom(("workload.model.python", "workload.model.huggingface", "workload.data.python"), (), _name_code)
"""Setting of every recipe: the code of a module of the user's has to be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One framework's format: ``render`` writes the files of a finished draft, ``load`` reads them."""

    name: str
    """Name of the format, for ``--format``."""
    title: str
    """The framework's own name."""
    settings: tuple[Setting, ...]
    render: Callable[[Draft], Mapping[str, str]]
    load: Callable[[Mapping[str, str]], Settings]
    command: Callable[[Draft], str]

    @property
    def all_settings(self) -> tuple[Setting, ...]:
        return (*self.settings, SCRIPTS, MODULES)

    def export(self, candidate: Candidate, workload: Workload) -> Export:
        """Files and command for one configuration, with notes on what they do not say."""
        draft = Draft(candidate, workload, flatten(candidate, workload))
        for setting in self.all_settings:
            setting.write(draft)
        return Export(format=self.name, files=self.render(draft), command=self.command(draft), notes=tuple(draft.notes))

    def parse(self, files: Mapping[str, str]) -> Parsed:
        """Read files back that :meth:`export` made."""
        settings = self.load(files)
        values: dict[str, Any] = {}
        for setting in self.settings:
            values |= setting.read(settings)
        return Parsed(values=values)


def audited(recipe: Recipe, candidate: Candidate, workload: Workload) -> Export:
    """The export, with an error for every field that reading it back does not give and that no note speaks of."""
    export = recipe.export(candidate, workload)
    parsed = recipe.parse(export.files).values
    extra = [
        Note(knob=path, message=_difference(asked, said), severity="error")
        for path, (asked, said) in differences(flatten(candidate, workload), parsed).items()
        if not any(is_at_or_below(path, note.knob) for note in export.notes)
    ]
    return dataclasses.replace(export, notes=(*export.notes, *extra))


ABSENT = "nothing"
"""Value of a path that one side does not have, in messages."""


def differences(asked: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What was asked for and what was said instead, by path; a candidate's field that is not said is the default."""
    known = {**defaults(), **said}
    return {
        path: (asked.get(path, ABSENT), known.get(path, ABSENT))
        for path in sorted({*asked, *said})
        if asked.get(path, ABSENT) != known.get(path, ABSENT)
    }


def _difference(asked: Any, said: Any) -> str:
    return f"asked for {asked}, but these files say {said}"


def comments(notes: Iterable[Note], mark: str = "#") -> list[str]:
    """Notes as comment lines at the head of a file."""
    return [f"{mark} {' '.join(str(note).split())}" for note in notes]


def tree(settings: Settings, file: str) -> dict[str, Any]:
    """The nested mapping that goes into ``file``."""
    root: dict[str, Any] = {}
    for name, value in settings.items():
        owner, _, path = name.partition(":")
        if owner == file:
            *above, last = path.split(".")
            branch = root
            for key in above:
                branch = branch.setdefault(key, {})
            branch[last] = value
    return root


def settings_of(file: str, content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by name of a nested mapping read from ``file``: the inverse of :func:`tree`."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            found |= settings_of(file, value, path)
        else:
            found[f"{file}:{path}"] = value
    return found
