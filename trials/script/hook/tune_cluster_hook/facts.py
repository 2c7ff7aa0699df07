"""Facts about the program, observed from inside during its first two steps; then all hooks on modules are removed.

Comparing them with the candidate shows knobs without effect: ranks that never communicate, a micro-batch of another
size, parameters that are not sharded, layers that are not recomputed.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from typing import Any, Callable, Mapping

from .collective_calls import Buckets
from .compiler import COMPILER, before_compile
from .memory_parts import MEMORY
from .model_facts import EXPERTS, input_facts, is_of_experts, model_facts
from .operator_inspector import OperatorInspector
from .roots import compiled_call, in_backward
from .steps import STEPS, accelerator, emit, guarded
from .watched_options import OPTIONS

# ---- Parameter bytes of this process and, if visible, of the whole model


def numel(parameter: Any) -> int:
    """Return the elements of the whole parameter, as far as its type shows."""
    whole = getattr(parameter, "ds_numel", None)
    return int(whole if whole is not None else parameter.numel())


def local_numel(parameter: Any) -> int:
    """Return the elements that this process holds when nothing is gathered."""
    for name in ("ds_tensor", "_local_tensor"):  # DeepSpeed's ZeRO-3, DTensor
        shard = getattr(parameter, name, None)
        if shard is not None:
            return int(shard.numel())
    return int(parameter.numel())


def facts(root: Any) -> dict[str, int]:
    """Return ``parameter_bytes_local`` and, if known, ``parameter_bytes_global`` and ``parameters``."""
    flat = _flat_parameters(root)
    local, whole, count = flat["local"], flat["whole"], flat["count"]
    sharded = bool(flat["whole"])
    for parameter in root.parameters():
        if id(parameter) in flat["ids"]:
            continue
        size = int(parameter.element_size())
        local += local_numel(parameter) * size
        whole += numel(parameter) * size
        count += numel(parameter)
        sharded = sharded or hasattr(parameter, "ds_numel") or hasattr(parameter, "_local_tensor")
    found = {"parameter_bytes_local": local}
    if _is_whole(root, sharded):
        found.update(parameter_bytes_global=whole, parameters=count)
    return found


def _flat_parameters(root: Any) -> dict[str, Any]:
    """Return parameters flattened by FSDP 1; their originals are returned as ids, so that they do not count twice."""
    sizes: dict[str, Any] = {"local": 0, "whole": 0, "count": 0}
    ids: set[int] = set()
    for module in root.modules():
        handle: Any | None = module.__dict__.get("_handle")
        flat = getattr(handle, "flat_param", None)
        if flat is None or not hasattr(flat, "_unpadded_unsharded_size"):
            continue
        elements = int(flat._unpadded_unsharded_size.numel())
        sizes["local"] += int(flat._sharded_size.numel()) * flat.element_size()
        sizes["whole"] += elements * flat.element_size()
        sizes["count"] += elements
        ids.update(id(parameter) for parameter in (getattr(flat, "_params", None) or []))
        ids.add(id(flat))
    return {**sizes, "ids": ids}


def _is_whole(root: Any, sharded: bool) -> bool:
    """Whether this process sees the whole model: not a pipeline stage, no unmarked shards of tensors."""
    if any(name in sys.modules for name in ("megatron.core.parallel_state", "deepspeed.runtime.pipe.engine")) and any(
        "Pipeline" in type(module).__name__ or type(module).__module__.startswith("megatron.")
        for module in root.modules()
    ):
        return False
    if _uses_pipelining():
        return False
    replicated = any(
        type(module).__name__ in ("DistributedDataParallel", "DeepSpeedEngine") for module in root.modules()
    )
    return sharded or replicated or world_size() == 1


def _uses_pipelining() -> bool:
    """Whether the program has imported code that splits models into stages."""
    return "torch.distributed.pipelining.schedules" in sys.modules and world_size() > 1


def world_size() -> int:
    """Return the size of the default process group; 1 without one, as every process then trains alone."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 1
    return int(dist.get_world_size())


# ---- The parts of a model that show what a program does: its root, its repeated layers, its linear layers

MAX_LAYERS = 64
MAX_LEAVES = 8


def root_of(optimizer: Any) -> Any:
    """Return the outermost module with most of an optimiser's parameters, else with most parameters; None if none.

    Python's garbage collector lists all modules, so no hook is needed before the first step.
    """
    kind = sys.modules["torch"].nn.Module
    modules = [found for found in gc.get_objects() if issubclass(type(found), kind) and "_modules" in found.__dict__]
    children = {id(child) for module in modules for child in module._modules.values()}
    roots = [module for module in modules if id(module) not in children]
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def weight(module: Any) -> Any:
        parameters = list(module.parameters())
        return sum(id(parameter) in wanted for parameter in parameters), sum(map(numel, parameters))

    best = max(roots, key=weight, default=None)
    return best if best is not None and weight(best) != (0, 0) else None


