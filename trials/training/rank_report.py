"""From what a rank recorded to its report."""

from __future__ import annotations

import torch

from trials import flops
from trials.outcome import RankReport
from trials.parallel.mesh import RankIdentity
from trials.reports.findings import Findings
from trials.spec import TrialSpec
from trials.training.measure import Recording
from trials.training.memory import PeakMemory


def build_report(
    trial: TrialSpec,
    identity: RankIdentity,
    device: torch.device,
    recording: Recording,
    memory: PeakMemory,
    findings: Findings,
) -> RankReport:
    """Fold everything into the one value that leaves the rank."""
    workload, candidate = trial.workload, trial.candidate
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return RankReport(
        rank=identity.rank,
        world_size=identity.world_size,
        tokens_per_step=workload.tokens_per_step,
        step_times_s=tuple(recording.step_times_s),
        breakdown=recording.breakdown(),
        peak_allocated_bytes=memory.allocated_bytes(),
        peak_reserved_bytes=memory.reserved_bytes(),
        num_warmup_steps=len(recording.warmup_times_s),
        losses=tuple(result.loss for result in recording.results),
        grad_norms=tuple(result.grad_norm for result in recording.results),
        model_flops_per_token=flops.model_flops_per_token(workload.model, workload.seq_length),
        peak_flops_per_s=flops.peak_flops_per_s(name, candidate.precision.dtype),
        samples_per_step=workload.global_batch_size,
        num_skipped_steps=sum(result.skipped for result in recording.results),
        compile_s=0.0 if findings.graph is None else findings.graph.compile_s,
        findings=findings,
    )
