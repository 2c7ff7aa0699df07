"""Checks of this host: Python, disk, shared memory, limits, ports, load."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

from cluster.hardware.topology import num_usable_cores, read_or_empty, usable_memory_bytes
from cluster.node import cpu_load
from cluster.node.host_memory import SHARED_REMEDY
from orchestrator import units
from orchestrator.doctor.check import TroubleError
from orchestrator.report.words import disturbance_words

MIN_DISK_BYTES, LOW_DISK_BYTES = 200 << 20, 5 << 30
"""Free space of the home below which a sweep fails, and below which it may."""
LOW_SHM_BYTES = 1 << 30
MIN_FILES = 1024
LOW_MEMORY_BYTES = 2 << 30
LOAD_WINDOW_S = cpu_load.MIN_WINDOW_S + 0.2
STRAY_MODULES = ("orchestrator", "cluster", "trials", "configs")


def python() -> str:
    """The interpreter, and that our packages come from where they are installed."""
    version = platform.python_version()
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        raise TroubleError(f"Python {version}", "Use Python 3.11, 3.12 or 3.13.", "fail")
    own = Path(__file__).resolve().parents[2]
    if own in (Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry):
        return f"{version}, {sys.executable}; tune-cluster from PYTHONPATH, {own}"
    return f"{version}, {sys.executable}"


def search_path() -> str:
    """That PYTHONPATH does not put folders before our packages that hold something called like them."""
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in os.environ else []:
        folder = Path(entry or ".").resolve()
        if folder == Path(__file__).resolve().parents[2]:
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


def memory() -> str:
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


def ports() -> str:
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


def clock() -> str:
    """That the clocks run, at the same pace."""
    monotonic_s, real_s = time.monotonic(), time.time()
    time.sleep(0.5)
    passed_s, passed_real_s = time.monotonic() - monotonic_s, time.time() - real_s
    if passed_s <= 0 or abs(passed_real_s - passed_s) > 0.05:
        words = f"in {passed_s:.2f} s of the monotonic clock the time of day went on by {passed_real_s:.2f} s"
        raise TroubleError(words, "Something sets the clock; let chrony or ntpd slew it.")
    return "monotonic clock and time of day agree"


def load() -> str:
    """What other programs use of the cores, by the measure and the limits by which trials count as disturbed."""
    before = cpu_load.look()
    time.sleep(LOAD_WINDOW_S)
    found = cpu_load.disturbance(platform.node(), before, cpu_load.look(), os.getpid())
    if found.is_disturbing:
        remedy = "Wait, or end other programs: what is measured beside them is slower than it would be."
        raise TroubleError(disturbance_words(found), remedy)
    if found.foreign_cpu is None:
        return f"not told by the kernel; {num_usable_cores()} cores may be used here"
    return f"others use {found.foreign_cpu:.0%} of the {num_usable_cores()} cores that may be used here"
