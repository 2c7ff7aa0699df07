"""Checks of what a sweep needs: host, devices, services."""

from __future__ import annotations

import contextlib
import email.utils
import functools
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from cluster.base import ClusterError
from cluster.gang.environment import defaults_of
from cluster.hardware import discovery
from cluster.hardware.discovery import DeviceError, DeviceQueryError, discover_node, hidden
from cluster.hardware.topology import Node, is_slice_name, num_usable_cores, read_or_empty, usable_memory_bytes
from cluster.node import load_watch
from cluster.node.load_watch import SHARED_REMEDY
from cluster.processes import python_module
from orchestrator import units
from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.errors import ConfigError
from orchestrator.mlflow_urls import sqlite_path
from orchestrator.planning.dry_runs import known_topology
from orchestrator.report.descriptions import disturbance_text
from orchestrator.sweep.snapshot import Home
from trials.accelerator.kinds import FAMILIES, DeviceKind
from trials.files import to_json
from trials.secrets import redact
from trials.torch_support import REMEDY, TESTED, installed_version, problem

# What a check is, and how many of them run side by side without any holding up the rest.


Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check came to."""

    subject: str
    level: Level
    """warn: a sweep can run, worse than it could; fail: it cannot."""
    words: str
    remedy: str = ""
    """What to do about it; empty where there is nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentCheck:
    """One thing to look at. ``sample_cpu`` gives words for people, or raises :class:`TroubleError`."""

    subject: str
    sample_cpu: Callable[[], str]
    deadline_s: float = 10.0
    level: Level = "fail"
    """How bad it is where the check raises anything else, or does not end."""


class TroubleError(Exception):
    """Something is not as it should be: what, how bad that is, and what to do."""

    def __init__(self, words: str, remedy: str, level: Level = "warn") -> None:
        super().__init__(words)
        self.words, self.remedy, self.level = words, remedy, level


def run_checks(checks: Sequence[EnvironmentCheck]) -> list[Finding]:
    """The findings in the order of the checks. They run at the same time, in threads that are left alone at their
    deadlines: one that hangs in the kernel, as on a file server that is away, cannot be ended."""
    began_s = time.monotonic()
    running = [(check, _started(check)) for check in checks]
    return [_finding(check, future, began_s + check.deadline_s) for check, future in running]


def _started(check: EnvironmentCheck) -> Future[str]:
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(check.sample_cpu())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=f"check {check.subject}").start()
    return future


def _finding(check: EnvironmentCheck, future: Future[str], until_s: float) -> Finding:
    try:
        words = future.result(max(0.1, until_s - time.monotonic()))
    except TroubleError as trouble:
        return Finding(
            subject=check.subject, level=trouble.level, words=redact(trouble.words), remedy=redact(trouble.remedy)
        )
    except TimeoutError:
        words = f"no answer within {check.deadline_s:g} s"
        return Finding(
            subject=check.subject, level=check.level, words=words, remedy="Is what it asks overloaded or away?"
        )
    except Exception as error:
        words = redact(f"cannot be looked at: {str(error) or type(error).__name__}")
        return Finding(subject=check.subject, level=check.level, words=words, remedy="Fix what the message names.")
    return Finding(subject=check.subject, level="ok", words=redact(words))


# Checks of this host: Python, disk, shared memory, limits, ports, load.


MIN_DISK_BYTES, LOW_DISK_BYTES = 200 << 20, 5 << 30
"""Free space of the home below which a sweep fails, and below which it may."""
LOW_SHM_BYTES = 1 << 30
MIN_FILES = 1024
LOW_MEMORY_BYTES = 2 << 30
LOAD_WINDOW_S = load_watch.MIN_WINDOW_S + 0.2
STRAY_MODULES = ("orchestrator", "cluster", "trials", "configs")


def python_version() -> str:
    """The interpreter, and that our packages come from where they are installed."""
    version = platform.python_version()
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        raise TroubleError(f"Python {version}", "Use Python 3.11, 3.12 or 3.13.", "fail")
    own = Path(__file__).resolve().parents[1]
    if own in (Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry):
        return f"{version}, {sys.executable}; tune-cluster from PYTHONPATH, {own}"
    return f"{version}, {sys.executable}"


