"""Delivers what a sweep's ledger holds for one receiver, in a thread, so that a slow receiver holds up nobody."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from orchestrator.errors import ConfigError
from orchestrator.notifications.content import notification, payload
from orchestrator.processes import environment
from orchestrator.sweep.ledger import Ledger, LedgerEntry
from orchestrator.sweep.outbox import Outbox
from orchestrator.sweep.state import SweepState

if TYPE_CHECKING:
    from orchestrator.config.notify import NotifySection

TIMEOUT_S = 20.0
"""For a webhook to answer, and for a command to end."""
MAX_URL_BYTES = 8192
MAX_MESSAGE_BYTES = 500
"""Part of what a failing command wrote last that is read."""
EVENT_VARIABLE = "TUNE_CLUSTER_EVENT"


class DeliveryError(Exception):
    """The receiver did not take it; the message holds nothing secret."""


class NotificationReceiver(Protocol):
    """Who is told."""

    name: str
    """``webhook`` or ``command``; names the receiver's place in the ledger, too."""

    def send(self, event: str, body: dict[str, Any]) -> None:
        """Return once it has taken the notification.

        Raises:
            DeliveryError: it has not.
            ConfigError: it is not there.
        """

    def cancel(self) -> None:
        """Let a :meth:`send` under way come to its end soon, as far as that can be done from another thread."""


class Delivery:
    """One delivery of everything behind the receiver's cursor, under way from the start."""

    def __init__(self, folder: Path, receiver: NotificationReceiver, outbox: Outbox, section: NotifySection) -> None:
        """
        Args:
            folder: of the sweep; the thread opens the ledger there for itself.
        """
        self._folder = folder
        self._receiver = receiver
        self._outbox = outbox
        self._section = section
        self._is_abandoned = False
        self.error = ""
        """Why the receiver did not take everything; empty where it did, or while the delivery is under way."""
        self._thread = threading.Thread(target=self._run, name=f"notify-{receiver.name}", daemon=True)
        self._thread.start()

    @property
    def is_under_way(self) -> bool:
        return self._thread.is_alive()

    def abandon(self) -> None:
        """Wait for it no longer. What it has delivered by now stays delivered; from here on it changes nothing."""
        self._is_abandoned = True
        self._receiver.cancel()

    def _run(self) -> None:
        try:
            with Ledger.open_existing(self._folder) as ledger:
                self._outbox.deliver(ledger, lambda *entry: self._tell(ledger, *entry), urgent=True)
        except Exception as error:
            self.error = str(error) or type(error).__name__

    def _tell(self, ledger: Ledger, entry: LedgerEntry, state: SweepState) -> None:
        try:
            earlier = (before.event for before in ledger.backwards(entry.seq))
            event = notification(entry, state, earlier, after_failures=self._section.after_failures)
            if event is not None and event in self._section.on:
                self._receiver.send(event, payload(event, entry.seq, state))
            if self._is_abandoned:  # another delivery may have begun: the cursor is its own
                raise DeliveryError("it does not take notifications in time")
        except Exception as error:
            self.error = str(error) or type(error).__name__
            raise


class Webhook:
    """A receiver that gets notifications posted as JSON. Its URL is read anew each time, and kept nowhere."""

    name = "webhook"

    def __init__(self, section: NotifySection) -> None:
        self._section = section

    def send(self, event: str, body: dict[str, Any]) -> None:  # noqa: ARG002
        _post(webhook_url(self._section), body)

    def cancel(self) -> None:
        """Nothing to do: the connection has its own timeouts."""


class Command:
    """A receiver that is a program, started anew for each notification, which it reads from its input as JSON."""

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
                    start_new_session=True,  # Ctrl-C is for the sweep
                )
            except OSError as error:
                raise DeliveryError(f"the command cannot be run: {error.strerror or error}") from None
            try:
                child.communicate(json.dumps(body).encode(), timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise DeliveryError(f"the command does not end within {TIMEOUT_S:.0f} s") from None
            finally:
                self.cancel()
                child.wait()
            if child.returncode != 0:
                raise DeliveryError(f"the command ends with exit code {child.returncode}: {_last_line(errors)}")

    def cancel(self) -> None:
        """Kill it if it still runs, and what it has started in its session."""
        if (child := self._child) is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def webhook_url(section: NotifySection) -> str:
    """The URL of the webhook, from wherever it is kept.

    Raises:
        ConfigError: it is not there, or is none; the message does not repeat it.
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
        problem = "is not set" if not url else "holds no URL"
        raise ConfigError(f"{where} {problem}", key="notify", remedy="It has to hold the webhook's http(s) URL.")
    return url


def _first_bytes(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_URL_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", key="notify.webhook_file") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Notifications go where the user said, or nowhere."""

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
        raise DeliveryError(f"the webhook answers {error.code}") from None
    except urllib.error.URLError as error:
        raise DeliveryError(
            f"the webhook cannot be reached: {getattr(error.reason, 'strerror', None) or 'no answer'}"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # whose texts may repeat the URL
        raise DeliveryError(f"the webhook does not answer: {type(error).__name__}") from None


def _last_line(file: IO[bytes]) -> str:
    """The last line in the file, or the end of it where it is long."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_MESSAGE_BYTES))
    text = file.read().decode("utf-8", errors="replace")
    return (text.strip().splitlines() or ["no message"])[-1]
