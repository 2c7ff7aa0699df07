"""Reads tables of published measurements (CSV) as inputs of the cost model, strict about what is stated.

``inputs.py`` fills in what the model needs and the source does not say. Rows that cannot be modelled carry the
reason.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published.experts import NotModelledError, Numbers
from benchmarks.published.inputs import published_inputs
from benchmarks.published.texts import norms, stated_format
from cluster.cost.cost_model import Reported, is_limit, reported_as
from cluster.cost.inputs import MEMORY, assumed, from_rows
from cluster.cost.peak_memory import stage_bytes
from cluster.cost.work import work_of

_COLUMNS = (
    "id problem source source_ref framework workload model n_params layers hidden ffn heads kv_heads vocab seq_len moe "
    "gpu gpu_mem_GB n_gpus gpus_per_node interconnect precision precision_detail dp zero_stage shard_group tp sp pp "
    "vpp cp ep micro_batch n_micro_batches global_batch recompute recompute_detail flash_attn compile other_flags "
    "step_time_s tokens_per_s_per_gpu tflops_per_gpu flops_kind mfu peak_mem_GB mem_kind mem_per_stage_GB oom derived "
    "arch_from config_from quality notes"
)
COLUMNS = tuple(_COLUMNS.split())
_NUMBERS = (
    "n_params layers hidden ffn heads kv_heads vocab seq_len gpu_mem_GB n_gpus gpus_per_node dp zero_stage shard_group "
    "tp pp vpp cp ep micro_batch n_micro_batches global_batch step_time_s tokens_per_s_per_gpu tflops_per_gpu mfu "
    "peak_mem_GB"
)
NUMBERS = tuple(_NUMBERS.split())
CHOICES = {
    "recompute": ("", "none", "full", "selective", "per-stage"),
    "oom": ("", "true", "false"),
    "quality": ("", "A", "B", "C"),
    "sp": ("", "true", "false"),
}


_LIKE = "source framework gpu precision layers hidden ffn n_gpus dp tp pp cp zero_stage seq_len"
LIKE = tuple(_LIKE.split())
"""Columns in which all runs of one setup agree."""
BATCH = ("micro_batch", "n_micro_batches", "global_batch")


SHARES_RECOMPUTED = (0.25, 0.5, 0.75, 1.0)
"""Shares of layers that are assumed to be recomputed in turn, until a row that says nothing of it fits."""

_OFFLOADED = re.compile(
    r"(?:offload(?:ing)?(?!\w)|\bswap[-_]attention)(?!\W?(?:n|no|false|0|off|none)\b)", re.IGNORECASE
)

LOGS_RESERVED = "torchtitan"
"""Framework whose log line gives what the allocator holds (``max_reserved_gib`` in its ``components/metrics.py``)."""


class TableError(ValueError):
    """The CSV is not such a table; the message names file, line and column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One published run."""

    fields: Mapping[str, str]
    line: int
    inputs: Mapping[str, Any] | None = None
    """One row for ``inputs.from_rows``; None when it cannot be modelled."""
    reason: str
    """Why it cannot be modelled; empty when it can."""
    step_time_s: float | None = None
    peak_bytes: float | None = None
    reported: Reported = field(default_factory=Reported)
    """Which rank ``peak_bytes`` belongs to, and what it counts."""
    out_of_memory: bool | None = None
    """Whether memory ran out; False also where the source gives a figure of the run and does not say. None: unknown."""

    def __getitem__(self, name: str) -> str:
        return self.fields[name]


def read_table(path: Path) -> tuple[PublishedRow, ...]:
    """All rows of a CSV with the published columns.

    Raises:
        TableError: a column is missing or unknown, or a value is no number, negative or not among the choices.
    """
    header, lines = _lines(path)
    if missing := sorted(set(COLUMNS) - set(header)):
        raise TableError(f"{path}: no column {', '.join(missing)}")
    if unknown := sorted(set(header) - set(COLUMNS)):
        raise TableError(f"{path}: unknown column {', '.join(unknown)}")
    for line, fields in lines:
        if None in fields or None in fields.values():
            raise TableError(f"{path}:{line}: {len(COLUMNS)} values expected")
    rows = [
        _row(f"{path}:{line}", line, fields, full)
        for (line, fields), full in zip(lines, _filled([fields for _, fields in lines]), strict=True)
    ]
    return tuple(_assume_recompute(rows))


def read_what_can_be(path: Path) -> tuple[tuple[PublishedRow, ...], list[str]]:
    """Like ``read_table``, but rows with wrong values carry that as the reason why they are not modelled.

    Also notes on the table as a whole: columns that it lacks (read as blank) or has beyond the published ones (left
    out).

    Raises:
        TableError: the table does not tell its rows' sources or problems.
    """
    header, lines = _lines(path)
    if missing := sorted({"source", "problem"} - set(header)):
        raise TableError(f"{path}: no column {', '.join(missing)}")
    lacking, unknown = (sorted(a - b) for a, b in ((set(COLUMNS), set(header)), (set(header), set(COLUMNS))))
    notes = [f"no column {', '.join(lacking)}: read as blank"] if lacking else []
    notes += [f"column {', '.join(unknown)} left out"] if unknown else []
    texts = [{name: fields.get(name) or "" for name in COLUMNS} for _, fields in lines]
    rows = []
    for (line, fields), text, full in zip(lines, texts, _filled(texts), strict=True):
        try:
            if None in fields or None in fields.values():
                raise TableError(f"{len(header)} values expected")
            rows.append(_row("", line, text, full))
        except TableError as error:
            rows.append(PublishedRow(fields=text, line=line, reason=str(error)))
    return tuple(_assume_recompute(rows)), notes


def _lines(path: Path) -> tuple[tuple[str, ...], list[tuple[int, dict[str, str]]]]:
    """Header, and line number and fields of every row; spreadsheets put a byte-order mark before the header.

    Raises:
        TableError: the file is not UTF-8.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            return tuple(reader.fieldnames or ()), [(reader.line_num, fields) for fields in reader]
    except UnicodeDecodeError as error:
        raise TableError(f"{path} is not UTF-8: {error.reason}") from None


