"""Hooks that detect steps: in PyTorch itself, DeepSpeed, transformers' Trainer, and Lightning."""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import weakref
from typing import Any, Callable

from . import step_parts
from .facts import FACTS, sequence_length
from .operator_inspector import unseen
from .step_parts import BACKWARD, DATA, OPTIMIZER, PARTS
from .steps import (
    ENGINE,
    FOLDER_VARIABLE,
    GENERIC,
    STEPS,
    TRAINER,
    accelerator,
    generator_states,
    guarded,
    is_capturing,
    is_compiling,
    stop_at,
)

# ---- Plain PyTorch: steps from the hook for all optimisers, losses from backward, waiting from its data loader

TORCH = "hook:torch"
UNSCALED = "_tune_cluster_unscaled"
"""Attribute of a loss scaled by a gradient scaler: the unscaled loss."""
PATIENCE = 20


class Primary:
    """The optimiser whose steps count; other optimisers of the program may step too."""

    def __init__(self) -> None:
        self._optimizer: Callable[[], Any] | None = None
        self._others = 0

    def is_(self, optimizer: Any) -> bool:
        """Whether it is the first optimiser, or replaces one that is gone or rests while another continues."""
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
"""How often the hook below ran; it does not run if a gradient scaler skips a step."""


@guarded("optimiser")
def _after_step(optimizer: Any) -> None:
    global _stepped
    _stepped += 1
    STEPS.saw(optimizer)
    if STEPS.level == GENERIC and _primary.is_(optimizer):
        _boundary(optimizer)


def _boundary(optimizer: Any, **values: Any) -> None:
    if FACTS.wants_root:  # first, as a profile may begin at this boundary
        FACTS.watch(FACTS.root_of(optimizer))
    STEPS.boundary(TORCH, **values)
    FACTS.step_ended(TORCH)


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Hook after a step; leaves no trace in a step that is compiled or captured in a device graph."""
    if not (is_compiling() or is_capturing(accelerator())):
        step_parts.after_step()
        _after_step(optimizer)


def optimizers(module: Any) -> None:
    """Hook for ``torch.optim.optimizer``."""
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is not None:
        register(after_step)
        module.register_optimizer_step_pre_hook(step_parts.before_step)
        return
    # PyTorch 1.13 lacks this hook: every optimiser's class is patched when its first instance is created.
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
        PARTS.enter(OPTIMIZER)
        result = step(self, *args, **kwargs)
        after_step(self, args, kwargs)
        return result

    wrapped._tune_cluster = True  # type: ignore[attr-defined]
    kind.step = wrapped


_inside = threading.local()


def _depth() -> int:
    return int(getattr(_inside, "depth", 0))


class outer_backward:  # noqa: N801  # reads as a statement
    """Context of a framework's backward pass whose loss is already reported; torch's own is not counted."""

    def __enter__(self) -> None:
        _inside.depth = _depth() + 1

    def __exit__(self, *_: object) -> None:
        _inside.depth -= 1


@guarded("losses")
def record_loss(tensors: Any, grad_tensors: Any = None) -> None:
    """Record the loss at the start of a backward pass; anything but a single number is not a loss."""
    loss: Any = tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else tensors
    if grad_tensors is not None or not hasattr(loss, "numel") or loss.numel() != 1:
        return
    inner = getattr(loss, UNSCALED, loss)
    STEPS.add_loss(inner.detach(), _divisor(inner))


def _divisor(loss: Any) -> float | None:
    """Return the divisor if the last operation on a loss was a division; None if not, or if it is not visible."""
    node = loss.grad_fn
    name = type(node).__name__
    if name not in ("DivBackward0", "MulBackward0") or not hasattr(node, "_saved_other"):
        return None
    other = node._saved_other
    if other is None or not hasattr(other, "numel") or other.numel() != 1 or other.device.type != "cpu":
        return None
    with unseen():
        value = float(other)
    return value if name == "DivBackward0" else 1 / value if value else None


def backward(module: Any) -> None:
    """Hook for ``torch.autograd``, through which ``Tensor.backward`` also goes."""
    original = module.backward

    @functools.wraps(original)
    def wrapped(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(tensors, grad_tensors, *args, **kwargs)
        if not _depth():
            record_loss(tensors, grad_tensors)
        PARTS.enter(BACKWARD)
        try:
            return original(tensors, grad_tensors, *args, **kwargs)
        finally:
            PARTS.leave(BACKWARD)

    module.backward = wrapped
    module.grad = PARTS.during(BACKWARD, module.grad)


def grad_scaler(module: Any) -> None:
    """Hook for ``torch.amp.grad_scaler``: records unscaled losses, and detects skipped steps."""
    scaler = module.GradScaler
    if "step" not in vars(scaler):  # CUDA's inherits a method already watched: a skipped step would count twice
        return
    scale, step = scaler.scale, scaler.step

    @functools.wraps(scale)
    def scale_remembering(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = scale(self, outputs, *args, **kwargs)
        if not is_compiling() and scaled is not outputs and hasattr(outputs, "grad_fn"):
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
    """Record that an optimiser should have stepped without the hook running: the step was skipped, or is compiled."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if STEPS.level == GENERIC and _primary.is_(inner):
        _boundary(inner, **({"skipped": True} if _overflowed(scaler, optimizer) else {}))


