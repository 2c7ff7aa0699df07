"""User code that reports figures which no training can give, depending on the candidate's micro-batch size."""

import os
import time

from trials.files import to_json
from trials.outcome import RankReport, StepBreakdown


def run_rank(spec, progress):
    """micro_batch_size 1: the truth; 2: a clock that was set back; 4: one that stands still; 8: a slow one."""
    size = spec["candidate"]["micro_batch_size"]
    step_s = {1: 0.1, 2: -0.1, 4: 0.0, 8: 0.001}[size]
    for step in range(1, 4):
        time.sleep(0.1)
        progress("measuring", step=step, step_time_s=step_s)
    report = RankReport(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        tokens_per_step=256,
        step_times_s=(0.1, step_s, 0.1) if step_s < 0 else (step_s,) * 3,
        breakdown=StepBreakdown(forward_s=0.1),
        peak_allocated_bytes=1 << 20,
        peak_reserved_bytes=1 << 20,
        num_warmup_steps=0,
        losses=(3.0, 2.0, 1.0),
        grad_norms=(1.0, 1.0, 1.0),
        model_flops_per_token=6.0,
    )
    return to_json(report)
