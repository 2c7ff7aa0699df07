"""Support for user programs of a framework: reading their command, applying a candidate to it, and keeping trials from
leaving anything behind.

An *overlay* applies a candidate to the user's arguments and configuration files: its values are replaced or appended in
copies, and everything else stays unchanged. A field that already has the candidate's value is not written, so knobs
that a sweep does not set are inherited.
"""

from __future__ import annotations

import functools
import os.path
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from orchestrator.frameworks import arguments, documents
from orchestrator.frameworks.arguments import Argument, ArgumentValue, Words
from orchestrator.frameworks.spelling import (
    ABSENT,
    WORKLOAD,
    CommandSettings,
    Found,
    Note,
    Setting,
    SettingsBuilder,
    candidate_of,
    defaults,
    flatten,
    is_at_or_below,
)
from orchestrator.space.file_types import layers_of
from orchestrator.space.space import canonical_part, canonical_precision
from trials.script.command import Expected, LogFormat
from trials.spec import Candidate, LlamaModel, ScriptData, ScriptModel, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training command as written by the user."""

    argv: tuple[str, ...]
    cwd: str
    """Absolute path."""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Text of each configuration file by its name: files named in the sweep file, and those that
    :attr:`Training.find_files` found in the arguments."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Absolute path of each of these files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The settings of a command as knobs."""

    values: Mapping[str, Any]
    """Value by path (see :func:`~orchestrator.frameworks.spelling.flatten`) of the fields that the framework has and
    that were understood, including its defaults."""
    shape: LlamaModel | None = None
    """The decoder that is trained, if arguments or a ``config.json`` describe it."""
    num_layers: int | None = None
    seq_length: int | None = None
    global_batch_size: int | None = None
    """Samples per optimiser step, if the framework has a setting for it."""
    num_microbatches: int | None = None
    """Gradient accumulation steps, if the framework has a setting for these instead."""
    seed: int | None = None
    world_size: int | None = None
    """Ranks that its launcher starts, if it has one. Not a field of a candidate, because tune-cluster starts the
    ranks."""
    notes: tuple[Note, ...] = ()
    """What was not understood, and the consequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlayRequest:
    """The candidate to apply to a command, and its context."""

    candidate: Candidate
    reading: Reading
    """Values that the command sets itself."""
    named: frozenset[str] = frozenset()
    """Paths of fields that the sweep sets: written even if the command does not set them."""
    templated: frozenset[str] = frozenset()
    """Paths of fields that the command has placeholders for: already filled in, and not changed in another way."""
    world_size: int
    global_batch_size: int
    num_microbatches: int
    seed: int | None = None
    device: str | None = None
    """Kind of device that ranks train on, by torch's name: ``cpu``, ``cuda``; None if unknown."""

    def changes(self, path: str, value: Any) -> bool:
        """Whether ``value`` has to be written at ``path``: the command has another value, or none although the sweep
        sets the field."""
        if path in self.templated:
            return False
        if path in self.reading.values:
            return bool(self.reading.values[path] != value)
        return path in self.named


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """A command with a candidate applied."""

    argv: tuple[str, ...]
    """``{name}`` stands for the path of the copy of a file in ``files``."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of the user."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Text of the copies by name: all files whose placeholder is in ``argv``."""
    notes: tuple[Note, ...] = ()
    """Error: the candidate cannot be expressed here. Warnings are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How programs of one framework are read, changed and observed."""

    name: str
    title: str
    package: str | None
    """Distribution whose version matters, by its name for pip; None if there is none."""
    releases: str = ""
    """Versions that were tested or read, as a specifier: ``>=5.0,<6``; empty: any."""
    launcher: Literal["env", "own"] = "env"
    takes_launchers: bool = False
    """Whether overlays remove ``torchrun`` or ``accelerate launch`` from a command, and set the variables instead."""
    takes_custom_names: bool = False
    """Whether overlays write custom knobs that are named like arguments without dashes; otherwise they are written
    before."""
    log: LogFormat
    recognises: Callable[[Run], bool]
    """Whether a command looks like one of this framework."""
    find_files: Callable[[tuple[str, ...], str], Mapping[str, str]] = lambda argv, cwd: {}  # noqa: ARG005
    """(argv, cwd) -> absolute path by name of the configuration files in the arguments that an overlay may have to
    change."""
    read: Callable[[Run], Reading]
    overlay: Callable[[Run, OverlayRequest], Overlay]
    trial_mode: Callable[[Overlay, int], Overlay]
    """(overlay, last step) -> the same without saves, evaluation, trackers and hub, logging every step and ending at
    that step, if possible without changing the learning-rate schedule."""
    expected: Callable[[OverlayRequest], Expected]
    """The parts of the candidate that can be observed inside the program."""


