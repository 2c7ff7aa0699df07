"""The course of a virtual gang that trains: start, warm-up, measured steps of known times, a measurement."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from cluster.base import GangLaunch
from cluster.gang.messages import RankProgress
from cluster.virtual.backend import Course, Moment
from trials.codec import from_json
from trials.flops import model_flops_per_token
from trials.outcome import Measured, Measurement, StepBreakdown
from trials.spec import TrialSpec


def trial_spec(launch: GangLaunch) -> TrialSpec:
    """The trial that the gang was launched for.

    Raises:
        ValueError: it is not a trial specification.
    """
    return from_json(TrialSpec, dict(launch.spec))


def training(
    spec: TrialSpec,
    *,
    world_size: int,
    start_s: float,
    warmup_s: float,
    step_times_s: Sequence[float],
    peak_bytes: int,
) -> Course:
    """A gang that trains: ``start_s`` to the first step, warm-up steps of ``warmup_s``, then ``step_times_s``.

    Losses fall alike for every candidate, since only speed and memory are simulated.
    """
    num_warmup = spec.protocol.min_warmup_steps
    moments = [Moment(at_s=start_s, progress=RankProgress(phase="warmup", step=0, step_time_s=None))]
    times = [*itertools.repeat(warmup_s, num_warmup), *step_times_s]
    for number, (at_s, time_s) in enumerate(zip(itertools.accumulate(times, initial=start_s), times, strict=False)):
        is_warmup = number < num_warmup
        progress = RankProgress(
            phase="warmup" if is_warmup else "measuring",
            step=number + 1 if is_warmup else number + 1 - num_warmup,
            step_time_s=time_s,
        )
        moments.append(Moment(at_s=at_s + time_s, progress=progress))
    measurement = Measurement(
        world_size=world_size,
        tokens_per_step=spec.workload.tokens_per_step,
        samples_per_step=spec.workload.global_batch_size,
        step_times_s=tuple(step_times_s),
        breakdown=StepBreakdown(other_s=sum(step_times_s) / len(step_times_s)),
        peak_allocated_bytes=(peak_bytes,) * world_size,
        peak_reserved_bytes=(peak_bytes,) * world_size,
        num_warmup_steps=num_warmup,
        losses=tuple(1.0 + 1.0 / (step + 1) for step in range(len(times))),
        grad_norms=(1.0,) * len(times),
        model_flops_per_token=model_flops_per_token(spec.workload.model, spec.workload.seq_length),
    )
    end_at_s = moments[-1].at_s + 1e-3
    return Course(moments=tuple(moments), end_at_s=end_at_s, outcome=Measured(measurement=measurement))
