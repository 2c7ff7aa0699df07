"""Addresses in MLflow: tracking URIs, artifact locations, deep links into the pages of its server."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlencode, urlsplit, urlunsplit

from orchestrator.errors import ConfigError
from trials.secrets import redact

URI_PATTERN = r"^(https?://\S+|sqlite:////.*\S)$"
"""Accepted tracking URIs: a server, or an SQLite file by its absolute path."""
SUPPORTED_URIS = "Use http(s)://host:port or sqlite:////absolute/path.db."
PAGE = "report.html"
"""Artifact of a sweep's run that MLflow's pages render: the report, verdict first."""
_SQLITE = "sqlite:///"
_VIEW = {"workflowType": "machine_learning"}
"""Query of every link: without it MLflow opens its GenAI pages, where runs are hard to find."""


def check_tracking_uri(uri: str) -> str:
    """Return ``uri`` if it is a supported store without credentials, which come from the environment.

    Raises:
        ConfigError: it is not supported, or contains credentials.
    """
    if re.match(URI_PATTERN, uri) is None:
        raise ConfigError(f"{public_uri(uri)!r} is not a supported tracking URI", remedy=SUPPORTED_URIS)
    if public_uri(uri) != uri:
        raise ConfigError(
            f"the tracking URI {public_uri(uri)} contains credentials",
            remedy="Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, instead.",
        )
    return uri


def public_uri(uri: str) -> str:
    """The URI without user name and password, and without secrets in its query."""
    parts = urlsplit(uri)
    if "@" in parts.netloc:
        uri = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return redact(uri)


def sqlite_path(uri: str) -> Path | None:
    """The file of an SQLite store; None for any other store."""
    return Path(uri.removeprefix(_SQLITE)).absolute() if uri.startswith(_SQLITE) else None


def artifact_folder(uri: str) -> Path | None:
    """Artifact folder of a store without a server, next to its database; None if a server decides."""
    path = sqlite_path(uri)
    return path.parent / "mlartifacts" if path else None


def run_url(base: str, experiment_id: str, run_id: str, tab: str = "") -> str:
    """The page of one run; ``tab`` may name an artifact, as in ``artifacts/report.html``."""
    path = "/".join(part for part in (run_id, tab) if part)
    return f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs/{path}?{urlencode(_VIEW)}"


def artifact_path(run_id: str, artifact: str) -> str:
    """Relative address of an artifact's content on a server's pages."""
    return f"get-artifact?{urlencode({'path': artifact, 'run_uuid': run_id})}"


def run_path(experiment_id: str, run_id: str, tab: str = "") -> str:
    """:func:`run_url` from the address of another page of the server."""
    return run_url("", experiment_id, run_id, tab).lstrip("/")


def table_view(sweep: str, run_id: str) -> str:
    """Name of the saved view with the sweep's trials as a table."""
    return f"{sweep}-{run_id[:8]}"


def charts_view(sweep: str, run_id: str) -> str:
    """Name of the saved view with the sweep's trials as charts."""
    return f"{table_view(sweep, run_id)}-charts"


def view_url(base: str, experiment_id: str, view: str, *, as_charts: bool = False) -> str:
    """The runs of the experiment in the saved view."""
    query = {"viewStateShareKey": view, **({"compareRunsMode": "CHART"} if as_charts else {}), **_VIEW}
    return f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs?{urlencode(query)}"


def experiments_url(base: str) -> str:
    """The list of all experiments."""
    return f"{base.rstrip('/')}/#/experiments?{urlencode(_VIEW)}"


def sweep_links(base: str, experiment_id: str, run_id: str, sweep: str) -> dict[str, str]:
    """Pages to open: the report, the trials as a table and as charts, the sweep's run.

    Empty if the store at ``base`` is a file.
    """
    if not base.startswith("http"):
        return {}
    return {
        "report": run_url(base, experiment_id, run_id, f"artifacts/{PAGE}"),
        "trials": view_url(base, experiment_id, table_view(sweep, run_id)),
        "charts": view_url(base, experiment_id, charts_view(sweep, run_id), as_charts=True),
        "run": run_url(base, experiment_id, run_id),
    }