@functools.lru_cache(maxsize=64)
def _parsed(text: str, file: str) -> Any:
    """The parsed content of a file, cached because the same files are read for every candidate."""
    return documents.load(text, file)


@dataclass(slots=True)
class Edit:
    """Arguments and files being edited; the user's stay unchanged."""

    argv: Words
    files: dict[str, str] = field(default_factory=dict)
    """Text by placeholder, before ``changes``."""
    names: dict[str, str] = field(default_factory=dict)
    """File name by placeholder; its suffix selects the format."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables in addition to those of the user."""
    notes: list[Note] = field(default_factory=list)
    command_env: Mapping[str, str] = field(default_factory=dict)
    """The user's variables."""
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values to write, by dotted key and file."""
    cwd: str = ""
    world_size: int | None = None
    """Ranks that the command's launcher starts, if known; None while a candidate, which has its own number, is
    written."""

    @classmethod
    def of_run(cls, run: Run, *, copies_files: bool = True) -> Edit:
        """The command, with a placeholder for every file that is copied."""
        argv = tuple(_placed(word, run) for word in run.argv) if copies_files else run.argv
        names = {name: Path(path).name for name, path in run.paths.items()}
        return cls(argv, dict(run.files), names, command_env=run.env, cwd=run.cwd)

    @classmethod
    def of_overlay(cls, overlay: Overlay) -> Edit:
        return cls(overlay.argv, dict(overlay.files), {}, dict(overlay.env), list(overlay.notes))

    def warn(self, knob: str, message: str) -> None:
        self.notes.append(Note(knob=knob, message=message, severity="warning"))

    def refuse(self, knob: str, message: str) -> None:
        self.notes.append(Note(knob=knob, message=message, severity="error"))

    def overlay(self) -> Overlay:
        words = (*self.argv, *self.env.values())
        placed = [name for name in self.files if any(f"{{{name}}}" in word for word in words)]
        texts = {name: functools.partial(self._text, name) for name in placed}
        return Overlay(argv=self.argv, env=self.env, files=Texts(texts), notes=tuple(self.notes))

    def file_name(self, name: str) -> str:
        return self.names.get(name, name)

    def _text(self, name: str) -> str:
        changes = self.changes.get(name)
        return documents.edited(self.files[name], self.file_name(name), changes) if changes else self.files[name]


class Texts(Mapping[str, str]):
    """Texts of files, written on request: most overlays are only checked, for a plan."""

    def __init__(self, makers: Mapping[str, Callable[[], str]]) -> None:
        self._makers = makers
        self._made: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class Options:
    """Arguments of an edit by name, with the spellings in a framework's table."""

    def __init__(self, edit: Edit, table: Mapping[str, Argument]) -> None:
        self._edit = edit
        self._table = table

    def get(self, name: str) -> ArgumentValue | None:
        return arguments.read(self._edit.argv, self._table[name])

    def text(self, name: str) -> str | None:
        return arguments.read_text(self._edit.argv, self._table[name])

    def is_on(self, name: str) -> bool:
        return bool(arguments.as_truth(self.get(name)))

    def put(self, name: str, value: Any) -> None:
        if self._table[name].takes == "list":
            given: ArgumentValue = tuple(map(str, value))
        else:
            given = value if isinstance(value, bool) else str(value)
        self._edit.argv = arguments.write(self._edit.argv, self._table[name], given)

    def drop(self, *names: str) -> None:
        self._edit.argv = arguments.remove(self._edit.argv, *(self._table[name] for name in names))


