"""Tells tune-cluster what a training program measures: ``from tune_cluster_report import report``.

After every optimiser step of every rank::

    report(step=n, loss=loss.item(), tokens=tokens)
    if report.should_stop():
        break

One file, standard library only, Python 3.8 or later: it may be copied beside the program. It does nothing unless
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
"""Where launchers put a process' number if there is no RANK, and no process group to ask."""
KNOWN = (
    "v source t step loss grad_norm tokens samples step_time_s data_s allocated_bytes reserved_bytes rss_bytes "
    "world_size event type message"
)

__all__ = ["report"]


def rank() -> str:
    """Number of this process among all of the training, as text."""
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
"""Rank by process, from the variables of other launchers, which stand when a process starts."""


def plain(value: Any, depth: int = 3) -> Any:
    """``value`` as JSON can hold it: tensors and numpy's scalars become numbers, what is unknown becomes text."""
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
    """The file that this process appends its lines to, each in one write."""

    def __init__(self) -> None:
        self._fd = -1
        self._owner = ""
        self._written = 0

    def write(self, source: str, **values: Any) -> None:
        """Appends one line; ignored where no folder is named, and once the file has reached its limit.

        Raises:
            OSError: The folder is gone, or the disk is full.
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
                _line(source, {"event": "note", "text": f"{MAX_FILE_BYTES} bytes are reached, silent from now"})
            )

    def _open(self, folder: str) -> None:
        """A forked process, or one that learns its rank late, gets a file of its own."""
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
    """One line of JSON; if it is too long, without what nobody asked for. NaN and Infinity are written as such."""
    record: dict[str, Any] = {"v": FORMAT_VERSION, "source": source, "t": time.time()}
    for key, value in values.items():
        if type(value) in _NUMBERS:  # most are, and this runs after every step
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
    """What ``report`` is: call it after every optimiser step."""

    def __init__(self) -> None:
        self._channel = Channel()
        self._step = 0
        self._seen: float | None = None
        self._silent = self._has_complained = False

    def __call__(self, step: Any = None, loss: Any = None, tokens: Any = None, **values: Any) -> None:
        """One finished optimiser step.

        Args:
            step: Its number, from 1.
            loss: Mean loss of the step: over the global batch, or over this rank's part of it.
            tokens: Tokens of the global batch in this step.
            **values: ``grad_norm``, ``samples`` (of the global batch), ``step_time_s`` (else the time since the last
                report), ``data_s`` (thereof waiting for data), ``allocated_bytes``, ``reserved_bytes``,
                ``world_size``; anything else is kept as a finding.
        """
        if not os.environ.get(FOLDER_VARIABLE):
            return
        try:
            number = int(step)
            # A loss on the device waits for it: only then is the step over.
            measured = {"step": number, "loss": plain(loss), "tokens": plain(tokens), **values}
            measured.setdefault("step_time_s", self._elapsed(number))
            self._write(**measured)
        except Exception as error:
            self._complain(error)

    def begin(self, **values: Any) -> None:
        """The first step begins now; without it the first step's time is unknown."""
        self._seen = time.perf_counter()
        self._write(event="begin", **values)

    def end(self, **values: Any) -> None:
        """Training is over."""
        self._write(event="end", **values)

    def should_stop(self, step: int | None = None) -> bool:
        """Whether enough steps were measured. All ranks are told the same step, so that they stop together.

        Args:
            step: The last finished step; None: the one reported last.
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
        """Seconds per step since the last report; None at the first."""
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
        """Says once what went wrong, where the tuner sees it; training goes on."""
        self._silent = self._silent or isinstance(error, OSError)
        if not self._has_complained:
            self._has_complained = True
            try:
                self._channel.write("report", event="note", text=f"report: {type(error).__name__}: {error}")
            except Exception:
                self._silent = True


report = Reporter()
