"""Tells people and programs outside when something happens to the sweep: by webhook, by command.

Each receiver is fed from the ledger behind a cursor of its own, by short-lived child processes: notifications come at
least once and in order, a receiver that is down gets them later, and one that is slow holds up neither the sweep nor
the other receiver.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from orchestrator.config.notify import NotifySection
from orchestrator.errors import ConfigError
from orchestrator.notifications.content import may_be_told
from orchestrator.notifications.delivery import Delivery, webhook_url
from orchestrator.processes import pause_s
from orchestrator.sweep.ledger import Ledger, LedgerError
from orchestrator.sweep.state import SweepState
from trials.secrets import redact

logger = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 2.0, 120.0
DELIVERY_LIMIT_S = 60.0
"""A child that takes longer is killed; what it has delivered by then stays delivered."""
FLUSH_S = 15.0
"""For how long the end of a sweep waits for its receivers."""
_MAX_MESSAGE_BYTES = 500


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
    """A :class:`orchestrator.controller.observer.Projection` that notifies the receivers of ``section``."""

    def __init__(self, section: NotifySection, *, clock: Callable[[], float] = time.monotonic) -> None:
        order = Delivery(on=list(section.on), after_failures=section.after_failures)
        self._couriers = []
        if section.webhook_env is not None or section.webhook_file is not None:
            to_webhook = replace(order, webhook_env=section.webhook_env, webhook_file=section.webhook_file)
            self._couriers.append(_Courier("webhook", to_webhook, clock))
        if section.command is not None:
            self._couriers.append(_Courier("command", replace(order, command=list(section.command)), clock))

    def sync(self, ledger: Ledger, state: SweepState) -> int:
        """Begin to deliver what is new, and look after deliveries under way; return how many events receivers have
        taken note of. Waits only when the sweep has come to rest, and then ``FLUSH_S`` at most."""
        before = sum(courier.position(ledger) for courier in self._couriers)
        is_at_rest = state.created is not None and state.status != "running"
        for courier in self._couriers:
            courier.tend(ledger, urgent=is_at_rest)
        if is_at_rest:
            self._flush()
        return sum(courier.position(ledger) for courier in self._couriers) - before

    def _flush(self) -> None:
        deadline_s = time.monotonic() + FLUSH_S
        while any(courier.is_busy for courier in self._couriers) and time.monotonic() < deadline_s:
            time.sleep(0.02)
            for courier in self._couriers:
                courier.look()
        for courier in self._couriers:
            courier.end()


class _Courier:
    """Sends children on their way to one receiver, one after another."""

    def __init__(self, name: str, order: Delivery, clock: Callable[[], float]) -> None:
        self._name = name
        self._order = replace(order, cursor=f"notify-{name}", parent=os.getpid())
        self._clock = clock
        self._child: subprocess.Popen[bytes] | None = None
        self._began_s = 0.0
        self._num_failures = 0
        self._retry_at_s = 0.0
        self._seen: int | None = None
        """Number of the last event looked at."""
        self._is_due = False
        """Whether something may be there to be delivered."""

    @property
    def is_busy(self) -> bool:
        return self._child is not None

    def position(self, ledger: Ledger) -> int:
        return ledger.cursor(self._order.cursor)

    def tend(self, ledger: Ledger, *, urgent: bool) -> None:
        """See what became of the delivery under way, and begin one where something is due."""
        try:
            entries = ledger.following(self.position(ledger) if self._seen is None else self._seen)
            self._seen = entries[-1].seq if entries else self._seen
            self._is_due = self._is_due or any(may_be_told(entry.event, self._order.on) for entry in entries)
            self.look()
            if self._is_due and not self.is_busy and (urgent or self._clock() >= self._retry_at_s):
                self._begin(ledger)
        except (OSError, LedgerError) as error:
            self._fail(str(error))

    def look(self) -> None:
        """See whether the child has ended; end it if it takes too long."""
        if self._child is None:
            return
        code = self._child.poll()
        if code is not None:
            message = _last_line(self._child)
            self._child = None
            if code == 0:
                self._num_failures = 0
            else:
                self._fail(message)
        elif self._clock() - self._began_s > DELIVERY_LIMIT_S:
            self.end()
            self._fail("it does not take notifications in time")

    def end(self) -> None:
        """Kill the child, and what it has started."""
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        _last_line(self._child)
        self._child, self._is_due = None, True

    def _begin(self, ledger: Ledger) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.notifications.delivery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the sweep
        )
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._child.stdin as pipe:
            pipe.write(replace(self._order, folder=str(ledger.folder.absolute())).to_json().encode())
        self._began_s, self._is_due = self._clock(), False

    def _fail(self, message: str) -> None:
        if self._num_failures == 0:
            logger.warning("the %s of notify does not work: %s; the sweep goes on", self._name, redact(message))
        self._is_due = True
        self._retry_at_s = self._clock() + pause_s(self._num_failures, first_s=FIRST_RETRY_S, last_s=LAST_RETRY_S)
        self._num_failures += 1


def _last_line(child: subprocess.Popen[bytes]) -> str:
    """Of what an ended child wrote. What it started may have the other end of the pipe still."""
    assert child.stderr is not None
    with child.stderr as pipe:
        os.set_blocking(pipe.fileno(), False)
        text = (pipe.read(_MAX_MESSAGE_BYTES) or b"").decode("utf-8", errors="replace")
    return (text.strip().splitlines() or ["no message"])[-1]
