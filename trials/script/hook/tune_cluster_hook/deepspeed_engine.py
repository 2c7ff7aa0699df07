"""DeepSpeed: a step is what its engine does at the boundary of gradient accumulation, in pipelines as well."""

from __future__ import annotations

import functools
from typing import Any

from .channel import guarded
from .facts import FACTS
from .steps import ENGINE, STEPS
from .torch_steps import outer_backward, record_loss

SOURCE = "hook:deepspeed"


@guarded("DeepSpeed")
def _after_step(engine: Any, skipped_before: Any) -> None:
    if not STEPS.claim(ENGINE):
        return
    norm = engine.get_global_grad_norm()
    values: dict[str, Any] = {} if norm is None else {"grad_norm": float(norm)}
    if getattr(engine, "skipped_steps", 0) != skipped_before:
        values["skipped"] = True
    STEPS.boundary(SOURCE, **values)
    if FACTS.wants_root:
        FACTS.watch(engine)
    FACTS.step_ended(SOURCE)


@guarded("DeepSpeed begins")
def _claim() -> None:
    STEPS.claim(ENGINE)


def engine(module: Any) -> None:
    """``deepspeed.runtime.engine``."""
    kind = module.DeepSpeedEngine
    name = "_take_model_step" if hasattr(kind, "_take_model_step") else "step"
    step, back = getattr(kind, name), kind.backward

    @functools.wraps(step)
    def step_watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        _claim()
        at_boundary = name != "step" or self.is_gradient_accumulation_boundary()
        skipped = getattr(self, "skipped_steps", 0)
        result = step(self, *args, **kwargs)
        if at_boundary:
            _after_step(self, skipped)
        return result

    @functools.wraps(back)
    def backward_watched(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        record_loss(loss)
        with outer_backward():
            return back(self, loss, *args, **kwargs)

    setattr(kind, name, step_watched)
    kind.backward = backward_watched
