"""How drafts are written: commented YAML of at most thirty lines, one line per key."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

MAX_LINES = 30
_WIDTH = 116
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "~", ".", ".inf", ".nan"}
"""Plain words that YAML 1.1 takes for something else than text."""
_PLAIN = re.compile(r"(?:[A-Za-z./_$]|--?[A-Za-z])[\w./+@$-]*")


def sweep_text(lines: Sequence[str]) -> str:
    """The lines as a file; without the empty ones where there are too many."""
    kept = lines if len(lines) <= MAX_LINES else [line for line in lines if line]
    return "\n".join(kept) + "\n"


def comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def value_text(value: Any) -> str:
    """A value as YAML in one line; ``off`` and its like in quotes, for they are words here."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{quoted(str(key))}: {value_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def words_text(words: Sequence[str]) -> str:
    """The words of a command; whole numbers are words there without quotes."""
    return f"[{', '.join(word if re.fullmatch('0|[1-9][0-9]{0,15}', word) else quoted(word) for word in words)}]"


def quoted(text: str) -> str:
    """Text as a plain scalar where that says the same; in single quotes where a backslash is in it."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return "'" + text.replace("'", "''") + "'" if "\\" in text else json.dumps(text, ensure_ascii=False)


def safe_name(name: str) -> str:
    """A sweep's name made of a model's or a script's."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")[:63] or "sweep"