def _filled(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The rows with blanks filled on which all others of the same setup agree; the batch only where
    nothing is stated about it.

    A source that gives the micro-batch of one model of a size means it for the fine-tuned ones of that size as well.
    The number format is the one that it states most often of the software.
    """
    setups = defaultdict(list)
    kernels: dict[tuple[str, ...], set[str]] = defaultdict(set)
    formats: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for row in rows:
        setups[tuple(row[name] for name in LIKE)].append(row)
        kernels[row["source"], row["framework"]].add(norms(row))
        formats[row["source"], row["framework"]][row["precision"]] += bool(row["precision"])
    filled: list[Mapping[str, str]] = []
    for row in rows:
        blank = [name for name in ("recompute", "flash_attn") if not row[name]]
        blank += BATCH if not any(row[name] for name in BATCH) else ()
        stated = {name: {other[name] for other in setups[tuple(row[n] for n in LIKE)]} - {""} for name in blank}
        agreed = {name: min(values) for name, values in stated.items() if len(values) == 1}
        if not row["precision"] and not stated_format(row):
            [(agreed["precision"], _)] = formats[row["source"], row["framework"]].most_common(1)
        # Where some rows name a kernel for norms, the others do without.
        silent = "loose" if "fused" in kernels[row["source"], row["framework"]] else ""
        filled.append({**row, **agreed, "norms": norms(row) or silent})
    return filled


def _assume_recompute(rows: Sequence[PublishedRow]) -> list[PublishedRow]:
    """Rows whose source does not say whether activations are recomputed do so in as few layers as make them fit."""
    assumed_rows = list(rows)
    left = [i for i, row in enumerate(rows) if row.inputs is not None and row["recompute"] == ""]
    for share in SHARES_RECOMPUTED:
        if left := [i for i, exceeds in zip(left, _exceed([assumed_rows[i] for i in left]), strict=True) if exceeds]:
            for i in left:
                inputs = rows[i].inputs or {}
                full = [math.ceil(share * count) for count in inputs["stage_layers"]]
                assumed_rows[i] = replace(rows[i], inputs={**inputs, "stage_full": full})
    return assumed_rows


def _exceed(rows: Sequence[PublishedRow]) -> Sequence[bool]:
    """Whether each row needs more memory than its device has."""
    if not rows:
        return []
    x = from_rows([inputs for row in rows if (inputs := row.inputs) is not None])
    terms = stage_bytes(x, work_of(x), assumed(MEMORY))
    peaks = np.max(np.sum(list(terms.values()), axis=0), axis=1)
    return list(peaks > x.memory_bytes)


def _row(place: str, line: int, fields: Mapping[str, str], filled: Mapping[str, str]) -> PublishedRow:
    """A row from what the source says (``fields``), and the same with blanks filled from other rows (``filled``).

    ``place`` names the row in errors.
    """
    for name, allowed in CHOICES.items():
        if fields[name] not in allowed:
            choices = ", ".join(filter(None, allowed))
            raise TableError(_at(place, f"{name} is {fields[name]!r}; allowed: {choices}"))
    numbers = {name: _number(place, name, fields[name]) for name in NUMBERS}
    inputs, reason = None, ""
    try:
        inputs = published_inputs(filled, {name: _number(place, name, filled[name]) for name in NUMBERS})
    except NotModelledError as error:
        reason = str(error)
    peak, reported = _peak(fields, numbers)
    if peak is not None and inputs is not None and is_limit(fields["mem_kind"]):
        inputs, peak = {**inputs, "memory_bytes": min(inputs["memory_bytes"], peak)}, None
    return PublishedRow(
        fields=fields,
        line=line,
        inputs=inputs,
        reason=reason,
        step_time_s=_measured_step(numbers, inputs),
        peak_bytes=peak,
        reported=reported,
        out_of_memory=_outcome(fields),
    )


def _outcome(fields: Mapping[str, str]) -> bool | None:
    """Whether memory ran out; None also for runs with states or activations in host memory, which say nothing of the
    device's."""
    if _OFFLOADED.search(fields["other_flags"]):
        return None
    if fields["oom"]:
        return fields["oom"] == "true"
    ran = any(fields[name] for name in ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "peak_mem_GB"))
    return False if ran else None


