"""User code that goes wrong in every way, depending on the candidate's micro-batch size and recompute."""

import os
import signal
import time

import torch

from trials.worker import run_rank as real_run_rank


def run_rank(spec, progress):
    """micro_batch_size 1: fine; 2: raises; 4: rank 1 is killed; 8: hangs. Full recompute: the loss becomes NaN."""
    fault = FAULTS.get(spec["candidate"]["micro_batch_size"])
    if fault:
        progress("starting")
        fault(int(os.environ["RANK"]))
    if spec["candidate"]["recompute"]["full"]:
        torch.nn.functional.cross_entropy = _nan_loss
    return real_run_rank(spec, progress)


def always_raises(spec, progress):
    raise ZeroDivisionError("a mistake in the user's own code")


def _raises(rank):
    raise RuntimeError("a fault of this candidate")


def _is_killed(rank):
    if rank == int(os.environ["WORLD_SIZE"]) - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _hangs(rank):
    time.sleep(3600)


def _nan_loss(logits, *args, **kwargs):
    return logits.float().mean() * float("nan")


FAULTS = {2: _raises, 4: _is_killed, 8: _hangs}