def _overflowed(scaler: Any, optimizer: Any) -> bool:
    states = getattr(scaler, "_per_optimizer_states", {})
    found = states[id(optimizer)].get("found_inf_per_device", {}) if id(optimizer) in states else {}
    return any(float(value) > 0 for value in found.values())


def data_loader(module: Any) -> None:
    """Hook for ``torch.utils.data.dataloader``: how long the program waits for a batch."""
    iterator = module._BaseDataLoaderIter
    original = iterator.__next__

    @functools.wraps(original)
    def timed(self: Any) -> Any:
        if is_compiling():
            return original(self)
        batch, before = None, _before_batch(self)
        PARTS.enter(DATA)
        try:
            batch = original(self)
            return batch
        finally:
            PARTS.leave(DATA)
            if threading.get_ident() == _main_thread:
                _loaded(self, batch, before)

    iterator.__next__ = timed


_main_thread = threading.main_thread().ident


@guarded("items")
def _before_batch(iterator: Any) -> Any:
    """Return the state of the random generators if the batch may show whether its items draw; the first batch shows
    what the sampler draws."""
    is_first = iterator._num_yielded == 0 or threading.get_ident() != _main_thread
    if STEPS.items_draw is not None or iterator._num_workers or is_first:
        return None
    return generator_states() if sys.modules["torch"].is_grad_enabled() else None


@guarded("loader")
def _loaded(iterator: Any, batch: Any, before: Any) -> None:
    """Record which loader gives batches while gradients are on, the length of samples in a batch of sequences, and
    whether items draw random numbers."""
    PARTS.has_loader = True
    if before is not None and batch is not None:
        STEPS.items_draw = before != generator_states()
    STEPS.saw_length(sequence_length(batch))
    if not sys.modules["torch"].is_grad_enabled():
        return
    STEPS.reads(iterator)
    if FACTS.is_early:
        STEPS.loads(int(iterator._num_workers), getattr(iterator._index_sampler, "batch_size", None))


# ---- DeepSpeed: its engine's action at the boundary of gradient accumulation is a step, in pipelines too

DEEPSPEED = "hook:deepspeed"


@guarded("DeepSpeed")
def _after_engine_step(engine: Any, skipped_before: Any) -> None:
    if not STEPS.claim(ENGINE):
        return
    norm = engine.get_global_grad_norm()
    values: dict[str, Any] = {} if norm is None else {"grad_norm": float(norm)}
    if getattr(engine, "skipped_steps", 0) != skipped_before:
        values["skipped"] = True
    STEPS.boundary(DEEPSPEED, **values)
    if FACTS.wants_root:
        FACTS.watch(engine)
    FACTS.step_ended(DEEPSPEED)


@guarded("DeepSpeed begins")
def _claim() -> None:
    STEPS.claim(ENGINE)


