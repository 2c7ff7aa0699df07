"""What the measurements depend on besides the candidate: software versions, hardware, driver."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

from cluster.hardware.topology import Topology

_PACKAGES = ("torch", "ray", "optuna", "mlflow", "tune-cluster")


def fingerprint(topology: Topology, virtual: str = "") -> dict[str, str]:
    """Names and versions, flat. Two measurements compare only where these are equal.

    ``virtual`` tells clusters that do not exist apart; empty for one that does.
    """
    first = topology.nodes[0]
    versions = {package: metadata.version(package) for package in _PACKAGES}
    return {
        **versions,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "driver": _driver_version(),
        "hardware": topology.label,
        "device_memory_bytes": str(first.device_memory_bytes),
        "threads_per_device": str(first.threads_per_device),
        **({"virtual": virtual} if virtual else {}),
    }


def _driver_version() -> str:
    path = Path("/sys/module/nvidia/version")
    return path.read_text(encoding="ascii").strip() if path.exists() else "none"
