"""Runs a part in a process of its own: ``python -m benchmarks.gpu.child MODULE:FUNCTION SETTING``."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.gpu.parts import NotHereError, Setting

NOT_HERE = 64
"""Exit status of a part that cannot run here; the last line it printed says why."""


OURS = ("benchmarks", "cluster", "torch", "trials")
"""Packages in which a name that cannot be imported is a fault, not something that is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended."""

    code: int | None
    """Its exit status; None where it was killed at its deadline."""
    seconds: float
    text: str
    """What it printed, the last 4000 characters."""

    @property
    def last_line(self) -> str:
        """Its last line of output, usually the reason for a failure."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return lines[-1][:300] if lines else "no output"


def run_process(
    command: Sequence[str],
    log: Path,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    while_waiting: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a command with everything it starts, at most for ``timeout_s``; its output goes to ``log``."""
    start_s = time.monotonic()
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment(env), start_new_session=True
        )
    code: int | None = None
    try:
        while code is None and time.monotonic() - start_s < timeout_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.25)
            while_waiting()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")[-4000:]
    return Ended(code=code, seconds=time.monotonic() - start_s, text=text)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, in which children find the checkout whatever folder they are started in."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(more or {})}


def main() -> None:
    """Be the process of a part."""
    module, _, function = sys.argv[1].partition(":")
    setting = Setting(**json.loads(sys.argv[2]))
    try:
        run: Any = getattr(importlib.import_module(module), function)
        run(setting)
    except NotHereError as error:
        print(error, file=sys.stderr)
        sys.exit(NOT_HERE)
    except ImportError as error:
        if (error.name or "").partition(".")[0] in OURS:
            raise
        print(f"this needs something that is not installed: {error}", file=sys.stderr)
        sys.exit(NOT_HERE)


if __name__ == "__main__":
    main()
