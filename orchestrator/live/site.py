"""The routes: pages, scripts and style, documents, streams of changes, actions; and the threads that read sweeps for
those streams."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, get_args

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from cluster.processes import python_module
from orchestrator.commands import steering
from orchestrator.commands.submission import submission_of_sweep
from orchestrator.errors import ConfigError
from orchestrator.live.live_pages import IndexView, Links, SweepView, log_document, render, static, trial_document
from orchestrator.process_support import Invocation
from orchestrator.sweep.checkpoint import RETRIABLE
from orchestrator.sweep.events import Action
from orchestrator.sweep.ledger import LedgerError
from orchestrator.sweep.snapshot import NAME_PATTERN, Home
from orchestrator.text import first_line, plain
from orchestrator.units import trial_id
from trials.secrets import redact_all

# Reads sweeps for viewers: one thread per open page, regardless of the number of windows.

logger = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
"""Interval of heartbeats on a stream without changes."""
POLL_S = 1.0
"""Interval between two reads of a sweep."""
IDLE_S = 10.0
"""How long to keep reading a sweep after its last window was closed: pages may be reloaded."""
TROUBLE = "trouble"
"""Part with the reason why the page is stale; empty if it is up to date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Changes: part to its JSON text, ``null`` for a removed one."""

    version: str
    """The client's version after this patch; sent back, it selects only later changes."""
    parts: Mapping[str, str]

    @property
    def body(self) -> str:
        """One JSON object in one line."""
        return "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in self.parts.items()) + "}"


class Feed:
    """The parts of one page, each with the version of its last change. Nothing is queued: a slow client skips
    intermediate versions and gets the latest of each part, without blocking the reader or other clients."""

    def __init__(self) -> None:
        self._origin = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._version = 0
        self._parts: dict[str, tuple[int, str]] = {}
        self._closed = False
        self._listeners: list[Callable[[], object]] = []

    def publish(self, parts: Mapping[str, Any], *, is_all: bool = False) -> bool:
        """Replace the parts of the same names, without secrets; None removes one.

        Args:
            is_all: there are no others: earlier ones are removed.

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
        """The changes since ``version``, then every change until the feed is closed; None if there was none for
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


class View(Protocol):
    """Something to poll."""

    def parts(self) -> Mapping[str, Any]:
        """All current parts of the page; parts unchanged since the last look may be omitted.

        Raises:
            ConfigError: the shown sweep no longer exists.
            LedgerError: it cannot be read now.
        """


class Watch:
    """A thread that polls and publishes, from the first client until :data:`IDLE_S` after the last."""

    def __init__(self, view: Callable[[], View], *, poll_s: float = POLL_S, idle_s: float = IDLE_S) -> None:
        self.feed = Feed()
        self._make_view = view
        self._poll_s, self._idle_s = poll_s, idle_s
        self._num_clients = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stopped = False

    @contextmanager
    def client(self) -> Iterator[Feed]:
        """The feed, kept up to date while the context is open."""
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
        """Poll at once: something has changed."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread, and disconnect all clients."""
        with self._lock:
            self._stopped = True
        self._wake.set()
        self.feed.close()
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        view, idle_for_s, is_first = self._make_view(), 0.0, True
        while True:
            is_first = not self._publish(view, is_first=is_first) and is_first
            self._wake.wait(self._poll_s)
            self._wake.clear()
            with self._lock:
                idle_for_s = 0.0 if self._num_clients else idle_for_s + self._poll_s
                if self._stopped or idle_for_s > self._idle_s:
                    self._thread = None
                    return

    def _publish(self, view: View, *, is_first: bool) -> bool:
        """Poll once; returns whether it succeeded. Errors are shown on the page, and the poll is repeated: a network
        disk may be temporarily unavailable."""
        try:
            self.feed.publish({**view.parts(), TROUBLE: ""}, is_all=is_first)
            return True
        except (ConfigError, LedgerError, OSError) as error:
            self.feed.publish({TROUBLE: f"This page may be out of date; retrying: {first_line(error)}"})
        except Exception as error:
            logger.warning("cannot update the live page", exc_info=True)
            self.feed.publish({TROUBLE: f"Cannot update the page: {first_line(error)}"})
        return False


class Hub:
    """The watches of a server, by key."""

    def __init__(self, *, poll_s: float = POLL_S) -> None:
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._watches: dict[str, Watch] = {}

    def watch(self, key: str, view: Callable[[], View]) -> Watch:
        """The watch of this key, created with ``view`` if needed."""
        with self._lock:
            if key not in self._watches:
                self._watches[key] = Watch(view, poll_s=self._poll_s)
            return self._watches[key]

    def nudge(self, key: str) -> None:
        """Make the watch of this key poll at once, if it exists."""
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


INDEX = "*"
"""Key of the watch over all sweeps; not a valid name of a sweep."""
MAX_BODY_BYTES = 4096
RETRY_MS = 2000
"""Time after which a browser reconnects a lost stream."""


ACTIONS = (*get_args(Action), "retry", "resume")
"""The possible actions."""

Notify = Callable[[str, bool], None]
"""Receives a sentence for people, and whether it is an error."""


