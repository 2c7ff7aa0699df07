"""Serves the pages on loopback with uvicorn: access control, and limits for clients without the token.

Every user of the host, and every page in the browser, can reach loopback. So the printed address contains a random
token; a client with the token gets a cookie, and all other requests are rejected.
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
from orchestrator.errors import ConfigError, reason_of
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
"""Maximum number of connections of clients with the token."""
MAX_PENDING = 32
"""Maximum number of other connections; for one more, the oldest is closed."""
REQUEST_S = 10.0
"""Time for a full request to arrive, including the wait for it on an open connection."""
STALL_S = 30.0
"""Time a client may take to accept the next part of a response."""
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""Allowed host names of requests. Any other name was made to point here (DNS rebinding)."""
CSRF_HEADER = "X-Tune-Cluster"
"""Header required for actions; forms and foreign pages cannot set it."""
_SITES = ("", "none", "same-origin")
"""``Sec-Fetch-Site`` of requests from the pages themselves, or from the address bar."""

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
"""Headers of every response: nothing is loaded from elsewhere, framed, sniffed, or cached."""
_PATH = re.compile(r"(?:/[a-z0-9][a-z0-9._-]*)+|/")
"""Paths of pages: nothing in them leads to another host."""
_CLOSED = "Open the address printed by `tune-cluster ui`: it contains the access token."


@dataclass(frozen=True, slots=True)
class Access:
    """The secrets of one server; they end with it."""

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    """The token in the printed address."""
    _session: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    """Value of :data:`CSRF_HEADER` for actions."""

    @property
    def cookie_name(self) -> str:
        """Servers on several ports of this host share a browser's cookies."""
        return f"tune_cluster_{self.port}"

    def cookie(self) -> str:
        """The header that sets a browser's cookie: hidden from scripts, not sent from other sites."""
        return f"{self.cookie_name}={self._session}; Path=/; HttpOnly; SameSite=Strict"

    def is_token(self, given: str) -> bool:
        """Whether ``given`` is the token, in constant time."""
        return hmac.compare_digest(given.encode(), self.token.encode())

    def has_cookie(self, header: str | None) -> bool:
        """Whether the request's ``Cookie`` header contains the value set by :meth:`cookie`."""
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
        """Whether an action comes from one of the server's own pages."""
        sent = headers.get(CSRF_HEADER, "")
        is_json = headers.get("Content-Type", "").partition(";")[0].strip() == "application/json"
        has_origin = headers.get("Origin") is not None
        return has_origin and is_json and hmac.compare_digest(sent.encode(), self.csrf.encode())


def is_from_here(headers: Mapping[str, str]) -> bool:
    """Whether the request was not initiated by another site, so that the browser sends the cookie at once."""
    return headers.get("Sec-Fetch-Site", "") in _SITES


def _name(host: str) -> str:
    """The name in a ``Host`` header, without the port; empty if it has another form. Ports are free: a tunnel may
    give the page another one."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return ""
    is_plain = not (parts.path or parts.query or parts.fragment or "@" in host)
    return (parts.hostname or "") if is_plain else ""


class Gate:
    """Admits clients accepted by :class:`Access`, and adds the headers to every response."""

    def __init__(self, site: ASGIApp, access: Access, admit: Callable[[Request], bool]) -> None:
        """
        Args:
            admit: whether one more client with the token is allowed.
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
        """The response to a client that is rejected, or presents the token; None for admitted ones."""
        access, headers, token = self._access, request.headers, request.query_params.get("token")
        if not access.is_ours(headers):
            return refusal(403, "This page is only available from this host, under its own address.")
        if request.method == "POST":
            if not access.may_act(headers):
                return refusal(403, "Only the page itself may request this.")
        elif token:
            return self._let_in(request, token)
        if not access.has_cookie(headers.get("Cookie")):
            return refusal(403, _CLOSED)
        if not self._admit(request):
            return refusal(503, "Too many windows have this page open. Close some.", {"Connection": "close"})
        return None

    def _let_in(self, request: Request, token: str) -> Response:
        """Give the browser its cookie and send it on to the address without token. If another site led here, a page
        of our own has to do that: browsers keep strict cookies from a redirect."""
        if not self._access.is_token(token):
            return refusal(403, _CLOSED)
        path = path if _PATH.fullmatch(path := request.scope["path"]) else "/"
        cookie = {"Set-Cookie": self._access.cookie()}
        if is_from_here(request.headers):
            return RedirectResponse(path, 303, cookie)
        return PlainTextResponse("", headers={**cookie, "Refresh": f"0; url={path}"})


