"""Addresses in MLflow: tracking URIs, where artifacts go, deep links into the pages of its server."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from orchestrator.errors import ConfigError
from trials.secrets import redact

URI_PATTERN = r"^(https?://|sqlite:////)\S+$"
"""Tracking URIs taken: a server, or an SQLite file by its absolute path."""
_SQLITE = "sqlite:///"
_VIEW = {"workflowType": "machine_learning"}
"""Without it MLflow opens on its GenAI pages, where runs are hard to find."""


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


def trials_url(base: str, experiment_id: str, sweep: str) -> str:
    """The trials of a sweep as a flat list, fastest first."""
    query = {
        "searchFilter": f"tags.`tc.sweep` = '{sweep}' AND tags.`tc.kind` = 'trial'",
        "orderByKey": "metrics.`tokens_per_s_per_device`",
        "orderByAsc": "false",
        **_VIEW,
    }
    return f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs?{urlencode(query, quote_via=quote)}"


def experiments_url(base: str) -> str:
    """The list of all experiments."""
    return f"{base.rstrip('/')}/#/experiments?{urlencode(_VIEW)}"


def sweep_links(base: str, experiment_id: str, run_id: str, sweep: str) -> dict[str, str]:
    """What to open first: the sweep's own page, its report, its trials."""
    return {
        "sweep": run_url(base, experiment_id, run_id),
        "report": run_url(base, experiment_id, run_id, "artifacts/report.html"),
        "trials": trials_url(base, experiment_id, sweep),
    }
