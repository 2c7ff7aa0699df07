"""Lightning: a callback that its Trainer finds through the entry points of the distribution beside this package."""

from __future__ import annotations

import os
import sys
from typing import Any

from .channel import FOLDER_VARIABLE, guarded, stop_at
from .facts import FACTS
from .steps import STEPS, TRAINER

SOURCE = "hook:lightning"


class Fit:
    """What is known of the fit that runs now."""

    def __init__(self) -> None:
        self._seen = 0
        self._micro: list[Any] = []

    @guarded("Lightning begins")
    def begin(self, trainer: Any) -> None:
        """Training begins, with the model wrapped as it will be called."""
        STEPS.claim(TRAINER)
        self._seen = int(trainer.global_step)
        self._micro.clear()
        STEPS.begin(SOURCE, world_size=int(trainer.world_size))
        model = getattr(trainer.strategy, "model", None)
        if FACTS.wants_root and model is not None:
            FACTS.watch(model)

    @guarded("Lightning's batch")
    def batch_ended(self, trainer: Any, outputs: Any) -> None:
        """A micro-batch is over, and with the last one the step. Losses are divided by their number already."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and hasattr(loss, "detach"):
            self._micro.append(loss.detach())
        if int(trainer.global_step) <= self._seen:
            return
        self._seen = int(trainer.global_step)
        if STEPS.claim(TRAINER):
            self._step_ended(trainer)

    def _step_ended(self, trainer: Any) -> None:
        STEPS.boundary(SOURCE, hold=True)
        micro = [float(loss) for loss in self._micro]
        self._micro.clear()
        if micro:
            STEPS.amend(loss=sum(micro), loss_source="hook:training_step", loss_scope="rank")
        STEPS.flush()
        FACTS.step_ended(SOURCE)
        last = stop_at()
        if last is not None and STEPS.count >= last:
            trainer.should_stop = True

    @guarded("Lightning ends")
    def end(self) -> None:
        """Training is over."""
        STEPS.end(SOURCE)


FIT = Fit()


def callbacks() -> list[Any]:
    """The entry point."""
    if not os.environ.get(FOLDER_VARIABLE):
        return []
    try:
        return [_callback()]
    except Exception:
        return []


def _callback() -> Any:
    name = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
    base: Any = sys.modules[name].Callback

    class TuneClusterCallback(base):  # type: ignore[misc]
        """Tells :data:`FIT` what happens."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            FIT.begin(trainer)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            FIT.batch_ended(trainer, outputs)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            FIT.end()

    return TuneClusterCallback()
