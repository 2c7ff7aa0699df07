"""Recipes that compute a tensor again that was dropped after the forward pass.

A recipe holds an operator and its inputs; inputs that were dropped themselves are held as handles on their recipes. A
*handle* stands for one dropped tensor: an output of a recipe, or a view of it. Autograd keeps the handle instead.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from trials.operators import leaves_in, map_leaves
from trials.parallel.shards import local_part, stored_part

Timing = Callable[[torch.device], contextlib.AbstractContextManager[None]]


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """What holds the rank's elements: the same object for all views, as long as one of them lives."""
    return stored_part(tensor).untyped_storage()


def offset_of(tensor: Tensor) -> int:
    """Where the rank's elements begin in their storage, in elements."""
    return int(local_part(tensor).storage_offset())


@dataclass(frozen=True, slots=True)
class TensorView:
    """Where a tensor's elements lie in the storage of a recipe's output."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Distance from the output's first element, in elements."""
    distributed: tuple[DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...]] | None
    """Mesh, placements, global size and global stride of a distributed tensor."""

    @staticmethod
    def locate(tensor: Tensor, output_offset: int) -> TensorView:
        """The view ``tensor`` is of an output that starts at ``output_offset`` of its storage."""
        local = local_part(tensor)
        distributed = None
        if isinstance(tensor, DTensor):
            distributed = (tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())
        return TensorView(local.shape, local.stride(), offset_of(tensor) - output_offset, distributed)

    def of(self, output: Tensor) -> Tensor:
        """This view of the output, which was computed again."""
        local = local_part(output)
        part = local.as_strided(self.size, self.stride, offset_of(output) + self.offset)
        if self.distributed is None:
            return part
        mesh, placements, size, stride = self.distributed
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=size, stride=stride)


class Handle:
    """One dropped tensor: a view of a recipe's output, or of a tensor autograd kept from inside its operator."""

    __slots__ = ("__weakref__", "_view", "index", "is_saved", "recipe")

    def __init__(self, recipe: Rebuild, index: int, view: TensorView, *, is_saved: bool = False) -> None:
        """``index`` counts the outputs, or with ``is_saved`` what autograd kept, in order."""
        self.recipe = recipe
        self.index = index
        self.is_saved = is_saved
        self._view = view
        recipe.add(self)

    def tensor(self) -> Tensor:
        """Compute it again, or take it from what another handle had computed."""
        with torch.enable_grad():
            result = self.recipe.result(self)
        with torch.no_grad():
            return self._view.of(result)


class Input:
    """A tensor that a recipe's operator takes, without the autograd graph it came from, so that no cycle can arise.

    A parameter stays the object it is: FSDP gives it its storage back before the backward pass needs it.
    """

    __slots__ = ("_is_written", "_requires_grad", "_version", "source")

    def __init__(self, tensor: Tensor, handle: Handle | None, *, is_written: bool = False) -> None:
        """``handle`` where ``tensor`` itself is dropped; ``is_written`` if the operator changes it, unread."""
        self._requires_grad = tensor.requires_grad
        self._version = tensor._version
        self._is_written = is_written
        is_free = isinstance(tensor, nn.Parameter) or not tensor.requires_grad
        self.source: Tensor | Handle = handle or (tensor if is_free else tensor.detach())

    @property
    def is_intact(self) -> bool:
        """Whether nothing has written to it since the call."""
        if isinstance(self.source, Handle):
            return self.source.recipe.is_intact()
        if self._is_written or isinstance(self.source, nn.Parameter):
            return True
        return self.source._version == self._version

    def tensor(self) -> Tensor:
        source = self.source.tensor() if isinstance(self.source, Handle) else self.source
        return source.clone() if self._is_written else source.detach().requires_grad_(self._requires_grad)


class Rebuild:
    """One call of an operator, ready to be made again.

    It makes the outputs, and what autograd kept from inside the operator. They stay from the first handle's request
    until every handle has had its turn; then, should a handle ask again (the graph was retained, or a zero-bubble
    schedule runs it in two passes), they are computed once more.
    """

    __slots__ = (
        "__weakref__",
        "_args",
        "_autocast",
        "_device",
        "_function",
        "_handles",
        "_results",
        "_saved",
        "_timing",
        "_waiting",
    )

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, dict[str, Any]], device: torch.device, timing: Timing
    ) -> None:
        """``args`` are the positional and the keyword arguments, with an :class:`Input` for every tensor."""
        self._function = function
        self._args = args
        self._device = device
        self._autocast = _AutocastState.current(device.type)
        self._timing = timing
        self._saved: set[int] = set()
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._waiting: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._results: tuple[list[Tensor], dict[int, Tensor]] | None = None

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", repr(self._function))

    def add(self, handle: Handle) -> None:
        self._handles.add(handle)
        self._waiting.add(handle)
        if handle.is_saved:
            self._saved.add(handle.index)

    def held_tensors(self) -> Iterator[Tensor]:
        """Inputs that live on because of it, parameters left out."""
        for one in leaves_in(self._args, Input):
            if isinstance(one.source, Tensor) and not isinstance(one.source, nn.Parameter):
                yield one.source

    def is_intact(self) -> bool:
        """Whether nothing has written to an input since the call."""
        return all(one.is_intact for one in leaves_in(self._args, Input))

    def result(self, handle: Handle) -> Tensor:
        """The tensor that ``handle`` is a view of."""
        if self._results is None:
            self._results = self._compute()
            self._waiting = weakref.WeakSet(self._handles)
        outputs, saved = self._results
        self._waiting.discard(handle)
        if not self._waiting:
            self._results = None
        return (saved if handle.is_saved else outputs)[handle.index]

    def _compute(self) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Run the operator as it ran: with gradients, on which the choice of a kernel can depend."""
        if not self.is_intact():
            raise RuntimeError(f"an input of {self._name} was changed in place before its output was recomputed")
        # Dropped inputs first: their time is counted where they are.
        args, kwargs = map_leaves(Input.tensor, self._args, Input)
        saved: dict[int, Tensor] = {}
        numbers = itertools.count()

        def pack(tensor: Tensor) -> None:
            number = next(numbers)
            if number in self._saved:
                saved[number] = tensor.detach()

        with self._timing(self._device), self._autocast.restored(), saved_tensors_hooks(pack, _no_unpack):
            result = self._function(*args, **kwargs)
        if len(saved) != len(self._saved):
            raise RuntimeError(f"{self._name} kept other tensors when it was run again; leave it out of the patterns")
        return [output.detach() for output in leaves_in(result, Tensor)], saved


def _no_unpack(_nothing: None) -> Tensor:
    raise AssertionError("there is no backward pass through a recomputed operator")


@dataclass(frozen=True, slots=True)
class _AutocastState:
    device_type: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def current(device_type: str) -> _AutocastState:
        enabled = torch.is_autocast_enabled(device_type)
        return _AutocastState(device_type, enabled, torch.get_autocast_dtype(device_type))

    def restored(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)
