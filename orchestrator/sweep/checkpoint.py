"""A copy of a sweep's folded state, saved in its ledger from time to time, so that readers decode only later events.

The events remain the only source of truth. Copies by other versions of the code are ignored. A missing copy only costs
time. Trials are saved in separate blocks, which are decoded on first use.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import platform
import sys
import time
import typing
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import reduce
from pathlib import Path
from typing import Any, get_args

from orchestrator.process_support import pause_s, user_name
from orchestrator.sweep.events import (
    Action,
    ActionRequested,
    Annotated,
    Budget,
    BudgetChanged,
    ChecksRequested,
    TrialsRetried,
)
from orchestrator.sweep.fold import apply, is_retriable
from orchestrator.sweep.ledger import Ledger, LedgerEntry, Request
from orchestrator.sweep.state import Block, LazyBlock, SweepState, Trial, Vector
from trials.files import from_json, to_json

MIN_EVENTS = 256
"""Least number of new events for another copy; fewer are quickly decoded."""

CODE = (
    *(f"orchestrator.sweep.{name}" for name in ("checkpoint", "events", "fold", "state")),
    "orchestrator.objective",
    *(f"trials.{name}" for name in ("files", "health", "outcome", "reports", "spec")),
    "cluster.hardware.topology",
)
"""Modules whose source invalidates a checkpoint."""


def read(ledger: Ledger) -> tuple[int, SweepState]:
    """Return the number of the last event in the copy, and the state after it; 0 and an empty state if the copy is
    missing or damaged.

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
    """Keeps the copy in a running sweep's ledger up to date."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._seq: int | None = None
        self._state = SweepState()
        self._written: tuple[Block[Trial], ...] = ()
        """Blocks as stored in the ledger."""
        self._bodies: dict[int, bytes] = {}
        """Last written content of blocks that are unpacked in the state."""

    def write_if_due(self, min_events: int = MIN_EVENTS) -> None:
        """Write a new copy if there are at least ``min_events`` events since the last one.

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
        """Write the header, and the blocks changed since the last copy."""
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
        # Blocks that no longer change stay packed from now on, to avoid holding their trials twice.
        unchanged = {i: body for i, body in self._bodies.items() if i not in bodies}
        kept = [_lazy(len(block), unchanged[i]) if i in unchanged else block for i, block in enumerate(blocks)]
        self._state = replace(self._state, trials=Vector.of_blocks(kept))
        self._written, self._bodies = self._state.trials.blocks, bodies


def _packed(block: Block[Trial]) -> bytes:
    return zlib.compress(json.dumps([to_json(trial) for trial in block], separators=(",", ":")).encode(), level=1)


def _lazy(size: int, packed: bytes) -> LazyBlock[Trial]:
    return LazyBlock(size, lambda: from_json(tuple[Trial, ...], json.loads(zlib.decompress(packed))))


def _plain(value: Any) -> Any:
    """Convert a field's value to JSON; the codec does not support vectors and sets."""
    if isinstance(value, Vector):
        return [to_json(item) for item in value]
    return sorted(value) if isinstance(value, frozenset) else to_json(value)


def _revived(hint: Any, value: Any) -> Any:
    """Convert a field's value of type ``hint`` back, the inverse of :func:`_plain`."""
    origin = typing.get_origin(hint)
    if origin not in (Vector, frozenset):
        return from_json(hint, value)
    (item,) = typing.get_args(hint)
    return origin(from_json(tuple.__class_getitem__((item, ...)), value))


@functools.cache
def _plain_fields() -> dict[str, Any]:
    """Return the types of the state's fields by name, except trials."""
    hints = typing.get_type_hints(SweepState)
    return {field.name: hints[field.name] for field in fields(SweepState) if field.name != "trials"}


@functools.cache
def _code_version() -> str:
    """Return the digest of this process's code."""
    found = hashlib.sha256()
    for name in CODE:
        found.update(Path(str(sys.modules[name].__file__)).read_bytes())
    return found.hexdigest()


_code_version()  # now, before an update can replace the imported files


# Delivery of the ledger's entries to another system, in order, at that system's pace.


logger = logging.getLogger(__name__)

_FIRST_RETRY_S, _LAST_RETRY_S = 2.0, 120.0
_TURN_S = 5.0
"""Time limit of a delivery that is not urgent, in seconds, so that the sweep is not delayed."""
_MAX_OPEN = 200
"""Most entries between two commits."""


