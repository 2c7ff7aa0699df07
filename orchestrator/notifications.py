"""Notifies people and programs of events of a sweep, by webhook or command."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from orchestrator.config.settings import NotifySection
from orchestrator.errors import ConfigError, reason_of
from orchestrator.process_support import environment, pause_s
from orchestrator.report.result_schema import SCHEMA_VERSION
from orchestrator.report.summary import summarize
from orchestrator.sweep.checkpoint import FAULTS, Outbox
from orchestrator.sweep.events import AttemptEnded, LedgerEvent, SweepFinished, SweepPaused, sweep_id
from orchestrator.sweep.fold import blamed_node
from orchestrator.sweep.ledger import Ledger, LedgerEntry, LedgerError
from orchestrator.sweep.state import SweepState, describe_failure
from trials.files import open_regular
from trials.outcome import GangLost, Outcome
from trials.secrets import redact, redact_all

if TYPE_CHECKING:
    from orchestrator.config.settings import NotifyEvent


# Which events cause a notification, and its content. Pure functions of the ledger.


MAX_FAILURES = 5
MAX_CHARS = 300


def may_notify(event: LedgerEvent, on: Collection[str]) -> bool:
    """Whether :func:`notification` may return something for the event, judged without the other events."""
    match event:
        case SweepFinished() | SweepPaused():
            return True
        case AttemptEnded():
            return "repeated_failure" in on and is_fault(event.outcome)
        case _:
            return False


def notification(
    entry: LedgerEntry, state: SweepState, earlier: Iterable[LedgerEvent], *, after_failures: int
) -> NotifyEvent | None:
    """The notification for the event, if any.

    Args:
        state: with the event.
        earlier: events before it, the last one first.
    """
    event = entry.event
    match event:
        case SweepFinished(status="finished"):
            return "budget" if event.cause.is_budget else "finished"
        case SweepFinished():
            return "cancelled" if event.status == "cancelled" else "failed"
        case SweepPaused():
            return "paused"
        case AttemptEnded():
            if not is_fault(event.outcome):
                return None
            is_last_straw = 1 + _num_faults(earlier) == after_failures
            return "repeated_failure" if is_last_straw or _quarantines(event, state) else None
        case _:
            return None


def is_fault(outcome: Outcome) -> bool:
    """Whether the attempt failed by a fault, not by a kill by the controller or a queue."""
    return outcome.kind in FAULTS and not (isinstance(outcome, GangLost) and not outcome.is_counted)


def _num_faults(earlier: Iterable[LedgerEvent]) -> int:
    """Number of consecutive faults at the end. Deliberately killed attempts are ignored."""
    ended = (event.outcome for event in earlier if isinstance(event, AttemptEnded))
    telling = (outcome for outcome in ended if is_fault(outcome) or not isinstance(outcome, GangLost))
    return sum(1 for _ in itertools.takewhile(is_fault, telling))


def _quarantines(event: AttemptEnded, state: SweepState) -> bool:
    """Whether this event took a node out of service."""
    node = blamed_node(event.outcome)
    return node in state.quarantined and state.strikes.get(node or "") == state.sweep.budget.strikes_per_node


def payload(event: NotifyEvent, seq: int, state: SweepState) -> dict[str, Any]:
    """The notification as JSON, without secrets. An equal ``id`` marks a repeated delivery."""
    body: dict[str, Any] = {**summarize(state, "").to_json()}
    names = (
        "sweep",
        "state",
        "reason",
        "objective",
        "unit",
        "num_leased_devices",
        "winner",
        "best_of_search",
        "baseline",
        "proof",
        "remeasured",
        "device_hours",
    )
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "event": event,
        "id": f"{sweep_id(state.sweep)}-{seq}",
        "at_s": state.now_s,
        **{name: body[name] for name in names},
        "hardware": state.sweep.hardware,
        "trials": {status: count for status, count in body["trials"].items() if count},
        "quarantined_nodes": sorted(state.quarantined),
        "failures": _failures(state),
    }
    clean: dict[str, Any] = redact_all(content)
    return clean


def _failures(state: SweepState) -> list[dict[str, Any]]:
    """The latest trials that failed by a fault, newest first."""
    failed = [trial for trial in state.trials if trial.outcome is not None and is_fault(trial.outcome)]
    latest: Sequence[Any] = failed[: -MAX_FAILURES - 1 : -1]
    return [
        {"trial": trial.number, "kind": trial.status, "message": describe_failure(trial.outcome)[:MAX_CHARS]}
        for trial in latest
    ]


# Delivers a sweep's notifications to one receiver, in a thread, so that a slow receiver blocks nothing else.


TIMEOUT_S = 20.0
"""Time limit for a webhook to respond, and for a command to end."""
MAX_URL_BYTES = 8192
MAX_MESSAGE_BYTES = 500
"""Bytes read from the end of a failing command's output."""
EVENT_VARIABLE = "TUNE_CLUSTER_EVENT"


