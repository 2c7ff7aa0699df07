"""Live bytes by category, floating-point operations and collective traffic, counted operator by operator."""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

import trials.models
import trials.offload
import trials.parallel.expert_parallel
import trials.parallel.mesh
import trials.precision
import trials.training.loop
from trials.dryrun.estimate import CATEGORIES, Category, Peak, Traffic
from trials.models.model import Draws, Tile, TrainModel
from trials.operators import in_backward
from trials.parallel import data_parallel
from trials.parallel.mesh import Piece, ShardMap, fill, plain_name, stored_part

_DEVICE = torch.ops.prim.device.default
_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
_COLLECTIVES = (
    ("reduce_scatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("send", "send"),
    ("recv", "recv"),
)
"""Part of an operator's name, and the collective that it indicates; the first match counts."""

TrafficCounter = Counter[tuple[str, str]]
"""Calls and bytes of collectives, by name and ``calls`` or ``bytes``."""


@dataclass(slots=True)
class _Block:
    category: Category
    num_bytes: int
    is_on_host: bool = False


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage from the operator that creates it to its end.

    ``granule_bytes`` is the allocator's rounding of sizes: 512 for CUDA's caching allocator, 1 for none.
    """

    def __init__(self, granule_bytes: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.granule_bytes = granule_bytes
        self.live_bytes: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self.total_bytes = 0
        self.phase: Literal["build", "forward", "other", "optimizer"] = "forward"
        """What the rank does outside of backward passes (detected separately): building, or a part of a step."""
        self.place = ""
        self.num_passes = 0
        """Passes of the step so far."""
        self.flops: Counter[str] = Counter()
        self._peaks: dict[str, tuple[int, dict[Category, int]]] = {}
        self._calls: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._blocks: Any = WeakIdKeyDictionary()
        self._paused = 0
        self._on_host = 0
        self.host_bytes = 0
        """Live bytes in host memory, which are counted separately."""
        self.peak_host_bytes = 0
        """Peak since the last pass began."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Count what compiled graphs do, not what tracing them does."""
        return True

    def peaks(self) -> dict[str, Peak]:
        """Return peaks by ``phase/pass/place`` since the last :meth:`restart`."""
        return {
            key: Peak(total_bytes=total, by_category={name: size for name, size in sizes.items() if size})
            for key, (total, sizes) in self._peaks.items()
        }

    def collectives(self) -> dict[str, Traffic]:
        """Return collectives by type since the last :meth:`restart`."""
        return {
            name: Traffic(num_calls=calls, num_bytes=self._sent[name]) for name, calls in sorted(self._calls.items())
        }

    def tally(self) -> TrafficCounter:
        """Return the collectives as counters, for computing differences."""
        calls = {(name, "calls"): number for name, number in self._calls.items()}
        return Counter({**calls, **{(name, "bytes"): number for name, number in self._sent.items()}})

    def restart(self) -> None:
        """Reset peaks and counts; live memory stays known."""
        self.num_passes = 0
        self._peaks.clear()
        self.flops.clear()
        self._calls.clear()
        self._sent.clear()
        self.peak_host_bytes = self.host_bytes
        self._note_peak()

    def begin_pass(self) -> None:
        """Begin another pass, with its own peaks."""
        self.num_passes += 1
        self.place = ""
        self.peak_host_bytes = self.host_bytes

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore what is allocated in the body."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count what is allocated in the body as host memory."""
        self._on_host += 1
        try:
            yield
        finally:
            self._on_host -= 1

    def assign(self, tensors: Iterable[Tensor | None], category: Category) -> None:
        """Move the tensors' memory on this rank to ``category``, and start counting it if it was unknown."""
        for tensor in tensors:
            if tensor is not None:
                storage = stored_part(tensor).untyped_storage()
                block = self._blocks.get(storage)
                if block is None:
                    self._add(storage, category)
                elif block.category != category:
                    self._move(block, category)

    def reclassify(self, old: Iterable[Category], new: Category) -> None:
        """Move all live memory of the ``old`` categories to ``new``."""
        for block in list(self._blocks.values()):
            if block.category in old:
                self._move(block, new)

    def count_call(self, collective: str, num_bytes: int) -> None:
        """Count a collective that is emulated, not run."""
        self._calls[collective] += 1
        self._sent[collective] += num_bytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record a storage's change of size in place, as by FSDP for gathered parameters."""
        block = self._blocks.get(storage)
        if block is not None and not self._paused:
            if block.num_bytes == 0:
                block.category = "communication"
            self._change(block, self._size(storage))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # called more often than everything else together
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # they call again with the wrapped tensors
        kwargs = kwargs or {}
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as in eager mode; the fake kernel would create a new tensor
        result = func(*args, **kwargs)
        if self._paused:
            return result
        is_collective = func.namespace in _COLLECTIVE_NAMESPACES
        category = "communication" if is_collective else self._default_category()
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._see(leaf, category)
        if is_collective:
            self._see_collective(func.__name__, args)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops[self._work()] += count(*args, **kwargs, out_val=result)
        return result

    def _see(self, tensor: Tensor, category: Category) -> None:
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage)
        if block is None:
            self._add(storage, category)
            return
        size = self._size(storage)
        if size != block.num_bytes:
            self._change(block, size)

    def _see_collective(self, name: str, args: Any) -> None:
        word = next((word for part, word in _COLLECTIVES if part in name), None)
        if word is None:
            return
        sides = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in args]
        self.count_call(word, max((sum(leaf.nbytes for leaf in side) for side in sides), default=0))
        if word in ("all_gather", "reduce_scatter", "all_to_all", "recv"):
            self._claim(leaf for side in sides for leaf in side)

    def _claim(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors as buffers of a collective, except parameters and gradients that it works on."""
        for tensor in tensors:
            block = self._blocks.get(tensor.untyped_storage())
            if block is not None and block.category in ("activation", "temporary"):
                self._move(block, "communication")

    def _default_category(self) -> Category:
        if self.phase == "build":
            return "param"
        if self.phase == "optimizer" or in_backward():
            return "temporary"
        return "activation"

    def _work(self) -> str:
        if not in_backward():
            return "forward"
        # Backward formulas run without recording a graph; recomputation records one.
        return "recompute" if torch.is_grad_enabled() else "backward"

    def _size(self, storage: torch.UntypedStorage) -> int:
        granule = self.granule_bytes
        return -(-storage.nbytes() // granule) * granule

    def _add(self, storage: torch.UntypedStorage, category: Category) -> None:
        block = _Block(category, 0, self._on_host > 0)
        self._blocks[storage] = block
        weakref.finalize(storage, self._change, block, 0).atexit = False
        self._change(block, self._size(storage))

    def _move(self, block: _Block, category: Category) -> None:
        if not block.is_on_host:
            self.live_bytes[block.category] -= block.num_bytes
            self.live_bytes[category] += block.num_bytes
        block.category = category

    def _change(self, block: _Block, num_bytes: int) -> None:
        growth = num_bytes - block.num_bytes
        block.num_bytes = num_bytes
        if block.is_on_host:
            self.host_bytes += growth
            self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
            return
        self.live_bytes[block.category] += growth
        self.total_bytes += growth
        if growth > 0:
            self._note_peak()

    def _note_peak(self) -> None:
        phase = "backward" if in_backward() else self.phase
        key = f"{phase}/{self.num_passes}/{self.place}"
        known = self._peaks.get(key)
        if known is None or self.total_bytes > known[0]:
            self._peaks[key] = (self.total_bytes, dict(self.live_bytes))


# A gang of any size in one process: a process group that sends nothing, and tensors without storage.
#
# This patches a few places of torch and the trial runner; every patch is a context that undoes it.


DDP_BUCKET_BYTES = (1 << 20, 25 << 20)
"""Capacity of DDP's first gradient bucket and of the others (torch's defaults)."""


@contextlib.contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Create the default group of a world with only this rank; collectives return at once."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute during the body."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def tracked_resizes(tracker: MemoryTracker) -> Iterator[None]:
    """Show the tracker storages that change size in place, which no operator does."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        tracker.resized(storage)
        return result

    with replaced(torch.UntypedStorage, "resize_", resize_):
        yield


