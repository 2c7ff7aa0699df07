"""Tells people and programs outside when something happens to the sweep: by webhook, by command.

Each receiver is fed from the ledger behind a cursor of its own, by short-lived threads: notifications come at least
once and in order, a receiver that is down gets them later, and one that is slow holds up neither the sweep nor the
other receiver.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable

from orchestrator.config.notify import NotifySection
from orchestrator.errors import ConfigError
from orchestrator.notifications.content import may_be_told
from orchestrator.notifications.delivery import Command, Delivery, NotificationReceiver, Webhook, webhook_url
from orchestrator.processes import pause_s
from orchestrator.sweep.ledger import Ledger, LedgerError
from orchestrator.sweep.outbox import Outbox
from orchestrator.sweep.state import SweepState
from trials.secrets import redact

logger = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 2.0, 120.0
DELIVERY_LIMIT_S = 60.0
"""A delivery that takes longer is abandoned; what it has delivered by then stays delivered."""
FLUSH_S = 15.0
"""For how long the end of a sweep waits for its receivers."""


def check_notify(section: NotifySection) -> None:
    """Refuse what cannot work on this host, where a controller is about to start.

    Raises:
        ConfigError: the webhook's URL is not where it should be, or the command does not exist.
    """
    if section.webhook_env is not None or section.webhook_file is not None:
        webhook_url(section)
    if section.command is not None and shutil.which(section.command[0]) is None:
        raise ConfigError(
            f"there is no program {section.command[0]!r}", key="notify.command", remedy="Give its absolute path."
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
        """Begin to deliver what is new, and look after deliveries under way; return how many events receivers have
        taken note of. Waits only when the sweep has come to rest, and then ``FLUSH_S`` at most."""
        before = sum(feed.position(ledger) for feed in self._feeds)
        is_at_rest = state.created is not None and state.status != "running"
        for feed in self._feeds:
            feed.tend(ledger, urgent=is_at_rest)
        if is_at_rest:
            self._flush()
        return sum(feed.position(ledger) for feed in self._feeds) - before

    def _flush(self) -> None:
        deadline_s = time.monotonic() + FLUSH_S
        while any(feed.is_busy for feed in self._feeds) and time.monotonic() < deadline_s:
            time.sleep(0.02)
            for feed in self._feeds:
                feed.look()
        for feed in self._feeds:
            feed.end()


class _Feed:
    """Feeds one receiver: looks after its deliveries, one after another."""

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
        """Number of the last event looked at."""
        self._is_due = False
        """Whether something may be there to be delivered."""

    @property
    def is_busy(self) -> bool:
        """Whether a delivery is under way, or its end was not looked at yet."""
        return self._delivery is not None

    def position(self, ledger: Ledger) -> int:
        """Number of the last event that the receiver has been told of, if there was anything to tell."""
        return ledger.cursor(self._cursor)

    def tend(self, ledger: Ledger, *, urgent: bool) -> None:
        """See what became of the delivery under way, and begin one where something is due."""
        try:
            entries = ledger.following(self.position(ledger) if self._seen is None else self._seen)
            self._seen = entries[-1].seq if entries else self._seen
            self._is_due = self._is_due or any(may_be_told(entry.event, self._section.on) for entry in entries)
            self.look()
            if self._is_due and not self.is_busy and (urgent or self._clock() >= self._retry_at_s):
                self._began_s, self._is_due = self._clock(), False
                self._delivery = Delivery(ledger.folder, self._receiver, self._outbox, self._section)
        except (OSError, RuntimeError, LedgerError) as error:
            self._fail(str(error))

    def look(self) -> None:
        """See whether the delivery has ended; abandon it if it takes too long."""
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
            self._fail("it does not take notifications in time")

    def end(self) -> None:
        """Abandon the delivery under way."""
        if self._delivery is None:
            return
        self._delivery.abandon()
        self._delivery, self._is_due = None, True
        self._outbox = self._new_outbox()  # the other one may still be in use

    def _new_outbox(self) -> Outbox:
        """Keeps the state that it has folded from one delivery to the next."""
        return Outbox(self._cursor, on_outage=lambda _error: None)

    def _fail(self, message: str) -> None:
        if self._num_failures == 0:
            logger.warning(
                "the %s of notify does not work: %s; the sweep goes on", self._receiver.name, redact(message)
            )
        self._is_due = True
        self._retry_at_s = self._clock() + pause_s(self._num_failures, first_s=FIRST_RETRY_S, last_s=LAST_RETRY_S)
        self._num_failures += 1
