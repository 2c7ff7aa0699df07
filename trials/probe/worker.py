"""Measures the hardware instead of a candidate: matmul, copy, all-reduce and transfer rates of every rank.

A gang runs it like a trial. It also runs under plain torchrun, on gloo or NCCL::

    torchrun --nproc-per-node 2 -m trials.probe.worker
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trials.accelerator.device import installed_kind, open_device
from trials.accelerator.kinds import FAMILIES, DeviceKind
from trials.codec import from_json, to_json
from trials.files import write_json
from trials.outcome import ProgressSink, ignore_progress, probe_report
from trials.parallel.mesh import RankIdentity, process_group
from trials.probe.device import copy_rates, matmul_rates
from trials.probe.links import CollectiveTimer, neighbours_of, own_group
from trials.reports.rates import ProbeSpec, RankRates, probe_spec


def run_rank(spec: Mapping[str, Any], progress: ProgressSink) -> dict[str, Any]:
    """Measure as this process's rank; gives a :class:`RankReport` as JSON with the rates among its findings.

    ``spec`` is a :class:`ProbeSpec` as JSON. Identity and rendezvous are those of :func:`trials.worker.run_rank`.

    Raises:
        CodecError: the JSON is no ProbeSpec; anything else is what torch raised.
    """
    wanted: ProbeSpec = from_json(ProbeSpec, spec)
    progress("starting")
    identity = RankIdentity.from_env()
    device = open_device(wanted.device, identity.local_rank)
    start_s = time.perf_counter()
    with process_group(identity, device):
        rates = measure(wanted, identity, device, progress)
    report = probe_report(rates, world_size=identity.world_size, duration_s=time.perf_counter() - start_s)
    return to_json(report)  # type: ignore[no-any-return]


def measure(spec: ProbeSpec, identity: RankIdentity, device: torch.device, progress: ProgressSink) -> RankRates:
    """All parts of ``spec`` that this gang is large enough for, one after the other."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", identity.world_size))
    num_nodes = identity.world_size // per_node
    values: dict[str, Any] = {}
    progress("warmup")
    if "compute" in spec.parts:
        dist.all_reduce(torch.zeros(1, device=device))  # begin together
        values["matmul_flops_per_s"] = matmul_rates(spec, device)
        progress("measuring", step=1)
        values["copy_bytes_per_s"] = copy_rates(spec, device)
        progress("measuring", step=2)
    if "node" in spec.parts and per_node > 1:
        ranks = [list(range(node * per_node, (node + 1) * per_node)) for node in range(num_nodes)]
        values["node_all_reduce"] = CollectiveTimer(spec, device, own_group(ranks, identity.rank)).all_reduce()
        progress("measuring", step=3)
    if "network" in spec.parts and num_nodes > 1:
        ranks = [list(range(place, num_nodes * per_node, per_node)) for place in range(per_node)]
        values["network_all_reduce"] = CollectiveTimer(spec, device, own_group(ranks, identity.rank)).all_reduce()
        progress("measuring", step=4)
        neighbours = neighbours_of(identity.rank, per_node, num_nodes)
        values["network_transfer"] = CollectiveTimer(spec, device, None).transfers(neighbours)
        progress("measuring", step=5)
    return RankRates(rank=identity.rank, **values)


def main() -> None:
    """Measure under torchrun; rank 0 reports the rates of all ranks."""
    parser = argparse.ArgumentParser(prog="python -m trials.probe.worker", description="Measure this hardware.")
    parser.add_argument("--device", choices=list(FAMILIES), help="what to measure (default: what torch finds)")
    parser.add_argument("--out", type=Path, help="where rank 0 writes the rates as JSON (default: stdout)")
    args = parser.parse_args()
    kind: DeviceKind = args.device or installed_kind()  # a look at devices that is not taken where the user says which
    identity = RankIdentity.from_env()
    device = open_device(kind, identity.local_rank)
    everyone: list[Any] = [None] * identity.world_size
    with process_group(identity, device):
        rates = measure(probe_spec(kind), identity, device, ignore_progress)
        dist.all_gather_object(everyone, to_json(rates))
    if identity.rank == 0:
        write_json(everyone, args.out)


if __name__ == "__main__":
    main()
