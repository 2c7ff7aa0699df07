"""The Trainer of transformers: a callback in every one, and the loss of every micro-batch at full precision.

What it logs is rounded in some releases, and where the loss is not a number the running mean stands in for it
(``logging_nan_inf_filter``); what ``training_step`` returns is neither.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

from .channel import guarded, stop_at
from .facts import FACTS
from .steps import STEPS, TRAINER

SOURCE = "hook:transformers"


class Loop:
    """What is known of the Trainer that trains now."""

    def __init__(self) -> None:
        self._micro: list[Any] = []
        self._tokens = 0
        self._counts = False
        self._logged = 0

    @guarded("Trainer begins")
    def begin(self, args: Any, state: Any) -> None:
        """Training begins."""
        STEPS.claim(TRAINER)
        self._micro.clear()
        self._tokens = int(getattr(state, "num_input_tokens_seen", 0) or 0)
        # Otherwise padding counts, of which larger micro-batches have more.
        self._counts = getattr(args, "include_num_input_tokens_seen", None) == "non_padding"
        self._logged = int(state.global_step)
        STEPS.begin(SOURCE, world_size=int(args.world_size))

    @guarded("Trainer's model")
    def watch(self, model: Any) -> None:
        """The model as it is about to be called, with all its wrappers."""
        if FACTS.wants_root:
            FACTS.watch(model)

    @guarded("Trainer's loss")
    def micro_batch(self, loss: Any) -> None:
        """The loss of a micro-batch, divided by how many there are."""
        self._micro.append(loss.detach())

    @guarded("Trainer's step")
    def step_ended(self, state: Any, control: Any) -> None:
        """An optimiser step is over; its log follows, perhaps."""
        if not STEPS.claim(TRAINER):
            return
        STEPS.boundary(SOURCE, hold=True, **self._tokens_seen(state))
        self._add_loss()
        FACTS.step_ended(SOURCE)
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
        """Takes the mean over all ranks in place of this rank's loss, if it speaks of one step and is not rounded."""
        steps, self._logged = int(state.global_step) - self._logged, int(state.global_step)
        loss, own = logs.get("loss"), STEPS.pending("loss")
        if loss is not None and steps == 1 and _is_exact(loss) and (own is None or math.isfinite(own)):
            STEPS.amend(loss=loss, loss_source="hook:log", loss_scope="all")
        if logs.get("grad_norm") is not None:
            STEPS.amend(grad_norm=float(logs["grad_norm"]))
        STEPS.flush()

    @guarded("Trainer goes on")
    def step_begins(self) -> None:
        """Nothing more is coming for the last step."""
        STEPS.flush()

    @guarded("Trainer ends")
    def end(self) -> None:
        """Training is over."""
        STEPS.end(SOURCE)


def _is_exact(loss: Any) -> bool:
    """Releases before 5 round the loss that they log to four digits behind the point."""
    return isinstance(loss, (int, float)) and round(loss, 4) != loss


LOOP = Loop()
_callback: type[Any] | None = None


def callback() -> type[Any]:
    """The class of the callback, made when transformers is there."""
    global _callback
    if _callback is not None:
        return _callback
    base: Any = sys.modules["transformers.trainer_callback"].TrainerCallback

    class TuneClusterCallback(base):  # type: ignore[misc]
        """Tells :data:`LOOP` what happens."""

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

    _callback = TuneClusterCallback
    return _callback


@guarded("Trainer's callback")
def _add_callback(trainer: Any) -> None:
    trainer.add_callback(callback())


def trainer(module: Any) -> None:
    """``transformers.trainer``. Its list of default callbacks is left alone: ms-swift and others replace it."""
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
