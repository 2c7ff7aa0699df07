"""Reads sweeps for those who look at them: one thread for each page that somebody has open, whatever the number of
windows; none where nobody looks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from orchestrator.errors import ConfigError
from orchestrator.live.feed import Feed
from orchestrator.sweep.ledger import LedgerError
from orchestrator.text import first_line

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Time between two looks at a sweep."""
IDLE_S = 10.0
"""For how long a sweep is still read after the last window that showed it was closed: pages are loaded anew."""
TROUBLE = "trouble"
"""Part that says why nothing newer is shown; empty while all is well."""


class Look(Protocol):
    """What is looked at again and again."""

    def parts(self) -> Mapping[str, Any]:
        """All parts of the page as they are now; those that did not change since the last look may be left out.

        Raises:
            ConfigError: what is shown is gone.
            LedgerError: it cannot be read now.
        """


class Watch:
    """A thread that looks and publishes, from the first client until :data:`IDLE_S` after the last."""

    def __init__(self, look: Callable[[], Look], *, poll_s: float = POLL_S, idle_s: float = IDLE_S) -> None:
        self.feed = Feed()
        self._make_look = look
        self._poll_s, self._idle_s = poll_s, idle_s
        self._num_clients = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stopped = False

    @contextmanager
    def client(self) -> Iterator[Feed]:
        """The feed, kept fresh as long as this lasts."""
        with self._lock:
            self._num_clients += 1
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name="live-watch", daemon=True)
                self._thread.start()
        try:
            yield self.feed
        finally:
            with self._lock:
                self._num_clients -= 1

    def nudge(self) -> None:
        """Look again at once: something was done."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread, and let all clients go."""
        with self._lock:
            self._stopped = True
        self._wake.set()
        self.feed.close()
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        look, idle_for_s, is_first = self._make_look(), 0.0, True
        while True:
            is_first = not self._publish(look, is_first=is_first) and is_first
            self._wake.wait(self._poll_s)
            self._wake.clear()
            with self._lock:
                idle_for_s = 0.0 if self._num_clients else idle_for_s + self._poll_s
                if self._stopped or idle_for_s > self._idle_s:
                    self._thread = None
                    return

    def _publish(self, look: Look, *, is_first: bool) -> bool:
        """One look; whether it went well. What goes wrong is shown on the page, and tried again: a network disk may be
        away for a while."""
        try:
            self.feed.publish({**look.parts(), TROUBLE: ""}, is_all=is_first)
            return True
        except (ConfigError, LedgerError, OSError) as error:
            self.feed.publish({TROUBLE: f"Shown is what was last read; trying again: {first_line(error)}"})
        except Exception as error:
            logger.warning("the live page cannot be brought up to date", exc_info=True)
            self.feed.publish({TROUBLE: f"The page cannot be brought up to date: {first_line(error)}"})
        return False


class Hub:
    """The watches of a server, by what they show."""

    def __init__(self, *, poll_s: float = POLL_S) -> None:
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._watches: dict[str, Watch] = {}

    def watch(self, key: str, look: Callable[[], Look]) -> Watch:
        """The watch of this key; ``look`` makes what it looks with where there is none yet."""
        with self._lock:
            if key not in self._watches:
                self._watches[key] = Watch(look, poll_s=self._poll_s)
            return self._watches[key]

    def nudge(self, key: str) -> None:
        """Have the watch of this key look again at once, where there is one."""
        with self._lock:
            found = self._watches.get(key)
        if found is not None:
            found.nudge()

    def stop(self) -> None:
        """End all of them."""
        with self._lock:
            watches = list(self._watches.values())
        for watch in watches:
            watch.stop()