def engine(module: Any) -> None:
    """Hook for ``deepspeed.runtime.engine``."""
    kind = module.DeepSpeedEngine
    name = "_take_model_step" if hasattr(kind, "_take_model_step") else "step"
    step, timed = getattr(kind, name), PARTS.during(BACKWARD, kind.backward)

    @functools.wraps(step)
    def step_watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        _claim()
        at_boundary = name != "step" or self.is_gradient_accumulation_boundary()
        skipped = getattr(self, "skipped_steps", 0)
        PARTS.enter(OPTIMIZER)
        result = step(self, *args, **kwargs)
        PARTS.leave(OPTIMIZER)
        if at_boundary:
            _after_engine_step(self, skipped)
        return result

    @functools.wraps(kind.backward)
    def backward_watched(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        record_loss(loss)
        with outer_backward():
            return timed(self, loss, *args, **kwargs)

    setattr(kind, name, step_watched)
    kind.backward = backward_watched


# ---- transformers' Trainer: a callback in every instance, and the loss of every micro-batch at full precision
#
# Some releases round the logged loss, and replace a non-finite one by the running mean (``logging_nan_inf_filter``);
# the result of ``training_step`` is unchanged.

TRANSFORMERS = "hook:transformers"


class Loop:
    """State of the current Trainer."""

    def __init__(self) -> None:
        self._micro: list[Any] = []
        self._tokens = 0
        self._counts = False
        self._logged = 0

    @guarded("Trainer begins")
    def begin(self, args: Any, state: Any) -> None:
        """Start of training."""
        STEPS.claim(TRAINER)
        self._micro.clear()
        self._tokens = int(getattr(state, "num_input_tokens_seen", 0) or 0)
        # Otherwise padding counts, and larger micro-batches have more of it.
        self._counts = getattr(args, "include_num_input_tokens_seen", None) == "non_padding"
        self._logged = int(state.global_step)
        STEPS.begin(TRANSFORMERS, world_size=int(args.world_size))

    @guarded("Trainer's model")
    def watch(self, model: Any) -> None:
        """Watch the model just before its call, with all its wrappers."""
        if FACTS.wants_root:
            FACTS.watch(model)

    @guarded("Trainer's loss")
    def micro_batch(self, loss: Any) -> None:
        """Add the loss of a micro-batch, already divided by their number."""
        self._micro.append(loss.detach())

    @guarded("Trainer's step")
    def step_ended(self, state: Any, control: Any) -> None:
        """End of an optimiser step; its log may follow."""
        if not STEPS.claim(TRAINER):
            return
        STEPS.boundary(TRANSFORMERS, hold=True, **self._tokens_seen(state))
        self._add_loss()
        FACTS.step_ended(TRANSFORMERS)
        last = stop_at()
        if last is not None and STEPS.count >= last:
            control.should_training_stop = True

    def _add_loss(self) -> None:
        micro = [float(loss) for loss in self._micro]
        self._micro.clear()
        if micro:
            STEPS.amend(loss=sum(micro), loss_source="hook:training_step", loss_scope="rank")

    def _tokens_seen(self, state: Any) -> dict[str, int]:
        before, self._tokens = self._tokens, int(getattr(state, "num_input_tokens_seen", 0) or 0)
        return {"tokens": self._tokens - before} if self._counts and self._tokens > before else {}

    @guarded("Trainer's log")
    def logged(self, state: Any, logs: dict[str, Any]) -> None:
        """Replace this rank's loss by the mean over all ranks, if that is for one step and not rounded."""
        steps, self._logged = int(state.global_step) - self._logged, int(state.global_step)
        loss, own = logs.get("loss"), STEPS.pending("loss")
        if loss is not None and steps == 1 and _is_exact(loss) and (own is None or math.isfinite(own)):
            STEPS.amend(loss=loss, loss_source="hook:log", loss_scope="all")
        if logs.get("grad_norm") is not None:
            STEPS.amend(grad_norm=float(logs["grad_norm"]))
        STEPS.flush()

    @guarded("Trainer goes on")
    def step_begins(self) -> None:
        """Finish the previous step, for which nothing more will come."""
        STEPS.flush()

    @guarded("Trainer ends")
    def end(self) -> None:
        """End of training."""
        STEPS.end(TRANSFORMERS)


def _is_exact(loss: Any) -> bool:
    """Whether the logged loss is exact: releases before 5 round it to four decimals."""
    return isinstance(loss, (int, float)) and round(loss, 4) != loss


LOOP = Loop()
_trainer_callback: type[Any] | None = None


def callback() -> type[Any]:
    """Return the class of the callback, created when transformers has been imported."""
    global _trainer_callback
    if _trainer_callback is not None:
        return _trainer_callback
    base: Any = sys.modules["transformers.trainer_callback"].TrainerCallback

    class TuneClusterCallback(base):  # type: ignore[misc]
        """Forwards events to :data:`LOOP`."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            LOOP.begin(args, state)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            LOOP.step_begins()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            LOOP.step_ended(state, control)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            LOOP.logged(state, logs or {})

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            LOOP.end()

    _trainer_callback = TuneClusterCallback
    return _trainer_callback


@guarded("Trainer's callback")
def _add_callback(trainer: Any) -> None:
    trainer.add_callback(callback())


def trainer(module: Any) -> None:
    """Hook for ``transformers.trainer``. It adds no default callbacks, because ms-swift and others replace these."""
    kind = module.Trainer
    made, step = kind.__init__, kind.training_step

    @functools.wraps(made)  # ms-swift reads the signature
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _add_callback(self)

    @functools.wraps(step)
    def training_step(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        LOOP.watch(model)
        loss = step(self, model, *args, **kwargs)
        LOOP.micro_batch(loss)
        return loss

    kind.__init__, kind.training_step = initialise, training_step


# ---- Lightning: a callback that its Trainer finds through the entry points of the distribution next to this package

LIGHTNING = "hook:lightning"


class Fit:
    """State of the current fit."""

    def __init__(self) -> None:
        self._seen = 0
        self._micro: list[Any] = []

    @guarded("Lightning begins")
    def begin(self, trainer: Any) -> None:
        """Start of training, with the model wrapped for its calls."""
        STEPS.claim(TRAINER)
        self._seen = int(trainer.global_step)
        self._micro.clear()
        STEPS.begin(LIGHTNING, world_size=int(trainer.world_size))
        model = getattr(trainer.strategy, "model", None)
        if FACTS.wants_root and model is not None:
            FACTS.watch(model)

    @guarded("Lightning's batch")
    def batch_ended(self, trainer: Any, outputs: Any) -> None:
        """End of a micro-batch, and with the last one, of the step. Losses are already divided by their number."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and hasattr(loss, "detach"):
            self._micro.append(loss.detach())
        if int(trainer.global_step) <= self._seen:
            return
        self._seen = int(trainer.global_step)
        if STEPS.claim(TRAINER):
            self._step_ended(trainer)

    def _step_ended(self, trainer: Any) -> None:
        STEPS.boundary(LIGHTNING, hold=True)
        micro = [float(loss) for loss in self._micro]
        self._micro.clear()
        if micro:
            STEPS.amend(loss=sum(micro), loss_source="hook:training_step", loss_scope="rank")
        STEPS.flush()
        FACTS.step_ended(LIGHTNING)
        last = stop_at()
        if last is not None and STEPS.count >= last:
            trainer.should_stop = True

    @guarded("Lightning ends")
    def end(self) -> None:
        """End of training."""
        STEPS.end(LIGHTNING)


FIT = Fit()


def callbacks() -> list[Any]:
    """Return the callbacks; the entry point."""
    if not os.environ.get(FOLDER_VARIABLE):
        return []
    try:
        return [_lightning_callback()]
    except Exception:
        return []


def _lightning_callback() -> Any:
    name = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
    base: Any = sys.modules[name].Callback

    class TuneClusterCallback(base):  # type: ignore[misc]
        """Forwards events to :data:`FIT`."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            FIT.begin(trainer)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            FIT.batch_ended(trainer, outputs)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            FIT.end()

    return TuneClusterCallback()
