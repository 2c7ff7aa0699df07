"""Trials by the dry run: the code that trains, on one rank of a gang that does not exist."""

from __future__ import annotations

import dataclasses
import gc

from benchmarks.dryrun.cases import SMALL, families
from trials.dryrun.__main__ import run_children
from trials.dryrun.estimate import DryRunRequest
from trials.dryrun.simulate import simulate

SHAPE = dataclasses.replace(SMALL.model, hidden_size=128, ffn_hidden_size=352, vocab_size=2048)
FAMILIES = families(dataclasses.replace(SMALL, model=SHAPE, seq_length=128))
"""Smaller than the benchmark's: processors without 16-bit instructions multiply bf16 40 times slower than fp32."""


def replies_of(requests, work=simulate, timeout_s=120.0):
    # Loaders of other tests, if a child were to collect them, would raise there and keep the child's tensors alive.
    gc.collect()
    replies = dict(run_children(requests, work, timeout_s=timeout_s, max_children=2))
    return [replies[i] for i in range(len(requests))]


def simulated_runs(requests):
    runs = []
    for reply in replies_of(requests):
        assert reply.run is not None, reply.failure
        runs.append(reply.run)
    return runs


def simulated_peaks(specs):
    """Largest sum of live bytes of rank 0 of each trial, in the manner of an accelerator."""
    return [run.peak_bytes for run in simulated_runs([DryRunRequest(spec=spec, rank=0) for spec in specs])]
