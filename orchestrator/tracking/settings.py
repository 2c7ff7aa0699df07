"""How MLflow's client is set up: through the environment, before it is imported."""

from __future__ import annotations

import os

_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # The outbox repeats what failed; the client's own minutes of retries would hold up the sweep.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}


def apply_settings() -> None:
    """Before the first import of mlflow, which reads some of them then; the user's own settings stand."""
    for variable, value in _SETTINGS.items():
        os.environ.setdefault(variable, value)
