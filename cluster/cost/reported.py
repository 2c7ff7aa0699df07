"""Which pipeline rank a published memory peak belongs to, and what it counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from cluster.cost.inputs import Array, CostInputs

Rank = Literal["first", "last", "fullest"]
Scope = Literal["allocated", "reserved", "device"]
"""What a peak counts: memory that the framework's allocator handed out, that it holds, or all that is taken on the
device."""

NOT_COUNTED: dict[Scope, tuple[str, ...]] = {"allocated": ("constant", "fragmentation"), "reserved": ("constant",)}
"""Terms of ``memory.MEMORY_TERMS`` that a scope leaves out."""


@dataclass(frozen=True, slots=True)
class Reported:
    """Whose peak a published figure is, and what it counts."""

    rank: Rank = "fullest"
    scope: Scope = "device"


def reported_as(text: str) -> Reported:
    """The meaning of a figure that its source describes by ``text``.

    No rank named: the first, whose log and whose device's line in the driver's list are what people copy. No tool
    named: what a rank says of itself comes from its framework's allocator, anything else from the driver.
    """
    lower = text.lower()
    if re.search(r"\blast (pipeline )?(rank|stage)", lower):
        rank: Rank = "last"
    elif re.search(r"(?<!not )\b(max\w*|highest|worst|largest) (over|across|among|of all)\b", lower):
        rank = "fullest"
    else:
        rank = "first"
    if "reserved" in lower:
        return Reported(rank, "reserved")
    return Reported(rank, "allocated" if re.search(r"allocated|\btorch\b|\brank\b", lower) else "device")


def is_limit(text: str) -> bool:
    """Whether the figure is what a run was given, not what it took: a pool's size or a set limit."""
    return bool(re.search(r"max_device_memory|\blimit|pre-?allocat|\bpool\b|fraction", text.lower()))


def reported_log_bytes(x: CostInputs, terms: dict[str, Array], reported: Sequence[Reported] | None) -> Array:
    """Logarithm of the figure that would be reported, shape (n,), from all ranks' terms, each (n, stages).

    ``reported``: one entry per row; None: the fullest rank's whole device for all.
    """
    if reported is None:
        return np.asarray(np.log(np.sum(list(terms.values()), axis=0).max(axis=1)))
    return np.asarray(np.log(np.sum(list(reported_terms(x, terms, reported).values()), axis=0)))


def reported_terms(x: CostInputs, terms: dict[str, Array], reported: Sequence[Reported]) -> dict[str, Array]:
    """The terms of the figure that would be reported, each (n,), from all ranks' terms, each (n, stages); those that
    the figure does not count are 0."""
    counted = {name: values.copy() for name, values in terms.items()}
    for scope, names in NOT_COUNTED.items():
        rows = np.flatnonzero([entry.scope == scope for entry in reported])
        for name in names:
            counted[name][rows] = 0.0
    stages = _stages(x, np.sum(list(counted.values()), axis=0), reported)
    return {name: values[np.arange(len(values)), stages] for name, values in counted.items()}


def _stages(x: CostInputs, total: Array, reported: Sequence[Reported]) -> npt.NDArray[np.intp]:
    by_rank = {"first": np.zeros(len(total)), "last": x.pp - 1, "fullest": total.argmax(axis=1)}
    return np.array([by_rank[entry.rank][row] for row, entry in enumerate(reported)], dtype=np.intp)
