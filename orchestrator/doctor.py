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

# Checks, and how they run concurrently without blocking each other.


Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    subject: str
    level: Level
    """warn: a sweep can run, but not at its best; fail: it cannot."""
    words: str
    remedy: str = ""
    """The remedy; empty if none is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentCheck:
    """A check; ``sample_cpu`` returns its result in words, or raises :class:`TroubleError`."""

    subject: str
    sample_cpu: Callable[[], str]
    deadline_s: float = 10.0
    level: Level = "fail"
    """The severity if the check raises anything else, or does not end."""


class TroubleError(Exception):
    """A problem with its severity and remedy."""

    def __init__(self, words: str, remedy: str, level: Level = "warn") -> None:
        super().__init__(words)
        self.words, self.remedy, self.level = words, remedy, level


def run_checks(checks: Sequence[EnvironmentCheck]) -> list[Finding]:
    """The findings in the order of the checks. They run concurrently, in threads that are abandoned at their deadlines:
    one that hangs in the kernel, as on an unreachable file server, cannot be ended."""
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
            subject=check.subject, level=check.level, words=words, remedy="Is the service overloaded or unreachable?"
        )
    except Exception as error:
        words = redact(f"check failed: {str(error) or type(error).__name__}")
        return Finding(
            subject=check.subject, level=check.level, words=words, remedy="Fix the cause named in the message."
        )
    return Finding(subject=check.subject, level="ok", words=redact(words))


# Checks of this host: Python, disk, shared memory, limits, ports, load.


MIN_DISK_BYTES, LOW_DISK_BYTES = 200 << 20, 5 << 30
"""Free disk space below which a sweep fails, and below which it may fail."""
LOW_SHM_BYTES = 1 << 30
MIN_FILES = 1024
LOW_MEMORY_BYTES = 2 << 30
LOAD_WINDOW_S = load_watch.MIN_WINDOW_S + 0.2
STRAY_MODULES = ("orchestrator", "cluster", "trials", "configs")


def python_version() -> str:
    """The interpreter, and whether our packages are imported from where they are installed."""
    version = platform.python_version()
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        raise TroubleError(f"Python {version}", "Use Python 3.11, 3.12 or 3.13.", "fail")
    own = Path(__file__).resolve().parents[1]
    if own in (Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry):
        return f"{version}, {sys.executable}; tune-cluster from PYTHONPATH, {own}"
    return f"{version}, {sys.executable}"


def search_path() -> str:
    """Whether folders on PYTHONPATH hide our packages."""
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in os.environ else []:
        folder = Path(entry or ".").resolve()
        if folder == Path(__file__).resolve().parents[1]:
            break
        found = [name for name in STRAY_MODULES if (folder / name).is_dir() or (folder / f"{name}.py").is_file()]
        if found:
            words = f"PYTHONPATH contains {folder}, where {', '.join(found)} hides a package of tune-cluster"
            raise TroubleError(words, f"Remove {entry or 'the empty entry'} from PYTHONPATH.", "fail")
    return "PYTHONPATH hides no packages of tune-cluster"


def home_disk(home: Path) -> str:
    """Free space in the home, and whether it is writable."""
    folder = home if home.exists() else home.absolute().parent
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        remedy = "Make it writable, or choose another directory with --home."
        raise TroubleError(f"{folder} is not writable: {error.strerror}", remedy, "fail") from None
    free = shutil.disk_usage(folder).free
    words = f"{units.num_bytes(free)} free in {home}"
    if free < LOW_DISK_BYTES:
        remedy = "Free some space, or choose a directory on another disk with --home."
        raise TroubleError(words, remedy, "fail" if free < MIN_DISK_BYTES else "warn")
    return words


def shared_memory() -> str:
    """Free space in /dev/shm, which data loaders and NCCL use to pass data between processes."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        raise TroubleError("/dev/shm does not exist", "Mount it; data loaders with workers need it.") from None
    words = f"{units.num_bytes(usage.free)} of {units.num_bytes(usage.total)} free in /dev/shm"
    if usage.free < LOW_SHM_BYTES:
        raise TroubleError(words, f"NCCL and data loaders with workers need more: {SHARED_REMEDY}.")
    return words


def host_memory() -> str:
    """Host memory available now, within the control group's limit."""
    available = {line.split(":")[0]: line.split()[1] for line in read_or_empty("/proc/meminfo").splitlines() if line}
    free = min(int(available.get("MemAvailable", "0")) << 10, usable_memory_bytes())
    words = f"{units.num_bytes(free)} of {units.num_bytes(usable_memory_bytes())} available"
    if free < LOW_MEMORY_BYTES:
        raise TroubleError(words, "Stop other programs; every rank needs half a gigabyte plus its model.")
    return words


