"""The report as one self-contained HTML page, by the templates beside this module. The page loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import units, virtual
from orchestrator.errors import ConfigError
from orchestrator.report import profile, words
from orchestrator.report.plots.gallery import Plot, gallery
from orchestrator.report.plots.style import PALETTE
from orchestrator.report.report import Report
from orchestrator.text import plain
from trials.files import write_atomically

if TYPE_CHECKING:
    from jinja2 import Environment


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Where the templates are, and what they may call. Whatever they print is escaped, unless it is markup.

    Jinja is imported only when a page is made: commands that make none do not pay for it.
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
        "file_lines": profile.file_lines,
        "palette": PALETTE,
        "remarks": profile.remarks,
        "shown_tables": profile.shown_tables,
        "units": units,
        "words": words,
        "virtual": virtual,
    }
    return found


def _printable(value: object) -> object:
    """What a template prints, without control characters; markup stays as it is."""
    return plain(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def page_html(report: Report, plots: Mapping[str, Plot] | None = None) -> str:
    """The page. ``plots`` are those of its gallery, where they were made already."""
    from markupsafe import Markup

    plots = gallery(report) if plots is None else plots
    figures = {name: Markup(plot.svg()) for name, plot in plots.items()}
    gates = [name for name in figures if name.startswith("gate-")]
    spelled = {row.number: row.spelled for row in report.trials.rows}
    page = environment().get_template("page.html.j2")
    return page.render(report=report, figures=figures, gate_figures=gates, spelled=spelled)


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
            f"cannot write {path}: {error.strerror}", key="--html", remedy="Name a file in a folder that you may write."
        ) from None
    return path
