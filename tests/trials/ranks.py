"""One function on every rank of a small gloo gang, for tests below the level of a trial."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import traceback
import warnings

from benchmarks.runner.gang import gang, receive


def run_ranks(function, world_size, folder, *args, timeout_s=120):
    """What ``function(*args)`` gives on every rank; it must be importable and its results picklable.

    Raises:
        AssertionError: with the traceback of the first rank that failed.
    """
    results = []
    with gang(_main, world_size, folder / "rendezvous", function, args) as pipes:
        for pipe in pipes:
            fine, value = receive(pipe, timeout_s)
            assert fine, value
            results.append(value)
    return results


def _main(pipe, function, args):
    import torch.distributed as dist

    warnings.simplefilter("error")
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        rendezvous = os.environ["TUNE_CLUSTER_RENDEZVOUS"]
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
        pipe.send((True, function(*args)))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, f"rank {os.environ['RANK']}: {traceback.format_exc()[-4000:]}"))
        os._exit(1)


@contextlib.contextmanager
def planted(owner, name, value):
    """Replace attribute ``name`` of the module or class that ``owner`` names."""
    owner = pkgutil.resolve_name(owner)
    before = getattr(owner, name)
    setattr(owner, name, value(before))
    try:
        yield
    finally:
        setattr(owner, name, before)
