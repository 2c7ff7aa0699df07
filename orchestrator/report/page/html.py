"""Small pieces of HTML. Whatever comes from outside passes through :func:`text`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from orchestrator.text import plain


def text(value: object) -> str:
    """Escaped for element content and attributes; control characters made visible."""
    return escape(plain(str(value)), quote=True)


def code(value: object) -> str:
    return f"<code>{text(value)}</code>"


def cell(html: str, kind: str = "", value: object = None) -> str:
    """A cell of a table; ``kind`` is its class, ``value`` what it is sorted by."""
    of = f' class="{kind}"' if kind else ""
    by = f' data-v="{text(value)}"' if value is not None else ""
    return f"<td{of}{by}>{html}</td>"


def row(*cells: str, kind: str = "") -> str:
    of = f' class="{kind}"' if kind else ""
    return f"<tr{of}>{''.join(cells)}</tr>"


def table(rows: Iterable[str], heads: Sequence[str] = (), *, kind: str = "", numbers: Sequence[int] = ()) -> str:
    """``numbers`` are the columns whose headings stand at the right."""
    titles = "".join(f"<th{' class=num' if i in numbers else ''}>{text(head)}</th>" for i, head in enumerate(heads))
    head = f"<thead><tr>{titles}</tr></thead>" if heads else ""
    of = f' class="{kind}"' if kind else ""
    return f'<div class="scroll"><table{of}>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def section(anchor: str, heading: str, body: str) -> str:
    """Empty without a body."""
    return f'<section id="{anchor}"><h2>{text(heading)}</h2>{body}</section>' if body else ""
