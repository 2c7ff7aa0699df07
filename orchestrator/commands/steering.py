"""Steers sweeps: pause, drain, cancel, retry, confirm, profile, note, delete."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.text import Text

from orchestrator import units
from orchestrator.config.sweep import SweepSpec
from orchestrator.console import SafeConsole
from orchestrator.controller.step import apply_requests
from orchestrator.errors import ConfigError
from orchestrator.process_support import Invocation
from orchestrator.report.descriptions import note_text
from orchestrator.report.summary import note_json, notes_of
from orchestrator.status.overview import follow
from orchestrator.sweep.checkpoint import action, annotated, checks, chosen, requester
from orchestrator.sweep.checkpoint import budget as budget_request
from orchestrator.sweep.checkpoint import note as note_request
from orchestrator.sweep.checkpoint import retry as retry_request
from orchestrator.sweep.events import Action, Budget, UserNote
from orchestrator.sweep.fold import apply
from orchestrator.sweep.ledger import FILE_NAME, Ledger, LedgerError, Request, SweepBusyError, tracking_uri
from orchestrator.sweep.snapshot import AT_REST, ENDED, Home, Snapshot, is_at_work, read_snapshot
from orchestrator.sweep.state import SweepState, SweepStatus, find_trial, spent_by_search
from orchestrator.text import one_line, plain
from orchestrator.tracking.mlflow_tracker import CURSOR, Tracker
from orchestrator.units import trial_id
from trials.files import fields_json
from trials.secrets import MASK, is_secret_name, is_secret_option, redact

# Requests to a sweep from outside its controller: pause, drain, cancel, retry, confirm, profile, note.


CLOSING_S = 30.0
"""How long to wait for the controller of a sweep that has just ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The state of a request."""

    sweep: str
    request: int
    state: SweepStatus
    is_controlled: bool
    """Whether a controller is running, which handles the request within a second or two."""
    trials: tuple[int, ...] = ()
    """Trials to be launched again, confirmed or profiled."""

    def to_json(self) -> dict[str, Any]:
        return {**fields_json(self, "sweep", "request", "state", "trials"), "controlled": self.is_controlled}


def request_action(name: str, home: Home, what: Action) -> Receipt:
    """Request the sweep to pause, drain or end. Without a running controller it takes effect at once.

    Raises:
        ConfigError: the sweep does not exist, or is already over.
    """
    with home.open(name, read_only=False, begun=False) as ledger:
        state = read_snapshot(ledger).state
        _check_open(name, state)
        number = ledger.add_request(action(what), by=requester(), at_s=time.time())
        return _answer(name, ledger, number)


def retry(name: str, home: Home, kinds: Collection[str]) -> Receipt:
    """Request a new launch of the trials that ended in one of ``kinds``; reopens a sweep that is over.

    Raises:
        ConfigError: the sweep does not exist, was cancelled, or has no such trials.
    """
    with home.open(name, read_only=False) as ledger:
        state = read_snapshot(ledger).state
        if state.status == "cancelled":
            raise ConfigError(f"the sweep {name!r} was cancelled", remedy="Submit the file under another name.")
        if spent := spent_by_search(state):
            raise ConfigError(
                f"the sweep {name!r} cannot run more trials: {spent}", remedy="Resubmit its file with a larger budget."
            )
        trials = chosen(state, kinds)
        if not trials:
            counts = ", ".join(f"{status} {count}" for status, count in state.counts().items()) or "none"
            raise ConfigError(
                f"the sweep {name!r} has no trial that ended as {' or '.join(sorted(kinds))}",
                remedy=f"Trials: {counts}.",
            )
        number = ledger.add_request(retry_request(kinds), by=requester(), at_s=time.time())
        return _answer(name, ledger, number, trials)


def change_budget(name: str, home: Home, budget: Budget) -> Receipt:
    """Change the budget of the sweep; may reopen one that ended because its budget was spent.

    Raises:
        ConfigError: the sweep does not exist.
    """
    with home.open(name, read_only=False) as ledger:
        return _answer(name, ledger, ledger.add_request(budget_request(budget), by=requester(), at_s=time.time()))


def request_checks(name: str, home: Home, what: Literal["confirm", "profile"], trial: str | None) -> Receipt:
    """Request a trial to be confirmed against the baseline, or profiled; reopens a finished sweep.

    Args:
        trial: in any form of :func:`orchestrator.sweep.state.find_trial`; None: the best one to
            confirm, the winner to profile.

    Raises:
        ConfigError: the sweep or trial does not exist, it was not measured, or the sweep failed or was cancelled.
    """
    with home.open(name, read_only=False) as ledger:
        seen = read_snapshot(ledger)
        state = seen.state
        if state.status in ("cancelled", "failed"):
            end = units.with_reason(state.status, state.finish_reason, ": ")
            raise ConfigError(f"the sweep {name!r} has ended ({end})", remedy="Submit a new sweep.")
        chosen_trial = find_trial(state, trial, name) if trial else (state.best if what == "confirm" else state.winner)
        if chosen_trial is not None and chosen_trial.check is not None:
            of = trial_id(chosen_trial.check.of)
            raise ConfigError(f"trial {trial} is only a check of {of}", remedy=f"Use {of} instead.")
        script = SweepSpec.from_json(seen.spec).script if what == "profile" and seen.spec else None
        if script is not None and not script.hook:
            raise ConfigError(
                f"profiling requires the hook, but workload.metrics.hook is false in the sweep {name!r}",
                remedy="Submit a sweep with workload.metrics.hook: true.",
            )
        if chosen_trial is None or chosen_trial.measurement is None:
            raise ConfigError(
                f"{f'trial {trial}' if trial else 'the best trial'} in the sweep {name!r} was not measured",
                remedy="Choose another trial.",
            )
        if what == "confirm" and chosen_trial.number == 0:
            raise ConfigError(
                "the baseline cannot be confirmed, because trials are compared with it", remedy="Choose another trial."
            )
        request = checks(**{what: (chosen_trial.number,)})
        number = ledger.add_request(request, by=requester(), at_s=time.time())
        return _answer(name, ledger, number, (chosen_trial.number,))


def _check_open(name: str, state: SweepState) -> None:
    if state.is_over:
        raise ConfigError(f"the sweep {name!r} is already {state.status}", remedy="There is nothing to stop.")


def _answer(name: str, ledger: Ledger, number: int, trials: tuple[int, ...] = ()) -> Receipt:
    """The state of request ``number``: a running controller handles it; without one it takes effect here."""
    deadline_s = time.monotonic() + CLOSING_S
    seen = read_snapshot(ledger)
    while seen.is_held and seen.state.is_over and time.monotonic() < deadline_s:
        time.sleep(0.2)  # its controller is about to exit and accepts no more requests
        seen = read_snapshot(ledger, seen)
    state, is_controlled = seen.state, True
    with contextlib.suppress(SweepBusyError):
        if not ledger.is_held():
            with ledger.hold():
                state, is_controlled = apply_requests(ledger, ledger.folder), False
                if state.created is None:  # it was waiting for its first nodes when its controller died
                    ledger.discard()
    return Receipt(sweep=name, request=number, state=state.status, is_controlled=is_controlled, trials=trials)


MAX_NOTE_CHARS = 1000
MAX_TAGS = 20
"""Tags of a sweep or trial."""
MAX_TAG_CHARS = 250
"""Characters of a tag's value."""
TAG_PATTERN = r"[A-Za-z][A-Za-z0-9_.:/-]{0,63}"
RESERVED_TAGS = ("tc.", "mlflow.")
"""Prefixes of the tags that tune-cluster and MLflow write themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Notes on a sweep or its trials, after a change if one was requested."""

    sweep: str
    request: int | None
    """None: nothing was to be changed."""
    is_controlled: bool
    """Whether a running controller records the change, within a second or two."""
    notes: tuple[tuple[int | None, UserNote], ...]
    """By trial; None: on the sweep."""
    replaced: str = ""
    """The text before the change, if it was replaced or removed."""

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``note --json``."""
        body = fields_json(self, "sweep", "request")
        return {**body, "controlled": self.is_controlled, "notes": [note_json(*one) for one in self.notes]}

    def lines(self) -> list[str]:
        """The lines for people."""
        found = [f"{self.sweep if trial is None else trial_id(trial)}  {note_text(note)}" for trial, note in self.notes]
        return [one_line(line) for line in found] or [f"no notes in {self.sweep}"]


def read_notes(name: str, home: Home, trial: str | None = None) -> Noted:
    """The notes on a sweep and all its trials, or only on ``trial``.

    Raises:
        ConfigError: the sweep or trial does not exist.
    """
    state = home.read(name, begun=True).state
    number = find_trial(state, trial, name).number if trial else None
    found = tuple(one for one in notes_of(state) if trial is None or one[0] == number)
    return Noted(sweep=name, request=None, is_controlled=False, notes=found)


def annotate(
    name: str,
    home: Home,
    *,
    trial: str | None = None,
    text: str | None = None,
    tags: Mapping[str, str] | None = None,
    removed_tags: Collection[str] = (),
) -> Noted:
    """Change the note on a sweep, or on ``trial`` of it; the sweep may be running or over. Secrets are masked.

    Args:
        text: replaces the former text; empty: removes it; None: keeps it.
        tags: to set.
        removed_tags: those that do not exist are ignored.

    Raises:
        ConfigError: the sweep or trial does not exist, or the note is invalid.
    """
    tags = tags or {}
    clean = None if text is None else redact(" ".join(plain(text).split()))
    _check_note(clean, tags, removed_tags)
    safe = {key: _safe_value(key, value) for key, value in tags.items()}
    with home.open(name, read_only=False) as ledger:
        before = read_snapshot(ledger).state
        number = None if trial is None else find_trial(before, trial, name).number
        body = note_request(trial=number, text=clean, tags=safe, removed_tags=removed_tags)
        request = Request(0, time.time(), requester(), body)
        after = apply(before, annotated(request, before.now_s))
        note = after.note if number is None else after.trials[number].note
        if note is not None and len(note.tags) > MAX_TAGS:
            raise ConfigError(
                f"there are {len(note.tags)} tags; the limit is {MAX_TAGS}",
                remedy="To remove a tag, use --remove-tag KEY.",
            )
        receipt = _answer(name, ledger, ledger.add_request(body, by=request.by, at_s=request.at_s))
        if not receipt.is_controlled:
            _record(ledger, home)
    former = before.note if number is None else before.trials[number].note
    is_replaced = former is not None and clean is not None and former.text != clean
    return Noted(
        sweep=name,
        request=receipt.request,
        is_controlled=receipt.is_controlled,
        notes=() if note is None else ((number, note),),
        replaced=former.text if is_replaced and former is not None else "",
    )


def _check_note(text: str | None, tags: Mapping[str, str], removed_tags: Collection[str]) -> None:
    if text is not None and len(text) > MAX_NOTE_CHARS:
        raise ConfigError(
            f"the note has {len(text):,} characters; the limit is {MAX_NOTE_CHARS:,}", remedy="Shorten the note."
        )
    for key in (*tags, *removed_tags):
        if re.fullmatch(TAG_PATTERN, key) is None:
            raise ConfigError(
                f"{key!r} is not a valid tag",
                remedy="Tags have 1 to 64 letters, digits, '_', '.', ':', '/' or '-', and start with a letter.",
            )
        if key.startswith(RESERVED_TAGS):
            raise ConfigError(
                f"the tag {key!r} is reserved", remedy="Use a name that does not start with 'tc.' or 'mlflow.'."
            )
    for key, value in tags.items():
        if not value.strip() or len(value) > MAX_TAG_CHARS:
            raise ConfigError(
                f"the value of the tag {key!r} has {len(value.strip())} characters; expected 1 to {MAX_TAG_CHARS}",
                remedy=f"To remove the tag, use --remove-tag {key}.",
            )
        if key in removed_tags:
            raise ConfigError(f"the tag {key!r} is both set and removed", remedy="Remove one of the two.")


def _safe_value(key: str, value: str) -> str:
    """The value on one line, without secrets."""
    return MASK if is_secret_option(key) or is_secret_name(key) else redact(" ".join(plain(value).split()))


def _record(ledger: Ledger, home: Home) -> None:
    """Update MLflow's record of a sweep without a controller, if it has one. If that fails, its next controller or
    note does it."""
    if ledger.cursor(CURSOR):
        with contextlib.suppress(SweepBusyError), ledger.hold():
            Tracker(tracking_uri(ledger, home)).sync(ledger, read_snapshot(ledger).state)


# Pauses, drains or cancels a sweep and waits until it takes effect; removes it (``delete``, ``submit --replace``).


Notify = Callable[[Snapshot], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The result of the request."""

    sweep: str
    action: Action
    request: int
    state: str
    """The sweep's phase, see :attr:`orchestrator.sweep.snapshot.Snapshot.phase`; or ``withdrawn``: it was cancelled
    before it had nodes, and nothing was saved."""
    reason: str
    is_done: bool

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``pause --json``, ``drain --json`` and ``cancel --json``."""
        return {**fields_json(self, "sweep", "action", "request", "state", "reason"), "done": self.is_done}


def stop(name: str, home: Home, action: Action, *, wait: bool, notify: Notify) -> Stopped:
    """Request the sweep to pause, drain or end; with ``wait``, until it takes effect or no controller is left.

    Raises:
        ConfigError: the sweep does not exist, or is already over.
    """
    with home.open(name, begun=False) as ledger:
        answer = request_action(name, home, action)
        is_done = False
        for seen in follow(ledger, home) if wait else [read_snapshot(ledger)]:
            if is_done and not _is_done(seen, action):
                break  # it was resumed meanwhile
            is_done = _is_done(seen, action)
            if is_done and not seen.is_held:
                break
            notify(seen)
        is_withdrawn = not ledger.path.exists()
    return Stopped(
        sweep=name,
        action=action,
        request=answer.request,
        state="withdrawn" if is_withdrawn else seen.phase,
        reason="" if is_withdrawn else seen.reason,
        is_done=is_done or is_withdrawn,
    )


@contextmanager
def progress(console: Console | None = None) -> Iterator[Notify]:
    """Shows on stderr what the command is waiting for."""
    console = console or SafeConsole(stderr=True)
    with console.status("sending the request") as status:
        last_line = ""

        def notify(sweep: Snapshot) -> None:
            nonlocal last_line
            words = _progress_text(sweep)
            status.update(Text(words))
            if words != last_line and not console.is_terminal:
                console.print(words, highlight=False, markup=False)
            last_line = words

        yield notify


def render(stopped: Stopped) -> RenderableType:
    """One line for people: the sweep's state, and whether the request has taken effect."""
    style = "green" if stopped.is_done else "yellow"
    words = f"{stopped.sweep}: {stopped.state}" + (f", {one_line(plain(stopped.reason))}" if stopped.reason else "")
    more = "" if stopped.is_done else f"; {stopped.action} requested, not yet in effect"
    return Text.assemble((words, style), more)


