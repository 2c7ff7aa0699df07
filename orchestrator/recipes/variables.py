"""Environment variables that a sweep file gives all its ranks (``cluster.env``): as one text in the fingerprint, and in
what is exported."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

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
    lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(env.items()))
    if not scripts:
        return {**files, ENV_FILE: f"# What trials were measured with: . ./{ENV_FILE}\n{lines}"}
    return {name: _after_comments(text, lines) if name in scripts else text for name, text in files.items()}


def _after_comments(script: str, lines: str) -> str:
    """The script with ``lines`` behind the comments with which it begins."""
    text = script.splitlines(keepends=True)
    place = next((i for i, line in enumerate(text) if not line.startswith("#")), len(text))
    return "".join([*text[:place], lines, *text[place:]])
