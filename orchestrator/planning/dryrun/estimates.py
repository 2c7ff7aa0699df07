"""Estimates that dry runs left in the cache, and the rule that rejects candidates whose memory does not fit by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.hardware.topology import Topology
from orchestrator.config.sweep import SweepSpec
from orchestrator.planning.dryrun.cache import DryRunCache
from orchestrator.planning.hardware.request import device_kind, memory_limit_bytes
from orchestrator.space.rules import Case, Rule
from orchestrator.units import num_bytes
from trials.dryrun.estimate import (
    COMMUNICATOR_BYTES,
    CUDA_CONTEXT_BYTES,
    FRAGMENTATION,
    HOST_FRAGMENTATION,
    DryRunEstimate,
    num_communicators,
)
from trials.dryrun.records import Mode
from trials.spec import Candidate

RULE_ID = "dryrun-memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunEstimates:
    """Estimates of a sweep's candidates, with the device memory they are judged by."""

    by_candidate: Mapping[Candidate, DryRunEstimate] = field(default_factory=dict)
    limit_bytes: int | None = None
    """Device memory; None where nobody knows."""
    context_bytes: int = 0
    """Device memory that an idle process holds."""
    communicator_bytes: int = 0
    """Device memory that each of its communicators holds besides."""

    host_limit_bytes: int | None = None
    """Host memory of the smallest node; None where nobody knows, or where devices are the host itself."""
    ranks_per_node: int = 1
    """Ranks that share it, where there are as many."""
    devices_are_host: bool = False
    """Whether ranks compute on processors, whose memory offloading does not spare."""

    def needed_bytes(self, candidate: Candidate) -> int:
        """Estimated peak of a candidate that was counted, with the margin for fragmentation and what is no tensor's."""
        others = self.context_bytes + self.communicator_bytes * num_communicators(candidate.layout)
        estimate = self.by_candidate[candidate]
        return estimate.needed_bytes(FRAGMENTATION, others) + estimate.host_bytes * self.devices_are_host

    def to_json(self, candidate: Candidate) -> dict[str, int]:
        """Peak and need of the candidate; empty where no dry run counted them."""
        estimate = self.by_candidate.get(candidate)
        if estimate is None:
            return {}
        told = {"predicted_peak_bytes": estimate.peak_bytes, "predicted_needed_bytes": self.needed_bytes(candidate)}
        return told | ({"predicted_host_bytes": estimate.host_bytes} if estimate.host_bytes else {})

    def rule(self, baseline: Candidate) -> Rule:
        """A rule that rejects candidates that would not fit, but never the baseline: that one is known to run."""

        def check(case: Case) -> str | None:
            return None if case.candidate == baseline else self._problem(case.candidate)

        return Rule(id=RULE_ID, check=check, concerns=self.by_candidate.keys())

    def _problem(self, candidate: Candidate) -> str | None:
        estimate = self.by_candidate.get(candidate)
        if estimate is None:
            return None
        return self._device_problem(candidate, estimate) or self._host_problem(candidate, estimate)

    def _host_problem(self, candidate: Candidate, estimate: DryRunEstimate) -> str | None:
        num_ranks = min(self.ranks_per_node, candidate.layout.world_size)
        needed = round(estimate.host_bytes * (1.0 + HOST_FRAGMENTATION))
        if self.host_limit_bytes is None or needed * num_ranks <= self.host_limit_bytes:
            return None
        each, limit = num_bytes(needed), num_bytes(self.host_limit_bytes)
        return (
            f"predicted {each} of host memory, with margin, on each of {num_ranks} ranks of a node exceed its {limit}"
        )

    def _device_problem(self, candidate: Candidate, estimate: DryRunEstimate) -> str | None:
        if self.limit_bytes is None:
            return None
        needed = self.needed_bytes(candidate)
        if needed <= self.limit_bytes:
            return None
        peak, margin = num_bytes(estimate.peak_bytes), num_bytes(needed - estimate.peak_bytes)
        return f"predicted peak {peak} with margin {margin} exceeds device memory {num_bytes(self.limit_bytes)}"


def load_estimates(spec: SweepSpec, topology: Topology | None, cache: DryRunCache) -> DryRunEstimates:
    """What ``cache`` holds for the workload on the kind of device its trials run on; exact simulations count first."""
    if spec.script is not None:  # nobody simulates a program
        return DryRunEstimates()
    kind = device_kind(spec, topology)
    nodes = () if topology is None or kind == "cpu" else topology.nodes
    mode: Mode = "cpu" if kind == "cpu" else "accelerator"
    workload = spec.to_workload()
    found = {
        candidate: estimate
        for exact in (False, True)
        for candidate, estimate in cache.of_workload(workload, mode=mode, exact=exact)
    }
    return DryRunEstimates(
        by_candidate=found,
        limit_bytes=memory_limit_bytes(spec, topology),
        host_limit_bytes=min((node.host_memory_bytes for node in nodes if node.host_memory_bytes), default=None),
        ranks_per_node=max((node.num_devices for node in nodes), default=1),
        devices_are_host=mode == "cpu",
        context_bytes=0 if mode == "cpu" else CUDA_CONTEXT_BYTES,
        communicator_bytes=0 if mode == "cpu" else COMMUNICATOR_BYTES,
    )
