"""Published measurements as search problems: one table of distinct configurations each, with times and OOM."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published.table import PublishedRow, read_table
from benchmarks.search.figures import TOLERANCE

KNOBS = (
    *("framework", "precision_detail", "n_gpus", "dp", "zero_stage", "shard_group", "tp", "sp", "pp", "vpp", "cp"),
    *("ep", "micro_batch", "recompute", "recompute_detail", "flash_attn", "compile", "other_flags"),
)
"""Columns that make up a configuration; what else differs within a problem (container release) is averaged over."""
MIN_CONFIGURATIONS = 8
RECOMPUTE_ORDER = {"full": 0, "per-stage": 1, "selective": 2, "": 3, "none": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One point of a problem."""

    knobs: Mapping[str, str]
    """Only those that differ within the problem."""
    time_s: float | None
    """Device-seconds per step (or what stands for it, see ``FIGURES``), median over its rows; None: out of memory."""
    row: PublishedRow

    @property
    def inputs(self) -> Mapping[str, Any] | None:
        return self.row.inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    name: str
    source: str
    model: str
    figure: str
    """What ``time_s`` comes from, one of ``FIGURES``."""
    configurations: tuple[Configuration, ...]

    def __len__(self) -> int:
        return len(self.configurations)

    @property
    def cluster(self) -> tuple[str, ...]:
        """Cluster on which it was measured: sweeps on the same cluster may teach each other."""
        row = self.configurations[0].row
        return tuple(row[name] for name in ("source", "gpu", "gpus_per_node", "interconnect"))

    @property
    def best_s(self) -> float:
        return min(c.time_s for c in self.configurations if c.time_s is not None)

    @property
    def is_trivial(self) -> bool:
        """Whether the baseline is within 2% of the best already: there is nothing to find."""
        start_s = self.configurations[self.baseline].time_s
        return start_s is not None and start_s <= self.best_s * (1 + TOLERANCE)

    @property
    def baseline(self) -> int:
        """Where a careful user starts: runs; plain data parallelism as far as the table has it; the most recompute;
        the smallest micro-batch; no ZeRO, no interleave, no special flags."""
        return min(range(len(self)), key=lambda i: (*_plainness(self.configurations[i]), i))


def _plainness(configuration: Configuration) -> tuple[Any, ...]:
    row = configuration.row
    degrees = [_number(row[name], 1) for name in ("tp", "pp", "cp")]
    return (
        configuration.time_s is None,
        math.prod(degrees),
        RECOMPUTE_ORDER[row["recompute"]],
        _number(row["micro_batch"], 1),
        _number(row["zero_stage"], 0),
        _number(row["vpp"], 1),
        len(row["other_flags"]),
    )


def _number(text: str, default: float) -> float:
    return float(text) if text else default


def load_problems(*tables: Path, min_configurations: int = MIN_CONFIGURATIONS) -> list[Problem]:
    """Problems of the tables with enough distinct configurations, in order of first appearance; rows that several
    tables have count once."""
    by_problem: dict[str, dict[str, PublishedRow]] = defaultdict(dict)
    for row in itertools.chain.from_iterable(map(read_table, tables)):
        by_problem[row["problem"]].setdefault(row["id"], row)
    problems = (_problem(name, list(rows.values())) for name, rows in by_problem.items())
    return [p for p in problems if len(p) >= min_configurations and any(c.time_s for c in p.configurations)]


def _problem(name: str, rows: Sequence[PublishedRow]) -> Problem:
    cost = functools.partial(_cost, usual_devices=_usual_devices(rows))
    figure = max(FIGURES, key=lambda tried: sum(cost(row, tried) is not None for row in rows))
    rows = [row for row in rows if row.out_of_memory or cost(row, figure) is not None]
    varying = [knob for knob in KNOBS if len({row[knob] for row in rows}) > 1]
    groups: dict[tuple[str, ...], list[PublishedRow]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[knob] for knob in varying)].append(row)
    return Problem(
        name=name,
        source=rows[0]["source"] if rows else "",
        model=rows[0]["model"] if rows else "",
        figure=figure,
        configurations=tuple(
            Configuration(
                knobs=dict(zip(varying, values, strict=True)),
                time_s=_median([cost(row, figure) for row in group if not row.out_of_memory], len(group)),
                row=group[0],
            )
            for values, group in groups.items()
        ),
    )


FIGURES = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu")
"""What a problem's configurations are compared by: the figure most of its rows state, the first if equal."""


def _median(costs: Sequence[float | None], num_rows: int) -> float | None:
    """None: some of the rows ran out of memory."""
    return statistics.median(cost for cost in costs if cost is not None) if len(costs) == num_rows else None


def _cost(row: PublishedRow, figure: str, *, usual_devices: float) -> float | None:
    """Device-seconds of a step, or of a unit of work where only a rate is stated; None where the row does not say."""
    if figure == "step_time_s":
        return row.step_time_s * (_number(row["n_gpus"], 0) or usual_devices) if row.step_time_s else None
    rate = _number(row[figure], 0)
    return 1.0 / rate if rate else None


def _usual_devices(rows: Sequence[PublishedRow]) -> float:
    """Devices of the problem, for rows that do not say how many; 1 where none says it."""
    stated = Counter(number for row in rows if (number := _number(row["n_gpus"], 0)))
    return stated.most_common(1)[0][0] if stated else 1.0
