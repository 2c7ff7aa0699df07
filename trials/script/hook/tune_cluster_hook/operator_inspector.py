"""Inspects all operators of one step: their number, products, copies and casts, and where the host waits for them.

The inspected step takes longer and is marked. Programs that compile or use a dispatch mode are not inspected.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from typing import Any

from .memory_parts import MEMORY, LiveTensors
from .steps import accelerator, guarded

HALF = ("torch.float16", "torch.bfloat16")
ALIGNED = 8
"""Tensor cores compute 16-bit matrix products at full speed if the sizes are multiples of this."""
MIN_MASK = 16
"""Smallest sequence length for which masks are examined."""
LAUNCHES = 50
"""Consecutive products of one element to time."""
LAUNCHING_S = 0.005
"""Time for them, in seconds."""
OPERATORS_OF_PRODUCT = 4
"""Operators of a product: itself, its two gradients, and the accumulation of one of them."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
COPIES = ("aten::_to_copy", "aten::copy_")
ATTENTION = "scaled_dot_product"
_BETWEEN = ("tune_cluster_hook", "_python_dispatch.py", "torch/_tensor.py", "torch/_compile.py", "torch/_dynamo/")
"""Path parts of code that may lie between the operator and the line that reads a tensor."""
_PACKAGES = ("/site-packages/", "/torch/", "/lib/python3", "<frozen")


class OperatorCounts:
    """Record of one step's operators."""

    def __init__(self) -> None:
        self.flops = 0
        self.counts: Counter[str] = Counter()
        self.mask_bytes = 0
        self.sites: Counter[str] = Counter()
        self.live = LiveTensors()
        self.is_whole = True
        """Whether every operator was recognised; if not, sums would be wrong."""

    def at(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, formulas: Any) -> None:
        """Record one operator; ``formulas`` are of FLOPs by operator."""
        if self.is_whole:
            self.is_whole = bool(self._at(func, args, kwargs, out, formulas))

    @guarded("inspection")
    def _at(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, formulas: Any) -> bool:
        name = func._schema.name
        self.counts["operators"] += 1
        formula = formulas.get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        if name == "aten::_local_scalar_dense":
            self._read(args[0])
        elif name in COPIES:
            self._copy(name, args, out)
        elif name in PRODUCTS:
            self._product(args)
        elif name == "aten::convolution":
            self._convolution(args[0])
        elif ATTENTION in name:
            self._mask(args, kwargs)
        return True

    def _read(self, tensor: Any) -> None:
        """Record a read by the program itself; if there is a device, only of a value on it."""
        site = _site() if accelerator() is None or tensor.device.type != "cpu" else ""
        if site:
            self.counts["host_syncs"] += 1
            self.sites[site] += 1

    def _copy(self, name: str, args: Any, out: Any) -> None:
        """Record a cast, or a copy to another device; for one from unpinned memory the host waits."""
        source = args[1] if name == "aten::copy_" else args[0]
        size = out.numel() * out.element_size()
        if source.device == out.device:
            if source.dtype != out.dtype and source.is_floating_point() and out.is_floating_point():
                self.counts["casts"] += 1
                self.counts["cast_bytes"] += size
        elif source.device.type == "cpu" and accelerator() is not None and not source.is_pinned():
            self.counts["pageable_copies"] += 1
            self.counts["pageable_bytes"] += size

    def _product(self, args: Any) -> None:
        tensors = [tensor for tensor in args if hasattr(tensor, "dim") and tensor.dim() >= 2]
        if tensors and all(str(tensor.dtype) in HALF for tensor in tensors):
            sizes = {int(size) for tensor in tensors for size in tensor.shape[-2:]}
            self.counts["unaligned_products"] += any(size > ALIGNED and size % ALIGNED for size in sizes)

    def _convolution(self, image: Any) -> None:
        if str(image.dtype) in HALF and image.dim() == 4 and min(image.shape[1:]) > 1:
            self.counts["nchw_convolutions"] += image.is_contiguous()

    def _mask(self, args: Any, kwargs: dict[str, Any]) -> None:
        length = int(args[0].shape[-2])
        masks = [value for value in (*args[3:], *kwargs.values()) if hasattr(value, "dim")]
        for mask in masks:
            if length >= MIN_MASK and mask.dim() >= 2 and tuple(mask.shape[-2:]) == (length, int(args[1].shape[-2])):
                self.mask_bytes = max(self.mask_bytes, int(mask.numel() * mask.element_size()))

    def facts(self) -> dict[str, Any]:
        """Return facts by name; what did not occur is left out."""
        activations = self.live.peak_bytes()
        found: dict[str, Any] = {} if activations is None else {"activation_bytes": activations}
        if not self.is_whole:
            return found
        found.update({name: int(number) for name, number in self.counts.items() if number})
        if self.sites:
            found["sync_site"] = self.sites.most_common(1)[0][0]
        if self.mask_bytes:
            found["mask_bytes"] = self.mask_bytes
        return {**found, "flops_per_step": self.flops}


