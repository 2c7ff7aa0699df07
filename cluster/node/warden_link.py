"""The warden's end of the socket to its agent: orders in, events out, without ever waiting for the agent."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from cluster.gang.messages import Lines, NodeEvent, line

CHUNK = 1 << 16
"""Bytes read at once."""


class AgentLink:
    """Takes orders from the agent and tells it of events, never waiting for it once it is watched."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._lines = Lines()
        self._outbox: deque[bytes] = deque()
        self.is_closed = False

    def receive(self) -> list[Any]:
        """Messages that have come from the agent, if any is complete; marks the link closed if the agent is gone."""
        try:
            chunk = self._agent.recv(CHUNK)
        except ConnectionError:
            chunk = b""
        self.is_closed = not chunk
        return list(self._lines.feed(chunk))

    def watch(self, selector: selectors.BaseSelector, obey: Callable[[list[Any]], None]) -> None:
        """From now on hand what is received to ``obey``, also the empty list when the agent is gone."""
        self._selector, self._obey = selector, obey
        self._agent.setblocking(False)
        selector.register(self._agent, selectors.EVENT_READ, self._serve)

    def tell(self, event: NodeEvent) -> None:
        self._outbox.append(line(event))
        self._flush()

    def finish(self, event: NodeEvent) -> None:
        """Send the last event after all before it, however long that takes."""
        self._agent.setblocking(True)
        with contextlib.suppress(ConnectionError):
            self._agent.sendall(b"".join(self._outbox) + line(event))

    def _serve(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if events & selectors.EVENT_READ:
            messages = self.receive()
            if self.is_closed:
                self._selector.unregister(self._agent)
            self._obey(messages)

    def _flush(self) -> None:
        """Send what the socket takes; an agent that is slow to read must not hold up the watch."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._outbox:
                sent = self._agent.send(self._outbox[0])
                self._outbox[0] = self._outbox[0][sent:]
                if not self._outbox[0]:
                    self._outbox.popleft()
        if self._agent.fileno() in self._selector.get_map():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
            self._selector.modify(self._agent, wanted, self._serve)