def file_limits() -> str:
    """This user's limits on files and processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    words = f"{soft} open files"
    if processes != resource.RLIM_INFINITY:
        words += f", {processes} processes"
    if soft < MIN_FILES:
        raise TroubleError(
            words, f"Run `ulimit -n {min(hard, 65536) if hard > 0 else 65536}` in the shell that submits."
        )
    return words


def port_range() -> str:
    """Whether loopback ports can be bound and reached: ranks and a private Ray use them."""
    with socket.socket() as server, socket.socket() as client:
        try:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(5.0)
            client.connect(server.getsockname())
        except OSError as error:
            remedy = "Allow connections over the loopback device. Is `lo` up?"
            raise TroubleError(f"127.0.0.1 cannot connect to itself: {error}", remedy, "fail") from None
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        remedy = "Add this host's name to /etc/hosts; ranks on other nodes must resolve it."
        raise TroubleError(f"the host name {socket.gethostname()!r} does not resolve", remedy) from None
    return f"loopback works, {socket.gethostname()} resolves"


def host_clock() -> str:
    """Whether the clocks run at the same pace."""
    monotonic_s, real_s = time.monotonic(), time.time()
    time.sleep(0.5)
    passed_s, passed_real_s = time.monotonic() - monotonic_s, time.time() - real_s
    if passed_s <= 0 or abs(passed_real_s - passed_s) > 0.05:
        words = f"in {passed_s:.2f} s of the monotonic clock, the wall clock advanced by {passed_real_s:.2f} s"
        raise TroubleError(words, "Something steps the clock; let chrony or ntpd slew it.")
    return "monotonic clock and wall clock agree"


def machine_load() -> str:
    """CPU use of other programs, by the same measure and limits that mark trials as disturbed."""
    before = load_watch.sample_cpu()
    time.sleep(LOAD_WINDOW_S)
    found = load_watch.disturbance(platform.node(), before, load_watch.sample_cpu(), os.getpid())
    if found.is_disturbing:
        remedy = "Wait, or stop other programs: they slow down trials and distort measurements."
        raise TroubleError(disturbance_text(found), remedy)
    if found.foreign_cpu is None:
        return f"the kernel does not report the load; {num_usable_cores()} usable cores"
    return f"other programs use {found.foreign_cpu:.0%} of the {num_usable_cores()} usable cores"


# Checks of torch, its devices and collectives, and the driver.


TORCH_S = 90.0
"""How long importing torch may take on a loaded machine with cold disks."""
_LISTED = 3


_query_lock = threading.Lock()


def _probe() -> Mapping[str, Any]:
    """What torch reports about itself; queried once, by the first check that needs it.

    Raises:
        TroubleError: it cannot be imported.
    """
    with _query_lock:
        return _query()


@functools.cache
def _query() -> Mapping[str, Any]:
    """What torch reports, from a separate process: a broken driver can hang or kill it."""
    try:
        completed = subprocess.run(
            python_module("trials.torch_support"), capture_output=True, timeout=TORCH_S - 5, check=False
        )
    except subprocess.TimeoutExpired:
        raise TroubleError(
            "importing torch takes over a minute", "Check whether the driver hangs or the disk is slow.", "fail"
        ) from None
    if completed.returncode != 0:
        lines = completed.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {completed.returncode}"]
        raise TroubleError(f"torch cannot be imported: {lines[-1]}", REMEDY, "fail")
    answer: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return answer


def torch_version() -> str:
    """The version of torch, and whether it has everything that trials need."""
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
            f"{words}: trials work, but dry runs do not: {missing[0]} is missing", "Plan without them, or update torch."
        )
    tested = ".".join(map(str, TESTED))
    return words if found["version"].startswith(tested) else f"{words}; tested with {tested}"


def found_devices() -> str:
    """The devices for trials, whether torch sees the same as the driver, and whether the driver's tool is fast."""
    node = _node()
    if node.device_kind == "cpu":
        if hides := hidden():
            raise TroubleError(f"{hides}: trials run on CPU cores", "Unset it, unless this is intended.")
        if Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
            remedy = "Check the output of nvidia-smi; in a container, use --gpus all."
            raise TroubleError("nvidia-smi lists no GPU, although a driver or its tools are installed", remedy)
        return f"{node.num_devices} CPU cores ({node.device_name}), no GPU"
    words = f"{node.num_devices} x {node.device_name}, {units.num_bytes(node.device_memory_bytes)} each"
    _check_torch(node, words)
    if node.device_kind == "cuda" and _is_slow():
        raise TroubleError(f"{words}; persistence mode is off: every query initializes the GPUs again", _PERSISTENCE)
    return words


