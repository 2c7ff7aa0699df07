"""Real MLflow stores for tests: one migrated SQLite database per test run, copied for each test."""

from __future__ import annotations

import atexit
import shutil
import sqlite3
import tempfile
from contextlib import closing
from functools import cache
from pathlib import Path

from orchestrator.tracking.mlflow_tracker import Tracker


@cache
def _template():
    folder = Path(tempfile.mkdtemp(prefix="mlflow-template-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "mlflow.db"
    Tracker(f"sqlite:///{path}").prepare()
    return path


def new_store(folder):
    """The tracking URI of a fresh store in ``folder``."""
    path = folder / "mlflow.db"
    copy_store(_template(), path)
    return f"sqlite:///{path}"


def copy_store(source, target):
    with closing(sqlite3.connect(source)) as template, closing(sqlite3.connect(target)) as copy:
        template.backup(copy)