def _is_done(sweep: Snapshot, action: Action) -> bool:
    return sweep.phase in (ENDED if action == "cancel" else AT_REST)


def _progress_text(sweep: Snapshot) -> str:
    running = " ".join(units.trial_id(number) for number in sorted(sweep.state.running))
    return f"{sweep.name} is {sweep.phase}" + (f"; {running} still running" if running else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What was removed with a sweep."""

    sweep: str
    folder: Path
    num_trials: int | None
    """None: the ledger could not be read."""
    num_bytes: int
    num_runs: int | None
    """Runs deleted in MLflow; None: not requested."""
    stays: tuple[str, ...]
    """What is left elsewhere, in sentences."""

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``delete --json``."""
        body = {"trials": self.num_trials, "bytes": self.num_bytes, "mlflow_runs": self.num_runs}
        return {**fields_json(self, "sweep", "folder", "stays"), **body}

    def lines(self) -> list[str]:
        """The lines for people."""
        trials = "an unreadable ledger" if self.num_trials is None else units.count(self.num_trials, "trial")
        lines = [f"removed {self.folder}: {trials}, {units.num_bytes(self.num_bytes)}"]
        if self.num_runs is not None:
            lines.append(f"deleted {units.count(self.num_runs, 'run')} in MLflow; `mlflow gc` frees the space")
        return [*lines, *self.stays]


def describe(name: str, home: Home) -> str:
    """What would be removed, in a few words for the prompt.

    Raises:
        ConfigError: the sweep does not exist.
    """
    sweep = _read(name, home)
    what = "its ledger cannot be read" if sweep is None else units.count(len(sweep.state.trials), "trial")
    measured = " and their measurements" if sweep is not None and sweep.state.best is not None else ""
    return f"{home.sweep_folder(name)} ({what}{measured})"


def delete(name: str, home: Home, *, force: bool = False, in_mlflow: bool = False) -> Removed:
    """Remove the sweep's folder: ledger, logs, attempts. MLflow comes first: if that fails, nothing is lost.

    Args:
        force: even if a promoted configuration depends on it, or its ledger cannot be read.
        in_mlflow: also delete its MLflow runs.

    Raises:
        ConfigError: the sweep does not exist, has a running controller, something depends on it, or MLflow cannot be
            reached.
    """
    sweep = _read(name, home)
    if not force:
        _refuse_what_rests_on_it(name, sweep)
    with _alone(name, home, sweep):
        num_runs = None
        if in_mlflow and sweep is not None:
            tracker = Tracker(sweep.tracking_uri or home.default_tracking_uri)
            num_runs = tracker.delete_runs(sweep.state, sweep.recorded)
        return _remove(name, home, sweep, num_runs)


def replace_unmeasured(name: str, home: Home) -> Removed:
    """Remove a sweep without measurements, to free its name.

    Raises:
        ConfigError: it has measurements, or a running controller.
    """
    sweep = _read(name, home)
    best = sweep.state.best if sweep is not None else None
    if sweep is None or best is not None:
        what = f"has measured {units.trial_id(best.number)}" if best is not None else "has a ledger that cannot be read"
        typed = Invocation.current(home.path)
        raise ConfigError(
            f"the sweep {name!r} {what}; --replace only replaces sweeps without measurements",
            key="name",
            remedy=f"Choose another name, resume the sweep with `{typed.command('resume', name)}`, or delete it with "
            f"`{typed.command('delete', name)}`.",
        )
    with _alone(name, home, sweep):
        return _remove(name, home, sweep, None)


def _read(name: str, home: Home) -> Snapshot | None:
    """The sweep's snapshot; None if its ledger cannot be read.

    Raises:
        ConfigError: the sweep does not exist.
    """
    try:
        return home.read(name)
    except LedgerError:
        return None


def _refuse_what_rests_on_it(name: str, sweep: Snapshot | None) -> None:
    if sweep is None:
        raise ConfigError(
            f"cannot read the ledger of the sweep {name!r}, so promoted configurations may depend on the sweep",
            remedy="To delete the sweep anyway, use --force.",
        )
    promoted = sorted(
        {f"{event.record['name']} version {event.record['to_version']}" for event in sweep.state.promotions}
    )
    if promoted:
        raise ConfigError(
            f"promoted configurations depend on the sweep {name!r}: {', '.join(promoted)}",
            remedy="To delete the sweep anyway, use --force.",
        )


@contextmanager
def _alone(name: str, home: Home, sweep: Snapshot | None) -> Iterator[None]:
    """While inside, no controller can start on the sweep.

    Raises:
        ConfigError: one is running.
    """
    busy = ConfigError(
        f"the sweep {name!r} has a running controller",
        remedy=f"To stop the sweep first, run: tune-cluster cancel {name}",
    )
    if is_at_work(home, name):
        raise busy
    if sweep is None:
        yield
        return
    try:
        with home.open(name, read_only=False, begun=False) as ledger, ledger.hold():
            yield
    except SweepBusyError:
        raise busy from None


def _remove(name: str, home: Home, sweep: Snapshot | None, num_runs: int | None) -> Removed:
    """Remove the folder, ledger first: if interrupted, the rest no longer counts as a sweep."""
    folder = home.sweep_folder(name)
    size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
    for file in (FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"):
        (folder / file).unlink(missing_ok=True)
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)
    return Removed(
        sweep=name,
        folder=folder,
        num_trials=None if sweep is None else len(sweep.state.trials),
        num_bytes=size,
        num_runs=num_runs,
        stays=() if sweep is None else tuple(_stays(sweep, is_in_mlflow=num_runs is None)),
    )


def _stays(sweep: Snapshot, *, is_in_mlflow: bool) -> Iterator[str]:
    if is_in_mlflow and sweep.recorded is not None:
        yield "its MLflow runs were kept; --mlflow deletes them"
    attempts = (attempt for trial in sweep.state.trials for attempt in trial.attempts)
    nodes = {device.node for attempt in attempts for device in attempt.ranks}
    if len(nodes) > 1 and not sweep.is_virtual:
        yield f"logs on other nodes were kept ({units.count(len(nodes), 'node')})"
