"""A rank's profile, as small values that travel with its report. Standard library only.

Numbers are per profiled step: means over the steps, seconds unless the name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

FOLDER = "profile"
"""Name of the folder, inside an attempt's, that takes traces, graphs and memory snapshots."""

FOLDER_VARIABLE = "TUNE_CLUSTER_PROFILE_DIR"
"""Environment variable that tells a rank the folder; without it no files are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """A phase of the step as the host's marks bound it: ``forward``, ``backward``, ``optimizer``, ``data``, ..."""

    name: str
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """An operator of torch; on CUDA also with the kernels that it launched itself."""

    name: str
    num_calls: float
    cpu_s: float
    """Seconds on the host, without the operators that it calls."""
    device_s: float
    """Seconds on the accelerator; 0 on CPUs."""
    share: float
    """Share of the time of all operators, on the accelerator if there is one, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCount:
    """Collectives that one module starts in one step; equal layers are one module, ``layers.*``."""

    module: str
    """Path in the model; ``gradients`` for what reduces them outside of modules, ``step`` for the rest of it."""
    phase: str
    """``forward``, ``backward``, ``recompute`` (of activations in the backward pass) or ``step`` (outside of both)."""
    kind: str
    """Type of collective: ``all_gather``, ``all_reduce``, ``send``, ..."""
    axis: str
    """Mesh axes of its group, joined by underscores, like ``dp_shard``."""
    group_size: int
    num_calls: int
    num_bytes: int
    """Bytes sent by this rank, all calls together; for ``recv``, bytes that arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """Communication that need not be, per step."""

    module: str
    phase: str
    problem: str
    """One sentence for people that says what is redundant."""
    num_calls: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """When most memory is allocated within the profiled steps, on the device trained on."""

    peak_bytes: int
    start_bytes: int
    """Allocated when recording began. On CPUs nobody knows: there it is 0, and the peak counts from then on."""
    phase: str
    """Phase of the step in which the peak came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFile:
    """A file in :data:`FOLDER` of the attempt's folder on the rank's node."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """What the profiler recorded on one rank."""

    rank: int
    stage: int
    """Stage of the pipeline; 0 without one."""
    first_step: int
    last_step: int
    times: StepTimes
    phases: tuple[PhaseTime, ...] = ()
    operators: tuple[OperatorTime, ...] = ()
    """Operators that take most time, the longest first."""
    collectives: tuple[CollectiveCount, ...] = ()
    redundancies: tuple[Redundancy, ...] = ()
    counted: bool = False
    """Whether collectives were counted: if so, an empty ``collectives`` means that there are none."""
    memory: MemoryPeak | None = None
    folder: str = ""
    """Absolute path on the rank's node; empty where no files were written."""
    files: tuple[ProfileFile, ...] = ()
    notes: tuple[str, ...] = ()
    """What people should know, e.g. that something could not be recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step, or of another range of time, on one rank."""

    total_s: float
    computation_s: float
    """Time with an operator (CPU) or a kernel (CUDA) at work."""
    communication_s: float
    """Time with a collective in flight."""
    uncovered_communication_s: float
    """Communication while nothing is computed."""
    free_s: float
    """Time in which nothing is computed or communicated."""

    @property
    def overlap(self) -> float:
        """The share of communication that computation hides, in 0..1; 0 without communication."""
        return 1.0 - self.uncovered_communication_s / self.communication_s if self.communication_s else 0.0
