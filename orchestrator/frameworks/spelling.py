"""The spelling of a candidate's fields in frameworks: rows that write a configuration as a framework's settings, and
read it back without loss.

A framework is a table of :class:`Setting` rows. Each names the fields it covers (dotted paths: :func:`flatten`), writes
them as the framework's settings, and reads them back. What a framework cannot express becomes a :class:`Note`. A test
ensures that every field has a row in every framework, and :func:`audited` reads every export back and adds a note for
each difference from the request.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from trials.spec import Candidate, Counts, HuggingFaceModel, PythonModel, ScriptModel, UserModel, Workload

WORKLOAD = "workload"


def flatten(candidate: Candidate, workload: Workload) -> dict[str, Any]:
    """Value by path: ``layout.tp``, ``precision.loss_scale.initial``, ``workload.model.llama.hidden_size``.

    The path of a field with several types ends in the kind of the type, which also has a value of its own:
    ``workload.model.kind``. A missing part, such as the loss scale of bfloat16, has no paths.
    """
    return {**_flatten("", candidate), **_flatten(WORKLOAD, workload)}


@functools.cache
def defaults() -> Mapping[str, Any]:
    """Value by path of a candidate with default fields."""
    return types.MappingProxyType(_flatten("", Candidate()))


def candidate_of(values: Mapping[str, Any]) -> Candidate:
    """The candidate with these values; other paths have their defaults."""
    candidate: Candidate = _build("", Candidate, values)
    return candidate


def is_at_or_below(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(ancestor + ".")


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


@functools.cache
def alternatives(hint: Any) -> tuple[type, ...]:
    """The dataclasses that a field may contain."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(option for option in options if dataclasses.is_dataclass(option) and isinstance(option, type))


@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    """Type of every field, without class variables."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _flatten(prefix: str, value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, hint in field_types(value.__class__).items():
        path, part, options = join(prefix, name), getattr(value, name), alternatives(hint)
        if not options:
            found[path] = part
        elif len(options) > 1:
            found[f"{path}.kind"] = part.kind
            found |= _flatten(f"{path}.{part.kind}", part)
        elif part is not None:
            found |= _flatten(path, part)
    return found


def _build(prefix: str, cls: type, values: Mapping[str, Any]) -> Any:
    """Build ``cls`` from the values below ``prefix``; each field of a candidate has only one type."""
    given: dict[str, Any] = {}
    for name, hint in field_types(cls).items():
        path, options = join(prefix, name), alternatives(hint)
        if not options and path in values:
            given[name] = values[path]
        elif options and any(is_at_or_below(known, path) for known in values):
            given[name] = _build(path, options[0], values)
    return cls(**given)


Severity = Literal["warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Fields at or below the path ``knob`` that the framework cannot express.

    An error means that the training would change; a warning, that something was approximated or left to the framework.
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
    """Settings of exported files: value by path, for the fields that the framework can express."""

    values: Mapping[str, Any]

    @property
    def candidate(self) -> Candidate:
        return candidate_of(self.values)


class CommandSettings(Protocol):
    """What a command contains, by the names of a framework's settings."""

    def get(self, name: str, /, default: Any = None) -> Any: ...

    def put(self, values: Mapping[str, Any]) -> None: ...

    def drop(self, *names: str) -> None: ...


