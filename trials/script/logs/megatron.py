"""Megatron-LM's training log, by ``megatron/training/training.py`` of core 0.20 and before::

     [2026-08-22 10:11:12.123456] iteration       10/     100 | consumed samples:  2560 | elapsed time per iteration
     (ms): 1234.5 | learning rate: 3.0E-04 | global batch size:   256 | lm loss: 7.654321E+00 | grad norm: 1.234 | ... |
     [Rank 0] (after 1 iterations) memory (MB) | allocated: 1.00 | max allocated: 2.00 | max reserved: 4.00

A table of names and values, in an order that releases and options change. A loss that is not a number is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trials.script.logs.base import MIB, LogRecord, LogValue, number, present, whole

_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|")
_MEMORY = re.compile(r"\(after (\d+) iterations\) memory \(MB\)\s*\|")
_MAIN_LOSSES = ("lm loss", "loss", "reduced_train_loss")
_SIDE_LOSSES = ("load_balancing", "z_loss", "mtp", "seq_aux", "global_aux", "indexer", "sop")


class MegatronLog:
    """Reads iterations, which the last rank prints, and memory, which every first data-parallel rank prints."""

    needles: tuple[bytes, ...] | None = (b"iteration",)

    def feed(self, line: str) -> Iterator[LogRecord]:
        if match := _ITERATION.search(line):
            yield _iteration(int(match[1]), _table(line[match.end() :]))
        elif match := _MEMORY.search(line):
            yield _memory(int(match[1]), _table(line[match.end() :]))


def _table(text: str) -> dict[str, str]:
    """Values by name of ``name: value | name: value |``."""
    pairs = (part.rpartition(":") for part in text.split("|"))
    return {" ".join(name.split()).lower(): value.strip() for name, colon, value in pairs if colon}


def _iteration(step: int, table: dict[str, str]) -> LogRecord:
    time_ms = number(table.get("elapsed time per iteration (ms)", ""))
    nan = whole(table.get("number of nan iterations", ""))
    return LogRecord(
        step=step,
        values=present(
            step_time_s=time_ms.times(1e-3) if time_ms else None,
            loss=_loss(table),
            grad_norm=number(table.get("grad norm", "")),
            samples=number(table.get("global batch size", "")),
        ),
        non_finite=f"the log counts {nan} nan iterations" if nan else "",
    )


def _loss(table: dict[str, str]) -> LogValue | None:
    """The loss that is trained on; of several unknown ones the first that is no auxiliary."""
    names = [name for name in _MAIN_LOSSES if name in table]
    names += [name for name in table if name.endswith("loss") and not name.startswith(_SIDE_LOSSES)]
    return number(table[names[0]]) if names else None


def _memory(step: int, table: dict[str, str]) -> LogRecord:
    allocated, reserved = number(table.get("max allocated", "")), number(table.get("max reserved", ""))
    return LogRecord(
        step=step,
        values=present(
            allocated_bytes=allocated.times(MIB) if allocated else None,
            reserved_bytes=reserved.times(MIB) if reserved else None,
        ),
    )
