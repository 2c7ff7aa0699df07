"""Command-line arguments in a shell script that starts one process per device."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.recipes.base import Draft, Settings, comments

WORLD_SIZE = "WORLD_SIZE"
"""Setting that is no argument: the number of processes over all nodes."""


def script(draft: Draft, *, exports: Mapping[str, str], start: str) -> str:
    """Text of the script.

    ``start`` is its command; it refers to ``"${ARGS[@]}"``, and to ``NUM_NODES`` and ``PROCESSES_PER_NODE``.
    """
    lines = [
        "#!/usr/bin/env bash",
        *comments(draft.notes),
        "set -euo pipefail",
        f"{WORLD_SIZE}={draft.settings[WORLD_SIZE]}",
        "NUM_NODES=${NUM_NODES:-1}",
        f"PROCESSES_PER_NODE=$(({WORLD_SIZE} / NUM_NODES))",
        *(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
        *_block(draft.settings),
        start,
    ]
    return "\n".join(lines) + "\n"


def _block(settings: Settings) -> list[str]:
    arguments = {name: value for name, value in settings.items() if name != WORLD_SIZE}
    return ["ARGS=(", *(f"  {_argument(name, value)}" for name, value in arguments.items()), ")"] if arguments else []


def _argument(name: str, value: Any) -> str:
    words = [name, *_words(value)]
    return " ".join(shlex.quote(word) for word in words)


def _words(value: Any) -> Iterable[str]:
    if value is True:
        return ()
    return map(str, value) if isinstance(value, list | tuple) else (str(value),)


def load(text: str) -> dict[str, Any]:
    """Arguments of a script by name: True without a value, a text with one, a list with several."""
    found: dict[str, Any] = {}
    size = re.search(rf"^{WORLD_SIZE}=(\d+)$", text, flags=re.MULTILINE)
    if size:
        found[WORLD_SIZE] = int(size.group(1))
    block = re.search(r"^ARGS=\(\n(.*?)^\)$", text, flags=re.MULTILINE | re.DOTALL)
    for line in block.group(1).splitlines() if block else ():
        name, *values = shlex.split(line)
        found[name] = values[0] if len(values) == 1 else values or True
    return found
