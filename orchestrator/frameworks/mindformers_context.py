"""Context parallelism in MindFormers' configuration files."""

from __future__ import annotations

from typing import Any

from orchestrator.frameworks.spelling import Found, SettingsBuilder, number, row

CP = "parallel_config.context_parallel"
METHOD = "parallel_config.context_parallel_algo"
METHODS = {"all_gather": "colossalai_cp", "ulysses": "ulysses_cp", "hybrid": "hybrid_cp"}
ULYSSES_DEGREE = "parallel_config.ulysses_degree_in_cp"


def _write_method(builder: SettingsBuilder) -> None:
    layout = builder.candidate.layout
    if layout.cp == 1:
        return
    builder.settings[METHOD] = METHODS.get(layout.cp_method, METHODS["all_gather"])
    builder.drop(ULYSSES_DEGREE)
    if layout.cp_method == "hybrid":
        builder.settings[ULYSSES_DEGREE] = layout.ulysses_degree
    if layout.cp_method not in METHODS:
        builder.refuse("layout.cp_method", f"{layout.cp_method} is not supported; exported as all_gather")


def _read_method(found: Found) -> dict[str, Any]:
    ours = {theirs: name for name, theirs in METHODS.items()}
    if found.get(METHOD) not in ours and found.whole("layout.cp", CP) != 1:
        found.unread("layout.cp_method", f"{METHOD}: {found.get(METHOD)}")
    method = ours.get(str(found.get(METHOD)))
    degree = found.whole("layout.ulysses_degree", ULYSSES_DEGREE, 1) if method == "hybrid" else 1
    return {"layout.cp_method": method, "layout.ulysses_degree": degree}


DEGREE_ROW = number("layout.cp", CP)
METHOD_ROW = row(
    ("layout.cp_method", "layout.ulysses_degree"),
    (METHOD, ULYSSES_DEGREE),
    _write_method,
    _read_method,
    matters=lambda candidate: candidate.layout.cp > 1,
)
