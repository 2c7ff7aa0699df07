"""torchtitan's log lines and its structured logs, as of release 0.3.0::

    [titan] 2026-11-22 05:58:37,759 - root - INFO - step:  2  loss:  7.63363  grad_norm:  2.4175
    memory:  0.00GiB(0.00%)  tps: 443  tflops: 0.02  mfu: 0.01%
    {"log_type_name": "step_end", "step": 6, "value": 963.6, "time_us": 1795327123583255, ...}

Every rank prints; tokens/s are per device, since the last line. Structured logs have one file per rank, times in
microseconds, and the spans of a step, but no loss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from trials.script.logs.base import GIB, LogRecord, LogValue, number, present, timestamp, whole

_PAIR = re.compile(r"\b(step|loss|grad_norm|memory|tps):\s*([-+\d.,]+(?:[eE][-+]?\d+)?|-?nan|-?inf)")


class TorchTitanLog:
    """Reads both; spans of a step are added up until the step ends."""

    needles: tuple[bytes, ...] | None = (b"tps:", b'"log_type_name"')

    def __init__(self) -> None:
        self._data_ms = 0.0
        self._tokens: LogValue | None = None

    def feed(self, line: str) -> Iterator[LogRecord]:
        if line.lstrip().startswith("{"):
            yield from self._event(line)
            return
        found = dict(_PAIR.findall(line))
        step = whole(found.get("step", ""))
        if step is not None and "tps" in found:
            memory = number(found.get("memory", ""))
            yield LogRecord(
                step=step,
                values=present(
                    loss=number(found.get("loss", "")),
                    grad_norm=number(found.get("grad_norm", "")),
                    reserved_bytes=memory.times(GIB) if memory else None,
                    tokens_per_s_per_device=number(found["tps"]),
                ),
                at_s=timestamp(line),
            )

    def _event(self, line: str) -> Iterator[LogRecord]:
        try:
            event: Any = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(event, dict):
            return
        name, step, value = event.get("log_type_name"), event.get("step"), event.get("value")
        if not isinstance(step, int) or not isinstance(value, int | float):
            return
        if name == "fetching_batch_end":
            self._data_ms += value
        elif event.get("event_name") == "global_valid_tokens":
            self._tokens = LogValue(float(value))
        elif name == "step_end":
            yield self._step_end(step, float(value))

    def _step_end(self, step: int, value_ms: float) -> LogRecord:
        data_s, self._data_ms = LogValue(self._data_ms * 1e-3), 0.0
        tokens, self._tokens = self._tokens, None
        values = present(step_time_s=LogValue(value_ms * 1e-3), data_s=data_s, tokens=tokens)
        return LogRecord(step=step, values=values, is_structured=True)
