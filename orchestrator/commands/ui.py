"""What ``tune-cluster ui`` does: serve the MLflow UI on the store of a sweep, or of the home."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.errors import ConfigError
from orchestrator.mlflow_urls import experiments_url, sweep_links
from orchestrator.sweep.documents import Recorded, tracking_uri
from orchestrator.sweep.home import Home
from orchestrator.tracking import ui


def serve_ui(home: Home, sweep: str | None, *, host: str, port: int, announce: Callable[[dict[str, str]], None]) -> int:
    """Serve the MLflow UI until interrupted; return the server's exit status, 0 when it was asked to end.

    Args:
        sweep: whose store to show, with links to its trials; None: the home's own store.
        announce: gets the links once the server answers.

    Raises:
        ConfigError: there is no such sweep, or nothing was ever recorded.
    """
    recorded = None
    if sweep is None:
        uri = _store(home)
    else:
        with home.open(sweep) as ledger:
            uri, recorded = tracking_uri(ledger, home), Recorded.read(ledger)

    def ready(base: str) -> None:
        if sweep is None or recorded is None:
            announce({"experiments": experiments_url(base)})
        else:
            announce(sweep_links(base, recorded.experiment_id, recorded.run_id, sweep))

    return ui.serve(uri, host, port, on_ready=ready)


def _store(home: Home) -> str:
    """The home's own MLflow store.

    Raises:
        ConfigError: nothing was ever recorded there.
    """
    if not home.has_store:
        raise ConfigError(
            f"there is no MLflow store in {home.path}", remedy="Submit a sweep first, or use --home for another folder."
        )
    return home.default_tracking_uri
