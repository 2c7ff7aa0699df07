"""Serves the pages on loopback with uvicorn: who may see them, and what clients without the token can hold of it.

Every user of the host, and every page in the browser, can reach loopback. So the address that is printed carries a
random token; who comes with it gets a cookie, and nothing is answered without either.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any, Self, cast
from urllib.parse import urlencode, urlsplit

import h11
import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.commands.inspection import serve_ui
from orchestrator.errors import ConfigError
from orchestrator.live.live_pages import Links
from orchestrator.live.site import Hub, make_site, refusal
from orchestrator.mlflow_urls import public_uri, sqlite_path, sweep_links
from orchestrator.process_support import Invocation, interruptible
from orchestrator.sweep.snapshot import Home, Snapshot
from orchestrator.text import first_line
from orchestrator.tracking import mlflow_server

HOST = "127.0.0.1"
DEFAULT_PORT = 5080
MAX_CONNECTIONS = 128
"""Connections of clients that have shown the token."""
MAX_PENDING = 32
"""Connections of clients that have not; for one more, the oldest is closed."""
REQUEST_S = 10.0
"""Time for a whole request to arrive: request line, headers and body, and the wait for it on an open connection."""
STALL_S = 30.0
"""Time a client may take to accept the next part of an answer."""
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""Names by which a browser may call the server. Any other is a foreign name made to point here (DNS rebinding)."""
CSRF_HEADER = "X-Tune-Cluster"
"""Header that every request to do something carries; no form and no foreign page can set it."""
_SITES = ("", "none", "same-origin")
"""What browsers say of requests that come from the pages themselves, or from the address line (``Sec-Fetch-Site``)."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer: nothing is loaded from elsewhere, framed, guessed, or left in a cache."""
_PATH = re.compile(r"(?:/[a-z0-9][a-z0-9._-]*)+|/")
"""Paths of pages: nothing in them leads to another host."""
_CLOSED = "Open the address that `tune-cluster ui` printed: it carries a token that lets you in."


@dataclass(frozen=True, slots=True)
class Access:
    """The secrets of one server; they end with it."""

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    """What the printed address carries."""
    _session: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    """What pages send along in :data:`CSRF_HEADER` when they ask for something to be done."""

    @property
    def cookie_name(self) -> str:
        """Servers on several ports of this host share a browser's cookies."""
        return f"tune_cluster_{self.port}"

    def cookie(self) -> str:
        """The header that gives a browser its cookie: kept from scripts, not sent along from other sites."""
        return f"{self.cookie_name}={self._session}; Path=/; HttpOnly; SameSite=Strict"

    def is_token(self, given: str) -> bool:
        """Whether ``given`` is the token; takes as long for every wrong one."""
        return hmac.compare_digest(given.encode(), self.token.encode())

    def has_cookie(self, header: str | None) -> bool:
        """Whether the request's ``Cookie`` header holds what :meth:`cookie` gave."""
        try:
            found = SimpleCookie(header or "").get(self.cookie_name)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self._session.encode())

    def is_ours(self, headers: Mapping[str, str]) -> bool:
        """Whether a request calls this host by a name of loopback, and comes from no other site; a link there may lead
        to a page."""
        host = headers.get("Host", "")
        if _name(host) not in LOOPBACK_NAMES:
            return False
        origin = headers.get("Origin")
        is_link = headers.get("Sec-Fetch-Mode") == "navigate" and origin is None
        return is_link or (is_from_here(headers) and origin in (None, f"http://{host}"))

    def may_act(self, headers: Mapping[str, str]) -> bool:
        """Whether a request to do something comes from one of the server's own pages."""
        sent = headers.get(CSRF_HEADER, "")
        is_json = headers.get("Content-Type", "").partition(";")[0].strip() == "application/json"
        has_origin = headers.get("Origin") is not None
        return has_origin and is_json and hmac.compare_digest(sent.encode(), self.csrf.encode())


def is_from_here(headers: Mapping[str, str]) -> bool:
    """Whether no page of another site led to this request, so that the browser sends a cookie along at once."""
    return headers.get("Sec-Fetch-Site", "") in _SITES


