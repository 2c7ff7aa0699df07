"""Keeps in host memory what layers need for the backward pass.

Everything that autograd saves while a layer runs goes to the host, storage by storage, on a queue of its own beside
the computation, as it is saved. It leaves the device when the next layer is through. In the backward pass a layer's
tensors come back while the layer after it is at work. So the device holds the tensors of two layers at a time.

Not moved: weights and what the caller holds anyway, small tensors, and the last layer of the model, whose backward
pass follows at once. Under full recompute a layer saves its input only, so that is what moves.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from trials.models.base import TrainModel
from trials.offload.host import CopyStream, host_like
from trials.operators import leaves_in
from trials.parallel.shards import stored_part
from trials.spec import Offload
from trials.stages import Chunk

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
    copies = CopyStream(device)
    passes = _Passes()
    for number, layer in enumerate(layers):
        call = layer._compiled_call_impl or layer._call_impl
        if chunk.is_last and number == len(layers) - 1:
            layer._compiled_call_impl = functools.partial(_run_last, call, passes)
        else:
            layer._compiled_call_impl = functools.partial(_run, layer, call, number == 0, passes, copies, meter)
    return meter


class OffloadMeter:
    """Counts what went to the host."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_tensors = 0

    def count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.num_tensors += 1


class _Passes:
    """The forward passes of a virtual stage's layers, as far as copies of theirs are under way."""

    def __init__(self) -> None:
        self.last: _Pass | None = None
        self.arriving: _Pass | None = None
        """The pass that was last sent for."""

    def begin(self, copies: CopyStream, *, is_first: bool) -> _Pass:
        self.settle()
        return _Pass(self, copies, None if is_first else self.last)

    def end(self, done: _Pass | None) -> None:
        """The device lets go of what the pass before has copied."""
        if self.last is not None:
            self.last.let_go()
        self.last = done

    def settle(self) -> None:
        """Wait for what was sent for and maybe never asked for, before its memory can serve something else."""
        if self.arriving is not None:
            self.arriving.join()
            self.arriving = None


class _Pass:
    """One forward pass of one layer, and what it saved."""

    def __init__(self, passes: _Passes, copies: CopyStream, before: _Pass | None) -> None:
        self._passes = passes
        self._copies = copies
        self._before = before
        self._leaving: list[Tensor] = []
        self._moved: list[weakref.ref[_Moved]] = []
        self._mark: torch.Event | None = None
        self._is_back = False
        self._arriving: list[Tensor] = []

    def send(self, source: Tensor) -> _Moved:
        """Copy out a storage, given as a flat tensor. It stays until :meth:`let_go`."""
        held = host_like(source, source.device)
        self._copies.copy(held, source)
        self._mark = self._copies.mark()
        self._leaving.append(source)
        moved = _Moved(self, held, source.device)
        self._moved.append(weakref.ref(moved))
        return moved

    def let_go(self) -> None:
        """Give the device's copies up, which the copying must have read by the time their memory is used again."""
        if self._leaving:
            self._copies.wait_for(self._mark)
            self._leaving.clear()

    def fetch(self) -> None:
        """Send for everything that is still wanted."""
        if self._is_back:
            return
        self._is_back = True
        self._passes.settle()
        self.let_go()
        for reference in self._moved:
            if (moved := reference()) is not None:
                self._arriving.append(moved.come_back(self._copies))
        self._moved.clear()
        self._mark = self._copies.mark()
        self._passes.arriving = self

    def join(self) -> None:
        """Let the device wait for what was sent for."""
        if self._arriving:
            self._copies.wait_for(self._mark)
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

    __slots__ = ("__weakref__", "_back", "_device", "_held", "_of")

    def __init__(self, of: _Pass, held: Tensor, device: torch.device) -> None:
        self._of = of
        self._held: Tensor | None = held
        self._device = device
        self._back: Tensor | None = None

    def come_back(self, copies: CopyStream) -> Tensor:
        assert self._held is not None
        self._back = torch.empty_like(self._held, device=self._device, pin_memory=False)
        copies.copy(self._back, self._held)
        self._held = None
        return self._back

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


class _Hooks:
    """Decides what is moved of the tensors that one pass saves."""

    def __init__(self, layer: nn.Module, held: Iterable[Tensor], to: _Pass, meter: OffloadMeter) -> None:
        self._layer = layer
        self._held = {id(stored_part(tensor).untyped_storage()) for tensor in held}
        self._to = to
        self._meter = meter
        self._weights: set[int] | None = None
        self._casts: set[tuple[torch.Size, tuple[int, ...]]] = set()
        self._moved: dict[int, tuple[torch.UntypedStorage, _Moved]] = {}

    def pack(self, tensor: Tensor) -> Tensor | _View:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if isinstance(local, AsyncCollectiveTensor):
            local.trigger_wait()  # type: ignore[no-untyped-call]
        part = stored_part(tensor)
        storage = part.untyped_storage()
        if storage.nbytes() < MIN_BYTES or id(storage) in self._held or self._is_weight(part, storage):
            return tensor
        known = self._moved.get(id(storage))
        if known is None:
            self._meter.count(storage.nbytes())
            known = self._moved[id(storage)] = (storage, self._to.send(_whole(part)))
        return _View(tensor, known[1])

    def close(self) -> None:
        """Let go of everything: autograd may hold on to this object as long as to what it packed."""
        self._moved.clear()

    def _is_weight(self, part: Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether it is a weight, or autocast's copy of one in the form that matmuls save it in, turned."""
        if self._weights is None:
            # Only now: FSDP gathers weights when the layer is called.
            weights = [stored_part(parameter) for parameter in self._layer.parameters()]
            self._weights = {id(weight.untyped_storage()) for weight in weights}
            self._casts = {(weight.t().size(), weight.t().stride()) for weight in weights if weight.dim() == 2}
        return id(storage) in self._weights or (part.size(), part.stride()) in self._casts


def _whole(part: Tensor) -> Tensor:
    """Everything in the tensor's storage, flat."""
    return part.detach().as_strided((part.untyped_storage().nbytes() // part.element_size(),), (1,), 0)


def _unpack(kept: Tensor | _View) -> Tensor:
    return kept.tensor() if isinstance(kept, _View) else kept


def _run(
    layer: nn.Module,
    call: Any,
    is_first: bool,
    passes: _Passes,
    copies: CopyStream,
    meter: OffloadMeter,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the layer, with what it saves for the backward pass going to the host."""
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    begun = passes.begin(copies, is_first=is_first)
    held = [tensor for tensor in leaves_in((args, kwargs), Tensor) if not tensor.requires_grad]
    hooks = _Hooks(layer, held, begun, meter)
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
