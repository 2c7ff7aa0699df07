"""Plain PyTorch: steps from torch's hook for all optimisers, losses from backward, waiting from its data loader."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from typing import Any, Callable

from .channel import guarded, is_compiling
from .facts import FACTS
from .flops import uncounted
from .steps import GENERIC, STEPS

SOURCE = "hook:torch"
UNSCALED = "_tune_cluster_unscaled"
"""Attribute of a loss that a gradient scaler has scaled: the loss itself."""
PATIENCE = 20


class Primary:
    """The optimiser whose steps count; others of the same program step beside it."""

    def __init__(self) -> None:
        self._optimizer: Callable[[], Any] | None = None
        self._others = 0

    def is_(self, optimizer: Any) -> bool:
        """The first one, until it is gone or rests while another goes on."""
        current = self._optimizer() if self._optimizer is not None else None
        if current is optimizer:
            self._others = 0
            return True
        self._others += 1
        if current is not None and self._others <= PATIENCE:
            return False
        self._optimizer, self._others = weakref.ref(optimizer), 0
        return True


_primary = Primary()
_stepped = 0
"""How often the hook below ran: a gradient scaler that skips a step does not lead to it."""


@guarded("optimiser")
def _after_step(optimizer: Any) -> None:
    global _stepped
    _stepped += 1
    if STEPS.level == GENERIC and _primary.is_(optimizer):
        _boundary(optimizer)


def _boundary(optimizer: Any, **values: Any) -> None:
    STEPS.boundary(SOURCE, **values)
    if FACTS.wants_root:
        FACTS.watch(FACTS.root_of(optimizer))
    FACTS.step_ended(SOURCE)


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """The hook; leaves no trace in an optimiser step that is compiled."""
    if not is_compiling():
        _after_step(optimizer)


def optimizers(module: Any) -> None:
    """``torch.optim.optimizer``."""
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is not None:
        register(after_step)
        return
    # PyTorch 1.13 has no such hook: every optimiser's class is told when the first one is made.
    made = module.Optimizer.__init__

    @functools.wraps(made)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _wrap_step(type(self))

    module.Optimizer.__init__ = initialise


@guarded("optimiser classes")
def _wrap_step(kind: Any) -> None:
    step = kind.step
    if getattr(step, "_tune_cluster", False):
        return

    @functools.wraps(step)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        after_step(self, args, kwargs)
        return result

    wrapped._tune_cluster = True  # type: ignore[attr-defined]
    kind.step = wrapped


_inside = threading.local()


def _depth() -> int:
    return int(getattr(_inside, "depth", 0))


class outer_backward:  # noqa: N801  # reads as a statement
    """While a framework runs a backward pass whose loss it has told us, torch's own is not counted."""

    def __enter__(self) -> None:
        _inside.depth = _depth() + 1

    def __exit__(self, *_: object) -> None:
        _inside.depth -= 1


@guarded("losses")
def record_loss(tensors: Any, grad_tensors: Any = None) -> None:
    """Keeps the loss that a backward pass begins with; anything but a single number is no loss."""
    loss: Any = tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else tensors
    if grad_tensors is not None or not hasattr(loss, "numel") or loss.numel() != 1:
        return
    inner = getattr(loss, UNSCALED, loss)
    STEPS.add_loss(inner.detach(), _divisor(inner))


def _divisor(loss: Any) -> float | None:
    """By what a loss was divided in the last operation that made it, None if that was none or cannot be seen."""
    node = loss.grad_fn
    name = type(node).__name__
    if name not in ("DivBackward0", "MulBackward0") or not hasattr(node, "_saved_other"):
        return None
    other = node._saved_other
    if other is None or not hasattr(other, "numel") or other.numel() != 1 or other.device.type != "cpu":
        return None
    with uncounted():
        value = float(other)
    return value if name == "DivBackward0" else 1 / value if value else None


def backward(module: Any) -> None:
    """``torch.autograd``: ``Tensor.backward`` comes by as well."""
    original = module.backward

    @functools.wraps(original)
    def wrapped(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or _depth():
            return original(tensors, grad_tensors, *args, **kwargs)
        record_loss(tensors, grad_tensors)
        return original(tensors, grad_tensors, *args, **kwargs)

    module.backward = wrapped


def grad_scaler(module: Any) -> None:
    """``torch.amp.grad_scaler``: remembers losses as they were, sees steps that are skipped."""
    scaler = module.GradScaler
    scale, step = scaler.scale, scaler.step

    @functools.wraps(scale)
    def scale_remembering(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = scale(self, outputs, *args, **kwargs)
        if scaled is not outputs and hasattr(outputs, "grad_fn") and not is_compiling():
            setattr(scaled, UNSCALED, outputs)
        return scaled

    @functools.wraps(step)
    def step_watched(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = _stepped
        result = step(self, optimizer, *args, **kwargs)
        if _stepped == before and not is_compiling():
            _unseen(self, optimizer)
        return result

    scaler.scale, scaler.step = scale_remembering, step_watched


@guarded("gradient scaler")
def _unseen(scaler: Any, optimizer: Any) -> None:
    """An optimiser was to step and our hook did not run: the step was skipped, or is compiled."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if STEPS.level == GENERIC and _primary.is_(inner):
        _boundary(inner, **({"skipped": True} if _overflowed(scaler, optimizer) else {}))


def _overflowed(scaler: Any, optimizer: Any) -> bool:
    states = getattr(scaler, "_per_optimizer_states", {})
    found = states[id(optimizer)].get("found_inf_per_device", {}) if id(optimizer) in states else {}
    return any(float(value) > 0 for value in found.values())


def data_loader(module: Any) -> None:
    """``torch.utils.data.dataloader``: how long the program waits for a batch."""
    iterator = module._BaseDataLoaderIter
    following = iterator.__next__

    @functools.wraps(following)
    def timed(self: Any) -> Any:
        began = time.perf_counter()
        try:
            return following(self)
        finally:
            if threading.current_thread() is threading.main_thread():
                STEPS.waited(time.perf_counter() - began)

    iterator.__next__ = timed