class DeliveryError(Exception):
    """The delivery failed; the message contains no secrets."""


class NotificationReceiver(Protocol):
    """A receiver of notifications."""

    name: str
    """``webhook`` or ``command``; also the name of the receiver's cursor in the ledger."""

    def send(self, event: str, body: dict[str, Any]) -> None:
        """Return once the notification is delivered.

        Raises:
            DeliveryError: it was not delivered.
            ConfigError: the receiver does not exist.
        """

    def cancel(self) -> None:
        """Make a running :meth:`send` end soon, as far as possible from another thread."""


class Delivery:
    """One delivery of everything behind the receiver's cursor; starts at once."""

    def __init__(self, folder: Path, receiver: NotificationReceiver, outbox: Outbox, section: NotifySection) -> None:
        """
        Args:
            folder: of the sweep; the thread opens its own connection to the ledger.
        """
        self._folder = folder
        self._receiver = receiver
        self._outbox = outbox
        self._section = section
        self._is_abandoned = False
        self.error = ""
        """Why not everything was delivered; empty on success, or while the delivery is running."""
        self._thread = threading.Thread(target=self._run, name=f"notify-{receiver.name}", daemon=True)
        self._thread.start()

    @property
    def is_under_way(self) -> bool:
        return self._thread.is_alive()

    def abandon(self) -> None:
        """Stop waiting for it. Completed deliveries remain valid; it changes nothing from here on."""
        self._is_abandoned = True
        self._receiver.cancel()

    def _run(self) -> None:
        try:
            with Ledger.open_existing(self._folder) as ledger:
                self._outbox.deliver(ledger, lambda *entry: self._notify(ledger, *entry), urgent=True)
        except Exception as error:
            self.error = str(error) or type(error).__name__

    def _notify(self, ledger: Ledger, entry: LedgerEntry, state: SweepState) -> None:
        try:
            earlier = (before.event for before in ledger.backwards(entry.seq))
            event = notification(entry, state, earlier, after_failures=self._section.after_failures)
            if event is not None and event in self._section.on:
                self._receiver.send(event, payload(event, entry.seq, state))
            if self._is_abandoned:  # another delivery may have started: the cursor belongs to it
                raise DeliveryError("it does not accept notifications in time")
        except Exception as error:
            self.error = str(error) or type(error).__name__
            raise


class Webhook:
    """A receiver that gets notifications posted as JSON. Its URL is read again each time, and never stored."""

    name = "webhook"

    def __init__(self, section: NotifySection) -> None:
        self._section = section

    def send(self, event: str, body: dict[str, Any]) -> None:  # noqa: ARG002
        _post(webhook_url(self._section), body)

    def cancel(self) -> None:
        """Nothing to do: the connection has its own timeouts."""


