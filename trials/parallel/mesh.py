"""The gang's device mesh, and shards of tensors on it."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from trials.accelerator.device import collectives_of, synchronize
from trials.models.model import Draws, Initial, Tile, TrainModel, key_of
from trials.spec import AXES, Layout

# ---- This rank's place in the gang and its device, the process group, and the device mesh

SHARD_AXES = ("dp_shard", "cp")
"""Axes over which ZeRO shards, including cp: context-parallel peers hold the same parameters."""

DATA_AXES = ("dp_replicate", *SHARD_AXES)
"""Axes over which gradients are averaged: each rank has the mean loss of its own samples and positions."""

TOKEN_AXES = (*DATA_AXES, "tp")
"""Axes along which ranks route different tokens through the same layers of experts."""

SEQUENCE_AXES = ("cp", "tp")
"""Axes along which ranks route different positions of the same sequences."""

HURRIED_AXES = ("cp", "ring", "ulysses", "tp")
"""Axes whose collectives should overlap kernels launched after or with them."""

RENDEZVOUS_VARIABLE = "TUNE_CLUSTER_RENDEZVOUS"
"""Environment variable with an ``init_method`` URL (``file:///...`` or ``tcp://host:port``); without it, torchrun's."""

COLLECTIVE_TIMEOUT_VARIABLE = "TUNE_CLUSTER_COLLECTIVE_TIMEOUT_S"
"""Environment variable with the launcher's limit for a collective, in seconds. It is longer than the launcher's own
deadlines: waiting for a peer that compiles is not a failure, but NCCL's watchdog would end the process first."""

COLLECTIVE_TIMEOUT_S = 1800.0
"""Last resort against a peer that hangs, for ranks without a launcher that monitors them."""

LEAVES_LAST_VARIABLE = "TUNE_CLUSTER_LEAVES_LAST"
"""Environment variable set by a launcher that calls :func:`leave_gang` itself, after it has the result."""

LEAVE_S = 10.0
"""Time limit for leaving the gang, which must not lose a finished result."""


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
    """Join the gang, and leave it when the body succeeds. Stay if the process that started the rank leaves itself after
    receiving the result (:data:`LEAVES_LAST_VARIABLE`).

    After an error the group is left alone: destroying it could wait for collectives that no peer will join. The process
    is expected to exit, by which the peers notice.
    """
    _init_process_group(identity, device)
    yield
    if LEAVES_LAST_VARIABLE not in os.environ:
        leave_gang()


def leave_gang(*, ends_process: bool = False) -> bool:
    """Leave the gang, if this process is a member, regardless of its peers; return whether that worked.

    If destroying the process group hangs, it is left to the end of the process. On accelerators it always is if
    ``ends_process``: NCCL's destruction waits for all ranks, and the driver frees a process's resources when it ends.
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
        # A single rank needs no rendezvous.
        store, url = dist.HashStore(), None  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, init_method=url, store=store, rank=rank, world_size=world_size, timeout=_collective_timeout()
    )


def _collective_timeout() -> datetime.timedelta:
    return datetime.timedelta(seconds=float(os.environ.get(COLLECTIVE_TIMEOUT_VARIABLE, COLLECTIVE_TIMEOUT_S)))


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh | None:
    """Build the mesh over the axes of degree above 1, outer to inner; None for a single rank.

    Axes of degree 1 are left out because every axis needs a process group. The flattened meshes for the layout are also
    created here, because that is a collective operation of the whole gang.
    """
    degrees = {axis: getattr(layout, axis) for axis in AXES if getattr(layout, axis) > 1}
    if not degrees:
        return None
    mesh = init_device_mesh(
        device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees), **_group_options(tuple(degrees))
    )
    for axes in _flattened(layout):
        flat_mesh(mesh, axes)
    if layout.ep > 1:
        setattr(mesh, _EXPERT_MESH, _build_expert_mesh(mesh, layout))
    if layout.cp_method == "hybrid":
        setattr(mesh, _SEQUENCE_MESH, _build_sequence_mesh(mesh, layout))
    return mesh


def connect(mesh: DeviceMesh | None, layout: Layout, device: torch.device, progress: Callable[[], None]) -> list[str]:
    """Connect all groups of the gang now, and return their names.

    NCCL creates a group's communicator in its first collective. With a thousand nodes that takes longer than a step,
    and would be part of the first one. ``progress`` is called after each group.
    """
    groups = [dist.group.WORLD]
    if mesh is not None:
        groups += [mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()]
        groups += [flat_mesh(mesh, axes).get_group() for axes in _flattened(layout)]
        if layout.ep > 1:
            groups += expert_mesh(mesh).get_all_groups()
        if layout.cp_method == "hybrid":
            groups += sequence_mesh(mesh).get_all_groups()
    names: list[str] = []
    for group in groups:
        assert group is not None
        if dist.get_world_size(group) > 1 and group.group_name not in names:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            synchronize(device)
            names.append(group.group_name)
            progress()
    return names


def _flattened(layout: Layout) -> Iterator[tuple[str, ...]]:
    """Yield the axes of the layout's flattened meshes."""
    if layout.zero_stage > 0:
        yield SHARD_AXES
    if layout.dp * layout.cp > 1 and (layout.zero_stage <= 1 or layout.shard_embedding):
        yield DATA_AXES
    if layout.ep > 1:
        yield TOKEN_AXES
    if layout.ep > 1 and layout.tp > 1:
        yield SEQUENCE_AXES


def _group_options(axes: Sequence[str]) -> dict[str, Any]:
    """Return the options for ``init_device_mesh`` about the groups of ``axes``: with NCCL, which of them use
    high-priority streams. Otherwise a matmul that is ready at the same time would first occupy every multiprocessor,
    and the collective that it should hide would start when it ends. Empty for other backends, and before torch 2.8,
    which lacks the option.
    """
    hurried = [axis for axis in axes if axis in HURRIED_AXES]
    takes_options = "backend_override" in inspect.signature(init_device_mesh).parameters
    if not hurried or not takes_options or dist.get_backend() != "nccl":
        return {}
    return {"backend_override": {axis: _hurried_options() for axis in hurried}}


def _hurried_options() -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # A mesh takes the time-out from these options, not from the gang.
    options._timeout = _collective_timeout()
    return options


def flat_mesh(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    """Return the one-dimensional mesh over those of ``axes`` that ``mesh`` has, at least one."""
    present = _present(mesh, axes)
    if len(present) == 1:
        return mesh[present[0]]
    # Repeated calls return the same mesh without new connections.
    return mesh[present]._flatten("_".join(present))


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for FSDP: ``[dp_shard * cp]`` or, with replication, ``[dp_replicate, dp_shard * cp]``."""
    shards = flat_mesh(mesh, SHARD_AXES)
    if not _present(mesh, ("dp_replicate",)):
        return shards
    return DeviceMesh._concatenate([mesh["dp_replicate"], shards])


_EXPERT_MESH = "tune_cluster_expert_mesh"
"""Attribute of the gang's mesh: torch, unlike for flattened meshes, would connect new groups at every call."""


def _build_expert_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    ranks = flat_mesh(mesh, (*(SHARD_AXES if layout.zero_stage else DATA_AXES), "tp"))
    return ranks._unflatten(0, (ranks.size() // layout.ep, layout.ep), ("edp", "ep"))


def expert_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks that share the experts as a mesh ``[edp, ep]``: neighbours along ``ep``, first those of tensor
    parallelism, hold different experts, those along ``edp`` the same ones or shards of them.

    They are all ranks that hold shards of the same weights, or without ZeRO all that hold the same weights.
    """
    found: DeviceMesh = getattr(mesh, _EXPERT_MESH)
    return found


def expert_shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for ZeRO of the experts: ``[edp]`` or, with replication, ``[dp_replicate, edp]``."""
    shards = expert_mesh(mesh)["edp"]
    if not _present(mesh, ("dp_replicate",)):
        return shards
    return DeviceMesh._concatenate([mesh["dp_replicate"], shards])


_SEQUENCE_MESH = "tune_cluster_sequence_mesh"
"""Attribute of the gang's mesh, for the same reason as ``_EXPERT_MESH``."""


def _build_sequence_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    axes = ("ring", "ulysses")
    sizes = (layout.cp // layout.ulysses_degree, layout.ulysses_degree)
    return mesh["cp"]._unflatten(0, sizes, axes, **_group_options(axes))


def sequence_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks of hybrid context parallelism as a mesh ``[ring, ulysses]``: neighbours exchange heads."""
    found: DeviceMesh = getattr(mesh, _SEQUENCE_MESH)
    return found


def _present(mesh: DeviceMesh, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis in (mesh.mesh_dim_names or ()))


# Differentiable collectives, each in two halves: start it, compute something else, finish it.
#
# The backward pass of a collective is another collective, with the halves swapped: the backward of finishing starts it,
# the backward of starting waits for it. Autograd runs nodes in the reverse order of their creation, so what was
# computed between the two in the forward pass also runs between the two in the backward pass. So one order of calls
# hides communication behind computation in both directions.
#
# All work along dimension 0 and use torch's functional collectives. Compiled graphs and fake process groups support
# these, and they return at once: NCCL runs them on a separate stream, gloo on its threads.


CollectiveKind = Literal["none", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

_BACKWARD: dict[CollectiveKind, CollectiveKind] = {
    "none": "all_reduce",
    "all_reduce": "none",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
}
"""The collective for the gradients. ``none`` gives each rank a copy, whose gradients must be summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group in the form that graphs can hold: by name."""

    name: str
    size: int
    rank: int


def group_of(mesh: DeviceMesh) -> Group:
    """Return the group of a one-dimensional mesh."""
    return Group(name=mesh.get_group().group_name, size=mesh.size(), rank=mesh.get_local_rank())


class Pending:
    """A started collective, to be finished once."""

    __slots__ = ("_halves", "_token")

    def __init__(self, token: Tensor, result: Tensor) -> None:
        self._token: Tensor | None = token
        self._halves: tuple[Tensor, Tensor] | None = (token, result)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Return the arguments of :func:`finish` on the first call; then None, so that the result can be freed."""
        halves, self._halves = self._halves, None
        return halves

    def take_token(self) -> Tensor:
        """Return what was sent, once. Its gradient may still be in flight when it arrives; it is awaited there."""
        token, self._token = self._token, None
        assert token is not None
        return token


Splits = tuple[list[int], list[int]]
"""Rows that an all-to-all sends to each rank, and rows that it receives from each."""


def start(kind: CollectiveKind, x: Tensor, group: Group, splits: Splits | None = None) -> Pending:
    """Start the collective on ``x`` and return at once. ``splits``: of an all-to-all with unequal parts."""
    return Pending(_AwaitGradient.apply(x), launch(kind, x.detach(), group.size, group.name, splits))  # type: ignore[no-untyped-call]


def finish(kind: CollectiveKind, halves: tuple[Tensor, Tensor], group: Group, splits: Splits | None = None) -> Tensor:
    """Wait for what :func:`start` started with the same further arguments, and return its result."""
    out: Tensor = _Finish.apply(*halves, kind, group.size, group.name, splits)  # type: ignore[no-untyped-call]
    return out


def communicate(kind: CollectiveKind, x: Tensor, group: Group, splits: Splits | None = None) -> Tensor:
    """Start and finish the collective at once."""
    halves = start(kind, x, group, splits).take()
    assert halves is not None
    return finish(kind, halves, group, splits)


def reduced(x: Tensor, operation: Literal["sum", "max"], group: Group) -> Tensor:
    """Return the sum or maximum of every rank's ``x``, without a gradient."""
    return wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), operation, group.name))


class _AwaitGradient(torch.autograd.Function):
    """Identity in the forward pass; waits for the gradient, which :class:`_Finish` or a projection left in flight."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return wait(grads[0])


class _Finish(torch.autograd.Function):
    """Waits for ``result``; the gradient flows to ``token``, which has the shape of what was sent."""

    @staticmethod
    def forward(
        ctx: Any,
        _token: Tensor,
        result: Tensor,
        kind: CollectiveKind,
        size: int,
        name: str,
        splits: Splits | None = None,
    ) -> Tensor:
        ctx.sent = (_BACKWARD[kind], size, name, splits and splits[::-1])
        return wait(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        kind, size, name, splits = ctx.sent
        return launch(kind, grads[0], size, name, splits), None, None, None, None, None


def launch(
    kind: CollectiveKind, x: Tensor, size: int, name: str, splits: Splits | None = None, *, is_fresh: bool = False
) -> Tensor:
    """Start a collective; the result must not be read before :func:`wait`.

    If ``x`` ``is_fresh``, it has no other readers, and its sum may overwrite it. Compilers find that out themselves;
    they support only operators without side effects on their arguments.
    """
    ops: Any = torch.ops._c10d_functional
    out: Tensor
    if kind == "all_reduce":
        all_reduce = ops.all_reduce_ if is_fresh and not torch.compiler.is_compiling() else ops.all_reduce
        out = all_reduce(x.contiguous(), "sum", name)
    elif kind == "all_gather":
        out = ops.all_gather_into_tensor(x.contiguous(), size, name)
    elif kind == "reduce_scatter":
        out = ops.reduce_scatter_tensor(x.contiguous(), "sum", size, name)
    elif kind == "all_to_all":
        lengths = [x.shape[0] // size] * size
        sent, received = splits or (lengths, lengths)
        out = ops.all_to_all_single(x.contiguous(), received, sent, name)
    else:
        out = x
    return out


def wait(x: Tensor) -> Tensor:
    """Wait for the collective that produces ``x``, if there is one."""
    out: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return out


# ---- The part of a tensor on this rank, and the plain name of a wrapped parameter
#
# DTensors know how they are split. Parameters of the local tensor-parallel engine are plain tensors on this rank but
# slices of larger ones over the tensor-parallel group, as recorded here.

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """This rank's slice: number ``index`` of ``num_shards`` equal ones along ``dim``."""

    dim: int
    index: int
    num_shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMap:
    """Splits made by the local tensor-parallel engine, by plain parameter name; empty for other engines."""

    shards: Mapping[str, LocalShard] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    """Parameters whose gradients are partial sums over the tensor-parallel group (norms with sequence parallelism)."""
    summed: Mapping[str, int] = field(default_factory=dict)
    """Parameters whose gradients are sums over this many ranks' tokens where averages are needed (experts)."""

    def with_(self, other: ShardMap) -> ShardMap:
        """Return the splits of both."""
        return ShardMap(
            shards={**self.shards, **other.shards},
            partial=self.partial | other.partial,
            summed={**self.summed, **other.summed},
        )


def local_part(tensor: Tensor) -> Tensor:
    """Return the rank's part of a distributed tensor; other tensors unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def stored_part(tensor: Tensor) -> Tensor:
    """Return the plain tensor with the rank's part; calls no operator, and waits for no collective."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def plain_name(name: str) -> str:
    """Return the parameter's name without the prefixes of recompute and compilation wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """This rank's part of one parameter of the whole model."""

    name: str
    size: torch.Size
    """Size of the whole parameter."""
    start: tuple[int, ...]
    """Where ``part`` starts in it."""
    part: Tensor
    """The rank's memory."""


def piece_of(name: str, parameter: Tensor, shard: LocalShard | None) -> Piece:
    """Describe which part of the whole parameter ``parameter`` is, for every kind of split.

    Args:
        shard: split by the local tensor-parallel engine; FSDP may have split the result further.
    """
    size, start = list(parameter.shape), list(_start_in(parameter))
    if shard is not None:
        start[shard.dim] += shard.index * size[shard.dim]
        size[shard.dim] *= shard.num_shards
    return Piece(name=name, size=torch.Size(size), start=tuple(start), part=stored_part(parameter))


def _start_in(tensor: Tensor) -> tuple[int, ...]:
    """Return where this rank's part starts in a distributed tensor; 0 for other tensors."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    return tuple(_first_index(tensor, dim) for dim in range(tensor.dim()))


def _first_index(tensor: DTensor, dim: int) -> int:
    """Return the first index along ``dim`` that this rank holds, found by splitting all indices in the same way."""
    # FSDP's strided shards are not ``Shard`` instances, but have its ``dim``.
    placements = [p if getattr(p, "dim", None) == dim else Replicate() for p in tensor.placements]
    if all(isinstance(placement, Replicate) for placement in placements):
        return 0
    shape = [-1 if other == dim else 1 for other in range(tensor.dim())]
    indices = torch.arange(tensor.shape[dim]).view(shape)
    # src_data_rank=None: every rank has all the indices, so none must be sent.
    held = distribute_tensor(indices, tensor.device_mesh, placements, src_data_rank=None).to_local().flatten().tolist()
    assert len(held) == stored_part(tensor).shape[dim]
    assert held == list(range(held[0], held[0] + len(held))) if held else True, "a rank holds neighbouring elements"
    return held[0] if held else 0


# Initial weights that do not depend on the layout.
#
# The whole tensors of a custom module are computed one at a time (:mod:`trials.models.deferred`), and each rank keeps
# its part. For built-in models:
#
# The global random stream would depend on build order and sharding, so every element is drawn from the parameter's name
# and the element's place in the whole (:mod:`trials.models.model`). A rank draws only what it holds, in place, and
# needs only a tile and temporaries in addition: some MiB on a CPU, less than 64 MiB elsewhere.


@torch.no_grad()
def init_parameters(model: TrainModel, seed: int, shard_map: ShardMap, perturbation: float = 0.0) -> None:
    """Fill the parameters of a model that has just left the meta device, sharded or not.

    Args:
        perturbation: see :attr:`trials.spec.TrialSpec.perturbation`.
    """
    parameters = dict(model.named_parameters())
    if not parameters:
        return
    draws = None if model.is_own else Draws(next(iter(parameters.values())).device)
    for wrapped_name, parameter in parameters.items():
        name = plain_name(wrapped_name)
        piece = piece_of(name, parameter, shard_map.shards.get(name))
        if draws is None:
            _copy_value(piece, model.value_of(name), seed, perturbation)
        else:
            fill(piece, draws, model.initial(name), seed, perturbation)
    model.forget_values()


@torch.no_grad()
def fill(piece: Piece, draws: Draws, initial: Initial, seed: int, perturbation: float = 0.0) -> None:
    """Give a piece of a parameter its initial values: fp32, rounded to the piece's type at the end."""
    if initial.std == 0.0 and not perturbation:
        piece.part.fill_(initial.mean)
        return
    for tile in draws.tiles(piece.part, piece.size, piece.start):
        _fill_tile(tile, piece.name, draws, initial, seed, perturbation)


def _fill_tile(tile: Tile, name: str, draws: Draws, initial: Initial, seed: int, perturbation: float) -> None:
    if initial.std == 0.0:
        values = torch.full(tile.rows.shape, initial.mean, device=tile.rows.device)
    else:
        values = draws.normal(key_of(seed, name), tile).mul_(initial.std).add_(initial.mean)
    if perturbation:
        values += values * _shares(draws, tile, name, perturbation, seed)
    tile.rows.copy_(values)


def _copy_value(piece: Piece, value: Tensor, seed: int, perturbation: float) -> None:
    """Give a piece of a custom module's parameter its part of the ``value`` of the whole."""
    if perturbation and value.is_floating_point():
        value = value.clone(memory_format=torch.contiguous_format)
        draws = Draws(value.device)
        for tile in draws.tiles(value, value.shape, (0,) * value.dim()):
            tile.rows.add_(tile.rows * _shares(draws, tile, piece.name, perturbation, seed))
    for dim, (start, length) in enumerate(zip(piece.start, piece.part.shape, strict=True)):
        value = value.narrow(dim, start, length)
    piece.part.copy_(value)


def _shares(draws: Draws, tile: Tile, name: str, perturbation: float, seed: int) -> Tensor:
    """Return the relative perturbation of a tile of parameter ``name``: uniform, at most ``perturbation``."""
    return draws.uniform(key_of(seed, name, "perturbed"), tile).mul_(perturbation)


# What this rank updates of the model, tensor by tensor, for every way of gradient reduction.


class HeldTensor(Protocol):
    """One plain tensor that this rank updates: its part of a parameter, or its slice of a bucket."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that it is a part of."""
        ...

    @property
    def num_replicas(self) -> int:
        """Number of ranks in the gang that hold the same elements."""
        ...

    @property
    def is_partial(self) -> bool:
        """Whether gradients arrive as partial sums over the tensor-parallel group."""
        ...

    def values(self) -> Tensor:
        """Return the elements, sharing memory with the model."""
        ...

    def gradient(self) -> Tensor | None:
        """Return their gradient, sharing memory with the step's; None if there is none."""
        ...

    def publish(self) -> None:
        """Start sending the new values to the other ranks that use them."""
        ...

    def wait_for_values(self) -> None:
        """Wait until all new values are here."""
        ...


class HeldParameter:
    """The rank's part of one parameter, which no other rank waits for."""

    def __init__(self, parameter: nn.Parameter, num_replicas: int = 1, *, is_partial: bool = False) -> None:
        self.parameters = (parameter,)
        self.num_replicas = num_replicas
        self.is_partial = is_partial
        self._parameter = parameter

    def values(self) -> Tensor:
        return local_part(self._parameter).detach()

    def gradient(self) -> Tensor | None:
        grad = self._parameter.grad
        return None if grad is None else local_part(grad)

    def publish(self) -> None:
        pass

    def wait_for_values(self) -> None:
        pass


def held_parameters(model: nn.Module, shard_map: ShardMap, layout: Layout) -> list[HeldParameter]:
    """Return all parameters of ``model``, each as a separate tensor."""
    held = []
    for wrapped_name, parameter in model.named_parameters():
        name = plain_name(wrapped_name)
        replicas = num_replicas(parameter, shard_map.shards.get(name), layout)
        held.append(HeldParameter(parameter, replicas, is_partial=name in shard_map.partial))
    return held


def num_replicas(parameter: nn.Parameter, shard: LocalShard | None, layout: Layout) -> int:
    """Count the ranks of the gang that hold the same elements of a parameter as this one."""
    num_shards = layout.pp * (1 if shard is None else shard.num_shards)
    if isinstance(parameter, DTensor):
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            num_shards *= 1 if isinstance(placement, Replicate) else size
    return layout.world_size // num_shards


def gradients_of(held: Sequence[HeldTensor]) -> list[Tensor]:
    """Return the existing gradients."""
    return [grad for one in held if (grad := one.gradient()) is not None]
