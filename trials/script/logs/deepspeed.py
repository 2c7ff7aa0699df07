"""DeepSpeed's engine, as of release 0.19.8, with ``steps_per_print: 1`` and ``log_level: info``::

    [2026-11-22 05:42:42,784] [INFO] [logging.py:123:log_dist] [Rank 0] step=8, skipped=0, lr=[0.001], mom=[...]
    [2026-11-22 05:42:42,784] [INFO] [timer.py:264:stop] epoch=0/micro_step=16/global_step=8,
    RunningAvgSamplesPerSec=399.15, CurrSamplesPerSec=303.18, MemAllocated=0.49GB, MaxMemAllocated=0.49GB

No loss anywhere. Its samples/s leave out the wait for data, so times come from the logger's time of day where that
stands in front of the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trials.script.logs.base import GIB, LogRecord, number, present, timestamp

_STEP = re.compile(r"\bstep=(\d+), skipped=(\d+)")
_TIMER = re.compile(r"\bglobal_step=(\d+), RunningAvgSamplesPerSec=")
_PAIR = re.compile(r"\b(CurrSamplesPerSec|MaxMemAllocated)=([\d.]+)")


class DeepSpeedLog:
    """Reads the step lines, which mark a step's end, and the memory of the timer lines."""

    needles: tuple[bytes, ...] | None = (b"skipped=", b"global_step=")

    def feed(self, line: str) -> Iterator[LogRecord]:
        if match := _STEP.search(line):
            if int(match[1]) > 0:  # 0 is printed at the first micro-step
                yield LogRecord(step=int(match[1]), at_s=timestamp(line))
        elif match := _TIMER.search(line):
            found = dict(_PAIR.findall(line))
            peak, rate = number(found.get("MaxMemAllocated", "")), number(found.get("CurrSamplesPerSec", ""))
            yield LogRecord(
                step=int(match[1]),
                values=present(
                    allocated_bytes=peak.times(GIB) if peak and peak.value > 0 else None,
                    samples_per_s=rate,
                ),
            )
