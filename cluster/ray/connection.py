"""Connects to a Ray cluster, private or running already, and calls its head with a time limit."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import ipaddress
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import ray
import ray._private.ray_constants
import ray._private.worker
from ray.job_config import JobConfig

from cluster.base import ClusterError
from cluster.hardware.topology import Node
from cluster.node.guardian import LEASE_VARIABLE, Guardian, kill_marked
from cluster.node.load_watch import CONTROLLER_VARIABLE
from cluster.processes import process_info, python_module
from trials.accelerator.kinds import FAMILIES

# Address, token and environment of a Ray connection. Does not import Ray.


CONNECT_TIMEOUT_S = 5.0
_PREFIX, _LOCK = "tune-", "controller.lock"
"""Prefix of a private Ray's folder, and the file in it that its controller keeps locked."""
_FRESH_S = 10.0
"""Age of a folder, in seconds, below which it may not be locked yet."""


def require_listener(address: str) -> None:
    """Raise ClusterError at once if nothing listens at ``address``. Ray itself would try for a minute."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(f"expected a cluster address such as HOST:PORT or auto, got {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(
            f"nothing responds at {address} ({error}); start the head with `ray start --head`, or correct the address"
        ) from None


def locked_folder() -> tuple[Path, IO[bytes]]:
    """Create a temporary folder for a private Ray, with a lock file held as long as this process lives. The path is
    short because Ray puts sockets there."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = (folder / _LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def remove_stale_folders() -> list[Path]:
    """Remove this user's folders whose controller and guardian were both killed: they contain Ray's token."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), path.open("rb") as lock:
            about = os.fstat(lock.fileno())
            if about.st_uid != os.geteuid() or time.time() - about.st_mtime < _FRESH_S:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
            removed.append(path.parent)
    return removed


def fresh_token(folder: Path) -> dict[str, str]:
    """Return the environment for authentication with a new token in ``folder``; empty if the user disabled it."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return {}
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32), encoding="ascii")
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path), "RAY_AUTH_TOKEN": ""}  # it would come first


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set the environment variables ``changes`` within the context."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def last_line(error: Exception) -> str:
    """Return the last line of the error's message, the cause if Ray repeats another process's traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def first_line(error: Exception) -> str:
    """Return the first line of the error's message; its type's name if there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


logger = logging.getLogger(__name__)

T = TypeVar("T")

CALL_TIMEOUT_S = 10.0
"""Time limit of an answer from Ray, in seconds."""
OBJECT_STORE_BYTES = 80 << 20
"""Size of a private Ray's object store, close to the minimum: nothing large travels through Ray."""


class _NoDriverPath(JobConfig):
    """Configuration of Ray's workers without the driver's folder. Workers would otherwise import from that folder,
    which is the user's, before all others."""

    def _runtime_env_has_working_dir(self) -> bool:
        return True  # Ray uses this only to decide whether workers get the driver's folders


class UnreachableError(RuntimeError):
    """No answer from the head of the Ray cluster, or a refusal."""


def started(call: Callable[[], T]) -> Future[T]:
    """Run ``call`` in its own thread, which does not keep the process from ending: Ray's calls to its head wait as long
    as the head is away."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="ray-call").start()
    return future


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return the result of ``call``.

    Raises:
        UnreachableError: no result in ``timeout_s``, or an error.
    """
    try:
        return started(call).result(timeout_s)
    except TimeoutError:
        raise UnreachableError(f"the head of the Ray cluster has not responded for {timeout_s:g} s") from None
    except Exception as error:  # Ray raises anything from RpcError to ValueError
        raise UnreachableError(first_line(error)) from error


PRIVATE_HEAD_TIMEOUT_S = 300.0
"""Time limit of a private Ray's head while its process lives, in seconds: a busy host is slow."""


