"""Which parts of a model tell what a training program does: its root, its repeated layers, its linear layers."""

from __future__ import annotations

import gc
import sys
from typing import Any

from .parameters import numel

MAX_LAYERS = 64
MAX_LEAVES = 8


def root_of(optimizer: Any) -> Any:
    """The outermost module with most of an optimiser's parameters; else with most parameters; None if there is none.

    Python's garbage collector knows all modules: no hook has to be in place before the first step.
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
    """The root and, as long as one child holds more than half of the parameters, that child: wrappers come first.

    Ends at what is compiled: hooks there would be traced.
    """
    found: list[Any] = []
    module = root
    while module is not None and getattr(module, "_compiled_call_impl", None) is None:
        found.append(module)
        if is_compiled(module):
            break
        total = _weight(module)
        module = next((child for child in module.children() if total and _weight(child) > total / 2), None)
    return found


def _weight(module: Any) -> int:
    return sum(map(numel, module.parameters()))


def is_compiled(module: Any) -> bool:
    """Whether ``torch.compile`` made this module, or is what calls it."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def any_compiled(root: Any) -> bool:
    """Whether any part of the model is compiled, or any function of the program was so far."""
    if any(is_compiled(module) for module in root.modules()):
        return True
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return bool(counters) and counters.get("frames", {}).get("ok", 0) > 0


def layers(root: Any) -> list[list[Any]]:
    """The repeated layers of a model: of each, itself and its first parts that hold parameters of their own."""
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
    """The first linear layers, those of Megatron and Transformer Engine among them."""
    return [module for module in root.modules() if "Linear" in type(module).__name__][:MAX_LEAVES]
