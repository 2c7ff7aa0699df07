"""Safe YAML parsing with the line of every key; problems as file, line, key and remedy."""

from __future__ import annotations

import difflib
import re
import shlex
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.errors import ConfigError, reason_of
from orchestrator.mlflow_urls import SUPPORTED_URIS, URI_PATTERN
from orchestrator.space.file_types import received, show
from orchestrator.text import CONTROLS
from trials.files import open_regular
from trials.secrets import is_secret_name, is_secret_option, literal_secret, redactor, variable_in

# Reading

MAX_FILE_BYTES = 256 * 1024
MAX_NODES = 20_000
"""Maximum nodes after aliases are expanded; nested aliases ("billion laughs") exceed it by far."""
MAX_DEPTH = 40
MAX_INT_BITS = 1000
"""Maximum size of an integer; Python can neither convert larger ones to float nor print them."""

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlSource:
    """A parsed file. ``lines`` gives the line (from 1) of the key or list item at a path."""

    file: Path
    data: Any
    lines: dict[KeyPath, int]
    text: str = ""
    """The file as it was written."""

    def locate(self, path: KeyPath) -> tuple[KeyPath, int]:
        """The longest part of ``path`` that exists in the file, and its line."""
        while path and path not in self.lines:
            path = path[:-1]
        return path, self.lines.get(path, 1)

    def error(self, path: KeyPath, message: str, remedy: str | None = None) -> ConfigError:
        """A :class:`ConfigError` at ``path``, which may name a key that is missing from the file."""
        _, line = self.locate(path)
        return ConfigError(message, file=self.file, line=line, key=dotted(path), remedy=remedy)


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


PROGRAMS = {".py": ("python",), ".sh": ("bash",)}
"""Suffixes of programs, and what runs them."""


def read_yaml(file: str | Path) -> YamlSource:
    """Read one YAML document with the meaning of ``yaml.safe_load``, and stricter.

    Duplicate keys, keys that are not strings (merge keys ``<<`` too), several documents, alias bombs and oversized or
    deep files are refused.
    Unlike YAML 1.1, ``1e-3`` is a number.

    Raises:
        ConfigError: for anything that keeps the file from being read.
    """
    file = Path(file)
    text = _read_text(file)
    if file.suffix in PROGRAMS:
        how = shlex.join((*PROGRAMS[file.suffix], str(file)))
        raise ConfigError(
            f"{file} is a {'Python' if file.suffix == '.py' else 'shell'} script, not a sweep file",
            remedy=f"To generate a sweep file for it, run: tune-cluster init -- {how}",
        )
    return parse_yaml(text, file)