class EditedFile:
    """One configuration file of an edit, by dotted keys."""

    def __init__(self, edit: Edit, name: str) -> None:
        self._edit = edit
        self._name = name

    @property
    def exists(self) -> bool:
        return self._name in self._edit.files

    def get(self, key: str, default: Any = None) -> Any:
        """The current value of a key; ``default`` if missing."""
        found = self._value(key)
        return default if found is documents.ABSENT else found

    def has(self, key: str) -> bool:
        return self._value(key) is not documents.ABSENT

    def put(self, changes: Mapping[str, Any]) -> None:
        """Put values at keys; equal values keep their spelling."""
        for key, value in changes.items():
            if not self.has(key) or self.get(key) != value or type(self.get(key)) is not type(value):
                self._edit.changes.setdefault(self._name, {})[key] = value

    def drop(self, *keys: str) -> None:
        self.put(dict.fromkeys((key for key in keys if self.has(key)), documents.ABSENT))

    def _value(self, key: str) -> Any:
        if not self.exists:
            return documents.ABSENT
        changed = self._edit.changes.get(self._name, {})
        found = next((above for above in _upwards(key) if above in changed), None)
        if found is not None:
            return documents.value_at(changed[found], key[len(found) + 1 :])
        return documents.value_at(_parsed(self._edit.files[self._name], self._edit.file_name(self._name)), key)


