"""The files of the pages: jinja2 templates, scripts as they stand, the style of the offline page with more of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.report.page import page as offline

if TYPE_CHECKING:
    from jinja2 import Environment

_FOLDER = Path(__file__).with_name("static")
STYLE = "live.css"
KINDS = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticFile:
    """A script or a style sheet as it is sent."""

    kind: str
    body: bytes


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """The offline page's, which can include its style, with the templates of this room besides."""
    from jinja2 import ChoiceLoader, FileSystemLoader

    base = offline.environment()
    assert base.loader is not None
    return base.overlay(loader=ChoiceLoader([FileSystemLoader(_FOLDER), base.loader]))


def render(template: str, **values: Any) -> str:
    """A page; whatever ``values`` hold is escaped."""
    return _environment().get_template(template).render(**values)


@lru_cache(maxsize=32)
def static(name: str) -> StaticFile | None:
    """The script or style sheet of this name; None where there is none."""
    if name == STYLE:
        return StaticFile(kind=KINDS[".css"], body=render("live.css.j2").encode())
    files = {path.name: path for path in _FOLDER.glob("*.js")}
    if name not in files:
        return None
    return StaticFile(kind=KINDS[".js"], body=files[name].read_bytes())
