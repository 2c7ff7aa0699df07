"""Real MLflow stores for tests: one migrated SQLite database per test run, copied for each test."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

from orchestrator.tracking import Tracker


@cache
def _template() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="mlflow-template-"))
    path = folder / "mlflow.db"
    Tracker(f"sqlite:///{path}").prepare()
    return path


def new_store(folder: Path) -> str:
    """The tracking URI of a fresh store in ``folder``."""
    path = folder / "mlflow.db"
    shutil.copyfile(_template(), path)
    return f"sqlite:///{path}"