def _site() -> str:
    """Return file and line that run an operator; empty if they are in PyTorch or a package."""
    frame: Any = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in _BETWEEN):
        frame = frame.f_back
    path = "" if frame is None else frame.f_code.co_filename
    return "" if not path or any(part in path for part in _PACKAGES) else f"{os.path.basename(path)}:{frame.f_lineno}"


def _flop_formulas() -> Any:
    """Return PyTorch's formulas by operator: functions of its arguments and its result ``out_val``."""
    from torch.utils import flop_counter

    found = getattr(flop_counter, "flop_registry", None)
    if found is not None:
        return found
    mapping: Any = getattr(flop_counter, "flop_mapping", {})
    return {operator: _of_shapes(formula) for operator, formula in mapping.items()}


def _of_shapes(formula: Any) -> Any:
    """Adapt a formula of PyTorch 2.1, which takes the shapes of tensors."""
    from torch.utils._pytree import tree_map

    def shape(value: Any) -> Any:
        return value.shape if hasattr(value, "shape") else value

    def flops(*args: Any, out_val: Any, **kwargs: Any) -> Any:
        args, kwargs, out_shape = tree_map(shape, (args, kwargs, out_val))
        return formula(*args, **kwargs, out_shape=out_shape)

    return flops


def _mode(operators: OperatorCounts) -> Any:
    """Create a dispatch mode. PyTorch's ``FlopCounterMode`` would hook into every module."""
    from torch.utils._python_dispatch import TorchDispatchMode

    formulas = _flop_formulas()

    class InspectingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Observes every operator of the step."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            operators.live.saw(func, out)
            operators.at(func, args, kwargs or {}, out, formulas)
            return out

    return InspectingMode()  # type: ignore[no-untyped-call]


_inspecting: set[int] = set()
"""Identity of the active mode."""


def unseen() -> Any:
    """Context in which reads of tensors are not recorded; for tensors made by autograd there is no other way."""
    dispatch = sys.modules.get("torch.utils._python_dispatch")
    pause = getattr(dispatch, "_disable_current_modes", None)
    return contextlib.nullcontext() if pause is None or not _inspecting else pause()


class OperatorInspector:
    """Inspects from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self._mode: Any = None
        self._operators = OperatorCounts()
        self._done = False

    @property
    def is_on(self) -> bool:
        """Whether the current step is inspected."""
        return self._mode is not None

    def step_ended(self, compiled: bool) -> dict[str, Any]:
        """Begin the inspection at the end of a step; return its result at the end of the next."""
        if self._mode is not None:
            self.stop()
            return {**self._operators.facts(), **(_launching() or {})}
        if not self._done:
            self._done = True
            if not compiled and _is_free():
                self._begin()
        return {}

    @guarded("inspection begins")
    def _begin(self) -> None:
        mode = _mode(self._operators)
        MEMORY.live = self._operators.live
        mode.__enter__()
        self._mode = mode
        _inspecting.add(id(mode))

    @guarded("inspection ends")
    def stop(self) -> None:
        """End a running inspection."""
        mode, self._mode = self._mode, None
        MEMORY.live = None
        if mode is not None:
            _inspecting.discard(id(mode))
            mode.__exit__(None, None, None)


@guarded("launches")
def _launching() -> dict[str, float]:
    return {"launch_s": launch_s()}


def _is_free() -> bool:
    """Whether the program has no dispatch mode, which would be indistinguishable from this one."""
    torch = sys.modules.get("torch")
    count = getattr(getattr(torch, "_C", None), "_len_torch_dispatch_stack", None)
    return torch is not None and count is not None and count() == 0


def launch_s() -> float:
    """Return seconds of this thread's processor time for an operator on one element, forward and backward: the host's
    part alone, independent of other load on the host."""
    torch = sys.modules["torch"]
    backend = accelerator()
    device = "cpu" if backend is None else backend.__name__.rpartition(".")[2]
    num_operators, began = 0, time.thread_time()
    # Otherwise a device's backward pass runs in another thread.
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        one = torch.ones(1, device=device, requires_grad=True)
        while time.thread_time() - began < LAUNCHING_S:
            product = one
            for _ in range(LAUNCHES):
                product = product * one
            torch.autograd.grad(product, one)
            num_operators += LAUNCHES * OPERATORS_OF_PRODUCT
    return (time.thread_time() - began) / num_operators
