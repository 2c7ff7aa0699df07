"""Addresses in MLflow: tracking URIs, where artifacts go, deep links into the pages of its server."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlencode, urlsplit, urlunsplit

from orchestrator.errors import ConfigError
from trials.secrets import redact

URI_PATTERN = r"^(https?://\S+|sqlite:////.*\S)$"
"""Tracking URIs that are accepted: a server, or an SQLite file by its absolute path."""
PAGE = "report.html"
"""Artifact of a sweep's run that its pages show as it is: the verdict first, then what it rests on."""
_SQLITE = "sqlite:///"
_VIEW = {"workflowType": "machine_learning"}
"""Query of every link: without it MLflow opens on its GenAI pages, where runs are hard to find."""


def check_tracking_uri(uri: str) -> str:
    """Return ``uri`` if it names a store that can be used, and holds no credentials: they come from the environment.

    Raises:
        ConfigError: it does not, or it does.
    """
    if re.match(URI_PATTERN, uri) is None:
        raise ConfigError(
            f"{public_uri(uri)!r} is no tracking URI", remedy="Use http(s)://host:port or sqlite:////absolute/path.db."
        )
    if public_uri(uri) != uri:
        raise ConfigError(
            f"the tracking URI {public_uri(uri)} came with credentials",
            remedy="Put them into MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN.",
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
    """Where a store without a server keeps artifacts, beside its database; None where a server decides."""
    path = sqlite_path(uri)
    return path.parent / "mlartifacts" if path else None


def run_url(base: str, experiment_id: str, run_id: str, tab: str = "") -> str:
    """The page of one run; ``tab`` may name an artifact, as in ``artifacts/report.html``."""
    path = "/".join(part for part in (run_id, tab) if part)
    return f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs/{path}?{urlencode(_VIEW)}"


def artifact_path(run_id: str, artifact: str) -> str:
    """Where the pages of a server find the content of an artifact, from their own address."""
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
    """The runs of the experiment as the saved view shows them."""
    query = {"viewStateShareKey": view, **({"compareRunsMode": "CHART"} if as_charts else {}), **_VIEW}
    return f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs?{urlencode(query)}"


def experiments_url(base: str) -> str:
    """The list of all experiments."""
    return f"{base.rstrip('/')}/#/experiments?{urlencode(_VIEW)}"


def sweep_links(base: str, experiment_id: str, run_id: str, sweep: str) -> dict[str, str]:
    """What to open, the verdict first: the report, the trials as a table and as charts, the sweep's own run.

    Empty where the store at ``base`` is a file.
    """
    if not base.startswith("http"):
        return {}
    return {
        "report": run_url(base, experiment_id, run_id, f"artifacts/{PAGE}"),
        "trials": view_url(base, experiment_id, table_view(sweep, run_id)),
        "charts": view_url(base, experiment_id, charts_view(sweep, run_id), as_charts=True),
        "run": run_url(base, experiment_id, run_id),
    }
