"""Runs the MLflow server as a child process until interrupted, to look at sweeps in the browser."""

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

from cluster.processes import python_module
from orchestrator.errors import ConfigError
from orchestrator.mlflow_urls import artifact_folder
from orchestrator.processes import interruptible
from orchestrator.tracking.server import plugin
from trials.secrets import is_secret_name

logger = logging.getLogger(__name__)

DEFAULT_PORT = 5000
APP = "tune-cluster"
"""Name under which :mod:`orchestrator.tracking.server` is offered to MLflow."""
_STARTUP_S = 120.0
_SOURCES = Path(__file__).parents[2]
"""Folder that this package is imported from, wherever that is."""


def serve(
    uri: str,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Run ``mlflow server`` on the store at ``uri`` until Ctrl-C or SIGTERM; return its exit status, 0 when asked.

    ``on_ready`` is called with the server's address once it answers.

    Raises:
        ConfigError: ``uri`` is a server already, the port is taken, or the server does not come up.
    """
    if uri.startswith(("http://", "https://")):
        raise ConfigError("the tracking URI names a running server", key="tracking.uri", remedy="Open it in a browser.")
    base = f"http://{host}:{port}"
    check_port(host, port)
    if not _is_loopback(host):
        logger.warning("the MLflow server at %s asks for no password: who reaches it reads and changes results", base)
    with _server(_command(uri, host, port)) as server, interruptible():
        try:
            _wait_until_up(server, base)
            if on_ready:
                on_ready(base)
            return server.wait()
        except KeyboardInterrupt:
            return 0


def check_port(host: str, port: int) -> None:
    """Refuse a taken port: another server would answer there in the place of ours.

    Raises:
        ConfigError: it is taken, or not this host's.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}", remedy="Choose another with --mlflow-port."
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
    """The server in a session of its own, so that all its processes can be ended together.

    Its database and artifacts are local files: it gets no secret of ours.
    """
    env = {name: value for name, value in os.environ.items() if not is_secret_name(name)}
    env |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    env["PYTHONWARNINGS"] = "ignore"  # of MLflow's own libraries, nothing that its user could mend
    env["PYTHONSAFEPATH"] = "1"  # of what it starts in turn; that looks for modules in its folder besides
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
                f"mlflow server ended with status {server.returncode} before answering at {base}",
                remedy="Its own message stands above.",
            )
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=2.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise ConfigError(f"mlflow server did not answer at {base} within {_STARTUP_S:g} s")
