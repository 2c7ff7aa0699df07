"""The one entry of a rank: build, train, measure, report.

Also runs under plain torchrun::

    torchrun --nproc-per-node 2 -m trials.worker --spec spec.json --out report.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimisers import it at first use; here a fork server does it once for all ranks

from trials import flops
from trials.codec import from_json, to_json
from trials.data import StepBatches, build_loader, load_tokens
from trials.failure import NonFiniteLoss
from trials.legality import check
from trials.measure import Measurer, Recording
from trials.memory import PeakMemory, limit_device_memory
from trials.mesh import RankIdentity, build_mesh, data_parallel_rank, process_group, select_device
from trials.outcome import Phase, ProgressSink, RankReport
from trials.precision import check_device
from trials.spec import TrialSpec
from trials.step import Trainer


def run_rank(spec: Mapping[str, Any], progress: ProgressSink) -> dict[str, Any]:
    """Run this process's rank of a trial and give its :class:`RankReport` as JSON.

    ``spec`` is a :class:`TrialSpec` as JSON. The rank's identity comes from ``RANK``, ``WORLD_SIZE`` and
    ``LOCAL_RANK``; the rendezvous from ``TUNE_CLUSTER_RENDEZVOUS``, else from torchrun's variables.

    Raises:
        CodecError: the JSON is no TrialSpec.
        InfeasibleSpec, DataError, NonFiniteLoss: see :mod:`trials.failure`; anything else is what torch raised,
            for :func:`trials.failure.classify`.
    """
    trial: TrialSpec = from_json(TrialSpec, spec)
    progress("starting")
    check(trial)
    identity = RankIdentity.from_env()
    wanted = trial.candidate.layout.world_size
    if identity.world_size != wanted:
        raise ValueError(f"the layout needs {wanted} ranks but WORLD_SIZE is {identity.world_size}; launch {wanted}")
    device = select_device(trial.device, identity)
    check_device(trial.candidate.precision, device)
    with process_group(identity, device):
        report = _train(trial, identity, device, progress)
    return to_json(report)  # type: ignore[no-any-return]


def _train(trial: TrialSpec, identity: RankIdentity, device: torch.device, progress: ProgressSink) -> RankReport:
    workload, candidate, protocol = trial.workload, trial.candidate, trial.protocol
    if trial.memory_limit_bytes is not None:
        limit_device_memory(device, trial.memory_limit_bytes)
    memory = PeakMemory(device)
    trainer = Trainer(trial, build_mesh(candidate.layout, device), device)
    dataset = StepBatches(
        load_tokens(workload.data),
        seq_length=workload.seq_length,
        global_batch_size=workload.global_batch_size,
        dp_rank=data_parallel_rank(candidate.layout, identity.rank),
        dp=candidate.layout.dp,
        seed=workload.seed,
        num_steps=protocol.max_warmup_steps + protocol.max_steps,
    )
    loader = build_loader(dataset, candidate.loader, pin_memory=device.type == "cuda")
    recording = Measurer(trainer, iter(loader), progress).run(protocol)
    if all(result.skipped for result in recording.results):
        raise NonFiniteLoss(f"loss scaling skipped all {len(recording.results)} steps; lower the initial scale")
    return _report(trial, identity, device, recording, memory)


def _report(
    trial: TrialSpec, identity: RankIdentity, device: torch.device, recording: Recording, memory: PeakMemory
) -> RankReport:
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
        num_skipped_steps=sum(result.skipped for result in recording.results),
        compile_s=_compile_s(recording) if candidate.kernels.compile != "off" else 0.0,
    )


def _compile_s(recording: Recording) -> float:
    """Seconds of the first step beyond a normal one."""
    first_s = (recording.warmup_times_s or recording.step_times_s)[0]
    return max(0.0, first_s - statistics.median(recording.step_times_s))


def main() -> None:
    """Run one rank from a specification file; rank 0 reports."""
    parser = argparse.ArgumentParser(prog="python -m trials.worker", description="Run one rank of a trial.")
    parser.add_argument("--spec", required=True, type=Path, help="TrialSpec as a JSON file")
    parser.add_argument("--out", type=Path, help="where rank 0 writes its report as JSON (default: stdout)")
    args = parser.parse_args()
    is_first = RankIdentity.from_env().rank == 0
    report = run_rank(json.loads(args.spec.read_text()), _write_progress if is_first else _ignore_progress)
    if not is_first:
        return
    text = json.dumps(report, indent=1) + "\n"
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.write_text(text)


def _write_progress(phase: Phase, *, step: int = 0, step_time_s: float | None = None) -> None:
    took = "" if step_time_s is None else f" {step_time_s:.4f} s"
    sys.stderr.write(f"{phase} {step}{took}\n" if step else f"{phase}\n")


def _ignore_progress(phase: Phase, *, step: int = 0, step_time_s: float | None = None) -> None:
    pass


if __name__ == "__main__":
    main()