def spine(root: Any) -> list[Any]:
    """Return the root and, while one child holds more than half of the parameters, that child; wrappers come first.

    It ends at compiled modules, in which hooks would be traced.
    """
    found: list[Any] = []
    module = root
    while module is not None and compiled_call(module) is None:
        found.append(module)
        if is_compiled(module):
            break
        total = _weight(module)
        module = next((child for child in module.children() if total and _weight(child) > total / 2), None)
    return found


def _weight(module: Any) -> int:
    return sum(map(numel, module.parameters()))


def is_compiled(module: Any) -> bool:
    """Whether ``torch.compile`` made this module, or it calls one that it made."""
    return type(module).__name__ == "OptimizedModule" or compiled_call(module) is not None


def any_compiled(root: Any) -> bool:
    """Whether any part of the model is compiled, or any function of the program was."""
    return any(is_compiled(module) for module in root.modules()) or was_compiled()


def was_compiled() -> bool:
    """Whether any function of the program has been compiled."""
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return bool(counters) and counters.get("frames", {}).get("ok", 0) > 0


def layers(root: Any) -> list[list[Any]]:
    """Return the repeated layers of a model: for each, itself and its first parts that directly hold parameters."""
    groups: dict[int, list[Any]] = {}
    for module in root.modules():
        members: dict[type, list[Any]] = {}
        for child in module.children():
            members.setdefault(type(child), []).append(child)
        for same in members.values():
            weight = sum(map(_weight, same)) if len(same) > 1 else 0
            if weight:
                groups.setdefault(weight, same)
    largest = groups[max(groups)] if groups else []
    return [[layer, *_leaves(layer)] for layer in largest[:MAX_LAYERS]]


def _leaves(layer: Any) -> list[Any]:
    return [part for part in layer.modules() if part is not layer and part._parameters][:MAX_LEAVES]


def linears(root: Any) -> list[Any]:
    """Return the first linear layers, including Megatron's and Transformer Engine's."""
    return [module for module in root.modules() if "Linear" in type(module).__name__][:MAX_LEAVES]


def routers(root: Any) -> list[Any]:
    """Return the modules that choose experts for tokens, or receive the choice; parts of these are left out."""
    found: list[Any] = []
    inner: set[int] = set()
    for module in root.modules():
        if id(module) in inner:
            continue
        is_router = "Router" in type(module).__name__ and any(hasattr(module, name) for name in EXPERTS)
        if is_router or is_of_experts(module):
            found.append(module)
            inner.update(map(id, module.modules()))
    return found[: 2 * MAX_LAYERS]


# ---- Observations in the first steps

STEPS_SEEN = 1
PATIENCE = 4
"""Steps after which the hooks are removed even if nothing was observed."""
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "DataParallel")
PACKAGES = (
    "torch torch_npu transformers accelerate deepspeed pytorch_lightning lightning megatron.core torchtitan peft trl "
    "llamafactory swift transformer_engine flash_attn"
)


class Calls:
    """Forward calls of one module in the current step."""

    def __init__(self) -> None:
        self.forward = 0
        self.backward = 0
        self.sizes: Counter[int] = Counter()
        self.shape: list[int] | None = None
        self.input: dict[str, int] = {}

    def clear(self) -> None:
        """Begin a new step."""
        self.forward = self.backward = 0


