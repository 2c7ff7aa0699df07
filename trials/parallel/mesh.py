"""The gang's device mesh, and the shards of tensors on it."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from trials.accelerator.device import collectives_of
from trials.models.model import Draws, Initial, Tile, TrainModel, key_of
from trials.spec import AXES, Layout

# ---- Who this rank is: its place in the gang and its device, the gang's process group, and the device mesh

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
    received the result (:data:`LEAVES_LAST_VARIABLE`), stay.

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
        # A single rank needs no rendezvous.
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


# Collectives that autograd sees, each in two halves: start it, compute something else, finish it.
#
# The backward pass of a collective is another one, and there the halves swap roles: the backward of finishing starts
# it, the backward of starting waits for it. Whatever was computed between the two in the forward pass then runs
# between the two in the backward pass, because autograd runs nodes in the reverse order of their creation. So one
# order of calls hides communication behind computation in both directions.
#
# All work along dimension 0 and go through torch's functional collectives, which compiled graphs and fake process
# groups know, and which return at once: with NCCL they run on a stream of their own, with gloo on its threads.


CollectiveKind = Literal["none", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

_BACKWARD: dict[CollectiveKind, CollectiveKind] = {
    "none": "all_reduce",
    "all_reduce": "none",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
}
"""The collective that gradients need. ``none`` hands each rank a copy, whose gradients are to be summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group as graphs can hold it: by name."""

    name: str
    size: int
    rank: int


def group_of(mesh: DeviceMesh) -> Group:
    """The group of a one-dimensional mesh."""
    return Group(name=mesh.get_group().group_name, size=mesh.size(), rank=mesh.get_local_rank())


class Pending:
    """A started collective, to be finished once."""

    __slots__ = ("_halves", "_token")

    def __init__(self, token: Tensor, result: Tensor) -> None:
        self._token: Tensor | None = token
        self._halves: tuple[Tensor, Tensor] | None = (token, result)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """What :func:`finish` needs, the first time; then None, so that nothing keeps the result alive."""
        halves, self._halves = self._halves, None
        return halves

    def take_token(self) -> Tensor:
        """What was sent, once. Its gradient may still be in flight when it comes: it is awaited there."""
        token, self._token = self._token, None
        assert token is not None
        return token


def start(kind: CollectiveKind, x: Tensor, group: Group) -> Pending:
    """Begin the collective on ``x`` and return at once."""
    return Pending(_AwaitGradient.apply(x), launch(kind, x.detach(), group.size, group.name))  # type: ignore[no-untyped-call]


def finish(kind: CollectiveKind, halves: tuple[Tensor, Tensor], group: Group) -> Tensor:
    """Wait for what :func:`start` began with the same ``kind`` and ``group``, and give its result."""
    out: Tensor = _Finish.apply(*halves, kind, group.size, group.name)  # type: ignore[no-untyped-call]
    return out


def communicate(kind: CollectiveKind, x: Tensor, group: Group) -> Tensor:
    """Start and finish the collective at once."""
    halves = start(kind, x, group).take()
    assert halves is not None
    return finish(kind, halves, group)


def reduced(x: Tensor, operation: Literal["sum", "max"], group: Group) -> Tensor:
    """Sum or maximum of every rank's ``x``, to which no gradient flows."""
    return wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), operation, group.name))


class _AwaitGradient(torch.autograd.Function):
    """Gives its input; waits for the gradient, which :class:`_Finish` or a projection has left in flight."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return wait(grads[0])


class _Finish(torch.autograd.Function):
    """Waits for ``result``; the gradient goes the way of ``token``, which has the shape of what was sent."""

    @staticmethod
    def forward(ctx: Any, _token: Tensor, result: Tensor, kind: CollectiveKind, size: int, name: str) -> Tensor:
        ctx.sent = (_BACKWARD[kind], size, name)
        return wait(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        kind, size, name = ctx.sent
        return launch(kind, grads[0], size, name), None, None, None, None


def launch(kind: CollectiveKind, x: Tensor, size: int, name: str, *, is_fresh: bool = False) -> Tensor:
    """Start a collective; the result must not be read before :func:`wait`.

    Where ``x`` ``is_fresh``, nobody else reads it, and its sum may take its place. Compilers, which know only operators
    that leave their arguments alone, find that out by themselves.
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
        out = ops.all_to_all_single(x.contiguous(), lengths, lengths, name)
    else:
        out = x
    return out


