"""Requests to simulate a rank and their replies, as JSON between processes. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trials.spec import Layout, TrialSpec

VERSION = 7
"""Version of the simulation; results of different versions are not comparable."""

Category = Literal["param", "grad", "optimizer", "activation", "temporary", "communication", "input"]
CATEGORIES: tuple[Category, ...] = (
    "param",
    "grad",
    "optimizer",
    "activation",
    "temporary",
    "communication",
    "input",
)
"""Categories of live memory. ``param`` includes buffers; ``optimizer`` includes fp32 masters; ``activation`` is what
the forward pass keeps; ``temporary`` is allocated during the backward pass and the optimiser step; ``communication``
holds gathered parameters, buckets and buffers of collectives."""

BUILD = "build/0/"
"""Place of a peak before the first step."""

Mode = Literal["accelerator", "cpu"]
"""``accelerator``: memory behaviour of CUDA kernels, with the rounding of its caching allocator. ``cpu``: exactly that
of CPU kernels, for comparison with real runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunRequest:
    """Request to simulate ``rank`` in the trial's world."""

    spec: TrialSpec
    rank: int
    mode: Mode = "accelerator"
    crowded: bool = False
    """Whether all tokens of its expert-parallel peers go to this rank's experts, instead of an equal share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Largest total of live memory while the rank was at one place of the step."""

    total_bytes: int
    by_category: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one type, of one rank in one step.

    A call counts the bytes of its larger side on this rank: the output of a gather, the input of a scatter.
    """

    num_calls: int
    num_bytes: int


PassKind = Literal["forward", "backward", "input", "weights"]
"""A backward pass is either one pass, or computes the input's gradients first and those of weights later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRun:
    """One micro-batch passing through a chunk of layers in one direction, and what follows until the next pass."""

    kind: PassKind
    chunk: int
    live: Mapping[str, int]
    """Bytes on the device when it begins, by category."""
    host_bytes: int
    """Bytes of host memory when it begins."""
    peak_host_bytes: int
    flops: Mapping[str, int]
    collectives: Mapping[str, Traffic]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """Costs of a simulated step of one rank in steady state."""

    rank: int
    num_parameters: int
    """Elements stored on this rank."""
    peaks: Mapping[str, Peak]
    """Peaks by place of the step, ``phase/pass/where``: ``backward/3/0.1 first+0`` is the step's third pass, in chunk
    0, in its second run of equal layers, in the first of those layers. Before the first pass it is pass 0.
    :data:`BUILD` is the peak while the rank was built."""
    flops: Mapping[str, int]
    """FLOPs by ``forward``, ``backward`` and ``recompute``."""
    collectives: Mapping[str, Traffic] = field(default_factory=dict)
    passes: tuple[PassRun, ...] = ()
    """Passes of the step, in order."""
    host_bytes: int = 0
    """Peak of offloaded data in host memory."""
    is_upper_bound: bool = False
    """Whether compiled layers were simulated as eager code, which usually keeps more."""
    cpu_s: float = 0.0
    """CPU seconds of the simulation."""

    @property
    def peak_bytes(self) -> int:
        return max(peak.total_bytes for peak in self.peaks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailure:
    """A simulation that did not finish."""

    reason: Literal["infeasible", "error", "timeout", "died"]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Reply to a :class:`DryRunRequest`; exactly one field is set."""

    run: RankRun | None = None
    failure: RunFailure | None = None


# Estimates: memory, FLOPs and collectives of a candidate, as counted by a dry run.


FRAGMENTATION = 0.05
"""Memory that an allocator holds beyond live memory, as a fraction of it. See docs/dry-run.md for the source."""

HOST_FRAGMENTATION = 0.1
"""Locked host memory beyond what a rank uses, as a fraction of it: unused parts of slabs (:mod:`trials.offload`), under
9% for decoders of 16 layers and more."""

CUDA_CONTEXT_BYTES = 512 << 20
"""Device memory of a process without its tensors: context, torch's kernels, cuBLAS's handles. An assumption: some
hundred MiB, depending on the device and on torch's build."""
COMMUNICATOR_BYTES = 200_000_000
"""Buffers of one communicator: HCCL keeps 200 MB for each direction by default (HCCL_BUFFSIZE), NCCL 4 MiB for each
direction and peer of some 20 channels (NCCL_BUFFSIZE)."""


def num_communicators(layout: Layout) -> int:
    """Estimate a rank's communicators: the gang's, and one for every axis along which ranks communicate."""
    sharing = layout.dp_shard if layout.zero_stage else layout.dp_replicate
    same_experts = sharing * layout.cp * layout.tp // layout.ep if layout.ep > 1 else 1
    degrees = (layout.dp, layout.tp, layout.cp, layout.pp, layout.ep, same_experts, layout.world_size)
    of_hybrid = 2 if layout.cp_method == "hybrid" else 0
    return sum(degree > 1 for degree in degrees) + of_hybrid


def context_bytes(layout: Layout) -> int:
    """Return the device memory of a rank of this layout in addition to its tensors."""
    return CUDA_CONTEXT_BYTES + COMMUNICATOR_BYTES * num_communicators(layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """Estimate for one rank of a pipeline stage; its peers on the other mesh axes are equal."""

    stage: int
    rank: int
    peak_bytes: int
    """Largest total of live tensors on the device, while the rank is built or in a step."""
    peak_by_category: Mapping[str, int]
    """Bytes by category at the peak; the sum is ``peak_bytes``."""
    peak_phase: str
    """Time of the peak: ``build``, or the step's phase ``forward``, ``backward``, ``other`` or ``optimizer``."""
    flops: Mapping[str, int]
    """FLOPs per step, by ``forward``, ``backward`` and ``recompute``."""
    collectives: Mapping[str, Traffic]
    """Collectives per step, by type."""
    num_parameters: int
    """Elements stored on the rank."""
    host_bytes: int = 0
    """Peak of the rank's host memory: activations, optimiser states."""
    is_upper_bound: bool = False
    """See :attr:`RankRun.is_upper_bound`."""

    @classmethod
    def of_run(cls, stage: int, run: RankRun) -> StageEstimate:
        """Estimate from a simulated rank; the peak is the largest over building it and all places of a step."""
        place, peak = max(run.peaks.items(), key=lambda item: item[1].total_bytes)
        return cls(
            stage=stage,
            rank=run.rank,
            peak_bytes=peak.total_bytes,
            peak_by_category=peak.by_category,
            peak_phase=place.partition("/")[0],
            flops=run.flops,
            collectives=run.collectives,
            num_parameters=run.num_parameters,
            host_bytes=run.host_bytes,
            is_upper_bound=run.is_upper_bound,
        )

    def needed_bytes(self, fragmentation: float, context_bytes: int) -> int:
        """Return the device memory to reserve for the rank: peak, allocator overhead, and memory outside of tensors."""
        return round(self.peak_bytes * (1.0 + fragmentation)) + context_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunEstimate:
    """Estimate for a candidate, one entry per pipeline stage."""

    stages: tuple[StageEstimate, ...]
    source: Literal["dryrun"] = "dryrun"
    extrapolated: bool = False
    """Whether stages were extrapolated from smaller models instead of simulated in full."""
    cpu_s: float = 0.0
    """CPU seconds of the simulations."""

    @property
    def peak_bytes(self) -> int:
        """Peak of the largest stage."""
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def is_upper_bound(self) -> bool:
        """Whether compiled layers of any stage were simulated as eager code."""
        return any(stage.is_upper_bound for stage in self.stages)

    @property
    def host_bytes(self) -> int:
        """Host memory of a rank of the largest stage."""
        return max(stage.host_bytes for stage in self.stages)

    def needed_bytes(self, fragmentation: float, context_bytes: int) -> int:
        """Return the device memory to reserve for the largest stage, see :meth:`StageEstimate.needed_bytes`."""
        return max(stage.needed_bytes(fragmentation, context_bytes) for stage in self.stages)

    def fits(self, limit_bytes: int, fragmentation: float, context_bytes: int) -> bool:
        """Whether every stage fits in ``limit_bytes`` of device memory."""
        return self.needed_bytes(fragmentation, context_bytes) <= limit_bytes
