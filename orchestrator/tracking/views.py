"""Saved views of MLflow's run table: the columns, order and charts with which a sweep's trials open.

By itself the table shows neither metrics nor params. A saved view is a tag of the experiment that the links name
(``viewStateShareKey``); MLflow's own menu lists it, too. The form is that of MLflow 3.17's pages: another version that
does not know it shows its own default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.mlflow_urls import charts_view, table_view
from orchestrator.sweep.events import SweepCreated
from orchestrator.tracking.metrics import CONFIRMED_SPEEDUP, PER_DEVICE, REMEASURED_SPEEDUP, SCORES, SEARCH_SPEEDUP

TAG_PREFIX = "mlflow.sharedViewState."
_COLUMNS = {
    "tags.`tc.role`": 85,
    "tags.`tc.outcome`": 110,
    f"metrics.`{PER_DEVICE}`": 175,
    "metrics.`step_time_ms`": 110,
    "metrics.`num_devices`": 105,
    f"metrics.`{SEARCH_SPEEDUP}`": 125,
    f"metrics.`{REMEASURED_SPEEDUP}`": 155,
    f"metrics.`{CONFIRMED_SPEEDUP}`": 150,
    "metrics.`peak_memory_gib`": 140,
    "tags.`tc.gate`": 80,
    "tags.`tc.outcome_reason`": 320,
}
"""Columns of the table in their order, with their widths in pixels; the score stands first among the metrics."""
_SECTION = "tune-cluster"
_SECTIONS = [
    {
        "uuid": _SECTION,
        "name": "Knobs and speed",
        "display": True,
        "isReordered": False,
        "deleted": False,
        "isGenerated": False,
        "columns": 2,
        "cardHeight": 420,
    }
]


def view_tags(created: SweepCreated, run_id: str, knobs: Sequence[str]) -> dict[str, str]:
    """Tags of the experiment: a table of the sweep's trials, the best by its objective first, and charts of them.

    Args:
        run_id: the sweep's own run.
        knobs: those that vary, for the parallel coordinates.
    """
    sweep, at_ms = created.sweep, round(1000 * created.at_s)
    score = SCORES[created.objective.name]
    role, outcome, *others = _COLUMNS.items()
    columns = dict([role, outcome, (f"metrics.`{score}`", 175), *others])
    facets = {
        "searchFilter": f"tags.`mlflow.parentRunId` = '{run_id}' AND tags.`tc.kind` = 'trial'",
        "orderByKey": f"metrics.`{score}`",
        "orderByAsc": False,
    }
    table = {**facets, "selectedColumns": list(columns), "columnOrder": list(columns), "columnWidths": columns}
    charts = {
        **table,
        "compareRunCharts": _charts(knobs, score),
        "compareRunSections": _SECTIONS,
        "runsHiddenMode": "SHOW_ALL",
    }
    return {
        f"{TAG_PREFIX}{table_view(sweep, run_id)}": _saved(f"{sweep}: trials", at_ms, table),
        f"{TAG_PREFIX}{charts_view(sweep, run_id)}": _saved(f"{sweep}: charts", at_ms, charts),
    }


def _saved(name: str, at_ms: int, state: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "createdAt": at_ms, "updatedAt": at_ms, "state": json.dumps(state)})


def _charts(knobs: Sequence[str], score: str) -> list[dict[str, Any]]:
    speed = {"key": score, "type": "METRIC"}
    memory = {"key": "peak_memory_gib", "type": "METRIC"}
    lines = {"selectedParams": list(knobs), "selectedMetrics": [speed["key"]], "showAllRuns": True}
    return [
        _chart("parallel", "PARALLEL", "Knobs against speed", **lines),
        _chart("pareto", "SCATTER", "Memory against speed", xaxis=memory, yaxis=speed),
        _chart("speed", "BAR", score, metricKey=speed["key"]),
        _curve("curve/step_time_ms", "Step time in ms, step by step"),
        _curve("curve/loss", "Loss"),
        _curve("curve/grad_norm", "Gradient norm"),
        _curve("curve/memory_gib", "Peak memory of the step in GiB"),
    ]


def _curve(metric: str, name: str) -> dict[str, Any]:
    axes = {
        "lineSmoothness": 0,
        "useGlobalLineSmoothing": False,
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "selectedYAxisMetrics": [metric],
    }
    return _chart(metric.replace("/", "-"), "LINE", name, metricKey=metric, selectedMetricKeys=[metric], **axes)


def _chart(uuid: str, kind: str, name: str, **more: Any) -> dict[str, Any]:
    common = {"runsCountToCompare": 100, "metricSectionId": _SECTION, "deleted": False, "isGenerated": False}
    return {"uuid": f"tc-{uuid}", "type": kind, "displayName": name, **common, **more}
