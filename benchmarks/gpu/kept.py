"""Figures in a file: what a call measures joins what earlier ones did, so that nothing is lost by measuring a part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import LEFT_OUT, NAMES
from benchmarks.gpu.report import markdown
from trials.files import write_atomically, write_json

_KEYS = ("name", "shows", "rows", "why", "took_s", "is_whole", "torch", "commit")
"""What is known of every part."""


def num_measured(part: Mapping[str, Any]) -> int:
    """How many rows of a part are not only there to say that they lack."""
    return sum(LEFT_OUT not in row for row in part["rows"])


class Kept:
    """The result by parts, in ``BASE.json`` and ``BASE.md``; in no file where there is no base."""

    def __init__(self, machine: Mapping[str, Any], base: Path | None, *, quick: bool) -> None:
        """Read what is in the file of that name.

        Raises:
            ValueError: the file is no result, or one of another version of this program. Says which.
        """
        self._base = base
        self._parts: dict[str, dict[str, Any]] = {}
        if base is not None and (path := base.with_suffix(".json")).exists():
            try:
                former = json.loads(path.read_text(encoding="utf-8"))
                parts = [{key: part[key] for key in _KEYS} | part for part in former["parts"]]
                self._parts = {part["name"]: part for part in parts if part["name"] in NAMES}
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} holds no figures of this version ({error!r}); move it away") from error
        self._head = {"machine": machine, "quick": quick}

    def is_whole(self, name: str) -> bool:
        """Whether nothing of a part is left to be measured."""
        return name in self._parts and bool(self._parts[name]["is_whole"])

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a part; none where it was not measured."""
        return self._parts[name]["rows"] if name in self._parts else []

    def put(self, part: dict[str, Any]) -> bool:
        """Keep a part in place of the former one, unless that has more rows and this one was cut short."""
        former = self._parts.get(part["name"])
        if former is not None and not part["is_whole"] and num_measured(part) < num_measured(former):
            return False
        self._parts[part["name"]] = part
        self._write()
        return True

    def result(self) -> dict[str, Any]:
        """All that is known, in the order of the parts."""
        return {**self._head, "parts": [self._parts[name] for name in NAMES if name in self._parts]}

    def _write(self) -> None:
        if self._base is None:
            return
        self._base.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.result(), self._base.with_suffix(".json"))
        write_atomically(self._base.with_suffix(".md"), [markdown(self.result()).encode() + b"\n"])
