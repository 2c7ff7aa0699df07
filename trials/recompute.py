"""Recomputation of activations. Depends on models and tensor parallelism."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.fx.traceback import get_current_meta
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.weak import WeakIdKeyDictionary

from trials.accelerator.device import Mark, mark, seconds_between
from trials.models.model import TrainModel
from trials.operators import leaves_in, map_leaves, operator_name, plain_operator
from trials.parallel.mesh import local_part, stored_part
from trials.reports import PatternEffect
from trials.sizes import Chunk, count_at
from trials.spec import Counts, Recompute

# Recipes that recompute a dropped tensor.
#
# A recipe holds an operator and its inputs; inputs that were dropped too are held as handles on their recipes. A
# *handle* stands for one dropped tensor: an output of a recipe, or a view of it. Autograd keeps the handle instead.


Timing = Callable[[torch.device], contextlib.AbstractContextManager[None]]


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of the rank's elements: the same object for all views, as long as one of them lives."""
    return stored_part(tensor).untyped_storage()


def offset_of(tensor: Tensor) -> int:
    """Return the offset of the rank's elements in their storage, in elements."""
    return int(local_part(tensor).storage_offset())


@dataclass(frozen=True, slots=True)
class TensorView:
    """Location of a tensor's elements in the storage of a recipe's output."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Distance from the output's first element, in elements."""
    distributed: tuple[DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...]] | None
    """Mesh, placements, global size and global stride of a distributed tensor."""

    @staticmethod
    def locate(tensor: Tensor, output_offset: int) -> TensorView:
        """Describe ``tensor`` as a view of an output that starts at ``output_offset`` of its storage."""
        local = local_part(tensor)
        distributed = None
        if isinstance(tensor, DTensor):
            distributed = (tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())
        return TensorView(local.shape, local.stride(), offset_of(tensor) - output_offset, distributed)

    def of(self, output: Tensor) -> Tensor:
        """Apply this view to the recomputed output."""
        local = local_part(output)
        part = local.as_strided(self.size, self.stride, offset_of(output) + self.offset)
        if self.distributed is None:
            return part
        mesh, placements, size, stride = self.distributed
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=size, stride=stride)


class Handle:
    """One dropped tensor: a view of a recipe's output, or of a tensor that autograd saved inside its operator."""

    __slots__ = ("__weakref__", "_view", "index", "is_saved", "recipe")

    def __init__(self, recipe: Rebuild, index: int, view: TensorView, *, is_saved: bool = False) -> None:
        """``index`` counts the outputs or, with ``is_saved``, what autograd saved, in order."""
        self.recipe = recipe
        self.index = index
        self.is_saved = is_saved
        self._view = view
        recipe.add(self)

    def tensor(self) -> Tensor:
        """Recompute the tensor, or reuse what another handle recomputed."""
        with torch.enable_grad():
            result = self.recipe.result(self)
        with torch.no_grad():
            return self._view.of(result)


class Input:
    """A tensor argument of a recipe's operator, without its autograd graph, which avoids reference cycles.

    A parameter stays the same object: FSDP restores its storage before the backward pass needs it, if the layer is one
    unit of FSDP (rule ``keep-fp32``).
    """

    __slots__ = ("_is_written", "_requires_grad", "_version", "source")

    def __init__(self, tensor: Tensor, handle: Handle | None, *, is_written: bool = False) -> None:
        """``handle`` is set if ``tensor`` itself is dropped; ``is_written`` if the operator only writes it."""
        self._requires_grad = tensor.requires_grad
        self._version = tensor._version
        self._is_written = is_written
        is_free = isinstance(tensor, nn.Parameter) or not tensor.requires_grad
        self.source: Tensor | Handle = handle or (tensor if is_free else tensor.detach())

    @property
    def is_intact(self) -> bool:
        """Whether it has not been written to since the call."""
        if isinstance(self.source, Handle):
            return self.source.recipe.is_intact()
        if self._is_written or isinstance(self.source, nn.Parameter):
            return True
        return self.source._version == self._version

    def tensor(self) -> Tensor:
        source = self.source.tensor() if isinstance(self.source, Handle) else self.source
        return source.clone() if self._is_written else source.detach().requires_grad_(self._requires_grad)


