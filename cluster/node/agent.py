"""A backend's agent on one node: it has the fork server fork a warden per attempt, and collects the wardens' events."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import selectors
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.base import ClusterError
from cluster.gang.environment import cache_folder, remove_old_caches
from cluster.gang.messages import Beat, GangOrder, Lines, NodeEvent, NodeGone, NodeLaunch, RankFailure, line
from cluster.node.guardian import SELF_CLEANING_VARIABLE
from cluster.processes import python_module
from trials.files import from_json, make_private_folder
from trials.secrets import for_ranks, redact

logger = logging.getLogger(__name__)

PRELOAD = ("torch", "torch.distributed", "trials.worker")
SCRIPT_PRELOAD = ("trials.script.runner",)
"""Modules for ranks that start a user's program, which does its own imports."""
READY_TIMEOUT_S = 180.0
CLOSE_TIMEOUT_S = 150.0
"""Longest wait for processes at the end, in seconds: more than wardens and fork server need to end any."""
SILENCE_S = 180.0
"""Time without a poll, in seconds, after which the controller counts as frozen or cut off."""
CHUNK = 1 << 16
"""Bytes read from a socket at once."""


@dataclass(slots=True, kw_only=True)
class _Attempt:
    token: str
    connection: socket.socket
    lines: Lines = field(default_factory=Lines)


