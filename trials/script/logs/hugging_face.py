"""Logs of transformers' Trainer and of what is built on it: LLaMA-Factory and ms-swift::

    {'loss': '5.544', 'grad_norm': '0.8632', 'learning_rate': '4.5e-05', 'epoch': '0.001953'}          transformers 5
    {'loss': 5.544, 'grad_norm': 0.8632, 'learning_rate': 4.5e-05, 'epoch': 0.0}                       transformers 4
    {"current_steps": 10, "total_steps": 10, "loss": 5.4109, "throughput": 7176.33, ...}               trainer_log.jsonl
    {"loss": 5.58893633, "global_step/max_steps": "1/6", "memory(GiB)": 0.0, ...}                      logging.jsonl

Release 5 prints strings of 4 significant digits. No step number, no time of a step: lines are counted, one for each
step. The Trainer may hide a loss that is not a number (``logging_nan_inf_filter``). Its count of tokens is left alone: it may
include padding, of which larger micro-batches have more.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from trials.script.logs.base import GIB, LogRecord, LogValue, number, present, significant

_DICT = re.compile(r"\{['\"].*\}")
_BARE = re.compile(r":\s*(-?(?:nan|inf))(?=\s*[,}])")
MAX_CHARS = 8192


class HuggingFaceLog:
    """Reads the dictionaries that the Trainer prints, and the files of JSON lines of its descendants."""

    needles: tuple[bytes, ...] | None = (b"'loss'", b'"loss"')

    def __init__(self) -> None:
        self._num_lines = 0

    def feed(self, line: str) -> Iterator[LogRecord]:
        found = _DICT.search(line[:MAX_CHARS])
        if found is None or not isinstance(table := _parsed(found[0]), dict) or "loss" not in table:
            return
        self._num_lines += 1
        memory = _value(table.get("memory(GiB)", table.get("vram_allocated")))
        reserved = _value(table.get("vram_reserved"))
        yield LogRecord(
            step=_step(table) or self._num_lines,
            values=present(
                loss=_value(table["loss"]),
                grad_norm=_value(table.get("grad_norm")),
                allocated_bytes=memory.times(GIB) if memory and memory.value > 0 else None,
                reserved_bytes=reserved.times(GIB) if reserved and reserved.value > 0 else None,
            ),
            is_structured=found[0].startswith('{"'),
        )


def _parsed(text: str) -> Any:
    """The dictionary that the text spells in JSON or in Python."""
    try:
        if text.startswith('{"'):
            return json.loads(text)
        return ast.literal_eval(_BARE.sub(r": '\1'", text))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _step(table: dict[Any, Any]) -> int | None:
    """The step's number where a descendant of the Trainer prints one."""
    for name in ("current_steps", "global_step", "step", "global_step/max_steps"):
        text = str(table.get(name, "")).partition("/")[0].strip()
        if text.isdigit() and len(text) < 12:
            return int(text)
    return None


def _value(value: Any) -> LogValue | None:
    """A number with its digits: a string has 4 significant ones, a number those that Python prints."""
    if isinstance(value, str):
        return significant(value, 4)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    printed = number(repr(value))
    if printed is None or len(repr(value).replace(".", "").lstrip("0")) >= 9:
        return LogValue(float(value))
    return printed
