"""What is at which address: pages, their scripts and style, documents, streams of changes, actions."""

from __future__ import annotations

import json
import logging
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, get_args

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
from orchestrator.live.feed import Hub, Watch
from orchestrator.live.live_pages import IndexLook, Links, SweepLook, log_document, render, static, trial_document
from orchestrator.process_support import Invocation
from orchestrator.sweep.checkpoint import RETRIABLE
from orchestrator.sweep.events import Action
from orchestrator.sweep.ledger import LedgerError
from orchestrator.sweep.snapshot import NAME_PATTERN, Home
from orchestrator.text import first_line, plain
from orchestrator.units import trial_id
from trials.secrets import redact_all

logger = logging.getLogger(__name__)

INDEX = "*"
"""Key of the watch over all sweeps; no sweep can be called so."""
MAX_BODY_BYTES = 4096
RETRY_MS = 2000
"""Time after which a browser asks again that has lost its stream."""


ACTIONS = (*get_args(Action), "retry", "resume")
"""What may be asked for."""

Tell = Callable[[str, bool], None]
"""Gets a sentence for people, and whether it is bad news."""


class Actions:
    """Carries out what is asked of the sweeps of a home. A controller that has to be started runs in the background,
    as after ``resume --detach``, and outlives this program."""

    def __init__(self, home: Home, invocation: Invocation) -> None:
        self._home = home
        self._invocation = invocation
        self._starting: set[str] = set()
        self._lock = threading.Lock()

    def carry_out(self, sweep: str, action: str, body: Mapping[str, Any], tell: Tell) -> str:
        """Do it; the answer is a sentence. What takes longer goes on, and ``tell`` gets what came of it.

        Raises:
            ConfigError: it cannot be done.
            LedgerError: the sweep cannot be read or written.
        """
        if action in get_args(Action):
            receipt = steering.ask(sweep, self._home, action)  # type: ignore[arg-type]  # one of its names
            return f"asked to {action}" if receipt.is_controlled else f"now {receipt.state}"
        if action == "retry":
            receipt = steering.retry(sweep, self._home, _kinds(body))
            numbers = ", ".join(trial_id(number) for number in receipt.trials)
            if receipt.is_controlled:
                return f"to be launched again: {numbers}"
            return f"to be launched again: {numbers}; {self._resume(sweep, tell)}"
        return self._resume(sweep, tell)

    def _resume(self, sweep: str, tell: Tell) -> str:
        """Start a controller, and wait for it in a thread: a cluster may take minutes to answer."""
        submission = submission_of_sweep(sweep, self._home, address=None, mode=None)
        if submission.is_over:
            raise ConfigError(f"the sweep {sweep!r} is over", remedy="Retry its failed trials, or confirm another one.")
        with self._lock:
            if sweep in self._starting:
                return "its controller is being started already"
            self._starting.add(sweep)
        detach = [] if submission.address else ["--detach"]
        argv = python_module("orchestrator", "resume", sweep, "--home", str(self._home.path.absolute()), *detach)
        threading.Thread(target=self._start, args=(sweep, argv, tell), name="live-start", daemon=True).start()
        return "its controller is being started"

    def _start(self, sweep: str, argv: list[str], tell: Tell) -> None:
        """The command for it, in a process of its own, which leaves no child to this one."""
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            said = [line for line in done.stderr.splitlines() if line.strip()]
            if done.returncode == 0:
                tell("its controller is at work", False)
            else:
                command = self._invocation.command("logs", sweep)
                tell(f"{plain(said[-1]) if said else 'its controller ended at once'}; `{command}` says more", True)
        except OSError as error:
            tell(f"its controller could not be started: {first_line(error)}", True)
        finally:
            with self._lock:
                self._starting.discard(sweep)


def _kinds(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Kinds of outcomes as a page sent them.

    Raises:
        ConfigError: there are none, or others than trials end in.
    """
    kinds = body.get("kinds")
    if not isinstance(kinds, list) or not kinds or not all(kind in RETRIABLE for kind in kinds):
        raise ConfigError("no kind of outcome was chosen", remedy=f"One or more of {', '.join(RETRIABLE)}.")
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


def refusal(status: int, why: str, headers: Mapping[str, str] | None = None) -> Response:
    """A plain sentence in the place of the page."""
    return PlainTextResponse(f"{why}\n", status, headers)


def make_site(home: Home, hub: Hub, invocation: Invocation, csrf: str, links: Links) -> ASGIApp:
    """The pages of a home. What reads files runs in threads; errors that people can fix become a sentence."""
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
            HTTPException: lambda _request, error: refusal(error.status_code, "There is no such page."),
            ConfigError: pages_of.not_found,
            LedgerError: pages_of.unreadable,
            OSError: pages_of.unreadable,
            Exception: _failed,
        },
    )
    app.router.redirect_slashes = False
    return app


async def _failed(request: Request, error: Exception) -> Response:
    logger.error("the live page has no answer to %s", request.url.path, exc_info=error)
    return refusal(500, "Something went wrong here; `tune-cluster ui` says what.")


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
            return refusal(404, "There is no such file.")
        kind, body = found
        return Response(body, headers={"Content-Type": kind})

    def index_events(self, request: Request) -> Response:
        """What changes in the list of all sweeps."""
        return _stream(self._hub.watch(INDEX, lambda: IndexLook(self._home)), request)

    def sweep_events(self, request: Request) -> Response:
        """What changes in a sweep."""
        return _stream(self._watch(self._sweep_of(request)), request)

    def trial_document(self, request: Request) -> Response:
        """All that is known of a trial."""
        path = request.path_params
        return json_answer(trial_document(self._home, path["sweep"], path["trial"], self._invocation))

    def log(self, request: Request) -> Response:
        """The log of a rank, or what is new in it."""
        attempt, rank, after = (_number(request, name) for name in ("attempt", "rank", "after"))
        sweep, trial = request.path_params["sweep"], request.path_params["trial"]
        after = -1 if after is None else after
        return json_answer(log_document(self._home, sweep, trial, attempt=attempt, rank=rank or 0, after=after))

    async def act(self, request: Request) -> Response:
        """Do something: ``{"said": SENTENCE}`` or ``{"error": SENTENCE}``."""
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
            return json_answer({"error": "the request is no JSON object"}, 400)

        def tell(said: str, is_bad: bool) -> None:
            watch.feed.publish({"notice": {"text": said, "is_bad": is_bad}})
            watch.nudge()

        try:
            said = self._actions.carry_out(sweep, action, found, tell)
        except (ConfigError, LedgerError, OSError) as error:
            return json_answer({"error": first_line(error)}, 409)
        watch.nudge()
        return json_answer({"said": f"{sweep}: {said}"})

    async def not_found(self, request: Request, error: Exception) -> Response:
        """What is asked for does not exist."""
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
            ConfigError: there is none of this name.
        """
        sweep: str = request.path_params["sweep"]
        self._home.open(sweep, begun=False).close()
        return sweep

    def _watch(self, sweep: str) -> Watch:
        self._home.open(sweep, begun=False).close()
        return self._hub.watch(sweep, lambda: SweepLook(self._home, sweep, self._invocation, self._links))


def _number(request: Request, name: str) -> int | None:
    """A number of the query; None where it is missing, or none."""
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