def search_path() -> str:
    """That PYTHONPATH does not put folders before our packages that hold something called like them."""
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in os.environ else []:
        folder = Path(entry or ".").resolve()
        if folder == Path(__file__).resolve().parents[1]:
            break
        found = [name for name in STRAY_MODULES if (folder / name).is_dir() or (folder / f"{name}.py").is_file()]
        if found:
            words = f"PYTHONPATH names {folder}, where {', '.join(found)} hides a package of tune-cluster"
            raise TroubleError(words, f"Take {entry or 'the empty entry'} out of PYTHONPATH.", "fail")
    return "PYTHONPATH hides none of our packages"


def home_disk(home: Path) -> str:
    """Room where sweeps are kept, and that files can be written there."""
    folder = home if home.exists() else home.absolute().parent
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        remedy = "Make it writable, or name another folder with --home."
        raise TroubleError(f"{folder} cannot be written: {error.strerror}", remedy, "fail") from None
    free = shutil.disk_usage(folder).free
    words = f"{units.num_bytes(free)} free for {home}"
    if free < LOW_DISK_BYTES:
        remedy = "Free some, or name a folder on another disk with --home."
        raise TroubleError(words, remedy, "fail" if free < MIN_DISK_BYTES else "warn")
    return words


def shared_memory() -> str:
    """Room in /dev/shm, which data loaders and NCCL use to pass data between processes."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        raise TroubleError("there is no /dev/shm", "Mount one; data loaders with workers need it.") from None
    words = f"{units.num_bytes(usage.free)} of {units.num_bytes(usage.total)} free in /dev/shm"
    if usage.free < LOW_SHM_BYTES:
        raise TroubleError(words, f"NCCL and data loaders with workers fail without: {SHARED_REMEDY}.")
    return words


def host_memory() -> str:
    """Host memory that is available now, within the control group's limit."""
    available = {line.split(":")[0]: line.split()[1] for line in read_or_empty("/proc/meminfo").splitlines() if line}
    free = min(int(available.get("MemAvailable", "0")) << 10, usable_memory_bytes())
    words = f"{units.num_bytes(free)} of {units.num_bytes(usable_memory_bytes())} available"
    if free < LOW_MEMORY_BYTES:
        raise TroubleError(words, "End other programs; every rank takes half a gigabyte and its model.")
    return words


