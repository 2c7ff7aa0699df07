"""What a page shows, kept in parts; clients are sent the parts that have changed since they last looked.

Nothing is queued for anybody: a client that is slow misses what lies between, gets the latest of each part, and holds
up neither the reader nor other clients.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trials.secrets import redact_all


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
    """The parts of one page, each with the version in which it last changed. Any number of threads may wait on it."""

    def __init__(self) -> None:
        self._origin = secrets.token_hex(4)
        self._changed = threading.Condition()
        self._version = 0
        self._parts: dict[str, tuple[int, str]] = {}
        self._closed = False

    def publish(self, parts: Mapping[str, Any], *, is_all: bool = False) -> bool:
        """Put ``parts`` in the place of those of the same names, without secrets; None takes one away.

        Args:
            is_all: there are no others: those told before are gone.

        Returns:
            whether anything has changed.
        """
        texts = {name: json.dumps(redact_all(value), separators=(",", ":")) for name, value in parts.items()}
        with self._changed:
            if is_all:
                texts = dict.fromkeys(self._parts, "null") | texts
            news = {name: text for name, text in texts.items() if self._parts.get(name, (0, "null"))[1] != text}
            if news:
                self._version += 1
                self._parts.update({name: (self._version, text) for name, text in news.items()})
                self._changed.notify_all()
            return bool(news)

    def since(self, version: str = "", *, wait_s: float = 0.0) -> Patch | None:
        """Everything that has changed since ``version``, an earlier patch's, waiting up to ``wait_s`` seconds for it;
        None where nothing has. A version of another feed counts as none: everything is told."""
        deadline_s = time.monotonic() + wait_s
        with self._changed:
            seen = self._number(version)
            while self._version <= seen and not self._closed:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
            parts = {name: text for name, (number, text) in self._parts.items() if number > seen}
            return Patch(version=f"{self._origin}-{self._version}", parts=parts) if parts else None

    def _number(self, version: str) -> int:
        origin, _, number = version.partition("-")
        return int(number) if origin == self._origin and number.isdigit() else 0

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Let everybody who waits go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
