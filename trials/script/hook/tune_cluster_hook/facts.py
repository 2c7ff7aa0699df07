"""What the program is seen to do, from inside, during its first two steps: then all hooks on modules are removed.

Knobs that do not act are found by comparing this with the candidate: ranks that never met, a micro-batch of another
size, parameters that are not sharded, layers that are not recomputed.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, Mapping

from . import modules, parameters
from .channel import emit, guarded
from .flops import FlopsOfStep
from .steps import STEPS

STEPS_SEEN = 1
PATIENCE = 4
"""Steps after which the hooks go, even if nothing was seen."""
PACKAGES = (
    "torch torch_npu transformers accelerate deepspeed pytorch_lightning lightning megatron.core torchtitan peft trl "
    "llamafactory swift transformer_engine flash_attn"
)


class Calls:
    """Forward calls of one module in the present step."""

    def __init__(self) -> None:
        self.forward = 0
        self.backward = 0
        self.sizes: Counter[int] = Counter()
        self.shape: list[int] | None = None

    def clear(self) -> None:
        """A new step begins."""
        self.forward = self.backward = 0


class Facts:
    """Hooks on the model, from when it is known until enough was seen."""

    def __init__(self) -> None:
        self.wants_root = True
        self._root: Any = None
        self._handles: list[Any] = []
        self._spine: list[Calls] = []
        self._layers: list[list[Calls]] = []
        self._dtype: str | None = None
        self._told: dict[str, Any] = {}
        self._compiled = False
        self._steps = self._ends = 0
        self._flops = FlopsOfStep()

    def root_of(self, optimizer: Any) -> Any:
        """The model that an optimiser trains."""
        return modules.root_of(optimizer)

    @guarded("model")
    def watch(self, root: Any) -> None:
        """Looks at the model, and hooks into it as far as nothing is compiled."""
        self.wants_root = False
        if root is None:
            return
        self._root = root
        self._compiled = modules.any_compiled(root)
        for module in modules.spine(root):
            calls = Calls()
            self._spine.append(calls)
            self._on_forward(module, calls, with_input=True)
        if self._compiled:
            return
        for parts in modules.layers(root):
            counted = [Calls() for _ in parts]
            self._layers.append(counted)
            for part, calls in zip(parts, counted):
                self._on_forward(part, calls)
        for linear in modules.linears(root):
            self._handles.append(linear.register_forward_hook(self._saw_output))

    def step_ended(self, source: str) -> None:
        """An optimiser step is over: says what is new. The next step's clock starts after that."""
        if self._ends <= PATIENCE:
            self._step_ended(source)
            STEPS.restart_clock(is_watched=bool(self._handles) or self._flops.is_counting)

    @guarded("facts")
    def _step_ended(self, source: str) -> None:
        self._ends += 1
        found: dict[str, Any] = {"world_size": parameters.world_size()}
        if self._ends == 1:
            found["versions"] = _versions()
            found.update(self._of_model() or {})
        found.update(self._of_calls())
        flops = self._flops.step_ended(self._compiled)
        if flops is not None:
            found["flops_per_step"] = flops
        new = {key: value for key, value in found.items() if self._told.get(key) != value}
        self._told.update(new)
        if new:
            emit(source, event="facts", **new)
        if self._steps >= STEPS_SEEN or self._ends > PATIENCE:
            self._remove()
            self._ends = PATIENCE + (0 if self._flops.is_counting else 1)

    @guarded("parameters")
    def _of_model(self) -> dict[str, int]:
        """Sizes of the model, if it is known."""
        return {} if self._root is None else parameters.facts(self._root)

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_forward(self, module: Any, calls: Calls, with_input: bool = False) -> None:
        """Counts the calls of a module, and the samples that it is given."""

        @guarded("facts")
        def before(_: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> None:
            if not self._handles or not module.training:
                return
            if _in_backward():
                calls.backward += 1
                return
            calls.forward += 1
            if with_input:
                tensor = _first_tensor(args) if args else None
                tensor = _first_tensor(kwargs) if tensor is None else tensor
                if tensor is not None:
                    calls.sizes[int(tensor.shape[0])] += 1
                    calls.shape = [int(size) for size in tensor.shape]

        try:
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
        except TypeError:  # before PyTorch 2.0
            handle = module.register_forward_pre_hook(before)
        self._handles.append(handle)

    @guarded("facts")
    def _saw_output(self, module: Any, args: Any, output: Any) -> None:
        tensor = _first_tensor(output)
        if self._dtype is None and tensor is not None and module.training:
            self._dtype = str(tensor.dtype).rpartition(".")[2]

    def _of_calls(self) -> dict[str, Any]:
        """Facts from the calls of this step; empty before the model was called."""
        found: dict[str, Any] = {}
        outer = next((calls for calls in self._spine if calls.forward and calls.sizes), None)
        if outer is not None:
            self._steps += 1
            found["forwards_per_step"] = outer.forward
            found["micro_batch_size"] = outer.sizes.most_common(1)[0][0]
            found["input_shape"] = outer.shape
        found.update(self._of_layers())
        if self._dtype is not None:
            found["dtype"] = self._dtype
        for calls in self._spine + [calls for layer in self._layers for calls in layer]:
            calls.clear()
        return found

    def _of_layers(self) -> dict[str, Any]:
        """How often a layer, or any part of it, runs for one forward pass: again in the backward pass if recomputed."""
        ratios = [
            max((1 + calls.backward / calls.forward for calls in layer if calls.forward), default=0.0)
            for layer in self._layers
        ]
        ran = [ratio for ratio in ratios if ratio]
        if not ran:
            return {}
        again = sum(ratio > 1 for ratio in ran)
        return {"layer_calls_per_forward": round(max(ran), 3), "layers": len(ran), "layers_recomputed": again}


def _in_backward() -> bool:
    """Whether this call is part of a backward pass: something is recomputed."""
    task = getattr(sys.modules["torch"]._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def _first_tensor(value: Any, depth: int = 3) -> Any:
    """The first tensor with a batch dimension in a call's arguments; None if there is none."""
    if hasattr(value, "dim") and hasattr(value, "shape"):
        return value if value.dim() else None
    if not depth or isinstance(value, str):
        return None
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return next((found for found in (_first_tensor(item, depth - 1) for item in items) if found is not None), None)


def _versions() -> dict[str, str]:
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in PACKAGES.split()}
    return {name: str(version) for name, version in found.items() if version is not None}


FACTS = Facts()