def file_limits() -> str:
    """How many files and processes this user may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    words = f"{soft} open files"
    if processes != resource.RLIM_INFINITY:
        words += f", {processes} processes"
    if soft < MIN_FILES:
        raise TroubleError(words, f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}, in the shell that submits.")
    return words


def port_range() -> str:
    """That ports of the loopback can be bound and reached: ranks meet there, and so does a Ray of our own."""
    with socket.socket() as server, socket.socket() as client:
        try:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(5.0)
            client.connect(server.getsockname())
        except OSError as error:
            remedy = "Allow connections over the loopback device; is `lo` up?"
            raise TroubleError(f"127.0.0.1 does not connect to itself: {error}", remedy, "fail") from None
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        remedy = "Add this host's name to /etc/hosts; ranks on other nodes have to find it."
        raise TroubleError(f"the host's own name {socket.gethostname()!r} has no address", remedy) from None
    return f"loopback connects, {socket.gethostname()} has an address"


def host_clock() -> str:
    """That the clocks run, at the same pace."""
    monotonic_s, real_s = time.monotonic(), time.time()
    time.sleep(0.5)
    passed_s, passed_real_s = time.monotonic() - monotonic_s, time.time() - real_s
    if passed_s <= 0 or abs(passed_real_s - passed_s) > 0.05:
        words = f"in {passed_s:.2f} s of the monotonic clock the time of day went on by {passed_real_s:.2f} s"
        raise TroubleError(words, "Something sets the clock; let chrony or ntpd slew it.")
    return "monotonic clock and time of day agree"


def machine_load() -> str:
    """What other programs use of the cores, by the measure and the limits by which trials count as disturbed."""
    before = load_watch.sample_cpu()
    time.sleep(LOAD_WINDOW_S)
    found = load_watch.disturbance(platform.node(), before, load_watch.sample_cpu(), os.getpid())
    if found.is_disturbing:
        remedy = "Wait, or end other programs: what is measured beside them is slower than it would be."
        raise TroubleError(disturbance_text(found), remedy)
    if found.foreign_cpu is None:
        return f"not told by the kernel; {num_usable_cores()} cores may be used here"
    return f"others use {found.foreign_cpu:.0%} of the {num_usable_cores()} cores that may be used here"


# Checks of what trials compute with: torch, its devices and collectives, the driver.


TORCH_S = 90.0
"""How long importing torch may take on a loaded machine with cold disks."""
_LISTED = 3


_query_lock = threading.Lock()


def _probe() -> Mapping[str, Any]:
    """What torch says of itself; asked once, whichever check comes first.

    Raises:
        TroubleError: it cannot be imported.
    """
    with _query_lock:
        return _query()


@functools.cache
def _query() -> Mapping[str, Any]:
    """What torch says, in a process of its own: a broken driver can hang or end the one that asks."""
    try:
        completed = subprocess.run(
            python_module("trials.torch_support"), capture_output=True, timeout=TORCH_S - 5, check=False
        )
    except subprocess.TimeoutExpired:
        raise TroubleError(
            "importing torch takes over a minute", "Is the driver hung, or the disk slow?", "fail"
        ) from None
    if completed.returncode != 0:
        lines = completed.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {completed.returncode}"]
        raise TroubleError(f"torch cannot be imported: {lines[-1]}", REMEDY, "fail")
    answer: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return answer


def torch_version() -> str:
    """Which torch there is, and whether it has all that trials need."""
    version = installed_version()
    if known := problem(version):
        raise TroubleError(known, REMEDY, "fail")
    found = _probe()
    build = f"CUDA {found['cuda']}" if found["cuda"] else f"ROCm {found['hip']}" if found["hip"] else "CPU only"
    words = f"{found['version']} ({build})"
    if missing := found["lacking"]:
        raise TroubleError(f"{words} lacks {', '.join(missing[:_LISTED])}, which trials need", REMEDY, "fail")
    if missing := found["lacking_for_dry_runs"]:
        raise TroubleError(
            f"{words}: trials run, dry runs do not: no {missing[0]}", "Plan without them, or update torch."
        )
    tested = ".".join(map(str, TESTED))
    return words if found["version"].startswith(tested) else f"{words}; tested with {tested}"


def found_devices() -> str:
    """What trials would run on here, whether torch sees what the driver does, and whether its tool answers quickly."""
    node = _node()
    if node.device_kind == "cpu":
        if hides := hidden():
            raise TroubleError(f"{hides}: trials run on cores", "Unset it, unless they are to.")
        if Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
            remedy = "Look at what nvidia-smi says; in a container: --gpus all."
            raise TroubleError("nvidia-smi lists no GPU, though there is a driver or a tool of it", remedy)
        return f"{node.num_devices} CPU cores ({node.device_name}), no GPU"
    words = f"{node.num_devices} x {node.device_name}, {units.num_bytes(node.device_memory_bytes)} each"
    _check_torch(node, words)
    if node.device_kind == "cuda" and _is_slow():
        raise TroubleError(f"{words}; persistence mode is off: every question starts the GPUs again", _PERSISTENCE)
    return words


_PERSISTENCE = "nvidia-smi -pm 1, or run nvidia-persistenced."


def _node() -> Node:
    try:
        return discover_node()
    except DeviceError as error:
        raise TroubleError(str(error), "Fix the driver; cluster.device: cpu trains on cores on purpose.") from None


def _check_torch(node: Node, words: str) -> None:
    """Refuse a torch that was built for other devices, or sees fewer."""
    found = _probe()
    if found["kind"] != node.device_kind:
        sees = "no such device" if found["kind"] == "cpu" else f"devices of kind {found['kind']}"
        raise TroubleError(f"{words}; torch {found['version']} sees {sees}", _BUILDS[node.device_kind], "fail")
    num_seen = len(found["devices"])
    if num_seen != node.num_devices and not is_slice_name(node.device_name):  # of slices CUDA shows one
        raise TroubleError(f"{words}; torch sees {num_seen} of them", _BUILDS[node.device_kind], "fail")


_BUILDS: Mapping[DeviceKind, str] = {
    "cuda": "Install the build of torch for this driver (https://pytorch.org/get-started).",
    "rocm": "Install the build of torch for this ROCm (https://pytorch.org/get-started).",
    "xpu": "Install the build of torch for Intel GPUs (https://pytorch.org/get-started).",
    "npu": "Install the torch_npu that belongs to this torch, and source CANN's set_env.sh.",
}


def _is_slow() -> bool:
    try:
        return discovery.is_persistent() is False
    except DeviceQueryError:
        return False


def rank_environment() -> str:
    """What ranks get in their environment here by default, and what this host says instead."""
    found = defaults_of(_node().device_kind, num_nodes=1)
    words = [f"{one.name}={os.environ.get(one.name, one.value)}" for one in found]
    own = [one.name for one in found if one.name in os.environ]
    return " ".join(words) + (f"; {', '.join(own)} by this host" if own else "")


def driver_mode() -> str:
    """The GPU driver's version; other sweeps' figures compare only with the same one."""
    path = Path("/sys/module/nvidia/version")
    if path.exists():
        return f"NVIDIA {path.read_text(encoding='ascii').strip()}"
    kind = _node().device_kind
    return "none, and no GPU that needs one" if kind == "cpu" else f"not told by the kernel ({kind})"


def working_collectives() -> str:
    """NCCL among GPUs, HCCL among NPUs, gloo among cores."""
    if installed_version() is None:
        raise TroubleError("nobody knows without torch", REMEDY, "fail")
    found = _probe()
    if found["kind"] in ("xpu", "npu"):
        return FAMILIES[found["kind"]].collectives.upper()
    if found["devices"]:
        if not found["nccl"]:
            raise TroubleError(
                "this torch has no NCCL", "Install a build of torch with NCCL; trials of several GPUs need it."
            )
        return f"NCCL {found['nccl']}"
    if not found["gloo"]:
        raise TroubleError(
            "this torch has no gloo", "Install a usual build of torch; ranks on CPUs meet through gloo.", "fail"
        )
    return "gloo"


# Checks of what else a sweep talks to: Ray and the MLflow store.


RAY_S = 75.0
"""How long a Ray cluster may take to tell its nodes."""
STORE_S = 20.0
MAX_SKEW_S = 5.0
_REVISION = re.compile(r"^(down_)?revision\b[^=]*=\s*[\"']([0-9a-f]+)[\"']", re.MULTILINE)


def ray_package(needed: bool) -> str:
    """Which Ray is installed; sweeps of kind local and simulated need none."""
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
    from cluster.ray.leases import survey

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
    from cluster.ray.connection import dashboard_url

    try:
        url = dashboard_url(address)
        with urllib.request.urlopen(f"{url}/api/version", timeout=10) as answer:
            date_header = answer.headers.get("Date")
    except ClusterError as error:
        raise TroubleError(str(error), "Or submit with --foreground, which needs no dashboard.") from None
    except urllib.error.HTTPError as error:
        date_header = error.headers.get("Date")
    except OSError as error:
        raise TroubleError(f"the dashboard does not answer: {error}", "Or submit with --foreground.") from None
    words = f"dashboard at {url}"
    if not date_header:
        return words
    skew_s = email.utils.parsedate_to_datetime(date_header).timestamp() - time.time()
    if abs(skew_s) > MAX_SKEW_S:
        raise TroubleError(f"{words}; its clock is {skew_s:+.0f} s off this one's", "Run chrony or ntpd on all hosts.")
    return f"{words}; its clock agrees with this one's"


def mlflow_store(uri: str) -> str:
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


# Looks at a host, a sweep file or a Ray cluster: which checks there are, in the order in which people read them.


ADDRESS_VARIABLE = "RAY_ADDRESS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """What is to be looked at besides this host."""

    home: Home
    file: Path | None = None
    address: str | None = None
    spec: SweepSpec | None = None
    """The sweep of the file; None where there is none, or it cannot be read."""

    @property
    def ray_address(self) -> str | None:
        """The Ray cluster's: as given, else ``RAY_ADDRESS``, else as in the file; None: none."""
        if self.address is None and self.spec is not None and self.spec.cluster.kind != "ray":
            return None
        in_file = self.spec.cluster.address if self.spec is not None else None
        address = self.address or os.environ.get(ADDRESS_VARIABLE) or in_file
        return None if address in (None, "", "local") else address

    @property
    def needs_ray(self) -> bool:
        return self.ray_address is not None or (self.spec is not None and self.spec.cluster.kind == "ray")

    @property
    def tracking_uri(self) -> str:
        """The MLflow store's: as in the file, else the home's own."""
        in_file = self.spec.tracking.uri if self.spec is not None else None
        return in_file or self.home.default_tracking_uri


