"""Entry point of a trial's rank: builds the model, trains, measures and reports.

Also runs under plain torchrun::

    torchrun --nproc-per-node 2 -m trials.worker --spec spec.json --out report.json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimisers import it on first use; importing it here lets a fork server do so once for all ranks

from trials import torch_support

if _problem := torch_support.problem(torch_support.installed_version()):
    # The imports below would also fail, but name only the first missing package.
    if __name__ == "__main__":
        sys.exit(f"error: {_problem}. {torch_support.REMEDY}")
    raise ImportError(_problem)

from trials import sizes
from trials.accelerator.device import MemoryPeaks, device_name, is_host, open_device
from trials.datasets import (
    Share,
    StepBatches,
    VaryingBatches,
    build_dataset,
    stream_batches,
    tune_loader,
    with_verdict,
)
from trials.failure import NonFiniteLoss
from trials.files import from_json, to_json, write_json
from trials.kernels import CompileBeats, KernelTuner, compilations, forget_compilations, graph_report, kernel_settings
from trials.legality import check
from trials.lengths import num_tokens
from trials.models import check_liger, import_code, own_folder
from trials.outcome import Phase, ProgressSink, RankReport, ignore_progress
from trials.parallel.mesh import RankIdentity, build_mesh, connect, process_group
from trials.precision import check_device, check_float8
from trials.profiling.profiler import Profiler, folder_of_environment
from trials.profiling.traces import check_profile, long_enough
from trials.reports import FOLDER_VARIABLE, Findings, LoaderTuningReport
from trials.sizes import coordinates, data_parallel_rank
from trials.spec import Loader, Protocol, TrialSpec, Workload
from trials.training.loop import Trainer, max_over_ranks
from trials.training.measure import Measurer, PeakMemory, RankDevice, Recording
from trials.training.memory_format import choose_memory_format
from trials.training.tensors import MAX_PASSES, peak_of_step


def run_rank(spec: Mapping[str, Any], progress: ProgressSink) -> dict[str, Any]:
    """Run this process's rank of a trial and return its :class:`RankReport` as JSON.

    ``spec`` is a :class:`TrialSpec` as JSON. The rank's identity comes from ``RANK``, ``WORLD_SIZE`` and
    ``LOCAL_RANK``; the rendezvous from ``TUNE_CLUSTER_RENDEZVOUS``, else from torchrun's variables.

    Raises:
        CodecError: the JSON is not a TrialSpec.
        InfeasibleSpec, DataError, NonFiniteLoss: see :mod:`trials.failure`; other errors of torch pass through, for
            :func:`trials.failure.classify`.
    """
    trial: TrialSpec = from_json(TrialSpec, spec)
    progress("starting")
    check(trial)
    if trial.profile is not None:
        check_profile(trial.profile)
    identity = RankIdentity.from_env()
    wanted = trial.candidate.layout.world_size
    if identity.world_size != wanted:
        raise ValueError(f"the layout requires {wanted} ranks but WORLD_SIZE is {identity.world_size}; launch {wanted}")
    device = open_device(trial.device, identity.local_rank)
    own = RankDevice(trial, device)
    check_device(trial.candidate.precision, device)
    if trial.candidate.precision.is_fp8:
        check_float8(trial.candidate.precision, device)
    if trial.candidate.kernels.fused == "liger":
        check_liger(trial.device)
    beats = CompileBeats(progress)
    with (
        expected_warnings(),
        beats.listening(),
        own_folder(trial.workload.model),
        process_group(identity, device),
        kernel_settings(trial, device),
    ):
        report = _train(trial, identity, own, beats)
    return to_json(report)  # type: ignore[no-any-return]


@contextlib.contextmanager
def expected_warnings() -> Iterator[None]:
    """Suppress torch's warnings about intended behaviour during training."""
    with warnings.catch_warnings():
        for message in (
            # The head's tensor-parallel output is a view; FSDP warns about in-place writes to it, but the loss only
            # reads it.
            "FSDP2-wrapped module .* returned a view tensor",
            # DDP lays out its buckets like the initial weights, and again after the first step.
            "Grad strides do not match bucket view strides",
        ):
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
        yield


def open_dataset(trial: TrialSpec, rank: int) -> StepBatches:
    """Open the part of the workload's data set that ``rank`` reads."""
    candidate = trial.candidate
    share = Share(
        global_batch_size=trial.workload.global_batch_size,
        dp_rank=data_parallel_rank(candidate.layout, rank),
        dp=candidate.layout.dp,
        seed=trial.workload.seed,
        full_batch=candidate.loader.full_batch,
    )
    return build_dataset(trial.workload, share, candidate)


