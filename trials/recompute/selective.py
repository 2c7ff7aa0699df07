"""Selective recompute: what chosen operators make is dropped after the forward pass and computed again.

While a layer runs, a torch function mode sees every operator it calls, and hooks see every tensor that autograd keeps
for the backward pass. Where that is an output of a chosen operator, a view of one, or comes from inside a chosen
operator, autograd gets a handle on a recipe instead. Nothing depends on where modules begin and end.

Chosen operators must be functions of their arguments: they draw no random numbers and keep no state (batch norm's
running statistics are taken care of).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from trials.operators import leaves_in, map_leaves, operator_name
from trials.recompute.rebuild import Handle, Input, Rebuild, TensorView, offset_of, storage_of
from trials.recompute.tally import PatternTally


def recompute_selected(layer: nn.Module, tallies: Sequence[PatternTally]) -> None:
    """Make ``layer`` recompute what the patterns choose, in place; where several match, the first one counts."""
    for tally in tallies:
        tally.num_layers += 1
    paths: list[str] = []
    for name, module in layer.named_modules():
        if module is not layer:
            module.register_forward_pre_hook(functools.partial(_enter, paths, name))
            module.register_forward_hook(functools.partial(_leave, paths))
    choose = functools.lru_cache(maxsize=4096)(functools.partial(_choose, tuple(tallies)))
    forward = layer.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        paths.clear()
        recorder = _Recorder(choose, paths)
        with recorder, saved_tensors_hooks(recorder.pack, _unpack):
            outputs = forward(*args, **kwargs)
        recorder.close(leaves_in(([*layer.parameters(), *layer.buffers()], args, kwargs, outputs), Tensor))
        return outputs

    layer.forward = wrapped


def _enter(paths: list[str], name: str, _module: nn.Module, _args: Any) -> None:
    paths.append(name)


def _leave(paths: list[str], _module: nn.Module, _args: Any, _outputs: Any) -> None:
    paths.pop()


def _choose(tallies: tuple[PatternTally, ...], module_path: str, function: Callable[..., Any]) -> PatternTally | None:
    """The pattern that names ``function`` where it is called."""
    operator = operator_name(function)
    if operator is None:
        return None
    return next((tally for tally in tallies if tally.matches(module_path, operator)), None)


class _Slot:
    """What autograd keeps from inside a chosen operator, open until the operator's outputs are known."""

    __slots__ = ("held",)

    def __init__(self, held: Tensor) -> None:
        self.held: Tensor | Handle = held


def _unpack(kept: Tensor | Handle | _Slot) -> Tensor:
    held = kept.held if isinstance(kept, _Slot) else kept
    return held.tensor() if isinstance(held, Handle) else held


@dataclass(frozen=True, slots=True)
class _Output:
    """An output of a chosen operator, while its layer runs."""

    storage: weakref.ref[torch.UntypedStorage]
    """Where the output lies; once that is gone, the recorder forgets this."""
    recipe: Rebuild
    index: int
    tally: PatternTally
    offset: int
    dtype: torch.dtype
    version: int


@dataclass(frozen=True, slots=True)
class _Dropped:
    """A storage not kept for the backward pass; whether something else keeps it shows once the layer is done."""

    storage: weakref.ref[torch.UntypedStorage]
    num_bytes: int
    tally: PatternTally


