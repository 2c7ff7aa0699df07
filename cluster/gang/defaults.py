"""Environment variables that ranks get where neither ``cluster.env`` nor their host says otherwise: each with its why.

What a library finds out well by itself is left to it: NCCL's choice of InfiniBand devices and algorithms above all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trials.accelerator.kinds import DeviceKind

NUMA_VARIABLE = "TUNE_CLUSTER_NUMA"
"""``off`` leaves ranks on all cores."""
INTERFACE = "{interface}"
"""Stands in a default's value for the network interface of the address by which other nodes reach this one."""
PATIENCE = "{patience}"
"""Stands there for the seconds that all deadlines of the gang allow together, and some more, within the bounds."""
_NVIDIA_LIKE: tuple[DeviceKind, ...] = ("cuda", "rocm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """One variable."""

    name: str
    value: str
    why: str
    kinds: tuple[DeviceKind, ...] = ()
    """Kinds of devices whose ranks get it; empty: all."""
    several_nodes: bool | None = None
    """Whether only gangs on several nodes get it, or only those on one; None: all."""
    is_set_here: bool = True
    """Whether :func:`default_env` gives it; else it is what the rank sees to when it starts."""
    synonyms: tuple[str, ...] = ()
    """Other names under which the same is read: whoever sets one of them has had his say."""
    bounds: tuple[int, int] | None = None
    """Least and most seconds that the library takes; None: any."""

    def applies(self, kind: DeviceKind, num_nodes: int) -> bool:
        """Whether ranks on this kind of device, in a gang on so many nodes, get it."""
        fits_nodes = self.several_nodes is None or self.several_nodes == (num_nodes > 1)
        return fits_nodes and (not self.kinds or kind in self.kinds)


DEFAULTS: tuple[Default, ...] = (
    Default(
        name="GLOO_SOCKET_IFNAME",
        value="lo",
        why="ranks of one host meet over loopback, whatever its name resolves to",
        several_nodes=False,
    ),
    Default(
        name="GLOO_SOCKET_IFNAME",
        value=INTERFACE,
        why="gloo would take the interface that the host's name resolves to, often loopback or docker0",
        several_nodes=True,
    ),
    Default(
        name="NCCL_SOCKET_IFNAME",
        value=f"={INTERFACE}",
        why="NCCL would take the first interface that is not lo or docker, maybe one that reaches no other node",
        kinds=_NVIDIA_LIKE,
        several_nodes=True,
    ),
    Default(
        name="HCCL_SOCKET_IFNAME",
        value=f"={INTERFACE}",
        why="HCCL meets over the interface by which the nodes reach each other",
        kinds=("npu",),
        several_nodes=True,
    ),
    Default(
        name="NCCL_DEBUG",
        value="WARN",
        why="errors of the network and the driver are named in the rank's log; without them a failure has no reason",
        kinds=_NVIDIA_LIKE,
    ),
    Default(
        name="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        value=PATIENCE,
        why="NCCL's monitor would end a rank that waits for a peer within the gang's deadlines; hangs are judged there",
        kinds=_NVIDIA_LIKE,
    ),
    Default(
        name="TORCH_NCCL_ENABLE_TIMING",
        value="1",
        why="tells a device that hangs in a kernel of its own from those that wait for it; one more event a collective",
        kinds=_NVIDIA_LIKE,
        synonyms=("NCCL_ENABLE_TIMING",),
    ),
    Default(
        name="TORCH_NCCL_DUMP_ON_TIMEOUT",
        value="1",
        why="where torch leaves it off, NCCL looks only once a heartbeat whether a record is asked for",
        kinds=_NVIDIA_LIKE,
        synonyms=("TORCH_FR_DUMP_ON_TIMEOUT",),
    ),
    Default(
        name="TORCH_FR_BUFFER_SIZE",
        value="2000",
        why="the flight recorder's last collectives tell which rank is behind when a gang hangs",
        kinds=_NVIDIA_LIKE,
        is_set_here=False,
    ),
    Default(
        name="TORCH_HCCL_TRACE_BUFFER_SIZE",
        value="2000",
        why="the same for HCCL, whose recorder is off without it",
        kinds=("npu",),
        is_set_here=False,
    ),
    Default(
        name="HCCL_CONNECT_TIMEOUT",
        value=PATIENCE,
        why="HCCL would give up after 120 s on a peer that still loads or compiles; it takes 7200 s at most",
        kinds=("npu",),
        bounds=(120, 7200),
    ),
    Default(
        name="HCCL_EXEC_TIMEOUT",
        value=PATIENCE,
        why="HCCL would end a collective after half an hour, whatever the deadlines; it takes 17340 s at most",
        kinds=("npu",),
        bounds=(68, 17340),
    ),
    Default(
        name="PYTORCH_CUDA_ALLOC_CONF",
        value="expandable_segments:True",
        why="segments that grow: else sizes that differ from step to step leave holes that nothing fits into",
        kinds=("cuda",),
        is_set_here=False,
    ),
    Default(
        name=NUMA_VARIABLE,
        value="on",
        why="a rank keeps to the cores, and so to the memory, near its device on hosts of several sockets; off: all",
        kinds=("cuda", "rocm", "xpu", "npu"),
    ),
)


def defaults_of(kind: DeviceKind, num_nodes: int) -> tuple[Default, ...]:
    """Those of ranks on this kind of device, in gangs on so many nodes."""
    return tuple(default for default in DEFAULTS if default.applies(kind, num_nodes))


def default_env(
    kind: DeviceKind,
    num_nodes: int,
    interface: str | None,
    *,
    patience_s: int = 1800,
    host: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The defaults of ranks on a host with this environment, which goes before them under whatever name.

    Args:
        interface: network interface by which other nodes reach this one; None where nobody knows.
        patience_s: how long a gang may take within its deadlines, in seconds.
    """
    found = {}
    for default in defaults_of(kind, num_nodes):
        is_known = INTERFACE not in default.value or interface is not None
        if default.is_set_here and is_known and not {default.name, *default.synonyms} & host.keys():
            least_s, most_s = default.bounds or (patience_s, patience_s)
            seconds = str(min(max(patience_s, least_s), most_s))
            found[default.name] = default.value.replace(INTERFACE, interface or "").replace(PATIENCE, seconds)
    return found
