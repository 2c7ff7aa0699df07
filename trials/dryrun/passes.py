"""Which collectives one more micro-batch adds, seen in a step of a few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from trials.dryrun.records import Growth, Traffic
from trials.dryrun.tracker import MemoryTracker, Tally
from trials.training.pipeline import Stage

_FORWARD, _BACKWARD, _WEIGHTS = "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"
_SENDS = ("send", "recv")


class PassLog:
    """Collectives of every forward and backward pass of a step."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self.tracker = tracker
        self._passes: dict[tuple[str, int, int], Tally] = {}
        """By kind of pass, chunk and micro-batch."""
        self._losses: Tally = Counter()
        """Collectives of the loss, where a pipeline's schedule calls it."""
        self._marked: Tally = Counter()
        self._num_marks: Counter[str] = Counter()
        self._in_pass = False

    def watch(self, stages: list[Stage]) -> None:
        """Log the passes of a pipeline's stages."""
        for chunk, stage in enumerate(stages):
            for name in (_FORWARD, _BACKWARD, _WEIGHTS):
                setattr(stage, name, self._logged(name, chunk, getattr(stage, name)))

    def mark(self, phase: str, *, is_pipeline: bool) -> None:
        """As the trainer's marker, which is told what has ended; without a pipeline it tells passes apart."""
        now = self.tracker.tally()
        if is_pipeline and phase == "forward" and not self._in_pass:
            self._losses += now - self._marked
        elif not is_pipeline and phase in ("forward", "backward"):
            name = _FORWARD if phase == "forward" else _BACKWARD
            self._passes[name, 0, self._num_marks[phase]] = now - self._marked
            self._num_marks[phase] += 1
        self._marked = now

    def growth(self, num_microbatches: int, period: int) -> Growth:
        """By ``period`` micro-batches in the steady state."""
        added: Tally = Counter()
        for (kind, _, number), tally in self._passes.items():
            # A pipeline's last forward passes come between backward passes, and so do all but its first and last ones.
            start = num_microbatches - period if kind == _FORWARD else period
            if start <= number < start + period:
                added += tally
        sent: Tally = Counter({key: number for key, number in self.tracker.tally().items() if key[0] in _SENDS})
        for key, number in (sent + self._losses).items():
            added[key] += number * period // num_microbatches
        traffic = {
            name: Traffic(num_calls=added[name, "calls"], num_bytes=added[name, "bytes"])
            for name in sorted({name for name, _ in added})
        }
        return Growth(collectives=traffic)

    def _logged(self, name: str, chunk: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(number: int, *args: Any, **options: Any) -> Any:
            before, self._in_pass = self.tracker.tally(), True
            result = function(number, *args, **options)
            self._passes[name, chunk, number], self._in_pass = self.tracker.tally() - before, False
            return result

        return run
