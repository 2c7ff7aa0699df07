"""Reads sweeps for those who look at them: one thread for each page that somebody has open, whatever the number of
windows; none where nobody looks."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from orchestrator.errors import ConfigError
from orchestrator.sweep.ledger import LedgerError
from orchestrator.text import first_line
from trials.secrets import redact_all

logger = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
"""Time after which a stream without news says that it is there."""
POLL_S = 1.0
"""Time between two looks at a sweep."""
IDLE_S = 10.0
"""For how long a sweep is still read after the last window that showed it was closed: pages are loaded anew."""
TROUBLE = "trouble"
"""Part that says why nothing newer is shown; empty while all is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """What has changed: part to its JSON text, ``null`` for one that is gone."""

    version: str
    """Where the client is once it has taken this in; told back, it gets only what comes later."""
    parts: Mapping[str, str]

    @property
    def body(self) -> str:
        """One JSON object in one line."""
        return "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in self.parts.items()) + "}"


class Feed:
    """The parts of one page, each with the version in which it last changed. Nothing is queued: a client that is slow
    misses what lies between, gets the latest of each part, and holds up neither the reader nor other clients."""

    def __init__(self) -> None:
        self._origin = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._version = 0
        self._parts: dict[str, tuple[int, str]] = {}
        self._closed = False
        self._listeners: list[Callable[[], object]] = []

    def publish(self, parts: Mapping[str, Any], *, is_all: bool = False) -> bool:
        """Put ``parts`` in the place of those of the same names, without secrets; None takes one away.

        Args:
            is_all: there are no others: those told before are gone.

        Returns:
            whether anything has changed.
        """
        texts = {name: json.dumps(redact_all(value), separators=(",", ":")) for name, value in parts.items()}
        with self._lock:
            if is_all:
                texts = dict.fromkeys(self._parts, "null") | texts
            news = {name: text for name, text in texts.items() if self._parts.get(name, (0, "null"))[1] != text}
            if news:
                self._version += 1
                self._parts.update({name: (self._version, text) for name, text in news.items()})
                self._wake()
            return bool(news)

    def since(self, version: str = "") -> Patch | None:
        """Everything that has changed since ``version``, an earlier patch's; None if nothing has. A version of another
        feed counts as none."""
        with self._lock:
            seen = self._number(version)
            parts = {name: text for name, (number, text) in self._parts.items() if number > seen}
            return Patch(version=f"{self._origin}-{self._version}", parts=parts) if parts else None

    async def changes(self, version: str) -> AsyncIterator[Patch | None]:
        """What has changed since ``version``, then every change until the feed is closed; None where there was none for
        :data:`HEARTBEAT_S`."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        listener = partial(loop.call_soon_threadsafe, news.set)
        with self._lock:
            self._listeners.append(listener)
        try:
            while not self._closed:
                news.clear()
                if (patch := self.since(version)) is not None:
                    version = patch.version
                    yield patch
                    continue
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await news.wait()
                except TimeoutError:
                    yield None
        finally:
            with self._lock:
                self._listeners.remove(listener)

    def _number(self, version: str) -> int:
        origin, _, number = version.partition("-")
        return int(number) if origin == self._origin and re.fullmatch(r"[0-9]{1,18}", number) else 0

    def close(self) -> None:
        """End all streams of changes."""
        with self._lock:
            self._closed = True
            self._wake()

    def _wake(self) -> None:
        for listener in self._listeners:
            listener()


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