class Rebuild:
    """One repeatable call of an operator.

    It recomputes the outputs, and what autograd saved inside the operator. They live from the first handle's request
    until every handle has made one. If a handle then requests its tensor again (a retained graph, or a zero-bubble
    schedule with two passes), they are recomputed.
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
        """``args`` are the positional and keyword arguments, with an :class:`Input` for every tensor."""
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
        """Yield the inputs that live on because of it, without parameters."""
        for one in leaves_in(self._args, Input):
            if isinstance(one.source, Tensor) and not isinstance(one.source, nn.Parameter):
                yield one.source

    def is_intact(self) -> bool:
        """Whether no input has been written to since the call."""
        return all(one.is_intact for one in leaves_in(self._args, Input))

    def result(self, handle: Handle) -> Tensor:
        """Return the tensor that ``handle`` is a view of."""
        if self._results is None:
            self._results = self._compute()
            self._waiting = weakref.WeakSet(self._handles)
        outputs, saved = self._results
        self._waiting.discard(handle)
        if not self._waiting:
            self._results = None
        return (saved if handle.is_saved else outputs)[handle.index]

    def _compute(self) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Run the operator as originally: with gradients, which can affect the choice of a kernel."""
        if not self.is_intact():
            raise RuntimeError(f"an input of {self._name} was modified in place before its output was recomputed")
        # Dropped inputs first, so that their time is counted separately.
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
            raise RuntimeError(
                f"{self._name} kept different tensors when it was run again; exclude it from the patterns"
            )
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


# Matching of operators against patterns of selective recompute, and totals per pattern.


@dataclass(slots=True, kw_only=True)
class PatternTally:
    """Totals of one pattern on this rank since the last reset."""

    label: str
    expression: re.Pattern[str]
    num_layers: int = 0
    """Number of layers in this part of the model that it applies to."""
    num_matches: int = 0
    saved_bytes: int = 0
    """Bytes dropped, less those that recipes keep alive instead; may be negative."""
    marks: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Pairs of marks around every recomputation, on the device's clock."""

    def reset(self) -> None:
        self.num_matches = self.saved_bytes = 0
        self.marks.clear()

    @property
    def recompute_s(self) -> float:
        """Seconds spent on recomputation, on the device's clock if it has one; waits for the device."""
        if self.marks:
            self.marks[-1][1].synchronize()
        return sum(seconds_between(start, end) for start, end in self.marks)

    @contextlib.contextmanager
    def timing(self, device: torch.device) -> Iterator[None]:
        """Count the time of the body."""
        start = mark(device)
        yield
        self.marks.append((start, mark(device)))

    def matches(self, module_path: str, operator: str) -> bool:
        """Whether the pattern matches this operator call, its module, or an enclosing module in the layer."""
        parts = module_path.split(".") if module_path else []
        modules = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
        return any(self.expression.fullmatch(path) for path in (*modules, ".".join([*parts, operator])))


# Selective recompute: outputs of chosen operators are dropped after the forward pass and recomputed.
#
# While a layer runs, a torch function mode sees every operator call, and hooks see every tensor that autograd saves for
# the backward pass. If that is an output of a chosen operator, a view of one, or from inside a chosen operator,
# autograd gets a handle on a recipe instead. Module boundaries do not matter.
#
# Chosen operators must be functions of their arguments: no random numbers and no state (batch norm's running statistics
# are handled).


def recompute_selected(layer: nn.Module, tallies: Sequence[PatternTally]) -> None:
    """Make ``layer`` recompute what the patterns choose, in place; the first matching pattern counts."""
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
    """Return the pattern that matches this call of ``function``; None if none."""
    operator = operator_name(function)
    if operator is None:
        return None
    return next((tally for tally in tallies if tally.matches(module_path, operator)), None)


class _Slot:
    """A tensor that autograd saved inside a chosen operator, pending until the operator's outputs are known."""

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
    """Storage of the output; when it is freed, the recorder drops this entry."""
    recipe: Rebuild
    index: int
    tally: PatternTally
    offset: int
    dtype: torch.dtype
    version: int


@dataclass(frozen=True, slots=True)
class _Dropped:
    """A storage not kept for the backward pass; after the layer it turns out whether something else keeps it."""

    storage: weakref.ref[torch.UntypedStorage]
    num_bytes: int
    tally: PatternTally


