"""Log parsers: from a framework's lines to records of steps, with the resolution of the printed digits."""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from trials.script.command import LogFormat

GIB = 1 << 30
MIB = 1 << 20

_NUMBER = re.compile(r"\s*([+-]?)(\d[\d,_]*)?(?:\.(\d*))?(?:[eE]([+-]?\d+))?\s*$")
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "infinity": math.inf}
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)[.,](\d{1,6})")


@dataclass(frozen=True, slots=True)
class LogValue:
    """A number as printed."""

    value: float
    resolution: float = 0.0
    """Twice the largest rounding error; 0: full precision."""

    def times(self, factor: float) -> LogValue:
        """Return the value in another unit."""
        return LogValue(self.value * factor, self.resolution * abs(factor))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """Content of a line about one step."""

    step: int
    """Number of the step as printed; programs count from 0 or from 1."""
    values: Mapping[str, LogValue] = field(default_factory=dict)
    """By name: ``step_time_s`` (mean over the steps since the last record), ``loss``, ``grad_norm``, ``data_s``,
    ``tokens`` and ``samples`` (of the global batch), ``tokens_per_s`` and ``samples_per_s`` (of all devices),
    ``tokens_per_s_per_device``, ``allocated_bytes``, ``reserved_bytes``."""
    at_s: LogValue | None = None
    """When the step ended according to the program, in seconds on its own clock."""
    non_finite: str = ""
    """Why training has diverged, if no loss shows it."""
    is_structured: bool = False
    """Whether it comes from a machine-readable file."""


class LogParser(Protocol):
    """Parser of one stream of lines."""

    @property
    def needles(self) -> tuple[bytes, ...] | None:
        """Substrings; each line that it reads contains one of them. None: it must see all lines."""
        ...

    def feed(self, line: str) -> Iterator[LogRecord]:
        """Yield the records that the line completes; never raise, for any line."""
        ...


class NoParser:
    """For programs whose output has no measurements."""

    needles: tuple[bytes, ...] | None = ()

    def feed(self, line: str) -> Iterator[LogRecord]:
        del line
        return iter(())


def number(text: str) -> LogValue | None:
    """Parse a printed number, with thousands separators, an exponent, or not finite; None if it is none."""
    word = text.strip().lower().lstrip("+-")
    if word in _NOT_FINITE:
        return LogValue(math.copysign(_NOT_FINITE[word], -1.0 if text.strip().startswith("-") else 1.0))
    match = _NUMBER.match(text)
    if match is None or (match[2] is None and not match[3]):
        return None
    digits, decimals, exponent = (match[2] or "0").replace(",", "").replace("_", ""), match[3] or "", match[4] or "0"
    if len(digits) + len(decimals) > 40 or len(exponent) > 4:
        return None
    value = float(f"{match[1]}{digits}.{decimals or 0}e{exponent}")
    return LogValue(value, 10.0 ** min(int(exponent) - len(decimals), 300))


def significant(text: str, digits: int) -> LogValue | None:
    """Parse a number printed with this many significant digits, perhaps without trailing zeros."""
    found = number(text)
    if found is None or not math.isfinite(found.value) or found.value == 0:
        return found
    return LogValue(found.value, 10.0 ** (math.floor(math.log10(abs(found.value))) - digits + 1))


def whole(text: str) -> int | None:
    """Parse a printed whole number."""
    found = number(text)
    return int(found.value) if found is not None and math.isfinite(found.value) else None


def timestamp(line: str) -> LogValue | None:
    """Parse the time of day at the start of a logger's line, in seconds, with its resolution."""
    match = _TIMESTAMP.search(line[:200])
    if match is None:
        return None
    try:
        at = datetime.fromisoformat(match[1])
    except ValueError:
        return None
    return LogValue(at.timestamp() + float(f"0.{match[2]}"), 10.0 ** -len(match[2]))


def present(**values: LogValue | None) -> dict[str, LogValue]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


# DeepSpeed's engine, as of release 0.19.8, with ``steps_per_print: 1`` and ``log_level: info``::
#
#     [2026-11-22 05:42:42,784] [INFO] [logging.py:123:log_dist] [Rank 0] step=8, skipped=0, lr=[0.001], mom=[...]
#     [2026-11-22 05:42:42,784] [INFO] [timer.py:264:stop] epoch=0/micro_step=16/global_step=8,
#     RunningAvgSamplesPerSec=399.15, CurrSamplesPerSec=303.18, MemAllocated=0.49GB, MaxMemAllocated=0.49GB
#
# There is no loss. Its samples/s exclude waiting for data, so times come from the logger's time of day, if the line has
# one.


