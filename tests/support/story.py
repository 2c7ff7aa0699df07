"""Hand-written sweeps for tests: events with sensible defaults, outcomes of every kind."""

from __future__ import annotations

from cluster.hardware.topology import Device
from orchestrator.space.rules import Pruner
from orchestrator.sweep.events import AttemptEnded, AttemptLaunched, Budget, Hardware, SweepCreated, TrialProposed
from trials.outcome import (
    Crashed,
    Diverged,
    Evidence,
    GangLost,
    Infeasible,
    Measured,
    Measurement,
    NotBelieved,
    OutOfMemory,
    StepBreakdown,
    TimedOut,
)
from trials.reports import (
    ExpertLoad,
    Findings,
    GraphReport,
    KernelTuningReport,
    LengthReport,
    LoaderPoint,
    LoaderTuningReport,
    LossScaleState,
    MemoryFormatReport,
    OperatorCast,
    PatternEffect,
)
from trials.spec import Candidate, LlamaModel, TextData, Workload

MODEL = LlamaModel(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_hidden_size=128)
WORKLOAD = Workload(model=MODEL, data=TextData(), seq_length=64, global_batch_size=8)

FOUND = Findings(
    recompute=(
        PatternEffect(pattern="nothing", num_matches=0, saved_bytes=0, recompute_s=0.0),
        PatternEffect(pattern="view", num_matches=4, saved_bytes=0, recompute_s=0.001),
        PatternEffect(pattern=r"feed_forward\.mul", num_matches=8, saved_bytes=2**20, recompute_s=0.002),
    ),
    autocast=(
        OperatorCast(name="softmax", list="white", num_calls=4),
        OperatorCast(name="conv2d", list="black", num_calls=0),
    ),
    loss_scale=LossScaleState(scale=4096.0, num_finite=3, num_overflowed=0, num_skipped=2),
    graph=GraphReport(num_graphs=4, num_recompilations=1, compile_s=12.5, reasons=("shape <changed>",)),
    loader=LoaderTuningReport(
        points=(LoaderPoint(num_workers=2, prefetch_factor=2, batch_time_s=0.004),),
        chosen=LoaderPoint(num_workers=2, prefetch_factor=2, batch_time_s=0.004),
        tuning_time_s=3.0,
        verdict="Waiting for data is 52% of the step.",
    ),
    experts=(ExpertLoad(layer=1, busiest=1.6, num_idle=2, rank=1, busiest_on_rank=2.4),),
    kernel_tuning=KernelTuningReport(num_configurations=3, num_lookups=40, num_hits=30),
    memory_format=MemoryFormatReport(rule="16-bit: nhwc", chosen="nhwc", nchw_s=0.04, nhwc_s=0.03),
    lengths=LengthReport(batching="buckets", padding=0.12, imbalance=0.05, num_shapes=6),
)
"""One finding of every kind."""


def created(**changes):
    fields = {
        "at_s": 0.0,
        "sweep": "story",
        "spec_hash": "0" * 64,
        "workload": WORKLOAD,
        "budget": Budget(max_trials=3),
        "max_concurrent": 1,
        "num_legal": 8,
        "hardware": "1x2 test CPU",
        "devices": Hardware(num_nodes=1, devices_per_node=2, device_name="test CPU", device_kind="cuda"),
        "cluster_kind": "local",
        "fingerprint": {"torch": "2"},
    }
    return SweepCreated(**(fields | changes))


def proposed(trial, candidate=None, at_s=1.0):
    return TrialProposed(
        at_s=at_s,
        trial=trial,
        candidate=candidate or Candidate(micro_batch_size=trial + 1),
        origin="sampler" if trial else "baseline",
        reason="test",
    )


def launched(trial, attempt=0, at_s=2.0, token=None):
    return AttemptLaunched(
        at_s=at_s,
        trial=trial,
        attempt=attempt,
        token=token or f"token-{trial}-{attempt}",
        ranks=(Device(node="host", index=0),),
        num_devices=1,
    )


def ended(trial, outcome, attempt=0, at_s=3.0, token=None):
    return AttemptEnded(
        at_s=at_s, trial=trial, token=token or f"token-{trial}-{attempt}", outcome=outcome, device_seconds=1.0
    )


def measured(step_time_s=0.1, **changes):
    fields = {
        "world_size": 1,
        "tokens_per_step": 512,
        "step_times_s": tuple(step_time_s * factor for factor in (0.98, 0.99, 1.0, 1.0, 1.0, 1.01, 1.02, 1.0)),
        "breakdown": StepBreakdown(data_s=0.01, forward_s=0.03, backward_s=0.04, optimizer_s=0.01, other_s=0.01),
        "peak_allocated_bytes": (100_000_000,),
        "peak_reserved_bytes": (120_000_000,),
        "num_warmup_steps": 2,
        "losses": (5.5, 5.4, 5.3),
        "grad_norms": (1.0, 0.9, 0.8),
        "model_flops_per_token": 1e6,
    }
    return Measured(measurement=Measurement(**(fields | changes)))


def evidence(message="boom"):
    return Evidence(
        message=message, rank=0, node="host", error_type="ValueError", exit_code=1, log_tail=("last words", message)
    )


def failures(message="boom"):
    """One outcome of most failing kinds."""
    return {
        "oom": OutOfMemory(evidence=evidence(message)),
        "infeasible": Infeasible(evidence=evidence(message)),
        "diverged": Diverged(evidence=evidence(message)),
        "timed_out": TimedOut(phase="warmup", evidence=evidence(message)),
        "crashed": Crashed(evidence=evidence(message)),
        "gang_lost": GangLost(evidence=evidence(message)),
    }


def not_believed(message="reported 16 ms, but 400 ms passed"):
    return NotBelieved(num_steps=8, reported_s=0.016, seen_s=0.4, compared="report", evidence=evidence(message))


def ruled_out(candidates, state):
    """Rule by candidate, of all that need at least the memory of a trial that ran out of it."""
    pruner = Pruner(candidates, global_batch_size=state.sweep.workload.global_batch_size)
    witnesses = [trial.candidate for trial in state.trials if isinstance(trial.outcome, OutOfMemory)]
    return {candidates[row]: rule_id for witness in witnesses for row, rule_id in pruner.add(witness).items()}
