"""Settings of several files in one table: a name says the file, and where in it: ``run.json:optimizer.params.lr``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.recipes.base import Settings


def tree(settings: Settings, file: str) -> dict[str, Any]:
    """The nested mapping that goes into ``file``."""
    root: dict[str, Any] = {}
    for name, value in settings.items():
        owner, _, path = name.partition(":")
        if owner == file:
            *above, last = path.split(".")
            branch = root
            for key in above:
                branch = branch.setdefault(key, {})
            branch[last] = value
    return root


def settings_of(file: str, content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The inverse of :func:`tree`."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            found |= settings_of(file, value, path)
        else:
            found[f"{file}:{path}"] = value
    return found
