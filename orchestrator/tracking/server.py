"""MLflow's server as ``tune-cluster ui`` runs it: with the panel of MLflow's assistant closed.

MLflow 3.17 opens that panel over a quarter of every page for whoever comes to a local server for the first time, and
notes in the browser's storage that it has. Neither a setting of the server nor an address prevents it. So its first
page gets a line that writes this note beforehand; the button that opens the panel stays. MLflow takes servers other
than its own as plug-ins (``mlflow.app``, see :func:`plugin`), and asks for this module by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trials.files import write_atomically

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OPENED = "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1"
"""Entry of the browser's storage that says that the panel was opened once."""
_SCRIPT = f"<script>localStorage.setItem({_OPENED!r}, 'true')</script>".encode()
_HEAD = b"<head>"
_CACHING = (b"if-none-match", b"if-modified-since")


class ClosedAssistant:
    """The ASGI application ``app`` with the line in its first page; every other answer is passed on as it is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, see the ASGI specification."""
        if scope["type"] != "http" or scope["path"] != "/" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        asked = [(name, value) for name, value in scope["headers"] if name not in _CACHING]
        await self._app({**scope, "headers": asked}, receive, _Page(send).pass_on)


class _Page:
    """One answer, held back until it is whole."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message = {}
        self._body = b""

    async def pass_on(self, message: Message) -> None:
        """Take one message of the answer; the last one lets all go."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        body = self._body.replace(_HEAD, _HEAD + _SCRIPT, 1)
        kept = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
        await self._send({**self._start, "headers": [*kept, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})


def create_app() -> ASGIApp:
    """MLflow's own application, wrapped."""
    from mlflow.server.fastapi_app import app

    return ClosedAssistant(app)


def plugin(folder: Path, name: str) -> None:
    """Write into ``folder`` what offers this module to MLflow as ``name``, where the folder is on Python's path."""
    info = folder / "tune_cluster_server-1.dist-info"
    info.mkdir()
    write_atomically(info / "METADATA", [b"Metadata-Version: 2.1\nName: tune-cluster-server\nVersion: 1\n"])
    entry = f"[mlflow.app]\n{name} = {__name__}:create_app\n"
    write_atomically(info / "entry_points.txt", [entry.encode("ascii")])
