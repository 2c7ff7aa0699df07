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

TAG_PREFIX = "mlflow.sharedViewState."
_ORDER = "metrics.`tokens_per_s_per_device`"
_COLUMNS = {
    _ORDER: 175,
    "metrics.`speedup`": 95,
    "metrics.`peak_memory_bytes`": 140,
    "metrics.`step_time_s`": 100,
    "tags.`tc.role`": 85,
    "tags.`tc.gate`": 80,
    "tags.`tc.state`": 110,
    "tags.`tc.failure`": 320,
}
"""Columns of the table in their order, with their widths in pixels."""
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


def view_tags(sweep: str, run_id: str, at_s: float, knobs: Sequence[str]) -> dict[str, str]:
    """Tags of the experiment: a table of the sweep's trials, fastest first, and charts of them.

    Args:
        run_id: the sweep's own run.
        at_s: when the sweep was created.
        knobs: those that vary, for the parallel coordinates.
    """
    at_ms = round(1000 * at_s)
    facets = {
        "searchFilter": f"tags.`mlflow.parentRunId` = '{run_id}' AND tags.`tc.kind` = 'trial'",
        "orderByKey": _ORDER,
        "orderByAsc": False,
    }
    table = {**facets, "selectedColumns": list(_COLUMNS), "columnOrder": list(_COLUMNS), "columnWidths": _COLUMNS}
    charts = {
        **table,
        "compareRunCharts": _charts(knobs),
        "compareRunSections": _SECTIONS,
        "runsHiddenMode": "SHOW_ALL",
    }
    return {
        f"{TAG_PREFIX}{table_view(sweep, run_id)}": _saved(f"{sweep}: trials", at_ms, table),
        f"{TAG_PREFIX}{charts_view(sweep, run_id)}": _saved(f"{sweep}: charts", at_ms, charts),
    }


def _saved(name: str, at_ms: int, state: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "createdAt": at_ms, "updatedAt": at_ms, "state": json.dumps(state)})


def _charts(knobs: Sequence[str]) -> list[dict[str, Any]]:
    speed = {"key": "tokens_per_s_per_device", "type": "METRIC"}
    memory = {"key": "peak_memory_bytes", "type": "METRIC"}
    lines = {"selectedParams": list(knobs), "selectedMetrics": [speed["key"]], "showAllRuns": True}
    return [
        _chart("parallel", "PARALLEL", "Knobs against speed", **lines),
        _chart("pareto", "SCATTER", "Memory against speed", xaxis=memory, yaxis=speed),
        _chart("speed", "BAR", "Tokens per second and device", metricKey=speed["key"]),
    ]


def _chart(uuid: str, kind: str, name: str, **more: Any) -> dict[str, Any]:
    common = {"runsCountToCompare": 100, "metricSectionId": _SECTION, "deleted": False, "isGenerated": False}
    return {"uuid": f"tc-{uuid}", "type": kind, "displayName": name, **common, **more}