class Agent:
    """Starts and ends ranks on this host. ``launch`` and ``order`` may be called while another thread is in ``poll``.

    Each ``poll`` informs the wardens that the controller is alive. They end their ranks after too long a silence, so
    that no rank outlives a controller that froze or lost its connection. This works even if the agent froze too, as it
    runs in the controller's process.

    Args:
        node: its name, used in messages.
        workdir: folder for the fork server's log.
        preload: modules the fork server imports once for all ranks.
        search_path: appended to the fork server's ``sys.path``, so that it finds the controller's runners.
        env: added to the environment of every process.
        silence_s: longest time between two calls of ``poll``, in seconds.

    Raises:
        ClusterError: the fork server does not start.
    """

    def __init__(
        self,
        *,
        node: str,
        workdir: Path,
        preload: Sequence[str] = PRELOAD,
        search_path: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._node = node
        self._preload = tuple(preload)
        self._search_path = tuple(search_path)
        self._env = dict(env or {})
        self._silence_s = silence_s
        self._reported_until_s = -math.inf
        """Time (monotonic) until which the wardens consider the controller alive."""
        self._log_path = workdir / f"fork-server-{node}.log"
        self._cache = cache_folder(workdir, node)
        remove_old_caches()
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._attempts: dict[str, _Attempt] = {}
        self._is_closed = False
        self._start_fork_server()
        self._spare: socket.socket | None = self._connect()
        """Socket of a warden that is ready for the next launch, so that launching needs no fork."""

    def launch(self, launch: NodeLaunch) -> None:
        """Start the ranks of one attempt. A :class:`NodeGone` event reports their end."""
        with self._lock:
            if self._fork_server.poll() is not None:
                self._replace_fork_server()
            connection, self._spare = self._spare or self._connect(), None
            self._attempts[launch.attempt_id] = _Attempt(token=launch.token, connection=connection)
            self._selector.register(connection, selectors.EVENT_READ, launch.attempt_id)
            with contextlib.suppress(ConnectionError):  # poll() notices a dead warden, and a dead fork server
                connection.sendall(line(launch) + line(self._beat()))

    def order(self, attempt_id: str, order: GangOrder) -> None:
        """Send an order to the attempt's warden, such as to kill its ranks. Unknown attempts are ignored."""
        with self._lock:
            if attempt := self._attempts.get(attempt_id):
                with contextlib.suppress(ConnectionError):
                    attempt.connection.sendall(line(order))

    def poll(self, timeout_s: float) -> list[NodeEvent]:
        """Wait up to ``timeout_s`` for events; return them in order."""
        events: list[NodeEvent] = []
        self._report_alive(timeout_s)
        for key, _ in self._selector.select(timeout_s):
            with self._lock:
                if key.fileobj is self._control:
                    self._replace_fork_server()
                elif isinstance(key.data, str) and key.data in self._attempts:
                    events += self._receive(key.data)
        with self._lock:
            if self._spare is None and not self._is_closed and any(isinstance(event, NodeGone) for event in events):
                self._spare = self._connect()
        return events

    def close(self) -> None:
        """End every process of this agent and remove the compilers' caches. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for attempt in self._attempts.values():
                _end(attempt.connection)
            self._disconnect()
            try:
                self._fork_server.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.error(
                    "processes on %s cannot be killed, possibly blocked in a driver: restart the host", self._node
                )
            shutil.rmtree(self._cache, ignore_errors=True)
            self._selector.close()

    def _report_alive(self, timeout_s: float) -> None:
        """Inform the wardens that the controller is alive, at most ten times per allowed silence."""
        wanted_s = time.monotonic() + timeout_s + self._silence_s
        if wanted_s > self._reported_until_s + self._silence_s / 10:
            with self._lock:
                self._reported_until_s = wanted_s
                for attempt in self._attempts.values():
                    with contextlib.suppress(OSError):
                        attempt.connection.sendall(line(self._beat()))

    def _beat(self) -> Beat:
        return Beat(patience_s=max(self._silence_s, self._reported_until_s - time.monotonic()) + self._silence_s / 10)

    def _start_fork_server(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [str(theirs.fileno()), json.dumps(self._search_path), *self._preload]
        environment = {"OPENBLAS_NUM_THREADS": "1", **for_ranks(os.environ), **self._env, SELF_CLEANING_VARIABLE: "1"}
        make_private_folder(self._log_path.parent)
        with theirs, self._log_path.open("ab") as log:
            self._fork_server = subprocess.Popen(
                python_module("cluster.node.warden", *arguments),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # only the controller handles Ctrl-C in the terminal
                env=environment,
            )
        self._await_ready()
        self._selector.register(self._control, selectors.EVENT_READ)

    def _await_ready(self) -> None:
        self._control.settimeout(READY_TIMEOUT_S)
        try:
            message = self._control.recv(CHUNK)
        except TimeoutError:
            message = b""
        self._control.settimeout(None)
        if not message:
            self._fork_server.kill()
            self._fork_server.wait()
            self._control.close()
            why = last_output(self._log_path) or "no output"
            raise ClusterError(f"the fork server on {self._node} did not start: {why} ({self._log_path})")
        for problem in json.loads(message)["problems"]:
            logger.warning("fork server on %s: %s", self._node, problem)

    def _receive(self, attempt_id: str) -> list[NodeEvent]:
        attempt = self._attempts[attempt_id]
        try:
            chunk = attempt.connection.recv(CHUNK)
        except ConnectionError:
            chunk = b""
        events: list[NodeEvent] = [from_json(NodeEvent, message) for message in attempt.lines.feed(chunk)]
        if not chunk:
            events.append(self._lost(attempt_id, "the attempt's warden process died"))
        if any(isinstance(event, NodeGone) for event in events):
            self._forget(attempt_id)
        return events

    def _replace_fork_server(self) -> None:
        """Start another fork server after one died. Wardens and running gangs do not depend on it."""
        logger.warning("the fork server on %s died with code %d", self._node, self._fork_server.wait())
        self._disconnect()
        self._start_fork_server()

    def _lost(self, attempt_id: str, reason: str) -> NodeGone:
        failure = RankFailure(rank=None, node=self._node, category="lost", message=reason, at_s=time.time())
        return NodeGone(attempt_id=attempt_id, token=self._attempts[attempt_id].token, results=(failure,))

    def _connect(self) -> socket.socket:
        """Have the fork server fork a warden; return the socket connected to it."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(ConnectionError):
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        return ours

    def _disconnect(self) -> None:
        """Close the fork server's control socket, which ends it."""
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        if self._control.fileno() >= 0:  # closed if this fork server never started
            self._selector.unregister(self._control)
            self._control.close()

    def _forget(self, attempt_id: str) -> None:
        attempt = self._attempts.pop(attempt_id)
        self._selector.unregister(attempt.connection)
        attempt.connection.close()


def last_output(log: Path) -> str:
    """Return the last non-empty line of a log, without secrets; empty if there is none."""
    lines = [text for text in log.read_text(encoding="utf-8", errors="replace").splitlines() if text.strip()]
    return redact(lines[-1].strip())[:400] if lines else ""


def _end(connection: socket.socket) -> None:
    """Have the warden at the other end kill its ranks, and wait until it is done."""
    connection.settimeout(CLOSE_TIMEOUT_S)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(CHUNK):
            pass
    connection.close()
