"""Serves the pages on loopback: sockets, threads, checks before anything is answered, streams of changes.

The standard library's threading server: a few windows of one user are all there is to serve, what is read is SQLite and
files, which block anyway, and the client part of this program then needs no web framework.
"""

from __future__ import annotations

import logging
import re
import socket
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlencode, urlsplit

from orchestrator.errors import ConfigError
from orchestrator.invocation import Invocation
from orchestrator.live.access import HEADERS, Access, is_from_here
from orchestrator.live.looks import Links
from orchestrator.live.routes import Answer, Routes, refusal
from orchestrator.live.watch import Hub, Watch
from orchestrator.sweep.home import Home

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
DEFAULT_PORT = 5080
HEARTBEAT_S = 15.0
"""Time after which a stream without news says that it is there."""
RETRY_MS = 2000
"""Time after which a browser asks again that has lost its stream."""
MAX_CONNECTIONS = 128
MAX_BODY_BYTES = 4096
_STALL_S = 30.0
"""For how long a client may take to send its request, or to take an answer."""
_PATH = re.compile(r"(?:/[a-z0-9][a-z0-9._-]*)+|/")
"""Paths of pages: nothing in them leads to another host."""
_CLOSED = "Open the address that `tune-cluster ui` printed: it carries a token that lets you in."


class PageServer(ThreadingHTTPServer):
    """The server; a context manager that answers while it lasts."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self, home: Home, port: int | None, *, invocation: Invocation, links: Links, poll_s: float = 1.0
    ) -> None:
        """
        Args:
            port: of this host; None takes :data:`DEFAULT_PORT`, or any where that one is taken.

        Raises:
            ConfigError: the port is taken.
        """
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._bind(port)
        self.access = Access(self.server_address[1])
        self.hub = Hub(poll_s=poll_s)
        self.routes = Routes(home, self.hub, invocation, self.access.csrf, links)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="live-server", daemon=True)

    def _bind(self, port: int | None) -> None:
        for one in (DEFAULT_PORT, 0) if port is None else (port,):
            try:
                super().__init__((HOST, one), PageHandler)
                return
            except OSError as error:
                problem = error.strerror
        raise ConfigError(f"cannot listen on {HOST}:{one}: {problem}", remedy="Choose another with --port.")

    @property
    def base(self) -> str:
        """The address without the token."""
        return f"http://{HOST}:{self.access.port}"

    def url(self, sweep: str | None = None) -> str:
        """The address to open, with the token: of a sweep's page, or of the list of all."""
        path = f"/sweeps/{sweep}" if sweep else "/"
        return f"{self.base}{path}?{urlencode({'token': self.access.token})}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hub.stop()
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """One thread for each connection, up to :data:`MAX_CONNECTIONS`; more are turned away at once."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A client that went away is no error; anything else is one of ours."""
        is_gone = isinstance(sys.exception(), ConnectionError | TimeoutError)
        logger.log(logging.DEBUG if is_gone else logging.ERROR, "a request to the live page failed", exc_info=True)


class PageHandler(BaseHTTPRequestHandler):
    """Answers one connection."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = _STALL_S
    server_version = "tune-cluster"
    sys_version = ""

    def do_GET(self) -> None:
        """A page, a document or a stream, for those who may see it."""
        parts = urlsplit(self.path)
        if not self.server.access.is_ours(self.headers):  # type: ignore[arg-type]  # it has all that is asked for
            self._send(refusal(403, "This page answers on this host only, under its own address."))
        elif token := parse_qs(parts.query).get("token"):
            self._let_in(parts.path, token[-1])
        elif not self.server.access.has_cookie(self.headers.get("Cookie")):
            self._send(refusal(403, _CLOSED))
        else:
            found = self.server.routes.get(parts.path, parts.query)
            if isinstance(found, Watch):
                self._stream(found)
            else:
                self._send(found)

    def do_POST(self) -> None:
        """Something is to be done, asked for by one of our own pages."""
        access = self.server.access
        body = self._body()
        if body is None:
            self._send(refusal(413, "That is too long."))
        elif not access.is_ours(self.headers) or not access.may_act(self.headers):  # type: ignore[arg-type]
            self._send(refusal(403, "Only the page itself may ask for that."))
        elif not access.has_cookie(self.headers.get("Cookie")):
            self._send(refusal(403, _CLOSED))
        else:
            self._send(self.server.routes.post(urlsplit(self.path).path, body))

    def _body(self) -> bytes | None:
        """The request's body; None where it is too long, or its length is not told."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            return None
        return self.rfile.read(int(length))

    def _let_in(self, path: str, token: str) -> None:
        """Give the browser its cookie and send it on to the address without token. Where another site led here, a page
        of our own has to do that: browsers keep strict cookies from a redirect."""
        if not self.server.access.is_token(token):
            self._send(refusal(403, _CLOSED))
            return
        cookie = {"Set-Cookie": self.server.access.cookie()}
        path = path if _PATH.fullmatch(path) else "/"
        if is_from_here(self.headers):  # type: ignore[arg-type]
            self._send(Answer(status=303, kind="text/plain", headers={**cookie, "Location": path}))
        else:
            self._send(Answer(kind="text/plain", headers={**cookie, "Refresh": f"0; url={path}"}))

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in {**HEADERS, **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def _stream(self, watch: Watch) -> None:
        """Changes as server-sent events, until the client goes away or the server ends."""
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        for name, value in {**HEADERS, "Content-Type": "text/event-stream", "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        version = self.headers.get("Last-Event-ID", "")
        with watch.client() as feed:
            self.wfile.write(f"retry: {RETRY_MS}\n\n".encode())
            while not feed.is_closed:
                patch = feed.since(version, wait_s=HEARTBEAT_S)
                if patch is None:
                    self.wfile.write(b": here\n\n")
                    continue
                self.wfile.write(f"id: {patch.version}\nevent: patch\ndata: {patch.body}\n\n".encode())
                version = patch.version

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Requests are nobody's business: the printed address carries the token."""
        del args
        logger.debug("live page: %s", format)
