"""Shell scripts of exports: a script that starts one process per device, and the environment variables of all ranks
(``cluster.env`` in the sweep file)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from orchestrator.frameworks.spelling import Setting, Settings, SettingsBuilder, comments, custom

WORLD_SIZE = "WORLD_SIZE"
"""A setting that is not an argument: the number of processes over all nodes."""


def world_size() -> Setting:
    """The number of processes over all nodes."""

    def write(builder: SettingsBuilder) -> None:
        builder.settings[WORLD_SIZE] = builder.candidate.layout.world_size

    return custom((), (WORLD_SIZE,), write)


def script(builder: SettingsBuilder, *, exports: Mapping[str, str], start: str) -> str:
    """Text of the script.

    ``start`` is its command, which uses ``"${ARGS[@]}"``, ``NUM_NODES`` and ``PROCESSES_PER_NODE``.
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
    """Arguments of a script by name: True without a value, text with one, a list with several."""
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
"""Name of the text in the fingerprint; missing if a sweep has no variables."""
THREADS = "OMP_NUM_THREADS"
_THREADS_PRINT = "threads_per_device"
ENV_FILE = "env.sh"
"""File of an export that sets them, if the export has no script that could."""


def assignments(env: Mapping[str, str]) -> str:
    """``A=1 B='two words'``, ordered by name."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(env.items()))


def variables_of(fingerprint: Mapping[str, str]) -> dict[str, str]:
    """The variables of all ranks of a sweep with this fingerprint; the inverse of :func:`assignments`."""
    pairs = (word.partition("=") for word in shlex.split(fingerprint.get(VARIABLES, "")))
    return {name: value for name, _, value in pairs}


def with_exports(files: Mapping[str, str], fingerprint: Mapping[str, str]) -> dict[str, str]:
    """Files of an export, whose shell scripts first set what the ranks of a sweep with this fingerprint had.

    These are the sweep's own variables, and the number of threads per rank, which torchrun would otherwise set to one:
    a step with the optimiser on the host would take many times as long. Without a script, an additional file, to be
    sourced before the start, sets the variables.
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
    """The script with ``lines`` inserted after its leading comments."""
    text = script.splitlines(keepends=True)
    place = next((i for i, line in enumerate(text) if not line.startswith("#")), len(text))
    return "".join([*text[:place], lines, *text[place:]])
