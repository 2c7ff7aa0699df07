"""Matplotlib set up for reports: one style, figures without global state, SVG for files and for pages.

Matplotlib is imported only when something is drawn, to keep other commands fast.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from orchestrator.text import without_controls

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text


# Labels of points that never overlap, and tooltips.


CHAR_IN = 0.6 / 72
"""Width of a character in inches, per point of its size."""
_SIDES = ((-5, 5, "right"), (6, 5, "left"), (6, -10, "left"), (-5, -10, "right"), (0, 9, "center"), (0, -14, "center"))
"""Positions of a label around its point, in order of preference: points to the right and above, alignment."""

_titles: WeakKeyDictionary[Figure, dict[str, tuple[str, Sequence[str]]]] = WeakKeyDictionary()
"""For every figure: id of a group in its SVG -> which elements in it have titles, and the titles."""


def entitle(artist: Artist, titles: Sequence[str], *, element: str = "use") -> None:
    """Add a title to every mark of an artist: markers are ``use`` elements of the SVG, lines of a collection ``path``s;
    for ``g`` the one title is that of the whole artist."""
    figure = artist.get_figure(root=True)
    if figure is None or not titles:
        return
    known = _titles.setdefault(figure, {})
    name = f"titled-{len(known)}"
    artist.set_gid(name)
    known[name] = (element, titles)


def with_titles(svg: str, figure: Figure) -> str:
    """The figure's SVG with a ``title`` in every element that has one."""
    for name, (element, titles) in _titles.get(figure, {}).items():
        start = svg.find(f'<g id="{name}"')
        if start < 0:
            continue
        begin = svg.index(">", start) + 1
        if element == "g":
            svg = f"{svg[:begin]}<title>{html.escape(titles[0])}</title>{svg[begin:]}"
            continue
        waiting = iter(titles)

        def entitled(found: re.Match[str], element: str = element, waiting: object = waiting) -> str:
            return f"{found[1]}><title>{html.escape(next(waiting))}</title></{element}>"  # type: ignore[call-overload]

        svg = svg[:begin] + re.sub(rf"(<{element} (?![^>]*\bid=)[^>]*?)/>", entitled, svg[begin:], count=len(titles))
    return svg


def side_labels(axes: Axes, labels: Sequence[tuple[float, str, str]], size: float = 8) -> None:
    """Draw (height, text, colour) at the right edge, moved apart to avoid overlaps, within the height of the axes if
    possible."""
    figure = axes.get_figure(root=True)
    if figure is None or not labels:
        return
    height_in = figure.get_size_inches()[1] * axes.get_position().height
    room = 1.35 * size / 72 / height_in
    axes.autoscale_view()
    place = axes.transData + axes.transAxes.inverted()
    ordered = sorted(labels, key=lambda label: label[0])
    at = [float(place.transform((0.0, value))[1]) for value, _, _ in ordered]
    for i in range(1, len(at)):
        at[i] = max(at[i], at[i - 1] + room)
    if at[-1] > 1.0:
        at[-1] = max(1.0, room * (len(at) - 1))
        for i in range(len(at) - 2, -1, -1):
            at[i] = min(at[i], at[i + 1] - room)
    for height, (_, text, color) in zip(at, ordered, strict=True):
        axes.annotate(f" {text}", (1.0, height), xycoords="axes fraction", color=color, size=size, va="center")


def point_labels(axes: Axes, labels: Sequence[tuple[float, float, str, str]], size: float = 8) -> list[Text]:
    """Label points (x, y, text, colour), most important first: each next to its point if it overlaps no other text and
    stays inside the figure, else not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    figure = axes.get_figure(root=True)
    if figure is None:
        return []
    axes.autoscale_view()
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    taken = [text.get_window_extent(renderer) for text in figure.findobj(Text) if text.get_text()]
    shown: list[Text] = []
    for x, y, words, color in labels:
        for right, above, side in _SIDES:
            text = axes.annotate(
                words, (x, y), xytext=(right, above), textcoords="offset points", color=color, size=size, ha=side
            )
            box = text.get_window_extent(renderer)
            inside = box.x0 >= 0 and box.x1 <= figure.bbox.width
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                shown.append(text)
                break
            text.remove()
    return shown


def fitting(text: str, room_in: float, size: float) -> str:
    """The text, cut with an ellipsis if it is longer than the available inches."""
    room = max(1, int(room_in / (size * CHAR_IN)))
    return text if len(text) <= room else f"{text[: room - 1]}…"


INK, DIM, LINE, PAPER = "#1b1f24", "#646b75", "#d8dbdf", "#fefefe"
"""Colours of text, secondary text, grid and background."""
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"
VERMILION, PURPLE, YELLOW, SKY, GREY = "#cc3311", "#aa4499", "#b8860b", "#56b4e9", "#9aa0a8"
"""Colours distinguishable for the colour-blind (after Okabe and Ito)."""
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
_ON_WHITE = ' style="background: #fff"'
"""Attribute of an SVG file: viewers with a dark theme would show dark text on black."""
_MAX_TITLE_CHARS = 110


def style() -> AbstractContextManager[None]:
    """A context in which matplotlib draws in the style of reports."""
    import matplotlib as mpl

    warnings.filterwarnings(
        "ignore", r"Glyph \d+ .* missing from", UserWarning
    )  # names may contain characters that no font has
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
    """An empty figure: the finding as its title, a description in the second line."""
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
    """The figure as the text of an SVG file on white; ``name`` makes its ids stable."""
    out = io.StringIO()
    with style():
        import matplotlib as mpl

        mpl.rcParams["svg.hashsalt"] = name
        figure = _printable(draw())
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    label = html.escape(without_controls(str(figure.get_label())))
    drawn = with_titles(out.getvalue(), figure)
    return drawn.replace("<svg", f'<svg role="img" aria-label="{label}"{_ON_WHITE}', 1)


def inlined(svg: str, name: str) -> str:
    """A file of :func:`to_svg` as an element of a page, where ``name`` makes its ids unique and colours follow the
    page's theme."""
    svg = svg[svg.index("<svg") :].replace(_ON_WHITE, "", 1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    prefix = re.sub(r"\W", "-", name)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    for variable, (color, _) in PALETTE.items():
        svg = svg.replace(color, f"var(--{variable})")
    return svg.strip()


def _printable(figure: Figure) -> Figure:
    """The figure with its texts free of control characters, which break SVG."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_text(without_controls(text.get_text()))
    return figure
