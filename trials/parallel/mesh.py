"""Who this rank is: its place in the gang and its device, the gang's process group, and the device mesh."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trials.accelerator.device import collectives_of
from trials.spec import AXES, Layout

SHARD_AXES = ("dp_shard", "cp")
"""Axes over which ZeRO shards: context-parallel peers hold the same parameters, so they take part."""

DATA_AXES = ("dp_replicate", *SHARD_AXES)
"""Axes over which gradients are averaged: each rank has the mean loss of its own samples and positions."""

HURRIED_AXES = ("cp", "tp")
"""Axes whose collectives are meant to run beside kernels that were launched after them, or with them."""

RENDEZVOUS_VARIABLE = "TUNE_CLUSTER_RENDEZVOUS"
"""Environment variable with an ``init_method`` URL (``file:///...`` or ``tcp://host:port``); without it, torchrun's."""

COLLECTIVE_TIMEOUT_VARIABLE = "TUNE_CLUSTER_COLLECTIVE_TIMEOUT_S"
"""Environment variable by which a launcher says how long a collective may take: longer than its own deadlines allow, as
waiting for a peer that compiles is no failure, and NCCL's watchdog would end the process before the launcher judges."""

COLLECTIVE_TIMEOUT_S = 1800.0
"""The last resort against a peer that hangs, where no launcher watches."""

LEAVES_LAST_VARIABLE = "TUNE_CLUSTER_LEAVES_LAST"
"""Environment variable by which a launcher says that it calls :func:`leave_gang` itself, after it has the result."""

LEAVE_S = 10.0
"""How long leaving the gang may take: a result that is finished must not be lost for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """This process's place in the gang, from torchrun's environment variables."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_env(cls) -> RankIdentity:
        env = os.environ
        return cls(
            rank=int(env.get("RANK", "0")),
            world_size=int(env.get("WORLD_SIZE", "1")),
            local_rank=int(env.get("LOCAL_RANK", "0")),
        )


@contextlib.contextmanager
def process_group(identity: RankIdentity, device: torch.device) -> Iterator[None]:
    """Join the gang, and leave it when the body succeeds; where whoever started the rank does so itself after it has
    heard the result (:data:`LEAVES_LAST_VARIABLE`), stay.

    After an error the group is left alone: destroying it could wait for collectives that no peer will join. The
    process is expected to exit, which is what tells the peers.
    """
    _init_process_group(identity, device)
    yield
    if LEAVES_LAST_VARIABLE not in os.environ:
        leave_gang()


def leave_gang(*, ends_process: bool = False) -> bool:
    """Leave the gang, if this process is a member of it, whatever its peers do; gives whether it could.

    Where destroying the process group hangs, that is left to the end of the process. On accelerators it always is if
    ``ends_process``: NCCL's destruction waits for all ranks, and the driver frees what a process had when it ends.
    """
    if not dist.is_initialized() or (ends_process and dist.get_backend() != "gloo"):
        return not dist.is_initialized()
    thread = threading.Thread(target=dist.destroy_process_group, name="leave-gang", daemon=True)
    thread.start()
    thread.join(LEAVE_S)
    if thread.is_alive():
        sys.stderr.write(f"the process group could not be destroyed within {LEAVE_S:g} s; it is left behind\n")
    return not thread.is_alive()


def _init_process_group(identity: RankIdentity, device: torch.device) -> None:
    backend = collectives_of(device)
    rendezvous = os.environ.get(RENDEZVOUS_VARIABLE)
    rank, world_size = identity.rank, identity.world_size
    store: Any = None
    url: str | None = rendezvous or "env://"
    if rendezvous is None and world_size == 1 and "MASTER_ADDR" not in os.environ:
        # Alone there is nobody to meet.
        store, url = dist.HashStore(), None  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, init_method=url, store=store, rank=rank, world_size=world_size, timeout=_collective_timeout()
    )


def _collective_timeout() -> datetime.timedelta:
    return datetime.timedelta(seconds=float(os.environ.get(COLLECTIVE_TIMEOUT_VARIABLE, COLLECTIVE_TIMEOUT_S)))


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh | None:
    """Mesh over the axes of degree above 1, outer to inner; None for a single rank.

    Axes of degree 1 are left out because every axis costs a process group to connect. The flattened meshes that the
    layout needs are made here too, as making one is a collective operation of the whole gang.
    """
    degrees = {axis: getattr(layout, axis) for axis in AXES if getattr(layout, axis) > 1}
    if not degrees:
        return None
    mesh = init_device_mesh(
        device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees), **_group_options(tuple(degrees))
    )
    if layout.zero_stage > 0:
        flat_mesh(mesh, SHARD_AXES)
    if layout.dp * layout.cp > 1 and (layout.zero_stage <= 1 or layout.shard_embedding):
        flat_mesh(mesh, DATA_AXES)
    return mesh


def _group_options(axes: Sequence[str]) -> dict[str, Any]:
    """What ``init_device_mesh`` is told about the groups of ``axes``: with NCCL, which of them run on streams of high
    priority. A matmul that is ready at the same time would otherwise take every multiprocessor first, and the
    collective that it is to hide would begin when it ends. Nothing for other backends, and before torch 2.8, which
    cannot be told.
    """
    hurried = [axis for axis in axes if axis in HURRIED_AXES]
    takes_options = "backend_override" in inspect.signature(init_device_mesh).parameters
    if not hurried or not takes_options or dist.get_backend() != "nccl":
        return {}
    return {"backend_override": {axis: _hurried_options() for axis in hurried}}


def _hurried_options() -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # A mesh takes the time-out of such options, not the gang's.
    options._timeout = _collective_timeout()
    return options


def flat_mesh(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    """The one-dimensional mesh over those of ``axes`` that ``mesh`` has, at least one."""
    present = _present(mesh, axes)
    if len(present) == 1:
        return mesh[present[0]]
    # Gives the same mesh, without connecting anything, when asked again.
    return mesh[present]._flatten("_".join(present))


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Where FSDP shards, ``[dp_shard * cp]``; with replication around it, ``[dp_replicate, dp_shard * cp]``."""
    shards = flat_mesh(mesh, SHARD_AXES)
    if not _present(mesh, ("dp_replicate",)):
        return shards
    return DeviceMesh._concatenate([mesh["dp_replicate"], shards])


def _present(mesh: DeviceMesh, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis in (mesh.mesh_dim_names or ()))