class _Recorder(TorchFunctionMode):
    """Watches one forward pass of one layer."""

    def __init__(self, choose: Callable[[str, Callable[..., Any]], PatternTally | None], paths: list[str]) -> None:
        super().__init__()
        self._choose = choose
        self._paths = paths
        # By the id of the storage, which is the same object as long as anything holds it.
        self._outputs: dict[int, _Output] = {}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._dropped: dict[int, _Dropped] = {}
        self._recipes: list[tuple[weakref.ref[Rebuild], PatternTally]] = []
        self._slots: list[_Slot] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tally = self._choose(self._paths[-1] if self._paths else "", func)
        if tally is None or "out" in kwargs or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        slots = self._slots = []
        result = func(*args, **kwargs)
        self._slots = None
        outputs = list(leaves_in(result, Tensor))
        tally.num_matches += bool(outputs)
        inputs = {id(storage_of(tensor)) for tensor in leaves_in((args, kwargs), Tensor)}
        if slots or any(id(storage_of(tensor)) not in inputs for tensor in outputs):
            hold = functools.partial(self._input, may_write=operator_name(func) == "batch_norm")
            recipe = Rebuild(func, map_leaves(hold, (args, kwargs), Tensor), outputs[0].device, tally.timing)
            self._recipes.append((weakref.ref(recipe), tally))
            self._remember(recipe, tally, outputs, inputs)
            self._release(recipe, tally, slots, inputs)
        return result

    def pack(self, tensor: Tensor) -> Tensor | Handle | _Slot:
        """What autograd keeps instead of ``tensor``.

        Detached, for an operator's output would keep its own graph alive.
        """
        tensor = tensor.detach()
        if self._slots is None:
            return self._handle_or_keep(tensor)
        slot = _Slot(tensor)
        self._slots.append(slot)
        return slot

    def close(self, lasting: Iterable[Tensor]) -> None:
        """Settle what was saved. ``lasting`` lives on for other reasons: parameters, the layer's inputs, its outputs.

        Storages are dropped for good only if nothing else holds them by now; inputs of recipes cost memory only if
        nothing else would have kept them.
        """
        self._outputs.clear()
        for dropped in self._dropped.values():
            _settle(dropped)
        counted = {id(storage_of(tensor)) for tensor in lasting} | self._kept.keys()
        for reference, tally in self._recipes:
            recipe = reference()
            for tensor in recipe.held_tensors() if recipe is not None else ():
                storage = storage_of(tensor)
                if id(storage) not in counted:
                    counted.add(id(storage))
                    tally.saved_bytes -= storage.nbytes()
        # Autograd's hooks may hold on to this object; it must hold on to nothing.
        self._kept.clear()
        self._dropped.clear()
        self._recipes.clear()

    def _remember(self, recipe: Rebuild, tally: PatternTally, outputs: list[Tensor], inputs: set[int]) -> None:
        """Note how the outputs came about; views of inputs need no note, their storage tells."""
        for i, tensor in enumerate(outputs):
            storage = storage_of(tensor)
            if id(storage) not in inputs and self._output(storage) is None:
                forget = functools.partial(_forget, self._outputs, id(storage))
                reference = weakref.ref(storage, forget)
                self._outputs[id(storage)] = _Output(
                    reference, recipe, i, tally, offset_of(tensor), tensor.dtype, tensor._version
                )

    def _release(self, recipe: Rebuild, tally: PatternTally, slots: list[_Slot], inputs: set[int]) -> None:
        """Let go of what autograd kept from inside the operator, inputs apart."""
        for i, slot in enumerate(slots):
            tensor = slot.held
            assert isinstance(tensor, Tensor)
            storage = storage_of(tensor)
            if self._output(storage) is not None or id(storage) in inputs:
                slot.held = self._handle_or_keep(tensor)
            else:
                slot.held = Handle(recipe, i, TensorView.locate(tensor, offset_of(tensor)), is_saved=True)
                self._drop(storage, tally)

    def _handle_or_keep(self, tensor: Tensor) -> Tensor | Handle:
        handle, storage = self._handle(tensor), storage_of(tensor)
        output = self._output(storage)
        if handle is None or output is None:
            self._kept[id(storage)] = storage
            return tensor
        self._drop(storage, output.tally)
        return handle

    def _handle(self, tensor: Tensor) -> Handle | None:
        """A handle for an output of a chosen operator, or a view of one, unless something has been written over."""
        output = self._output(storage_of(tensor))
        if output is None or tensor.dtype != output.dtype or tensor._version != output.version:
            return None
        if not output.recipe.is_intact():
            return None
        return Handle(output.recipe, output.index, TensorView.locate(tensor, output.offset))

    def _input(self, tensor: Tensor, *, may_write: bool) -> Input:
        """A chosen operator's input. Batch norm writes its running statistics, which need no gradient."""
        return Input(tensor, self._handle(tensor), is_written=may_write and not tensor.requires_grad)

    def _drop(self, storage: torch.UntypedStorage, tally: PatternTally) -> None:
        known = self._dropped.get(id(storage))
        if known is not None and known.storage() is storage:
            return
        if known is not None:
            _settle(known)
        self._dropped[id(storage)] = _Dropped(weakref.ref(storage), storage.nbytes(), tally)

    def _output(self, storage: torch.UntypedStorage) -> _Output | None:
        """The chosen operator's output in this storage; None where it holds none."""
        return self._outputs.get(id(storage))


def _settle(dropped: _Dropped) -> None:
    """Count the storage as saved if nothing keeps it."""
    if dropped.storage() is None:
        dropped.tally.saved_bytes += dropped.num_bytes


def _forget(outputs: dict[int, _Output], key: int, _storage: Any) -> None:
    """Drop what is noted of a storage that is gone, as another may take its place."""
    outputs.pop(key, None)
