"""The report as one self-contained HTML page, from the templates in this folder. The page loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import units
from orchestrator.errors import ConfigError, reason_of
from orchestrator.report import descriptions, profile_tables, tables
from orchestrator.report.plots.charts import Plot, gallery
from orchestrator.report.plots.style import PALETTE
from orchestrator.report.report import Report, ShortReport
from orchestrator.report.view import Cell, Column, ShownTable, table_of
from orchestrator.text import plain
from trials.files import write_atomically

if TYPE_CHECKING:
    from jinja2 import Environment


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The templates' environment and functions. Output is escaped, unless it is markup.

    Jinja is imported only when a page is made, to keep other commands fast.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals |= {
        "DASH": units.DASH,
        "file_lines": profile_tables.file_lines,
        "palette": PALETTE,
        "remarks": profile_tables.remarks,
        "result_table": result_table,
        "shown_tables": profile_tables.shown_tables,
        "finalist_table": tables.finalist_table,
        "gate_table": tables.gate_table,
        "judged": tables.judged,
        "units": units,
        "zip": zip,
        "descriptions": descriptions,
        "virtual": units,
    }
    return found


def _printable(value: object) -> object:
    """A template's output without control characters; markup is unchanged."""
    return plain(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def result_table(report: ShortReport) -> ShownTable:
    """The winner or fastest, then the baseline, if measured."""
    columns = (
        Column(title="", name="role", mood="rest"),
        Column(title="", name="trial"),
        Column(title="", name="configuration", min_width=13, is_code=True),
        Column(title="", name="figures", min_width=20, mood="strong"),
        Column(title="", name="memory", is_number=True, mood="rest"),
    )
    rows = (
        (
            one.role,
            tables.trial_cell(one.number),
            Cell(one.configuration, note=one.spelled),
            Cell(report.figures[one.role], flags=tuple(tables.measurement_flags(one.measurement))),
            descriptions.peak_memory(one.measurement),
        )
        for one in report.shown
    )
    return table_of(columns, rows, "The best and the baseline")


def page_html(report: Report, plots: Mapping[str, Plot] | None = None) -> str:
    """The page. ``plots``: existing plots to reuse."""
    from markupsafe import Markup

    plots = gallery(report) if plots is None else plots
    figures = {name: Markup(plot.element) for name, plot in plots.items()}
    gates = [name for name in figures if name.startswith("gate-")]
    page = environment().get_template("page.html.j2")
    return page.render(report=report, figures=figures, gate_figures=gates)


def write_page(report: Report, file: Path | None) -> Path:
    """Write the page to ``file``, or to ``NAME-report.html`` here; the path.

    Raises:
        ConfigError: it cannot be written.
    """
    path = (file or Path(f"{report.summary.sweep}-report.html")).absolute()
    try:
        write_atomically(path, [page_html(report).encode()])
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {reason_of(error)}", key="--html", remedy="Choose a file in a writable directory."
        ) from None
    return path