class PrivateHead:
    """The head of a private Ray: child processes that this one can observe."""

    def __init__(self) -> None:
        node: Any = ray._private.worker._global_node
        constants = ray._private.ray_constants
        needed = (constants.PROCESS_TYPE_GCS_SERVER, constants.PROCESS_TYPE_RAYLET)  # the raylet ends with its agents
        self.pids = {name: int(info.process.pid) for name in needed for info in node.all_processes.get(name, ())}

    @property
    def is_alive(self) -> bool:
        """Whether all of its processes still run, however slow."""
        return self.ended is None

    @property
    def ended(self) -> str | None:
        """Return the name of an ended process; None while all run."""
        for name, pid in self.pids.items():
            if (info := process_info(pid)) is None or not info.is_running:
                return name
        return None


@contextlib.contextmanager
def private_ray(node: Node) -> Iterator[PrivateHead]:
    """Run a private Ray on this host over loopback. Nothing of it outlives the context or this process."""
    lease = uuid4().hex
    remove_stale_folders()
    folder, lock = locked_folder()
    guardian = Guardian(lease, remove=folder)
    changes = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # the default lowers the priority of ranks
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_prestart_worker_first_driver": "0",  # a worker per CPU; only the agent's is ever used
        "RAY_gcs_rpc_server_reconnect_timeout_s": f"{PRIVATE_HEAD_TIMEOUT_S + 60.0:.0f}",  # then Ray ends this process
        "RAY_memory_monitor_refresh_ms": "0",  # the kernel should kill ranks first, not agents
        **fresh_token(folder),
    }
    try:
        with settings(changes), loopback_only(), _quiet():
            own = {LEASE_VARIABLE: lease, CONTROLLER_VARIABLE: str(os.getpid())}
            with environment(own):  # only while Ray starts: other processes are not part of it
                _start_in_two_tries(node, folder, lease)
            try:
                yield PrivateHead()
            finally:
                ray.shutdown()
    finally:
        guardian.close()
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def _start_in_two_tries(node: Node, folder: Path, lease: str) -> None:
    """Start Ray, trying twice: on a busy host it gives up after half a minute, but then its files are cached.

    Raises:
        ClusterError: it does not start.
    """
    try:
        _start_ray(node, folder / "r")  # Ray makes its folder world-readable; files next to it stay private
        return
    except Exception as error:
        logger.warning("the private Ray on this host did not start (%s); trying again", first_line(error))
    ray.shutdown()
    kill_marked(lease, str(folder))
    try:
        _start_ray(node, folder / "s")
    except Exception as error:
        raise ClusterError(
            f"cannot start a private Ray on this host after two attempts: {first_line(error)}. Set `cluster: "
            "{kind: local}` in the sweep file to run without Ray"
        ) from error


def _start_ray(node: Node, folder: Path) -> None:
    resource = FAMILIES[node.device_kind].ray_resource
    ray.init(
        address="local",
        num_cpus=node.num_devices,
        num_gpus=node.num_devices if resource == "GPU" else 0,
        resources=None if resource in ("CPU", "GPU") else {resource: node.num_devices},
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        job_config=_NoDriverPath(),
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(folder),
    )


@contextlib.contextmanager
def remote_ray(address: str) -> Iterator[None]:
    """Connect to the Ray cluster whose head is at ``address``."""
    require_listener(address)
    remedy = (
        "check that the head is running, that this host is one of its nodes, and that RAY_AUTH_TOKEN_PATH is "
        "its token file"
    )
    with _quiet():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, job_config=_NoDriverPath())
        except Exception as error:  # Ray raises anything from ConnectionError to RuntimeError
            raise ClusterError(f"cannot join the Ray cluster at {address}: {first_line(error)}; {remedy}") from None
        if not _requires_token():
            logger.warning(
                "the Ray cluster at %s requires no token: anyone who can reach it can run code on it; start it "
                "with RAY_AUTH_MODE=token",
                address,
            )
        try:
            yield
        finally:
            ray.shutdown()


def _requires_token() -> bool:
    core: Any = importlib.import_module("ray._raylet")
    return bool(core.get_authentication_mode() == core.AuthenticationMode.TOKEN)


@contextlib.contextmanager
def settings(changes: Mapping[str, str]) -> Iterator[None]:
    """Set the environment variables ``changes`` within the context.

    Ray's core caches the authentication settings at import, so they are reloaded.
    """
    core: Any = importlib.import_module("ray._raylet")

    def read() -> None:
        core.Config.initialize("")
        core.AuthenticationTokenLoader.instance().reset_cache()

    try:
        with environment(changes):
            read()
            yield
    finally:
        read()