def _train(trial: TrialSpec, identity: RankIdentity, own: RankDevice, progress: ProgressSink) -> RankReport:
    """Build, tune what is tuned before training, warm up and measure; return the rank's report."""
    candidate, device = trial.candidate, own.device
    kernels = candidate.kernels
    import_code(trial.workload.model)
    own.limit_memory()
    if kernels.compile != "off":
        forget_compilations()
    memory = PeakMemory(device)
    place = coordinates(candidate.layout, identity.rank)
    mesh = build_mesh(candidate.layout, device)
    connect(mesh, candidate.layout, device, lambda: progress("starting"))
    trainer = Trainer(trial, mesh, device, place=place)
    _seed_own(trial, trainer, identity)
    dataset = open_dataset(trial, identity.rank) if trainer.reads_inputs or trainer.reads_targets else None
    pin_memory = candidate.loader.pin_memory and not is_host(device)
    loader, loader_report = _tune_loader(candidate.loader, dataset, device, pin_memory=pin_memory)
    batches = None if dataset is None else stream_batches(dataset, loader, pin_memory=pin_memory)
    with KernelTuner([part.model for part in trainer.parts], kernels, device) as tuner:
        with tuner.before_training():
            memory_format, format_report = choose_memory_format(trainer, trial, dataset)
        if format_report is not None:
            memory.restart()
            if kernels.compile != "off":
                forget_compilations()
        profiler = None if trial.profile is None else Profiler(trial, identity.rank, device, folder_of_environment())
        measurer = Measurer(
            trainer,
            batches,
            own.watched(progress),
            memory_format=memory_format,
            before_step=_each(tuner.before_step, own.before_step),
            clock=profiler,
            step_memory=memory.step_bytes,
        )
        with contextlib.nullcontext() if profiler is None else profiler.watching(trainer, tuner.last_step):
            recording = measurer.run(_protocol(trial, tuner.last_step))
        trainer.wait_for_values()
        peaks = memory.peaks()
    if all(result.skipped for result in recording.results):
        raise NonFiniteLoss(f"loss scaling skipped all {len(recording.results)} steps; lower the initial scale")
    num_steps = len(recording.step_times_s)
    findings = dataclasses.replace(
        trainer.findings(num_steps),
        graph=graph_report(compilations()) if kernels.compile != "off" else None,
        loader=_with_loader_verdict(loader_report, recording, device),
        kernel_tuning=tuner.report(),
        memory_format=format_report,
        lengths=dataset.report(_measured(recording)) if isinstance(dataset, VaryingBatches) else None,
        devices=own.health(identity.rank),
        profile=() if profiler is None else profiler.report(lambda: progress("measuring", step=num_steps)),
    )
    num_passes = trial.candidate.num_microbatches(trial.workload.global_batch_size)
    if is_host(device) and num_passes <= MAX_PASSES:  # after all that is recorded, because it is one more step
        peaks = dataclasses.replace(peaks, allocated=peak_of_step(measurer.run_unrecorded, dataset))
        trainer.wait_for_values()
    report = _report(trial, identity, device, recording, peaks, findings)
    return dataclasses.replace(report, device_memory=own.memory())


def _each(*observers: Callable[[int], None]) -> Callable[[int], None]:
    """Pass the number of each step to all observers before it begins."""

    def before_step(number: int) -> None:
        for observe in observers:
            observe(number)

    return before_step


def _seed_own(trial: TrialSpec, trainer: Trainer, identity: RankIdentity) -> None:
    """Seed each part of the batch separately for a custom module, for dropout for example; built-in models draw
    nothing."""
    if trainer.parts[0].model.is_own:
        torch.manual_seed(trial.workload.seed * 1_000_003 + data_parallel_rank(trial.candidate.layout, identity.rank))


def _measured(recording: Recording) -> range:
    """Return the numbers of the measured steps, from 0 over warm-up and measurement."""
    first = len(recording.warmup_times_s)
    return range(first, first + len(recording.step_times_s))


def _tokens_per_step(workload: Workload, recording: Recording) -> int:
    """Return the tokens per measured step, without padding."""
    if not workload.lengths:
        return workload.tokens_per_step
    return round(statistics.fmean(num_tokens(workload, step) for step in _measured(recording)))


