"""Stands in for a gang of any size in one process: a process group that sends nothing, tensors without storage.

Also patches the few places where torch or the trial runner must be told so; every patch is a context that undoes it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import trials.models
import trials.offload.host
import trials.precision.float8
import trials.training.build
from trials.dryrun.tracker import MemoryTracker
from trials.models.base import TrainModel
from trials.models.draws import Draws, Tile
from trials.parallel import data_parallel
from trials.parallel.seeding import fill
from trials.parallel.shards import Piece, ShardMap, plain_name, stored_part

DDP_BUCKET_BYTES = (1 << 20, 25 << 20)
"""Capacity of DDP's first gradient bucket and of the others (torch's defaults)."""


@contextlib.contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """The default group of a world whose other ranks do not exist; collectives return at once."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for the duration of the body."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def tracked_resizes(tracker: MemoryTracker) -> Iterator[None]:
    """Let the tracker see storages that change size in place, which no operator tells it."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        tracker.resized(storage)
        return result

    with replaced(torch.UntypedStorage, "resize_", resize_):
        yield


@contextlib.contextmanager
def untracked_propagation(tracker: MemoryTracker) -> Iterator[None]:
    """Keep DTensor's shape propagation out of the account: it makes fake tensors of global shape."""
    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name)

    def propagate(self: ShardingPropagator, *args: Any, **kwargs: Any) -> Any:
        with tracker.paused():
            return original(self, *args, **kwargs)

    with replaced(ShardingPropagator, name, propagate):
        yield


@contextlib.contextmanager
def storage_from(mode: contextlib.AbstractContextManager[Any], tile_words: int | None) -> Iterator[None]:
    """Models leave the meta device inside ``mode``; they are built outside of it. Of their initial values one tile is
    drawn, ``tile_words`` at a time, as all others take no more memory.

    Inside, FSDP could not split what tensor parallelism has split before (``aten.nonzero`` of a fake tensor).
    """
    build = trials.models.build_model

    def build_model(*args: Any) -> TrainModel:
        model = build(*args)
        for name in ("to_empty", "materialize"):
            setattr(model, name, _inside(mode, getattr(model, name)))
        return model

    def init_parameters(model: TrainModel, seed: int, shard_map: ShardMap, perturbation: float = 0.0) -> None:
        with torch.no_grad():
            draw_first_tile(model, seed, shard_map, perturbation, tile_words)

    with (
        replaced(trials.training.build, "build_model", build_model),
        replaced(trials.training.build, "init_parameters", _inside(mode, init_parameters)),
    ):
        yield


