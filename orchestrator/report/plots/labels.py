"""What stands beside and behind points: labels that never cover one another, and titles shown where one points at."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

CHAR_IN = 0.6 / 72
"""Width of a character in inches, per point of its size."""
_SIDES = ((-5, 5, "right"), (6, 5, "left"), (6, -10, "left"), (-5, -10, "right"), (0, 9, "center"), (0, -14, "center"))
"""Places of a label around its point that are tried in turn: points to the right and above, alignment."""

_titles: WeakKeyDictionary[Figure, dict[str, tuple[str, Sequence[str]]]] = WeakKeyDictionary()
"""For every figure: id of a group in its SVG -> which elements in it have titles, and the titles."""


def entitle(artist: Artist, titles: Sequence[str], *, element: str = "use") -> None:
    """Give every mark of an artist its title: markers are ``use`` elements of the SVG, lines of a collection ``path``s;
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
    """Draw (height, text, colour) at the right edge, pushed apart where they would cover one another, all beside the
    axes as long as there is room."""
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
    """Label points (x, y, text, colour), the most important first: each beside its point where it covers no other text
    and stays inside the figure, else not at all."""
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
    """The text, cut with an ellipsis where it is longer than the room in inches."""
    room = max(1, int(room_in / (size * CHAR_IN)))
    return text if len(text) <= room else f"{text[: room - 1]}…"