class _Recorder(TorchFunctionMode):
    """Observes one forward pass of one layer."""

    def __init__(self, choose: Callable[[str, Callable[..., Any]], PatternTally | None], paths: list[str]) -> None:
        super().__init__()
        self._choose = choose
        self._paths = paths
        # By the id of the storage, which is the same object as long as it is referenced.
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
        """Return what autograd saves instead of ``tensor``.

        Detached, because an operator's output would keep its own graph alive.
        """
        tensor = tensor.detach()
        if self._slots is None:
            return self._handle_or_keep(tensor)
        slot = _Slot(tensor)
        self._slots.append(slot)
        return slot

    def close(self, lasting: Iterable[Tensor]) -> None:
        """Settle what was saved. ``lasting`` lives on for other reasons: parameters, the layer's inputs and outputs.

        Storages are freed only if nothing else holds them; inputs of recipes cost memory only if nothing else would
        have kept them.
        """
        self._outputs.clear()
        for dropped in self._dropped.values():
            _count_if_freed(dropped)
        counted = {id(storage_of(tensor)) for tensor in lasting} | self._kept.keys()
        for reference, tally in self._recipes:
            recipe = reference()
            for tensor in recipe.held_tensors() if recipe is not None else ():
                storage = storage_of(tensor)
                if id(storage) not in counted:
                    counted.add(id(storage))
                    tally.saved_bytes -= storage.nbytes()
        # Autograd's hooks may hold this object, so it must hold nothing.
        self._kept.clear()
        self._dropped.clear()
        self._recipes.clear()

    def _remember(self, recipe: Rebuild, tally: PatternTally, outputs: list[Tensor], inputs: set[int]) -> None:
        """Record the origin of the outputs; views of inputs need no record, as they share the storage."""
        for i, tensor in enumerate(outputs):
            storage = storage_of(tensor)
            if id(storage) not in inputs and self._output(storage) is None:
                forget = functools.partial(_forget, self._outputs, id(storage))
                reference = weakref.ref(storage, forget)
                self._outputs[id(storage)] = _Output(
                    reference, recipe, i, tally, offset_of(tensor), tensor.dtype, tensor._version
                )

    def _release(self, recipe: Rebuild, tally: PatternTally, slots: list[_Slot], inputs: set[int]) -> None:
        """Release what autograd saved inside the operator, except inputs."""
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
        """Return a handle for an output of a chosen operator or a view of one; None if data was overwritten."""
        output = self._output(storage_of(tensor))
        if output is None or tensor.dtype != output.dtype or tensor._version != output.version:
            return None
        if not output.recipe.is_intact():
            return None
        return Handle(output.recipe, output.index, TensorView.locate(tensor, output.offset))

    def _input(self, tensor: Tensor, *, may_write: bool) -> Input:
        """Wrap an input of a chosen operator. Batch norm writes its running statistics, which need no gradient."""
        return Input(tensor, self._handle(tensor), is_written=may_write and not tensor.requires_grad)

    def _drop(self, storage: torch.UntypedStorage, tally: PatternTally) -> None:
        known = self._dropped.get(id(storage))
        if known is not None and known.storage() is storage:
            return
        if known is not None:
            _count_if_freed(known)
        self._dropped[id(storage)] = _Dropped(weakref.ref(storage), storage.nbytes(), tally)

    def _output(self, storage: torch.UntypedStorage) -> _Output | None:
        """Return the chosen operator's output in this storage; None if there is none."""
        return self._outputs.get(id(storage))


def _count_if_freed(dropped: _Dropped) -> None:
    """Count the storage as saved if it is freed."""
    if dropped.storage() is None:
        dropped.tally.saved_bytes += dropped.num_bytes


def _forget(outputs: dict[int, _Output], key: int, _storage: Any) -> None:
    """Drop the record of a freed storage, because another may reuse its key."""
    outputs.pop(key, None)


# Selective recompute in a compiled graph, where the partitioner decides what is kept.
#
# While a layer is traced, a policy sees every dispatcher call with its origin: the module and the torch function that
# made it. Calls that a pattern matches are marked, and the partitioner recomputes them. All others stay the
# partitioner's choice, as without recompute.


