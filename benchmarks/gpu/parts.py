"""The parts of the benchmark, in the order in which they run, and what each of them is given. Standard library only.

What a session with a GPU must not miss comes first: starts and faults, then training. The dry run comes last, to see
all that was trained.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class NotHereError(RuntimeError):
    """A part cannot run on this machine or with its packages. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing to measure: a function that runs in a process of its own and returns rows."""

    name: str
    function: str
    """``module:function``, called with a :class:`Setting`."""
    shows: str
    """What its rows show, in a sentence."""
    share_s: float
    """Seconds it may take of the usual budget on one accelerator; of another budget it gets as large a part."""
    least_s: float = 10.0
    """Seconds without which it is not begun."""
    least_devices: int = 1


PARTS = (
    Part(
        name="start",
        function="benchmarks.gpu.host:start",
        shows="What a rank waits for before it begins: the first tensor after a fork, the driver's tool, imports.",
        share_s=40,
    ),
    Part(
        name="cluster",
        function="benchmarks.gpu.faults:on_one_device",
        shows="The local backend: a trial, one out of memory, one killed, one stopped; how each ends and what is left.",
        share_s=65,
        least_s=30,
    ),
    Part(
        name="training",
        function="benchmarks.gpu.training:matrix",
        shows="One device, precision by compilation by micro-batch, each trial by `python -m trials.worker`.",
        share_s=125,
        least_s=30,
    ),
    Part(
        name="plain",
        function="benchmarks.gpu.plain:loops",
        shows="A loop written by hand over the same model, in O1, against the trial: whether trials are as fast.",
        share_s=45,
        least_s=20,
    ),
    Part(
        name="probe",
        function="benchmarks.gpu.training:probe",
        shows="Rates of all devices at once, by `python -m trials.probe`.",
        share_s=35,
    ),
    Part(
        name="compile",
        function="benchmarks.gpu.training:cold_compile",
        shows="The first step with an empty compiler cache, and with a filled one, against the deadline for compiling.",
        share_s=110,
        least_s=30,
    ),
    Part(
        name="optimizer",
        function="benchmarks.gpu.kernels:optimizer",
        shows="One AdamW step over the parameters of the model by each of torch's ways, and its extra memory.",
        share_s=20,
    ),
    Part(
        name="synchronisation",
        function="benchmarks.gpu.kernels:synchronisation",
        shows="A training loop that waits for the device after every step, and one that never does.",
        share_s=15,
    ),
    Part(
        name="weights",
        function="benchmarks.gpu.host:weights",
        shows="Initial weights drawn on the device: values per second, and whether they are those of the CPU.",
        share_s=15,
    ),
    Part(
        name="knobs",
        function="benchmarks.gpu.training:knobs",
        shows="One device, one knob at a time turned away from O2 with the smaller micro-batch.",
        share_s=75,
        least_s=30,
    ),
    Part(
        name="collectives",
        function="benchmarks.gpu.collectives:measure",
        shows="Bandwidth of collectives over all devices, as nccl-tests count it.",
        share_s=40,
        least_devices=2,
    ),
    Part(
        name="layouts",
        function="benchmarks.gpu.training:layouts",
        shows="All devices, one layout after the other.",
        share_s=170,
        least_s=30,
        least_devices=2,
    ),
    Part(
        name="hang",
        function="benchmarks.gpu.faults:hang",
        shows="One rank leaves the others waiting in a collective: who is blamed, and what the flight recorder left.",
        share_s=40,
        least_s=30,
        least_devices=2,
    ),
    Part(
        name="memory",
        function="benchmarks.gpu.memory:dry_runs",
        shows="The dry run's peak against the allocator's, for every trial that was measured before.",
        share_s=40,
    ),
)
NAMES = tuple(part.name for part in PARTS)


LEFT_OUT = "left out"
"""Column of a row that was not measured for lack of time."""
LEAST_S = 10.0
"""Seconds without which nothing is begun that starts processes."""


def rows_path(folder: str | Path, part: str) -> Path:
    """Where the rows of a part are."""
    return Path(folder, f"{part}.rows")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows that a part has reported by now, without one that is being written."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of a part."""

    device: str
    """Kind of the devices, as in :data:`trials.accelerator.kinds.FAMILIES`."""
    num_devices: int
    quick: bool
    """Tiny models and few repetitions."""
    folder: str
    """For files; the rows of part NAME are in ``NAME.rows``, a line of JSON each."""
    part: str
    """Name of the part that gets these settings."""
    until_s: float
    """Wall-clock time at which the part is killed."""

    @property
    def left_s(self) -> float:
        """Seconds that are left, but for what ending takes."""
        return self.until_s - time.time() - 3.0

    @property
    def is_small(self) -> bool:
        """Whether models have to be tiny: on a CPU, or because little time is wanted."""
        return self.quick or self.device == "cpu"

    def tell(self, row: Mapping[str, Any]) -> None:
        """Add a row; rows written before a part is killed are kept."""
        with rows_path(self.folder, self.part).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def lacks_time(self, row: Mapping[str, Any]) -> bool:
        """Whether too little is left to begin what would give this row; says so in its place."""
        if self.left_s >= LEAST_S:
            return False
        self.tell({**row, LEFT_OUT: "no time was left"})
        return True

    def rows_of(self, part: str) -> list[dict[str, Any]]:
        """The rows of an earlier part, from this run or the one that it continues."""
        return read_rows(rows_path(self.folder, part))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def known(name: str) -> Part:
    """The part of this name."""
    return next(part for part in PARTS if part.name == name)