def make_patient(home: Home, file: Path | None, address: str | None) -> Patient:
    """What is to be looked at; a file that cannot be read is a finding, no error."""
    try:
        spec = load_sweep(file) if file is not None else None
    except ConfigError:
        spec = None
    return Patient(home=home, file=file, address=address, spec=spec)


QUIET = EnvironmentCheck(subject="load", sample_cpu=machine_load, level="warn")
"""The check that comes before all others, because it would take them for somebody else."""


def checks(patient: Patient) -> list[EnvironmentCheck]:
    """All others. A sweep that runs nowhere real needs neither torch nor devices."""
    is_virtual = patient.spec is not None and patient.spec.cluster.kind == "simulated"
    needs_here = not is_virtual and patient.ray_address is None
    address, torch_s = patient.ray_address, TORCH_S
    of_trials = {"torch": torch_version, "devices": found_devices, "collectives": working_collectives}
    return [
        *(
            [EnvironmentCheck(subject="file", sample_cpu=functools.partial(_file, patient))]
            if patient.file is not None
            else []
        ),
        EnvironmentCheck(subject="Python", sample_cpu=python_version),
        EnvironmentCheck(subject="PYTHONPATH", sample_cpu=search_path),
        *(
            EnvironmentCheck(
                subject=name, sample_cpu=functools.partial(_elsewhere, look, needs_here), deadline_s=torch_s
            )
            for name, look in of_trials.items()
        ),
        EnvironmentCheck(subject="driver", sample_cpu=driver_mode, level="warn", deadline_s=torch_s),
        EnvironmentCheck(subject="environment", sample_cpu=rank_environment, level="warn", deadline_s=torch_s),
        EnvironmentCheck(subject="Ray", sample_cpu=functools.partial(ray_package, patient.needs_ray)),
        EnvironmentCheck(subject="Ray cluster", sample_cpu=functools.partial(ray_cluster, address), deadline_s=RAY_S),
        EnvironmentCheck(
            subject="Ray jobs",
            sample_cpu=functools.partial(ray_jobs, address),
            deadline_s=RAY_S,
        ),
        EnvironmentCheck(
            subject="MLflow", sample_cpu=functools.partial(mlflow_store, patient.tracking_uri), deadline_s=STORE_S
        ),
        EnvironmentCheck(subject="home", sample_cpu=functools.partial(home_disk, patient.home.path)),
        EnvironmentCheck(subject="shared memory", sample_cpu=shared_memory, level="warn"),
        EnvironmentCheck(subject="memory", sample_cpu=host_memory, level="warn"),
        EnvironmentCheck(subject="limits", sample_cpu=file_limits, level="warn"),
        EnvironmentCheck(subject="ports", sample_cpu=port_range),
        EnvironmentCheck(subject="clock", sample_cpu=host_clock, level="warn"),
    ]


