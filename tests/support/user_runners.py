"""Runners of users that go wrong: in what they print, raise, report or train."""

import os
import signal
import time

import torch

from trials.files import to_json
from trials.outcome import RankReport, StepBreakdown
from trials.worker import run_rank as real_run_rank

KEY = "STORE_API_KEY"
"""A variable that training itself needs."""


def leaky(spec, progress):
    """micro_batch_size 1: prints all it can see; 2: raises with the key in the message; 4: prints it and is killed."""
    key = os.environ[KEY]
    print("the environment is", dict(os.environ), flush=True)
    os.write(1, f"from a library: https://store/list?sig={key}&n=1\n".encode())
    match spec["candidate"]["micro_batch_size"]:
        case 2:
            try:
                raise PermissionError(f"403 for https://me:{key}@store/data")
            except PermissionError as error:
                raise RuntimeError(f"cannot log in with {key}, \x1b]0;not even\x07 twice") from error
        case 4:
            progress("starting")
            if os.environ["RANK"] == "0":
                print("last words:", repr(key), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
    return real_run_rank(spec, progress)


def faulty(spec, progress):
    """micro_batch_size 1: fine; 2: raises; 4: rank 1 is killed; 8: hangs. Full recompute: the loss becomes NaN."""
    fault = FAULTS.get(spec["candidate"]["micro_batch_size"])
    if fault:
        progress("starting")
        fault(int(os.environ["RANK"]))
    if spec["candidate"]["recompute"]["full"]:
        torch.nn.functional.cross_entropy = _nan_loss
    return real_run_rank(spec, progress)


def always_raises(spec, progress):
    raise ZeroDivisionError("a mistake in the user's code")


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


def lying(spec, progress):
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


def cheating(spec, progress):
    """With a micro-batch size of 4 every other micro-batch is not learned from, which saves half of the work."""
    if spec["candidate"]["micro_batch_size"] == 4:
        _skip_every_other_backward()
    return real_run_rank(spec, progress)


def _skip_every_other_backward():
    from trials.training import loop

    backward, calls = torch.autograd.backward, []

    def broken(*args, **kwargs):
        calls.append(None)
        if len(calls) % 2:
            backward(*args, **kwargs)

    loop.torch.autograd.backward = broken
