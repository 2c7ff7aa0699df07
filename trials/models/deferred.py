"""Initial values of an imported module, drawn tensor by tensor after the module was split.

The module is built of fake tensors, and the operators that would have computed its values are recorded. A rank then
computes the tensors that it holds, one at a time, and keeps its part of each: it never holds the whole model. Every
random operator draws from a seed of its own, so that values do not depend on which tensors a rank computes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from trials.models.model import key_of

_EMPTY = ("aten::empty", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided", "aten::empty_like")


@torch.library.custom_op(
    "tune_cluster::trunc_normal_", mutates_args=("tensor",), tags=(torch.Tag.nondeterministic_seeded,)
)
def _truncated(tensor: Tensor, mean: float, std: float, a: float, b: float) -> None:
    """Draw from a truncated normal distribution; torch redraws until no value is outside, which fake tensors cannot."""
    nn.init._no_grad_trunc_normal_(tensor, mean, std, a, b, None)


@_truncated.register_fake
def _(tensor: Tensor, mean: float, std: float, a: float, b: float) -> None:
    pass


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Build the module of fake tensors in the body, and record what computes them."""
    original = nn.init._no_grad_trunc_normal_

    def truncated(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        if generator is not None or not is_fake(tensor):
            return original(tensor, mean, std, a, b, generator)
        with torch.no_grad():
            _truncated(tensor, mean, std, a, b)
        return tensor

    nn.init._no_grad_trunc_normal_ = truncated
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), recorder:
            yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


class NotRecordableError(Exception):
    """Values that cannot be computed later from what was recorded."""