def parse_yaml(text: str, file: Path) -> YamlSource:
    """Parse ``text`` from ``file``, as :func:`read_yaml` does."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError("the file is empty", file=file, line=1, remedy="See docs/sweep-file.md for an example.")
        builder = _Builder(file=file, loader=loader)
        data = builder.build(node, ())
    except yaml.YAMLError as error:
        raise _syntax_error(file, text, error) from None
    except RecursionError:
        raise _too_deep(file, 1) from None
    return YamlSource(file=file, data=data, lines=builder.lines, text=text)


def _read_text(file: Path) -> str:
    try:
        with open_regular(file) as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(
            f"the file is larger than {MAX_FILE_BYTES // 1024} KiB",
            file=file,
            remedy="Check that this is the right file.",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(
            "the file is not UTF-8 text", file=file, line=line, remedy="Save the file as UTF-8."
        ) from None


def unreadable(file: Path, error: Exception) -> ConfigError:
    """The error that a file cannot be opened or read."""
    remedy = "Check its permissions." if isinstance(error, PermissionError) else "Check the path."
    return ConfigError(f"cannot read {file}: {reason_of(error)}", remedy=remedy)


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads ``1e-3`` as a number, as YAML 1.2 does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


_TEXTS = (("workload", "run"), ("workload", "trial_args"), ("workload", "env"), ("cluster", "env"))
"""Sections whose numbers are passed to programs as written, such as ``8.10``, ``0123`` or ``1:30:00``."""
_PLAIN_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Converts composed nodes to plain values. Aliases are expanded, so every path has its own line."""

    file: Path
    loader: _Loader
    lines: dict[KeyPath, int] = field(default_factory=dict)
    num_nodes: int = 0

    def build(self, node: yaml.Node, path: KeyPath, line: int | None = None) -> Any:
        line = node.start_mark.line + 1 if line is None else line
        self.lines.setdefault(path, line)
        self._count(line, len(path))
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN_COLLECTIONS:
            raise ConfigError(
                f"the tag {node.tag} is not supported",
                file=self.file,
                line=line,
                key=dotted(path),
                remedy="Remove the tag.",
            )
        if isinstance(node, yaml.MappingNode):
            return self._build_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode), "YAML consists of scalars, sequences and mappings"
        return self._scalar(node, path, line)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath, line: int) -> Any:
        """The plain value. Any error of PyYAML's constructors is a file error: they do not validate tags and digits."""

        def refused(message: str, remedy: str) -> ConfigError:
            return ConfigError(message, file=self.file, line=line, key=dotted(path), remedy=remedy)

        try:
            value = self.loader.construct_object(node, deep=True)
        except ConfigError:
            raise
        except Exception as error:
            raise refused(_unreadable(node, error), "Put strings in quotes, and remove tags (!!).") from None
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise refused(f"the number is too large ({len(node.value)} digits)", "Use a smaller number.")
        if isinstance(value, str) and not _is_text(value):
            raise refused(
                "the string contains an unpaired surrogate (\\ud800 to \\udfff)", "Write the character itself."
            )
        if isinstance(value, str) and (found := CONTROLS.search(value)) is not None:
            raise refused(f"the string contains the control character {found[0]!a}", "Remove the character.")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return node.value if is_number and path[:2] in _TEXTS else value

    def _build_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        self._refuse_duplicates(node, path)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            line = key_node.start_mark.line + 1
            self.lines[(*path, key)] = line
            result[key] = self.build(value_node, (*path, key), line)
        return result

    def _refuse_duplicates(self, node: yaml.MappingNode, path: KeyPath) -> None:
        first_lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key = self._key(key_node, path)
            line = key_node.start_mark.line + 1
            if key in first_lines:
                raise ConfigError(
                    f"duplicate key; first set on line {first_lines[key]}",
                    file=self.file,
                    line=line,
                    key=dotted((*path, key)),
                    remedy="Remove one of them.",
                )
            first_lines[key] = line

    def _key(self, node: yaml.Node, path: KeyPath) -> str:
        if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str" and _is_text(node.value):
            if (found := CONTROLS.search(node.value)) is not None:
                raise self._control_in_key(node, path, found[0])
            return str(node.value)
        shown = _shortened(node.value) if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        raise ConfigError(
            f"keys must be strings, got {shown}",
            file=self.file,
            line=node.start_mark.line + 1,
            key=dotted(path),
            remedy="Put the key in quotes, or check the indentation. Merge keys (<<) are not supported.",
        )

    def _control_in_key(self, node: yaml.Node, path: KeyPath, char: str) -> ConfigError:
        return ConfigError(
            f"a key contains the control character {char!a}",
            file=self.file,
            line=node.start_mark.line + 1,
            key=dotted(path),
            remedy="Remove the character.",
        )

    def _count(self, line: int, depth: int) -> None:
        self.num_nodes += 1
        if depth > MAX_DEPTH:
            raise _too_deep(self.file, line)
        if self.num_nodes > MAX_NODES:
            raise ConfigError(
                f"the file has more than {MAX_NODES} values once aliases are expanded",
                file=self.file,
                line=line,
                remedy="Remove the nested aliases.",
            )


def _unreadable(node: yaml.ScalarNode, error: Exception) -> str:
    """Why a scalar has no value, such as ``'maybe' is not a valid bool``, followed by the error if it adds
    information."""
    kind = str(node.tag).rpartition(":")[2]
    if "could not determine a constructor" in str(error):
        return f"the tag !!{kind} is not supported"
    reason_text = str(error) if type(error) is ValueError and "invalid literal" not in str(error) else ""
    return f"{_shortened(node.value)} is not a valid {kind}" + (f": {reason_text}" if reason_text else "")


