"""``queue.yaml`` in the home: the device quota of each user, and the weights of the queues.

.. code-block:: yaml

quotas:            # devices that all sweeps of a user may hold together
      alice: 16
      "*": 8           # all other users
    weights:           # shares of the queues relative to each other; default 1
      production: 3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cluster.queue import QueuePolicy
from orchestrator.config.yaml_source import YamlSource, read_yaml
from orchestrator.space.file_types import received
from orchestrator.sweep.snapshot import Home

FILE_NAME = "queue.yaml"
SECTIONS = ("quotas", "weights")


def load_policy(home: Home) -> QueuePolicy:
    """The policy of the home; without a file there are no quotas, and all queues have the same weight.

    Raises:
        ConfigError: the file cannot be used.
    """
    file = home.path / FILE_NAME
    if not file.exists():
        return QueuePolicy()
    source = read_yaml(file)
    if not isinstance(source.data, Mapping):
        raise source.error((), "expected a mapping of sections", f"Use the sections {' and '.join(SECTIONS)}.")
    for name in source.data:
        if name not in SECTIONS:
            raise source.error((name,), "unknown section", f"Valid sections: {' and '.join(SECTIONS)}.")
    return QueuePolicy(quotas=_section(source, "quotas", _num_devices), weights=_section(source, "weights", _weight))


def _section(source: YamlSource, section: str, read: Callable[[Any], Any]) -> dict[str, Any]:
    values = source.data.get(section)
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise source.error((section,), "expected a mapping of names to numbers", "Set a number for each name.")
    found = {}
    for name, value in values.items():
        try:
            found[name] = read(value)
        except ValueError as error:
            raise source.error((section, name), f"expected {error}{received(value)}", None) from None
    return found


def _num_devices(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("a number of devices (an integer, 0 or more)")
    return value


def _weight(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError("a number above 0")
    return float(value)
