"""The Trainer of PaddleNLP and PaddleFormers, by ``trainer/trainer.py`` of PaddleNLP 2.8 and PaddleFormers 1.2::

    [2026-11-22 10:11:12,123] [    INFO] - loss: 10.4912, learning_rate: 3e-05, global_step: 10,
    max_memory_allocated: 12.3, max_memory_reserved: 14.5, interval_runtime: 1.2, interval_steps_per_second: 0.8

Intervals are since the last line. The first local rank writes it to ``LOG_DIR/workerlog.0``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trials.script.logs.base import GIB, LogRecord, LogValue, number, present, whole

_PAIR = re.compile(r"\b([a-z_]+):\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?|-?nan|-?inf)\b")


class PaddleLog:
    """Reads the training lines; those of evaluation have no interval."""

    needles: tuple[bytes, ...] | None = (b"global_step:",)

    def __init__(self) -> None:
        self._last = 0

    def feed(self, line: str) -> Iterator[LogRecord]:
        found = dict(_PAIR.findall(line))
        step = whole(found.get("global_step", ""))
        if step is None or "loss" not in found:
            return
        covered, self._last = max(1, step - self._last), step
        allocated = number(found.get("max_memory_allocated", ""))
        reserved = number(found.get("max_memory_reserved", ""))
        yield LogRecord(
            step=step,
            values=present(
                step_time_s=_per_step(number(found.get("interval_runtime", "")), covered),
                loss=number(found["loss"]),
                grad_norm=number(found.get("global_norm", "")),
                allocated_bytes=allocated.times(GIB) if allocated else None,
                reserved_bytes=reserved.times(GIB) if reserved else None,
            ),
        )


def _per_step(interval_s: LogValue | None, num_steps: int) -> LogValue | None:
    return interval_s.times(1.0 / num_steps) if interval_s is not None and interval_s.value > 0 else None