def _inside(mode: contextlib.AbstractContextManager[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return run


class _FirstTile(Draws):
    """Draws no more than the first tile of anything."""

    def tiles(self, part: Tensor, size: Sequence[int], start: Sequence[int]) -> Iterator[Tile]:
        return itertools.islice(super().tiles(part, size, start), 1)


def draw_first_tile(
    model: TrainModel, seed: int, shard_map: ShardMap, perturbation: float, tile_words: int | None
) -> None:
    """Draw the first tile of the largest parameter that has random values."""
    named = [(plain_name(name), parameter) for name, parameter in model.named_parameters()]
    drawn = [(name, parameter) for name, parameter in named if model.initial(name).std or perturbation]
    if drawn:
        name, parameter = max(drawn, key=lambda one: stored_part(one[1]).numel())
        size, shard = list(parameter.shape), shard_map.shards.get(name)
        if shard is not None:
            size[shard.dim] *= shard.num_shards
        # Where it begins would be asked of the mesh, and matters to no memory.
        start = (0,) * len(size)
        piece = Piece(name=name, size=torch.Size(size), start=start, part=stored_part(parameter))
        fill(piece, _FirstTile(piece.part.device, tile_words), model.initial(name), seed, perturbation)


class _Reducer:
    """The part of DDP's reducer that pipelines call before the last backward pass; :class:`Replica` sees that by hooks.

    As ``no_sync`` switches reduction off and back on around each earlier one, nothing needs doing.
    """

    def prepare_for_backward(self, _outputs: list[Tensor]) -> None:
        pass


class Replica(DistributedDataParallel):
    """Stands for DDP, whose C++ reducer needs real memory: buckets for all gradients from the start.

    Gradients that are to be reduced become views of the buckets as they are complete; those of earlier micro-batches
    are tensors of their own until then. Both is what DDP does with ``gradient_as_bucket_view``.
    """

    def __init__(self, model: nn.Module, tracker: MemoryTracker) -> None:
        nn.Module.__init__(self)
        self.module = model
        self.require_backward_grad_sync = True
        self.reducer = _Reducer()  # type: ignore[assignment]
        self.tracker = tracker
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.buckets = bucket_sizes([parameter.nbytes for parameter in parameters])
        for parameter in parameters:
            view = torch.empty_like(parameter)
            tracker.assign([view], "grad")
            parameter.register_post_accumulate_grad_hook(self._reducer(view))  # type: ignore[no-untyped-call]
        self.num_waiting = self.num_parameters = len(parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _reducer(self, view: Tensor) -> Callable[[Tensor], None]:
        def reduce(parameter: Tensor) -> None:
            if self.require_backward_grad_sync:
                parameter.grad = view
                self._count()

        return reduce

    def _count(self) -> None:
        self.num_waiting -= 1
        if self.num_waiting == 0:
            self.num_waiting = self.num_parameters
            for size in self.buckets:
                self.tracker.count_call("all_reduce", size)


def bucket_sizes(sizes: list[int]) -> list[int]:
    """Bytes of DDP's buckets for parameters of these sizes, in the order of their gradients."""
    buckets = [0]
    for size in reversed(sizes):
        if buckets[-1] >= DDP_BUCKET_BYTES[len(buckets) > 1]:
            buckets.append(0)
        buckets[-1] += size
    return buckets


@contextlib.contextmanager
def ddp_as_buckets(tracker: MemoryTracker, mode: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Replicate with :class:`Replica` instead of DDP; make buckets, its own and those of ZeRO-1, inside ``mode``."""

    def apply_ddp(model: TrainModel, *_: Any) -> nn.Module:
        return Replica(model, tracker)

    with (
        replaced(trials.training.build, "apply_ddp", _inside(mode, apply_ddp)),
        replaced(trials.training.build, "apply_buckets", _inside(mode, data_parallel.apply_buckets)),
    ):
        yield


class FusedRMSNorm(torch.autograd.Function):
    """Memory behaviour of the fused CUDA kernel: keeps its input, the gain and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = _map_local(x, lambda local: local.new_empty((*local.shape[:-1], 1), dtype=torch.float32))
        ctx.save_for_backward(x, weight, rows)
        return _map_local(x, torch.empty_like)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        partial = isinstance(x, DTensor) and any(placement.is_shard() for placement in x.placements)
        return _map_local(x, torch.empty_like), _map_local(weight, torch.empty_like, partial=partial)


def _map_local(tensor: Tensor, function: Callable[[Tensor], Tensor], *, partial: bool = False) -> Tensor:
    """Apply to what this rank stores, keeping how it is split; ``partial`` makes the result a sum over ranks."""
    if not isinstance(tensor, DTensor):
        return function(tensor)
    placements = [Partial()] * tensor.device_mesh.ndim if partial else tensor.placements
    return DTensor.from_local(function(tensor._local_tensor), tensor.device_mesh, placements, run_check=False)


@contextlib.contextmanager
def fused_rms_norm() -> Iterator[None]:
    """Run RMSNorm as :class:`FusedRMSNorm`: on the CPU it keeps about four times what the fused kernel keeps."""

    def rms_norm(x: Tensor, _shape: Any, weight: Tensor, _eps: float | None = None) -> Tensor:
        normed: Tensor = FusedRMSNorm.apply(x, weight)  # type: ignore[no-untyped-call]
        return normed

    with replaced(torch.nn.functional, "rms_norm", rms_norm):
        yield


@contextlib.contextmanager
def scaled_matmuls() -> Iterator[None]:
    """Multiply 8-bit floats as CUDA does, with copies in 8 bits; emulation makes copies in fp32."""
    with replaced(trials.precision.float8, "emulates", lambda _device: False):
        yield


@contextlib.contextmanager
def host_memory(tracker: MemoryTracker) -> Iterator[None]:
    """Count as the host's what offloading allocates there: fake tensors are all of one device."""
    with replaced(trials.offload.host, "allocating", tracker.on_host):
        yield
