"""Reports a training program's measurements to tune-cluster: ``from tune_cluster_report import report``.

After every optimiser step of every rank::

    report(step=n, loss=loss.item(), tokens=tokens)
    if report.should_stop():
        break

One file, standard library only, Python 3.8 or later: you may copy it next to the program. It does nothing unless
``TUNE_CLUSTER_REPORT`` names a folder, and it never raises. Lines and limits: ``docs/report-api.md``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

FORMAT_VERSION = 1
MAX_LINE_BYTES = 8 << 10
MAX_FILE_BYTES = 64 << 20
MAX_TEXT = 2000
FOLDER_VARIABLE = "TUNE_CLUSTER_REPORT"
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PADDLE_TRAINER_ID", "RANK_ID", "SLURM_PROCID", "LOCAL_RANK")
"""Variables in which launchers set a process's number if there is neither RANK nor a process group."""
KNOWN = (
    "v source t step loss grad_norm tokens samples step_time_s data_s allocated_bytes reserved_bytes rss_bytes "
    "world_size event type message"
)

__all__ = ["report"]


def rank() -> str:
    """Return this process's rank in the whole training, as text."""
    rank_text = os.environ.get("RANK")
    if rank_text:
        return rank_text
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return str(dist.get_rank())
    process = os.getpid()
    if process not in _launched:
        _launched[process] = next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), "0")
    return _launched[process]


_launched: dict[int, str] = {}
"""Rank by process, from the variables of other launchers, which are set before a process starts."""


def plain(value: Any, depth: int = 3) -> Any:
    """Convert ``value`` to JSON types: tensors and numpy scalars become numbers, unknown types become text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value[:MAX_TEXT] if isinstance(value, str) else value
    if depth and isinstance(value, dict):
        return {str(key): plain(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (list, tuple, set)):
        return [plain(item, depth - 1) for item in value]
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)[:MAX_TEXT]


class Channel:
    """The file to which this process appends its lines, each in one write."""

    def __init__(self) -> None:
        self._fd = -1
        self._owner = ""
        self._written = 0

    def write(self, source: str, **values: Any) -> None:
        """Append one line; do nothing if no folder is set, or if the file has reached its limit.

        Raises:
            OSError: The folder is missing, or the disk is full.
        """
        folder = os.environ.get(FOLDER_VARIABLE)
        if not folder:
            return
        self._open(folder)
        if self._written > MAX_FILE_BYTES - 2 * MAX_LINE_BYTES:
            return
        self._append(_line(source, values))
        if self._written > MAX_FILE_BYTES - 2 * MAX_LINE_BYTES:
            self._append(
                _line(
                    source,
                    {
                        "event": "note",
                        "text": f"the limit of {MAX_FILE_BYTES} bytes is reached; later lines are dropped",
                    },
                )
            )

    def _open(self, folder: str) -> None:
        """Open a new file for a forked process, or when the rank becomes known late."""
        number = rank()
        owner = f"{os.getpid()} {number} {folder}"
        if owner == self._owner:
            return
        path = os.path.join(folder, f"rank{number}.jsonl")
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o600)
        self._owner = owner
        self._written = os.fstat(self._fd).st_size

    def _append(self, line: bytes) -> None:
        self._written += os.write(self._fd, line)


_NUMBERS = frozenset((bool, int, float))


def _line(source: str, values: dict[str, Any]) -> bytes:
    """Format one line of JSON; if it is too long, drop additional values. NaN and Infinity are written as such."""
    record: dict[str, Any] = {"v": FORMAT_VERSION, "source": source, "t": time.time()}
    for key, value in values.items():
        if type(value) in _NUMBERS:  # the usual case; this runs after every step
            record[key] = value
        elif value is not None:
            record[key] = plain(value)
    line = (json.dumps(record) + "\n").encode("ascii")
    if len(line) > MAX_LINE_BYTES:
        known = KNOWN.split()
        record = {key: _short(value) for key, value in record.items() if key in known}
        line = (json.dumps({**record, "shortened": True}) + "\n").encode("ascii")
    return line


def _short(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) else str(value)[:300]


class Reporter:
    """Callable ``report``: call it after every optimiser step."""

    def __init__(self) -> None:
        self._channel = Channel()
        self._step = 0
        self._seen: float | None = None
        self._silent = self._has_complained = False

    def __call__(self, step: Any = None, loss: Any = None, tokens: Any = None, **values: Any) -> None:
        """Report one finished optimiser step.

        Args:
            step: Number of the step, from 1.
            loss: Mean loss of the step, over the global batch or over this rank's part of it.
            tokens: Tokens of the global batch in this step.
            **values: ``grad_norm``, ``samples`` (of the global batch), ``step_time_s`` (default: the time since the
                last report), ``data_s`` (of that, waiting for data), ``allocated_bytes``, ``reserved_bytes``,
                ``world_size``; anything else is kept as a finding.
        """
        if not os.environ.get(FOLDER_VARIABLE):
            return
        try:
            number = int(step)
            # Reading a loss on the device waits for it: only then is the step over.
            measured = {"step": number, "loss": plain(loss), "tokens": plain(tokens), **values}
            measured.setdefault("step_time_s", self._elapsed(number))
            self._write(**measured)
        except Exception as error:
            self._complain(error)

    def begin(self, **values: Any) -> None:
        """Mark the start of the first step; without it the first step's time is unknown."""
        self._seen = time.perf_counter()
        self._write(event="begin", **values)

    def end(self, **values: Any) -> None:
        """Mark the end of training."""
        self._write(event="end", **values)

    def should_stop(self, step: int | None = None) -> bool:
        """Whether enough steps were measured. All ranks get the same last step, so that they stop together.

        Args:
            step: The last finished step; None: the last one reported.
        """
        folder = os.environ.get(FOLDER_VARIABLE)
        if not folder:
            return False
        try:
            with open(os.path.join(folder, "stop"), encoding="ascii") as file:
                return (self._step if step is None else int(step)) >= int(file.read(32))
        except (OSError, ValueError, TypeError):
            return False

    def _elapsed(self, step: int) -> float | None:
        """Return seconds per step since the last report; None at the first."""
        now, seen, steps = time.perf_counter(), self._seen, step - self._step
        self._seen, self._step = now, step
        return None if seen is None or steps < 1 else (now - seen) / steps

    def _write(self, **values: Any) -> None:
        try:
            if not self._silent:
                self._channel.write("report", **values)
        except Exception as error:
            self._complain(error)

    def _complain(self, error: BaseException) -> None:
        """Report an error once, where the tuner sees it; training continues."""
        self._silent = self._silent or isinstance(error, OSError)
        if not self._has_complained:
            self._has_complained = True
            try:
                self._channel.write("report", event="note", text=f"report: {type(error).__name__}: {error}")
            except Exception:
                self._silent = True


report = Reporter()
