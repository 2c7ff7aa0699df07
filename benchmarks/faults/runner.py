"""A runner whose step times depend on the candidate alone, so that the winner of a sweep is known beforehand.

The steps themselves are real: every rank joins a gloo group and takes part in an all-reduce per step. Tests plant
faults through files in the folder ``TUNE_CLUSTER_TEST_STAGE`` names:

``hold`` holds the ``config_key`` of a candidate. Its gang keeps stepping until ``hold`` goes away; ``held`` says so,
with the process id of its last rank.
``hang`` holds a rank: of a gang that is held, this one leaves the collective and never comes back.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trials.files import from_json, to_json
from trials.outcome import RankReport, StepBreakdown
from trials.spec import Candidate, TrialSpec

STAGE = "TUNE_CLUSTER_TEST_STAGE"
NUM_STEPS = 4
PAUSE_S = 0.02


def step_time_s(candidate: Candidate) -> float:
    """Larger gangs and smaller micro-batches are slower per device; no two candidates are alike."""
    return 0.05 + 0.01 * candidate.layout.world_size + 0.003 / candidate.micro_batch_size


def run_rank(spec: Any, progress: Callable[..., None]) -> Any:
    progress("starting")
    trial = from_json(TrialSpec, spec)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=os.environ["TUNE_CLUSTER_RENDEZVOUS"],
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    step = _train(trial.candidate, rank, progress)
    dist.destroy_process_group()
    step_s = step_time_s(trial.candidate)
    return to_json(
        RankReport(
            rank=rank,
            world_size=world_size,
            tokens_per_step=trial.workload.tokens_per_step,
            step_times_s=(step_s,) * NUM_STEPS,
            breakdown=StepBreakdown(forward_s=step_s),
            peak_allocated_bytes=1 << 20,
            peak_reserved_bytes=1 << 20,
            num_warmup_steps=step - NUM_STEPS,
            losses=(2.0,) * step,
            grad_norms=(1.0,) * step,
            model_flops_per_token=6.0,
        )
    )


def _train(candidate: Candidate, rank: int, progress: Callable[..., None]) -> int:
    """Step until nothing holds the gang any more; gives the number of steps, the last of which count."""
    stage = Path(os.environ[STAGE])
    step = 0
    while True:
        step += 1
        progress("warmup", step=step, step_time_s=PAUSE_S)
        if not _is_held(stage, candidate):
            break
        if rank == dist.get_world_size() - 1 and not (stage / "held").exists():
            part = stage / "held.part"
            part.write_text(str(os.getpid()), encoding="ascii")
            part.replace(stage / "held")
        if _text(stage / "hang") == str(rank):
            time.sleep(3600)
        time.sleep(PAUSE_S)
    for number in range(1, NUM_STEPS + 1):
        dist.all_reduce(torch.ones(1))
        progress("measuring", step=number, step_time_s=PAUSE_S)
        time.sleep(PAUSE_S)
    return step + NUM_STEPS


def _is_held(stage: Path, candidate: Candidate) -> bool:
    """Agreed by all ranks, which read the file at different moments."""
    vote = torch.tensor([_text(stage / "hold") == candidate.config_key], dtype=torch.int32)
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
