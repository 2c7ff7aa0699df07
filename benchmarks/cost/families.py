"""Published measurements of one or several tables, by family: what one calibration serves."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.published.table import PublishedRow, TableError, read_what_can_be
from cluster.cost.inputs import Array, CostInputs, from_rows

FamilyKey = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Rows of one source, software, device and number format."""

    source: str
    rows: tuple[PublishedRow, ...]
    x: CostInputs

    @property
    def step_s(self) -> Array:
        return np.array([row.step_time_s or np.nan for row in self.rows], dtype=float)

    @property
    def peak_bytes(self) -> Array:
        return np.array([row.peak_bytes or np.nan for row in self.rows], dtype=float)

    @property
    def out_of_memory(self) -> Array:
        return np.array([np.nan if row.out_of_memory is None else row.out_of_memory for row in self.rows], dtype=float)

    @property
    def configurations(self) -> npt.NDArray[np.intp]:
        """Rows with the same inputs of the cost model have the same number."""
        texts = [str(sorted((row.inputs or {}).items())) for row in self.rows]
        return np.unique(texts, return_inverse=True)[1]

    @property
    def doubtful(self) -> bool:
        return self.rows[0]["quality"] == "C"


def add_tables(parser: argparse.ArgumentParser) -> None:
    """The option that names the tables."""
    parser.add_argument(
        "--table", type=Path, action="append", required=True, dest="tables", help="may be given several times"
    )


def read_tables(paths: Sequence[Path], parser: argparse.ArgumentParser) -> tuple[list[PublishedRow], list[str]]:
    """The rows of all tables, and notes on each; ends the program where a table cannot be read."""
    rows: list[PublishedRow] = []
    notes: list[str] = []
    for path in paths:
        try:
            found, remarks = read_what_can_be(path)
        except (OSError, TableError) as error:
            parser.exit(2, f"{error}\n")
        rows += found
        notes += [f"{path.name}: {remark}" for remark in remarks]
    return rows, notes


def family_of(row: PublishedRow) -> FamilyKey:
    """The family of a row: source, software, device and number format."""
    return row["source"], row["framework"], row["gpu"], row["precision"]


def families_of(rows: Iterable[PublishedRow]) -> list[Family]:
    """Modelled rows by family; the doubtful ones (quality C) as families of their own."""
    groups: dict[tuple[Any, ...], list[PublishedRow]] = defaultdict(list)
    for row in rows:
        if row.inputs is not None:
            groups[(*family_of(row), row["quality"] == "C")].append(row)
    return [
        Family(key[0], tuple(members), from_rows([row.inputs for row in members if row.inputs is not None]))
        for key, members in groups.items()
    ]
