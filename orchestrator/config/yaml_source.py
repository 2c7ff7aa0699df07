"""YAML files read the safe way, remembering on which line every key stands."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orchestrator.errors import ConfigError
from orchestrator.text import CONTROLS
from trials.files import open_regular

MAX_FILE_BYTES = 256 * 1024
MAX_NODES = 20_000
"""Nodes after aliases are expanded; a file of nested aliases ("billion laughs") goes far beyond."""
MAX_DEPTH = 40
MAX_INT_BITS = 1000
"""Size of a whole number; beyond it, Python neither makes a float of it nor writes it out."""

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
        """The longest part of ``path`` that stands in the file, and its line."""
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

    Duplicate keys, keys that are not text (merge keys ``<<`` too), several documents, alias bombs and oversized or
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
            f"{file} is a program, not a sweep file",
            remedy=f"Draft a sweep file for it, with the options that you run it with: tune-cluster init -- {how}",
        )
    return parse_yaml(text, file)


def parse_yaml(text: str, file: Path) -> YamlSource:
    """Parse ``text``, which stands in ``file``, as :func:`read_yaml` does."""
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
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot be read: {reason}", file=file, remedy="Check the path and its permissions."
        ) from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"larger than {MAX_FILE_BYTES // 1024} KiB", file=file, remedy="Is this the right file?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError("not UTF-8 text", file=file, line=line, remedy="Save the file as UTF-8.") from None


class _Loader(yaml.SafeLoader):
    """SafeLoader that takes ``1e-3`` for a number, as YAML 1.2 does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


_PLAIN_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Turns composed nodes into plain values. Aliases are expanded, so every path has its own line."""

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
                f"the tag {node.tag} is not supported", file=self.file, line=line, key=dotted(path), remedy="Remove it."
            )
        if isinstance(node, yaml.MappingNode):
            return self._build_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode), "YAML knows scalars, sequences and mappings"
        return self._scalar(node, path, line)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath, line: int) -> Any:
        """The plain value; whatever PyYAML's constructors raise is the file's fault: they trust tags and digits."""

        def refused(message: str, remedy: str) -> ConfigError:
            return ConfigError(message, file=self.file, line=line, key=dotted(path), remedy=remedy)

        try:
            value = self.loader.construct_object(node, deep=True)
        except ConfigError:
            raise
        except Exception as error:
            raise refused(_unreadable(node, error), "Quote text, and leave tags (!!) out.") from None
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise refused(f"a number of {len(node.value)} characters is too large", "Write a smaller number.")
        if isinstance(value, str) and not _is_text(value):
            raise refused("the text holds half of a character (\\ud800 to \\udfff)", "Write the character itself.")
        if isinstance(value, str) and (found := CONTROLS.search(value)) is not None:
            raise refused(f"the text holds the control character {found[0]!a}", "Remove it.")
        return value

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
                    f"the key stands twice, first on line {first_lines[key]}",
                    file=self.file,
                    line=line,
                    key=dotted((*path, key)),
                    remedy="Keep one of them.",
                )
            first_lines[key] = line

    def _key(self, node: yaml.Node, path: KeyPath) -> str:
        if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str" and _is_text(node.value):
            if (found := CONTROLS.search(node.value)) is not None:
                raise self._control_in_key(node, path, found[0])
            return str(node.value)
        shown = _shortened(node.value) if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        raise ConfigError(
            f"a key must be text, got {shown}",
            file=self.file,
            line=node.start_mark.line + 1,
            key=dotted(path),
            remedy="Quote the key, or check the indentation; merge keys (<<) are not supported.",
        )

    def _control_in_key(self, node: yaml.Node, path: KeyPath, char: str) -> ConfigError:
        return ConfigError(
            f"a key holds the control character {char!a}",
            file=self.file,
            line=node.start_mark.line + 1,
            key=dotted(path),
            remedy="Remove it.",
        )

    def _count(self, line: int, depth: int) -> None:
        self.num_nodes += 1
        if depth > MAX_DEPTH:
            raise _too_deep(self.file, line)
        if self.num_nodes > MAX_NODES:
            raise ConfigError(
                f"more than {MAX_NODES} values once its aliases are expanded",
                file=self.file,
                line=line,
                remedy="Remove the nested aliases.",
            )


def _unreadable(node: yaml.ScalarNode, error: Exception) -> str:
    """Why a scalar has no value, such as ``'maybe' is no bool``; the error's own words where they say more."""
    kind = str(node.tag).rpartition(":")[2]
    told = str(error) if type(error) is ValueError and "invalid literal" not in str(error) else ""
    return f"{_shortened(node.value)} is no {kind}" + (f": {told}" if told else "")


def _is_text(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _shortened(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _too_deep(file: Path, line: int) -> ConfigError:
    return ConfigError(
        f"nested deeper than {MAX_DEPTH} levels", file=file, line=line, remedy="Check brackets and aliases."
    )


def _syntax_error(file: Path, text: str, error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = mark.line + 1 if mark is not None else 1
    if isinstance(error, yaml.reader.ReaderError):  # a character that no YAML may hold, which has no mark
        line = text[: error.position].count("\n") + 1
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "the text cannot be parsed"
    remedy = "Check indentation, quotes and brackets near this line."
    if "\\t" in problem:
        problem, remedy = "a tab is used for indentation", "Indent with spaces."
    if "document" in problem:
        remedy = "Keep one document: remove '---' separators."
    return ConfigError(f"not valid YAML: {problem}", file=file, line=line, remedy=remedy)