class Actions:
    """Carries out actions on the sweeps of a home. It starts controllers in the background, like ``resume --detach``;
    they outlive this program."""

    def __init__(self, home: Home, invocation: Invocation) -> None:
        self._home = home
        self._invocation = invocation
        self._starting: set[str] = set()
        self._lock = threading.Lock()

    def carry_out(self, sweep: str, action: str, body: Mapping[str, Any], notify: Notify) -> str:
        """Carry out the action; returns a sentence. Longer work continues, and ``notify`` receives the result.

        Raises:
            ConfigError: it is not possible.
            LedgerError: the sweep cannot be read or written.
        """
        if action in get_args(Action):
            receipt = steering.request_action(sweep, self._home, action)  # type: ignore[arg-type]  # one of its names
            return f"{action} requested" if receipt.is_controlled else f"now {receipt.state}"
        if action == "retry":
            receipt = steering.retry(sweep, self._home, _kinds(body))
            numbers = ", ".join(trial_id(number) for number in receipt.trials)
            if receipt.is_controlled:
                return f"will be launched again: {numbers}"
            return f"will be launched again: {numbers}; {self._resume(sweep, notify)}"
        return self._resume(sweep, notify)

    def _resume(self, sweep: str, notify: Notify) -> str:
        """Start a controller, and wait for it in a thread: a cluster may take minutes to respond."""
        submission = submission_of_sweep(sweep, self._home, address=None, mode=None)
        if submission.is_over:
            raise ConfigError(
                f"the sweep {sweep!r} has ended", remedy="Retry its failed trials, or confirm another trial."
            )
        with self._lock:
            if sweep in self._starting:
                return "its controller is already being started"
            self._starting.add(sweep)
        detach = [] if submission.address else ["--detach"]
        argv = python_module("orchestrator", "resume", sweep, "--home", str(self._home.path.absolute()), *detach)
        threading.Thread(target=self._start, args=(sweep, argv, notify), name="live-start", daemon=True).start()
        return "its controller is being started"

    def _start(self, sweep: str, argv: list[str], notify: Notify) -> None:
        """Run the command in a separate process that leaves no child to this one."""
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            if done.returncode == 0:
                notify("its controller is running", False)
            else:
                command = self._invocation.command("logs", sweep)
                notify(
                    f"{plain(lines[-1]) if lines else 'its controller exited at once'}; for details: `{command}`", True
                )
        except OSError as error:
            notify(f"its controller could not be started: {first_line(error)}", True)
        finally:
            with self._lock:
                self._starting.discard(sweep)


