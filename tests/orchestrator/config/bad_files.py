"""Wrong sweep files, made from a right one, and the error they are refused with."""

import pytest

from orchestrator.config.sweep import load_sweep
from orchestrator.errors import ConfigError
from tests.support.sweep_files import FULL, write

MARK = "wr0ng"


def refusal(folder, content):
    file = write(folder, content)
    with pytest.raises(ConfigError) as caught:
        load_sweep(file)
    assert caught.value.file == str(file)
    return caught.value


def marked_lines(folder):
    return [i for i, line in enumerate((folder / "sweep.yaml").read_text().splitlines(), 1) if MARK in line]


def paths(value, path=()):
    """Paths of everything below ``value``, lists included."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, list) and key > 1 and isinstance(item, int):
            continue  # as the others of the list
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from paths(item, (*path, key))


def at(content, path):
    for part in path:
        content = content[part]
    return content


def dotted(path):
    return ".".join(map(str, path))


ALL_PATHS = list(paths(FULL))
FREE_KEYS = ("select", "params")
"""Mappings whose keys the user makes up."""
MAPPINGS = [
    (),
    *(path for path in ALL_PATHS if isinstance(at(FULL, path), dict) and path[-1] not in FREE_KEYS),
]


def around(path):
    """A right file with the section of FULL that ``path`` leads into and little else: reading all of FULL takes several
    times as long."""
    few = {"name": FULL["name"], "workload": FULL["workload"], "space": {"tp": [1, 2]}}
    return {**few, **{key: FULL[key] for key in path[:1]}}