def wait(x: Tensor) -> Tensor:
    """Wait for the collective that makes ``x``, if there is one."""
    out: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return out


# ---- Tells which part of a tensor this rank holds, and the plain name of a parameter whatever wraps it
#
# DTensors say themselves how they are split. Parameters of the local tensor-parallel engine are plain tensors on this
# rank but slices of larger ones over the tensor-parallel group, as the values here say.

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """This rank's slice: number ``index`` of ``num_shards`` equal ones along ``dim``."""

    dim: int
    index: int
    num_shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMap:
    """What the local tensor-parallel engine did to a model, by plain parameter name; empty for everything else."""

    shards: Mapping[str, LocalShard] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    """Parameters whose gradients are partial sums over the tensor-parallel group (norms with sequence parallelism)."""


def local_part(tensor: Tensor) -> Tensor:
    """The rank's own part of a distributed tensor; other tensors as they are."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def stored_part(tensor: Tensor) -> Tensor:
    """The plain tensor that holds the rank's own part; calls no operator, and waits for no collective in flight."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def plain_name(name: str) -> str:
    """The parameter's name without what recompute and compile put in between."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What this rank holds of one parameter of the whole model."""

    name: str
    size: torch.Size
    """That of the whole parameter."""
    start: tuple[int, ...]
    """Where ``part`` begins in it."""
    part: Tensor
    """The rank's memory."""


def piece_of(name: str, parameter: Tensor, shard: LocalShard | None) -> Piece:
    """Tell which part of the whole parameter ``parameter`` is, however it is split.

    Args:
        shard: what the local tensor-parallel engine did to it; FSDP may have split the result further.
    """
    size, start = list(parameter.shape), list(_start_in(parameter))
    if shard is not None:
        start[shard.dim] += shard.index * size[shard.dim]
        size[shard.dim] *= shard.num_shards
    return Piece(name=name, size=torch.Size(size), start=tuple(start), part=stored_part(parameter))


def _start_in(tensor: Tensor) -> tuple[int, ...]:
    """Where this rank's part begins in a distributed tensor; at the beginning of one that is not."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    return tuple(_first_index(tensor, dim) for dim in range(tensor.dim()))


def _first_index(tensor: DTensor, dim: int) -> int:
    """First of the indices along ``dim`` that this rank holds, found by splitting all of them in the same way."""
    # FSDP's strided shards are no ``Shard``, but have its ``dim``.
    placements = [p if getattr(p, "dim", None) == dim else Replicate() for p in tensor.placements]
    if all(isinstance(placement, Replicate) for placement in placements):
        return 0
    shape = [-1 if other == dim else 1 for other in range(tensor.dim())]
    indices = torch.arange(tensor.shape[dim]).view(shape)
    # src_data_rank=None: every rank has all the indices, so none has to be sent.
    held = distribute_tensor(indices, tensor.device_mesh, placements, src_data_rank=None).to_local().flatten().tolist()
    assert len(held) == stored_part(tensor).shape[dim]
    assert held == list(range(held[0], held[0] + len(held))) if held else True, "a rank holds neighbouring elements"
    return held[0] if held else 0


# Fills a model with initial weights that do not depend on the layout.
#
# A module of the user's draws its own, before it is split, from one seed in every process. For models of ours:
#
# The global random stream depends on build order and sharding, so every element of a parameter is drawn by the
# parameter's name and its own place in the whole (:mod:`trials.models.model`). A rank draws what it holds where it
# holds it, and never has more than a tile and temporaries in addition: some MiB on a CPU, less than 64 MiB elsewhere.


@torch.no_grad()
def init_parameters(model: TrainModel, seed: int, shard_map: ShardMap, perturbation: float = 0.0) -> None:
    """Fill the parameters of a model that has just left the meta device, sharded or not.

    Args:
        perturbation: see :attr:`trials.spec.TrialSpec.perturbation`.
    """
    parameters = dict(model.named_parameters())
    if not parameters:
        return
    draws = Draws(next(iter(parameters.values())).device)
    for wrapped_name, parameter in parameters.items():
        name = plain_name(wrapped_name)
        piece = piece_of(name, parameter, shard_map.shards.get(name))
        fill(piece, draws, model.initial(name), seed, perturbation)


@torch.no_grad()
def fill(piece: Piece, draws: Draws, initial: Initial, seed: int, perturbation: float = 0.0) -> None:
    """Give a piece of a parameter its initial values: fp32, rounded to the piece's own type at the end."""
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


