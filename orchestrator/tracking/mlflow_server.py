"""MLflow's server for ``tune-cluster ui``, with the panel of MLflow's assistant closed.

On the first visit to a local server, MLflow 3.17 opens that panel over a quarter of every page, and notes this in the
browser's storage. No setting or address prevents it. So the first page gets a line that writes this note beforehand;
the button that opens the panel remains. MLflow loads other servers as plug-ins (``mlflow.app``, see :func:`plugin`),
and refers to this module by name.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.processes import python_module
from orchestrator.errors import ConfigError, reason_of
from orchestrator.mlflow_urls import artifact_folder
from orchestrator.process_support import interruptible
from trials.files import write_atomically
from trials.secrets import is_secret_name

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


_OPENED = "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1"
"""Entry of the browser's storage that records that the panel was opened once."""
_SCRIPT = f"<script>localStorage.setItem({_OPENED!r}, 'true')</script>".encode()
_HEAD = b"<head>"
_CACHING = (b"if-none-match", b"if-modified-since")


class ClosedAssistant:
    """The ASGI application ``app`` with the line in its first page; other responses are unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, see the ASGI specification."""
        if scope["type"] != "http" or scope["path"] != "/" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name not in _CACHING]
        await self._app({**scope, "headers": headers}, receive, _Page(send).pass_on)


class _Page:
    """One response, buffered until it is complete."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message = {}
        self._body = b""

    async def pass_on(self, message: Message) -> None:
        """Buffer one message of the response; the last one sends all."""
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
    """Write into ``folder``, which must be on Python's path, the entry point of this module for MLflow as ``name``."""
    info = folder / "tune_cluster_server-1.dist-info"
    info.mkdir()
    write_atomically(info / "METADATA", [b"Metadata-Version: 2.1\nName: tune-cluster-server\nVersion: 1\n"])
    entry = f"[mlflow.app]\n{name} = {__name__}:create_app\n"
    write_atomically(info / "entry_points.txt", [entry.encode("ascii")])


# Runs the MLflow server as a child process until interrupted.


logger = logging.getLogger(__name__)

DEFAULT_PORT = 5000
APP = "tune-cluster"
"""Name of :mod:`orchestrator.tracking.mlflow_server` as a plug-in of MLflow."""
_STARTUP_S = 120.0
_SOURCES = Path(__file__).parents[2]
"""Folder that this package is imported from."""


def serve(
    uri: str,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Run ``mlflow server`` on the store at ``uri`` until Ctrl-C or SIGTERM; return its exit status, 0 if interrupted.

    ``on_ready`` is called with the server's address once it is up.

    Raises:
        ConfigError: ``uri`` is already a server, the port is taken, or the server does not start.
    """
    if uri.startswith(("http://", "https://")):
        raise ConfigError(
            "the tracking URI points to a running server", key="tracking.uri", remedy="Open it in a browser."
        )
    base = f"http://{host}:{port}"
    check_port(host, port)
    if not _is_loopback(host):
        logger.warning(
            "the MLflow server at %s has no password: anyone who can reach it can read and change results", base
        )
    with _server(_command(uri, host, port)) as server, interruptible():
        try:
            _wait_until_up(server, base)
            if on_ready:
                on_ready(base)
            return server.wait()
        except KeyboardInterrupt:
            return 0


def check_port(host: str, port: int) -> None:
    """Refuse a taken port: another server would respond there instead of ours.

    Raises:
        ConfigError: it is taken, or not this host's.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {reason_of(error)}", remedy="Choose another port with --mlflow-port."
            ) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _command(uri: str, host: str, port: int) -> list[str]:
    command = python_module("mlflow", "server", "--backend-store-uri", uri, "--host", host)
    command += ["--port", str(port), "--workers", "1", "--app-name", APP]
    command += ["--uvicorn-opts", "--log-level warning"]  # a line per request would scroll the addresses away
    artifacts = artifact_folder(uri)
    return [*command, "--artifacts-destination", str(artifacts)] if artifacts else command


@contextmanager
def _server(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the server in its own session, so that all its processes can be ended together.

    Its database and artifacts are local files: it gets no secrets.
    """
    env = {name: value for name, value in os.environ.items() if not is_secret_name(name)}
    env |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    env.setdefault("MLFLOW_LOGGING_LEVEL", "CRITICAL")  # a failing page shows its error; the traceback is MLflow's own
    env["PYTHONWARNINGS"] = "ignore"  # from MLflow's own libraries, nothing its user could fix
    env["PYTHONSAFEPATH"] = "1"  # for its own child processes, which also import from their folder
    with tempfile.TemporaryDirectory(prefix="tc-mlflow-") as folder:
        plugin(Path(folder), APP)
        own = [str(Path(entry).absolute()) for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
        env["PYTHONPATH"] = os.pathsep.join([folder, str(_SOURCES), *own])
        server = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True, cwd="/"
        )
        try:
            yield server
        finally:
            _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    for sign, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(server.pid, sign)
            server.wait(patience_s)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    server.wait()


def _wait_until_up(server: subprocess.Popen[bytes], base: str) -> None:
    deadline = time.monotonic() + _STARTUP_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ConfigError(
                f"mlflow server exited with status {server.returncode} before it listened at {base}",
                remedy="See the server's output above.",
            )
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=2.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise ConfigError(f"mlflow server did not respond at {base} within {_STARTUP_S:g} s")