def _upwards(key: str) -> Iterator[str]:
    """The key and those above it."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _placed(word: str, run: Run) -> str:
    """The word with its path replaced by the placeholder of the file."""
    head, mark, value = word.rpartition("=")
    for name, path in run.paths.items():
        for text in (word, value):
            if text and name in run.files and os.path.normpath(Path(run.cwd, text)) == os.path.normpath(path):
                return f"{{{name}}}" if text == word else f"{head}{mark}{{{name}}}"
    return word


def _below(paths: Iterable[str], *known: Mapping[str, Any]) -> Iterator[str]:
    """The paths, and the known ones below them."""
    for path in paths:
        yield path
        yield from (below for values in known for below in values if below.startswith(f"{path}."))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkTable:
    """The rows of one framework, for reading and changing commands."""

    rows: tuple[Setting, ...]
    """Rows of the layout come before those whose meaning depends on it."""
    command: Callable[[Edit], CommandSettings]
    """Its settings by name, which can be changed."""
    defaults: Mapping[str, Any]
    """The framework's value of settings that a command does not have; read like a setting, and not written."""
    model: Callable[[Edit, Found], LlamaModel | None]
    """The decoder; sets ``num_layers`` of what was found."""
    check: Callable[[Edit, OverlayRequest], None]
    open: Callable[[Run], Edit] = Edit.of_run
    """The command to read or change."""
    approximated: frozenset[str] = frozenset()
    """Fields for which a warning is enough if the framework uses other values."""

    def read(self, run: Run) -> Reading:
        """A command in our terms, including the framework's defaults."""
        edit = self.open(run)
        reading = self.reading(edit)
        return replace(reading, notes=tuple(dict.fromkeys([*edit.notes, *reading.notes])))

    def overlay(self, run: Run, request: OverlayRequest) -> Overlay:
        """The command with the candidate applied; errors among the notes list what could not be expressed."""
        edit = self.open(run)
        edit.world_size = None
        reading = self._lay(edit, request)
        self.check(edit, request)
        back = [note for note in reading.notes if note.severity == "error" or note not in request.reading.notes]
        noted = [note.knob for note in edit.notes if note.severity == "error" or note.knob in self.approximated]
        wrong = [note for note in contradictions(request, reading) if not any(touch(note.knob, k) for k in noted)]
        edit.notes = list(dict.fromkeys([*edit.notes, *back, *wrong]))
        return edit.overlay()

    def _lay(self, edit: Edit, request: OverlayRequest) -> Reading:
        """Write the changes, each row in full; return the command's resulting values."""
        requested, now = values_of(request.candidate), request
        for one in self.rows:
            paths = _below(one.paths, requested, now.reading.values)
            is_other = any(_changes(path, requested.get(path), request, now) for path in paths)
            if one.overlay == "written" and (is_other or _accumulates(one, now)):
                self._write(one, edit, now)
                now = replace(now, reading=_again(request, self.reading(edit)))
        counts = (now.reading.global_batch_size, now.reading.num_microbatches)
        if _batch(request, now.reading) or counts == (None, None):
            self._write_workload(_GLOBAL_BATCH, edit, now)
        if request.seed is not None and request.seed != request.reading.seed:
            self._write_workload("workload.seed", edit, request)
        return _again(request, self.reading(edit))

    def reading(self, edit: Edit) -> Reading:
        found = Found(self.command(edit), self.defaults, is_export=False)
        shape = self.model(edit, found)
        if any(note.severity == "error" for note in found.notes):
            return Reading(values={}, notes=tuple(found.notes))
        for one in self.rows:
            if one.overlay != "none":
                found.add(one.read(found))
        values = {path: value for path, value in found.fields.items() if not is_at_or_below(path, WORKLOAD)}
        return Reading(
            values=values,
            shape=shape,
            num_layers=found.num_layers,
            seq_length=found.fields.get("workload.seq_length"),
            global_batch_size=found.fields.get(_GLOBAL_BATCH),
            num_microbatches=found.num_microbatches,
            seed=found.fields.get("workload.seed"),
            world_size=edit.world_size,
            notes=tuple(dict.fromkeys(found.notes)),
        )

    def _write(self, one: Setting, edit: Edit, request: OverlayRequest) -> None:
        if not one.matters(request.candidate):
            return
        builder = builder_of(request)
        builder.command = command = self.command(edit)
        builder.changed = lambda path: request.changes(path, builder.values.get(path))
        one.write(builder)
        edit.notes += builder.notes
        command.drop(*builder.dropped)
        for name, value in builder.settings.items():
            if command.get(name) is not None or value != self.defaults.get(name, ABSENT):
                command.put({name: value})

    def _write_workload(self, path: str, edit: Edit, request: OverlayRequest) -> None:
        for one in self.rows:
            if path in one.paths and one.overlay == "written":
                self._write(one, edit, request)


_GLOBAL_BATCH = "workload.global_batch_size"


def _changes(path: str, value: Any, request: OverlayRequest, now: OverlayRequest) -> bool:
    """Whether a field has to be written: it differs now, or did before the command lost the setting."""
    is_gone = path in request.reading.values and path not in now.reading.values
    return (request if is_gone else now).changes(path, value)


def _accumulates(one: Setting, request: OverlayRequest) -> bool:
    """Whether a row has to write a number of accumulation steps other than the command's."""
    return _GLOBAL_BATCH in one.paths and request.reading.num_microbatches not in (None, request.num_microbatches)


def layers_in(request: OverlayRequest) -> int:
    """Number of layers of the model; if the command does not set it, the maximum number that the candidate
    recomputes."""
    recompute = request.candidate.recompute
    counts = [recompute.full, *(part.num_layers for part in recompute.selective)]
    return request.reading.num_layers or max((sum(map(sum, rows)) for rows in counts), default=0) or 1


def _again(request: OverlayRequest, now: Reading) -> Reading:
    """The current settings of the command; the model stays that of the user's command."""
    first, values = request.reading, dict(now.values)
    if now.num_layers is None:
        held = layers_of(request.candidate.layout, layers_in(request))
        values = {path: held if value == _ONE_LAYER else value for path, value in values.items()}
        parts = values.get("recompute.selective", ())
        if parts:
            values["recompute.selective"] = tuple(
                replace(part, num_layers=held) if part.num_layers == _ONE_LAYER else part for part in parts
            )
    return replace(now, values=values, shape=first.shape, num_layers=first.num_layers, seq_length=first.seq_length)


