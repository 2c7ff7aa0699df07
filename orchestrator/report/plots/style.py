"""Matplotlib set up for reports: one style, figures without global state, SVG for the page and PNG for MLflow.

Matplotlib is imported only when something is drawn: commands that draw nothing do not pay for it.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from orchestrator.report.plots.labels import with_titles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, DIM, LINE, PAPER = "#1b1f24", "#646b75", "#d8dbdf", "#fefefe"
"""Colours of text, secondary text, grid and background."""
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"
VERMILION, PURPLE, YELLOW, SKY, GREY = "#cc3311", "#aa4499", "#b8860b", "#56b4e9", "#9aa0a8"
"""Colours that the colour-blind can tell apart (after Okabe and Ito)."""
SERIES = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY)
RAMP = ("#dde318", "#7ad151", "#22a884", "#2a788e", "#414487", "#440154")
"""Colours from slow to fast: viridis."""
_DARK_RAMP = ("#5b4a8a", "#4f6fb0", "#2f9fa8", "#35b779", "#90d743", "#fde725")
PALETTE = {
    "ink": (INK, "#e8eaed"),
    "dim": (DIM, "#a0a6af"),
    "line": (LINE, "#3a3f46"),
    "paper": (PAPER, "#16181c"),
    "blue": (BLUE, "#4fa3d9"),
    "orange": (ORANGE, "#f0883e"),
    "green": (GREEN, "#3fbf92"),
    "vermilion": (VERMILION, "#ff7b66"),
    "purple": (PURPLE, "#cc79a7"),
    "yellow": (YELLOW, "#e0b040"),
    "sky": (SKY, "#7cc8f2"),
    "grey": (GREY, "#858b94"),
    **{f"ramp{i}": (color, dark) for i, (color, dark) in enumerate(zip(RAMP, _DARK_RAMP, strict=True))},
}
"""Name -> (on white, on black): on a page the plots use its variables of these names, so that they follow dark mode."""
WIDTH_IN = 8.0
_DPI = 110
_MAX_TITLE_CHARS = 110


def style() -> AbstractContextManager[None]:
    """A context in which matplotlib draws in the style of reports."""
    import matplotlib as mpl

    return mpl.rc_context(
        {
            "font.family": "sans-serif",
            "font.sans-serif": ["DejaVu Sans"],
            "font.size": 9.0,
            "text.color": INK,
            "text.parse_math": False,
            "axes.labelcolor": DIM,
            "axes.edgecolor": LINE,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.formatter.use_mathtext": False,
            "axes.formatter.useoffset": False,
            "axes.axisbelow": True,
            "xtick.color": DIM,
            "ytick.color": DIM,
            "xtick.major.size": 0.0,
            "ytick.major.size": 0.0,
            "grid.color": LINE,
            "grid.linewidth": 0.6,
            "legend.frameon": False,
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "svg.fonttype": "none",
        }
    )


def new_figure(title: str, subtitle: str, height_in: float) -> Figure:
    """An empty figure: the finding as its title, what is shown in a second line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout=None)
    figure.set_label(f"{title}; {subtitle}")
    title = title if len(title) <= _MAX_TITLE_CHARS else f"{title[: _MAX_TITLE_CHARS - 1]}…"
    size = min(11.0, 11.0 * 84 / max(1, len(title)))
    figure.text(0.01, 1 - 0.08 / height_in, title, size=size, weight="bold", va="top", ha="left", color=INK)
    figure.text(0.01, 1 - 0.31 / height_in, subtitle, size=9, va="top", ha="left", color=DIM)
    return figure


def add_axes(
    figure: Figure,
    *,
    left_in: float = 0.75,
    right_in: float = 0.3,
    bottom_in: float = 0.5,
    top_in: float = 0.62,
) -> Axes:
    """Axes below the titles of a new figure, with the given margins in inches."""
    width, height = figure.get_size_inches()
    box = (left_in / width, bottom_in / height, 1 - (left_in + right_in) / width, 1 - (bottom_in + top_in) / height)
    return figure.add_axes(box)


def integer_steps(axes: Axes) -> None:
    """Ticks of the x axis at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def to_svg(draw: Callable[[], Figure], name: str) -> str:
    """The figure as an SVG element for a page; ``name`` keeps its ids apart from those of others there."""
    out = io.StringIO()
    with style():
        import matplotlib as mpl

        mpl.rcParams["svg.hashsalt"] = name
        figure = draw()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    label = html.escape(str(figure.get_label()))
    return _inline(with_titles(out.getvalue(), figure), re.sub(r"\W", "-", name)).replace(
        "<svg", f'<svg role="img" aria-label="{label}"', 1
    )


def to_png(draw: Callable[[], Figure]) -> bytes:
    """The figure as a PNG on white."""
    out = io.BytesIO()
    with style():
        draw().savefig(out, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def _inline(svg: str, prefix: str) -> str:
    """Without prologue, namespaces and metadata, which HTML does not need; ids made the page's own."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    for name, (color, _) in PALETTE.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg.strip()
