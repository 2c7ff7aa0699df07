"""Text that others wrote, made safe to print."""

from __future__ import annotations

import re

from trials.secrets import redact

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles, links, clipboard
    r"|\x1b[PX^_][^\x1b]*\x1b\\"  # device control strings
    r"|\x1b[ -/]*[0-Z\\-~]"
)


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All but tab and line feed, and what turns the reading direction round."""


def plain(text: str) -> str:
    """``text`` without what a terminal would obey; of a line rewritten in place, only its last writing is kept."""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _CONTROLS.sub("", _ESCAPES.sub("", "\n".join(lines)))


def first_line(error: Exception) -> str:
    """An error in one line without secrets."""
    lines = redact(str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__
