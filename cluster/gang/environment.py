"""The environment in which ranks start: torchrun's variables, the rendezvous, and a few of our own.

Programs find each other through ``MASTER_ADDR`` and ``MASTER_PORT`` as under torchrun. Built-in runners meet at
``TUNE_CLUSTER_RENDEZVOUS``, on one node a file: unlike a port, no other process can take it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from cluster.gang.messages import NodeLaunch, RankSlot
from trials.accelerator.kinds import FAMILIES, DeviceKind
from trials.files import make_private_folder
from trials.reports import FOLDER
from trials.script.command import CACHES

# Environment variables of ranks, unless ``cluster.env`` or the host sets them: each with its reason.
#
# What a library determines well by itself is left to it: above all NCCL's choice of InfiniBand devices and algorithms.


NUMA_VARIABLE = "TUNE_CLUSTER_NUMA"
"""``off`` lets ranks use all cores."""
INTERFACE = "{interface}"
"""Placeholder in a value: the network interface by which other nodes reach this one."""
PATIENCE = "{patience}"
"""Placeholder in a value: the sum of the gang's deadlines and a margin, in seconds, within the bounds."""
_NVIDIA_LIKE: tuple[DeviceKind, ...] = ("cuda", "rocm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """Default of one variable."""

    name: str
    value: str
    reason: str
    kinds: tuple[DeviceKind, ...] = ()
    """Kinds of devices that it applies to; empty: all."""
    several_nodes: bool | None = None
    """True: only gangs on several nodes; False: only those on one; None: all."""
    is_set_here: bool = True
    """Whether :func:`default_env` sets it; else the rank applies it when it starts."""
    synonyms: tuple[str, ...] = ()
    """Other names of the variable: a value under any of them replaces the default."""
    bounds: tuple[int, int] | None = None
    """Bounds that the library accepts, in seconds; None: none."""

    def applies(self, kind: DeviceKind, num_nodes: int) -> bool:
        """Whether it applies to a gang with this kind of device on ``num_nodes`` nodes."""
        fits_nodes = self.several_nodes is None or self.several_nodes == (num_nodes > 1)
        return fits_nodes and (not self.kinds or kind in self.kinds)


DEFAULTS: tuple[Default, ...] = (
    Default(
        name="GLOO_SOCKET_IFNAME",
        value="lo",
        reason="ranks of one host connect over loopback, regardless of what its name resolves to",
        several_nodes=False,
    ),
    Default(
        name="GLOO_SOCKET_IFNAME",
        value=INTERFACE,
        reason="gloo would use the interface that the host name resolves to, often loopback or docker0",
        several_nodes=True,
    ),
    Default(
        name="NCCL_SOCKET_IFNAME",
        value=f"={INTERFACE}",
        reason="NCCL would use the first interface that is not lo or docker, possibly one that reaches no other node",
        kinds=_NVIDIA_LIKE,
        several_nodes=True,
    ),
    Default(
        name="HCCL_SOCKET_IFNAME",
        value=f"={INTERFACE}",
        reason="HCCL uses the interface through which the nodes reach each other",
        kinds=("npu",),
        several_nodes=True,
    ),
    Default(
        name="NCCL_DEBUG",
        value="WARN",
        reason="logs network and driver errors, which explain failures",
        kinds=_NVIDIA_LIKE,
    ),
    Default(
        name="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        value=PATIENCE,
        reason="NCCL's monitor would kill a rank that waits for a peer within the deadlines of the gang, which "
        "detects hangs itself",
        kinds=_NVIDIA_LIKE,
    ),
    Default(
        name="TORCH_NCCL_ENABLE_TIMING",
        value="1",
        reason="distinguishes a device that hangs in a kernel from those that wait for it; costs one more event "
        "per collective",
        kinds=_NVIDIA_LIKE,
        synonyms=("NCCL_ENABLE_TIMING",),
    ),
    Default(
        name="TORCH_NCCL_DUMP_ON_TIMEOUT",
        value="1",
        reason="if torch leaves it off, NCCL checks only once per heartbeat whether a record is requested",
        kinds=_NVIDIA_LIKE,
        synonyms=("TORCH_FR_DUMP_ON_TIMEOUT",),
    ),
    Default(
        name="TORCH_FR_BUFFER_SIZE",
        value="2000",
        reason="the last collectives in the flight recorder show which rank is behind when a gang hangs",
        kinds=_NVIDIA_LIKE,
        is_set_here=False,
    ),
    Default(
        name="TORCH_HCCL_TRACE_BUFFER_SIZE",
        value="2000",
        reason="the same for HCCL, whose recorder is off by default",
        kinds=("npu",),
        is_set_here=False,
    ),
    Default(
        name="HCCL_CONNECT_TIMEOUT",
        value=PATIENCE,
        reason="HCCL would give up after 120 s on a peer that still loads or compiles; the maximum is 7200 s",
        kinds=("npu",),
        bounds=(120, 7200),
    ),
    Default(
        name="HCCL_EXEC_TIMEOUT",
        value=PATIENCE,
        reason="HCCL would abort a collective after half an hour, regardless of the deadlines; the maximum is 17340 s",
        kinds=("npu",),
        bounds=(68, 17340),
    ),
    Default(
        name="PYTORCH_CUDA_ALLOC_CONF",
        value="expandable_segments:True",
        reason="lets segments grow; otherwise, sizes that vary from step to step fragment memory",
        kinds=("cuda",),
        is_set_here=False,
    ),
    Default(
        name=NUMA_VARIABLE,
        value="on",
        reason="on hosts with several sockets, a rank uses the cores, and so the memory, near its device; "
        "off: all cores",
        kinds=("cuda", "rocm", "xpu", "npu"),
    ),
)


def defaults_of(kind: DeviceKind, num_nodes: int) -> tuple[Default, ...]:
    """Return the defaults for gangs with this kind of device on ``num_nodes`` nodes."""
    return tuple(default for default in DEFAULTS if default.applies(kind, num_nodes))


def default_env(
    kind: DeviceKind,
    num_nodes: int,
    interface: str | None,
    *,
    patience_s: int = 1800,
    host: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return the defaults of ranks on a host whose environment does not set them under any name.

    Args:
        interface: network interface by which other nodes reach this one; None if unknown.
        patience_s: longest time that a gang's deadlines allow, in seconds.
    """
    found = {}
    for default in defaults_of(kind, num_nodes):
        is_known = INTERFACE not in default.value or interface is not None
        if default.is_set_here and is_known and not {default.name, *default.synonyms} & host.keys():
            least_s, most_s = default.bounds or (patience_s, patience_s)
            seconds = str(min(max(patience_s, least_s), most_s))
            found[default.name] = default.value.replace(INTERFACE, interface or "").replace(PATIENCE, seconds)
    return found


LOOPBACK = "127.0.0.1"
RENDEZVOUS = "TUNE_CLUSTER_RENDEZVOUS"
"""Rendezvous of ranks that are started again after those of the trial."""
PORTS = range(20000, 32000)
"""Ports for rendezvous: below those of Linux's outgoing connections, which could take one meanwhile."""
MAX_TRIES = 50
TIMEOUT_MARGIN_S = 120.0
"""Margin by which collectives wait longer than the sum of the deadlines, in seconds."""
MAX_TIMEOUT_S = 7 * 86400.0
"""Longest time-out, in seconds. In milliseconds it still fits 32 bits."""
CACHE_FOLDER = "cache-{node}"
"""Folder for compilers' caches. Shared by all attempts of a lease on one node."""
CACHE_DAYS = 30
"""Age in days from which caches left by agents that were killed are removed."""
_OWNED: Mapping[str, str] = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "the launcher of the ranks"),
    **dict.fromkeys(("GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "the launcher of the ranks"),
    **dict.fromkeys(("NNODES", "NODE_RANK", "NPROC_PER_NODE"), "the launcher of the ranks"),
    **{family.visible_variable: "the placement of ranks" for family in FAMILIES.values() if family.visible_variable},
    **{name: "the placement of ranks" for family in FAMILIES.values() for name in family.order_variables},
}
_OWNED_PREFIXES = ("ROLE_", "TORCHELASTIC_", "TUNE_CLUSTER_")


def owner_of(name: str) -> str | None:
    """Return what sets this variable on every rank, so that users may not; None if users may set it."""
    if name in _OWNED:
        return _OWNED[name]
    if name == NUMA_VARIABLE:
        return None
    return "tune-cluster or torchrun" if name.startswith(_OWNED_PREFIXES) else None


def single_node_env(directory: str) -> dict[str, str]:
    """Return the environment of ranks on one node: they meet at a file."""
    folder = Path(directory)
    return {RENDEZVOUS: (folder / "rendezvous").as_uri()}


def several_nodes_env(address: str, port: int) -> dict[str, str]:
    """Return the environment of ranks on several nodes: they meet at rank 0's TCP store on the first node."""
    host = f"[{address}]" if ":" in address else address
    return {
        RENDEZVOUS: f"tcp://{host}:{port}",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def with_master(launch: NodeLaunch) -> NodeLaunch:
    """Return the launch with a free rendezvous, unless it has one already."""
    if "MASTER_PORT" in launch.env:
        return launch
    return replace(launch, env={"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), **launch.env})


def free_port() -> int:
    """Return a TCP port of this host that is free now. It may be taken before it is used."""
    chance = random.SystemRandom()  # other generators draw the same in all processes forked from one
    for port in [*(chance.choice(PORTS) for _ in range(MAX_TRIES)), 0]:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    raise OSError("no TCP port is free on this host")


def cache_folder(workdir: Path, node: str) -> Path:
    """Return the folder of compilers' caches on ``node`` for the attempts in ``workdir``.

    It is on the node's own disk, in the folder for temporary files: Inductor and Triton write thousands of small files
    and locks, which the file system of a work folder shared by all nodes would serve slowly. It is in ``workdir`` if
    that folder cannot be written, or belongs to another user.
    """
    name = CACHE_FOLDER.format(node=node)
    base = local_caches()
    if base is None:
        return workdir / name
    return base / f"{hashlib.blake2b(str(workdir).encode(), digest_size=8).hexdigest()}-{name}"


def local_caches() -> Path | None:
    """Return this user's private folder for caches on the node's own disk; None if there is none."""
    base = Path(tempfile.gettempdir()) / f"tune-cluster-{os.getuid()}"
    with contextlib.suppress(OSError):
        found = make_private_folder(base).lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
        return base if is_own and os.access(base, os.W_OK | os.X_OK) else None
    return None


def remove_old_caches() -> None:
    """Remove caches that agents left more than :data:`CACHE_DAYS` days ago because they were killed."""
    base = local_caches()
    for folder in base.glob(f"*-{CACHE_FOLDER.format(node='*')}") if base is not None else ():
        with contextlib.suppress(OSError):
            if time.time() - folder.lstat().st_mtime > CACHE_DAYS * 86400:
                shutil.rmtree(folder, ignore_errors=True)


def rank_folder(launch: NodeLaunch) -> Path:
    """Return the attempt's folder for files shared by one node's ranks: nodes may share a file system."""
    directory = Path(launch.directory)
    return directory if launch.num_nodes == 1 else directory / f"node{launch.node_rank}"


def _patience_s(launch: NodeLaunch) -> int:
    """Return how long collectives, and NCCL's watchdog monitor, must wait so as not to give up while the gang is within
    its deadlines: the warden finds and judges hangs."""
    deadlines = launch.deadlines
    most_s = deadlines.starting_s + deadlines.warmup_s + deadlines.measuring_s + deadlines.compile_s
    return int(min(most_s, MAX_TIMEOUT_S - TIMEOUT_MARGIN_S) + TIMEOUT_MARGIN_S)


def user_env(launch: NodeLaunch) -> dict[str, str]:
    """Return the environment that overrides the defaults: the node's, the launch's, and the sweep file's for a user's
    program."""
    pairs = launch.spec.get("env", ()) if launch.is_script else ()
    return {**os.environ, **launch.env, **{pair[0]: pair[1] for pair in pairs if len(pair) == 2}}


def rank_env(launch: NodeLaunch, slot: RankSlot) -> dict[str, str]:
    """Return one rank's additions to the node's environment, which overrides the defaults. The launch's variables
    override everything."""
    patience_s, host = _patience_s(launch), user_env(launch)
    return {
        **default_env(launch.device_kind, launch.num_nodes, launch.interface, patience_s=patience_s, host=host),
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(len(launch.slots)),
        "GROUP_RANK": str(launch.node_rank),
        "GROUP_WORLD_SIZE": str(launch.num_nodes),
        "OMP_NUM_THREADS": str(launch.num_threads),
        "TUNE_CLUSTER_ATTEMPT_DIR": str(rank_folder(launch)),
        "TUNE_CLUSTER_NUM_DEVICES": str(len(slot.devices)),
        **_caches(launch),
        "TUNE_CLUSTER_COLLECTIVE_TIMEOUT_S": str(patience_s),
        "TUNE_CLUSTER_LEAVES_LAST": "1",  # a hang in tear-down must not lose a result
        **launch.env,
    }


def _caches(launch: NodeLaunch) -> dict[str, str]:
    """Return the folders of caches that attempts share. Compilers' caches exclude the user's runs and other sweeps.
    :mod:`trials.script` gives user programs their folders."""
    folder = cache_folder(Path(launch.directory).parent, launch.node)
    compilers = {} if launch.is_script else {name: str(folder / beneath) for name, beneath in CACHES.items()}
    return {"TUNE_CLUSTER_CACHE_DIR": str(folder), **compilers}


# Transfer of an attempt's files from the node where a rank wrote them to the controller's host.
#
# Ranks write them to the folder ``profile`` in the attempt's folder. On the controller's own file system no transfer is
# needed. Elsewhere, the node's agent sends them in pieces before it reports the gang as gone, so they have arrived when
# the controller receives the end. Both sides check the names, and follow no links.


logger = logging.getLogger(__name__)

MAX_BYTES_PER_RANK = 64 << 20
"""Most bytes of a rank's files in total. A rank's files stay on its node if they exceed it."""
PIECE_BYTES = 4 << 20
"""Most bytes of a file per message."""
_NAME = re.compile(r"rank(\d{1,7})\.[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
"""Names of transferred files: start with the rank's number; no separators, not hidden, no path outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePiece:
    """A piece of a file. The pieces of a file are sent in order."""

    attempt_id: str
    token: str
    name: str
    offset: int
    data: bytes
    is_last: bool


class HomeMark:
    """A marker file in the controller's folder. An agent that finds it shares the controller's file system."""

    def __init__(self, workdir: Path) -> None:
        self.name = f".home-{uuid4().hex}"
        for left in make_private_folder(workdir).glob(".home-*"):  # left by a killed controller
            left.unlink(missing_ok=True)
        self._path = workdir / self.name
        self._path.touch(mode=0o600)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)

    @staticmethod
    def is_home(workdir: Path, name: str) -> bool:
        return (workdir / name).is_file()


def pieces(directory: Path, attempt_id: str, token: str, slots: tuple[RankSlot, ...]) -> Iterator[FilePiece]:
    """Yield the files of the ranks in ``slots`` from an attempt's folder, piece by piece."""
    for slot in slots:
        files = _files_of(directory / FOLDER, slot.rank)
        size = sum(num_bytes for _, num_bytes in files)
        if size > MAX_BYTES_PER_RANK:
            logger.warning(
                "the files of rank %d stay in %s: %d MiB, more than the limit of %d MiB for transfers",
                *(slot.rank, directory / FOLDER, size >> 20, MAX_BYTES_PER_RANK >> 20),
            )
            continue
        for path, num_bytes in files:
            try:
                yield from _pieces_of(path, num_bytes, attempt_id, token)
            except OSError as error:
                logger.warning("%s is not transferred: %s", path, error)


def _files_of(folder: Path, rank: int) -> list[tuple[Path, int]]:
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted(folder.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match and int(match[1]) == rank and stat.S_ISREG((status := path.lstat()).st_mode):
                found.append((path, status.st_size))
    return found


def _pieces_of(path: Path, num_bytes: int, attempt_id: str, token: str) -> Iterator[FilePiece]:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        for offset in range(0, max(1, num_bytes), PIECE_BYTES):
            data = file.read(min(PIECE_BYTES, num_bytes - offset))
            is_last = offset + PIECE_BYTES >= num_bytes
            yield FilePiece(
                attempt_id=attempt_id, token=token, name=path.name, offset=offset, data=data, is_last=is_last
            )


class FileReceiver:
    """Writes transferred files below ``workdir``. A file is there as a whole or not at all."""

    def __init__(self, workdir: Path) -> None:
        self._workdir = workdir
        self._received: dict[tuple[str, str], int] = {}
        """Bytes received so far, by attempt and rank."""

    def take(self, piece: FilePiece) -> None:
        """Add a piece of a file of a known attempt. Invalid pieces are dropped with a warning."""
        match = _NAME.fullmatch(piece.name)
        if match is None:
            logger.warning("a file of attempt %s is refused because of its name: %.100r", piece.attempt_id, piece.name)
            return
        key = piece.attempt_id, match[1]
        self._received[key] = self._received.get(key, 0) + len(piece.data)
        if self._received[key] > MAX_BYTES_PER_RANK:
            logger.warning("attempt %s sends too much for rank %s", *key)
            return
        folder = self._workdir / piece.attempt_id / FOLDER
        try:
            self._write(folder, piece)
        except OSError as error:
            logger.warning("cannot write %s: %s", folder / piece.name, error)

    def _write(self, folder: Path, piece: FilePiece) -> None:
        temporary = make_private_folder(folder) / f".{piece.name}"
        if piece.offset == 0:
            temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if piece.offset == 0 else 0)
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            if file.seek(0, os.SEEK_END) != piece.offset:
                raise OSError(f"a piece is missing before byte {piece.offset}")
            file.write(piece.data)
        if piece.is_last:
            temporary.replace(folder / piece.name)
