"""Finds the dashboard of a Ray cluster, which takes Ray Jobs, by asking the head.

A process of its own asks, ``python -m cluster.ray.head HOST:PORT``: where the head or the token is not what it expects,
Ray's core writes to stderr, waits for most of a minute, or ends the process.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import json
import socket
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

from cluster.base import ClusterError
from cluster.processes import python_module
from cluster.ray.connection import require_listener

ANSWER_TIMEOUT_S = 30.0
TOKEN_REMEDY = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the token the head was started with"


def dashboard_url(address: str) -> str:
    """The address of the dashboard of the cluster at ``address``, which is the dashboard's own, the head's, or "auto".

    Raises:
        ClusterError: no answer, no valid token, or no dashboard that can be reached from this host.
    """
    if "://" in address:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ClusterError(
                f"cluster address {address!r} is neither HOST:PORT of a head nor http(s)://HOST:PORT of its dashboard"
            )
        return f"{parts.scheme}://{parts.netloc}"
    require_listener(address)
    head, dashboard = _ask(address)
    if not dashboard:
        raise ClusterError(
            f"the head at {head} runs no dashboard, which takes Ray Jobs; start it with "
            "`ray start --head --include-dashboard=true`, with ray[default] installed there"
        )
    _require_reachable(head, dashboard)
    return f"http://{dashboard}"


def _ask(address: str) -> tuple[str, str]:
    """Addresses of the head and of its dashboard; the latter is empty where there is none."""
    argv = python_module("cluster.ray.head", address)
    try:
        asked = subprocess.run(argv, capture_output=True, timeout=ANSWER_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"no head of a Ray cluster answers at {address}, though something listens there; the head's port is the "
            "--port of `ray start --head`, 6379 unless given"
        ) from None
    if asked.returncode != 0:
        last = (asked.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise ClusterError(f"no head of a Ray cluster can be asked at {address}: {last}")
    answer = json.loads(asked.stdout)
    if answer["refused"]:
        raise ClusterError(f"the Ray cluster at {address} does not accept this token; {TOKEN_REMEDY}")
    return answer["head"], answer["dashboard"]


def _require_reachable(address: str, dashboard: str) -> None:
    """Refuse a dashboard on the loopback of another host: on this host's it would be another one, or nothing."""
    head, listens = address.rpartition(":")[0], dashboard.rpartition(":")[0].strip("[]")
    if _is_loopback(listens) and not _is_this_host(head):
        raise ClusterError(
            f"the dashboard of the head at {address} listens on the head's loopback only ({dashboard}); submit on the "
            "head itself, or start it with --dashboard-host, or give a tunnel's address as http://HOST:PORT"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_this_host(host: str) -> bool:
    """Whether the host has an address of this machine: sockets can be bound to no others."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, where in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(where)
            return True
    return False


def _main(address: str) -> None:
    from ray._private.services import canonicalize_bootstrap_address_or_die
    from ray.exceptions import AuthenticationError

    core: Any = importlib.import_module("ray._raylet")  # its annotations lack most of it
    head = canonicalize_bootstrap_address_or_die(address) if address == "auto" else address
    dashboard, refused = None, False
    try:
        core.AuthenticationTokenLoader.instance().has_token()  # raises where Ray's core would end this process
        dashboard = core.GcsClient(address=head).internal_kv_get(b"dashboard", namespace=b"dashboard", timeout=10)
    except AuthenticationError:
        refused = True
    print(json.dumps({"head": head, "dashboard": (dashboard or b"").decode(), "refused": refused}))  # noqa: T201


if __name__ == "__main__":
    _main(sys.argv[1])
