"""A command in the making: its arguments, its copies of configuration files, and what was noted on the way."""

from __future__ import annotations

import functools
import os.path
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.recipes import arguments, documents
from orchestrator.recipes.arguments import Argument, Given, Words
from orchestrator.recipes.base import Note
from orchestrator.recipes.training import Overlay, Run


@functools.lru_cache(maxsize=64)
def _parsed(text: str, file: str) -> Any:
    """What a file says; the same files are read for every candidate."""
    return documents.load(text, file)


@dataclass(slots=True)
class Edit:
    """Arguments and files that may be changed; the user's own stay as they are."""

    argv: Words
    files: dict[str, str] = field(default_factory=dict)
    """Text by placeholder, before ``changes``."""
    names: dict[str, str] = field(default_factory=dict)
    """File name by placeholder, whose suffix tells the format."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables beside those of the user's own."""
    notes: list[Note] = field(default_factory=list)
    given_env: Mapping[str, str] = field(default_factory=dict)
    """The user's own variables."""
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values by dotted key and file that are to be written."""

    @classmethod
    def of_run(cls, run: Run, *, copies_files: bool = True) -> Edit:
        """The command, with a placeholder for every file of which there are to be copies."""
        argv = tuple(_placed(word, run) for word in run.argv) if copies_files else run.argv
        names = {name: Path(path).name for name, path in run.paths.items()}
        return cls(argv, dict(run.files), names, given_env=run.env)

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
    """Texts of files that are written when somebody asks for them: most overlays are only judged, for a plan."""

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
    """Arguments of an edit by name, as a framework's table of them says how they are spelled."""

    def __init__(self, edit: Edit, table: Mapping[str, Argument]) -> None:
        self._edit = edit
        self._table = table

    def get(self, name: str) -> Given | None:
        return arguments.read(self._edit.argv, self._table[name])

    def text(self, name: str) -> str | None:
        return arguments.read_text(self._edit.argv, self._table[name])

    def is_on(self, name: str) -> bool:
        return bool(arguments.as_truth(self.get(name)))

    def put(self, name: str, value: Any) -> None:
        if self._table[name].takes == "list":
            given: Given = tuple(map(str, value))
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
        """The value at a key as it is by now; ``default`` where there is none."""
        found = self._value(key)
        return default if found is documents.ABSENT else found

    def has(self, key: str) -> bool:
        return self._value(key) is not documents.ABSENT

    def put(self, changes: Mapping[str, Any]) -> None:
        """Put values at keys; what a key says already stays as it is spelled."""
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
    """The word, with the placeholder of a file in the place of its path."""
    head, mark, value = word.rpartition("=")
    for name, path in run.paths.items():
        for text in (word, value):
            if text and name in run.files and os.path.normpath(Path(run.cwd, text)) == os.path.normpath(path):
                return f"{{{name}}}" if text == word else f"{head}{mark}{{{name}}}"
    return word