_STEP = re.compile(r"\bstep=(\d+), skipped=(\d+)")
_TIMER = re.compile(r"\bglobal_step=(\d+), RunningAvgSamplesPerSec=")
_PAIR = re.compile(r"\b(CurrSamplesPerSec|MaxMemAllocated)=([\d.]+)")


class DeepSpeedLog:
    """Reads the step lines, which mark a step's end, and memory from the timer lines."""

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


# Logs of transformers' Trainer and of frameworks based on it: LLaMA-Factory and ms-swift::
#
#     {'loss': '5.544', 'grad_norm': '0.8632', 'learning_rate': '4.5e-05', 'epoch': '0.001953'}          transformers 5
#     {'loss': 5.544, 'grad_norm': 0.8632, 'learning_rate': 4.5e-05, 'epoch': 0.0}                       transformers 4
#     {"current_steps": 10, "total_steps": 10, "loss": 5.4109, "throughput": 7176.33, ...}
#     trainer_log.jsonl
#     {"loss": 5.58893633, "global_step/max_steps": "1/6", "memory(GiB)": 0.0, ...}                      logging.jsonl
#
# Release 5 prints strings of 4 significant digits. Lines have neither a step number nor a time, so they are counted,
# one per step. The Trainer may hide a non-finite loss (``logging_nan_inf_filter``). Its count of tokens is ignored: it
# may include padding, and larger micro-batches have more of it.


_DICT = re.compile(r"\{['\"].*\}")
_BARE = re.compile(r":\s*(-?(?:nan|inf))(?=\s*[,}])")
MAX_CHARS = 8192


class HuggingFaceLog:
    """Reads the dictionaries that the Trainer prints, and the JSON lines files of frameworks based on it."""

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
    """Parse a dictionary in JSON or Python syntax."""
    try:
        if text.startswith('{"'):
            return json.loads(text)
        return ast.literal_eval(_BARE.sub(r": '\1'", text))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _step(table: dict[Any, Any]) -> int | None:
    """Return the step's number if a framework based on the Trainer prints one."""
    for name in ("current_steps", "global_step", "step", "global_step/max_steps"):
        text = str(table.get(name, "")).partition("/")[0].strip()
        if text.isdigit() and len(text) < 12:
            return int(text)
    return None


def _value(value: Any) -> LogValue | None:
    """Parse a number with its digits: strings have 4 significant ones, numbers those that Python prints."""
    if isinstance(value, str):
        return significant(value, 4)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    printed = number(repr(value))
    if printed is None or len(repr(value).replace(".", "").lstrip("0")) >= 9:
        return LogValue(float(value))
    return printed


# The file ``metrics.csv`` of Lightning's CSVLogger, as of release 2.6::
#
#     epoch,step,train_loss
#     0,0,5.69
#
# Steps count from 0. Columns have the names under which the user's module logs; there are also rows of validation. The
# file is rewritten when a column is added. There is no time of a step.


_VALIDATION = ("val", "test", "eval")


class LightningLog:
    """Reads rows by the names in the latest header."""

    needles: tuple[bytes, ...] | None = (b",",)

    def __init__(self) -> None:
        self._names: list[str] = []

    def feed(self, line: str) -> Iterator[LogRecord]:
        if line.count(",") > 200:
            return
        try:
            cells = [cell.strip() for cell in next(csv.reader([line]), [])]
        except csv.Error:
            return
        if "step" in cells:
            self._names = cells
            return
        if not self._names or len(cells) != len(self._names):
            return
        row = dict(zip(self._names, cells, strict=True))
        step, loss = whole(row["step"]), number(row.get(self._loss_name(), ""))
        if step is not None and loss is not None:
            grad_norm = number(row.get("grad_norm", ""))
            yield LogRecord(step=step, values=present(loss=loss, grad_norm=grad_norm), is_structured=True)

    def _loss_name(self) -> str:
        """Return the column of the training loss: per step in preference to per epoch."""
        names = [name for name in self._names if "loss" in name.lower() and not name.lower().startswith(_VALIDATION)]
        names.sort(key=lambda name: (name.endswith("_epoch"), not name.endswith("_step"), len(name)))
        return names[0] if names else ""


