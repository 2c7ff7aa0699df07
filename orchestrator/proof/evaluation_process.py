"""Runs a user's command and guarantees the end of everything it starts: ``python -m
orchestrator.proof.evaluation_process``.

A process between controller and command. It reads an :class:`EvaluationOrder` as one line of JSON from its input, and
prints an :class:`Ending` once no process of the command is left. When its input closes, because the controller is gone
or ends the evaluation, it kills all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from filelock import FileLock

from cluster.processes import adopt_orphans, die_with_parent, kill_descendants
from orchestrator.process_support import environment
from orchestrator.text import tail
from trials.files import from_json, to_json
from trials.secrets import redact, redact_file, redact_uncaught

TAIL_LINES, TAIL_CHARS = 20, 300
KILL_S = 10.0
"""Longest wait for killed processes, in seconds. Some hang in a driver."""
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOrder:
    """The controller's order for the evaluation process."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    """Additional variables for the command, which also gets this process's variables except secrets."""
    log: str
    """File for the command's output, redacted at the end."""
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a command ended."""

    exit_code: int | None
    """Exit code as in ``subprocess``; None: not started, or killed at its deadline."""
    tail: tuple[str, ...]
    """Last lines of the command's output, redacted, and remarks of the evaluation process."""


def run(order: EvaluationOrder, input_fd: int) -> Ending | None:
    """Run the command to its end; None if ``input_fd`` closed before."""
    path = Path(order.log)
    with FileLock(path.parent / "lock"):  # the process of a dead controller may still use this folder
        if _is_closed(input_fd, wait_s=0.0):
            return None
        try:
            process = _start(order, path)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            return Ending(exit_code=None, tail=(redact(f"{order.command[0]} cannot be started: {why}"),))
        exit_code, remarks = _watch(process, input_fd, order.timeout_s)
        kill_descendants(KILL_S)
        with contextlib.suppress(OSError):
            redact_file(path)
        return None if remarks is None else Ending(exit_code=exit_code, tail=(*_tail(path), *remarks))


def _start(order: EvaluationOrder, log: Path) -> subprocess.Popen[bytes]:
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        return subprocess.Popen(
            order.command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(order.variables),
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # safe: this process has one thread
        )


def _watch(process: subprocess.Popen[bytes], input_fd: int, timeout_s: float) -> tuple[int | None, list[str] | None]:
    """Return exit code and remarks; the remarks are None if the input closed."""
    deadline_s = time.monotonic() + timeout_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        if process.poll() is not None:
            return process.returncode, []
        if _is_closed(input_fd, wait_s=min(left_s, POLL_S)):
            return None, None
    return None, [f"killed: not finished after {timeout_s:g} s"]


def _is_closed(fd: int, *, wait_s: float) -> bool:
    ready, _, _ = select.select([fd], [], [], wait_s)
    return bool(ready) and not os.read(fd, 1)


def _tail(path: Path) -> list[str]:
    """Return the last non-empty lines; a few more are read than returned."""
    with contextlib.suppress(OSError):
        return [line[:TAIL_CHARS] for line in tail(path, 4 * TAIL_LINES).lines if line.strip()][-TAIL_LINES:]
    return []


def main() -> int:
    """Read the order from the input, which the controller keeps open as long as the command may run."""
    redact_uncaught()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    text = b""
    while not text.endswith(b"\n"):
        block = os.read(0, 1 << 16)
        if not block:
            return 1
        text += block
    ending = run(from_json(EvaluationOrder, json.loads(text)), 0)
    if ending is not None:
        # Not in the encoding of the locale, and not escaped: the pipe, read at the end, holds 64 KiB.
        sys.stdout.buffer.write(json.dumps(to_json(ending), ensure_ascii=False).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
