"""Reads and changes configuration files as people write them: JSON, YAML, TOML, with values at dotted keys.

``zero_optimization.stage`` is a key below another, ``callbacks.0.every`` counts in a list, and a key that has
dots itself is found as it is. What is not changed keeps its value and its order: in YAML also its spelling, though not
its comments and anchors; in TOML every line. Every change is read back before it is given.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, Final

import yaml

from orchestrator.errors import ConfigError


class _Absent:
    """No value at all, which is not None."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT: Final = _Absent()
"""Value of keys that are not there; as a change: take the key away."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""The same in C where PyYAML was built with it, ten times as fast: plans lay every candidate over the files."""
_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\])*"|,(?=\s*[}\]])')


def load(text: str, file: str) -> Any:
    """What a file says; an empty one: an empty mapping. Its suffix tells the format, JSON where there is none known.

    JSON may have comments and trailing commas, as DeepSpeed allows.

    Raises:
        ConfigError: naming file and line of what cannot be read.
    """
    try:
        found = _LOADERS.get(_suffix(file), _load_json)(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error.msg}", file=file, line=error.lineno, remedy="Mend the file.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}", file=file, remedy="Mend the file.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or "it cannot be read"
        line = mark.line + 1 if mark else None
        raise ConfigError(f"not YAML: {what}", file=file, line=line, remedy="Mend the file.") from None
    return {} if found is None else found


def value_at(data: Any, key: str, default: Any = ABSENT) -> Any:
    """The value at a dotted key; ``default`` where there is none."""
    if not key:
        return data
    for head, rest in _splits(data, key):
        return value_at(_child(data, head), rest, default)
    return default