@contextlib.contextmanager
def untracked_propagation(tracker: MemoryTracker) -> Iterator[None]:
    """Exclude DTensor's shape propagation, which creates fake tensors of global shape."""
    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name)

    def propagate(self: ShardingPropagator, *args: Any, **kwargs: Any) -> Any:
        with tracker.paused():
            return original(self, *args, **kwargs)

    with replaced(ShardingPropagator, name, propagate):
        yield


@contextlib.contextmanager
def storage_from(mode: contextlib.AbstractContextManager[Any], tile_words: int | None) -> Iterator[None]:
    """Let models leave the meta device inside ``mode``; they are built outside of it. Of the initial values of built-in
    ones, draw only one tile of ``tile_words``, because the others need no more memory.

    Inside ``mode``, FSDP cannot split what tensor parallelism has already split (``aten.nonzero`` of a fake tensor).
    """
    build = trials.models.build_model

    def build_model(*args: Any) -> TrainModel:
        model = build(*args)
        for name in ("to_empty", "materialize"):
            setattr(model, name, _inside(mode, getattr(model, name)))
        return model

    def init_parameters(model: TrainModel, seed: int, shard_map: ShardMap, perturbation: float = 0.0) -> None:
        if model.is_own:  # where its pieces start would need values, and has no effect on memory
            with replaced(trials.parallel.mesh, "_start_in", lambda tensor: (0,) * tensor.dim()):
                trials.parallel.mesh.init_parameters(model, seed, shard_map, perturbation)
            return
        with torch.no_grad():
            draw_first_tile(model, seed, shard_map, perturbation, tile_words)

    with (
        replaced(trials.training.loop, "build_model", build_model),
        replaced(trials.training.loop, "init_parameters", _inside(mode, init_parameters)),
    ):
        yield


