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
from orchestrator.doctor.check import TroubleError

MIN_DISK_BYTES, LOW_DISK_BYTES = 200 << 20, 5 << 30
"""Free space of the home below which a sweep fails, and below which it may."""
LOW_SHM_BYTES = 1 << 30
MIN_FILES = 1024
LOW_MEMORY_BYTES = 2 << 30
BUSY = 0.25
"""Share of the cores that others may use before measurements suffer."""
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
    words = f"{_size(free)} free for {home}"
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
    words = f"{_size(usage.free)} of {_size(usage.total)} free in /dev/shm"
    if usage.free < LOW_SHM_BYTES:
        raise TroubleError(
            words, "In a container: --shm-size=8g or --ipc=host; on Kubernetes an emptyDir of medium Memory."
        )
    return words


def memory() -> str:
    """Host memory that is available now, within the control group's limit."""
    available = {line.split(":")[0]: line.split()[1] for line in read_or_empty("/proc/meminfo").splitlines() if line}
    free = min(int(available.get("MemAvailable", "0")) << 10, usable_memory_bytes())
    words = f"{_size(free)} of {_size(usable_memory_bytes())} available"
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
    """What other programs use of the cores, within a second: measurements on a busy machine are no measurements."""
    cores = os.cpu_count() or 1
    before, own = _busy_s(), time.process_time()
    began_s = time.monotonic()
    time.sleep(1.0)
    passed_s = time.monotonic() - began_s
    after = _busy_s()
    used = max(0.0, (after - before - (time.process_time() - own)) / passed_s)
    words = f"others use {used:.1f} of {cores} cores; {num_usable_cores()} may be used here"
    if used > BUSY * cores:
        raise TroubleError(
            words, "Wait, or end other programs: what is measured beside them is slower than it would be."
        )
    return words


def _busy_s() -> float:
    """Seconds that all cores together have worked since the host was started."""
    fields = [int(field) for field in read_or_empty("/proc/stat").partition("\n")[0].split()[1:]]
    idle = fields[3] + fields[4] if len(fields) > 4 else 0
    return (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
