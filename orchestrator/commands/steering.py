"""Steers sweeps: pause, drain, cancel, retry, confirm, profile, delete."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator
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
from orchestrator.status.overview import follow
from orchestrator.sweep.checkpoint import action, checks, chosen, requester
from orchestrator.sweep.checkpoint import budget as budget_request
from orchestrator.sweep.checkpoint import retry as retry_request
from orchestrator.sweep.events import Action, Budget
from orchestrator.sweep.ledger import FILE_NAME, Ledger, LedgerError, SweepBusyError
from orchestrator.sweep.snapshot import AT_REST, ENDED, Home, Snapshot, is_at_work, read_snapshot
from orchestrator.sweep.state import SweepState, SweepStatus, find_trial, spent_by_search
from orchestrator.text import one_line, plain
from orchestrator.tracking.mlflow_tracker import Tracker
from orchestrator.units import trial_id
from trials.files import fields_json

# Asks something of a sweep from outside its controller: pause, drain, cancel, retry, confirm, profile.


CLOSING_S = 30.0
"""For how long to wait for the controller of a sweep that has just ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What became of a request so far."""

    sweep: str
    request: int
    state: SweepStatus
    is_controlled: bool
    """Whether a controller is at work, which takes the request up within a second or two."""
    trials: tuple[int, ...] = ()
    """Trials to be launched again, confirmed or profiled."""

    def to_json(self) -> dict[str, Any]:
        return {**fields_json(self, "sweep", "request", "state", "trials"), "controlled": self.is_controlled}


def request_action(name: str, home: Home, what: Action) -> Receipt:
    """Ask the sweep to pause, drain or end. Where no controller is at work it is done here and now.

    Raises:
        ConfigError: there is no such sweep, or it is over already.
    """
    with home.open(name, read_only=False, begun=False) as ledger:
        state = read_snapshot(ledger).state
        _check_open(name, state)
        number = ledger.add_request(action(what), by=requester(), at_s=time.time())
        return _answer(name, ledger, number)


def retry(name: str, home: Home, kinds: Collection[str]) -> Receipt:
    """Have the trials that ended in one of ``kinds`` launched again; a sweep that is over is open again.

    Raises:
        ConfigError: there is no such sweep, none of its trials ended so, or it was cancelled.
    """
    with home.open(name, read_only=False) as ledger:
        state = read_snapshot(ledger).state
        if state.status == "cancelled":
            raise ConfigError(f"the sweep {name!r} was cancelled", remedy="Submit it under another name.")
        if spent := spent_by_search(state):
            raise ConfigError(
                f"{spent}: {name!r} launches nothing more", remedy="Submit its file with a larger budget."
            )
        trials = chosen(state, kinds)
        if not trials:
            counts = ", ".join(f"{status} {count}" for status, count in state.counts().items()) or "none"
            raise ConfigError(
                f"no trial of {name!r} ended as {' or '.join(sorted(kinds))}", remedy=f"Its trials: {counts}."
            )
        number = ledger.add_request(retry_request(kinds), by=requester(), at_s=time.time())
        return _answer(name, ledger, number, trials)


def change_budget(name: str, home: Home, budget: Budget) -> Receipt:
    """Have the sweep go on within another budget; one that ended because the former was spent may be open again.

    Raises:
        ConfigError: there is no such sweep.
    """
    with home.open(name, read_only=False) as ledger:
        return _answer(name, ledger, ledger.add_request(budget_request(budget), by=requester(), at_s=time.time()))


def request_checks(name: str, home: Home, what: Literal["confirm", "profile"], trial: str | None) -> Receipt:
    """Have a trial confirmed against the baseline, or profiled; a finished sweep is open again.

    Args:
        trial: as people write it, see :func:`orchestrator.sweep.state.find_trial`; None: the best one to
            confirm, the winner to profile.

    Raises:
        ConfigError: there is no such sweep or trial, it was not measured, or the sweep failed or was cancelled.
    """
    with home.open(name, read_only=False) as ledger:
        seen = read_snapshot(ledger)
        state = seen.state
        if state.status in ("cancelled", "failed"):
            raise ConfigError(
                f"the sweep {name!r} is {state.status}: {state.finish_reason}", remedy="Submit another one."
            )
        chosen_trial = find_trial(state, trial, name) if trial else (state.best if what == "confirm" else state.winner)
        if chosen_trial is not None and chosen_trial.check is not None:
            of = trial_id(chosen_trial.check.of)
            raise ConfigError(f"{trial} of {name!r} is a check of {of}", remedy=f"Name {of} itself.")
        script = SweepSpec.from_json(seen.spec).script if what == "profile" and seen.spec else None
        if script is not None and not script.hook:
            raise ConfigError(
                f"a profile needs the hook, and metrics.hook is off in {name!r}",
                remedy="Submit a sweep with metrics.hook on.",
            )
        if chosen_trial is None or chosen_trial.measurement is None:
            raise ConfigError(f"{trial or 'the best trial'} of {name!r} was not measured", remedy="Name another trial.")
        if what == "confirm" and chosen_trial.number == 0:
            raise ConfigError("that is the baseline, which everything is compared with", remedy="Name another trial.")
        request = checks(**{what: (chosen_trial.number,)})
        number = ledger.add_request(request, by=requester(), at_s=time.time())
        return _answer(name, ledger, number, (chosen_trial.number,))


def _check_open(name: str, state: SweepState) -> None:
    if state.is_over:
        raise ConfigError(f"the sweep {name!r} is {state.status} already", remedy="There is nothing to stop.")


def _answer(name: str, ledger: Ledger, number: int, trials: tuple[int, ...] = ()) -> Receipt:
    """What becomes of request ``number``: a controller at work takes it up; without one it is done here."""
    deadline_s = time.monotonic() + CLOSING_S
    seen = read_snapshot(ledger)
    while seen.is_held and seen.state.is_over and time.monotonic() < deadline_s:
        time.sleep(0.2)  # its controller is about to leave, and takes in nothing any more
        seen = read_snapshot(ledger, seen)
    state, is_controlled = seen.state, True
    with contextlib.suppress(SweepBusyError):
        if not ledger.is_held():
            with ledger.hold():
                state, is_controlled = apply_requests(ledger, ledger.folder), False
                if state.created is None:  # it waited for its first nodes when its controller died
                    ledger.discard()
    return Receipt(sweep=name, request=number, state=state.status, is_controlled=is_controlled, trials=trials)


# Pauses, drains or cancels a sweep and waits until that is done, or removes it (``delete``, ``submit --replace``).


Notify = Callable[[Snapshot], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What became of the request."""

    sweep: str
    action: Action
    request: int
    state: str
    """The sweep's phase, see :attr:`orchestrator.sweep.snapshot.Snapshot.phase`; or ``withdrawn``: it was called off
    before it had nodes, and nothing of it is left."""
    reason: str
    is_done: bool

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``pause --json``, ``drain --json`` and ``cancel --json``."""
        return {**fields_json(self, "sweep", "action", "request", "state", "reason"), "done": self.is_done}


def stop(name: str, home: Home, action: Action, *, wait: bool, notify: Notify) -> Stopped:
    """Ask the sweep to pause, drain or end; with ``wait``, until it is so or nobody is left to see to it.

    Raises:
        ConfigError: there is no such sweep, or it is over already.
    """
    with home.open(name, begun=False) as ledger:
        answer = request_action(name, home, action)
        is_done = False
        for seen in follow(ledger, home) if wait else [read_snapshot(ledger)]:
            if is_done and not _is_done(seen, action):
                break  # somebody has set it going again
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
    """Shows on stderr what is still waited for."""
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
    """One line for people: how the sweep is, and whether that is what was asked for."""
    style = "green" if stopped.is_done else "yellow"
    words = f"{stopped.sweep}: {stopped.state}" + (f", {one_line(plain(stopped.reason))}" if stopped.reason else "")
    more = "" if stopped.is_done else f"; asked to {stopped.action}, not done yet"
    return Text.assemble((words, style), more)


def _is_done(sweep: Snapshot, action: Action) -> bool:
    return sweep.phase in (ENDED if action == "cancel" else AT_REST)


def _progress_text(sweep: Snapshot) -> str:
    running = " ".join(units.trial_id(number) for number in sorted(sweep.state.running))
    return f"{sweep.name} is {sweep.phase}" + (f"; {running} still running" if running else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What was removed of a sweep."""

    sweep: str
    folder: Path
    num_trials: int | None
    """None: its ledger could not be read."""
    num_bytes: int
    num_runs: int | None
    """Runs deleted in MLflow; None: that was not asked for."""
    stays: tuple[str, ...]
    """What is left of it elsewhere, in sentences."""

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``delete --json``."""
        body = {"trials": self.num_trials, "bytes": self.num_bytes, "mlflow_runs": self.num_runs}
        return {**fields_json(self, "sweep", "folder", "stays"), **body}

    def lines(self) -> list[str]:
        """The same for people."""
        trials = "an unreadable ledger" if self.num_trials is None else units.count(self.num_trials, "trial")
        lines = [f"removed {self.folder}: {trials}, {units.num_bytes(self.num_bytes)}"]
        if self.num_runs is not None:
            lines.append(f"deleted in MLflow: {units.count(self.num_runs, 'run')}; `mlflow gc` frees their space")
        return [*lines, *self.stays]


def describe(name: str, home: Home) -> str:
    """What would be removed, in a few words for a question.

    Raises:
        ConfigError: there is no such sweep.
    """
    sweep = _read(name, home)
    what = "its ledger cannot be read" if sweep is None else units.count(len(sweep.state.trials), "trial")
    measured = " and what they measured" if sweep is not None and sweep.state.best is not None else ""
    return f"{home.sweep_folder(name)} ({what}{measured})"


def delete(name: str, home: Home, *, force: bool = False, in_mlflow: bool = False) -> Removed:
    """Remove the sweep's folder: ledger, logs, attempts. MLflow first, so that nothing is half gone where that fails.

    Args:
        force: also where a promoted configuration rests on it, or its ledger cannot be read.
        in_mlflow: delete its runs there, too.

    Raises:
        ConfigError: there is no such sweep, a controller is at work on it, something rests on it, or MLflow cannot be
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
    """Remove a sweep that measured nothing, so that another one can have its name.

    Raises:
        ConfigError: it measured something, or a controller is at work on it.
    """
    sweep = _read(name, home)
    best = sweep.state.best if sweep is not None else None
    if sweep is None or best is not None:
        what = f"has measured {units.trial_id(best.number)}" if best is not None else "has a ledger that cannot be read"
        typed = Invocation.current(home.path)
        raise ConfigError(
            f"the sweep {name!r} {what}: --replace is for sweeps that measured nothing",
            key="name",
            remedy=f"Give this one another name, go on with `{typed.command('resume', name)}`, or remove it with "
            f"`{typed.command('delete', name)}`.",
        )
    with _alone(name, home, sweep):
        return _remove(name, home, sweep, None)