@torch.no_grad()
def perturb_parameters(model: TrainModel, seed: int, perturbation: float) -> None:
    """Move the weights of a model that has its values already, and is not split yet, off by a share of them."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.is_floating_point()}
    if not perturbation or not parameters:
        return
    draws = Draws(next(iter(parameters.values())).device)
    for name, parameter in parameters.items():
        values = parameter.contiguous()
        for tile in draws.tiles(values, values.shape, (0,) * values.dim()):
            tile.rows.add_(tile.rows * _shares(draws, tile, name, perturbation, seed))
        if values is not parameter:
            parameter.copy_(values)


def _shares(draws: Draws, tile: Tile, name: str, perturbation: float, seed: int) -> Tensor:
    """What a tile of parameter ``name`` is off by, relative to itself: uniform within ``perturbation`` of 0."""
    return draws.uniform(key_of(seed, name, "perturbed"), tile).mul_(perturbation)


# What this rank updates of the model, tensor by tensor, whoever reduces its gradients.


class HeldTensor(Protocol):
    """One plain tensor that this rank updates: its part of a parameter, or its slice of a bucket of them."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that it is a part of."""
        ...

    @property
    def num_replicas(self) -> int:
        """How many ranks of the gang hold the same elements."""
        ...

    @property
    def is_partial(self) -> bool:
        """Whether gradients arrive as partial sums over the tensor-parallel group."""
        ...

    def values(self) -> Tensor:
        """The elements, sharing memory with the model."""
        ...

    def gradient(self) -> Tensor | None:
        """Their gradient, sharing memory with what the step keeps; None where there is none."""
        ...

    def publish(self) -> None:
        """Begin to send the new values to those who compute with them too."""
        ...

    def wait_for_values(self) -> None:
        """Wait until everybody's new values are here."""
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
    """All parameters of ``model``, each as a tensor of its own."""
    held = []
    for wrapped_name, parameter in model.named_parameters():
        name = plain_name(wrapped_name)
        replicas = num_replicas(parameter, shard_map.shards.get(name), layout)
        held.append(HeldParameter(parameter, replicas, is_partial=name in shard_map.partial))
    return held


def num_replicas(parameter: nn.Parameter, shard: LocalShard | None, layout: Layout) -> int:
    """How many ranks of the gang hold the same elements of a parameter as this one."""
    num_shards = layout.pp * (1 if shard is None else shard.num_shards)
    if isinstance(parameter, DTensor):
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            num_shards *= 1 if isinstance(placement, Replicate) else size
    return layout.world_size // num_shards


def gradients_of(held: Sequence[HeldTensor]) -> list[Tensor]:
    """The gradients there are."""
    return [grad for one in held if (grad := one.gradient()) is not None]
