"""What waits in host memory while the device does not need it: activations, states of the optimiser."""

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

# Host memory beside a device's: where it is allocated, and copies that run beside the device's other work.
#
# On a CPU the device's memory is the host's: everything works the same, and gains nothing.


GRANULE_BYTES = 512
"""Multiple to which regions of page-locked memory are rounded up: what copies like best."""
MIN_REGIONS = 4
"""Regions like the first that a slab has room for at least; its rounding wastes no more than a fifth then."""
GROWTH = 32
"""What there is already is at most so many times as large as the next slab."""


def allocating() -> contextlib.AbstractContextManager[Any]:
    """What is allocated inside lies in the host's memory, and what is computed is the host's own work; a dry run, to
    which all memory is alike, counts it there."""
    return contextlib.nullcontext()


class Region:
    """A piece of host memory; page-locked if the device makes use of that."""

    __slots__ = ("busy_until", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        """Its bytes."""
        self.busy_until: torch.Event | None = None
        """When the last copy from or to it is done, that anybody has not waited for."""

    def like(self, tensor: Tensor, dtype: torch.dtype | None = None, *, start: int = 0) -> Tensor:
        """A tensor of this size here, ``start`` bytes from the beginning, laid out as torch lays out copies."""
        form = torch.empty_like(tensor, device="meta", dtype=dtype)
        flat = self.memory[start : start + form.nbytes].view(form.dtype)
        return flat.as_strided(form.size(), form.stride())


class HostMemory:
    """Gives out regions for copies, and takes them back.

    Locking pages takes milliseconds, so torch never gives locked memory back, and it rounds every piece up to a power
    of two, which may double it. Here regions are cut from slabs whose sizes are such powers, and serve again.
    """

    def __init__(self, device: torch.device) -> None:
        self._locks_pages = not is_host(device)
        self._free: dict[int, list[Region]] = {}
        self._slabs: list[tuple[Tensor, int]] = []
        """Those with room left, and the bytes of them that are given out."""
        self.num_bytes = 0
        """All that is locked."""

    def take(self, num_bytes: int) -> Region:
        """A region of at least so many bytes. Who writes there waits for what it is busy with first."""
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
    """Page-locked host memory, which copies from and to devices run from beside everything else."""
    with allocating():
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


@functools.cache
def host_memory_for(device: torch.device) -> HostMemory:
    """The host memory that this process has for copies from and to ``device``."""
    return HostMemory(device)


class CopyStream:
    """A queue of copies in one direction, from the device or to it, beside the device's queue of computation: links
    carry both directions at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = new_stream(device)

    def follow(self) -> None:
        """Let the copies to come run only after all that the device was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(self._compute_stream())

    def follow_mark(self, mark: torch.Event | None) -> None:
        """Let the copies to come run only after ``mark``."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)

    def used(self) -> contextlib.AbstractContextManager[Any]:
        """What the device is given inside becomes part of this queue."""
        return on_stream(self._stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy behind what the queue was given so far; returns at once.

        Neither tensor may be written, read or let go of before :meth:`wait_for` the copy's :meth:`mark`.
        """
        with self.used():
            target.copy_(source, non_blocking=self._stream is not None)

    def mark(self) -> torch.Event | None:
        """The moment at which all copies so far are done; None on a CPU, where they are."""
        if self._stream is None:
            return None
        event = torch.Event(self._device)
        event.record(self._stream)
        return event

    def wait_for(self, mark: torch.Event | None) -> None:
        """Let the device go on only after ``mark``; the host does not wait."""
        if mark is not None:
            self._compute_stream().wait_event(mark)

    def _compute_stream(self) -> torch.Stream:
        stream = current_stream(self._device)
        assert stream is not None
        return stream


# Keeps in host memory what layers need for the backward pass.
#
# Everything that autograd saves while a layer runs goes to the host, storage by storage, on a queue of its own beside
# the computation, as it is saved. It leaves the device when the next layer is through. In the backward pass a layer's
# tensors come back, on another queue, while the layer after it is at work. So the device holds the tensors of two
# layers at a time.
#
# Not moved: weights and what the caller holds anyway, small tensors, and the last layer of the model, whose backward
# pass follows at once. Under full recompute a layer saves its input only, so that is what moves.


MIN_BYTES = 1024
"""Storages smaller than this stay: a copy takes some microseconds, however little it copies."""


def apply_activation_offload(model: TrainModel, offload: Offload, chunk: Chunk, device: torch.device) -> OffloadMeter:
    """Let the layers of this virtual stage keep their activations on the host, in place.

    Comes after compilation, of which it is no part: it takes the place of each layer's call.
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
    """Counts what went to the host."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_tensors = 0

    def count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.num_tensors += 1


class _Copies:
    """The ways out and back of a virtual stage's activations, and the memory at their end."""

    def __init__(self, device: torch.device) -> None:
        self.out, self.back = CopyStream(device), CopyStream(device)
        self.memory: HostMemory = host_memory_for(device)


class _Passes:
    """The forward passes of a virtual stage's layers, as far as copies of theirs are under way."""

    def __init__(self) -> None:
        self.last: _Pass | None = None
        self.arriving: _Pass | None = None
        """The pass that was last sent for."""

    def begin(self, copies: _Copies, *, is_first: bool) -> _Pass:
        self.wait()
        return _Pass(self, copies, None if is_first else self.last)

    def end(self, done: _Pass | None) -> None:
        """The device lets go of what the pass before has copied."""
        if self.last is not None:
            self.last.let_go()
        self.last = done

    def wait(self) -> None:
        """Wait for what was sent for and maybe never asked for, before its memory can serve something else."""
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
        """When all that was sent so far is on the host."""
        self._back_mark: torch.Event | None = None
        self._is_back = False
        self._arriving: list[Tensor] = []

    def send(self, source: Tensor) -> _Moved:
        """Copy out a storage, given as a flat tensor. It stays until :meth:`let_go`."""
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
        """Give the device's copies up, which the copying must have read by the time their memory is used again."""
        if self._leaving:
            self._copies.out.wait_for(self.out_mark)
            self._leaving.clear()

    def fetch(self) -> None:
        """Send for everything that is still wanted."""
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
        """Let the device wait for what was sent for."""
        if self._arriving:
            self._copies.back.wait_for(self._back_mark)
            self._arriving.clear()

    def need(self) -> None:
        """The backward pass has come here: have this pass's tensors, and send for those of the layer before."""
        self.fetch()
        self.join()
        if self._before is not None:
            before, self._before = self._before, None
            before.fetch()


class _Moved:
    """A storage on the host until the backward pass needs it. It lasts as long as autograd keeps a view of it."""

    __slots__ = ("__weakref__", "_back", "_form", "_of", "_region")

    def __init__(self, of: _Pass, region: Region, source: Tensor) -> None:
        self._of = of
        self._region: Region | None = region
        self._form = (len(source), source.dtype, source.device)
        self._back: Tensor | None = None

    def __del__(self) -> None:
        self.leave_host(self._of.out_mark)

    def room(self) -> Tensor:
        """Memory on the device, which the device's own queue must be through with before anything is copied there."""
        length, dtype, device = self._form
        self._back = torch.empty(length, dtype=dtype, device=device)
        return self._back

    def return_to_device(self, back: CopyStream) -> None:
        assert self._region is not None and self._back is not None
        back.copy(self._back, self._region.like(self._back))

    def leave_host(self, busy_until: torch.Event | None) -> None:
        """Let the host's memory serve others, from ``busy_until``."""
        if self._region is not None:
            self._of.memory.give_back(self._region, busy_until)
            self._region = None

    def tensor(self) -> Tensor:
        """All of the storage, flat, on the device."""
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
"""Whether what a compiled layer saves there, as so many tensors before it, in this form, is a copy of a weight."""
_COPYING = frozenset(
    f"{name}Backward0"
    for name in ["ToCopy", "Clone", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias"]
)
"""Operations, as autograd calls them, whose results are the numbers of their one input: in another form or type."""


class _Hooks:
    """Decides what is moved of the tensors that one pass saves."""

    def __init__(
        self, layer: nn.Module, held: Iterable[Tensor], to: _Pass, meter: OffloadMeter, places: _Places | None
    ) -> None:
        self._layer = layer
        self._places = places
        """What is known so far of a compiled layer; None for others."""
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
        """Let go of everything: autograd may hold on to this object as long as to what it packed."""
        self._moved.clear()
        self._weights.clear()

    def _is_weight(self, tensor: Tensor, part: Tensor) -> bool:
        """Whether it is a weight, or a copy of one: in 16 bits, or in another form."""
        if not self._weights:
            # Only now: FSDP gathers weights when the layer is called.
            weights = [stored_part(parameter) for parameter in self._layer.parameters()]
            self._weights = {id(weight.untyped_storage()): weight for weight in weights}
        if id(part.untyped_storage()) in self._weights or _origin(tensor) in self._weights:
            return True
        return self._places is not None and self._is_compiled_copy(part, self._places)

    def _is_compiled_copy(self, part: Tensor, places: _Places) -> bool:
        """Whether it has a weight's numbers. What a compiled graph saves has no history, but comes in the same order
        in every pass: so each place is looked at once, as the host has to wait for the device then."""
        place = (self._num_packed, part.size(), part.dtype)
        if place not in places:
            places[place] = part.element_size() == 2 and any(_is_cast(part, one) for one in self._weights.values())
        return places[place]


def _origin(tensor: Tensor) -> int | None:
    """Storage of the leaf that a tensor is a copy of, by what autograd knows of it; None where it is no copy."""
    node = tensor.grad_fn
    while node is not None and node.name() in _COPYING:
        node = node.next_functions[0][0]
    leaf = getattr(node, "variable", None)
    return None if leaf is None else id(stored_part(leaf).untyped_storage())


def _is_cast(part: Tensor, weight: Tensor) -> bool:
    """Whether it is the weight, turned or not, in a type of its own."""
    if part.dtype == weight.dtype or part.numel() != weight.numel():
        return False
    forms = [weight, weight.t()] if weight.dim() == 2 else [weight]
    return any(part.size() == form.size() and torch.equal(part, form.to(part.dtype)) for form in forms)


def _whole(part: Tensor) -> Tensor:
    """Everything in the tensor's storage, flat."""
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
    """Call the layer, with what it saves for the backward pass going to the host."""
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
