"""The one command of a shell script, read without a shell: quotes, comments and variables that the script sets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import ConfigError, reason_of

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_HARMLESS = {"set", "echo", "ulimit"}
_REMEDY = "Pass the script's training command instead: tune-cluster init -- torchrun train.py ..."
_VARIABLE = (
    r"\$(?P<brace>\{)?(?P<name>[A-Za-z_]\w*)(?(brace)(?::-(?P<default>[^${}`\\'\"]*))?\})"  # $NAME, ${NAME:-default}
)
_BARE = re.compile(rf"{_VARIABLE}|[$`|&;<>()]")
_IN_QUOTES = re.compile(rf"\\(?P<escaped>[$`\"\\\n])|{_VARIABLE}|[$`]")
_TOKEN = re.compile(
    r"""(?P<end>\n)|(?P<blank>[ \t]+)|\\\n"""
    r"""|(?<!\S)(?:\#[^\n]*|(?P<all>"\$@"|\$@)(?!\S))"""
    r"""|'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|\\(?P<escaped>.)|(?P<bare>[^ \t\n'"\\]+)""",
    re.DOTALL,
)


def command_in(path: Path, arguments: Sequence[str]) -> list[str]:
    """The one command of a shell script, with its plain variables filled in; ``"$@"`` is what the script is given.

    Raises:
        ConfigError: the script has no command or several, or one that only a shell can run.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}", remedy="Check the path.") from None
    variables: dict[str, str] = {}
    exported: dict[str, str] = {}
    commands: list[list[str]] = []
    for line in _lines(text, path, variables, arguments):
        words = line.words
        if not words or words[0] in _HARMLESS:
            continue
        if line.needs_shell:
            raise ConfigError(f"{line.text[:60]!r} can only be run by a shell", file=str(path), remedy=_REMEDY)
        is_export = words[0] == "export"
        given = [ASSIGNMENT.fullmatch(word) for word in (words[1:] if is_export else words)]
        if all(given):
            found = {match[1]: match[2] for match in given if match is not None}
            variables |= found
            exported |= found if is_export else {}
        else:
            commands.append(words)
    if len(commands) != 1:
        raise ConfigError(f"expected one command in the script, found {len(commands)}", file=str(path), remedy=_REMEDY)
    return [*(f"{name}={value}" for name, value in exported.items()), *commands[0]]


@dataclass(slots=True, kw_only=True)
class _Line:
    """A line of a script while it is read; inside quotes and after a backslash, it continues on the next one."""

    variables: Mapping[str, str]
    words: list[str] = field(default_factory=list)
    text: str = ""
    """As written."""
    needs_shell: bool = False
    _word: str | None = None

    def add(self, text: str) -> None:
        self._word = (self._word or "") + text

    def end_word(self) -> None:
        if self._word is not None:
            self.words.append(self._word)
        self._word = None

    def add_quoted(self, text: str) -> None:
        """Add what is between double quotes."""
        self.add("")
        for part, match in _parts(_IN_QUOTES, text):
            self.add(part)
            if match is not None:
                escaped = match["escaped"]
                self.add(self._value(match) if escaped is None else escaped.replace("\n", ""))

    def add_bare(self, text: str) -> None:
        """Add what is outside quotes, where the value of a variable is split into words."""
        for part, match in _parts(_BARE, text):
            if part:
                self.add(part)
            if match is None:
                continue
            value = self._value(match)
            if self._is_assignment():
                self.add(value)
            else:
                self._add_split(value)

    def _add_split(self, value: str) -> None:
        for part in re.split(r"([ \t\n]+)", value):
            if part.isspace():
                self.end_word()
            elif part:
                self.add(part)

    def _is_assignment(self) -> bool:
        return all(word == "export" or ASSIGNMENT.match(word) for word in (*self.words, self._word or ""))

    def _value(self, match: re.Match[str]) -> str:
        """The value of a variable that the script sets, or its default; the text if only a shell has a value."""
        name, default = match["name"], match["default"]
        if name in self.variables and (self.variables[name] or default is None):
            return self.variables[name]
        if default is not None and (name in self.variables or name not in os.environ):
            return default
        self.needs_shell = True
        return match[0]


def _lines(text: str, path: Path, variables: Mapping[str, str], arguments: Sequence[str]) -> Iterator[_Line]:
    """The lines of a script. Each is read when the one before it has been processed, since that sets variables.

    Raises:
        ConfigError: a quote is not closed.
    """
    line, position = _Line(variables=variables), 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            rest = text[position:].strip().partition("\n")[0]
            raise ConfigError(f"cannot parse {(line.text + rest).strip()[:60]!r}", file=str(path), remedy=_REMEDY)
        position = token.end()
        if token["end"] is None:
            line.text = (line.text + token[0]).lstrip()
            _add(line, token, arguments)
        else:
            line.end_word()
            yield line
            line = _Line(variables=variables)
    line.end_word()
    yield line


def _add(line: _Line, token: re.Match[str], arguments: Sequence[str]) -> None:
    """Add a token to the line; a comment or the end of a continued line adds nothing."""
    if token["blank"] is not None:
        line.end_word()
    elif (written := token["all"]) is not None:
        line.words.extend(arguments if written.startswith('"') else " ".join(arguments).split())
    elif (literal := token["single"] if token["single"] is not None else token["escaped"]) is not None:
        line.add(literal)
    elif token["double"] is not None:
        line.add_quoted(token["double"])
    elif token["bare"] is not None:
        line.add_bare(token["bare"])


def _parts(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, re.Match[str] | None]]:
    """Text between the matches, each with the match after it; None after the last one."""
    start = 0
    for match in pattern.finditer(text):
        yield text[start : match.start()], match
        start = match.end()
    yield text[start:], None