class PageServer:
    """The server; a context manager that serves while it is open."""

    def __init__(
        self, home: Home, port: int | None, *, invocation: Invocation, links: Links, poll_s: float = 1.0
    ) -> None:
        """
        Args:
            port: of this host; None: :data:`DEFAULT_PORT`, or any free one.

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
            # Requests are not logged: the printed address contains the token.
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
        """The address with the token of a sweep's page, or of the list of all sweeps."""
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
            problem = reason_of(error)
    raise ConfigError(f"cannot listen on {HOST}:{one}: {problem}", remedy="Choose another port with --port.")


class PageConnection(H11Protocol):
    """A client's connection. It is closed if a full request does not arrive within :data:`REQUEST_S`, or if a response
    is not accepted for :data:`STALL_S`: uvicorn has no deadline for either."""

    is_admitted = False
    """Whether the client has presented the token."""
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
        """Bytes arrived; a full request no longer has a deadline."""
        super().handle_events()
        if self._has_request:
            self._end_in(None)

    def on_response_complete(self) -> None:
        """The next request is due."""
        self._end_in(REQUEST_S)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client is slower than the response."""
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
    """Note that the client of ``request`` has presented the token; False if there are too many."""
    connection: PageConnection = request.state.connection
    if not connection.is_admitted:
        admitted = [one for one in _open_connections(connection.server_state) if one.is_admitted]
        connection.is_admitted = len(admitted) < MAX_CONNECTIONS
    return connection.is_admitted


# ---- ``tune-cluster ui``: serves the live page and the MLflow UI until interrupted

MAX_PORTS = 20
"""Number of ports to try for MLflow by default."""

Announce = Callable[[Mapping[str, str], bool], None]
"""Receives addresses by name, and whether these are the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What to serve."""

    sweep: str | None
    """None: the list of all sweeps."""
    port: int | None
    """Port of the live page; None: the default, or any free one."""
    with_mlflow: bool
    mlflow_host: str
    mlflow_port: int | None
    """None: the default, or one of the next."""


class Archive:
    """Addresses of the sweeps' MLflow pages: on their tracking server, or on the one served here."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.base = ""
        """Address of the MLflow server started here, once it is up."""
        self.store = ""
        """The store that it shows."""

    def links(self, sweep: Snapshot) -> Mapping[str, str]:
        """The sweep's MLflow pages by title; empty if nothing was recorded, or no server has it."""
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
        announce: receives the page's address at once, those in MLflow when it is up.
        notify: receives further messages.

    Raises:
        ConfigError: the sweep does not exist, there are none, or the requested port is taken.
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
    """Serve the MLflow UI until interrupted; returns whether it was interrupted. If there is nothing to serve, or the
    server exits, the live page continues without it.

    Raises:
        ConfigError: the requested port is taken.
    """
    path = sqlite_path(store)
    if path is None:
        announce(archive.links(home.read(what.sweep)) if what.sweep else {}, True)
        notify(f"MLflow: {public_uri(store)}")
        return False
    if not path.exists():
        announce({}, True)
        notify("MLflow has nothing to show yet; run this again once the first trial has ended")
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
        notify(f"the page continues without MLflow: {first_line(error)}")
        return False
    archive.base = ""
    if status:
        notify("the MLflow server exited, see its message above; the page continues without it")
    return status == 0


def _free_port(host: str) -> int:
    """The default port of MLflow, or the first free one after it."""
    for port in range(mlflow_server.DEFAULT_PORT, mlflow_server.DEFAULT_PORT + MAX_PORTS):
        try:
            mlflow_server.check_port(host, port)
        except ConfigError:
            continue
        return port
    return mlflow_server.DEFAULT_PORT


def _store(home: Home, sweep: str | None) -> str:
    """The store for MLflow.

    Raises:
        ConfigError: the sweep does not exist, or there are none.
    """
    if sweep is not None:
        return home.read(sweep).tracking_uri or home.default_tracking_uri
    if not home.all_names():
        raise ConfigError(
            f"no sweeps in {home.path}",
            remedy="Submit a sweep first. If the sweeps are stored elsewhere, pass their directory with --home.",
        )
    return home.default_tracking_uri