def _is_text(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _shortened(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _too_deep(file: Path, line: int) -> ConfigError:
    return ConfigError(
        f"values are nested more than {MAX_DEPTH} levels deep",
        file=file,
        line=line,
        remedy="Check brackets and aliases.",
    )


def _syntax_error(file: Path, text: str, error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = mark.line + 1 if mark is not None else 1
    if isinstance(error, yaml.reader.ReaderError):  # a character that no YAML may hold, which has no mark
        line = text[: error.position].count("\n") + 1
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "the text cannot be parsed"
    remedy = "Check indentation, quotes and brackets near this line."
    if "\\t" in problem:
        problem, remedy = "tabs cannot be used for indentation", "Indent with spaces."
    if "document" in problem:
        problem, remedy = (
            "the file contains more than one document",
            "Keep one document, and remove the '---' separators.",
        )
    return ConfigError(f"invalid YAML: {problem}", file=file, line=line, remedy=remedy)


# Problems in what was read: credentials, and what pydantic found wrong

SEE_DOCS = "See docs/sweep-file.md."
_REMEDY = "Keep secrets in the environment, not in files."
_REMEDY_COMMAND = (
    "Command lines are visible to every user on the host. Put the secret in an environment variable, list the variable "
    "in env_pass, and read it in your script."
)


def refuse_secrets(source: YamlSource) -> None:
    """Raise a :class:`ConfigError`, without repeating the secret, if the file seems to contain one.

    That is a value or key in the form of a credential or with the value of a secret variable of this process,
    anything under a key named like a secret, or the value of such an option in a command.
    """
    redact = redactor()
    for path, value in _leaves(source.data, ()):
        for i, part in enumerate(path):
            if isinstance(part, str) and redact(part) != part:
                raise source.error(path[:i], "a key contains a credential", _REMEDY)
            if isinstance(part, str) and _names_a_secret(path[:i], part) and value is not None:
                raise source.error(path[: i + 1], "sweep files must not contain secrets", _REMEDY)
        if isinstance(value, str) and redact(value) != value:
            raise _holds_credential(source, path, value)
    for path, words, is_list in _commands(source.data, ()):
        if (place := literal_secret(words)) is not None:
            option = words[place].partition("=")[0] if words[place].startswith("-") else words[place - 1]
            message = f"the value of {option} is a plain-text secret"
            raise source.error((*path, place) if is_list else path, message, _REMEDY_COMMAND)


def _holds_credential(source: YamlSource, path: KeyPath, value: str) -> ConfigError:
    variable = variable_in(value)
    if variable is None:
        return source.error(path, "the value contains a credential", _REMEDY)
    remedy = f"{_REMEDY} If {variable} is not a secret, move it from env_pass to env."
    return source.error(
        path,
        f"the value contains the value of the environment variable {variable}, which is treated as a secret",
        _REMEDY if is_secret_name(variable) else remedy,
    )


def _commands(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, list[str], bool]]:
    """Possible command lines as words: lists of scalars, and texts with options; and whether it is a list."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _commands(item, (*path, key))
    elif isinstance(value, list):
        if value and not any(isinstance(item, dict | list) for item in value):
            yield path, [str(item) for item in value], True
        for i, item in enumerate(value):
            yield from _commands(item, (*path, i))
    elif isinstance(value, str) and " -" in f" {value}" and " " in value.strip():
        yield path, value.split(), False


def _names_a_secret(path: KeyPath, name: str) -> bool:
    """Whether the key ``name`` below ``path`` is named like a secret; the rules for variables are broader."""
    is_variable = path[-1:] == ("env",)
    return is_secret_option(name) or (is_variable and is_secret_name(name))


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """All leaves with their paths, including empty mappings and lists, whose keys count."""
    if isinstance(value, dict | list) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def to_config_error(error: ValidationError, source: YamlSource, model: type[BaseModel]) -> ConfigError:
    """The first problem of the file, in the order of lines, carrying the others."""
    found: dict[tuple[int, str, str], ConfigError] = {}
    for details in error.errors(include_url=False):
        one = _translate(details, source, model)
        found.setdefault((one.line or 0, one.key or "", one.message), one)
    first, *others = (found[order] for order in sorted(found))
    return ConfigError(
        first.message, file=first.file, line=first.line, key=first.key, remedy=first.remedy, others=others
    )


def _translate(details: ErrorDetails, source: YamlSource, model: type[BaseModel]) -> ConfigError:
    kind, context = details["type"], details.get("ctx", {})
    path = _in_file(details["loc"], source)
    if kind == "sweep_fault":
        path, _ = source.locate(path)
        key = [int(part) if part.isdigit() else part for part in context["key"].split(".") if part]
        return source.error((*path, *key), context["text"], context["remedy"])
    if kind == "missing":
        return source.error(path, "required key is missing", f"Add {path[-1]!r}.")
    if kind == "extra_forbidden":
        return source.error(path, "unknown key", _nearest(str(path[-1]), _keys_at(model, details["loc"][:-1])))
    if kind == "union_tag_not_found":
        return source.error((*path, "kind"), "required key is missing", "Add 'kind'.")
    if kind == "union_tag_invalid":
        return source.error((*path, "kind"), _not_among(context["expected_tags"].split(", "), context["tag"]))
    path, _ = source.locate(path)
    return source.error(path, *_describe(details))


def _in_file(path: KeyPath, source: YamlSource) -> KeyPath:
    """Convert pydantic's ``path`` to that in the file.

    Removes the kinds of workloads, models and data, which pydantic inserts after their section, and the index of a
    single value that the file has instead of a list.
    """
    if path[:1] == ("workload",):
        path = (*path[:1], *path[2:])
    if path[:2] in (("workload", "model"), ("workload", "data")):
        path = (*path[:2], *path[3:])
    kept: KeyPath = ()
    for part in path:
        if isinstance(part, str) or (*kept, part) in source.lines:
            kept = (*kept, part)
    return kept


def _nearest(key: str, valid: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key.lower(), valid, n=1, cutoff=0.5)
    suggestion = f"Did you mean {close[0]!r}? " if close else ""
    return f"{suggestion}Valid keys: {', '.join(valid)}."


def _keys_at(model: type[BaseModel], path: KeyPath) -> tuple[str, ...]:
    """Keys allowed in the section at ``path``, which may pass through lists and name kinds."""
    sections = [model]
    for part in path:
        fields = [f for s in sections for name, f in s.model_fields.items() if part in (name, f.alias)]
        if fields:
            sections = list(_sections_in(fields[0].annotation)) or sections
        elif isinstance(part, str):
            sections = [s for s in sections if _kind_of(s) == part] or sections
    return tuple(field.alias or name for name, field in sections[0].model_fields.items())


def _kind_of(section: type[BaseModel]) -> str | None:
    if (tag := getattr(section, "TAG", None)) is not None:
        return str(tag)
    kind = section.model_fields.get("kind")
    return next(iter(typing.get_args(kind.annotation)), None) if kind is not None else None


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The section classes inside a type such as ``Annotated[tuple[Section, ...]] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _sections_in(argument)


_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "a boolean",
    "string_type": "a string",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
}
_UNQUOTED = ("int_type", "float_type", "bool_type")
_BOUNDS = {
    "greater_than": ("gt", "The value must be greater than"),
    "greater_than_equal": ("ge", "The minimum is"),
    "less_than": ("lt", "The value must be less than"),
    "less_than_equal": ("le", "The maximum is"),
}


def _describe(details: ErrorDetails) -> tuple[str, str | None]:
    """Message and remedy of a pydantic error."""
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    shown = show(value)
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        limit = context[name]
        is_whole = isinstance(limit, float) and limit.is_integer() and abs(limit) < 1e15
        return f"{shown} is out of range", f"{words} {int(limit) if is_whole else limit}."
    if kind == "too_short" and not value:
        return "the list is empty", "List at least one value."
    if kind == "string_pattern_mismatch" and context["pattern"] == URI_PATTERN:
        return f"{shown} is not a supported tracking URI", SUPPORTED_URIS
    if kind == "string_too_short" and not value:
        return "the string is empty", "Set a value, or remove the entry."
    if kind == "int_parsing_size":
        return f"{shown} is out of range", SEE_DOCS
    if kind == "literal_error":
        return _not_among(re.split(", | or ", context["expected"]), value), None
    if kind not in _EXPECTED:
        return f"{details['msg'][:1].lower()}{details['msg'][1:]}, got {shown}", SEE_DOCS
    message = f"expected {_EXPECTED[kind]}{received(value)}"
    if value is None:
        return message, "Set a value, or remove the entry."
    if kind == "string_type" and isinstance(value, bool | int | float):
        return message, "Put the value in quotes."
    if kind == "bool_type" and not isinstance(value, str):
        return message, "Use true or false."
    return message, "Remove the quotes." if _is_quoted(value) and kind in _UNQUOTED else SEE_DOCS


def _not_among(expected: Sequence[str], value: Any) -> str:
    """Message about a value that is none of the ``expected`` words, which are in quotes where YAML has strings."""
    if value is None:
        return f"expected {'one of ' * (len(expected) > 1)}{', '.join(expected)}, but the value is empty (null)"
    if len(expected) == 1:
        return f"unsupported value {show(value)}; only {expected[0]} is supported"
    return f"invalid value {show(value)}; expected one of {', '.join(expected)}"


def _is_quoted(value: Any) -> bool:
    """Whether a string would be a number or a boolean without its quotes."""
    return isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+([eE][-+]?\d+)?|true|false", value.strip()) is not None