_PERSISTENCE = "Run `nvidia-smi -pm 1` or nvidia-persistenced."


def _node() -> Node:
    try:
        return discover_node()
    except DeviceError as error:
        raise TroubleError(str(error), "Fix the driver, or set cluster.device: cpu to train on CPU cores.") from None


def _check_torch(node: Node, words: str) -> None:
    """Reject a torch that was built for other devices, or sees fewer."""
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
    "npu": "Install the torch_npu release for this torch, and source CANN's set_env.sh.",
}


def _is_slow() -> bool:
    try:
        return discovery.is_persistent() is False
    except DeviceQueryError:
        return False


def rank_environment() -> str:
    """Default environment variables of ranks on this host, and the host's overrides."""
    found = defaults_of(_node().device_kind, num_nodes=1)
    words = [f"{one.name}={os.environ.get(one.name, one.value)}" for one in found]
    own = [one.name for one in found if one.name in os.environ]
    return " ".join(words) + (f"; {', '.join(own)} set by this host" if own else "")


def driver_mode() -> str:
    """The GPU driver's version; figures of sweeps are comparable only for the same one."""
    path = Path("/sys/module/nvidia/version")
    if path.exists():
        return f"NVIDIA {path.read_text(encoding='ascii').strip()}"
    kind = _node().device_kind
    return (
        "not installed; there is no GPU that requires one" if kind == "cpu" else f"not reported by the kernel ({kind})"
    )


def working_collectives() -> str:
    """NCCL for GPUs, HCCL for NPUs, gloo for CPU cores."""
    if installed_version() is None:
        raise TroubleError("unknown without torch", REMEDY, "fail")
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
            "this torch has no gloo",
            "Install a standard build of torch; ranks on CPUs communicate through gloo.",
            "fail",
        )
    return "gloo"


# Checks of services: Ray and the MLflow store.


RAY_S = 75.0
"""How long a Ray cluster may take to list its nodes."""
STORE_S = 20.0
MAX_SKEW_S = 5.0
_REVISION = re.compile(r"^(down_)?revision\b[^=]*=\s*[\"']([0-9a-f]+)[\"']", re.MULTILINE)


def ray_package(needed: bool) -> str:
    """The installed Ray; sweeps of kind local and simulated need none."""
    try:
        return f"Ray {metadata.version('ray')}"
    except metadata.PackageNotFoundError:
        remedy = "Run `pip install 'ray[default]'`, or use cluster: {kind: local}."
        raise TroubleError("Ray is not installed", remedy, "fail" if needed else "warn") from None


def ray_cluster(address: str | None) -> str:
    """Whether the Ray cluster responds, and its resources."""
    if address is None:
        return "no address: a sweep starts a private Ray on this host; use --address to check a running cluster"
    from cluster.base import ClusterError
    from cluster.ray.leases import survey

    try:
        hosts = survey(address, timeout_s=RAY_S - 10)
    except ClusterError as error:
        raise TroubleError(str(error), "See docs/service.md for how to start one.", "fail") from None
    gpus, cpus = sum(host.num_gpus for host in hosts), sum(host.num_cpus for host in hosts)
    kinds = ", ".join(sorted({host.accelerator for host in hosts if host.accelerator}))
    return f"{address}: {len(hosts)} nodes, {gpus} GPUs{f' ({kinds})' if kinds else ''}, {cpus} CPUs"


def ray_jobs(address: str | None) -> str:
    """Whether the cluster accepts Ray Jobs, which run controllers, and the offset of its head's clock."""
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
        raise TroubleError(f"the dashboard does not respond: {error}", "Or submit with --foreground.") from None
    words = f"dashboard at {url}"
    if not date_header:
        return words
    skew_s = email.utils.parsedate_to_datetime(date_header).timestamp() - time.time()
    if abs(skew_s) > MAX_SKEW_S:
        raise TroubleError(f"{words}; its clock is off by {skew_s:+.0f} s", "Run chrony or ntpd on all hosts.")
    return f"{words}; its clock agrees with this host's"


