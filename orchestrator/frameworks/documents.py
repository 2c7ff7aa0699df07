"""Reads and changes hand-written configuration files: JSON, YAML and TOML, with values at dotted keys.

``zero_optimization.stage`` is a key below another one, ``callbacks.0.every`` an item of a list; a key that contains
dots itself is found as it is. Unchanged values keep their order, and in YAML and TOML also their spelling and comments.
Every change is read back before it is returned.
"""

from __future__ import annotations

import io
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, Final

import tomlkit
import yaml
from ruamel.yaml import YAML
from ruamel.yaml.comments import Comment, CommentedMap, CommentedSeq
from ruamel.yaml.constructor import RoundTripConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.scalarstring import PlainScalarString, ScalarString, SingleQuotedScalarString
from ruamel.yaml.tag import Tag

from orchestrator.errors import ConfigError


class _Absent:
    """Absence of a value, as opposed to None."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT: Final = _Absent()
"""Value of missing keys; as a change, it removes the key."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's C parser if available; it is ten times as fast."""
_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\])*"|,(?=\s*[}\]])')


def load(text: str, file: str) -> Any:
    """The content of a file; an empty mapping if it is empty. The suffix selects the format; JSON if it is unknown.

    JSON may have comments and trailing commas, as in DeepSpeed.

    Raises:
        ConfigError: the file cannot be read; with file and line.
    """
    try:
        found = _LOADERS.get(_suffix(file), _load_json)(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"invalid JSON: {error.msg}", file=file, line=error.lineno, remedy="Fix the file.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"invalid TOML: {error}", file=file, remedy="Fix the file.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or "cannot be read"
        line = mark.line + 1 if mark else None
        raise ConfigError(f"invalid YAML: {what}", file=file, line=line, remedy="Fix the file.") from None
    return {} if found is None else found


def value_at(data: Any, key: str, default: Any = ABSENT) -> Any:
    """The value at a dotted key; ``default`` if missing."""
    if not key:
        return data
    for head, rest in _splits(data, key):
        return value_at(_child(data, head), rest, default)
    return default


def flat(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values except mappings, by dotted key."""
    for key, value in data.items() if isinstance(data, Mapping) else ():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from flat(value, path)
        else:
            yield path, value


def edited(text: str, file: str, changes: Mapping[str, Any]) -> str:
    """The text with these values at these dotted keys; missing parent keys are created.

    Raises:
        ConfigError: the file cannot be read, or a key in it cannot be set.
    """
    wanted = _copied(load(text, file))
    for key, value in changes.items():
        _set(wanted, key, value, file)
    if _is_same(wanted, load(text, file)):
        return text
    try:
        editor = _EDITORS.get(_suffix(file))
        made = dumped(wanted, file) if editor is None else editor(text, changes, file)
    except YAMLError:
        made = ""
    if not _says(made, file, wanted):
        keys = ", ".join(changes)
        raise ConfigError(f"{keys} cannot be changed here", file=file, remedy="Write the key with a plain value.")
    return made


def _says(text: str, file: str, wanted: Any) -> bool:
    try:
        return _is_same(load(text, file), wanted)
    except ConfigError:
        return False


def dumped(data: Any, file: str) -> str:
    """A new file with this content: JSON, or YAML by its suffix."""
    if _suffix(file) in (".yaml", ".yml"):
        text: str = yaml.safe_dump(data, sort_keys=False)
        return text
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


# ---- values at keys ----


def _splits(data: Any, key: str) -> Iterator[tuple[str, str]]:
    """Head and rest of a dotted key, for the longest existing head."""
    parts = key.split(".")
    for number in range(len(parts), 0, -1):
        head = ".".join(parts[:number])
        if _child(data, head) is not ABSENT:
            yield head, ".".join(parts[number:])
            return


def _child(data: Any, key: str) -> Any:
    if isinstance(data, Mapping):
        return data.get(key, ABSENT)
    if isinstance(data, list) and key.isdigit() and int(key) < len(data):
        return data[int(key)]
    return ABSENT


def _copied(data: Any) -> Any:
    """A copy of the data without shared parts, including those shared by aliases."""
    if isinstance(data, Mapping):
        return {key: _copied(value) for key, value in data.items()}
    return [_copied(value) for value in data] if isinstance(data, list | tuple) else data


def _is_same(one: Any, other: Any) -> bool:
    """Equality that distinguishes 1, 1.0 and true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and (one == other or one != one)


def _set(
    data: Any,
    key: str,
    value: Any,
    file: str,
    *,
    made: Callable[[Any], Any] = _copied,
    below: Callable[[Any], Any] = lambda child: child,
) -> None:
    """Put a value at a dotted key of ``data``, in place.

    Args:
        made: converts a value or new key to the form used in ``data``.
        below: returns a part of ``data`` that may be changed; None: it is replaced by a mapping.
    """
    head, rest = next(_splits(data, key), (key.partition(".")[0], key.partition(".")[2]))
    if not isinstance(data, dict | list) or (isinstance(data, list) and _child(data, head) is ABSENT):
        what = "a list without such a number" if isinstance(data, list) else "a value"
        raise ConfigError(f"the parent key is {what}", file=file, key=key, remedy="Use another key.")
    place: Any = int(head) if isinstance(data, list) else head
    child = _child(data, head)
    if rest:
        part = None if child is ABSENT else below(child)
        if part is None and value is ABSENT:
            return
        if part is not child:
            data[made(place) if child is ABSENT else place] = made({}) if part is None else part
        _set(data[place], rest, value, file, made=made, below=below)
    elif value is not ABSENT:
        data[made(place) if child is ABSENT else place] = made(value)
    elif child is not ABSENT:
        del data[place]


# ---- formats ----


def _suffix(file: str) -> str:
    return PurePath(file).suffix.lower()


def _load_json(text: str) -> Any:
    if not text.strip():
        return {}
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        plain = _COMMENT.sub(_unless_quoted, text)
        return json.loads(_TRAILING_COMMA.sub(_unless_quoted, plain))


def _unless_quoted(match: re.Match[str]) -> str:
    """The match if it is a string; otherwise only its line ends, so that line numbers stay correct."""
    return match[0] if match[0].startswith('"') else "\n" * match[0].count("\n")


def _load_yaml(text: str) -> Any:
    loader = _LOADER(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


_LOADERS: Mapping[str, Callable[[str], Any]] = {".yaml": _load_yaml, ".yml": _load_yaml, ".toml": tomllib.loads}


# ---- YAML ----


class _AsSpelled(VersionedResolver):
    """Reads every plain scalar as text: parsers disagree on ``off``, ``1e-5`` and ``0o17``."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is not ScalarNode:
            return super().resolve(kind, value, implicit)
        if implicit[0] and value in _TAGS:
            return Tag(suffix=f"tag:yaml.org,2002:{_TAGS[value]}")
        return super().resolve(kind, value, (False, True))


class _LastCounts(RoundTripConstructor):
    """Uses the last value of a duplicate key, as PyYAML does."""

    def check_mapping_key(self, *_: Any, **__: Any) -> bool:
        return True


_TAGS: Final = {"<<": "merge", "": "null"}
_MAPPING = re.compile(r"^[^\s#-][^\n]*:[ \t]*(?:#[^\n]*)?\n( +)[^\s#-]", re.MULTILINE)
_SEQUENCE = re.compile(r"^( *)[^\s#-][^\n]*:[ \t]*(?:#[^\n]*)?\n\1( *)- ", re.MULTILINE)
"""A key and the first line below it, which show the indentation of a file."""


def _edit_yaml(text: str, changes: Mapping[str, Any], file: str) -> str:
    editor = YAML()
    editor.Resolver = _AsSpelled
    editor.Constructor = _LastCounts
    editor.preserve_quotes = True
    editor.width = 2**31
    mapping, sequence = _MAPPING.search(text), _SEQUENCE.search(text)
    offset = len(sequence[2]) if sequence else 0
    editor.indent(mapping=len(mapping[1]) if mapping else 2, sequence=offset + 2, offset=offset)
    root = editor.load(text)
    head = text if root is None else ""
    root = CommentedMap() if root is None else _below(root)
    for key, value in changes.items():
        _set(root, key, value, file, made=_spelled, below=_below)
    made = io.StringIO()
    editor.dump(root, made)
    return f"{head.rstrip()}\n{made.getvalue()}" if head.strip() else made.getvalue()


def _spelled(value: Any) -> Any:
    """A value for the tree: scalars as the text that PyYAML reads as this value."""
    if isinstance(value, Mapping):
        return CommentedMap({_spelled(key): _spelled(below) for key, below in value.items()})
    if isinstance(value, list | tuple):
        sequence = CommentedSeq(map(_spelled, value))
        sequence.fa.set_flow_style()
        return sequence
    node = yaml.SafeDumper("").represent_data(value)  # type: ignore[arg-type]
    is_plain = yaml.SafeLoader("").resolve(yaml.ScalarNode, node.value, (True, False)) == node.tag  # type: ignore[no-untyped-call]
    # A plain str would take over the quotes of the value it replaces.
    return PlainScalarString(node.value) if is_plain else SingleQuotedScalarString(node.value)


def _below(node: Any) -> Any:
    """A collection that can be changed. One shared by an alias or merge is copied, so that the change affects one
    place. None: a scalar."""
    if not isinstance(node, CommentedMap | CommentedSeq):
        return None
    is_shared = node.anchor.value is not None or (isinstance(node, CommentedMap) and node.merge)
    return _unshared(node) if is_shared else node


def _unshared(node: Any) -> Any:
    """A copy without anchors, aliases and merges."""
    if isinstance(node, CommentedMap):
        copied: Any = CommentedMap((key, _unshared(value)) for key, value in node.items())
    elif isinstance(node, CommentedSeq):
        copied = CommentedSeq(map(_unshared, node))
    else:
        return type(node)(node) if isinstance(node, ScalarString) else node
    setattr(copied, Comment.attrib, node.ca)
    if node.fa.flow_style():
        copied.fa.set_flow_style()
    return copied


# ---- TOML ----


def _edit_toml(text: str, changes: Mapping[str, Any], file: str) -> str:
    root = tomlkit.parse(text)
    for key, value in changes.items():
        try:
            _set(root, key, value, file)
        except (TypeError, ValueError):
            raise ConfigError(f"{value!r} is not a valid TOML value", remedy="Use another value.") from None
    return tomlkit.dumps(root)


_EDITORS: Mapping[str, Callable[[str, Mapping[str, Any], str], str]] = {
    ".yaml": _edit_yaml,
    ".yml": _edit_yaml,
    ".toml": _edit_toml,
}