@dataclass(slots=True)
class SettingsBuilder:
    """Settings being written: an export's files, or the changes of an overlay to a command."""

    candidate: Candidate
    workload: Workload
    values: Mapping[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    command: CommandSettings | None = None
    """The command that an overlay changes; None for an export."""
    changed: Callable[[str], bool] = lambda path: True  # noqa: ARG005
    """Whether the field at a path differs from the command's; always true for an export."""
    dropped: list[str] = field(default_factory=list)

    @property
    def is_export(self) -> bool:
        return self.command is None

    def current(self, name: str) -> Any:
        """The command's value of a setting; None for an export."""
        return self.command.get(name) if self.command is not None else None

    def drop(self, *names: str) -> None:
        """Settings that must not be in the command."""
        self.dropped += names

    def warn(self, knob: str, message: str) -> None:
        self.note("warning", knob, message)

    def refuse(self, knob: str, message: str) -> None:
        self.note("error", knob, message)

    def note(self, severity: Severity, knob: str, message: str) -> None:
        self.notes.append(Note(knob=knob, message=message, severity=severity))


Settings = Mapping[str, Any]
"""Values of settings by the framework's names."""
_NO_DEFAULTS: Settings = types.MappingProxyType({})
_MISSING = object()


class Found(Mapping[str, Any]):
    """Settings of an export's files or of a command while rows read them: values by the framework's names, including
    its defaults, and what was read so far."""

    def __init__(
        self, given: Mapping[str, Any] | CommandSettings, defaults: Settings = _NO_DEFAULTS, *, is_export: bool
    ) -> None:
        self.command = given
        self._defaults = defaults
        self.is_export = is_export
        self.fields: dict[str, Any] = {}
        """Value by path."""
        self.notes: list[Note] = []
        self.num_layers: int | None = None
        self.held: Counts | None = None
        """Layers of every chunk and stage, where known."""
        self.num_microbatches: int | None = None

    def __getitem__(self, name: str) -> Any:
        value = self.command.get(name, _MISSING)
        if value is not _MISSING:
            return value
        return self._defaults[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.command if isinstance(self.command, Mapping) else ())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, values: Mapping[str, Any]) -> None:
        """Add values by path; a value of None could not be understood and is omitted."""
        self.fields |= {path: value for path, value in values.items() if value is not None}

    def is_on(self, name: str) -> bool:
        value = self.get(name, False)
        return value if isinstance(value, bool) else str(value).lower() in ("true", "1", "yes", "y", "t")

    def whole(self, knob: str, name: str, default: int | None = None) -> int | None:
        """A whole number; None for a placeholder, or for a non-number, which is noted."""
        return self.number(knob, name, self.get(name), default)

    def number(self, knob: str, name: str, value: Any, default: int | None = None) -> int | None:
        """The same for a value that the note calls ``name``."""
        if value is None or value == "":
            return default
        try:
            return int(str(value).replace("_", ""))
        except ValueError:
            if "{" not in str(value):
                self.unread(knob, f"{name} {value}")
            return None

    def unread(self, knob: str, what: str) -> None:
        """Note that ``what`` was not understood: the field keeps the command's value."""
        self.warn(knob, f"not recognized, unchanged: {what}")

    def warn(self, knob: str, message: str) -> None:
        self.notes.append(Note(knob=knob, message=message, severity="warning"))

    def refuse(self, knob: str, message: str) -> None:
        self.notes.append(Note(knob=knob, message=message, severity="error"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A row of a framework's table: the spelling of some fields. ``names`` are all settings that ``write`` may set."""

    paths: tuple[str, ...]
    names: tuple[str, ...]
    write: Callable[[SettingsBuilder], None]
    read: Callable[[Found], Mapping[str, Any]]
    overlay: Literal["none", "read", "written"] = "none"
    """Whether overlays also read and write the row, or only read it; ``none``: it is only for exports."""
    matters: Callable[[Candidate], bool] = lambda candidate: True  # noqa: ARG005
    """Whether the fields have a meaning; if not, an overlay leaves them unchanged."""


def row(
    paths: str | Iterable[str],
    names: str | Iterable[str],
    write: Callable[[SettingsBuilder], None],
    read: Callable[[Found], Mapping[str, Any]],
    **options: Any,
) -> Setting:
    """Fields with the same spelling in exports and overlays."""
    return Setting(
        paths=(paths,) if isinstance(paths, str) else tuple(paths),
        names=(names,) if isinstance(names, str) else tuple(names),
        write=write,
        read=read,
        **{"overlay": "written", **options},
    )


def number(path: str, name: str, **options: Any) -> Setting:
    """A whole number of the same meaning."""

    def write(builder: SettingsBuilder) -> None:
        builder.settings[name] = builder.values[path]

    return row(path, name, write, lambda found: {path: found.whole(path, name)}, **options)


def switch(path: str, name: str, **options: Any) -> Setting:
    """A truth value of the same meaning."""

    def write(builder: SettingsBuilder) -> None:
        builder.settings[name] = builder.values[path]

    return row(path, name, write, lambda found: {path: found.is_on(name)}, **options)


def option(path: str, name: str, *, to: Callable[[Any], Any] = lambda value: value, of: Any = None) -> Setting:
    """One field, one setting: ``to`` converts to the framework's value, ``of`` back to ours.

    A field without a value here (of a missing part) writes nothing.
    """

    def write(builder: SettingsBuilder) -> None:
        if path in builder.values:
            builder.settings[name] = to(builder.values[path])

    def read(settings: Settings) -> dict[str, Any]:
        return {path: of(settings[name]) if of else settings[name]} if name in settings else {}

    return Setting(paths=(path,), names=(name,), write=write, read=read)


def fixed(name: str, value: Any) -> Setting:
    """A setting that every export needs, because the framework's default differs from what the runner always does."""

    def write(builder: SettingsBuilder) -> None:
        builder.settings[name] = value

    return Setting(paths=(), names=(name,), write=write, read=lambda _: {})


def lacking(
    path: str, message: str, *, means: Any = None, severity: Severity = "warning", in_overlays: bool = False
) -> Setting:
    """A field, or a part with all its fields, that has no setting in the framework.

    The framework always does ``means`` (by default our default, or nothing for an optional part); any other value is
    noted. ``in_overlays``: readings of commands contain it as well.
    """
    only = defaults().get(path) if means is None else means

    def write(builder: SettingsBuilder) -> None:
        if any(value != only for known, value in builder.values.items() if is_at_or_below(known, path)):
            builder.note(severity, path, message)

    return Setting(
        paths=(path,),
        names=(),
        write=write,
        read=lambda _: {} if only is None else {path: only},
        overlay="read" if in_overlays else "none",
    )


def custom(
    paths: Iterable[str],
    names: Iterable[str],
    write: Callable[[SettingsBuilder], None],
    read: Callable[[Found], Mapping[str, Any]] = lambda _: {},
    overlay: Literal["none", "read"] = "none",
) -> Setting:
    """Several fields, or several settings, that belong together, in exports."""
    return Setting(paths=tuple(paths), names=tuple(names), write=write, read=read, overlay=overlay)


def _refuse_scripts(builder: SettingsBuilder) -> None:
    if builder.candidate.own:
        builder.refuse("own", "custom knobs apply only to custom programs")
    if isinstance(builder.workload.model, ScriptModel):
        builder.refuse("workload.model.script", "a custom program is exported as its command with its files")


SCRIPTS = custom(("own", "workload.model.script", "workload.data.script"), (), _refuse_scripts)
"""Setting of every recipe: a custom program cannot be rewritten for a framework."""


def _name_code(builder: SettingsBuilder) -> None:
    model = builder.workload.model
    if isinstance(model, PythonModel):
        builder.warn("workload.model.python", f"built by your code: {model.model} in {model.cwd}")
        builder.warn("workload.data.python", "read by your code")
    if isinstance(model, HuggingFaceModel):
        builder.warn("workload.model.huggingface", "built by transformers from the config.json of the sweep")
    if isinstance(model, UserModel) and builder.workload.seq_length > 1:
        builder.warn("workload.seq_length", f"samples have {builder.workload.seq_length} tokens, as in your data")


MODULES = custom(("workload.model.python", "workload.model.huggingface", "workload.data.python"), (), _name_code)
"""Setting of every recipe: the code of a custom module must be available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The format of one framework: ``render`` writes the files of a finished draft, ``load`` reads them."""

    name: str
    """Name of the format, for ``--format``."""
    title: str
    """The framework's own name."""
    settings: tuple[Setting, ...]
    render: Callable[[SettingsBuilder], Mapping[str, str]]
    load: Callable[[Mapping[str, str]], Settings]
    command: Callable[[SettingsBuilder], str]
    defaults: Settings = field(default_factory=dict)
    """The framework's behaviour without a setting."""

    @property
    def all_settings(self) -> tuple[Setting, ...]:
        return (*self.settings, SCRIPTS, MODULES)

    def export(self, candidate: Candidate, workload: Workload) -> Export:
        """Files and command for one configuration, with notes on what they do not express."""
        builder = SettingsBuilder(candidate, workload, flatten(candidate, workload))
        for setting in self.all_settings:
            setting.write(builder)
        return Export(
            format=self.name, files=self.render(builder), command=self.command(builder), notes=tuple(builder.notes)
        )

    def parse(self, files: Mapping[str, str]) -> Parsed:
        """Read the files of an :meth:`export` back."""
        found = Found(self.load(files), self.defaults, is_export=True)
        for setting in self.settings:
            found.fields |= setting.read(found)
        return Parsed(values=found.fields)


def audited(recipe: Recipe, candidate: Candidate, workload: Workload) -> Export:
    """The export, with an error for every field that is lost when it is read back and that no note mentions."""
    export = recipe.export(candidate, workload)
    parsed = recipe.parse(export.files).values
    extra = [
        Note(knob=path, message=_difference(requested, parsed_values), severity="error")
        for path, (requested, parsed_values) in differences(flatten(candidate, workload), parsed).items()
        if not any(is_at_or_below(path, note.knob) for note in export.notes)
    ]
    return dataclasses.replace(export, notes=(*export.notes, *extra))


ABSENT = "nothing"
"""Value, in messages, of a path that only one side has."""


def differences(requested: Mapping[str, Any], parsed_values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What was requested and what was written instead, by path; a missing field of a candidate has its default."""
    known = {**defaults(), **parsed_values}
    return {
        path: (requested.get(path, ABSENT), known.get(path, ABSENT))
        for path in sorted({*requested, *parsed_values})
        if requested.get(path, ABSENT) != known.get(path, ABSENT)
    }


def _difference(requested: Any, parsed_values: Any) -> str:
    return f"the configuration has {requested}, but these files set {parsed_values}"


def comments(notes: Iterable[Note], mark: str = "#") -> list[str]:
    """Notes as comment lines at the start of a file."""
    return [f"{mark} {' '.join(str(note).split())}" for note in notes]


def tree(settings: Settings, file: str) -> dict[str, Any]:
    """The nested mapping for ``file``."""
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
    """Settings by name from a nested mapping read from ``file``: the inverse of :func:`tree`."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            found |= settings_of(file, value, path)
        else:
            found[f"{file}:{path}"] = value
    return found
