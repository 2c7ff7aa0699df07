"""A real MLflow server on the controller's host, to be taken away and brought back."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.faults.namespaces import descendants, send, wait_until
from benchmarks.faults.ray_nodes import RayNodes

PORT = 5000
URI = f"http://127.0.0.1:{PORT}"
ENV = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


class MlflowServer:
    """Serves the store in ``home``."""

    def __init__(self, cluster: RayNodes, home: Path) -> None:
        self._cluster = cluster
        self._home = home
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it listens."""
        command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={PORT}", "--workers=1"]
        command += [f"--backend-store-uri=sqlite:///{self._home}/mlflow.db"]
        command += [f"--artifacts-destination={self._home}/mlartifacts"]
        host = self._cluster.controller
        with (self._home / "server.log").open("ab") as log:
            self._process = self._cluster.popen(host, *command, env=ENV, stdout=log, stderr=log)
        wait_until(lambda: host.listens(PORT), "the MLflow server")

    def kill(self) -> None:
        """End it at once, whatever it is doing."""
        assert self._process is not None
        for pid in list(descendants(self._process.pid)):
            send(pid, signal.SIGKILL)
        self._process.wait()
