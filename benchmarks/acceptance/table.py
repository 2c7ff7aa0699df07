"""Steps of published tables: speeds of a problem's rows relative to its first row, published and predicted."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published.table import PublishedRow, read_table
from cluster.cost.cost_model import Calibrated, CostModel
from cluster.cost.inputs import from_rows, load_prior

CLOSE = 0.1
TIE = 0.01
"""Relative: published speeds closer than this have no order."""


def table_steps(path: Path) -> dict[str, Any]:
    """Predicted steps of every problem with at least two timed rows that can be modelled."""
    problems: dict[tuple[str, str], list[PublishedRow]] = defaultdict(list)
    for row in read_table(path):
        if row.inputs is not None and row.step_time_s and row["quality"] != "C":
            problems[row["source"], row["problem"]].append(row)
    found = [_problem(name, source, rows) for (source, name), rows in problems.items() if len(rows) > 1]
    steps = [step for problem in found for step in problem["steps"][1:]]
    orders = [is_kept for problem in found for is_kept in problem.pop("orders")]
    return {
        "num_problems": len(found),
        "num_rows": len(steps),
        "share_within_10pct": float(np.mean([abs(step["deviation"]) < CLOSE for step in steps])) if steps else None,
        "share_in_order": float(np.mean(orders)) if orders else None,
        "problems": found,
    }


def _problem(name: str, source: str, rows: Sequence[PublishedRow]) -> dict[str, Any]:
    x = from_rows([row.inputs for row in rows if row.inputs is not None])
    priors = (load_prior(kind, without=source) for kind in ("time", "memory"))
    predicted = x.tokens_per_step / CostModel(*map(Calibrated.of_prior, priors)).estimate(x).step_s / x.world_size
    published = x.tokens_per_step / np.array([row.step_time_s for row in rows], dtype=float) / x.world_size
    ratio, published_ratio = predicted / predicted[0], published / published[0]
    pairs = [
        (a, b) for a, b in itertools.combinations(range(len(rows)), 2) if abs(np.log(published[a] / published[b])) > TIE
    ]
    return {
        "problem": name,
        "source": source,
        "orders": [bool((predicted[a] < predicted[b]) == (published[a] < published[b])) for a, b in pairs],
        "steps": [
            {
                "id": row["id"],
                "published_ratio": float(published_ratio[i]),
                "predicted_ratio": float(ratio[i]),
                "deviation": float(ratio[i] / published_ratio[i] - 1),
            }
            for i, row in enumerate(rows)
        ],
    }