_ONE_LAYER = ((1,),)
"""All layers of a model with an unknown number of layers."""


def contradictions(request: OverlayRequest, back: Reading) -> list[Note]:
    """An error for every field of the candidate that has another value in the command, or none although the sweep sets
    it."""
    requested = values_of(_canonical(request.candidate))
    canonical = values_of(_canonical(candidate_of({**requested, **_of_candidate(back.values)})))
    wrong = {
        path: (requested.get(path, ABSENT), canonical.get(path, ABSENT))
        for path in sorted({*requested, *canonical})
        if _is_configured(path, back.values) and requested.get(path, ABSENT) != canonical.get(path, ABSENT)
        if path not in request.templated
    }
    notes = [_error(path, f"expected {a}, but the command sets {b}") for path, (a, b) in wrong.items()]
    notes += [
        _error(path, "this framework has no setting for it")
        for path, value in requested.items()
        if not _is_configured(path, back.values)
        and any(touch(path, name) for name in request.named)
        and value != defaults().get(path)
        and path not in (*_LEFT_OVER, *request.templated)
    ]
    return notes + _batch(request, back)


def _batch(request: OverlayRequest, back: Reading) -> list[Note]:
    """Whether the command trains with the requested batch."""
    if back.global_batch_size not in (None, request.global_batch_size):
        text = (
            f"expected a global batch size of {request.global_batch_size}, but the command sets "
            f"{back.global_batch_size}"
        )
        return [_error("micro_batch_size", text)]
    if back.num_microbatches not in (None, request.num_microbatches):
        text = f"expected {request.num_microbatches} accumulation steps, but the command sets {back.num_microbatches}"
        return [_error("micro_batch_size", text)]
    return []


_LEFT_OVER = ("layout.dp_replicate", "layout.dp_shard")
"""Degrees of which most frameworks derive one from the number of ranks and the other degrees."""
_ANYTHING = Workload(
    model=ScriptModel(recipe="custom", run=(), cwd="/"), data=ScriptData(), seq_length=1, global_batch_size=1
)


def values_of(candidate: Candidate) -> dict[str, Any]:
    """Value by path of a candidate's fields, without the custom knobs, which no framework's recipe covers."""
    return _of_candidate(flatten(candidate, _ANYTHING))


def _of_candidate(values: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in values.items() if path != "own" and not is_at_or_below(path, WORKLOAD)}


def _canonical(candidate: Candidate) -> Candidate:
    """The candidate in canonical form, as far as that does not depend on the model."""
    return Candidate(
        layout=canonical_part(candidate.layout),
        micro_batch_size=candidate.micro_batch_size,
        recompute=candidate.recompute,
        precision=canonical_precision(candidate.precision),
        loader=canonical_part(candidate.loader),
        kernels=candidate.kernels,
    )


def _is_configured(path: str, values: Mapping[str, Any]) -> bool:
    return path in values or any(is_at_or_below(known, path) for known in values)


def touch(one: str, other: str) -> bool:
    return is_at_or_below(one, other) or is_at_or_below(other, one)


def _error(knob: str, message: str) -> Note:
    return Note(knob=knob, message=message, severity="error")


# ---- settings of the recipe that exports ----


def builder_of(request: OverlayRequest) -> SettingsBuilder:
    """A draft for settings of the framework's exports, which have the same names and rules."""
    reading = request.reading
    model = ScriptModel(recipe="custom", run=(), cwd="/", num_layers=layers_in(request))
    workload = Workload(
        model=model,
        data=ScriptData(),
        seq_length=reading.seq_length or 1,
        global_batch_size=request.global_batch_size,
        seed=request.seed or 0,
    )
    values = {**values_of(request.candidate), "workload.seed": request.seed}
    return SettingsBuilder(request.candidate, workload, values)
