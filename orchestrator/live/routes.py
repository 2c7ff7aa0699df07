"""What is where: pages, their scripts and style, documents, streams of changes, things to be done. Knows no sockets."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from orchestrator.errors import ConfigError
from orchestrator.invocation import Invocation
from orchestrator.live import pages
from orchestrator.live.actions import ACTIONS, Actions
from orchestrator.live.looks import IndexLook, Links, SweepLook
from orchestrator.live.trial_page import log_document, trial_document
from orchestrator.live.watch import Hub, Watch
from orchestrator.sweep.home import NAME_PATTERN, Home
from orchestrator.sweep.ledger import LedgerError
from orchestrator.text import first_line
from trials.secrets import redact_all

logger = logging.getLogger(__name__)

_SWEEP = f"(?P<sweep>{NAME_PATTERN})"
_TRIAL = r"(?P<trial>\d{1,9})"
INDEX = "*"
"""Key of the watch over all sweeps; no sweep can be called so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer."""

    status: int = 200
    kind: str = "application/json"
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Target = Callable[[Mapping[str, str], Mapping[str, str]], "Answer | Watch"]
"""Answers a request from the groups of its path and its query; a watch is streamed."""


def json_answer(value: Any, status: int = 200) -> Answer:
    """``value`` as JSON, without secrets."""
    return Answer(status=status, body=json.dumps(redact_all(value)).encode())


def refusal(status: int, why: str) -> Answer:
    """A plain sentence in the place of what was asked for."""
    return Answer(status=status, kind="text/plain; charset=utf-8", body=f"{why}\n".encode())


class Routes:
    """Finds and makes answers; errors that people can mend become a sentence."""

    def __init__(self, home: Home, hub: Hub, invocation: Invocation, csrf: str, links: Links) -> None:
        self._home, self._hub, self._csrf, self._links = home, hub, csrf, links
        self._invocation = invocation
        self._actions = Actions(home, invocation)
        self._gets: tuple[tuple[re.Pattern[str], Target], ...] = tuple(
            (re.compile(pattern), target)
            for pattern, target in (
                (r"/", self._index),
                (f"/sweeps/{_SWEEP}", self._sweep),
                (f"/sweeps/{_SWEEP}/trials/{_TRIAL}", self._trial),
                (r"/static/(?P<file>[a-z_]+\.(?:css|js))", self._static),
                (r"/api/events", lambda _path, _query: self._watch_all()),
                (f"/api/sweeps/{_SWEEP}/events", lambda path, _query: self._watch(path["sweep"])),
                (f"/api/sweeps/{_SWEEP}/trials/{_TRIAL}", self._trial_document),
                (f"/api/sweeps/{_SWEEP}/trials/{_TRIAL}/log", self._log),
            )
        )
        self._act = re.compile(f"/api/sweeps/{_SWEEP}/(?P<action>{'|'.join(ACTIONS)})")

    def get(self, path: str, query: str) -> Answer | Watch:
        """The answer to a request to see something."""
        for pattern, target in self._gets:
            if (match := pattern.fullmatch(path)) is not None:
                try:
                    return target(match.groupdict(), {key: values[-1] for key, values in parse_qs(query).items()})
                except ConfigError as error:
                    return self._failure(404, error, is_page=not path.startswith("/api/"))
                except (LedgerError, OSError) as error:
                    return self._failure(503, error, is_page=not path.startswith("/api/"))
                except Exception:
                    logger.error("the live page has no answer to %s", path, exc_info=True)
                    return refusal(500, "Something went wrong here; `tune-cluster ui` says what.")
        return refusal(404, "There is no such page.")

    def post(self, path: str, body: bytes) -> Answer:
        """The answer to a request to do something: ``{"said": SENTENCE}`` or ``{"error": SENTENCE}``."""
        match = self._act.fullmatch(path)
        if match is None:
            return refusal(404, "There is nothing to be done here.")
        sweep = match["sweep"]
        try:
            watch, found = self._watch(sweep), json.loads(body or b"{}")
        except ConfigError as error:
            return json_answer({"error": first_line(error)}, 404)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            return json_answer({"error": "the request is no JSON object"}, 400)

        def tell(said: str, is_bad: bool) -> None:
            watch.feed.publish({"notice": {"text": said, "is_bad": is_bad}})
            watch.nudge()

        try:
            said = self._actions.carry_out(sweep, match["action"], found, tell)
        except (ConfigError, LedgerError, OSError) as error:
            return json_answer({"error": first_line(error)}, 409)
        watch.nudge()
        return json_answer({"said": f"{sweep}: {said}"})

    def _failure(self, status: int, error: Exception, *, is_page: bool) -> Answer:
        if not is_page:
            return json_answer({"error": first_line(error)}, status)
        return self._page("missing.html.j2", status, message=first_line(error))

    def _page(self, template: str, status: int = 200, **values: Any) -> Answer:
        html = pages.render(template, csrf=self._csrf, **values)
        return Answer(status=status, kind="text/html; charset=utf-8", body=html.encode())

    def _index(self, _path: Mapping[str, str], _query: Mapping[str, str]) -> Answer:
        return self._page("index.html.j2", home=str(self._home.path))

    def _sweep(self, path: Mapping[str, str], _query: Mapping[str, str]) -> Answer:
        self._home.open(path["sweep"], begun=False).close()
        return self._page("sweep.html.j2", sweep=path["sweep"])

    def _trial(self, path: Mapping[str, str], _query: Mapping[str, str]) -> Answer:
        self._home.open(path["sweep"], begun=False).close()
        return self._page("trial.html.j2", sweep=path["sweep"], number=int(path["trial"]))

    def _static(self, path: Mapping[str, str], _query: Mapping[str, str]) -> Answer:
        found = pages.static(path["file"])
        return refusal(404, "There is no such file.") if found is None else Answer(kind=found.kind, body=found.body)

    def _watch_all(self) -> Watch:
        return self._hub.watch(INDEX, lambda: IndexLook(self._home))

    def _watch(self, sweep: str) -> Watch:
        self._home.open(sweep, begun=False).close()
        return self._hub.watch(sweep, lambda: SweepLook(self._home, sweep, self._invocation, self._links))

    def _trial_document(self, path: Mapping[str, str], _query: Mapping[str, str]) -> Answer:
        return json_answer(trial_document(self._home, path["sweep"], int(path["trial"]), self._invocation))

    def _log(self, path: Mapping[str, str], query: Mapping[str, str]) -> Answer:
        attempt, rank, after = (_number(query, name) for name in ("attempt", "rank", "after"))
        found = log_document(
            self._home,
            path["sweep"],
            int(path["trial"]),
            attempt=attempt,
            rank=rank or 0,
            after=-1 if after is None else after,
        )
        return json_answer(found)


def _number(query: Mapping[str, str], name: str) -> int | None:
    """A number of the query; None where it is missing, or none."""
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None
