"""The commands on production (promote, rollback, history, show, diff) as functions that return JSON documents."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.promotion.manifest import build_manifest, choose, script_of, source_changes
from orchestrator.promotion.records import Record, Records, chain, gaps
from orchestrator.promotion.references import CANDIDATE, PRODUCTION, Difference, compare, describe, read, store
from orchestrator.promotion.release import NONE, ReleaseChange, Releases
from orchestrator.sweep.events import Promoted, sweep_id
from orchestrator.sweep.ledger import Ledger, LedgerError, SweepBusyError
from orchestrator.sweep.ledger import tracking_uri as tracking_uri_of
from orchestrator.sweep.snapshot import Home, check_name, read_snapshot
from orchestrator.sweep.state import SweepState
from orchestrator.tracking.mlflow_store import Registry
from orchestrator.tracking.mlflow_tracker import Tracker

logger = logging.getLogger(__name__)

_HOLD_S = 60.0
"""Seconds to wait for another command that writes to the sweep's ledger."""
_POLL_S = 0.2


def promote(
    name: str,
    home: Home,
    *,
    sweep: str,
    trial: str | None = None,
    reason: str = "",
    expect_current: str | None = None,
    force: bool = False,
    is_candidate: bool = False,
    on_step: Callable[[str], None] = lambda _: None,
    on_phase: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Put the confirmed winner of ``sweep``, or a trial of it, into production as ``name``.

    Args:
        is_candidate: only register it, with the alias ``candidate``, with or without proof.
        on_step: called before every write to the registry; tests end the process there.
        on_phase: receives the next phase, in words.

    Raises:
        ConfigError: it is neither proven nor forced, or the version in production is not the expected one.
        SweepBusyError: the sweep has a running controller.
    """
    check_name(name, "registered name")
    _check_expectation(expect_current)
    on_phase(f"checking the evidence for {sweep!r}")
    with home.open(sweep, read_only=False) as ledger:
        tracker = Tracker(tracking_uri_of(ledger, home))
        changes = source_changes(ledger, script_of(ledger))
        options: dict[str, Any] = {"force": force, "is_candidate": is_candidate, "objections": changes}
        choose(read_snapshot(ledger).state, trial, **options)  # fail before any waiting
        with _held(ledger):
            state = read_snapshot(ledger).state
            chosen = choose(state, trial, **options)
            on_phase("exporting its configuration to all frameworks")
            manifest = build_manifest(ledger, state, chosen)
            on_phase("updating MLflow")
            with tracker.reached():
                _bring_up_to_date(tracker, ledger, state, chosen.trial.number)
        on_phase(f"registering it as {name}")
        with tracker.reached():
            releases = Releases(tracker, on_step)
            if is_candidate:
                change = releases.propose(name, manifest, reason=reason)
            else:
                change = releases.promote(name, manifest, reason=reason, expect_current=expect_current)
            on_phase("adding it to the sweep's report")
            _note_in_ledgers(home, tracker, releases, name)
    return {
        **_change_json(change),
        "alias": CANDIDATE if is_candidate else PRODUCTION,
        "forced": chosen.forced,
        "missing": list(chosen.missing),
        "trial": chosen.trial.number,
        "recipe": dict(manifest.content),
    }


def roll_back(
    name: str,
    home: Home,
    *,
    to: str | None = None,
    reason: str = "",
    expect_current: str | None = None,
    tracking_uri: str | None = None,
    on_step: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Put the previous version, or version ``to``, back into production.

    Raises:
        ConfigError: there is none, its files were altered, or the version in production is not the expected one.
    """
    _check_expectation(expect_current)
    tracker = store(home, tracking_uri)
    with tracker.reached():
        releases = Releases(tracker, on_step)
        change = releases.roll_back(name, to=to, reason=reason, expect_current=expect_current)
        _note_in_ledgers(home, tracker, releases, name)
    return _change_json(change)


def history(name: str, home: Home, *, tracking_uri: str | None = None) -> dict[str, Any]:
    """The history of ``name`` in production, newest record first.

    Raises:
        ConfigError: nothing has been promoted as ``name``.
    """
    check_name(name, "registered name")
    tracker = store(home, tracking_uri)
    with tracker.reached():
        registry = Registry(tracker.client())
        records = Records(registry, tracker.uri).of(name)
        found = registry.find(name, alias=PRODUCTION)
    if not records and found is None:
        raise ConfigError(
            f"nothing has been promoted as {name}",
            remedy=f"To promote a sweep, run: tune-cluster promote SWEEP --name {name}",
        )
    current = found.version if found else None
    last = next(reversed(chain(records)), None)
    return {
        "name": name,
        "production": current,
        "is_settled": (last.to_version if last else "") == (current or "")
        and not any(record.state == "begun" for record in records),
        "gaps": [record.number for record in gaps(records)],
        "records": [record.to_json() for record in reversed(records)],
    }


def show(reference: str, home: Home, *, tracking_uri: str | None = None) -> dict[str, Any]:
    """The manifest registered as ``reference``."""
    return read(store(home, tracking_uri), reference).to_json()


def diff(a: str, b: str, home: Home, *, tracking_uri: str | None = None) -> Difference:
    """The differences between two registered versions, or trials of sweeps."""
    return compare(describe(a, home, tracking_uri), describe(b, home, tracking_uri))


def _check_expectation(expected: str | None) -> None:
    if expected is not None and expected != NONE and not expected.isdigit():
        raise ConfigError(
            f"{expected!r} is not a version number",
            key="--expect-current",
            remedy=f"Use a version number, or {NONE!r}.",
        )


def _change_json(change: ReleaseChange) -> dict[str, Any]:
    record = change.record
    return {
        "name": record.name,
        "version": record.to_version,
        "previous_version": record.from_version or None,
        "is_new": change.is_new,
        "skipped": list(change.skipped),
        "record": record.to_json(),
    }


def _bring_up_to_date(tracker: Tracker, ledger: Ledger, state: SweepState, trial: int) -> None:
    """Update the sweep in MLflow: the evidence refers to its runs."""
    tracker.sync(ledger, state)
    if tracker.find_run(state, trial) is None:
        raise ConfigError(
            f"trial {trial} in the sweep {state.sweep.sweep!r} is not recorded in MLflow",
            remedy="Check that the tracking store is reachable, and retry.",
        )


def _note_in_ledgers(home: Home, tracker: Tracker, releases: Releases, name: str) -> None:
    """Write missing records of ``name`` into the ledgers of their sweeps, if those are in this home.

    The next command repeats failed writes.
    """
    records = chain(releases.records.of(name))
    sweeps = {(record.sweep, record.sweep_id) for record in records}
    known = set(home.sweeps())
    for sweep, identity in sorted(sweeps):
        if sweep in known:
            of_it = [record for record in records if identity in (record.sweep_id, record.from_sweep_id)]
            try:
                _note_in_ledger(home, tracker, sweep, identity, of_it)
            except (LedgerError, ConfigError) as error:
                logger.warning("the ledger of %s will be updated later: %s", sweep, error)


def _note_in_ledger(home: Home, tracker: Tracker, sweep: str, identity: str, records: list[Record]) -> None:
    with home.open(sweep, read_only=False) as ledger:
        if not _missing(ledger, identity, records):
            return
        with _held(ledger):
            state = read_snapshot(ledger).state
            for record in _missing(ledger, identity, records):
                at_s = max(record.at_s, state.now_s) if state.is_over else state.now_s  # adds no active time
                ledger.append(Promoted(at_s=at_s, record=record.for_ledger()))
            tracker.sync(ledger, read_snapshot(ledger).state)


def _missing(ledger: Ledger, identity: str, records: list[Record]) -> list[Record]:
    state = read_snapshot(ledger).state
    if sweep_id(state.sweep) != identity:
        return []  # another sweep of that name
    noted = {event.record["record_id"] for event in state.promotions}
    return [record for record in records if record.record_id not in noted]


@contextmanager
def _held(ledger: Ledger) -> Iterator[None]:
    """Hold the ledger; waits for other commands, but not for a running controller.

    Raises:
        SweepBusyError: it is not held by a short command.
    """
    deadline_s = time.monotonic() + _HOLD_S
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(ledger.hold())
                break
            except SweepBusyError:
                if time.monotonic() > deadline_s or not read_snapshot(ledger).state.is_over:
                    raise
                time.sleep(_POLL_S)
        yield
