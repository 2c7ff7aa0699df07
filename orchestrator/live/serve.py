"""What ``tune-cluster ui`` does: serve the live page, and beside it the MLflow UI, until interrupted."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestrator.commands.inspection import serve_ui
from orchestrator.errors import ConfigError
from orchestrator.live.page_server import PageServer
from orchestrator.mlflow_urls import public_uri, sqlite_path, sweep_links
from orchestrator.process_support import Invocation, interruptible
from orchestrator.sweep.snapshot import Home, Snapshot
from orchestrator.text import first_line
from orchestrator.tracking import mlflow_server

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


def serve(home: Home, what: Served, *, invocation: Invocation, announce: Announce, tell: Callable[[str], None]) -> None:
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
            if what.with_mlflow and _serve_mlflow(home, what, archive, store, announce, tell):
                return
            while True:
                signal.pause()
        except KeyboardInterrupt:
            return


def _serve_mlflow(
    home: Home, what: Served, archive: Archive, store: str, announce: Announce, tell: Callable[[str], None]
) -> bool:
    """Serve the MLflow UI until interrupted; whether that was so. Where there is nothing to serve, or it ends by
    itself, the live page goes on without it.

    Raises:
        ConfigError: the port that was asked for is taken.
    """
    path = sqlite_path(store)
    if path is None:
        announce(archive.links(home.read(what.sweep)) if what.sweep else {}, True)
        tell(f"MLflow: {public_uri(store)}")
        return False
    if not path.exists():
        announce({}, True)
        tell("MLflow has nothing to show yet; start this again when the first trial has ended")
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
        tell(f"the page goes on without MLflow: {first_line(error)}")
        return False
    archive.base = ""
    if status:
        tell("the page goes on without MLflow, whose server ended by itself; its own message stands above")
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