def _inside(mode: contextlib.AbstractContextManager[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return run


class _FirstTile(Draws):
    """Draws only the first tile of every tensor."""

    def tiles(self, part: Tensor, size: Sequence[int], start: Sequence[int]) -> Iterator[Tile]:
        return itertools.islice(super().tiles(part, size, start), 1)


def draw_first_tile(
    model: TrainModel, seed: int, shard_map: ShardMap, perturbation: float, tile_words: int | None
) -> None:
    """Draw the first tile of the largest parameter with random values."""
    named = [(plain_name(name), parameter) for name, parameter in model.named_parameters()]
    drawn = [(name, parameter) for name, parameter in named if model.initial(name).std or perturbation]
    if drawn:
        name, parameter = max(drawn, key=lambda one: stored_part(one[1]).numel())
        size, shard = list(parameter.shape), shard_map.shards.get(name)
        if shard is not None:
            size[shard.dim] *= shard.num_shards
        # Its start would need the mesh, and has no effect on memory.
        start = (0,) * len(size)
        piece = Piece(name=name, size=torch.Size(size), start=start, part=stored_part(parameter))
        fill(piece, _FirstTile(piece.part.device, tile_words), model.initial(name), seed, perturbation)


class _Reducer:
    """The part of DDP's reducer that pipelines call before the last backward pass, which :class:`Replica` detects.

    ``no_sync`` switches reduction off and on again around each earlier pass, so there is nothing to do.
    """

    def prepare_for_backward(self, _outputs: list[Tensor]) -> None:
        pass


class Replica(DistributedDataParallel):
    """Replacement of DDP, whose C++ reducer needs real memory: buckets for all gradients from the start.

    When gradients to be reduced are complete, they become views of the buckets; those of earlier micro-batches are
    separate tensors until then. DDP does the same with ``gradient_as_bucket_view``.
    """

    def __init__(self, model: nn.Module, tracker: MemoryTracker) -> None:
        nn.Module.__init__(self)
        self.module = model
        self.require_backward_grad_sync = True
        self.reducer = _Reducer()  # type: ignore[assignment]
        self.tracker = tracker
        left_out = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        parameters = [one for name, one in model.named_parameters() if one.requires_grad and name not in left_out]
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
    """Return the bytes of DDP's buckets for parameters of these sizes, in the order of their gradients."""
    buckets = [0]
    for size in reversed(sizes):
        if buckets[-1] >= DDP_BUCKET_BYTES[len(buckets) > 1]:
            buckets.append(0)
        buckets[-1] += size
    return buckets


@contextlib.contextmanager
def ddp_as_buckets(tracker: MemoryTracker, mode: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Replicate with :class:`Replica` instead of DDP; make buckets, including those of ZeRO-1, inside ``mode``."""

    def apply_ddp(model: TrainModel, *_: Any) -> nn.Module:
        return Replica(model, tracker)

    with (
        replaced(trials.training.loop, "apply_ddp", _inside(mode, apply_ddp)),
        replaced(trials.training.loop, "apply_buckets", _inside(mode, data_parallel.apply_buckets)),
    ):
        yield


class FusedRMSNorm(torch.autograd.Function):
    """Memory behaviour of the fused CUDA kernel: it keeps its input, the gain and one number per row."""

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
    """Apply to the part on this rank, keeping the split; ``partial`` makes the result a sum over ranks."""
    if not isinstance(tensor, DTensor):
        return function(tensor)
    placements = [Partial()] * tensor.device_mesh.ndim if partial else tensor.placements
    return DTensor.from_local(function(tensor._local_tensor), tensor.device_mesh, placements, run_check=False)


@contextlib.contextmanager
def fused_rms_norm() -> Iterator[None]:
    """Run RMSNorm as :class:`FusedRMSNorm`: the CPU's version keeps about four times as much. Graphs have their own
    kernels."""
    original = torch.nn.functional.rms_norm

    def rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            return original(x, shape, weight, eps)
        normed: Tensor = FusedRMSNorm.apply(x, weight)  # type: ignore[no-untyped-call]
        return normed

    with replaced(torch.nn.functional, "rms_norm", rms_norm):
        yield


@contextlib.contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Let transformers find no packed sequences. It looks for them in the values of positions, which fake tensors lack,
    and would build a mask that real runs do not need."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if not hasattr(masks, name):
        yield
        return
    with replaced(masks, name, lambda _positions: None):
        yield


@contextlib.contextmanager
def scaled_matmuls() -> Iterator[None]:
    """Multiply 8-bit floats as CUDA does, with copies in 8 bits; the emulation makes fp32 copies."""
    with replaced(trials.precision, "emulates", lambda _device: False):
        yield


@contextlib.contextmanager
def expert_rows(*, crowded: bool) -> Iterator[None]:
    """Assume how many rows travel between ranks with experts, since fake tensors have no values: equally many, or, if
    ``crowded``, all to this rank.
    """

    def splits(rows: Tensor, leaving: Tensor, _arriving: Tensor) -> tuple[list[int], list[int]]:
        number, size = rows.shape[0], leaving.shape[0]
        if crowded:
            return [number] + [0] * (size - 1), [number] * size
        each = [number // size + (rank < number % size) for rank in range(size)]
        return each, each

    with replaced(trials.parallel.expert_parallel, "row_splits", splits):
        yield


@contextlib.contextmanager
def host_memory(tracker: MemoryTracker) -> Iterator[None]:
    """Count offloaded memory as the host's: fake tensors are all on one device."""
    with replaced(trials.offload, "allocating", tracker.on_host):
        yield
