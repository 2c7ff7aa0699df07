"""Which nodes a running Ray cluster has, asked without leasing any.

A process of its own asks, ``python -m cluster.ray.survey HOST:PORT``: a head that is away, of another version or behind
another token makes Ray wait for minutes, or ends the process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.base import ClusterError
from cluster.processes import python_module
from cluster.ray.connection import require_listener
from cluster.ray.head import TOKEN_REMEDY
from cluster.ray.leases import RESOURCES
from trials.accelerator.kinds import DeviceKind

TIMEOUT_S = 60.0
_ACCELERATOR = "accelerator_type:"
"""Begins the names of the resources by which Ray tells what a node's devices are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHost:
    """One node of a Ray cluster that is alive."""

    name: str
    num_cpus: int
    num_gpus: int
    """Its accelerators: GPUs of any make, or NPUs."""
    accelerator: str | None
    """What Ray calls them, like ``H100``; None where it does not know."""
    device: DeviceKind = "cpu"
    """Their kind, as far as Ray's name for them tells; GPUs without one count as NVIDIA's."""


def survey(address: str, *, timeout_s: float = TIMEOUT_S) -> tuple[RayHost, ...]:
    """The nodes of the Ray cluster whose head is at ``address``.

    Raises:
        ClusterError: nothing answers there, or not in time, or it refuses.
    """
    require_listener(address)
    argv = python_module("cluster.ray.survey", address)
    try:
        asked = subprocess.run(argv, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"the Ray cluster at {address} has not told its nodes within {timeout_s:g} s") from None
    if asked.returncode != 0:
        lines = asked.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise ClusterError(f"the Ray cluster at {address} cannot be joined: {lines[-1]}; {TOKEN_REMEDY}")
    return tuple(_host(node) for node in json.loads(asked.stdout.splitlines()[-1]))


def _host(node: Mapping[str, Any]) -> RayHost:
    resources = node["Resources"]
    kinds = [name.removeprefix(_ACCELERATOR) for name in resources if name.startswith(_ACCELERATOR)]
    accelerator = kinds[0] if kinds else None
    counted = next((name for name in RESOURCES[1:] if resources.get(name)), None)
    return RayHost(
        name=node["NodeManagerHostname"],
        num_cpus=int(resources.get("CPU", 0)),
        num_gpus=int(resources[counted]) if counted else 0,
        accelerator=accelerator,
        device="cpu" if counted is None else "npu" if counted == "NPU" else _make_of(accelerator or ""),
    )


def _make_of(accelerator: str) -> DeviceKind:
    """The kind of GPUs that Ray calls so."""
    return "rocm" if accelerator.startswith("AMD-") else "xpu" if accelerator.startswith("Intel-") else "cuda"


def _main(address: str) -> None:
    import logging

    import ray

    from cluster.ray.connection import remote_ray

    logging.getLogger().setLevel(logging.CRITICAL)
    with remote_ray(address):
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    print(json.dumps([node for node in nodes if node["Alive"]]))  # noqa: T201


if __name__ == "__main__":
    _main(sys.argv[1])