class Outbox:
    """Delivers every entry behind the ledger's cursor ``name``, and moves the cursor only after success.

    Args:
        on_outage: receives the first error of an outage, for a message to users.
    """

    def __init__(self, name: str, on_outage: Callable[[Exception], None]) -> None:
        self._name = name
        self._on_outage = on_outage
        self._folded: tuple[int, SweepState] | None = None
        self._num_failures = 0
        self._retry_at_s = 0.0

    def deliver(
        self,
        ledger: Ledger,
        write: Callable[[LedgerEntry, SweepState], None],
        *,
        urgent: bool,
        commit: Callable[[], None] | None = None,
    ) -> int:
        """Call ``write`` with each entry and the fold up to and including it; return how many succeeded.

        Its first error ends the delivery; the next calls do nothing until a growing pause is over, unless ``urgent``.
        A slow system gets a few entries at a time, unless ``urgent``.

        Args:
            commit: completes what was written since the last commit. Without it, each entry is complete once written.
                After an error, entries are committed one by one, so that a bad one does not hold up those before it.
        """
        if time.monotonic() < self._retry_at_s and not urgent:
            return 0
        num_delivered = num_open = 0
        turn_ends_s = time.monotonic() + _TURN_S
        entries = ledger.following(ledger.cursor(self._name))
        max_open = 1 if commit is None or self._num_failures else _MAX_OPEN
        known = self._folded
        for entry in entries:
            known = (entry.seq, self._fold_to(ledger, entry, known))
            num_open += 1
            is_late = time.monotonic() > turn_ends_s and not urgent
            is_last = is_late or num_open >= max_open or entry is entries[-1]
            try:
                write(entry, known[1])
                if is_last and commit is not None:
                    commit()
            except Exception as error:
                self._fail(error)
                return num_delivered
            if is_last:
                ledger.advance(self._name, entry.seq)
                self._folded = known
                self._num_failures, self._retry_at_s = 0, 0.0
                num_delivered, num_open = num_delivered + num_open, 0
            if is_late:
                break
        return num_delivered

    def _fold_to(self, ledger: Ledger, entry: LedgerEntry, known: tuple[int, SweepState] | None) -> SweepState:
        """Fold up to the entry: from the known state if it directly precedes it, else from the checkpoint or the
        start."""
        if known and known[0] == entry.seq - 1:
            return apply(known[1], entry.event)
        seq, state = read(ledger)
        if seq > entry.seq:
            seq, state = 0, SweepState()
        between = itertools.takewhile(lambda earlier: earlier.seq <= entry.seq, ledger.entries(seq))
        return reduce(apply, (earlier.event for earlier in between), state)

    def _fail(self, error: Exception) -> None:
        if self._num_failures == 0:
            self._on_outage(error)
        logger.debug("delivery to %s failed", self._name, exc_info=error)
        self._retry_at_s = time.monotonic() + pause_s(self._num_failures, first_s=_FIRST_RETRY_S, last_s=_LAST_RETRY_S)
        self._num_failures += 1


# Requests to a running sweep: left in its ledger by any process, processed by the writer of its events.


FAULTS = ("crashed", "timed_out", "gang_lost", "host_oom")
"""Kinds of outcomes that may differ in another launch."""
RequestEvent = ActionRequested | TrialsRetried | ChecksRequested | BudgetChanged | Annotated
NOTE = "note"
"""The action of requests that only annotate."""
RETRIABLE = (*FAULTS, "oom", "infeasible", "diverged", "not_believed", "stopped_early")


def action(name: Action) -> dict[str, Any]:
    """Create the request to pause, drain or cancel."""
    return {"action": name}


def retry(kinds: Collection[str]) -> dict[str, Any]:
    """Create the request to launch trials again that ended in one of these kinds."""
    return {"action": "retry", "kinds": sorted(kinds)}


def checks(*, confirm: Collection[int] = (), profile: Collection[int] = ()) -> dict[str, Any]:
    """Create the request to confirm or profile these trials."""
    return {"action": "check", "confirm": list(confirm), "profile": list(profile)}


def budget(limits: Budget) -> dict[str, Any]:
    """Create the request to continue with this budget."""
    return {"action": "budget", "budget": to_json(limits)}


def note(
    *, trial: int | None, text: str | None, tags: Mapping[str, str], removed_tags: Collection[str]
) -> dict[str, Any]:
    """Create the request to change the note on the sweep or on a trial, see
    :class:`orchestrator.sweep.events.Annotated`."""
    return {"action": NOTE, "trial": trial, "text": text, "tags": dict(tags), "removed_tags": sorted(removed_tags)}


def requester() -> str:
    """Return the requester: user and host."""
    return f"{user_name()}@{platform.node()}"


def last_request(ledger: Ledger) -> int:
    """Return the number of the latest request; 0 if there is none."""
    return max((request.id for request in ledger.requests(0)), default=0)


def new_events(ledger: Ledger, state: SweepState, at_s: float, *, up_to: int | None = None) -> Iterator[RequestEvent]:
    """Yield requests since ``state`` as events; with ``up_to``, only up to that one."""
    for request in ledger.requests(state.num_requests):
        if up_to is None or request.id <= up_to:
            yield _event(request, state, at_s)


def _event(request: Request, state: SweepState, at_s: float) -> RequestEvent:
    name = request.body["action"]
    if name == "check":
        confirm, profile = (tuple(request.body[key]) for key in ("confirm", "profile"))
        return ChecksRequested(at_s=at_s, request=request.id, by=request.by, confirm=confirm, profile=profile)
    if name == "budget":
        limits: Budget = from_json(Budget, request.body["budget"])
        return BudgetChanged(at_s=at_s, request=request.id, by=request.by, budget=limits)
    if name == NOTE:
        return annotated(request, at_s)
    if name in get_args(Action):
        return ActionRequested(at_s=at_s, request=request.id, action=name, by=request.by)
    return TrialsRetried(at_s=at_s, request=request.id, trials=chosen(state, request.body["kinds"]), by=request.by)


def annotated(request: Request, at_s: float) -> Annotated:
    """Return the event of a request made by :func:`note`."""
    body = request.body
    return Annotated(
        at_s=at_s,
        request=request.id,
        by=request.by,
        written_at_s=request.at_s,
        trial=body["trial"],
        text=body["text"],
        tags=body["tags"],
        removed_tags=tuple(body["removed_tags"]),
    )


def chosen(state: SweepState, kinds: Collection[str]) -> tuple[int, ...]:
    """Return the numbers of trials that ended in one of ``kinds`` and can be launched again."""
    return tuple(trial.number for trial in state.trials if trial.status in kinds and is_retriable(state, trial.number))