class GraphPolicy:
    """What patterns choose in the graph of a layer. Equal layers share it, and so they share the graph."""

    _numbers = itertools.count()

    def __init__(self, layer: nn.Module, tallies: Sequence[PatternTally]) -> None:
        self.number = next(self._numbers)
        """Another one for every policy of this process."""
        self.num_layers = 0
        self._modules = {name: type(module) for name, module in layer.named_modules() if name}
        self._tallies = tuple(tallies)
        self._matches: dict[str, PatternTally] = {}
        """Pattern by call of a torch function, in the layer traced last."""
        self._dropped: MutableMapping[Tensor, None] = WeakIdKeyDictionary()
        """Results of chosen calls, and views of them."""

        def contexts() -> Any:
            self._matches.clear()
            self._dropped.clear()
            return create_selective_checkpoint_contexts(self._decide)  # type: ignore[no-untyped-call]

        self.contexts: Callable[[], Any] = contexts
        """Contexts of a layer and of its recomputation; dynamo takes functions only, not methods."""

    @staticmethod
    def shared_by(layer: nn.Module, tallies: Sequence[PatternTally]) -> Hashable:
        """Return what layers with the same policy have in common."""
        return tuple((name, type(module)) for name, module in layer.named_modules()), tuple(map(id, tallies))

    def add_layer(self) -> None:
        """Count a layer that is traced under this policy."""
        self.num_layers += 1
        for tally in self._tallies:
            tally.num_layers += 1

    def num_matches(self, tally: PatternTally) -> int:
        """Return the number of calls that the pattern chooses, over all layers of one pass."""
        return self.num_layers * sum(one is tally for one in self._matches.values())

    def _decide(self, context: Any, operator: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if not self._is_chosen() and not self._is_view_of_dropped(operator, args):
            return CheckpointPolicy.PREFER_SAVE
        self._dropped.update(dict.fromkeys(leaves_in(context.op_output, Tensor)))
        return CheckpointPolicy.MUST_RECOMPUTE

    def _is_chosen(self) -> bool:
        """Whether a pattern matches the call being traced; the first one counts."""
        meta = get_current_meta()
        call, function = (meta.get("source_fn_stack") or [("", None)])[-1]
        operator = _traced_name(call, function)
        if operator is None:
            return False
        module_path = self._path(list((meta.get("nn_module_stack") or {}).values()))
        tally = next((one for one in self._tallies if one.matches(module_path, operator)), None)
        if tally is not None:
            self._matches[call] = tally
        return tally is not None

    def _is_view_of_dropped(self, operator: Any, args: Any) -> bool:
        """Whether keeping the result would keep that of a chosen call."""
        return getattr(operator, "is_view", False) and any(one in self._dropped for one in leaves_in(args, Tensor))

    def _path(self, stack: Sequence[tuple[str, type]]) -> str:
        """Return the innermost module's path in the layer, from its path in what is compiled."""
        for path, kind in reversed(stack):
            parts = _PATH_PART.findall(path)
            for i in range(len(parts)):
                if self._modules.get(name := ".".join(parts[i:])) is kind:
                    return name
        return ""


_PATH_PART = re.compile(r"\w+")


def _traced_name(call: str, function: Any) -> str | None:
    """Return the operator's name of a traced call, whose function is a class if a module of torch was called."""
    if isinstance(function, type):
        return plain_operator(re.sub(r"_\d+$", "", call))
    return plain_operator(function) if isinstance(function, str) else operator_name(function)


class SelectiveWrapper(CheckpointWrapper):
    """A layer whose graph is traced under a policy."""

    def __init__(self, layer: nn.Module, policy: GraphPolicy, *, preserve_rng_state: bool) -> None:
        super().__init__(layer, context_fn=policy.contexts, preserve_rng_state=preserve_rng_state)
        policy.add_layer()
        self.policy_number = policy.number

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer. Dynamo compiles once for every number read here; it ignores the policy itself (torch 2.13)."""
        assert self.policy_number >= 0
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]


# A candidate's recompute policy: its application to a model, and its effects.


logger = logging.getLogger(__name__)

COMMUNICATION = "communication"
"""Label of communication recompute among the patterns."""
_GATHERING = r"(.*\.)?gather_sequence"


class RecomputeMeter:
    """Measures what selective recompute and communication recompute drop and recompute."""

    def __init__(
        self, tallies: tuple[PatternTally, ...] = (), policies: Iterable[GraphPolicy] = (), num_graph_passes: int = 0
    ) -> None:
        """``num_graph_passes`` is the number of passes per step if the layers are compiled, else 0."""
        self._tallies = tallies
        self._policies = tuple(policies)
        self._num_graph_passes = num_graph_passes
        self._num_microbatches = 0
        self._has_warned = False

    def reset(self) -> None:
        """Reset the counts."""
        self._num_microbatches = 0
        for tally in self._tallies:
            tally.reset()

    def count_microbatch(self, _module: nn.Module, _args: Any) -> None:
        """Count a pass of the model; a forward pre-hook."""
        self._num_microbatches += 1

    def effects(self, num_steps: int) -> tuple[PatternEffect, ...]:
        """Return the effect of every pattern per step since the last reset; waits for the device."""
        effects = tuple(self._effect(tally, max(1, num_steps)) for tally in self._tallies)
        if not self._has_warned:
            self._has_warned = True
            _warn([effect for effect, tally in zip(effects, self._tallies, strict=True) if tally.num_layers])
        return effects

    def _effect(self, tally: PatternTally, num_steps: int) -> PatternEffect:
        if self._num_graph_passes:
            num_matches = sum(policy.num_matches(tally) for policy in self._policies) * self._num_graph_passes
            return PatternEffect(
                pattern=tally.label, num_matches=num_matches, saved_bytes=0, recompute_s=0.0, is_compiled=True
            )
        return PatternEffect(
            pattern=tally.label,
            num_matches=round(tally.num_matches / num_steps),
            saved_bytes=max(0, round(tally.saved_bytes / max(1, self._num_microbatches))),
            recompute_s=tally.recompute_s / num_steps,
        )


def _warn(effects: list[PatternEffect]) -> None:
    """Warn about patterns without effect on the layers that they apply to."""
    for effect in effects:
        if effect.num_matches == 0:
            logger.warning("recompute pattern %r matches nothing in this part of the model", effect.pattern)
        elif effect.saved_bytes == 0 and not effect.is_compiled:
            logger.warning("recompute pattern %r saves nothing: something else keeps the tensors", effect.pattern)


def apply_recompute(
    model: TrainModel, recompute: Recompute, chunk: Chunk, *, num_graph_passes: int = 0
) -> RecomputeMeter:
    """Make the layers of this virtual stage recompute, in place.

    Layers recomputed in full come first, so the other counts have an effect only if they are larger.

    Args:
        num_graph_passes: number of passes per step if the layers will be compiled, else 0.
    """
    names = list(model.layers)
    num_full = count_at(recompute.full, chunk.chunk, chunk.stage)
    patterns = _patterns(recompute)
    tallies = tuple(PatternTally(label=label, expression=re.compile(text)) for label, text, _ in patterns)
    limits = [count_at(counts, chunk.chunk, chunk.stage) for _, _, counts in patterns]
    policies: dict[Hashable, GraphPolicy] = {}
    for i, name in enumerate(names):
        layer = model.layers[name]
        chosen = [tally for tally, limit in zip(tallies, limits, strict=True) if i < limit]
        # Built-in models draw no random numbers, so there is no random state to restore.
        if i < num_full:
            model.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=model.is_own)
        elif chosen and num_graph_passes:
            policy = policies.setdefault(GraphPolicy.shared_by(layer, chosen), GraphPolicy(layer, chosen))
            model.layers[name] = SelectiveWrapper(layer, policy, preserve_rng_state=model.is_own)
        elif chosen:
            recompute_selected(layer, chosen)
    meter = RecomputeMeter(tallies, policies.values(), num_graph_passes)
    if tallies and not num_graph_passes:
        model.register_forward_pre_hook(meter.count_microbatch)
    return meter


def _patterns(recompute: Recompute) -> list[tuple[str, str, Counts]]:
    """Return label, regular expression and layer counts of every pattern."""
    patterns: list[tuple[str, str, Counts]] = [
        (one.pattern, one.pattern, one.num_layers) for one in recompute.selective
    ]
    if recompute.communication:
        patterns.append((COMMUNICATION, _GATHERING, recompute.communication))
    return patterns