def mlflow_store(uri: str) -> str:
    """Whether the MLflow store can be opened, and matches the installed version."""
    try:
        version = metadata.version("mlflow")
    except metadata.PackageNotFoundError:
        raise TroubleError("MLflow is not installed", "Run `pip install mlflow`.", "fail") from None
    if (path := sqlite_path(uri)) is not None:
        return f"MLflow {version}, {_sqlite_store(path, uri)}"
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/version", timeout=10) as answer:
            theirs = answer.read(100).decode(errors="replace").strip()
    except (OSError, ValueError) as error:
        remedy = "Start the server, or correct tracking.uri. Sweeps run without it, and are recorded once it is back."
        raise TroubleError(f"the MLflow server {uri} does not respond: {error}", remedy) from None
    if theirs.split(".")[0] != version.split(".")[0]:
        raise TroubleError(
            f"the server is MLflow {theirs}, this client {version}", "Install the same major version on both."
        )
    return f"MLflow {version}, server {theirs} at {uri}"


def _sqlite_store(path: Path, uri: str) -> str:
    """The state of a store in a file; only reads it."""
    if not path.exists():
        return f"a new store will be created at {path}"
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=5)) as db:
            row = db.execute("SELECT version_num FROM alembic_version").fetchone()
            (num_runs,) = db.execute("SELECT count(*) FROM runs").fetchone()
    except sqlite3.Error as error:
        remedy = "Move the file away; `tune-cluster resume` and `retry` write missing records to a new one."
        raise TroubleError(f"the store {path} cannot be read: {error}", remedy, "fail") from None
    newest, known = _revisions()
    if row and newest and row[0] not in known:
        remedy = "Install that version of MLflow, or set tracking.uri to another store."
        raise TroubleError(f"the store {path} was written by a newer MLflow than the installed one", remedy, "fail")
    if row and newest and row[0] != newest:
        remedy = f"Back it up, then run: mlflow db upgrade {uri}"
        raise TroubleError(f"the store {path} was written by an older MLflow than the installed one", remedy, "fail")
    return f"store {path} with {num_runs:,} runs"


def _revisions() -> tuple[str | None, frozenset[str]]:
    """The newest table revision of the installed MLflow, and all of them; read from its files, because importing it
    takes seconds."""
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


# The checks of a host, a sweep file or a Ray cluster, in the order shown.


ADDRESS_VARIABLE = "RAY_ADDRESS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """What to check in addition to this host."""

    home: Home
    file: Path | None = None
    address: str | None = None
    spec: SweepSpec | None = None
    """The sweep of the file; None without a valid file."""

    @property
    def ray_address(self) -> str | None:
        """The Ray cluster's: from the command line, else ``RAY_ADDRESS``, else the file; None: none."""
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
        """The MLflow store's: from the file, else the home's own."""
        in_file = self.spec.tracking.uri if self.spec is not None else None
        return in_file or self.home.default_tracking_uri


def make_patient(home: Home, file: Path | None, address: str | None) -> Patient:
    """What to check; an invalid file is a finding, not an error."""
    try:
        spec = load_sweep(file) if file is not None else None
    except ConfigError:
        spec = None
    return Patient(home=home, file=file, address=address, spec=spec)


QUIET = EnvironmentCheck(subject="load", sample_cpu=machine_load, level="warn")
"""The check that runs before all others, because it affects their imports."""


def checks(patient: Patient) -> list[EnvironmentCheck]:
    """All others. A simulated sweep needs neither torch nor devices."""
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
    """A check of what trials need: if they run on other hosts, a failure here is only a warning."""
    try:
        return look()
    except TroubleError as trouble:
        level = trouble.level if needed else "warn"
        raise TroubleError(trouble.words, trouble.remedy, level) from None


def _file(patient: Patient) -> str:
    """Whether the sweep file is valid, and its hardware exists."""
    assert patient.file is not None
    try:
        spec = patient.spec or load_sweep(patient.file)
        topology = known_topology(spec, patient.home) if patient.ray_address is None else None
    except (ConfigError, ClusterError) as error:
        raise TroubleError(str(error), "`tune-cluster plan FILE` shows details.", "fail") from None
    where = f" on {topology.label}" if topology is not None else ""
    return f"{spec.name}, {spec.cluster.kind}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """All findings, in the order shown."""

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
            return f"{units.count(self.num_failed, 'problem')} to fix before sweeps can run"
        return f"sweeps can run; {units.count(self.num_warned, 'warning')}" if self.num_warned else "everything is fine"

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``doctor --json``."""
        return {"usable": not self.num_failed, "checks": to_json(self.findings)}


def examine(home: Home, *, file: Path | None = None, address: str | None = None) -> Diagnosed:
    """Run all checks; takes seconds, or two minutes if nothing responds."""
    quiet = run_checks([QUIET])
    return Diagnosed(findings=(*run_checks(checks(make_patient(home, file, address))), *quiet))