def loopback_only() -> contextlib.AbstractContextManager[None]:
    """Make Ray use only loopback within the context. Ray reads that setting at import, which may be long past."""
    return _switched_off(ray._private.ray_constants, "ENABLE_RAY_CLUSTER")


def _quiet() -> contextlib.AbstractContextManager[None]:
    """Keep Ray from printing the raylet's log to stdout when a node dies. No public option does that."""
    return _switched_off(ray._private.worker, "_worker_logs_enabled")


@contextlib.contextmanager
def _switched_off(module: Any, name: str) -> Iterator[None]:
    """Set a module's variable to False within the context."""
    before = getattr(module, name)
    setattr(module, name, False)
    try:
        yield
    finally:
        setattr(module, name, before)


# ---- Finds the dashboard of a Ray cluster, which accepts Ray Jobs, through the head
#
# A separate process makes the call, ``python -m cluster.ray.connection HOST:PORT``: if head or token are not as
# expected, Ray's core writes to stderr, waits for most of a minute, or ends the process.

ANSWER_TIMEOUT_S = 30.0
TOKEN_REMEDY = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the token the head was started with"


def dashboard_url(address: str) -> str:
    """Return the dashboard's address of the cluster at ``address``: the dashboard's, the head's, or "auto".

    Raises:
        ClusterError: no answer, no valid token, or no dashboard reachable from this host.
    """
    if "://" in address:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ClusterError(
                f"cluster address {address!r} is neither HOST:PORT of a head nor http(s)://HOST:PORT of its dashboard"
            )
        return f"{parts.scheme}://{parts.netloc}"
    require_listener(address)
    head, dashboard = _query(address)
    if not dashboard:
        raise ClusterError(
            f"the head at {head} runs no dashboard, which Ray Jobs require; start it with `ray start --head "
            "--include-dashboard=true`, with ray[default] installed there"
        )
    _require_reachable(head, dashboard)
    return f"http://{dashboard}"


def _query(address: str) -> tuple[str, str]:
    """Return the addresses of the head and of its dashboard; the latter is empty if there is none."""
    argv = python_module("cluster.ray.connection", address)
    try:
        completed = subprocess.run(argv, capture_output=True, timeout=ANSWER_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"no Ray head responds at {address}, although something listens there; the port of the head is the "
            "--port of `ray start --head`, 6379 by default"
        ) from None
    if completed.returncode != 0:
        last = (completed.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise ClusterError(f"cannot query a Ray head at {address}: {last}")
    answer = json.loads(completed.stdout)
    if answer["refused"]:
        raise ClusterError(f"the Ray cluster at {address} does not accept this token; {TOKEN_REMEDY}")
    return answer["head"], answer["dashboard"]


def _require_reachable(address: str, dashboard: str) -> None:
    """Refuse a dashboard on another host's loopback: here that address is another dashboard, or nothing."""
    head, listens = address.rpartition(":")[0], dashboard.rpartition(":")[0].strip("[]")
    if _is_loopback(listens) and not _is_this_host(head):
        raise ClusterError(
            f"the dashboard of the head at {address} listens only on loopback ({dashboard}); submit on the head "
            "itself, start it with --dashboard-host, or pass the address of a tunnel as http://HOST:PORT"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_this_host(host: str) -> bool:
    """Whether the host is this machine: sockets can be bound only to its addresses."""
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

    core: Any = importlib.import_module("ray._raylet")  # mostly unannotated
    head = canonicalize_bootstrap_address_or_die(address) if address == "auto" else address
    dashboard, refused = None, False
    try:
        core.AuthenticationTokenLoader.instance().has_token()  # raises here; later Ray's core would end this process
        dashboard = core.GcsClient(address=head).internal_kv_get(b"dashboard", namespace=b"dashboard", timeout=10)
    except AuthenticationError:
        refused = True
    print(json.dumps({"head": head, "dashboard": (dashboard or b"").decode(), "refused": refused}))  # noqa: T201


if __name__ == "__main__":
    _main(sys.argv[1])