def _peak(fields: Mapping[str, str], n: Numbers) -> tuple[float | None, Reported]:
    """Peak bytes and what they count; those of the fullest rank where every stage's figure is listed."""
    reported = reported_as(fields["mem_kind"])
    if reported.scope == "allocated" and LOGS_RESERVED in fields["framework"] and "alloc" not in fields["mem_kind"]:
        reported = replace(reported, scope="reserved")
    if stages := re.findall(r"\d+(?:\.\d+)?", fields["mem_per_stage_GB"]):
        return max(map(float, stages)) * 1e9, replace(reported, rank="fullest")
    return (None if n["peak_mem_GB"] is None else n["peak_mem_GB"] * 1e9), reported


def _at(place: str, message: str) -> str:
    return f"{place}: {message}" if place else message


def _number(place: str, name: str, text: str) -> float | None:
    if text == "":
        return None
    try:
        value = float(text)
    except ValueError:
        raise TableError(_at(place, f"{name} is {text!r}, not a number")) from None
    if not 0 <= value < float("inf"):
        raise TableError(_at(place, f"{name} is {text}; it must be finite and not negative"))
    return value


def _measured_step(n: Numbers, inputs: Mapping[str, Any] | None) -> float | None:
    """Step time; where only tokens/s per device is stated, the time of one modelled step at that rate."""
    if n["step_time_s"]:
        return n["step_time_s"]
    if not n["tokens_per_s_per_gpu"] or inputs is None:
        return None
    dp = inputs["dp_replicate"] * inputs["dp_shard"]
    tokens = inputs["micro_batch_size"] * inputs["num_microbatches"] * dp * inputs["seq_length"]
    return float(tokens / (n["tokens_per_s_per_gpu"] * dp * inputs["tp"] * inputs["pp"] * inputs["cp"]))
