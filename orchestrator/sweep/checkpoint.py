"""A copy of a sweep's folded state, kept in its ledger now and then: who reads a long sweep decodes only later events.

The events stay the one source of truth. A copy that other code made is not looked at, and nothing but time is lost
when there is none. Trials are kept in blocks of their own, which are decoded when somebody asks for one of them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import typing
import zlib
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import reduce
from pathlib import Path
from typing import Any

from orchestrator.sweep.fold import apply
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.vector import Block, LazyBlock, Vector
from trials.codec import from_json, to_json

MIN_EVENTS = 256
"""New events that are worth another copy; fewer are quickly decoded."""

CODE = (
    *(f"orchestrator.sweep.{name}" for name in ("checkpoint", "events", "fold", "limits", "state", "values")),
    "orchestrator.objective",
    "orchestrator.vector",
    *(f"trials.{name}" for name in ("codec", "outcome", "shapes", "spec")),
    *(f"trials.reports.{name}" for name in ("devices", "disturbance", "findings", "profile", "rates", "script")),
    "cluster.hardware.topology",
)
"""Modules that say what a state is and what events make of it. A copy holds for their very text."""


def read(ledger: Ledger) -> tuple[int, SweepState]:
    """The number of the last event in the copy, and the state after it; 0 and an empty state where there is none, or
    where it is damaged.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    parts = ledger.checkpoint()
    try:
        return _unpacked(parts) if parts else (0, SweepState())
    except (ValueError, KeyError, TypeError):
        return 0, SweepState()


def _unpacked(parts: Sequence[bytes]) -> tuple[int, SweepState]:
    header = json.loads(parts[0])
    if header["code"] != _code_version():
        return 0, SweepState()
    blocks = [_lazy(size, part) for size, part in zip(header["sizes"], parts[1:], strict=True)]
    plain = {name: _revived(hint, header["state"][name]) for name, hint in _plain_fields().items()}
    return header["seq"], SweepState(trials=Vector.of_blocks(blocks), **plain)


class CheckpointWriter:
    """Keeps the copy in the ledger of a running sweep up to date."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._seq: int | None = None
        self._state = SweepState()
        self._written: tuple[Block[Trial], ...] = ()
        """Blocks as they are in the ledger."""
        self._bodies: dict[int, bytes] = {}
        """What was written last of blocks that the state holds unpacked."""

    def tend(self, min_events: int = MIN_EVENTS) -> None:
        """Write a new copy where at least ``min_events`` events have come since the last one.

        Raises:
            LedgerError: the ledger cannot be read or written.
        """
        if self._seq is None:
            self._seq, self._state = read(self._ledger)
            self._written = self._state.trials.blocks
        if self._ledger.last_seq() - self._seq < max(1, min_events):
            return
        entries = self._ledger.following(self._seq)
        self._state = reduce(apply, (entry.event for entry in entries), self._state)
        self._seq = entries[-1].seq
        self._write()

    def _write(self) -> None:
        """Write the header, and the blocks that events have changed since the copy before."""
        blocks, written = self._state.trials.blocks, self._written
        changed = [i for i, block in enumerate(blocks) if i >= len(written) or block is not written[i]]
        bodies = {i: _packed(blocks[i]) for i in changed}
        header = {
            "code": _code_version(),
            "seq": self._seq,
            "sizes": [len(block) for block in blocks],
            "state": {name: _plain(getattr(self._state, name)) for name in _plain_fields()},
        }
        parts = {0: json.dumps(header).encode(), **{i + 1: body for i, body in bodies.items()}}
        self._ledger.put_checkpoint(parts, 1 + len(blocks))
        # Blocks that have come to rest are held packed from here on: memory would hold their trials twice.
        settled = {i: body for i, body in self._bodies.items() if i not in bodies}
        kept = [_lazy(len(block), settled[i]) if i in settled else block for i, block in enumerate(blocks)]
        self._state = replace(self._state, trials=Vector.of_blocks(kept))
        self._written, self._bodies = self._state.trials.blocks, bodies


def _packed(block: Block[Trial]) -> bytes:
    return zlib.compress(json.dumps([to_json(trial) for trial in block], separators=(",", ":")).encode(), level=1)


def _lazy(size: int, packed: bytes) -> LazyBlock[Trial]:
    return LazyBlock(size, lambda: from_json(tuple[Trial, ...], json.loads(zlib.decompress(packed))))


def _plain(value: Any) -> Any:
    """The value of a field as JSON; the codec does not know vectors and sets."""
    if isinstance(value, Vector):
        return [to_json(item) for item in value]
    return sorted(value) if isinstance(value, frozenset) else to_json(value)


def _revived(hint: Any, value: Any) -> Any:
    """The value of a field of type ``hint``, back from :func:`_plain`."""
    origin = typing.get_origin(hint)
    if origin not in (Vector, frozenset):
        return from_json(hint, value)
    (item,) = typing.get_args(hint)
    return origin(from_json(tuple.__class_getitem__((item, ...)), value))


@functools.cache
def _plain_fields() -> dict[str, Any]:
    """Types of the state's fields by name, trials left out."""
    hints = typing.get_type_hints(SweepState)
    return {field.name: hints[field.name] for field in fields(SweepState) if field.name != "trials"}


@functools.cache
def _code_version() -> str:
    """Digest of the code that this process runs."""
    found = hashlib.sha256()
    for name in CODE:
        found.update(Path(str(sys.modules[name].__file__)).read_bytes())
    return found.hexdigest()


_code_version()  # now: later, an update may have put other files in the place of those that were imported
