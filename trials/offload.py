"""Offloading of activations and optimiser states to host memory while the device does not need them."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from trials.accelerator.device import current_stream, is_host, new_stream, on_stream
from trials.models.model import TrainModel
from trials.operators import leaves_in
from trials.parallel.mesh import stored_part
from trials.sizes import Chunk
from trials.spec import Offload

# Host memory for a device: allocation, and copies that overlap the device's other work.
#
# On a CPU, device memory is host memory: everything works the same way, without a gain.


GRANULE_BYTES = 512
"""Multiple to which regions of page-locked memory are rounded up: an efficient alignment for copies."""
MIN_REGIONS = 4
"""Smallest number of regions of the first one's size in a slab; then rounding wastes at most a fifth."""
GROWTH = 32
"""Largest ratio of existing memory to the next slab."""


def allocating() -> contextlib.AbstractContextManager[Any]:
    """Allocate and compute on the host during the body; a dry run, which has only one memory, accounts for it there."""
    return contextlib.nullcontext()


class Region:
    """A piece of host memory; page-locked if the device benefits from that."""

    __slots__ = ("busy_until", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        """Its bytes."""
        self.busy_until: torch.Event | None = None
        """End of the last copy from or to it that has not been waited for."""

    def like(self, tensor: Tensor, dtype: torch.dtype | None = None, *, start: int = 0) -> Tensor:
        """Return a tensor of this size here, ``start`` bytes from the beginning, in torch's layout for copies."""
        form = torch.empty_like(tensor, device="meta", dtype=dtype)
        flat = self.memory[start : start + form.nbytes].view(form.dtype)
        return flat.as_strided(form.size(), form.stride())


class HostMemory:
    """Pool of regions for copies.

    Locking pages takes milliseconds, so torch never frees locked memory, and it rounds every piece up to a power of
    two, which may double it. This pool cuts regions from slabs of such sizes, and reuses them.
    """

    def __init__(self, device: torch.device) -> None:
        self._locks_pages = not is_host(device)
        self._free: dict[int, list[Region]] = {}
        self._slabs: list[tuple[Tensor, int]] = []
        """Slabs with free space, and their bytes in use."""
        self.num_bytes = 0
        """All locked memory."""

    def take(self, num_bytes: int) -> Region:
        """Return a region of at least this size. Before writing, wait for its ``busy_until``."""
        if not self._locks_pages:
            with allocating():
                return Region(torch.empty(num_bytes, dtype=torch.uint8))
        size = max(1, -(-num_bytes // GRANULE_BYTES)) * GRANULE_BYTES
        if free := self._free.get(size):
            return free.pop()
        return Region(self._cut(size))

    def give_back(self, region: Region, busy_until: torch.Event | None) -> None:
        if self._locks_pages:
            region.busy_until = busy_until
            self._free.setdefault(len(region.memory), []).append(region)

    def _cut(self, size: int) -> Tensor:
        for i, (slab, used) in enumerate(self._slabs):
            if used + size <= len(slab):
                self._slabs[i] = (slab, used + size)
                return slab[used : used + size]
        slab = locked_slab(2 ** math.ceil(math.log2(max(MIN_REGIONS * size, self.num_bytes // GROWTH))))
        self.num_bytes += len(slab)
        self._slabs.append((slab, size))
        return slab[:size]


def locked_slab(num_bytes: int) -> Tensor:
    """Allocate page-locked host memory, from and to which copies overlap everything else."""
    with allocating():
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


@functools.cache
def host_memory_for(device: torch.device) -> HostMemory:
    """Return this process's host memory for copies from and to ``device``."""
    return HostMemory(device)


class CopyStream:
    """A queue of copies in one direction, from the device or to it, in parallel to the device's computation: links
    carry both directions at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = new_stream(device)

    def follow(self) -> None:
        """Make later copies wait for all work the device was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(self._compute_stream())

    def follow_mark(self, mark: torch.Event | None) -> None:
        """Make later copies wait for ``mark``."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)

    def used(self) -> contextlib.AbstractContextManager[Any]:
        """Put the device work of the body on this queue."""
        return on_stream(self._stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy; return at once.

        Neither tensor may be written, read or freed before :meth:`wait_for` the copy's :meth:`mark`.
        """
        with self.used():
            target.copy_(source, non_blocking=self._stream is not None)

    def mark(self) -> torch.Event | None:
        """Return an event at which all copies so far are complete; None on a CPU, where they already are."""
        if self._stream is None:
            return None
        event = torch.Event(self._device)
        event.record(self._stream)
        return event

    def wait_for(self, mark: torch.Event | None) -> None:
        """Make the device wait for ``mark``; the host does not wait."""
        if mark is not None:
            self._compute_stream().wait_event(mark)

    def _compute_stream(self) -> torch.Stream:
        stream = current_stream(self._device)
        assert stream is not None
        return stream


# Offloading of what layers keep for the backward pass.
#
# Everything that autograd saves while a layer runs is copied to the host as it is saved, storage by storage, on a
# separate queue in parallel to the computation. It leaves the device after the next layer. In the backward pass, a
# layer's tensors come back on another queue while the following layer computes. So the device holds the tensors of two
# layers at a time.
#
# Not moved: weights, tensors that the caller holds anyway, small tensors, and the last layer of the model, whose
# backward pass follows at once. Under full recompute a layer saves only its input, so only that moves.


MIN_BYTES = 1024
"""Smallest storage to move: a copy takes some microseconds, however small."""


def apply_activation_offload(model: TrainModel, offload: Offload, chunk: Chunk, device: torch.device) -> OffloadMeter:
    """Make the layers of this virtual stage keep their activations on the host, in place.

    Call it after compilation, which must not include it: it replaces each layer's call.
    """
    meter = OffloadMeter()
    layers = list(model.layers.values())
    if not offload.activations or not layers:
        return meter
    copies = _Copies(device)
    passes = _Passes()
    for number, layer in enumerate(layers):
        call = layer._compiled_call_impl or layer._call_impl
        places: _Places | None = {} if layer._compiled_call_impl else None
        if chunk.is_last and number == len(layers) - 1:
            layer._compiled_call_impl = functools.partial(_run_last, call, passes)
        else:
            layer._compiled_call_impl = functools.partial(_run, layer, call, places, number == 0, passes, copies, meter)
    return meter


class OffloadMeter:
    """Counts offloaded bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_tensors = 0

    def count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.num_tensors += 1


class _Copies:
    """The copy queues of a virtual stage's activations, in both directions, and the host memory."""

    def __init__(self, device: torch.device) -> None:
        self.out, self.back = CopyStream(device), CopyStream(device)
        self.memory: HostMemory = host_memory_for(device)


class _Passes:
    """The forward passes of a virtual stage's layers with copies in progress."""

    def __init__(self) -> None:
        self.last: _Pass | None = None
        self.arriving: _Pass | None = None
        """The pass fetched last."""

    def begin(self, copies: _Copies, *, is_first: bool) -> _Pass:
        self.wait()
        return _Pass(self, copies, None if is_first else self.last)

    def end(self, done: _Pass | None) -> None:
        """Free the device memory that the previous pass has copied."""
        if self.last is not None:
            self.last.let_go()
        self.last = done

    def wait(self) -> None:
        """Wait for tensors that were fetched but perhaps never used, before their memory is reused."""
        if self.arriving is not None:
            self.arriving.join()
            self.arriving = None


class _Pass:
    """One forward pass of one layer, and what it saved."""

    def __init__(self, passes: _Passes, copies: _Copies, before: _Pass | None) -> None:
        self.memory = copies.memory
        self._passes = passes
        self._copies = copies
        self._before = before
        self._leaving: list[Tensor] = []
        self._moved: list[weakref.ref[_Moved]] = []
        self.out_mark: torch.Event | None = None
        """When everything sent so far is on the host."""
        self._back_mark: torch.Event | None = None
        self._is_back = False
        self._arriving: list[Tensor] = []

    def send(self, source: Tensor) -> _Moved:
        """Copy out a storage, given as a flat tensor. It stays on the device until :meth:`let_go`."""
        out, region = self._copies.out, self._copies.memory.take(source.nbytes)
        out.follow()
        out.follow_mark(region.busy_until)
        out.copy(region.like(source), source)
        self.out_mark = out.mark()
        self._leaving.append(source)
        moved = _Moved(self, region, source)
        self._moved.append(weakref.ref(moved))
        return moved

    def let_go(self) -> None:
        """Free the device's tensors; the copies must have read them before their memory is reused."""
        if self._leaving:
            self._copies.out.wait_for(self.out_mark)
            self._leaving.clear()

    def fetch(self) -> None:
        """Fetch everything that is still needed."""
        if self._is_back:
            return
        self._is_back = True
        self._passes.wait()
        self.let_go()
        wanted = [moved for reference in self._moved if (moved := reference()) is not None]
        self._arriving += [moved.room() for moved in wanted]
        self._copies.back.follow()
        for moved in wanted:
            moved.return_to_device(self._copies.back)
        self._back_mark = self._copies.back.mark()
        for moved in wanted:
            moved.leave_host(self._back_mark)
        self._moved.clear()
        self._passes.arriving = self

    def join(self) -> None:
        """Make the device wait for fetched tensors."""
        if self._arriving:
            self._copies.back.wait_for(self._back_mark)
            self._arriving.clear()

    def need(self) -> None:
        """Make this pass's tensors available to the backward pass, and fetch those of the previous layer."""
        self.fetch()
        self.join()
        if self._before is not None:
            before, self._before = self._before, None
            before.fetch()


class _Moved:
    """A storage on the host until the backward pass needs it; lives as long as autograd holds a view of it."""

    __slots__ = ("__weakref__", "_back", "_form", "_of", "_region")

    def __init__(self, of: _Pass, region: Region, source: Tensor) -> None:
        self._of = of
        self._region: Region | None = region
        self._form = (len(source), source.dtype, source.device)
        self._back: Tensor | None = None

    def __del__(self) -> None:
        self.leave_host(self._of.out_mark)

    def room(self) -> Tensor:
        """Return device memory; the device's queue must finish with it before anything is copied there."""
        length, dtype, device = self._form
        self._back = torch.empty(length, dtype=dtype, device=device)
        return self._back

    def return_to_device(self, back: CopyStream) -> None:
        assert self._region is not None and self._back is not None
        back.copy(self._back, self._region.like(self._back))

    def leave_host(self, busy_until: torch.Event | None) -> None:
        """Release the host memory for reuse from ``busy_until`` on."""
        if self._region is not None:
            self._of.memory.give_back(self._region, busy_until)
            self._region = None

    def tensor(self) -> Tensor:
        """Return the whole storage, flat, on the device."""
        self._of.need()
        assert self._back is not None
        return self._back


class _View:
    """A saved tensor whose storage has moved."""

    __slots__ = ("_dtype", "_moved", "_offset", "_size", "_stride", "_whole")

    def __init__(self, tensor: Tensor, moved: _Moved) -> None:
        part = stored_part(tensor)
        self._moved = moved
        self._size, self._stride, self._offset = part.size(), part.stride(), part.storage_offset()
        self._dtype = part.dtype
        self._whole = None
        if isinstance(tensor, DTensor):
            self._whole = (tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride())

    def tensor(self) -> Tensor:
        part = self._moved.tensor().view(self._dtype).as_strided(self._size, self._stride, self._offset)
        if self._whole is None:
            return part
        mesh, placements, size, stride = self._whole
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=size, stride=stride)


_Places = dict[tuple[int, torch.Size, torch.dtype], bool]
"""For a compiled layer: whether the tensor saved at this position, with this shape and type, is a copy of a weight."""
_COPYING = frozenset(
    f"{name}Backward0"
    for name in ["ToCopy", "Clone", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias"]
)
"""Autograd's names of operations that only change the form or type of their one input."""


class _Hooks:
    """Decides which of the tensors saved by one pass are moved."""

    def __init__(
        self, layer: nn.Module, held: Iterable[Tensor], to: _Pass, meter: OffloadMeter, places: _Places | None
    ) -> None:
        self._layer = layer
        self._places = places
        """Known positions of a compiled layer; None for others."""
        self._held = {id(stored_part(tensor).untyped_storage()) for tensor in held}
        self._to = to
        self._meter = meter
        self._weights: dict[int, Tensor] = {}
        self._num_packed = 0
        self._moved: dict[int, tuple[torch.UntypedStorage, _Moved]] = {}

    def pack(self, tensor: Tensor) -> Tensor | _View:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if isinstance(local, AsyncCollectiveTensor):
            local.trigger_wait()  # type: ignore[no-untyped-call]
        part = stored_part(tensor)
        storage = part.untyped_storage()
        self._num_packed += 1
        if storage.nbytes() < MIN_BYTES or id(storage) in self._held or self._is_weight(tensor, part):
            return tensor
        known = self._moved.get(id(storage))
        if known is None:
            self._meter.count(storage.nbytes())
            known = self._moved[id(storage)] = (storage, self._to.send(_whole(part)))
        return _View(tensor, known[1])

    def close(self) -> None:
        """Release everything: autograd may hold this object as long as what it packed."""
        self._moved.clear()
        self._weights.clear()

    def _is_weight(self, tensor: Tensor, part: Tensor) -> bool:
        """Whether it is a weight, or a copy of one in 16 bits or another form."""
        if isinstance(tensor, nn.Parameter) or isinstance(_leaf(tensor), nn.Parameter):
            return True
        if not self._weights:
            # Not earlier: FSDP gathers weights when the layer is called. Those of units inside come later still, but
            # none of these units is compiled, so their tensors have a history.
            weights = [stored_part(parameter) for parameter in self._layer.parameters()]
            self._weights = {id(weight.untyped_storage()): weight for weight in weights}
        if id(part.untyped_storage()) in self._weights:
            return True
        return self._places is not None and self._is_compiled_copy(part, self._places)

    def _is_compiled_copy(self, part: Tensor, places: _Places) -> bool:
        """Whether it has a weight's values. Tensors saved by a compiled graph have no history, but come in the same
        order in every pass, so each position is compared only once, because comparing makes the host wait for the
        device."""
        place = (self._num_packed, part.size(), part.dtype)
        if place not in places:
            places[place] = part.element_size() == 2 and any(_is_cast(part, one) for one in self._weights.values())
        return places[place]


def _leaf(tensor: Tensor) -> Tensor | None:
    """Return the leaf that a tensor is a copy of, by its autograd history; None if it is no copy."""
    node = tensor.grad_fn
    while node is not None and node.name() in _COPYING:
        node = node.next_functions[0][0]
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def _is_cast(part: Tensor, weight: Tensor) -> bool:
    """Whether it is the weight, possibly transposed, in another type."""
    if part.dtype == weight.dtype or part.numel() != weight.numel():
        return False
    forms = [weight, weight.t()] if weight.dim() == 2 else [weight]
    return any(part.size() == form.size() and torch.equal(part, form.to(part.dtype)) for form in forms)


def _whole(part: Tensor) -> Tensor:
    """Return the tensor's whole storage, flat."""
    return part.detach().as_strided((part.untyped_storage().nbytes() // part.element_size(),), (1,), 0)


def _unpack(kept: Tensor | _View) -> Tensor:
    return kept.tensor() if isinstance(kept, _View) else kept


def _run(
    layer: nn.Module,
    call: Any,
    places: _Places | None,
    is_first: bool,
    passes: _Passes,
    copies: _Copies,
    meter: OffloadMeter,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the layer, and send what it saves for the backward pass to the host."""
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    begun = passes.begin(copies, is_first=is_first)
    held = [tensor for tensor in leaves_in((args, kwargs), Tensor) if not tensor.requires_grad]
    hooks = _Hooks(layer, held, begun, meter, places)
    with saved_tensors_hooks(hooks.pack, _unpack):
        outputs = call(*args, **kwargs)
    hooks.close()
    passes.end(begun)
    return outputs


def _run_last(call: Any, passes: _Passes, *args: Any, **kwargs: Any) -> Any:
    """Call the model's last layer, which keeps what it saves."""
    outputs = call(*args, **kwargs)
    passes.end(None)
    return outputs
