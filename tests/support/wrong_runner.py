"""User code with a mistake that makes it faster: a plan to cheat the search with."""

import torch

from trials.worker import run_rank as real_run_rank


def run_rank(spec, progress):
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