def _elsewhere(look: Callable[[], str], needed: bool) -> str:
    """A check of what trials need: where they run on other hosts, what fails here is worth a warning only."""
    try:
        return look()
    except TroubleError as trouble:
        level = trouble.level if needed else "warn"
        raise TroubleError(trouble.words, trouble.remedy, level) from None


def _file(patient: Patient) -> str:
    """Whether the sweep file can be read, and the hardware that it asks for is there."""
    assert patient.file is not None
    try:
        spec = patient.spec or load_sweep(patient.file)
        topology = known_topology(spec, patient.home) if patient.ray_address is None else None
    except (ConfigError, ClusterError) as error:
        raise TroubleError(str(error), "tune-cluster plan FILE tells the same, and the plan.", "fail") from None
    where = f" on {topology.label}" if topology is not None else ""
    return f"{spec.name}, {spec.cluster.kind}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """All findings, in the order in which they are shown."""

    findings: tuple[Finding, ...]

    @property
    def num_failed(self) -> int:
        return sum(finding.level == "fail" for finding in self.findings)

    @property
    def num_warned(self) -> int:
        return sum(finding.level == "warn" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The last line: whether sweeps can run."""
        if self.num_failed:
            return f"{self.num_failed} to be fixed before a sweep can run"
        return f"usable; {self.num_warned} to look at" if self.num_warned else "all is well"

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``doctor --json``."""
        return {"usable": not self.num_failed, "checks": to_json(self.findings)}


def examine(home: Home, *, file: Path | None = None, address: str | None = None) -> Diagnosed:
    """Run all checks; takes some seconds, and two minutes where nothing answers."""
    quiet = run_checks([QUIET])
    return Diagnosed(findings=(*run_checks(checks(make_patient(home, file, address))), *quiet))
