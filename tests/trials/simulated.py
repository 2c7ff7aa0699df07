"""Peaks of trials by the dry run: the code that trains, on one rank of a gang that does not exist."""

from __future__ import annotations

import gc

from trials.dryrun.__main__ import run_children
from trials.dryrun.estimate import DryRunRequest
from trials.dryrun.simulate import simulate
from trials.spec import TrialSpec


def simulated_peaks(specs: list[TrialSpec]) -> list[int]:
    """Largest sum of live bytes of rank 0 of each trial, in the manner of an accelerator."""
    # Loaders of other tests, if a child were to collect them, would raise there and keep the child's tensors alive.
    gc.collect()
    requests = [DryRunRequest(spec=spec, rank=0) for spec in specs]
    replies = dict(run_children(requests, simulate, timeout_s=120.0, max_children=2))
    peaks = []
    for i in range(len(requests)):
        run = replies[i].run
        assert run is not None, replies[i].failure
        peaks.append(run.peak_bytes)
    return peaks