# Megatron-LM's training log, from ``megatron/training/training.py`` up to core 0.20::
#
#      [2026-08-22 10:11:12.123456] iteration       10/     100 | consumed samples:  2560 | elapsed time per iteration
#      (ms): 1234.5 | learning rate: 3.0E-04 | global batch size:   256 | lm loss: 7.654321E+00 | grad norm: 1.234 |
#      ... |
#      [Rank 0] (after 1 iterations) memory (MB) | allocated: 1.00 | max allocated: 2.00 | max reserved: 4.00
#
# A table of names and values, in an order that releases and options change. A non-finite loss is left out.


_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|")
_MEMORY = re.compile(r"\(after (\d+) iterations\) memory \(MB\)\s*\|")
_MAIN_LOSSES = ("lm loss", "loss", "reduced_train_loss")
_SIDE_LOSSES = ("load_balancing", "z_loss", "mtp", "seq_aux", "global_aux", "indexer", "sop")


class MegatronLog:
    """Reads iterations, printed by the last rank, and memory, printed by every first data-parallel rank."""

    needles: tuple[bytes, ...] | None = (b"iteration",)

    def feed(self, line: str) -> Iterator[LogRecord]:
        if match := _ITERATION.search(line):
            yield _iteration(int(match[1]), _table(line[match.end() :]))
        elif match := _MEMORY.search(line):
            yield _memory(int(match[1]), _table(line[match.end() :]))


def _table(text: str) -> dict[str, str]:
    """Parse ``name: value | name: value |`` to values by name."""
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
    """Return the loss in training; of several unknown ones, the first that is not auxiliary."""
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


# MindFormers' callbacks, from ``core/callback/callback.py`` (graph) and ``pynative/callback/loss_callback.py`` of 2.1::
#
#     ... - INFO - { Epoch:[  1/  1], step:[   10/  100], loss: 7.123456, per_step_time: 1234ms, lr: 1e-05, overflow
#     cond:
#     False, loss_scale: 1.0, global_norm: 1.23, train_throughput_per_npu: 123.456T
#     ... - INFO - { step:[   10/  100], consumed_samples: 640, global_batch_size: 64, loss:   7.123456, per_step_time:
#     1234ms, lr: 1e-05, grad_norm:   1.234567, throughput: 123.45T }
#
# Times are whole milliseconds. ``msrun`` writes each rank's output to a file. Only the last pipeline stage has a loss.


_EPOCH = re.compile(r"\bEpoch:\s*\[\s*(\d+)\s*/\s*\d+\s*\]", re.IGNORECASE)
_MINDFORMERS_STEP = re.compile(r"\bstep:\s*\[\s*(\d+)\s*/\s*(\d+)\s*\]")
_LOSS = re.compile(r"\bloss:\s*\[?\s*([-+\d.eE]+|-?nan|-?inf)(?=[\s,/\]}])", re.IGNORECASE)
_TIME = re.compile(r"\bper_step_time:\s*([\d.]+)\s*ms")
_NORM = re.compile(r"\b(?:global_norm|grad_norm):\s*\[?\s*([-+\d.eE]+|nan|inf)", re.IGNORECASE)
_SAMPLES = re.compile(r"\bglobal_batch_size:\s*(\d+)")


class MindFormersLog:
    """Reads both modes; in graph mode the step restarts from 1 in every epoch."""

    needles: tuple[bytes, ...] | None = (b"per_step_time",)

    def feed(self, line: str) -> Iterator[LogRecord]:
        if (step := _MINDFORMERS_STEP.search(line)) is None or (time_ms := _TIME.search(line)) is None:
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


# The Trainer of PaddleNLP 2.8 and PaddleFormers 1.2, from ``trainer/trainer.py``::
#
#     [2026-11-22 10:11:12,123] [    INFO] - loss: 10.4912, learning_rate: 3e-05, global_step: 10,
#     max_memory_allocated: 12.3, max_memory_reserved: 14.5, interval_runtime: 1.2, interval_steps_per_second: 0.8
#
# Intervals are since the last line. The first local rank writes it to ``LOG_DIR/workerlog.0``.


_PADDLENLP_PAIR = re.compile(r"\b([a-z_]+):\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?|-?nan|-?inf)\b")


class PaddleLog:
    """Reads the training lines; those of evaluation have no interval."""

    needles: tuple[bytes, ...] | None = (b"global_step:",)

    def __init__(self) -> None:
        self._last = 0

    def feed(self, line: str) -> Iterator[LogRecord]:
        found = dict(_PADDLENLP_PAIR.findall(line))
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


