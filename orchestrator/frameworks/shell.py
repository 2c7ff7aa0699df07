"""Shell scripts of exports: arguments of a script that starts one process per device, and the environment variables
that a sweep file gives all its ranks (``cluster.env``)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from orchestrator.frameworks.spelling import Setting, Settings, SettingsBuilder, comments, custom

WORLD_SIZE = "WORLD_SIZE"
"""Setting that is no argument: the number of processes over all nodes."""


def world_size() -> Setting:
    """The number of processes over all nodes."""

    def write(builder: SettingsBuilder) -> None:
        builder.settings[WORLD_SIZE] = builder.candidate.layout.world_size

    return custom((), (WORLD_SIZE,), write)


def script(builder: SettingsBuilder, *, exports: Mapping[str, str], start: str) -> str:
    """Text of the script.

    ``start`` is its command; it refers to ``"${ARGS[@]}"``, and to ``NUM_NODES`` and ``PROCESSES_PER_NODE``.
    """
    lines = [
        "#!/usr/bin/env bash",
        *comments(builder.notes),
        "set -euo pipefail",
        f"{WORLD_SIZE}={builder.settings[WORLD_SIZE]}",
        "NUM_NODES=${NUM_NODES:-1}",
        f"PROCESSES_PER_NODE=$(({WORLD_SIZE} / NUM_NODES))",
        *(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
        *_block(builder.settings),
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


VARIABLES = "variables"
"""Name of the text in the fingerprint; absent where a sweep has none."""
THREADS = "OMP_NUM_THREADS"
_THREADS_PRINT = "threads_per_device"
ENV_FILE = "env.sh"
"""File of an export that sets them, where it has no script of its own that could."""


def assignments(env: Mapping[str, str]) -> str:
    """``A=1 B='two words'``, in the order of the names."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(env.items()))


def variables_of(fingerprint: Mapping[str, str]) -> dict[str, str]:
    """The variables that a sweep with this fingerprint gave its ranks; back from :func:`assignments`."""
    pairs = (word.partition("=") for word in shlex.split(fingerprint.get(VARIABLES, "")))
    return {name: value for name, _, value in pairs}


def with_exports(files: Mapping[str, str], fingerprint: Mapping[str, str]) -> dict[str, str]:
    """Files of an export, whose shell scripts set what ranks of a sweep with this fingerprint had before anything else.

    That is the sweep's own variables, and the threads of a rank, of which torchrun gives it one otherwise: with the
    optimiser on the host the step would take that many times as long. Where there is no script, one more file to be
    sourced before the start sets the sweep's own.
    """
    env = variables_of(fingerprint)
    scripts = {name for name, text in files.items() if text.startswith("#!")}
    if scripts and _THREADS_PRINT in fingerprint:
        env = {THREADS: fingerprint[_THREADS_PRINT]} | env
    if not env:
        return dict(files)
    if not scripts:
        lines = "".join(_export_lines(env))
        return {**files, ENV_FILE: f"# Environment of the measured trials; load with: . ./{ENV_FILE}\n{lines}"}
    return {name: _with_variables(text, env) if name in scripts else text for name, text in files.items()}


def _export_lines(env: Mapping[str, str]) -> Iterator[str]:
    yield from (f"export {name}={shlex.quote(value)}\n" for name, value in sorted(env.items()))


def _with_variables(script: str, env: Mapping[str, str]) -> str:
    """The script with the variables that it does not set itself."""
    return _after_comments(script, "".join(line for line in _export_lines(env) if not _sets(script, line)))


def _sets(script: str, line: str) -> bool:
    """Whether the script exports the variable of this line."""
    return f"\n{line.partition('=')[0]}=" in script


def _after_comments(script: str, lines: str) -> str:
    """The script with ``lines`` behind the comments with which it begins."""
    text = script.splitlines(keepends=True)
    place = next((i for i, line in enumerate(text) if not line.startswith("#")), len(text))
    return "".join([*text[:place], lines, *text[place:]])