def _report(
    trial: TrialSpec,
    identity: RankIdentity,
    device: torch.device,
    recording: Recording,
    memory: MemoryPeaks,
    findings: Findings,
) -> RankReport:
    """Combine all records into the rank's report."""
    workload = trial.workload
    return RankReport(
        rank=identity.rank,
        world_size=identity.world_size,
        tokens_per_step=_tokens_per_step(workload, recording),
        step_times_s=tuple(recording.step_times_s),
        breakdown=recording.breakdown(),
        peak_allocated_bytes=memory.allocated,
        peak_reserved_bytes=memory.reserved,
        num_warmup_steps=len(recording.warmup_times_s),
        losses=tuple(result.loss for result in recording.results),
        grad_norms=tuple(result.grad_norm for result in recording.results),
        model_flops_per_token=sizes.model_flops_per_token(
            workload.model, workload.seq_length, workload.attended_length
        ),
        device_name="" if is_host(device) else device_name(device),
        matmul_format=sizes.matmul_format(trial.candidate),
        samples_per_step=workload.global_batch_size,
        step_memory_bytes=tuple(recording.memory_bytes),
        num_skipped_steps=sum(result.skipped for result in recording.results),
        compile_s=0.0 if findings.graph is None else findings.graph.compile_s,
        findings=findings,
    )


def _tune_loader(
    loader: Loader, dataset: StepBatches | None, device: torch.device, *, pin_memory: bool
) -> tuple[Loader, LoaderTuningReport | None]:
    """Return the loader to train with: the one configured, or the best of a hill climb."""
    if loader.tuning is None:
        return loader, None
    return tune_loader(
        dataset, loader, loader.tuning, pin_memory=pin_memory, agree=lambda own_s: max_over_ranks(own_s, device)
    )


def _with_loader_verdict(
    report: LoaderTuningReport | None, recording: Recording, device: torch.device
) -> LoaderTuningReport | None:
    """Add the loader's verdict, from the rank that waits longest for data: the others wait for it in collectives."""
    if report is None:
        return None
    data_s = max_over_ranks(recording.breakdown().data_s, device)
    step_time_s = statistics.fmean(recording.step_times_s)
    return with_verdict(report, data_s=data_s, step_time_s=step_time_s)


def _protocol(trial: TrialSpec, tuned_until: int) -> Protocol:
    protocol = _warm_until(trial.protocol, tuned_until)
    return protocol if trial.profile is None else long_enough(protocol, trial.profile)


def _warm_until(protocol: Protocol, step: int) -> Protocol:
    """Exclude steps up to this one, in which kernels are tuned, from the measurement."""
    return dataclasses.replace(
        protocol,
        min_warmup_steps=max(protocol.min_warmup_steps, step),
        max_warmup_steps=max(protocol.max_warmup_steps, step),
    )


def main() -> None:
    """Run one rank from a specification file; rank 0 reports."""
    parser = argparse.ArgumentParser(prog="python -m trials.worker", description="Run one rank of a trial.")
    parser.add_argument("--spec", required=True, type=Path, help="TrialSpec as a JSON file")
    parser.add_argument("--out", type=Path, help="where rank 0 writes its report as JSON (default: stdout)")
    parser.add_argument("--profile-dir", type=Path, help="directory for the files of a profile (default: write none)")
    args = parser.parse_args()
    gc.freeze()  # garbage collections skip torch's modules
    if args.profile_dir is not None:
        os.environ[FOLDER_VARIABLE] = str(args.profile_dir.absolute())
    is_first = RankIdentity.from_env().rank == 0
    # gloo before 2.11 prints its peers on stdout, which must hold only the report.
    stdout = os.dup(1)
    os.dup2(2, 1)
    report = run_rank(json.loads(args.spec.read_text()), _write_progress if is_first else ignore_progress)
    os.dup2(stdout, 1)
    if is_first:
        write_json(report, args.out)


def _write_progress(
    phase: Phase, *, step: int = 0, step_time_s: float | None = None, is_compiling: bool = False
) -> None:
    if is_compiling or (step and step_time_s is None):
        return  # a heartbeat
    sys.stderr.write(f"{phase}\n" if step_time_s is None else f"{phase} {step} {step_time_s:.4f} s\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo threads may still be releasing tensors; they abort if the interpreter is already shutting down.
    os._exit(0)