@dataclass(frozen=True, slots=True)
class _StorageView:
    """A tensor as a part of a storage, by the storage's number."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Recorded:
    """An operator that creates or changes storages."""

    func: Any
    arguments: list[Any]
    """Leaves of its arguments, fake tensors as views."""
    tree: Any
    outputs: list[_StorageView | None]
    """Leaves of its result."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that compute fake tensors.

    Fake tensors claim to be on the CPU: torch and packages such as transformers leave out the initial values of tensors
    on the meta device.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._calls: list[_Recorded] = []
        self._writers: list[list[int]] = []
        """Calls that create or change each storage, by number."""
        self._is_written: list[bool] = []
        self._numbers: dict[int, int] = {}
        self._held: list[torch.UntypedStorage] = []
        """Keeps storages alive, so that their addresses stay theirs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, tree = tree_flatten((args, kwargs))
        found = [self._view(leaf) if is_fake(leaf) else leaf for leaf in leaves]
        result = func(*args, **kwargs)
        if not any(is_fake(leaf) for leaf in (*leaves, *tree_leaves(result))):
            return result
        num_known = len(self._held)
        outputs = [self._view(leaf, may_be_new=True) if is_fake(leaf) else None for leaf in tree_leaves(result)]
        changed = set(range(num_known, len(self._held))) | self._changed(func, args, kwargs)
        if changed:
            self._record(_Recorded(func, found, tree, outputs), changed, num_known)
        return result

    def _record(self, call: _Recorded, changed: set[int], num_known: int) -> None:
        if any(
            isinstance(leaf, torch.Generator | torch.UntypedStorage | torch.TypedStorage) for leaf in call.arguments
        ):
            raise NotRecordableError("it has values from a generator or a storage of its own")
        is_empty = call.func._schema.name in _EMPTY
        for number in changed:
            if number >= num_known:
                self._writers.append([])
                self._is_written.append(not is_empty)
            else:
                self._is_written[number] = True
        for number in changed:
            self._writers[number].append(len(self._calls))
        self._calls.append(call)

    def _changed(self, func: Any, args: Any, kwargs: Any) -> set[int]:
        """Return the storages that the operator changes in place."""
        changed: set[int] = set()
        if func._schema.is_mutable:
            for i, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[i] if i < len(args) else kwargs.get(argument.name)
                    changed |= {self._view(leaf).storage for leaf in tree_leaves(value) if is_fake(leaf)}
        return changed

    def _view(self, tensor: Tensor, *, may_be_new: bool = False) -> _StorageView:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            if not may_be_new:
                raise NotRecordableError("it has a tensor of unknown origin")
            number = self._numbers[storage._cdata] = len(self._held)
            self._held.append(storage)
        return _StorageView(
            number, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype
        )

    def check(self, module: nn.Module) -> None:
        """Check that all tensors of the recorded module can be computed.

        Raises:
            NotRecordableError: with the reason.
        """
        known = [*module.parameters(), *module.buffers(), *(tensor for _, _, tensor in plain_tensors(module))]
        numbers = {self._view(tensor).storage for tensor in known if is_fake(tensor)}
        if not all(self._is_written[number] for number in numbers):
            raise NotRecordableError("it has a tensor without initial values")
        others = [one for number, one in enumerate(self._held) if number not in numbers]
        if any(map(_is_used, others)):
            gc.collect()
            if any(map(_is_used, others)):
                raise NotRecordableError("it keeps tensors outside of its parameters, buffers and attributes")

    @torch.no_grad()
    def compute(self, tensor: Tensor) -> Tensor:
        """Return the values of ``tensor``, a part of the recorded module, on the CPU. Others are returned unchanged."""
        if not is_fake(tensor):
            return tensor.detach()
        view = self._view(tensor)
        bases: dict[int, Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            for number in sorted(self._needed(view.storage)):
                self._replay(number, bases)
        return _of_view(view, bases)

    def _needed(self, storage: int) -> set[int]:
        """Return the numbers of the calls on which the values in ``storage`` depend."""
        calls: set[int] = set()
        storages, seen = [storage], {storage}
        while storages:
            for number in self._writers[storages.pop()]:
                if number not in calls:
                    calls.add(number)
                    read = {leaf.storage for leaf in self._calls[number].arguments if isinstance(leaf, _StorageView)}
                    storages += read - seen
                    seen |= read
        return calls

    def _replay(self, number: int, bases: dict[int, Tensor]) -> None:
        call = self._calls[number]
        leaves = [_real(leaf, bases) for leaf in call.arguments]
        args, kwargs = tree_unflatten(leaves, call.tree)
        if torch.Tag.nondeterministic_seeded in call.func.tags:
            torch.manual_seed(key_of(self._seed, number) >> 1)
        result = call.func(*args, **kwargs)
        for view, leaf in zip(call.outputs, tree_leaves(result), strict=True):
            if view is not None and view.storage not in bases:
                bases[view.storage] = _as_base(leaf, view)


def plain_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield fake tensors that are plain attributes of a module: the module, its attribute, the tensor."""
    for one in module.modules():
        for name, value in list(vars(one).items()):
            if is_fake(value):
                yield one, name, value


def _is_used(storage: torch.UntypedStorage) -> bool:
    """Whether a tensor uses it, apart from the recorder."""
    return bool(torch._C._storage_Use_Count(storage._cdata) > 1)


def _as_base(made: Tensor, view: _StorageView) -> Tensor:
    """Return the storage of a new tensor, flat, with the strides of the fake one."""
    if tuple(made.stride()) != view.stride:
        made = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=made.device).copy_(made)
    return made.as_strided((made.untyped_storage().nbytes() // made.itemsize,), (1,), 0)


def _of_view(view: _StorageView, bases: dict[int, Tensor]) -> Tensor:
    base = bases[view.storage]
    if base.dtype != view.dtype:
        base = base.view(view.dtype)
    return base.as_strided(view.size, view.stride, view.offset)


def _real(leaf: Any, bases: dict[int, Tensor]) -> Any:
    if isinstance(leaf, _StorageView):
        return _of_view(leaf, bases)
    return leaf.clone() if isinstance(leaf, Tensor) else leaf  # a later operator may change it


def is_fake(leaf: Any) -> bool:
    """Whether it is a tensor without values."""
    return isinstance(leaf, FakeTensor)