def flat(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no mapping, by dotted key."""
    for key, value in data.items() if isinstance(data, Mapping) else ():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from flat(value, path)
        else:
            yield path, value


def edited(text: str, file: str, changes: Mapping[str, Any]) -> str:
    """The text with these values at these dotted keys; keys above that are missing are made.

    Raises:
        ConfigError: the file cannot be read, or a key cannot be set in it.
    """
    wanted = _copied(load(text, file))
    for key, value in changes.items():
        _set(wanted, key, value, file)
    if _is_same(wanted, load(text, file)):
        return text
    made = _EDITORS.get(_suffix(file), _edit_json)(text, changes, wanted)
    if not _says(made, file, wanted):
        keys = ", ".join(changes)
        raise ConfigError(f"{keys} cannot be changed here", file=file, remedy="Write it as a plain key and value.")
    return made


def _says(text: str, file: str, wanted: Any) -> bool:
    try:
        return _is_same(load(text, file), wanted)
    except ConfigError:
        return False


def dumped(data: Any, file: str) -> str:
    """A new file that says this: JSON, or YAML by its suffix."""
    if _suffix(file) in (".yaml", ".yml"):
        text: str = yaml.safe_dump(data, sort_keys=False)
        return text
    return json.dumps(data, indent=2) + "\n"


# ---- values at keys ----


def _splits(data: Any, key: str) -> Iterator[tuple[str, str]]:
    """Head and rest of a dotted key for the longest head that is there."""
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
    """The data with parts of its own everywhere, also where aliases shared one."""
    if isinstance(data, Mapping):
        return {key: _copied(value) for key, value in data.items()}
    return [_copied(value) for value in data] if isinstance(data, list | tuple) else data


def _is_same(one: Any, other: Any) -> bool:
    """Equality to which 1, 1.0 and true are three values."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and (one == other or one != one)


def _set(data: Any, key: str, value: Any, file: str) -> None:
    """Put a value at a dotted key of ``data``, in place."""
    head, rest = next(_splits(data, key), (key.partition(".")[0], key.partition(".")[2]))
    if not isinstance(data, dict | list) or (isinstance(data, list) and _child(data, head) is ABSENT):
        what = "a list without such a number" if isinstance(data, list) else "a value"
        raise ConfigError(f"what stands above it is {what}", file=file, key=key, remedy="Name another key.")
    place: Any = int(head) if isinstance(data, list) else head
    if rest:
        if _child(data, head) in (ABSENT, None):
            if value is ABSENT:
                return
            data[place] = {}
        _set(data[place], rest, value, file)
    elif value is not ABSENT:
        data[place] = _copied(value)
    elif _child(data, head) is not ABSENT:
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
    """What was found, if it is a string; line ends, so that numbers of lines stay right, of all else."""
    return match[0] if match[0].startswith('"') else "\n" * match[0].count("\n")


def _load_yaml(text: str) -> Any:
    loader = _LOADER(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


_LOADERS: Mapping[str, Callable[[str], Any]] = {".yaml": _load_yaml, ".yml": _load_yaml, ".toml": tomllib.loads}


def _edit_json(text: str, changes: Mapping[str, Any], wanted: Any) -> str:  # noqa: ARG001
    return json.dumps(wanted, indent=2, ensure_ascii=False) + "\n"


def _edit_yaml(text: str, changes: Mapping[str, Any], wanted: Any) -> str:  # noqa: ARG001
    """Change the tree of nodes, which keeps the spelling of values: ``off``, ``1e-5`` and ``0o17`` mean different
    things to different readers of YAML."""
    root = yaml.compose(text, Loader=_LOADER)
    root = _node({}) if root is None else _unshared(root)
    for key, value in changes.items():
        _set_node(root, key, value)
    made: str = yaml.serialize(root, Dumper=_DUMPER)
    return made


def _node(value: Any) -> yaml.Node:
    return yaml.SafeDumper("").represent_data(value)  # type: ignore[arg-type]


def _unshared(node: yaml.Node) -> yaml.Node:
    """The tree with a copy of its own in the place of every alias and merge, so that a change reaches one place."""
    if isinstance(node, yaml.MappingNode):
        yaml.SafeLoader("").flatten_mapping(node)
        pairs = {key.value: (_unshared(key), _unshared(value)) for key, value in node.value}
        return yaml.MappingNode(node.tag, list(pairs.values()), flow_style=node.flow_style)
    if isinstance(node, yaml.SequenceNode):
        return yaml.SequenceNode(node.tag, [_unshared(item) for item in node.value], flow_style=node.flow_style)
    return yaml.ScalarNode(node.tag, node.value, style=getattr(node, "style", None))


def _set_node(node: yaml.Node, key: str, value: Any) -> None:
    """Put a value at a dotted key below ``node``, as :func:`_set` does with what the tree means."""
    children = {str(name.value): index for index, (name, _) in enumerate(node.value)} if _is_mapping(node) else {}
    parts = key.split(".")
    heads = (".".join(parts[:number]) for number in range(len(parts), 0, -1))
    head = next((head for head in heads if head in children), parts[0])
    rest = key[len(head) + 1 :]
    if not _is_mapping(node):
        index = int(head)
        node.value[index] = _replaced(node.value[index], rest, value)
        return
    if head not in children:
        if value is not ABSENT:
            node.value.append((_node(head), _replaced(_node({}), rest, value)))
        return
    index = children[head]
    if value is ABSENT and not rest:
        del node.value[index]
    else:
        node.value[index] = (node.value[index][0], _replaced(node.value[index][1], rest, value))


def _is_mapping(node: yaml.Node) -> bool:
    return isinstance(node, yaml.MappingNode)


def _replaced(node: yaml.Node, rest: str, value: Any) -> yaml.Node:
    """The node with the value at ``rest`` below it, or the value's own node where nothing is left of the key."""
    if not rest:
        return _node(value)
    if isinstance(node, yaml.ScalarNode):
        node = _node({})
    _set_node(node, rest, value)
    return node


# ---- TOML ----


def _edit_toml(text: str, changes: Mapping[str, Any], wanted: Any) -> str:  # noqa: ARG001
    """Change lines: a value of one line in its place, a new one at the end of its table."""
    lines = text.splitlines()
    for key, value in changes.items():
        table, _, name = key.rpartition(".")
        start, stop = _table(lines, table)
        found = [index for index in range(start, stop) if re.match(rf"\s*{re.escape(name)}\s*=", lines[index])]
        if value is ABSENT:
            lines[:] = [line for index, line in enumerate(lines) if index not in found]
        elif found:
            lines[found[0]] = f"{lines[found[0]].partition('=')[0]}= {_toml(value)}"
        elif start > len(lines):
            lines += [f"[{table}]", f"{name} = {_toml(value)}"]
        else:
            while stop > start and not lines[stop - 1].strip():
                stop -= 1
            lines.insert(stop, f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _table(lines: list[str], name: str) -> tuple[int, int]:
    """First line of a table's content and the one behind it; both behind the end where there is no such table."""
    heads = [(index, line.strip()) for index, line in enumerate(lines) if re.match(r"\s*\[", line)]
    first = [index for index, head in heads if re.fullmatch(rf"\[\s*{re.escape(name)}\s*\]\s*(#.*)?", head)]
    if name and not first:
        return len(lines) + 1, len(lines) + 1
    start = first[0] + 1 if name else 0
    return start, next((index for index, _ in heads if index >= start), len(lines))


def _toml(value: Any) -> str:
    """A value as TOML writes it; strings and numbers as JSON does.

    Raises:
        ConfigError: TOML has no such value.
    """
    if value is None or isinstance(value, Mapping):
        raise ConfigError(f"{value!r} is no value of TOML", remedy="Name another value.")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


_EDITORS: Mapping[str, Callable[[str, Mapping[str, Any], Any], str]] = {
    ".yaml": _edit_yaml,
    ".yml": _edit_yaml,
    ".toml": _edit_toml,
}
