"""Delivers what a sweep's ledger holds for one receiver: ``python -m orchestrator.notifications.delivery``.

A process of its own, started by :mod:`orchestrator.notifications.notifier`, so that a slow receiver holds up nobody.
It takes an :class:`Delivery` as JSON on its input; the URL of a webhook is never among its arguments or in what it
prints.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from cluster.node.processes import die_with_parent
from orchestrator.errors import ConfigError
from orchestrator.notifications.content import notification, payload
from orchestrator.processes import environment
from orchestrator.sweep.events import LedgerEvent
from orchestrator.sweep.ledger import Ledger, LedgerEntry
from orchestrator.sweep.outbox import Outbox
from orchestrator.sweep.state import SweepState
from trials.secrets import redact

if TYPE_CHECKING:
    from orchestrator.config.notify import NotifySection

TIMEOUT_S = 20.0
"""For a webhook's answer, and for a command."""
MAX_URL_BYTES = 8192
EXIT_FAILED = 1
EVENT_VARIABLE = "TUNE_CLUSTER_EVENT"


class DeliveryError(Exception):
    """The receiver did not take it; without anything secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What is to be delivered, and to whom."""

    on: list[str]
    after_failures: int
    folder: str = ""
    """Of the sweep."""
    cursor: str = ""
    """Says how far this receiver has been told."""
    parent: int = 0
    """Process that the one that delivers ends with."""
    webhook_env: str | None = None
    webhook_file: str | None = None
    command: list[str] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


def deliver(order: Delivery) -> int:
    """Tell the receiver everything behind its cursor; return how many events that were.

    Raises:
        DeliveryError: it did not take one; those before it are done.
    """
    errors: list[Exception] = []
    with Ledger.open_existing(Path(order.folder)) as ledger:
        send = _sender(order)
        outbox = Outbox(order.cursor, on_outage=errors.append)

        def write(entry: LedgerEntry, state: SweepState) -> None:
            event = notification(entry, state, _before(ledger, entry.seq), after_failures=order.after_failures)
            if event is not None and event in order.on:
                send(event, payload(event, entry.seq, state))

        num_delivered = outbox.deliver(ledger, write, urgent=True)
    if errors:
        raise DeliveryError(str(errors[0])) from errors[0]
    return num_delivered


def webhook_url(section: NotifySection | Delivery) -> str:
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


def _before(ledger: Ledger, seq: int) -> Iterator[LedgerEvent]:
    """Read only when somebody asks."""
    return (entry.event for entry in ledger.backwards(seq))


def _sender(order: Delivery) -> Callable[[str, dict[str, Any]], None]:
    if order.command is not None:
        command = order.command
        return lambda event, body: _run(command, event, body)
    url = webhook_url(order)
    return lambda _event, body: _post(url, body)


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
        raise DeliveryError(f"the webhook answers {error.code}") from None
    except urllib.error.URLError as error:
        raise DeliveryError(
            f"the webhook cannot be reached: {getattr(error.reason, 'strerror', None) or 'no answer'}"
        ) from None
    except (OSError, ValueError) as error:
        raise DeliveryError(f"the webhook does not answer: {type(error).__name__}") from None


def _run(command: list[str], event: str, body: dict[str, Any]) -> None:
    try:
        ended = subprocess.run(
            command,
            input=json.dumps(body).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment({EVENT_VARIABLE: event}),
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeliveryError(f"the command does not end within {TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise DeliveryError(f"the command cannot be run: {error.strerror or error}") from None
    if ended.returncode != 0:
        words = (ended.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise DeliveryError(f"the command ends with exit code {ended.returncode}: {words}")


def main() -> int:
    order = Delivery.from_json(sys.stdin.read())
    die_with_parent(order.parent)
    logging.disable(logging.CRITICAL)
    try:
        deliver(order)
    except Exception as error:
        sys.stderr.write(redact(f"{error}\n"))
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