class Facts:
    """Hooks on the model, from when it is known until enough has been observed."""

    def __init__(self) -> None:
        self.wants_root = True
        self._root: Callable[[], Any] = lambda: None
        self._stop_waiting: Callable[[], None] = lambda: None
        """Ends the wait for a call of ``torch.compile``."""
        self._handles: list[Any] = []
        self._spine: list[Calls] = []
        self._layers: list[list[Calls]] = []
        self._dtype: str | None = None
        self._loads: list[tuple[float, float]] = []
        """Mean number of tokens per expert, and that of the busiest one, of each routed batch."""
        self._reported: dict[str, Any] = {}
        self._compiled = False
        self._steps = self._ends = 0
        self._operators = OperatorInspector()
        self._buckets = Buckets()

    @property
    def root(self) -> Any:
        """The model in training; None before it is known, and after the program has dropped it."""
        return self._root()

    @property
    def is_early(self) -> bool:
        """Whether the first steps are still running."""
        return self._ends <= PATIENCE

    def root_of(self, optimizer: Any) -> Any:
        """Return the model that an optimiser trains."""
        return root_of(optimizer)

    @guarded("model")
    def watch(self, root: Any) -> None:
        """Inspect the model, and hook into it where nothing is compiled."""
        self.wants_root = False
        if root is None:
            return
        self._root = weakref.ref(root)
        self._stop_waiting = before_compile(self._give_up)
        self._compiled = any_compiled(root)
        for module in spine(root):
            self._buckets.watch(module)
            calls = Calls()
            self._spine.append(calls)
            self._on_forward(module, calls, with_input=True)
        if self._compiled:
            return
        for parts in layers(root):
            counted = [Calls() for _ in parts]
            self._layers.append(counted)
            for part, calls in zip(parts, counted):
                self._on_forward(part, calls)
        for linear in linears(root):
            self._handles.append(linear.register_forward_hook(self._saw_output))
        for router in routers(root):
            self._handles.append(router.register_forward_hook(self._saw_routing))

    def step_ended(self, source: str) -> None:
        """Report news after an optimiser step. The next step's clock starts after that."""
        is_reported, is_early = OPTIONS.report(source), self.is_early
        if is_early and not self._step_ended(source):
            self._give_up()
        is_later = not is_early and self._later(source)
        if is_early or is_reported or is_later:
            STEPS.restart_clock(is_watched=bool(self._handles) or self._operators.is_on)

    def _give_up(self) -> None:
        """Give up after a failure, or before a compilation, which would trace the hooks or forbid the inspection."""
        self._ends = PATIENCE + 1
        self._remove()
        self._operators.stop()
        self._stop_waiting()
        MEMORY.stop()

    @guarded("facts")
    def _step_ended(self, source: str) -> bool:
        self._ends += 1
        found: dict[str, Any] = {"world_size": world_size(), **STEPS.surroundings()}
        if self._ends == 1:
            found["versions"] = _versions()
            found.update(_device() or {})
            found.update(self._of_model() or {})
        found.update(self._of_calls())
        found.update(MEMORY.read(self.root) or {})
        found.update(self._operators.step_ended(self._compiled or was_compiled()))
        found.update({**(self._buckets.read() or {}), **(COMPILER.read() or {})})
        self._report(source, found)
        if self._steps >= STEPS_SEEN or self._ends > PATIENCE:
            self._remove()
            self._ends = PATIENCE + (0 if self._operators.is_on else 1)
        if self._ends > PATIENCE:
            self._stop_waiting()
            MEMORY.stop()
        return True

    @guarded("later facts")
    def _later(self, source: str) -> bool:
        """Report changes after the first steps. Return whether that took time."""
        is_read = self._buckets.is_read
        found = (self._buckets.read() or {}) if is_read else {}
        found.update(COMPILER.read() or {})
        return self._report(source, found) or is_read

    def _report(self, source: str, found: dict[str, Any]) -> bool:
        new = {key: value for key, value in found.items() if self._reported.get(key) != value}
        self._reported.update(new)
        if new:
            emit(source, event="facts", **new)
        return bool(new)

    @guarded("parameters")
    def _of_model(self) -> dict[str, Any]:
        """Return the model's sizes, its wrapper and whether any of it is compiled, if it is known."""
        if self.root is None:
            return {}
        wrappers = [type(module).__name__ for module in spine(self.root)]
        wrapper = next((name for name in wrappers if name in WRAPPERS), None)
        shown = {} if wrapper is None else {"wrapper": wrapper}
        sizes, parts = facts(self.root), model_facts(self.root)
        if parts.get("experts_local", 0) < parts.get("experts", 0):
            sizes = {"parameter_bytes_local": sizes["parameter_bytes_local"]}
        return {**sizes, **shown, **parts, "is_compiled": int(self._compiled)}

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_forward(self, module: Any, calls: Calls, with_input: bool = False) -> None:
        """Count the calls of a module, and the samples in their arguments."""

        @guarded("calls of modules")
        def before(_: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> None:
            if not self._handles or not module.training:
                return
            if in_backward():
                calls.backward += 1
                return
            if with_input and not sys.modules["torch"].is_grad_enabled():  # no training, e.g. an acting agent
                return
            calls.forward += 1
            if with_input:
                tensor = _first_tensor(args) if args else None
                tensor = _first_tensor(kwargs) if tensor is None else tensor
                if tensor is not None:
                    calls.sizes[int(tensor.shape[0])] += 1
                    calls.shape = [int(size) for size in tensor.shape]
                    calls.input = input_facts(tensor, "vocab_size" in self._reported)

        try:
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
        except TypeError:  # before PyTorch 2.0
            handle = module.register_forward_pre_hook(before)
        self._handles.append(handle)

    @guarded("outputs of modules")
    def _saw_output(self, module: Any, args: Any, output: Any) -> None:
        tensor = _first_tensor(output)
        if self._dtype is None and tensor is not None and module.training:
            self._dtype = str(tensor.dtype).rpartition(".")[2]

    @guarded("routing")
    def _saw_routing(self, module: Any, args: Any, output: Any) -> None:
        experts = int(self._reported.get("experts") or model_facts(self.root).get("experts", 0))
        if not module.training or in_backward() or not experts:
            return
        counts = _tokens_by_expert((args, output), experts)
        if counts is not None and sum(counts):
            self._loads.append((sum(counts) / len(counts), float(max(counts))))

    def _of_calls(self) -> dict[str, Any]:
        """Return facts from the calls of this step; empty before the model was called."""
        found: dict[str, Any] = {}
        outer = next((calls for calls in self._spine if calls.forward and calls.sizes), None)
        if outer is not None:
            self._steps += 1
            found["forwards_per_step"] = outer.forward
            found["micro_batch_size"] = outer.sizes.most_common(1)[0][0]
            found["input_shape"] = outer.shape
            found.update(outer.input)
        found.update(self._of_layers())
        if self._dtype is not None:
            found["dtype"] = self._dtype
        if self._loads:
            found["tokens_per_expert"] = round(sum(mean for mean, _ in self._loads) / len(self._loads), 3)
            found["busiest_expert"] = round(max(most / mean for mean, most in self._loads), 3)
            self._loads.clear()
        for calls in self._spine + [calls for layer in self._layers for calls in layer]:
            calls.clear()
        return found

    def _of_layers(self) -> dict[str, Any]:
        """Return how often a layer, or any part of it, runs per forward pass; more than once if it is recomputed."""
        ratios = [
            max((1 + calls.backward / calls.forward for calls in layer if calls.forward), default=0.0)
            for layer in self._layers
        ]
        ran = [ratio for ratio in ratios if ratio]
        if not ran:
            return {}
        again = sum(ratio > 1 for ratio in ran)
        return {"layer_calls_per_forward": round(max(ran), 3), "layers": len(ran), "layers_recomputed": again}


def _tokens_by_expert(value: Any, experts: int, depth: int = 3) -> Any:
    """Return the tokens of each expert, from the first chosen experts (integers) or map of chosen ones (truth values)
    of a router; None if there are none."""
    if hasattr(value, "dim") and hasattr(value, "dtype"):
        kind, is_choice = str(value.dtype), value.dim() == 2 and value.shape[1] <= experts
        if is_choice and kind == "torch.int64":
            return value.flatten().bincount(minlength=experts).tolist()
        return value.sum(0).tolist() if is_choice and kind == "torch.bool" and value.shape[1] == experts else None
    items = value if depth and isinstance(value, (list, tuple)) else ()
    found = (_tokens_by_expert(item, experts, depth - 1) for item in items)
    return next((counts for counts in found if counts is not None), None)


def _first_tensor(value: Any, depth: int = 3) -> Any:
    """Return the first tensor with a batch dimension in a call's arguments; None if there is none."""
    if hasattr(value, "dim") and hasattr(value, "shape"):
        return value if value.dim() else None
    if not depth or isinstance(value, str):
        return None
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return next((found for found in (_first_tensor(item, depth - 1) for item in items) if found is not None), None)


def sequence_length(batch: Any, depth: int = 2) -> int:
    """Return the tokens per sample: the second size of the batch's first integer tensor with one; 0 without any."""
    if hasattr(batch, "dim") and hasattr(batch, "is_floating_point"):
        return int(batch.shape[1]) if batch.dim() > 1 and not batch.is_floating_point() else 0
    if not depth or isinstance(batch, str):
        return 0
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((size for item in items if (size := sequence_length(item, depth - 1))), 0)


@guarded("device")
def _device() -> dict[str, str]:
    """Return the name of the accelerator in use."""
    backend = accelerator()
    name = getattr(backend, "get_device_name", None)
    return {"device_name": str(name())} if name is not None else {}


def _versions() -> dict[str, str]:
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in PACKAGES.split()}
    return {name: str(version) for name, version in found.items() if version is not None}


FACTS = Facts()