def _read(name: str, home: Home) -> Snapshot | None:
    """The sweep as it stands; None where its ledger cannot be read.

    Raises:
        ConfigError: there is no such sweep.
    """
    try:
        return home.read(name)
    except LedgerError:
        return None


def _refuse_what_rests_on_it(name: str, sweep: Snapshot | None) -> None:
    if sweep is None:
        raise ConfigError(
            f"the ledger of {name!r} cannot be read, so what rests on it is not known", remedy="--force removes it."
        )
    promoted = sorted(
        {f"{event.record['name']} version {event.record['to_version']}" for event in sweep.state.promotions}
    )
    if promoted:
        raise ConfigError(
            f"{', '.join(promoted)} rests on the sweep {name!r}: its evidence would be gone",
            remedy="Keep it, or remove it all the same with --force.",
        )


@contextmanager
def _alone(name: str, home: Home, sweep: Snapshot | None) -> Iterator[None]:
    """While inside, no controller can begin to work on the sweep.

    Raises:
        ConfigError: one is at work.
    """
    busy = ConfigError(
        f"a controller is at work on the sweep {name!r}", remedy=f"Stop it first: `tune-cluster cancel {name}`."
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
    """Remove the folder, the ledger first: what is left if this is interrupted is no sweep any more."""
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
        yield "its runs in MLflow stay; --mlflow would have deleted them"
    attempts = (attempt for trial in sweep.state.trials for attempt in trial.attempts)
    nodes = {device.node for attempt in attempts for device in attempt.ranks}
    if len(nodes) > 1 and not sweep.is_virtual:
        yield f"logs on the disks of other nodes stay there ({units.count(len(nodes), 'node')} took part)"
