"""MindFormers' callbacks, by ``core/callback/callback.py`` (graph) and ``pynative/callback/loss_callback.py`` of 2.1::

    ... - INFO - { Epoch:[  1/  1], step:[   10/  100], loss: 7.123456, per_step_time: 1234ms, lr: 1e-05, overflow cond:
    False, loss_scale: 1.0, global_norm: 1.23, train_throughput_per_npu: 123.456T
    ... - INFO - { step:[   10/  100], consumed_samples: 640, global_batch_size: 64, loss:   7.123456, per_step_time:
    1234ms, lr: 1e-05, grad_norm:   1.234567, throughput: 123.45T }

Times are whole milliseconds. ``msrun`` writes each rank's output to a file. Pipeline stages but the last have no loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trials.script.logs.base import LogRecord, number, present

_EPOCH = re.compile(r"\bEpoch:\s*\[\s*(\d+)\s*/\s*\d+\s*\]", re.IGNORECASE)
_STEP = re.compile(r"\bstep:\s*\[\s*(\d+)\s*/\s*(\d+)\s*\]")
_LOSS = re.compile(r"\bloss:\s*\[?\s*([-+\d.eE]+|-?nan|-?inf)(?=[\s,/\]}])", re.IGNORECASE)
_TIME = re.compile(r"\bper_step_time:\s*([\d.]+)\s*ms")
_NORM = re.compile(r"\b(?:global_norm|grad_norm):\s*\[?\s*([-+\d.eE]+|nan|inf)", re.IGNORECASE)
_SAMPLES = re.compile(r"\bglobal_batch_size:\s*(\d+)")


class MindFormersLog:
    """Reads both modes; in graph mode the step counts from 1 in every epoch."""

    needles: tuple[bytes, ...] | None = (b"per_step_time",)

    def feed(self, line: str) -> Iterator[LogRecord]:
        if (step := _STEP.search(line)) is None or (time_ms := _TIME.search(line)) is None:
            return
        epoch = int(found[1]) if (found := _EPOCH.search(line)) else 1
        time_s = number(time_ms[1])
        yield LogRecord(
            step=(epoch - 1) * int(step[2]) + int(step[1]),
            values=present(
                step_time_s=time_s.times(1e-3) if time_s else None,
                loss=number(found[1]) if (found := _LOSS.search(line)) else None,
                grad_norm=number(found[1]) if (found := _NORM.search(line)) else None,
                samples=number(found[1]) if (found := _SAMPLES.search(line)) else None,
            ),
        )
