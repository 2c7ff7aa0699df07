"""The backend ``replay``: a cluster that answers from a table of published measurements, in virtual time.

The table's rows of one problem (same model, cluster, sequence length, global batch) are the search space. A candidate
is looked up by what the table says of a row; where the row is silent (blank), any value is right. Rows that a candidate
cannot tell apart (container releases, flags) are repeated measurements of it.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from cluster.base import GangLaunch
from cluster.cost.published.table import PublishedRow, read_table
from cluster.hardware.topology import Topology, uniform_topology
from cluster.virtual.backend import Course, VirtualCluster, failure
from cluster.virtual.training import training, trial_spec
from trials.spec import Candidate, Counts, TrialSpec

START_S = 30.0
"""Seconds from a launch to its first step."""
UNKNOWN_MEMORY_BYTES = 80 * 10**9
"""Memory of a device of which the table does not say it."""

SCALARS: dict[str, Callable[[Candidate], int]] = {
    "dp": lambda c: c.layout.dp,
    "tp": lambda c: c.layout.tp,
    "pp": lambda c: c.layout.pp,
    "cp": lambda c: c.layout.cp,
    "vpp": lambda c: c.layout.num_virtual_stages,
    "zero_stage": lambda c: c.layout.zero_stage,
    "shard_group": lambda c: c.layout.dp_shard,
    "micro_batch": lambda c: c.micro_batch_size,
}
"""Columns that hold a number, and where a candidate has it."""


class ReplayCluster(VirtualCluster):
    """A :class:`cluster.base.Cluster` of one problem of a published table.

    Args:
        table: CSV with the published columns.
        problem: the value of its ``problem`` column.
        noise: standard deviation of the logarithm of each step time; 0 repeats the table's median.

    Raises:
        ValueError: the table has no such problem.
        cluster.cost.published.table.TableError: the table is malformed.
    """

    def __init__(self, table: Path, problem: str, *, noise: float = 0.0, seed: int = 0) -> None:
        self._rows = tuple(row for row in read_table(table) if row["problem"] == problem)
        if not self._rows:
            raise ValueError(f"{table} has no problem {problem!r}")
        self._noise = noise
        self._rng = random.Random(seed)
        super().__init__(_topology(self._rows), self._course)

    @property
    def rows(self) -> tuple[PublishedRow, ...]:
        """The problem's rows, in the table's order."""
        return self._rows

    def _course(self, launch: GangLaunch) -> Course:
        try:
            spec = trial_spec(launch)
            rows = self._found(spec)
        except ValueError as error:
            refused = failure(launch, "infeasible", str(error), rank=0, at_s=START_S)
            return Course(moments=(), end_at_s=START_S, outcome=refused)
        if any(row.out_of_memory for row in rows):
            message = f"out of memory, says row {rows[0]['id']}"
            gone = failure(launch, "oom", message, rank=0, phase="warmup", at_s=START_S)
            return Course(moments=(), end_at_s=START_S, outcome=gone)
        return self._training(launch, spec, rows)

    def _found(self, spec: TrialSpec) -> list[PublishedRow]:
        rows = [row for row in self._rows if matches(row, spec.candidate, spec.workload.num_layers)]
        rows = [row for row in rows if row.out_of_memory or row.step_time_s is not None]
        if not rows:
            raise ValueError("the table has no measurement of this configuration")
        return rows

    def _training(self, launch: GangLaunch, spec: TrialSpec, rows: list[PublishedRow]) -> Course:
        step_s = statistics.median(row.step_time_s for row in rows if row.step_time_s is not None)
        peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None]
        num_steps = spec.protocol.num_steps
        return training(
            spec,
            world_size=len(launch.placement.ranks),
            start_s=START_S,
            warmup_s=step_s,
            step_times_s=[step_s * self._rng.lognormvariate(0.0, self._noise) for _ in range(num_steps)],
            peak_bytes=int(max(peaks, default=0)),
        )


def matches(row: PublishedRow, candidate: Candidate, num_layers: int) -> bool:
    """Whether the row measured the candidate, as far as the row says."""
    for column, value_of in SCALARS.items():
        if row[column] and float(row[column]) != value_of(candidate):
            return False
    stated_sp = {"true": True, "false": False}.get(row["sp"])
    if stated_sp is not None and stated_sp != candidate.layout.sequence_parallel:
        return False
    if row["recompute"] and row["recompute"] != recompute_kind(candidate, num_layers):
        return False
    return not row["compile"] or (row["compile"] == "yes") == (candidate.kernels.compile != "off")


def recompute_kind(candidate: Candidate, num_layers: int) -> str:
    """The table's word for the candidate's recompute."""
    recompute = candidate.recompute
    num_full = _total(recompute.full)
    if num_full == num_layers:
        return "full"
    if num_full:
        return "per-stage"
    return "selective" if recompute.selective else "none"


def _total(counts: Counts) -> int:
    return sum(sum(row) for row in counts)


def _topology(rows: Iterable[PublishedRow]) -> Topology:
    """As many nodes as the largest row needs."""
    rows = list(rows)
    num_devices = max(int(float(row["n_gpus"] or 1)) for row in rows)
    per_node = min(num_devices, int(float(rows[0]["gpus_per_node"] or num_devices)))
    per_node = max(per_node, *(int(float(row["tp"] or 1)) for row in rows))  # racks joined by fast links
    memory = float(rows[0]["gpu_mem_GB"] or 0) * 1e9 or UNKNOWN_MEMORY_BYTES
    return uniform_topology(-(-num_devices // per_node), per_node, device_name=rows[0]["gpu"], memory_bytes=int(memory))