def _name(host: str) -> str:
    """The name in a ``Host`` header, without the port; empty where it is no such header. Ports are free: a tunnel may
    give the page another one."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return ""
    is_plain = not (parts.path or parts.query or parts.fragment or "@" in host)
    return (parts.hostname or "") if is_plain else ""


class Gate:
    """Lets in whom :class:`Access` lets in, and gives every answer its headers."""

    def __init__(self, site: ASGIApp, access: Access, admit: Callable[[Request], bool]) -> None:
        """
        Args:
            admit: whether there is room for one more client that has shown the token.
        """
        self._site, self._access, self._admit = site, access, admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._answer(Request(scope)) or self._site
        await answer(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """The answer to a client that may not enter, or that comes with the token; None for those that may enter."""
        access, headers, token = self._access, request.headers, request.query_params.get("token")
        if not access.is_ours(headers):
            return refusal(403, "This page answers on this host only, under its own address.")
        if request.method == "POST":
            if not access.may_act(headers):
                return refusal(403, "Only the page itself may ask for that.")
        elif token:
            return self._let_in(request, token)
        if not access.has_cookie(headers.get("Cookie")):
            return refusal(403, _CLOSED)
        if not self._admit(request):
            return refusal(503, "Too many windows show this page. Close some.", {"Connection": "close"})
        return None

    def _let_in(self, request: Request, token: str) -> Response:
        """Give the browser its cookie and send it on to the address without token. Where another site led here, a page
        of our own has to do that: browsers keep strict cookies from a redirect."""
        if not self._access.is_token(token):
            return refusal(403, _CLOSED)
        path = path if _PATH.fullmatch(path := request.scope["path"]) else "/"
        cookie = {"Set-Cookie": self._access.cookie()}
        if is_from_here(request.headers):
            return RedirectResponse(path, 303, cookie)
        return PlainTextResponse("", headers={**cookie, "Refresh": f"0; url={path}"})


class PageServer:
    """The server; a context manager that answers while it lasts."""

    def __init__(
        self, home: Home, port: int | None, *, invocation: Invocation, links: Links, poll_s: float = 1.0
    ) -> None:
        """
        Args:
            port: of this host; None takes :data:`DEFAULT_PORT`, or any where that one is taken.

        Raises:
            ConfigError: the port is taken.
        """
        self._socket = _listening(port)
        self.access = Access(self._socket.getsockname()[1])
        self.hub = Hub(poll_s=poll_s)
        site = make_site(home, self.hub, invocation, self.access.csrf, links)
        config = uvicorn.Config(
            Gate(site, self.access, _admit),
            http=PageConnection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            # Requests are not logged: the printed address carries the token.
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="live-server", daemon=True
        )

    @property
    def base(self) -> str:
        """The address without the token."""
        return f"http://{HOST}:{self.access.port}"

    def url(self, sweep: str | None = None) -> str:
        """The address to open, with the token: of a sweep's page, or of the list of all."""
        path = f"/sweeps/{sweep}" if sweep else "/"
        return f"{self.base}{path}?{urlencode({'token': self.access.token})}"

    @property
    def num_connections(self) -> int:
        """How many are open."""
        return len(_open_connections(self._server.server_state))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.hub.stop()
        self._server.should_exit = True
        self._thread.join()


def _listening(port: int | None) -> socket.socket:
    """A socket that accepts connections from now on.

    Raises:
        ConfigError: the port is taken.
    """
    for one in (DEFAULT_PORT, 0) if port is None else (port,):
        found = socket.socket()
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((HOST, one))
            found.listen(64)
            return found
        except OSError as error:
            found.close()
            problem = error.strerror
    raise ConfigError(f"cannot listen on {HOST}:{one}: {problem}", remedy="Choose another with --port.")