class Command:
    """A receiver that is a program, started once per notification, with its JSON on stdin."""

    name = "command"

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._child: subprocess.Popen[bytes] | None = None

    def send(self, event: str, body: dict[str, Any]) -> None:
        with tempfile.TemporaryFile() as errors:
            try:
                self._child = child = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=environment({EVENT_VARIABLE: event}),
                    start_new_session=True,  # Ctrl-C must reach only the sweep
                )
            except OSError as error:
                raise DeliveryError(f"the command cannot be run: {error.strerror or error}") from None
            try:
                child.communicate(json.dumps(body).encode(), timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise DeliveryError(f"the command did not end within {TIMEOUT_S:.0f} s") from None
            finally:
                self.cancel()
                child.wait()
            if child.returncode != 0:
                raise DeliveryError(f"the command exited with code {child.returncode}: {_last_line(errors)}")

    def cancel(self) -> None:
        """Kill it if it is still running, along with its session."""
        if (child := self._child) is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def webhook_url(section: NotifySection) -> str:
    """The URL of the webhook, from the environment or its file.

    Raises:
        ConfigError: it is missing or not a URL; the message does not repeat it.
    """
    if section.webhook_env is not None:
        where, text = f"the environment variable {section.webhook_env}", os.environ.get(section.webhook_env, "")
    else:
        where, text = f"the file {section.webhook_file}", _first_bytes(Path(section.webhook_file or ""))
    url = text.strip()
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isascii() and url.isprintable()
    except ValueError:
        is_url = False
    if not is_url or " " in url:
        problem = "is not set" if not url else "contains no URL"
        raise ConfigError(f"{where} {problem}", key="notify", remedy="Set the http(s) URL of the webhook.")
    return url


def _first_bytes(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return file.read(MAX_URL_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {reason_of(error)}", key="notify.webhook_file", remedy="Check the path."
        ) from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects: notifications go only to the configured URL."""

    def redirect_request(self, *_args: Any) -> None:
        return None


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        url,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "tune-cluster"},
        method="POST",
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S):
            return
    except urllib.error.HTTPError as error:
        error.close()
        raise DeliveryError(f"the webhook responded with {error.code}") from None
    except urllib.error.URLError as error:
        raise DeliveryError(
            f"the webhook cannot be reached: {getattr(error.reason, 'strerror', None) or 'no response'}"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # their texts may repeat the URL
        raise DeliveryError(f"the webhook does not respond: {type(error).__name__}") from None


def _last_line(file: IO[bytes]) -> str:
    """The last line of the file, or the end of it if it is long."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_MESSAGE_BYTES))
    text = file.read().decode("utf-8", errors="replace")
    return (text.strip().splitlines() or ["no message"])[-1]


# Notifies people and programs of events of a sweep, by webhook or command.
#
# Each receiver has a cursor in the ledger and is served by short-lived threads: notifications arrive at least once and
# in order, a receiver that is down gets them later, and a slow one blocks neither the sweep nor the other receiver.


logger = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 2.0, 120.0
DELIVERY_LIMIT_S = 60.0
"""A delivery that takes longer is abandoned; completed deliveries remain valid."""
FLUSH_S = 15.0
"""How long the end of a sweep waits for its receivers."""


def check_notify(section: NotifySection) -> None:
    """Check the receivers on this host before a controller starts.

    Raises:
        ConfigError: the webhook's URL is missing, or the command does not exist.
    """
    if section.webhook_env is not None or section.webhook_file is not None:
        webhook_url(section)
    if section.command is not None and shutil.which(section.command[0]) is None:
        raise ConfigError(
            f"program {section.command[0]!r} not found", key="notify.command", remedy="Use its absolute path."
        )


class Notifier:
    """A projection that notifies the receivers of ``section``; see :mod:`orchestrator.controller.observer`."""

    def __init__(self, section: NotifySection, *, clock: Callable[[], float] = time.monotonic) -> None:
        receivers: list[NotificationReceiver] = []
        if section.webhook_env is not None or section.webhook_file is not None:
            receivers.append(Webhook(section))
        if section.command is not None:
            receivers.append(Command(section.command))
        self._feeds = [_Feed(receiver, section, clock) for receiver in receivers]

    def sync(self, ledger: Ledger, state: SweepState) -> int:
        """Start deliveries of new events, and supervise running ones; return how many events are delivered. Waits only
        at the end of the sweep, for at most ``FLUSH_S``."""
        before = sum(feed.position(ledger) for feed in self._feeds)
        is_at_rest = state.created is not None and state.status != "running"
        for feed in self._feeds:
            feed.poll(ledger, urgent=is_at_rest)
        if is_at_rest:
            self._flush()
        return sum(feed.position(ledger) for feed in self._feeds) - before

    def _flush(self) -> None:
        deadline_s = time.monotonic() + FLUSH_S
        while any(feed.is_busy for feed in self._feeds) and time.monotonic() < deadline_s:
            time.sleep(0.02)
            for feed in self._feeds:
                feed.check_delivery()
        for feed in self._feeds:
            feed.end()


class _Feed:
    """Serves one receiver: runs its deliveries, one after another."""

    def __init__(self, receiver: NotificationReceiver, section: NotifySection, clock: Callable[[], float]) -> None:
        self._receiver = receiver
        self._section = section
        self._clock = clock
        self._cursor = f"notify-{receiver.name}"
        self._outbox = self._new_outbox()
        self._delivery: Delivery | None = None
        self._began_s = 0.0
        self._num_failures = 0
        self._retry_at_s = 0.0
        self._seen: int | None = None
        """Number of the last event examined."""
        self._is_due = False
        """Whether something may need to be delivered."""

    @property
    def is_busy(self) -> bool:
        """Whether a delivery is running, or its result has not been examined yet."""
        return self._delivery is not None

    def position(self, ledger: Ledger) -> int:
        """Number of the last event whose notifications, if any, have been delivered."""
        return ledger.cursor(self._cursor)

    def poll(self, ledger: Ledger, *, urgent: bool) -> None:
        """Check the running delivery, and start one if something is due."""
        try:
            entries = ledger.following(self.position(ledger) if self._seen is None else self._seen)
            self._seen = entries[-1].seq if entries else self._seen
            self._is_due = self._is_due or any(may_notify(entry.event, self._section.on) for entry in entries)
            self.check_delivery()
            if self._is_due and not self.is_busy and (urgent or self._clock() >= self._retry_at_s):
                self._began_s, self._is_due = self._clock(), False
                self._delivery = Delivery(ledger.folder, self._receiver, self._outbox, self._section)
        except (OSError, RuntimeError, LedgerError) as error:
            self._fail(str(error))

    def check_delivery(self) -> None:
        """Check whether the delivery has ended; abandon it if it takes too long."""
        if self._delivery is None:
            return
        if not self._delivery.is_under_way:
            error, self._delivery = self._delivery.error, None
            if error:
                self._fail(error)
            else:
                self._num_failures = 0
        elif self._clock() - self._began_s > DELIVERY_LIMIT_S:
            self.end()
            self._fail("it does not accept notifications in time")

    def end(self) -> None:
        """Abandon the running delivery."""
        if self._delivery is None:
            return
        self._delivery.abandon()
        self._delivery, self._is_due = None, True
        self._outbox = self._new_outbox()  # the other one may still be in use

    def _new_outbox(self) -> Outbox:
        """Keeps its folded state between deliveries."""
        return Outbox(self._cursor, on_outage=lambda _error: None)

    def _fail(self, message: str) -> None:
        if self._num_failures == 0:
            logger.warning("notify.%s failed: %s; the sweep continues", self._receiver.name, redact(message))
        self._is_due = True
        self._retry_at_s = self._clock() + pause_s(self._num_failures, first_s=FIRST_RETRY_S, last_s=LAST_RETRY_S)
        self._num_failures += 1