def _kinds(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Kinds of outcomes as a page sent them.

    Raises:
        ConfigError: none, or unknown ones.
    """
    kinds = body.get("kinds")
    if not isinstance(kinds, list) or not kinds or not all(kind in RETRIABLE for kind in kinds):
        raise ConfigError("no failure type was selected", remedy=f"Choose from: {', '.join(RETRIABLE)}.")
    return tuple(kinds)


class _SweepName(Convertor[str]):
    regex = NAME_PATTERN

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


class _TrialNumber(IntegerConvertor):
    regex = r"[0-9]{1,9}"


class _Action(_SweepName):
    regex = "|".join(ACTIONS)


register_url_convertor("sweep", _SweepName())
register_url_convertor("trial", _TrialNumber())
register_url_convertor("action", _Action())


def json_answer(value: Any, status: int = 200) -> Response:
    """``value`` as JSON, without secrets."""
    return Response(json.dumps(redact_all(value)), status, media_type="application/json")


def refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    """A plain sentence instead of the page."""
    return PlainTextResponse(f"{reason}\n", status, headers)


def make_site(home: Home, hub: Hub, invocation: Invocation, csrf: str, links: Links) -> ASGIApp:
    """The pages of a home. Handlers that read files run in threads; user errors become a sentence."""
    pages_of = _Pages(home, hub, invocation, csrf, links)
    app = Starlette(
        routes=[
            Route("/", pages_of.index),
            Route("/sweeps/{sweep:sweep}", pages_of.sweep),
            Route("/sweeps/{sweep:sweep}/trials/{trial:trial}", pages_of.trial),
            Route("/static/{file}", pages_of.static),
            Route("/api/events", pages_of.index_events),
            Route("/api/sweeps/{sweep:sweep}/events", pages_of.sweep_events),
            Route("/api/sweeps/{sweep:sweep}/trials/{trial:trial}", pages_of.trial_document),
            Route("/api/sweeps/{sweep:sweep}/trials/{trial:trial}/log", pages_of.log),
            Route("/api/sweeps/{sweep:sweep}/{action:action}", pages_of.act, methods=["POST"]),
        ],
        exception_handlers={
            HTTPException: lambda _request, error: refusal(error.status_code, "This page does not exist."),
            ConfigError: pages_of.not_found,
            LedgerError: pages_of.unreadable,
            OSError: pages_of.unreadable,
            Exception: _failed,
        },
    )
    app.router.redirect_slashes = False
    return app


async def _failed(request: Request, error: Exception) -> Response:
    logger.error("the live page failed to respond to %s", request.url.path, exc_info=error)
    return refusal(500, "Internal error; see the output of `tune-cluster ui`.")


class _Pages:
    """Makes the answers."""

    def __init__(self, home: Home, hub: Hub, invocation: Invocation, csrf: str, links: Links) -> None:
        self._home, self._hub, self._csrf, self._links = home, hub, csrf, links
        self._invocation = invocation
        self._actions = Actions(home, invocation)

    def index(self, _request: Request) -> Response:
        """All sweeps."""
        return self._page("index.html.j2", home=str(self._home.path))

    def sweep(self, request: Request) -> Response:
        """One sweep."""
        return self._page("sweep.html.j2", sweep=self._sweep_of(request))

    def trial(self, request: Request) -> Response:
        """One trial."""
        return self._page("trial.html.j2", sweep=self._sweep_of(request), number=request.path_params["trial"])

    def static(self, request: Request) -> Response:
        """A script or the style."""
        found = static(request.path_params["file"])
        if found is None:
            return refusal(404, "This file does not exist.")
        kind, body = found
        return Response(body, headers={"Content-Type": kind})

    def index_events(self, request: Request) -> Response:
        """Changes in the list of all sweeps."""
        return _stream(self._hub.watch(INDEX, lambda: IndexView(self._home)), request)

    def sweep_events(self, request: Request) -> Response:
        """Changes in a sweep."""
        return _stream(self._watch(self._sweep_of(request)), request)

    def trial_document(self, request: Request) -> Response:
        """The data of a trial."""
        path = request.path_params
        return json_answer(trial_document(self._home, path["sweep"], path["trial"], self._invocation))

    def log(self, request: Request) -> Response:
        """The log of a rank, or its new lines."""
        attempt, rank, after = (_number(request, name) for name in ("attempt", "rank", "after"))
        sweep, trial = request.path_params["sweep"], request.path_params["trial"]
        after = -1 if after is None else after
        return json_answer(log_document(self._home, sweep, trial, attempt=attempt, rank=rank or 0, after=after))

    async def act(self, request: Request) -> Response:
        """Carry out an action: ``{"message": SENTENCE}`` or ``{"error": SENTENCE}``."""
        length = request.headers.get("Content-Length")  # its digits are checked by h11
        if length is None:
            return refusal(400, "The request has no valid Content-Length.", {"Connection": "close"})
        if int(length) > MAX_BODY_BYTES:
            return refusal(413, "The request is too large.", {"Connection": "close"})
        path, body = request.path_params, await request.body()
        return await run_in_threadpool(self._act, path["sweep"], path["action"], body)

    def _act(self, sweep: str, action: str, body: bytes) -> Response:
        watch = self._watch(sweep)
        try:
            found = json.loads(body or b"{}")
        except ValueError:
            found = None
        if not isinstance(found, dict):
            return json_answer({"error": "the request is not a JSON object"}, 400)

        def notify(message: str, is_bad: bool) -> None:
            watch.feed.publish({"notice": {"text": message, "is_bad": is_bad, "at_s": time.time()}})
            watch.nudge()

        try:
            message = self._actions.carry_out(sweep, action, found, notify)
        except (ConfigError, LedgerError, OSError) as error:
            return json_answer({"error": first_line(error)}, 409)
        watch.nudge()
        return json_answer({"message": f"{sweep}: {message}"})

    async def not_found(self, request: Request, error: Exception) -> Response:
        """The requested item does not exist."""
        return self._failure(request, 404, error)

    async def unreadable(self, request: Request, error: Exception) -> Response:
        """It cannot be read now."""
        return self._failure(request, 503, error)

    def _failure(self, request: Request, status: int, error: Exception) -> Response:
        if request.scope["path"].startswith("/api/"):
            return json_answer({"error": first_line(error)}, status)
        return self._page("missing.html.j2", status, message=first_line(error))

    def _page(self, template: str, status: int = 200, **values: Any) -> Response:
        html = render(template, csrf=self._csrf, **values)
        return Response(html, status, media_type="text/html")

    def _sweep_of(self, request: Request) -> str:
        """The sweep of the request's path.

        Raises:
            ConfigError: it does not exist.
        """
        sweep: str = request.path_params["sweep"]
        self._home.open(sweep, begun=False).close()
        return sweep

    def _watch(self, sweep: str) -> Watch:
        self._home.open(sweep, begun=False).close()
        return self._hub.watch(sweep, lambda: SweepView(self._home, sweep, self._invocation, self._links))


def _number(request: Request, name: str) -> int | None:
    """A number of the query; None if it is missing or invalid."""
    text = request.query_params.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def _stream(watch: Watch, request: Request) -> Response:
    """Changes as server-sent events, until the client goes away or the server ends."""

    async def events() -> AsyncIterator[str]:
        yield f"retry: {RETRY_MS}\n\n"
        with watch.client() as feed:
            async for patch in feed.changes(request.headers.get("Last-Event-ID", "")):
                if patch is None:
                    yield ": here\n\n"
                else:
                    yield f"id: {patch.version}\nevent: patch\ndata: {patch.body}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Connection": "close"})