class PageConnection(H11Protocol):
    """A client's connection. It is closed if a request does not arrive as a whole in :data:`REQUEST_S`, or if an answer
    is not accepted for :data:`STALL_S`: uvicorn has no deadline for either."""

    is_admitted = False
    """Whether the client has shown the token."""
    opened_s = 0.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for the new connection."""
        pending = [one for one in _open_connections(self.server_state) if not one.is_admitted]
        if len(pending) >= MAX_PENDING:
            min(pending, key=lambda one: one.opened_s).transport.abort()
        self.opened_s = time.monotonic()
        self.app_state = {"connection": self}
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._end_in(None)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Bytes came in; a whole request has no deadline any more."""
        super().handle_events()
        if self._has_request:
            self._end_in(None)

    def on_response_complete(self) -> None:
        """The next request is due."""
        self._end_in(REQUEST_S)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client accepts less than it is sent."""
        super().pause_writing()
        self._end_in(STALL_S)

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        self._expect_request()

    @property
    def _has_request(self) -> bool:
        return self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)

    def _expect_request(self) -> None:
        self._end_in(None if self._has_request else REQUEST_S)

    def _end_in(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


def _open_connections(state: Any) -> list[PageConnection]:
    """All that are not being closed."""
    return [one for one in cast(set[PageConnection], state.connections.copy()) if not one.transport.is_closing()]


def _admit(request: Request) -> bool:
    """Note that the client of ``request`` has shown the token; False if there are too many of those."""
    connection: PageConnection = request.state.connection
    if not connection.is_admitted:
        admitted = [one for one in _open_connections(connection.server_state) if one.is_admitted]
        connection.is_admitted = len(admitted) < MAX_CONNECTIONS
    return connection.is_admitted


# ---- What ``tune-cluster ui`` does: serve the live page, and beside it the MLflow UI, until interrupted

MAX_PORTS = 20
"""Ports that are tried for MLflow where none was asked for."""

Announce = Callable[[Mapping[str, str], bool], None]
"""Gets addresses by what is there, and whether these are the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is to be served."""

    sweep: str | None
    """None: the list of all sweeps."""
    port: int | None
    """Where the live page is; None: the usual one, or any."""
    with_mlflow: bool
    mlflow_host: str
    mlflow_port: int | None
    """None: the usual one, or one of the next."""


class Archive:
    """Where the browser finds the MLflow pages of sweeps: on their tracking server, or on the one served here."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.base = ""
        """Address of the MLflow server that runs here, once it answers."""
        self.store = ""
        """The store that it shows."""

    def links(self, sweep: Snapshot) -> Mapping[str, str]:
        """What to open of the sweep, by what it shows; empty where nothing was recorded, or no server shows it."""
        if sweep.recorded is None:
            return {}
        store = sweep.tracking_uri or self._home.default_tracking_uri
        base = self.base if store == self.store else public_uri(store)
        return sweep_links(base, sweep.recorded.experiment_id, sweep.recorded.run_id, sweep.name) if base else {}


def serve(
    home: Home, what: Served, *, invocation: Invocation, announce: Announce, notify: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM, which end everything.

    Args:
        announce: gets the page's address at once, those in MLflow when it answers.
        tell: gets what else there is to say, a sentence each.

    Raises:
        ConfigError: there is no such sweep, no sweep at all, or a port that was asked for is taken.
    """
    store = _store(home, what.sweep)
    archive = Archive(home)
    with interruptible(), PageServer(home, what.port, invocation=invocation, links=archive.links) as pages:
        announce({"page": pages.url(what.sweep)}, not what.with_mlflow)
        try:
            if what.with_mlflow and _serve_mlflow(home, what, archive, store, announce, notify):
                return
            while True:
                signal.pause()
        except KeyboardInterrupt:
            return


def _serve_mlflow(
    home: Home, what: Served, archive: Archive, store: str, announce: Announce, notify: Callable[[str], None]
) -> bool:
    """Serve the MLflow UI until interrupted; whether that was so. Where there is nothing to serve, or it ends by
    itself, the live page goes on without it.

    Raises:
        ConfigError: the port that was asked for is taken.
    """
    path = sqlite_path(store)
    if path is None:
        announce(archive.links(home.read(what.sweep)) if what.sweep else {}, True)
        notify(f"MLflow: {public_uri(store)}")
        return False
    if not path.exists():
        announce({}, True)
        notify("MLflow has nothing to show yet; start this again when the first trial has ended")
        return False
    port = what.mlflow_port or _free_port(what.mlflow_host)

    def ready(links: dict[str, str]) -> None:
        archive.store, archive.base = store, f"http://{what.mlflow_host}:{port}"
        announce({f"mlflow {name}" if name == "experiments" else name: url for name, url in links.items()}, True)

    try:
        status = serve_ui(home, what.sweep, host=what.mlflow_host, port=port, announce=ready)
    except ConfigError as error:
        if what.mlflow_port is not None:
            raise
        announce({}, True)
        notify(f"the page goes on without MLflow: {first_line(error)}")
        return False
    archive.base = ""
    if status:
        notify("the page goes on without MLflow, whose server ended by itself; its own message stands above")
    return status == 0


def _free_port(host: str) -> int:
    """The usual port of MLflow, or the first free one after it."""
    for port in range(mlflow_server.DEFAULT_PORT, mlflow_server.DEFAULT_PORT + MAX_PORTS):
        try:
            mlflow_server.check_port(host, port)
        except ConfigError:
            continue
        return port
    return mlflow_server.DEFAULT_PORT


def _store(home: Home, sweep: str | None) -> str:
    """The store that MLflow is to show.

    Raises:
        ConfigError: there is no such sweep, or none at all.
    """
    if sweep is not None:
        return home.read(sweep).tracking_uri or home.default_tracking_uri
    if not home.all_names():
        raise ConfigError(
            f"there are no sweeps in {home.path}", remedy="Submit one first, or use --home for another folder."
        )
    return home.default_tracking_uri