# Custom formats, described by a regular expression with named groups.


_UNITS: dict[str, tuple[str, float]] = {
    "loss": ("loss", 1.0),
    "step_s": ("step_time_s", 1.0),
    "step_ms": ("step_time_s", 1e-3),
    "tokens_per_s": ("tokens_per_s", 1.0),
    "samples_per_s": ("samples_per_s", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "allocated_gib": ("allocated_bytes", float(GIB)),
    "reserved_gib": ("reserved_bytes", float(GIB)),
}
"""Meaning of each group in an expression: the value's name, and the factor to its unit."""


class PatternLog:
    """Reads what the groups of the expression match; without a group ``step``, matching lines are counted.

    Raises:
        ValueError: the expression is invalid or missing.
    """

    needles: tuple[bytes, ...] | None = None

    def __init__(self, log: LogFormat) -> None:
        try:
            self._pattern = re.compile(log.pattern or "")
        except re.error as error:
            raise ValueError(f"invalid regular expression {log.pattern!r}: {error}") from None
        if not log.pattern:
            raise ValueError("the log format 'pattern' requires a pattern")
        self._num_lines = 0

    def feed(self, line: str) -> Iterator[LogRecord]:
        match = self._pattern.search(line[:MAX_CHARS])
        if match is None:
            return
        groups = {name: text for name, text in match.groupdict().items() if text is not None}
        self._num_lines += 1
        step = whole(groups["step"]) if "step" in groups else self._num_lines
        if step is None:
            return
        values: dict[str, LogValue] = {}
        for group, text in groups.items():
            if group in _UNITS and (found := number(text)) is not None:
                name, factor = _UNITS[group]
                values[name] = found.times(factor)
        yield LogRecord(step=step, values=values, at_s=timestamp(line))


# torchtitan's log lines and its structured logs, as of release 0.3.0::
#
#     [titan] 2026-11-22 05:58:37,759 - root - INFO - step:  2  loss:  7.63363  grad_norm:  2.4175
#     memory:  0.00GiB(0.00%)  tps: 443  tflops: 0.02  mfu: 0.01%
#     {"log_type_name": "step_end", "step": 6, "value": 963.6, "time_us": 1795327123583255, ...}
#
# Every rank prints; tokens/s are per device, since the last line. Structured logs have one file per rank, with times in
# microseconds and the spans of a step, but without a loss.


_TORCHTITAN_PAIR = re.compile(r"\b(step|loss|grad_norm|memory|tps):\s*([-+\d.,]+(?:[eE][-+]?\d+)?|-?nan|-?inf)")


class TorchTitanLog:
    """Reads both; spans of a step are summed until the step ends."""

    needles: tuple[bytes, ...] | None = (b"tps:", b'"log_type_name"')

    def __init__(self) -> None:
        self._data_ms = 0.0
        self._tokens: LogValue | None = None

    def feed(self, line: str) -> Iterator[LogRecord]:
        if line.lstrip().startswith("{"):
            yield from self._event(line)
            return
        found = dict(_TORCHTITAN_PAIR.findall(line))
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


# The parser of each framework: lines in, records out.


PARSERS: dict[str, Callable[[LogFormat], LogParser]] = {
    "none": lambda _: NoParser(),
    "pattern": PatternLog,
    "megatron": lambda _: MegatronLog(),
    "torchtitan": lambda _: TorchTitanLog(),
    "deepspeed": lambda _: DeepSpeedLog(),
    "transformers": lambda _: HuggingFaceLog(),
    "accelerate": lambda _: HuggingFaceLog(),
    "llamafactory": lambda _: HuggingFaceLog(),
    "ms_swift": lambda _: HuggingFaceLog(),
    "lightning": lambda _: LightningLog(),
    "mindformers": lambda _: MindFormersLog(),
    "paddlenlp": lambda _: PaddleLog(),
}
"""Parser for each :attr:`trials.script.command.LogFormat.name`; every stream of lines needs a separate instance."""


def make_parser(log: LogFormat) -> LogParser:
    """Create a parser for one stream of lines.

    Raises:
        ValueError: the format is unknown, or its pattern is invalid.
    """
    if (make := PARSERS.get(log.name)) is None:
        raise ValueError(f"unknown log format {log.name!r}; available: {', '.join(sorted(PARSERS))}")
    return make(log)
