"""Checks of what else a sweep talks to: Ray and the MLflow store."""

from __future__ import annotations

import contextlib
import email.utils
import importlib.util
import re
import sqlite3
import time
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path

from orchestrator.doctor.check import TroubleError
from orchestrator.mlflow_urls import sqlite_path

RAY_S = 75.0
"""How long a Ray cluster may take to tell its nodes."""
STORE_S = 20.0
MAX_SKEW_S = 5.0
_REVISION = re.compile(r"^(down_)?revision\b[^=]*=\s*[\"']([0-9a-f]+)[\"']", re.MULTILINE)


def ray_package(needed: bool) -> str:
    """Which Ray is installed; sweeps of kind local, simulated and replay need none."""
    try:
        return f"Ray {metadata.version('ray')}"
    except metadata.PackageNotFoundError:
        remedy = "pip install 'ray[default]', or use cluster: {kind: local}."
        raise TroubleError("Ray is not installed", remedy, "fail" if needed else "warn") from None


def ray_cluster(address: str | None) -> str:
    """Whether the Ray cluster answers, and what it has."""
    if address is None:
        return "none asked for: a sweep starts a Ray of its own on this host; --address looks at one that runs"
    from cluster.base import ClusterError
    from cluster.ray.survey import survey

    try:
        hosts = survey(address, timeout_s=RAY_S - 10)
    except ClusterError as error:
        raise TroubleError(str(error), "docs/service.md tells how to start one.", "fail") from None
    gpus, cpus = sum(host.num_gpus for host in hosts), sum(host.num_cpus for host in hosts)
    kinds = ", ".join(sorted({host.accelerator for host in hosts if host.accelerator}))
    return f"{address}: {len(hosts)} nodes, {gpus} GPUs{f' ({kinds})' if kinds else ''}, {cpus} CPUs"


def ray_jobs(address: str | None) -> str:
    """Whether the cluster takes Ray Jobs, in which controllers run, and how its head's clock stands to this one's."""
    if address is None:
        return "not needed on this host"
    from cluster.base import ClusterError
    from cluster.ray.head import dashboard_url

    try:
        url = dashboard_url(address)
        with urllib.request.urlopen(f"{url}/api/version", timeout=10) as answer:
            told = answer.headers.get("Date")
    except ClusterError as error:
        raise TroubleError(str(error), "Or submit with --foreground, which needs no dashboard.") from None
    except urllib.error.HTTPError as error:
        told = error.headers.get("Date")
    except OSError as error:
        raise TroubleError(f"the dashboard does not answer: {error}", "Or submit with --foreground.") from None
    words = f"dashboard at {url}"
    if not told:
        return words
    skew_s = email.utils.parsedate_to_datetime(told).timestamp() - time.time()
    if abs(skew_s) > MAX_SKEW_S:
        raise TroubleError(f"{words}; its clock is {skew_s:+.0f} s off this one's", "Run chrony or ntpd on all hosts.")
    return f"{words}; its clock agrees with this one's"


def store(uri: str) -> str:
    """Whether the MLflow store can be opened, and is of the version that is installed."""
    try:
        version = metadata.version("mlflow")
    except metadata.PackageNotFoundError:
        raise TroubleError("MLflow is not installed", "pip install mlflow", "fail") from None
    if (path := sqlite_path(uri)) is not None:
        return f"MLflow {version}, {_sqlite_store(path, uri)}"
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/version", timeout=10) as answer:
            theirs = answer.read(100).decode(errors="replace").strip()
    except (OSError, ValueError) as error:
        remedy = "Start the server, or correct tracking.uri; a sweep runs meanwhile, and is recorded when it is back."
        raise TroubleError(f"the MLflow server {uri} does not answer: {error}", remedy) from None
    if theirs.split(".")[0] != version.split(".")[0]:
        raise TroubleError(
            f"the server is MLflow {theirs}, this client {version}", "Install the same major version on both."
        )
    return f"MLflow {version}, server {theirs} at {uri}"


def _sqlite_store(path: Path, uri: str) -> str:
    """What there is to say of a store in a file. It is only read."""
    if not path.exists():
        return f"a new store will be made at {path}"
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=5)) as db:
            row = db.execute("SELECT version_num FROM alembic_version").fetchone()
            (num_runs,) = db.execute("SELECT count(*) FROM runs").fetchone()
    except sqlite3.Error as error:
        remedy = "Move the file away; `tune-cluster resume` and `retry` write what is missing into a new one."
        raise TroubleError(f"the store {path} cannot be read: {error}", remedy, "fail") from None
    newest, known = _revisions()
    if row and newest and row[0] not in known:
        remedy = "Install that version of MLflow, or name another store with tracking.uri."
        raise TroubleError(f"the store {path} was written by a newer MLflow than is installed", remedy, "fail")
    if row and newest and row[0] != newest:
        remedy = f"Back it up, then: mlflow db upgrade {uri}"
        raise TroubleError(f"the store {path} was written by an older MLflow than is installed", remedy, "fail")
    return f"store {path} with {num_runs:,} runs"


def _revisions() -> tuple[str | None, frozenset[str]]:
    """The newest revision of a store's tables that the installed MLflow knows, and all of them; read from its files,
    for importing it takes seconds."""
    found = importlib.util.find_spec("mlflow")
    folder = Path(found.origin).parent / "store/db_migrations/versions" if found and found.origin else None
    if folder is None or not folder.is_dir():
        return None, frozenset()
    own: set[str] = set()
    before: set[str] = set()
    for file in folder.glob("*.py"):
        for is_before, name in _REVISION.findall(file.read_text(encoding="utf-8")):
            (before if is_before else own).add(name)
    heads = own - before
    return (heads.pop() if len(heads) == 1 else None), frozenset(own)
